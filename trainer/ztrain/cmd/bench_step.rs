//! `ztrain bench step`: where the time of a step goes.

use std::sync::Arc;

use contract::Result;
use loader::Opened;
use store::Location;
use trainer::RunSpec;
use trainer::bench::{Exchanged, RankMemory, StepTable, step};
use trainer::memory::Holds;
use trainer::mesh::Team;
use trainer::refusal::lost;

use super::Speed;
use super::ranks::{self, Ranks};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to train; its store must be at hand. Nothing is written.
    #[arg(long, value_name = "FILE", value_parser = super::place())]
    curriculum: Location,
    /// Steps to measure, after one that warms up.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    steps: u64,
    /// Print the table as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    speed: Speed,
}

/// Measures.
pub(crate) fn exec(args: Args) -> Result<u8> {
    if let Some(count) = args.ranks.to_spawn()? {
        return ranks::start(count);
    }
    let launched = args.ranks.launched()?;
    let (device, runtime) = args.speed.start(launched.as_ref())?;
    let spec = RunSpec::new(&Opened::open(&args.curriculum)?)?;
    let workers = args.speed.workers(launched.as_ref(), &runtime)?;
    let group = launched.as_ref().map(|launched| args.ranks.meet(launched, &Arc::default()));
    let group = group.transpose()?;
    if let Some(group) = &group {
        group.carry(device, args.ranks.transport()).map_err(lost)?;
    }
    let (schedule, flat) = args.ranks.ways();
    let team = group.as_ref().map(|group| Team::new(group, schedule, flat)).transpose()?;
    let table = step(&spec, device, workers, args.steps, team.as_ref())?;
    if let Some(group) = &group {
        group.barrier("the end").map_err(lost)?;
        if group.rank() > 0 {
            return Ok(0);
        }
    }
    if args.json {
        println!(
            "{}",
            serde_json::json!({
                "table": table, "tokens_per_second": table.rate(), "utilisation": table.utilisation(),
                "kernels": runtime.fingerprint(),
            })
        );
    } else {
        print_table(&table);
        print_ranks(&table);
    }
    Ok(0)
}

fn print_table(table: &StepTable) {
    let steps = table.steps as f64;
    let all = table.seconds * table.workers as f64;
    println!(
        "{} steps of {} tokens on {} ranks of {} workers: {:.3} s a step, {:.0} tokens/s",
        table.steps,
        table.tokens / table.steps,
        table.ranks,
        table.workers,
        table.seconds / steps,
        table.rate()
    );
    println!("{:>10} {:>7}  part (worker time of a step, of rank 0)", "ms", "share");
    let line = |name: &str, seconds: f64| {
        let (time, share) = (1e3 * seconds / steps, 100.0 * seconds / all);
        println!("{time:>10.2} {share:>6.1}%  {name}");
    };
    let (read, inside) = table.parts.split_at(1);
    inside.iter().filter(|(_, seconds)| *seconds > 0.0).for_each(|(name, time)| line(name, *time));
    line("nothing to do, or in no part", table.idle);
    println!("{:>10.2} {:>7}  {} (beside the step before)", 1e3 * read[0].1 / steps, "", read[0].0);
    println!(
        "exactness: {:.1}% of a step (checksums of micro-batches, of the sum with its norm, of the state)",
        100.0 * table.exactness / all
    );
    println!(
        "model: {:.2} GFLOP a step, {:.1} GFLOP/s; {} products here: {:.1} GFLOP/s; utilisation {:.1}%",
        table.model_flops / steps / 1e9,
        table.model_flops / table.seconds / 1e9,
        table.dtype,
        table.limit / 1e9,
        100.0 * table.utilisation()
    );
}

/// What ranks exchange, and what each of them holds.
fn print_ranks(table: &StepTable) {
    let mega = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    if let Some(Exchanged { bytes, bytes_between_nodes, waited_for_blocks }) = table.exchanged {
        println!(
            "exchanged in a step: {:.2} MiB, {:.2} MiB between machines; {:.2} ms of waiting after the last micro-batch",
            mega(bytes / table.steps),
            mega(bytes_between_nodes / table.steps),
            1e3 * waited_for_blocks / table.steps as f64,
        );
    }
    let names = [
        "weights",
        "moments",
        "activ.",
        "gradients",
        "sent",
        "received",
        "sums",
        "formula",
        "measured",
    ];
    print!("{:>5}", "MiB");
    names.iter().for_each(|name| print!(" {name:>9}"));
    println!("  (measured: the most, less what the program took before)");
    for RankMemory { rank, formula, before, most } in &table.memory {
        let Holds { weights, moments, activations, gradients, sent, received, sums } = *formula;
        let parts = [weights, moments, activations, gradients, sent, received, sums, formula.sum()];
        print!("{:>5}", format!("r{rank}"));
        parts.iter().for_each(|part| print!(" {:>9.1}", mega(*part)));
        println!(" {:>9.1}", mega(most.saturating_sub(*before)));
    }
}
