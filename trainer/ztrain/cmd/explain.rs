//! `ztrain explain`.

use std::sync::Arc;

use contract::terminal::{print, print_raw};
use contract::{Class, Fault, Result};
use serde_json::json;
use store::Location;
use tools::explain::{ExplainRequest, Explanation, explain};
use trainer::World;
use trainer::replay::{ReplayParallelism, Replayer, Verdict};

use super::{SavedStateFlags, Speed, ranks};

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0 the same bits, 4 different bits, 5 the step diverges.")]
pub(crate) struct Args {
    #[command(flatten)]
    run: super::Run,
    /// Where a store is now, if it was moved; once for each store of the run, in the order of its run.toml.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    store: Vec<Location>,
    /// The step to explain.
    #[arg(long, value_name = "N", value_parser = super::step, allow_negative_numbers = true)]
    step: u64,
    /// How many steps before it the ledger is read for what is usual.
    #[arg(long, value_name = "K", default_value_t = 64)]
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
    /// Tell where the time went; with --json as a field of its own.
    #[arg(long)]
    timing: bool,
    #[command(flatten)]
    keeping: SavedStateFlags,
    #[command(flatten)]
    speed: Speed,
}

/// Explains a step.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let Args { run, store, step, window, top, tokens, json, timing, keeping, mut speed } = args;
    ranks::refuse_launcher("ztrain explain")?;
    speed.choose_device(Some(run.path()));
    let (device, table) = speed.start(None)?;
    let workers = speed.workers(None, &table)?;
    let world = Arc::new(World::alone(device, table));
    let replayer =
        Replayer::open_with(run.path(), &store, &world, workers, ReplayParallelism::default())?;
    replayer.refuse_memory()?;
    let mut replayer = replayer.keeping(keeping.keep());
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
    let explained = explain(&mut replayer, ExplainRequest { step, window, top, tokens })?;
    for warning in &replayer.warnings {
        contract::note!("warning: {warning}");
    }
    let times = replayer.times();
    if json {
        let mut answer = json!(explained);
        if timing {
            answer["timing"] = json!(times);
        }
        print_raw(&format!("{answer}\n"))?;
    } else {
        print(&explained.to_string())?;
        let lines = if timing { times.lines() } else { Vec::new() };
        lines.iter().for_each(|line| contract::note!("{line}"));
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
