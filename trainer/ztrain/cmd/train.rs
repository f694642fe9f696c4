//! `ztrain --curriculum FILE`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use contract::{Fault, Result, terminal};
use kernels::group::Transport;
use loader::{OpenedCurriculum, PrefetchOptions};
use store::Location;
use trainer::audit::AuditFraction;
use trainer::checkpoint::{Retention, SnapshotOptions};
use trainer::evaluate::Task;
use trainer::folder::{RunFolder, RunLocks};
use trainer::launch::{self, Launch, LaunchedRank, SupervisorLink, spawned_us};
use trainer::validate::Validation;
use trainer::workers::Workers;
use trainer::{ExecOptions, RunOutcome, RunSpec, fit_workers, train};

use super::ranks::Ranks;
use super::{SignalRequests, Speed, StartupStage, above_zero};

/// Arguments.
#[derive(clap::Args)]
#[command(next_help_heading = "Run")]
pub(crate) struct Args {
    /// What to train: data, phases, model, optimizer, schedule.
    #[arg(long, value_name = "FILE", required = true, value_parser = super::place())]
    curriculum: Option<Location>,
    /// The run's folder [default: runs/NAME in the working directory, NAME as in NAME.toml].
    #[arg(long, value_name = "RUN", value_parser = super::local("name a folder; --checkpoints takes a place in a bucket"))]
    out: Option<PathBuf>,
    /// Flags of this command in a TOML file: `checkpoint-every = 200`. A typed flag has precedence; a relative path is
    /// one from the file's folder.
    #[arg(long, value_name = "FILE", value_parser = super::local("copy it to this machine"))]
    pub(crate) options: Option<PathBuf>,
    /// The text of that file, once it is read.
    #[arg(skip)]
    pub(crate) options_text: Option<String>,
    /// Stop after this step; the same command without this flag continues.
    #[arg(long, value_name = "STEP")]
    stop_after: Option<u64>,
    /// No line for each step.
    #[arg(long)]
    quiet: bool,
    /// Print the answer at the end as JSON.
    #[arg(long)]
    json: bool,
    /// The name under which the process that starts this one holds the run's folder.
    #[arg(long, value_name = "NAME", hide = true)]
    group: Option<String>,
    #[command(flatten)]
    speed: Speed,
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    checkpoints: CheckpointFlags,
    #[command(flatten)]
    faults: FaultFlags,
    #[command(flatten)]
    metrics: MetricFlags,
}

/// When checkpoints are written, where, and which are kept.
#[derive(clap::Args)]
#[command(next_help_heading = "Checkpoints")]
struct CheckpointFlags {
    /// Steps between checkpoints; the last step always has one.
    #[arg(long, value_name = "STEPS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: u64,
    /// Newest checkpoints that are kept.
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    keep: u64,
    /// Keep no older checkpoints; without it some are kept, about one for each doubling of age.
    #[arg(long)]
    keep_latest: bool,
    /// Also keep every checkpoint whose step is a multiple of this; 0 for none.
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    keep_every: u64,
    /// How long the ranks may take to write a checkpoint, which they do during the following steps.
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = super::patience)]
    checkpoint_timeout: Duration,
    /// Where checkpoints lie, a folder or a URL [default: in the run's folder; it remembers].
    #[arg(long, value_name = "PLACE", value_parser = super::output_place())]
    checkpoints: Option<Location>,
    /// Compute every step again from the first where no checkpoint can be used; each is held against the ledger.
    #[arg(long)]
    restart: bool,
    /// Recent states kept in memory: at a spike the one before it is written down for `ztrain replay`.
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    snapshots: usize,
    /// Steps between two snapshots.
    #[arg(long, value_name = "STEPS", default_value_t = SnapshotOptions::OFF.every,
        value_parser = clap::value_parser!(u64).range(1..))]
    snapshot_every: u64,
    /// Spreads from usual from which the loss or gradient norm of a step is a spike, as for `ztrain spikes`.
    #[arg(long, value_name = "COUNT", default_value_t = SnapshotOptions::OFF.spike, value_parser = above_zero)]
    snapshot_on_spike: f64,
    /// Newest snapshots on disk that are kept.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    snapshot_keep: u64,
}

