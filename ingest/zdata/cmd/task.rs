//! `zdata task`: the pieces of a build, for schedulers to call.

use std::path::PathBuf;
use std::time::Duration;

use contract::terminal::print;
use contract::{Result, note};
use ingest::cache_dir::{CacheDir, PlanName};
use ingest::cluster::{Plan, Ran, Runner, Stage, decide, merge, plan, prune};
use ingest::{Corpus, inspect};
use store::Location;

use super::digest::default_workers;

/// Why a folder of parts is on this machine.
pub(crate) const WORK: &str =
    "name a folder that all machines share: tasks lock it, which a bucket cannot do";

/// What to do.
#[derive(clap::Subcommand)]
#[command(after_help = "Examples: zdata task plan corpus.toml --cache-dir W\n          \
    zdata task run --cache-dir W --plan PLAN --index 0\n          \
    zdata task merge --cache-dir W --plan PLAN --out store")]
pub(crate) enum Command {
    /// Cut a build into tasks; prints the name of the plan and how many tasks it has. Other plans in the folder stay.
    Plan {
        /// The corpus file.
        #[arg(value_parser = super::place())]
        corpus: Location,
        /// The folder of the plan and its parts, which every machine sees.
        #[arg(long, value_parser = super::local(WORK))]
        cache_dir: PathBuf,
    },
    /// Look at the documents of one task, where steps compare documents with each other, or say that there is nothing
    /// to scan; again does no harm.
    Scan(Task),
    /// Decide which documents go, once every task was looked at.
    Decide(Planned),
    /// Prepare and encode the documents of one task; again does no harm.
    Run(Task),
    /// Make the store of all parts.
    Merge {
        #[command(flatten)]
        of: Planned,
        /// The folder that becomes the store.
        #[arg(long, value_parser = super::local("merge into a folder, then `zdata publish` it"))]
        out: PathBuf,
    },
    /// Remove the parts that no build has made or used for some days.
    Prune {
        /// The folder of the parts.
        #[arg(long, value_parser = super::local(WORK))]
        cache_dir: PathBuf,
        /// Remove parts that no build used for so many days.
        #[arg(long, value_name = "DAYS")]
        unused_days: u32,
        /// Only print what would be removed.
        #[arg(long)]
        dry_run: bool,
    },
}

/// Which plan.
#[derive(clap::Args)]
pub(crate) struct Planned {
    /// The folder of the plan.
    #[arg(long, value_parser = super::local(WORK))]
    cache_dir: PathBuf,
    /// The plan's name, as `zdata task plan` printed it.
    #[arg(long, value_name = "NAME")]
    plan: PlanName,
}

impl Planned {
    fn read(&self) -> Result<Plan> {
        Plan::read(&self.cache_dir, self.plan)
    }
}

/// Which task.
#[derive(clap::Args)]
pub(crate) struct Task {
    #[command(flatten)]
    of: Planned,
    /// Which task, from 0.
    #[arg(long)]
    index: usize,
    /// Threads that work [default: one for each core]; never changes a bit.
    #[arg(long, value_parser = super::workers)]
    workers: Option<usize>,
}

fn run(stage: Stage, task: Task, quiet: bool) -> Result<()> {
    let plan = task.of.read()?;
    if task.index < plan.tasks() && !plan.tasks_of(stage).contains(&task.index) {
        note!(
            "note: no step of this task's source compares documents: `zdata task run` is all it needs"
        );
        return print(&format!("nothing to scan in task {}\n", task.index));
    }
    let workers = task.workers.unwrap_or_else(default_workers);
    let ran = Runner::new(&plan, workers)?.run(stage, task.index, quiet)?;
    print(&match ran {
        Ran::New(digest) => format!("{digest}\n"),
        Ran::Again(digest) => format!("{digest}  again\n"),
        Ran::Reused(digest) => format!("{digest}  reused\n"),
    })
}

/// Does it.
pub(crate) fn exec(command: Command, quiet: bool) -> Result<()> {
    match command {
        Command::Plan { corpus, cache_dir } => {
            let corpus = Corpus::read(&corpus)?;
            let (_, _lock) = CacheDir::hold(&cache_dir)?;
            let plan = plan(&corpus, &cache_dir)?;
            let scanned = plan.tasks_of(Stage::Scan);
            if let (Some(first), Some(last)) = (scanned.first(), scanned.last()) {
                let all = scanned.len();
                note!("note: scan {all} of them ({first} to {last}) first, then decide");
            }
            print(&format!("{}  {}\n", plan.name, plan.tasks()))
        }
        Command::Scan(task) => run(Stage::Scan, task, quiet),
        Command::Decide(of) => decide(&of.read()?, quiet),
        Command::Run(task) => run(Stage::Encode, task, quiet),
        Command::Merge { of, out } => {
            let manifest = merge(&of.read()?, &out, quiet)?;
            inspect::notes(&manifest).iter().for_each(|note| note!("{note}"));
            print(&format!("{}  {}\n", manifest.digest, out.display()))
        }
        Command::Prune { cache_dir, unused_days, dry_run } => {
            let unused = Duration::from_secs(24 * 60 * 60 * u64::from(unused_days));
            let pruned = prune(&cache_dir, unused, dry_run)?;
            print(&format!("{}\n", pruned.told(dry_run)))
        }
    }
}
