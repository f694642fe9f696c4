//! `ztrain bench step`: where the time of a step goes.

use std::path::PathBuf;

use contract::Result;
use loader::Opened;
use trainer::RunSpec;
use trainer::bench::{StepTable, step};

use super::Speed;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to train; its store must be at hand. Nothing is written.
    #[arg(long, value_name = "FILE")]
    curriculum: PathBuf,
    /// Steps to measure, after one that warms up.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    steps: u64,
    /// Print the table as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    speed: Speed,
}

/// Measures.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let (device, runtime) = args.speed.start(None)?;
    let spec = RunSpec::new(&Opened::open(&args.curriculum)?)?;
    let table = step(&spec, device, args.speed.lanes(None), args.steps)?;
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
    }
    Ok(0)
}

fn print_table(table: &StepTable) {
    let steps = table.steps as f64;
    let all = table.seconds * table.lanes as f64;
    println!(
        "{} steps of {} tokens on {} lanes: {:.3} s a step, {:.0} tokens/s",
        table.steps,
        table.tokens / table.steps,
        table.lanes,
        table.seconds / steps,
        table.rate()
    );
    println!("{:>10} {:>7}  part (lane time of a step)", "ms", "share");
    let line = |name: &str, seconds: f64| {
        let (time, share) = (1e3 * seconds / steps, 100.0 * seconds / all);
        println!("{time:>10.2} {share:>6.1}%  {name}");
    };
    let (read, inside) = table.parts.split_at(1);
    inside.iter().filter(|(_, seconds)| *seconds > 0.0).for_each(|(name, time)| line(name, *time));
    line("nothing to do, or in no part", table.idle);
    println!("{:>10.2} {:>7}  {} (beside the step before)", 1e3 * read[0].1 / steps, "", read[0].0);
    println!(
        "exactness: {:.1}% of a step (checksums of leaves, of the sum with its norm, of the state)",
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