/// What happens when a rank or a machine fails.
#[derive(clap::Args)]
#[command(next_help_heading = "Faults and supervision")]
struct FaultFlags {
    /// When a rank is lost, go on in the same processes with those who are left, if they are at least N; without it the
    /// others end.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    min_ranks: Option<u32>,
    /// Keep a copy of what each rank owns of the state on another one as well, on another machine where there is one:
    /// after a loss no step before the one at hand is computed again. Costs memory and bytes: see `ztrain plan`.
    #[arg(long)]
    replicate: bool,
    /// Compute this part of the micro-batches twice, and stop where one comes out otherwise: the machine. Decides no
    /// bit.
    #[arg(long, value_name = "1/N", value_parser = str::parse::<AuditFraction>, allow_hyphen_values = true)]
    audit: Option<AuditFraction>,
}

/// What is measured besides the steps, and who gets it.
#[derive(clap::Args)]
#[command(next_help_heading = "Metrics")]
struct MetricFlags {
    /// Steps between validations, on the store's held-out text; 0 for none.
    #[arg(long, value_name = "STEPS", default_value_t = 50)]
    validate_every: u64,
    /// Validation sequences of each source, spread evenly over its held-out text.
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    validation_sequences: u64,
    /// A task to score at each validation, JSON Lines of context, choices and answer; once for each task.
    #[arg(long, value_name = "FILE", value_parser = super::place())]
    eval: Vec<Location>,
    /// A program (by sh) that gets each step's curves as a line of JSON on its standard input, in the order of steps,
    /// once each; it never holds training up.
    #[arg(long, value_name = "PROGRAM")]
    metrics_exec: Option<String>,
}

impl MetricFlags {
    /// The tasks, read for the run of a curriculum.
    fn tasks(&self, opened: &OpenedCurriculum) -> Result<Arc<[Task]>> {
        if !self.eval.is_empty() && self.validate_every == 0 {
            return Err(Fault::usage(
                "tasks are scored when there is a validation, and there is none",
            )
            .at("--eval")
            .found("--validate-every 0")
            .wanted("--validate-every STEPS"));
        }
        Ok(Task::read(&self.eval, opened)?.into())
    }
}

/// Trains until the last step, a signal or a fault.
pub(crate) fn exec(mut args: Args) -> Result<u8> {
    let requests = SignalRequests::default();
    let stop = &requests.stop;
    requests.listen()?;
    let curriculum =
        args.curriculum.as_ref().ok_or_else(|| Fault::usage("--curriculum is missing"))?;
    let folder = args.folder()?;
    let supervised = SupervisorLink::of_environment(&folder)?;
    args.speed.choose_device(Some(&folder));
    if let Some(count) = args.ranks.to_spawn(&args.speed)? {
        enough(args.faults.min_ranks, count)?;
        // What a supervisor is to do takes ranks that go on without each other; half of them stay unless another number
        // is asked for.
        let touched = supervised.as_ref().is_some_and(SupervisorLink::touches_ranks);
        let min_ranks = args.faults.min_ranks.or(touched.then_some(1));
        let stay = args.faults.min_ranks.unwrap_or(count.div_ceil(2));
        if args.faults.replicate && min_ranks.is_none() {
            return Err(Fault::usage("copies are for ranks that continue after others are lost")
                .at("--replicate")
                .found("no --min-ranks")
                .hint("give --min-ranks 1 as well, or leave --replicate out"));
        }
        // What is wrong with the curriculum is said once, and before anything starts.
        let opened = OpenedCurriculum::open(curriculum)?;
        RunSpec::of_run(&opened, &args.folder()?)?;
        args.metrics.tasks(&opened)?;
        if stops_early(stop) {
            return Ok(0);
        }
        requests.answer(StartupStage::Ranks)?;
        supervised.as_ref().map_or(Ok(()), |supervised| supervised.follow(stop))?;
        let locks = args.lock_folder()?;
        let mut arguments = if args.group.is_none() { of_group(&locks) } else { Vec::new() };
        if let (Some(least), None) = (min_ranks, args.faults.min_ranks) {
            arguments.extend([OsString::from("--min-ranks"), least.to_string().into()]);
        }
        let launch = Launch { count, min_ranks, stay, supervised, arguments };
        let outcome = launch::spawn(&launch, stop);
        locks.release();
        return outcome.inspect_err(|fault| launch::last_words(None, None, fault, true));
    }
    let launched = args.ranks.launched()?;
    let rank = launched.as_ref().map(|launched| launched.place.rank);
    let outcome = as_rank(&args, curriculum, launched.as_ref(), supervised.as_ref(), &requests);
    let (ExitInfo { spoke_first, missed }, outcome) = match outcome {
        Ok(done) => done,
        Err(fault) => (ExitInfo { spoke_first: true, missed: None }, Err(fault)),
    };
    match outcome {
        Ok(()) => Ok(0),
        Err(fault) => {
            launch::last_words(rank, missed, &fault, spoke_first);
            // Under our own launcher one rank speaks for all; other launchers keep each rank's words apart.
            if spawned_us() && !spoke_first { Ok(fault.class().exit_code()) } else { Err(fault) }
        }
    }
}

