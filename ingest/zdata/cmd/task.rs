//! `zdata task`: the pieces of `zdata build --engine tasks|slurm`, for schedulers to call.

use std::path::PathBuf;
use std::thread;

use contract::Result;
use ingest::Corpus;
use ingest::engine::plan::TASK_BYTES;
use ingest::engine::task::Ran;
use ingest::engine::{Plan, merge, plan, run};

/// What to do.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Cut a build into tasks; prints how many.
    Plan {
        /// The corpus file.
        corpus: PathBuf,
        /// The folder of the plan and its parts, which every machine sees.
        #[arg(long)]
        work: PathBuf,
        /// Bytes of input that a task gets; a larger file is a task by itself.
        #[arg(long, default_value_t = TASK_BYTES)]
        task_bytes: u64,
    },
    /// Run one task; again does no harm.
    Run {
        /// The folder of the plan.
        #[arg(long)]
        work: PathBuf,
        /// Which task, from 0.
        #[arg(long)]
        index: usize,
        /// Threads that encode [default: one for each core]; never changes a bit.
        #[arg(long)]
        workers: Option<usize>,
    },
    /// Make the store of all parts.
    Merge {
        /// The folder of the plan.
        #[arg(long)]
        work: PathBuf,
        /// The folder that becomes the store.
        #[arg(long)]
        out: PathBuf,
    },
}

/// Does it.
pub(crate) fn exec(command: Command) -> Result<()> {
    match command {
        Command::Plan { corpus, work, task_bytes } => {
            println!("{}", plan(&Corpus::read(&corpus)?, &work, task_bytes)?.tasks());
        }
        Command::Run { work, index, workers } => {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            match run(&Plan::read(&work)?, index, workers.unwrap_or(cores))? {
                Ran::New(digest) => println!("{digest}"),
                Ran::Again(digest) => println!("{digest}  again"),
            }
        }
        Command::Merge { work, out } => {
            let manifest = merge(&Plan::read(&work)?, &out)?;
            println!("{}  {}", manifest.digest, out.display());
        }
    }
    Ok(())
}
