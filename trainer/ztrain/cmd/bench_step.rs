//! `ztrain bench step`: the time of each part of a step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::terminal::print_raw;
use contract::{Result, counted};
use loader::OpenedCurriculum;
use store::Location;
use tools::bench::{ExchangedBytes, RankMemory, StepTable, step};
use tools::trace::{TimeShare, Trace};
use trainer::RunSpec;
use trainer::memory::MemoryUse;
use trainer::mesh::ProcessMesh;
use trainer::refusal::lost;
use trainer::step::StepContext;

use super::Speed;
use super::drawing::Drawing;
use super::ranks::{self, Ranks};

/// The beginning of a trace by libtorch, without spaces and line ends.
const TRACED: &str = "{\"schemaVersion\"";

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to train; its store must be at hand. Nothing is written.
    #[arg(long, value_name = "FILE", value_parser = super::place())]
    curriculum: Location,
    /// Steps to measure.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    steps: u64,
    /// Steps before them: connections are made, and memory is touched for the first time.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    warm_up: u64,
    /// Compute one more step under libtorch's profiler and write its trace to this file, for Perfetto or a browser; the
    /// kernels (operations on a CPU) that took most time are printed.
    #[arg(long, value_name = "FILE", value_parser = super::local("write a file here"))]
    trace: Option<PathBuf>,
    /// Print the table as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    speed: Speed,
}

/// Measures.
pub(crate) fn exec(mut args: Args) -> Result<u8> {
    args.speed.choose_device(None);
    if let Some(count) = args.ranks.to_spawn(&args.speed)? {
        return ranks::start_all(count);
    }
    let trace = args.trace.as_deref();
    trace.map_or(Ok(()), free)?;
    kernels::memory::count().map_err(lost)?;
    let launched = args.ranks.launched()?;
    let mut world = args.ranks.world(&args.speed, launched.as_ref(), None, &Arc::default())?;
    let spec = RunSpec::new(&OpenedCurriculum::open(&args.curriculum)?)?;
    trainer::refuse_unshared(&spec, world.comm.world(), args.ranks.degrees())?;
    let workers = args.speed.workers(launched.as_ref(), &world.runtime)?;
    world.comm.choose_transport(world.device, args.ranks.transport()).map_err(lost)?;
    let (schedule, flat) = args.ranks.ways();
    let team = ProcessMesh::new(&world.comm, args.ranks.degrees(), schedule, flat)?;
    let context = StepContext { spec: &spec, team: &team, workers };
    let table = step(context, world.device, args.warm_up, args.steps, trace)?;
    world.comm.barrier("the end").map_err(lost)?;
    if world.comm.rank() > 0 {
        return Ok(0);
    }
    if args.json {
        let answer = serde_json::json!({
            "table": table, "tokens_per_second": table.rate(), "utilisation": table.utilisation(),
            "kernels": world.runtime.fingerprint(),
        });
        print_raw(&format!("{answer}\n"))?;
    } else {
        print_table(&table)?;
        print_ranks(&table)?;
        table.trace.as_ref().map_or(Ok(()), print_trace)?;
    }
    Ok(0)
}

/// Refuses a file that is no trace: libtorch would write over it. Found out before minutes of measuring.
fn free(path: &Path) -> Result<()> {
    let text = std::fs::read(path).unwrap_or_default();
    let dense = text.into_iter().filter(|byte| !byte.is_ascii_whitespace());
    let traced = dense.take(TRACED.len()).eq(TRACED.bytes());
    match traced {
        true => Drawing::over("--trace", path).map(drop),
        false => Drawing::at("--trace", path).map(drop),
    }
}

