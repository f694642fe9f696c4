//! One file per command: parse, call the library, print.

pub(crate) mod attribute;
pub(crate) mod bench;
mod bench_attention;
mod bench_experts;
mod bench_hash;
pub(crate) mod bench_machine;
pub(crate) mod bench_step;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod devices;
pub(crate) mod drawing;
pub(crate) mod explain;
pub(crate) mod export;
pub(crate) mod fork;
pub(crate) mod import;
pub(crate) mod options;
pub(crate) mod plan;
mod plan_cluster;
pub(crate) mod ranks;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod schema;
pub(crate) mod show;
pub(crate) mod spikes;
pub(crate) mod supervise;
pub(crate) mod train;
pub(crate) mod watch;
pub(crate) mod whatif;

use std::ffi::c_int;
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::builder::{OsStringValueParser, RangedU64ValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue};
use contract::fault::more_of;
use contract::{Fault, Result, shell};
use kernels::device;
use kernels::ops::{ANSWERS, CHOICES, TABLES, VARIABLE};
use kernels::runtime::{self, KernelTable, RuntimeOptions};
use kernels::signals;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::{flag, low_level};
use store::Location;
use tch::Device;
use trainer::launch::{LaunchedRank, spawned_us};
use trainer::ledger::Follower;
use trainer::model;
use trainer::replay::SavedStateLimits;
use trainer::workers::Workers;

/// Reads a place: a path or a URL.
pub(crate) fn place() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text| storage::locate_argument(&text))
}

/// Reads a place at which something is created.
pub(crate) fn output_place() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text| storage::locate_output(&text))
}

/// Reads a path of this machine; `otherwise` says what to do with what lies elsewhere.
pub(crate) fn local(otherwise: &'static str) -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(move |text| storage::local_argument(&text, otherwise))
}

/// "64M" as a number.
fn bytes(place: &str, text: &str) -> Result<u64> {
    let wrong = || {
        Fault::usage("this is not a size")
            .at(place)
            .found(text)
            .wanted("a whole number, with K, M or G if need be, up to 8G")
    };
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1 << 10),
        Some((at, 'm' | 'M')) => (&text[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&text[..at], 1 << 30),
        _ => (text, 1),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(factor).filter(|bytes| (1..=8 << 30).contains(bytes)).ok_or_else(wrong)
}

/// The smallest and the largest size that flags ask for.
fn sizes(from: &str, to: &str) -> Result<(u64, u64)> {
    let sizes = (bytes("--from", from)?, bytes("--to", to)?);
    if sizes.0 > sizes.1 {
        return Err(Fault::usage("no size lies between the smallest and the largest")
            .at("--from")
            .found(from)
            .wanted(format!("at most --to, {to}")));
    }
    Ok(sizes)
}

/// Reads the folder of a run.
pub(crate) fn run() -> impl TypedValueParser<Value = PathBuf> {
    local("copy the run's folder here: its checkpoints may stay where they are")
}

/// The run that a command is about, in either form.
#[derive(clap::Args)]
pub(crate) struct Run {
    /// The run's folder.
    #[arg(value_parser = run(), required_unless_present = "named")]
    run: Option<PathBuf>,
    /// The same, by its flag.
    #[arg(id = "named", long = "run", value_name = "RUN", value_parser = run(), conflicts_with = "run")]
    named: Option<PathBuf>,
}

impl Run {
    /// Its folder.
    pub(crate) fn path(&self) -> &Path {
        self.run.as_deref().or(self.named.as_deref()).unwrap_or(Path::new(""))
    }
}

/// A refusal of the command line with what to type instead, where that is known: a curriculum is named by its flag, and
/// how many steps there are is its own.
pub(crate) fn advised(mut refusal: clap::Error) -> clap::Error {
    let said = |kind| match refusal.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let trains = std::env::args().nth(1).is_some_and(|first| first.starts_with('-'));
    let word = said(ContextKind::InvalidSubcommand).or_else(|| said(ContextKind::InvalidArg));
    let advice = match word {
        Some(file) if file.ends_with(".toml") && !file.starts_with('-') => {
            format!("to train what a curriculum says: ztrain --curriculum {}", shell::word(&file))
        }
        Some(flag) if flag == "--steps" && trains => {
            "a curriculum says how many steps there are; --stop-after N ends earlier".to_owned()
        }
        _ => return refusal,
    };
    // The usage would be that of what was guessed.
    for guess in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::Usage] {
        refusal.remove(guess);
    }
    refusal.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice.into()]));
    refusal
}

/// The device that follows from the run and the machine.
const AUTO: &str = "auto";

