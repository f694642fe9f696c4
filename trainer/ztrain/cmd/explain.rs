//! `ztrain explain`.

use std::path::PathBuf;

use contract::terminal::print_raw;
use contract::{Class, Fault, Result};
use serde_json::json;
use store::Location;
use trainer::explain::{Explanation, Request, explain};
use trainer::replay::{Replayer, Verdict};

use super::Speed;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0 the same bits, 4 different bits, 5 the step diverges.")]
pub(crate) struct Args {
    /// The run's folder; nothing in it is written.
    #[arg(long, value_name = "RUN", value_parser = super::run())]
    run: PathBuf,
    /// Where a store is now, if it was moved; once for each store of the run, in the order of its run.toml.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    store: Vec<Location>,
    /// The step to explain.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    step: u64,
    /// How many steps before it the ledger is read for what is usual.
    #[arg(long, value_name = "K", default_value_t = 32)]
    window: u64,
    /// How many documents to list with their worst tokens, and to compute the step without: two steps for each.
    #[arg(long, value_name = "D", default_value_t = 8)]
    top: usize,
    /// How many of the worst tokens to show of each.
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    tokens: usize,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    speed: Speed,
}

/// Explains a step.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let Args { run, store, step, window, top, tokens, json, speed } = args;
    let (device, table) = speed.start(None)?;
    let workers = speed.workers(None, &table)?;
    let mut replayer = Replayer::open_with(&run, &store, &table, device, workers)?;
    if let Some(kernels) = &replayer.kernels {
        contract::note!("note: {kernels}");
    }
    let last = replayer.spec().plan.steps();
    if step > last {
        return Err(Fault::usage("the curriculum has no such step")
            .at("--step")
            .found(step)
            .wanted(format!("1 to {last}")));
    }
    let explained = explain(&mut replayer, Request { step, window, top, tokens })?;
    for warning in &replayer.warnings {
        contract::note!("warning: passed over: {warning}");
    }
    match json {
        true => print_raw(&format!("{}\n", json!(explained)))?,
        false => print_raw(&explained.to_string())?,
    }
    Ok(exit_code(&explained))
}

fn exit_code(explained: &Explanation) -> u8 {
    match explained.verdict {
        _ if explained.diverged.is_some() => Class::Diverged.exit_code(),
        Verdict::SameBits | Verdict::NotRecorded => 0,
        Verdict::Repeatable | Verdict::RunHit | Verdict::NotRepeatable => {
            Class::Mismatch.exit_code()
        }
    }
}
