//! `ztrain fork`.

use std::path::PathBuf;

use contract::terminal::{name, print_raw};
use contract::{Result, shell, words};
use kernels::runtime::{self, RuntimeOptions};
use serde_json::json;
use store::Location;
use tools::fork::{ForkRequest, Forked, fork};

use super::whatif::Changes;

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "Examples: ztrain fork runs/demo --step 47 --out runs/calm --drop-doc web-1234\n          \
    ztrain fork runs/demo --step 47 --out runs/calm --amend calm.toml\n\n\
    The new run has the ledger, checkpoints and name of the old one up to step N; nothing of the old one is written. \
    `ztrain --curriculum NEW/run.toml --out NEW` continues it."
)]
pub(crate) struct Args {
    #[command(flatten)]
    run: super::Run,
    /// The last step that is shared; 0 shares the beginning alone.
    #[arg(long, value_name = "N", value_parser = super::step_or_none, allow_negative_numbers = true)]
    step: u64,
    /// The folder of the new run, which must not exist.
    #[arg(long, value_name = "NEW", value_parser = super::local("name a folder: a run's ledger lies on this machine"))]
    out: PathBuf,
    /// A file of `[[amendment]]` tables for steps from N + 1 on, as in a curriculum.
    #[arg(long, value_name = "FILE", value_parser = super::local("copy it here"))]
    amend: Option<PathBuf>,
    /// Where a store is now, if it was moved; once for each store of the run, in the order of its run.toml.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    store: Vec<Location>,
    #[command(flatten)]
    changes: Changes,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Forks.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let options = RuntimeOptions { device: "cpu".to_owned() };
    let table = runtime::start(&options).map_err(|error| super::machine("cpu", &error))?;
    let change = args.changes.change();
    let request = ForkRequest {
        run: args.run.path(),
        step: args.step,
        out: &args.out,
        stores: &args.store,
        change: &change,
        amend: args.amend.as_deref(),
    };
    let forked = fork(&request, &table)?;
    print_forked(&args, &forked)
        .map_err(|fault| fault.after(format_args!("{} is made", args.out.display())))
}

/// Says what was made.
fn print_forked(args: &Args, forked: &Forked) -> Result<u8> {
    let (out, curriculum) = (shell::path(&args.out), shell::path(&args.out.join("run.toml")));
    let next = format!("ztrain --curriculum {curriculum} --out {out}");
    if args.json {
        let mut answer = json!(forked);
        answer["next"] = json!(next);
        print_raw(&format!("{answer}\n"))?;
        return Ok(0);
    }
    let (step, from) = (forked.step, forked.checkpoints.last().copied().unwrap_or(0));
    print_line!(
        "{} shares the steps of {} up to {step}",
        args.out.display(),
        args.run.path().display()
    );
    let shared: Vec<String> = forked.checkpoints.iter().map(|at| format!("step-{at}")).collect();
    print_line!(
        "  checkpoints: {}",
        if shared.is_empty() { "none".to_owned() } else { shared.join(", ") }
    );
    if from < step {
        let again = words::steps(from + 1, step);
        print_line!("  {again} will be computed again, and held against the ledger");
    }
    match forked.changes.is_empty() {
        true => print_line!("  nothing is changed: amend {curriculum} from step {} on", step + 1),
        false => forked.changes.iter().try_for_each(|change| {
            print_line!("  {}", name(change));
            Ok::<(), contract::Fault>(())
        })?,
    }
    print_line!("to go on:\n  {next}");
    Ok(0)
}