/// Flags that only decide speed and place; no value of them can change a bit.
#[derive(clap::Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct Speed {
    /// Where to compute: cpu, cuda or cuda:1 (HIP devices answer to the same name). auto is the kind of device on which
    /// the run began; of a new run, a GPU if a driver shows one, else the CPU.
    #[arg(long, value_name = "DEVICE", default_value = AUTO, value_parser = device_name)]
    pub(crate) device: String,
    /// Micro-batches computed at once, one math thread each [default: the cores, shared among the ranks here; on a GPU
    /// 1].
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) workers: Option<usize>,
    /// Keep only what enters each layer until its backward pass, and compute the rest again: less memory, more time.
    #[arg(long)]
    pub(crate) recompute: bool,
    /// Threads that read batches.
    #[arg(long, help_heading = "Data", value_name = "N", default_value_t = 1)]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub(crate) loader_threads: usize,
    /// Batches that wait to be trained on.
    #[arg(long, help_heading = "Data", value_name = "N", default_value_t = 2)]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(1..=65_536))]
    pub(crate) prefetch: usize,
}

/// Flags about states that a replay leaves for the next question.
#[derive(clap::Args)]
#[command(next_help_heading = "For the next question")]
pub(crate) struct SavedStateFlags {
    /// Newest states before replayed steps that are kept in RUN/replays, so that the next question about such a step
    /// begins there; 0 keeps none. No run continues from them.
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    keep_states: usize,
    /// GiB that they take together at most; one that is larger is not kept.
    #[arg(long, value_name = "GIB", default_value_t = 16)]
    keep_gib: u64,
}

impl SavedStateFlags {
    /// What they say.
    pub(crate) fn keep(&self) -> SavedStateLimits {
        SavedStateLimits { states: self.keep_states, bytes: self.keep_gib.saturating_mul(1 << 30) }
    }

    /// As flags.
    pub(crate) fn words(&self) -> String {
        format!("--keep-states {} --keep-gib {}", self.keep_states, self.keep_gib)
    }
}

impl Speed {
    /// Replaces `auto` by the device on which the run in this folder began; without one, by a GPU if a driver shows
    /// one, which is said.
    pub(crate) fn choose_device(&mut self, run: Option<&Path>) {
        if self.device != AUTO {
            return;
        }
        let recorded = run.and_then(|run| Follower::open(&run.join("ledger.jsonl")).ok());
        let recorded =
            recorded.and_then(|(head, _)| Some(head.kernel_table["device"].as_str()?.to_owned()));
        self.device = recorded.unwrap_or_else(|| match device::visible() {
            None => "cpu".to_owned(),
            Some(name) => {
                if !spawned_us() {
                    contract::note!(
                        "note: computing on a GPU ({name}); --device cpu computes on the CPU"
                    );
                }
                "cuda".to_owned()
            }
        });
    }

    /// Everything by default, on a device.
    pub(crate) fn on(device: &str) -> Self {
        Speed {
            device: device.to_owned(),
            workers: None,
            recompute: false,
            loader_threads: 1,
            prefetch: 2,
        }
    }

    /// Workers that compute by the operations of `table`: as many as asked for, else the cores of the machine, shared
    /// among the ranks on it. A GPU computes one micro-batch after the other: there one thread queues them, and more
    /// would only hold more of its memory.
    pub(crate) fn workers(
        &self,
        launched: Option<&LaunchedRank>,
        table: &KernelTable,
    ) -> Result<Workers> {
        let ranks = launched.map_or(1, |launched| launched.local_world.max(1));
        let shared = || match table.device.as_str() {
            "cpu" => Workers::new(Workers::available().count() / ranks as usize),
            _ => Workers::new(1),
        };
        let keep = match self.recompute {
            true => model::ActivationCheckpointing::LayerInputs,
            false => model::ActivationCheckpointing::Everything,
        };
        let workers = self.workers.map_or_else(shared, Workers::new);
        let ops = table.ops().map_err(|error| machine(&self.device, &error))?;
        Ok(workers.keeping(keep).computing_by(ops))
    }

    /// Refuses operations or a device that no rank of this machine has, before any of them starts. The device is only
    /// looked for: to start it would take some of its memory for as long as the ranks run.
    pub(crate) fn refuse_missing(&self) -> Result<()> {
        known_choices()?;
        device::open(&self.device).map(drop).map_err(|error| machine(&self.device, &error))
    }

    /// Puts the determinism switches in force, then opens the device. Each rank on a machine takes one of its own.
    pub(crate) fn start(&self, launched: Option<&LaunchedRank>) -> Result<(Device, KernelTable)> {
        let name = match launched {
            Some(launched) if self.device == "cuda" => launched.device(),
            _ => self.device.clone(),
        };
        known_choices()?;
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        trainer::memory::refuse_limit(&limits)?;
        let options = RuntimeOptions { device: name.clone() };
        let table = runtime::start(&options).map_err(|error| machine(&name, &error))?;
        let device = device::open(&name).map_err(|error| machine(&name, &error))?;
        Ok((device, table))
    }
}