/// What a rank knows of a failure.
struct ExitInfo {
    /// Whether it was the one to notice.
    spoke_first: bool,
    /// The rank that was lost, if that was the failure.
    missed: Option<u32>,
}

/// Trains as one rank, alone or among others.
fn as_rank(
    args: &Args,
    curriculum: &Location,
    launched: Option<&LaunchedRank>,
    supervised: Option<&SupervisorLink>,
    requests: &SignalRequests,
) -> Result<(ExitInfo, Result<()>)> {
    let stop = &requests.stop;
    let mut world = args.ranks.world(&args.speed, launched, args.faults.min_ranks, stop)?;
    // Under our own launcher that one speaks.
    if world.comm.rank() == 0 && !spawned_us() {
        requests.answer(StartupStage::Nothing)?;
    }
    // Not before: until the runtime is started, this process has one thread.
    supervised.map_or(Ok(()), |supervised| supervised.follow(stop))?;
    let locks = RunLocks::of(args.group.clone());
    locks.follow(&args.folder()?)?;
    world = world.holding(locks);
    let workers = args.speed.workers(launched, &world.runtime)?.auditing(args.faults.audit);
    let mut exec = ExecOptions {
        stop: Arc::clone(stop),
        keep: Arc::clone(&requests.keep),
        ..options(args, curriculum, workers)
    };
    if launched.is_none() && (args.faults.min_ranks.is_some() || args.faults.replicate) {
        contract::note!(
            "note: --min-ranks and --replicate are for several ranks; with one rank they do nothing"
        );
    }
    if launched.is_none() && args.ranks.transport() != Transport::Auto {
        contract::note!("note: --transport is for several ranks; one sends nothing");
    }
    if let Some(launched) = launched {
        launch::first_words(launched.place.rank);
    }
    // Those who are under way read it when they began, and an amendment may have come since.
    let of_run = Location::from(exec.out.join("run.toml"));
    let joins = launch::started_again() && exec.out.join("run.toml").exists();
    let curriculum = if joins { &of_run } else { curriculum };
    let opened = OpenedCurriculum::open(curriculum)
        .inspect_err(|fault| world.comm.report(&fault.to_string()));
    // Ranks agree on it after their first step.
    if opened.is_ok() && launched.is_none() && stops_early(stop) {
        return Ok((ExitInfo { spoke_first: true, missed: None }, Ok(())));
    }
    let outcome = opened.and_then(|opened| {
        exec.tasks = args.metrics.tasks(&opened)?;
        if args.speed.workers.is_none() {
            fit_workers(&mut exec, &opened, &world)?;
        }
        train(&opened, &exec, &mut world)
    });
    let (spoke_first, outcome) = match outcome {
        Ok(outcome) if world.comm.rank() == 0 => (true, print(&outcome, &exec, args.json)),
        Ok(_) => (true, Ok(())),
        Err(fault) => (world.comm.spoke_first(), Err(fault)),
    };
    // Ranks are numbered as launched unless they met again, and then they do not end for a lost one.
    let missed = world.comm.lost().and_then(|lost| lost.first().copied());
    Ok((ExitInfo { spoke_first, missed }, outcome))
}