fn print_table(table: &StepTable) -> Result<()> {
    let steps = table.steps as f64;
    let all = table.seconds * table.workers as f64;
    print_line!(
        "{} of {} tokens on {} of {}: {:.3} s a step ({:.3} the median one), {:.0} tokens/s",
        counted(table.steps, "step"),
        table.tokens / table.steps,
        counted(table.ranks, "rank"),
        counted(table.workers, "worker"),
        table.seconds / steps,
        table.median_seconds(),
        table.rate()
    );
    print_line!(
        "{:>10} {:>10} {:>7}  part (worker time of a step, of rank 0; its mean and its median)",
        "ms",
        "median",
        "share"
    );
    let milliseconds = |seconds: f64| format!("{:.2}", 1e3 * seconds);
    let line = |name: &str, seconds: f64, median: &str| -> Result<()> {
        let (time, share) = (milliseconds(seconds / steps), 100.0 * seconds / all);
        print_line!("{time:>10} {median:>10} {share:>6.1}%  {name}");
        Ok(())
    };
    for (index, (name, seconds)) in table.parts.iter().enumerate().skip(1) {
        if *seconds > 0.0 {
            line(name, *seconds, &milliseconds(table.median_of(index)))?;
        }
    }
    line("nothing to do, or in no part", table.idle, "")?;
    if let Some((name, seconds)) = table.parts.first() {
        let (mean, median) = (milliseconds(seconds / steps), milliseconds(table.median_of(0)));
        print_line!("{mean:>10} {median:>10} {:>7}  {name} (during the step before)", "");
    }
    print_line!(
        "exactness: {:.1}% of a step (checksums of micro-batches, of the sum with its norm; the state's are the optimizer's)",
        100.0 * table.exactness / all
    );
    print_line!(
        "model: {:.2} GFLOP a step, {:.1} GFLOP/s; {} matmuls here: {:.1} GFLOP/s; utilisation {:.1}%",
        table.model_flops / steps / 1e9,
        table.model_flops / table.seconds / 1e9,
        table.dtype,
        table.limit / 1e9,
        100.0 * table.utilisation()
    );
    Ok(())
}

/// Where the time of the traced step went.
fn print_trace(trace: &Trace) -> Result<()> {
    let Trace { on_device, seconds, busy, top, parts, exactness } = trace;
    print_line!(
        "a traced step of {:.2} ms: {:.2} ms of {}, of which {:.2} ms only check bits",
        1e3 * seconds,
        1e3 * busy,
        if *on_device { "kernels and copies on the device" } else { "libtorch's operations" },
        1e3 * exactness
    );
    for (heading, shares) in [("part", parts), ("of most time", top)] {
        print_line!("{:>10} {:>7} {:>7}  {heading}", "ms", "share", "calls");
        for TimeShare { name, seconds, calls } in shares {
            let share = 100.0 * seconds / busy.max(f64::MIN_POSITIVE);
            print_line!("{:>10.3} {share:>6.1}% {calls:>7}  {name}", 1e3 * seconds);
        }
    }
    Ok(())
}

/// What ranks exchange, and what each of them holds.
fn print_ranks(table: &StepTable) -> Result<()> {
    let mega = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    if table.uneven > 0.0 {
        print_line!(
            "attention of these documents: the rank with most has {:.1} % more than the mean of those that share a micro-batch",
            100.0 * table.uneven
        );
    }
    if let Some(ExchangedBytes { bytes, bytes_between_nodes, waited_for_blocks }) = table.exchanged
    {
        print_line!(
            "exchanged in a step: {:.2} MiB, {:.2} MiB between machines; {:.2} ms of waiting after the last micro-batch",
            mega(bytes / table.steps),
            mega(bytes_between_nodes / table.steps),
            1e3 * waited_for_blocks / table.steps as f64,
        );
    }
    let names = [
        "weights",
        "masters",
        "moments",
        "activ.",
        "gradients",
        "sent",
        "received",
        "sums",
        "formula",
        "tensors",
        "resident",
    ];
    let row = |name: &str, cells: Vec<String>| {
        let cells: Vec<String> = cells.iter().map(|cell| format!(" {cell:>9}")).collect();
        format!("{name:>5}{}", cells.concat())
    };
    let head = row("MiB", names.iter().map(|name| (*name).to_owned()).collect());
    print_line!(
        "{head}  (tensors: the most that were alive; resident: the most, less what the program took before)"
    );
    for RankMemory { rank, formula, before, most, tensors, .. } in &table.memory {
        let MemoryUse { weights, masters, moments, activations, gradients, sent, received, sums } =
            *formula;
        let parts = [
            weights,
            masters,
            moments,
            activations,
            gradients,
            sent,
            received,
            sums,
            formula.sum(),
        ];
        let measured = most.saturating_sub(*before);
        let cells =
            parts.into_iter().chain([*tensors, measured]).map(|part| format!("{:.1}", mega(part)));
        print_line!("{}", row(&format!("r{rank}"), cells.collect()));
    }
    for RankMemory { rank, on_device, .. } in &table.memory {
        if *on_device > 0 {
            print_line!("r{rank}: {:.1} MiB of tensors on its device at most", mega(*on_device));
        }
    }
    Ok(())
}