/// Refuses variables that choose kernels where they name what does not exist.
fn known_choices() -> Result<()> {
    known("operations", VARIABLE, &TABLES)?;
    let mut choices = CHOICES.iter();
    choices.try_for_each(|choice| known(choice.what, choice.variable, &ANSWERS))
}

/// Refuses a variable that names what does not exist, before a device is blamed for it.
fn known(what: &str, variable: &str, all: &[&str]) -> Result<()> {
    let Some(asked) = std::env::var_os(variable) else { return Ok(()) };
    if asked.is_empty() || all.iter().any(|known| asked == *known) {
        return Ok(());
    }
    Err(Fault::usage(format!("there are no such {what}"))
        .at(variable)
        .found(asked.display())
        .wanted(format!("one of {}, or nothing", all.join(", "))))
}

/// The first SIGINT, SIGTERM or SIGHUP lets the step at hand end and be kept; the second one ends the process. A
/// terminal sends its signal to a rank and to its launcher, which asks the rank to stop as well: that is no second one.
/// A run that `nohup` started outlives its terminal.
pub(crate) fn listen(stop: &Arc<AtomicBool>) -> Result<()> {
    const SIGNALS: [c_int; 3] = [SIGINT, SIGTERM, SIGHUP];
    let heard: [Arc<AtomicBool>; SIGNALS.len()] = Default::default();
    let second = |signal, heard| flag::register_conditional_shutdown(signal, 130, heard);
    let listens = |place: usize| {
        let (signal, flag_of_signal) = (SIGNALS[place], &heard[place]);
        second(signal, Arc::clone(flag_of_signal))?;
        flag::register(signal, Arc::clone(flag_of_signal))?;
        // Two signals may interrupt each other: each says that it is there before it looks for another, so one finds
        // the other.
        for other in heard.iter().filter(|other| !Arc::ptr_eq(flag_of_signal, other)) {
            second(signal, Arc::clone(other))?;
        }
        flag::register(signal, Arc::clone(stop))
    };
    for place in (0..SIGNALS.len()).filter(|place| !is_ignored(SIGNALS[*place])) {
        let cannot = |error: io::Error| cannot_listen(&error);
        listens(place).map_err(cannot)?;
    }
    // Those too that came before.
    signals::unblock();
    Ok(())
}

/// What a run is asked for from outside.
#[derive(Clone, Default)]
pub(crate) struct SignalRequests {
    /// To stop after the step at hand.
    pub(crate) stop: Arc<AtomicBool>,
    /// To keep the state after it, and to go on.
    pub(crate) keep: Arc<AtomicBool>,
}

impl SignalRequests {
    /// Listens as [`listen`] does; to SIGUSR1 and SIGUSR2 besides, which Slurm sends a while before it ends a job: the
    /// first has the state kept, the second is a request to stop that no other one waits for.
    pub(crate) fn listen(&self) -> Result<()> {
        let cannot = |error: io::Error| cannot_listen(&error);
        flag::register(SIGUSR1, Arc::clone(&self.keep)).map_err(cannot)?;
        flag::register(SIGUSR2, Arc::clone(&self.stop)).map_err(cannot)?;
        listen(&self.stop)
    }

    /// Says at once what was asked for, also before this: the step at hand takes its time. Ranks that this process
    /// starts are asked to keep the state as well.
    pub(crate) fn answer(&self, ranks: StartupStage) -> Result<()> {
        const STOP: &str = "asked to stop: the step at hand ends and the state is kept; a second SIGTERM or SIGINT ends the run \
                            at once";
        const KEEP: &str = "asked by SIGUSR1 to keep the state after this step; the run continues";
        const OTHERS: &str = "SIGUSR1 is not handed on to the ranks of another launcher: send it to them, as Slurm does";
        let stops = [SIGTERM, SIGINT, SIGHUP, SIGUSR2];
        let before = self.stop.load(Ordering::Relaxed);
        let mut answered = before;
        if before {
            contract::note!("{STOP}");
        }
        let stops = stops.into_iter().filter(|signal| !is_ignored(*signal));
        on_signals(stops, None, move || {
            if !std::mem::replace(&mut answered, true) {
                contract::note!("{STOP}");
            }
        })?;
        on_signals([SIGUSR1].into_iter(), Some(&self.keep), move || {
            contract::note!("{}", if ranks == StartupStage::Others { OTHERS } else { KEEP });
            // There may be none yet.
            while ranks == StartupStage::Ranks && !hand_on() {
                std::thread::sleep(LOOK);
            }
        })
    }
}