impl Args {
    /// The run's folder.
    pub(crate) fn folder(&self) -> Result<PathBuf> {
        let missing = || Fault::usage("--curriculum is missing");
        let curriculum = self.curriculum.as_ref().ok_or_else(missing)?;
        let out = self.out.clone().unwrap_or_else(|| default_folder(curriculum));
        if !out.join("ledger.jsonl").exists() {
            storage::apart::refuse_shared(&out.as_path().into())?;
        }
        Ok(out)
    }

    /// Holds the run's folder for the processes that this one is about to start.
    pub(crate) fn lock_folder(&self) -> Result<RunLocks> {
        let locks = RunLocks::of(self.group.clone());
        RunFolder::new(&self.folder()?).take(&locks, Duration::ZERO)?;
        Ok(locks)
    }

    /// How many ranks to start, if it is for this process to start them.
    pub(crate) fn ranks_to_spawn(&mut self) -> Result<Option<u32>> {
        self.speed.choose_device(Some(&self.folder()?));
        self.ranks.to_spawn(&self.speed)
    }
}

/// The arguments by which a process that is started holds the same as this one.
pub(crate) fn of_group(locks: &RunLocks) -> Vec<OsString> {
    ["--group", locks.group()].map(OsString::from).into()
}

/// Whether a run was asked to stop before it began, as is said then.
fn stops_early(stop: &AtomicBool) -> bool {
    let asked = stop.load(Ordering::Relaxed);
    if asked {
        contract::note!(
            "stopped as asked before the first step: nothing was trained; the same command starts the run"
        );
    }
    asked
}

/// Refuses to ask for more ranks after a loss than there are before.
fn enough(min_ranks: Option<u32>, count: u32) -> Result<()> {
    match min_ranks.filter(|least| *least > count) {
        None => Ok(()),
        Some(least) => Err(Fault::usage("there are not so many ranks to begin with")
            .at("--min-ranks")
            .found(least)
            .wanted(format!("at most {count}"))),
    }
}

fn print(outcome: &RunOutcome, exec: &ExecOptions, json: bool) -> Result<()> {
    let RunOutcome { step, steps, state } = *outcome;
    let out = exec.out.display().to_string();
    let answer = serde_json::json!({
        "step": step, "steps": steps, "done": step == steps, "state": state, "run": out,
    });
    terminal::answer(json, &answer, || {
        let state = state.map_or_else(|| "none".to_owned(), |digest| digest.to_string());
        let ended = if step == steps { "done" } else { "stopped" };
        format!("{ended} after step {step} of {steps} | state {state} | {out}\n")
    })
}

fn options(args: &Args, curriculum: &Location, workers: Workers) -> ExecOptions {
    let mut exec = ExecOptions::new(args.out.clone().unwrap_or_else(|| default_folder(curriculum)));
    exec.workers = workers;
    exec.prefetch =
        PrefetchOptions { threads: args.speed.loader_threads, depth: args.speed.prefetch };
    (exec.grad_reduce, exec.flat) = args.ranks.ways();
    exec.degrees = args.ranks.degrees();
    exec.transport = args.ranks.transport();
    exec.min_ranks = args.faults.min_ranks;
    exec.replicate = args.faults.replicate;
    let of = &args.checkpoints;
    exec.checkpoint_every = of.checkpoint_every;
    exec.retention = Retention {
        newest: of.keep as usize,
        every: of.keep_every,
        aged: !of.keep_latest,
        pinned: of.snapshot_keep as usize,
    };
    exec.checkpoint_timeout = of.checkpoint_timeout;
    exec.checkpoints.clone_from(&of.checkpoints);
    exec.snapshots = SnapshotOptions {
        states: of.snapshots,
        every: of.snapshot_every,
        spike: of.snapshot_on_spike,
    };
    exec.restart = of.restart;
    let of = &args.metrics;
    exec.metrics_exec.clone_from(&of.metrics_exec);
    exec.validation = Validation { every: of.validate_every, windows: of.validation_sequences };
    exec.stop_after = args.stop_after;
    exec.options.clone_from(&args.options_text);
    exec.progress = !args.quiet;
    exec
}

fn default_folder(curriculum: &Location) -> PathBuf {
    // Of a file the bytes of its name, whatever they are: two names may look alike.
    let name = match curriculum {
        Location::Local(path) => path.clone(),
        Location::Object(_) => curriculum.name().into(),
    };
    Path::new("runs").join(name.file_stem().unwrap_or("run".as_ref()))
}
