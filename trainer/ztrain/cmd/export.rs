//! `ztrain export`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::ValueEnum;
use contract::{Fault, Result, terminal};
use store::Location;
use tools::export::{WeightMean, export};
use trainer::World;
use trainer::folder::RunFolder;
use trainer::replay::{ReplayParallelism, Replayer};

use super::Speed;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    run: super::Run,
    /// The step after which the weights are taken; computed again where no checkpoint holds it [default: the newest
    /// checkpoint's].
    #[arg(long, value_name = "N", value_parser = super::step_or_none, allow_negative_numbers = true)]
    step: Option<u64>,
    /// Write the mean of the weights of the last N checkpoints up to --step.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    average: u64,
    /// Where a store is now, if it was moved; once for each store of the run, in the order of its run.toml.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    store: Vec<Location>,
    /// What to write.
    #[arg(long, value_enum, default_value_t = Format::Hf)]
    format: Format,
    /// The folder to make.
    #[arg(long, value_name = "DIR", value_parser = super::local("export into a folder, and copy that into the bucket"))]
    out: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    speed: Speed,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// A folder that Hugging Face transformers opens as zaya, llama, qwen3, mixtral or qwen3_moe, f32.
    Hf,
}

/// Exports.
pub(crate) fn exec(mut args: Args) -> Result<u8> {
    let Format::Hf = args.format;
    // A checkpoint is exported without computing, also where there is no GPU.
    let run = kernels::device::visible().map(|_| args.run.path());
    args.speed.choose_device(run);
    let (device, table) = args.speed.start(None)?;
    let workers = args.speed.workers(None, &table)?;
    let world = Arc::new(World::alone(device, table));
    let mut replayer = Replayer::open_with(
        args.run.path(),
        &args.store,
        &world,
        workers,
        ReplayParallelism::default(),
    )?;
    let step = match args.step {
        Some(step) => step,
        None => newest(&args, replayer.recorded())?,
    };
    let steps = averaged(&args, step)?;
    let exported = if let [step] = steps[..] {
        let state = replayer.state_at(step)?;
        export(replayer.spec(), &state, &args.out)?
    } else {
        let mut mean = WeightMean::default();
        for step in &steps {
            mean.add(&replayer.state_at(*step)?)?;
        }
        mean.export(replayer.spec(), &args.out)?
    };
    for warning in &replayer.warnings {
        contract::note!("warning: {warning}");
    }
    let (tensors, bytes, out) = (exported.tensors, exported.bytes, args.out.display().to_string());
    let answer = serde_json::json!({
        "step": step, "averaged": steps, "tensors": tensors, "bytes": bytes, "folder": out,
    });
    terminal::answer(args.json, &answer, || {
        let mean = match steps.as_slice() {
            [_] => String::new(),
            all => {
                let all: Vec<_> = all.iter().map(u64::to_string).collect();
                format!(", the mean of steps {}", all.join(", "))
            }
        };
        format!("step {step}{mean}: {tensors} tensors, {bytes} bytes of weights in {out}\n")
    })
    .map_err(|fault| fault.after(format_args!("{out} is made")))?;
    Ok(0)
}

/// The steps whose weights are averaged, in order: `step` alone, or those of the last checkpoints up to it.
fn averaged(args: &Args, step: u64) -> Result<Vec<u64>> {
    if args.average == 1 {
        return Ok(vec![step]);
    }
    let mut steps = RunFolder::new(args.run.path()).found_checkpoints()?.steps()?;
    steps.retain(|one| *one <= step);
    let wanted = usize::try_from(args.average).unwrap_or(usize::MAX);
    match steps.len().checked_sub(wanted) {
        Some(surplus) => Ok(steps.split_off(surplus)),
        None => Err(Fault::usage("the run has fewer checkpoints than the mean needs")
            .at("--average")
            .found(format!("{} up to step {step}", steps.len()))
            .wanted(format!("{wanted}"))
            .hint("train with --keep, which keeps more of them, or average fewer")),
    }
}

fn newest(args: &Args, recorded: u64) -> Result<u64> {
    let folder = RunFolder::new(args.run.path());
    match folder.found_checkpoints()?.steps()?.last() {
        Some(step) if *step <= recorded => Ok(*step),
        Some(step) => Err(Fault::data("the ledger ends before this run's newest checkpoint")
            .at(folder.ledger().display().to_string())
            .found(format!("{recorded} steps"))
            .wanted(format!("step {step}"))
            .hint("restore it from a copy, or name a step with --step")),
        None => Err(Fault::usage("this run has no checkpoint")
            .at(args.run.path().display().to_string())
            .hint("name a step with --step: it is computed from the beginning")),
    }
}