/// What a process that is asked for something has started, or is about to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartupStage {
    /// Nothing: it computes itself.
    Nothing,
    /// Processes of this program.
    Ranks,
    /// Another launcher.
    Others,
}

/// Between two looks for ranks.
const LOOK: Duration = Duration::from_millis(50);

/// The fault of a process that cannot hear a signal.
fn cannot_listen(error: &io::Error) -> Fault {
    Fault::machine(format!("cannot listen to signals: {error}")).hint(more_of(error))
}

/// Does something whenever one of these signals comes, or where `early` says that one has come, on a thread of its own.
fn on_signals(
    signals: impl Iterator<Item = c_int>,
    early: Option<&AtomicBool>,
    mut act: impl FnMut() + Send + 'static,
) -> Result<()> {
    let cannot = |error: io::Error| cannot_listen(&error);
    let (mut heard, comes) = UnixStream::pair().map_err(cannot)?;
    for signal in signals {
        let comes = comes.try_clone().map_err(cannot)?;
        low_level::pipe::register(signal, comes).map_err(cannot)?;
    }
    let early = early.is_some_and(|early| early.load(Ordering::Relaxed));
    let listen = move || {
        if early {
            act();
        }
        // The other end is never closed.
        while heard.read_exact(&mut [0]).is_ok() {
            act();
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(listen);
    thread.map(drop).map_err(|error| Fault::not_started("a thread", &error))
}

/// Hands SIGUSR1 on to the processes of this program that this one has started; whether there is one. One that has only
/// begun keeps it until it listens.
fn hand_on() -> bool {
    let program = std::fs::read_link("/proc/self/exe").ok();
    let parent = format!("PPid:\t{}\n", std::process::id());
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut any = false;
    for process in all.map(|entry| entry.path()) {
        let status = std::fs::read_to_string(process.join("status")).unwrap_or_default();
        if status.contains(&parent) && std::fs::read_link(process.join("exe")).ok() == program {
            let id = process.file_name().unwrap_or_default();
            let sent = Command::new("kill").arg("-USR1").arg(id).stderr(Stdio::null()).status();
            // One that has ended meanwhile has nothing to keep.
            any |= sent.is_ok_and(|sent| sent.success());
        }
    }
    any
}

/// Whether the parent process made this program ignore SIGHUP. A shell also makes background programs ignore SIGINT,
/// but only means its own terminal's, so SIGINT is still handled.
fn is_ignored(signal: c_int) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    signal == SIGHUP && mask.is_some_and(|mask| mask & (1 << (SIGHUP - 1)) != 0)
}

/// A flag's number above zero.
pub(crate) fn above_zero(text: &str) -> std::result::Result<f64, &'static str> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or("wanted a number above 0")
}

/// A flag's number, zero or above.
pub(crate) fn not_negative(text: &str) -> std::result::Result<f64, &'static str> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or("wanted a number, 0 or above")
}

/// A flag's step, from 1.
pub(crate) fn step(text: &str) -> std::result::Result<u64, &'static str> {
    let number = text.parse().ok().filter(|number: &u64| *number > 0);
    number.ok_or("wanted a step: a whole number from 1 on")
}

/// A flag's step, or 0 for the beginning.
pub(crate) fn step_or_none(text: &str) -> std::result::Result<u64, &'static str> {
    text.parse().map_err(|_| "wanted a step, or 0: a whole number")
}

/// A flag's time to wait.
pub(crate) fn patience(text: &str) -> std::result::Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=1e7).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("wanted seconds, from 0.1 to 10 million")
}

/// Steps `A..B`, from A to before B.
pub(crate) fn step_range(text: &str) -> std::result::Result<Range<u64>, &'static str> {
    let steps = text.split_once("..").and_then(|(from, to)| {
        Some(from.trim().parse::<u64>().ok()?..to.trim().parse::<u64>().ok()?)
    });
    let steps = steps.filter(|steps| steps.start > 0 && !steps.is_empty());
    steps.ok_or("wanted A..B with 1 <= A < B, as in 10..20")
}

/// The name of a device that might be.
fn device_name(text: &str) -> std::result::Result<String, &'static str> {
    let number = text.strip_prefix("cuda:");
    let known =
        [AUTO, "cpu", "cuda"].contains(&text) || number.is_some_and(|n| n.parse::<u16>().is_ok());
    if known { Ok(text.to_owned()) } else { Err("known devices are auto, cpu, cuda and cuda:N") }
}

fn machine(device: &str, error: &kernels::Error) -> Fault {
    let fault = Fault::machine(error.to_string()).at(format!("--device {device}"));
    match device {
        "cpu" => fault,
        _ => fault.hint("--device cpu computes on the CPU; `ztrain devices` lists what is here"),
    }
}
