//! `zdata digest`: one data digest per step, the same for every world size.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use contract::terminal::print_raw;
use contract::{Fault, Result};
use ingest::progress::{Measure, Progress};
use loader::{OpenedCurriculum, PrefetchOptions, PrefetchSource, Prefetcher, StepSummary};
use store::Location;

use super::output;
use super::reaction::FollowedRun;

/// Tokens that a thread holds at a time, about: 50 MB, whatever a step has.
const HELD_TOKENS: u64 = 1 << 22;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata digest curricula/demo.toml --steps 1..101\n\n\
    Each line is a step and its digest: xxh3-128 over the ordered digests of its sequences \
    (tokens, positions, document boundaries, loss mask, and the loss weight where it is not 1).")]
pub(crate) struct Args {
    /// The curriculum: a path or a URL.
    #[arg(value_parser = super::place())]
    curriculum: Location,
    /// Steps A..B: A to B - 1, counted from 1.
    #[arg(long, value_name = "A..B", value_parser = output::steps)]
    steps: Range<u64>,
    /// Threads; they change the speed, never a digest.
    #[arg(long, value_name = "N", value_parser = super::workers, default_value_t = default_workers())]
    workers: usize,
    #[command(flatten)]
    follow: FollowedRun,
    /// Print a JSON object per line.
    #[arg(long)]
    json: bool,
}

/// As many threads as the machine has cores.
pub(crate) fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let Args { curriculum, steps, workers, follow, json } = args;
    let opened = follow.opened(&curriculum)?;
    let mut lines = String::new();
    let count = steps.end - steps.start;
    let mut progress = Progress::new("digest", Measure::Count("step"), count, quiet);
    for found in summaries(&opened, steps, workers)? {
        let StepSummary { step, digest, .. } = found?;
        if json {
            lines += &output::json(&serde_json::json!({ "step": step, "digest": digest }))?;
        } else {
            let _ = writeln!(lines, "{step} {digest}"); // A string takes everything.
        }
        if lines.len() > 1 << 14 {
            progress.aside(|| print_raw(&std::mem::take(&mut lines)))?;
        }
        progress.add(1);
    }
    drop(progress);
    print_raw(&lines)
}

/// The steps `steps` in sum, in order.
pub(crate) fn summaries(
    opened: &OpenedCurriculum,
    steps: Range<u64>,
    workers: usize,
) -> Result<Prefetcher<StepSummary>> {
    let last = opened.plan.steps();
    if steps.end > last + 1 {
        return Err(Fault::usage("the curriculum ends before these steps")
            .at(opened.file.to_string())
            .found(format!("steps {}..{}", steps.start, steps.end))
            .wanted(format!("steps within 1..{}", last + 1)));
    }
    opened.plan.check_fixed(steps.end.saturating_sub(1))?;
    let (plan, stores) = (Arc::clone(&opened.plan), Arc::clone(opened.stores()?));
    let options = PrefetchOptions { threads: workers, depth: 2 * workers };
    Prefetcher::summaries(PrefetchSource { plan: plan.into(), stores, steps, options }, HELD_TOKENS)
}
