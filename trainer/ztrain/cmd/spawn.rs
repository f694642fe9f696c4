//! Ranks of one machine: `--nproc N` starts this program N times and holds the store in which they meet.
//!
//! A rank's standard input is its tie to the launcher: "stop" asks it to stop, and its end tells it that the launcher is
//! gone, however that ended. So no rank outlives its launcher, and nobody needs to send a signal to anybody.

use std::io::{BufRead as _, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contract::{Class, Fault, Result};
use kernels::group::{self, Group, Store, Transport};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use trainer::parallel::launch::{self, Launched};
use trainer::parallel::{Schedule, lost};

/// Set for the ranks that we start ourselves.
const LAUNCHER: &str = "ZTRAIN_LAUNCHER";

/// Between two looks at the ranks.
const LOOK: Duration = Duration::from_millis(10);

/// What the other ranks get to say what happened, once one has failed.
const GRACE: Duration = Duration::from_secs(3);

/// However short the patience later, the first meeting of the ranks that we start gets this much.
const START: Duration = Duration::from_secs(60);

/// Flags about ranks.
#[derive(clap::Args)]
#[command(next_help_heading = "Ranks (never bits)")]
pub(crate) struct Ranks {
    /// Train with so many processes on this machine; under torchrun, srun or mpirun the environment decides.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    nproc: Option<u32>,
    /// How long a rank waits for another before it names it and stops.
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = super::patience)]
    rank_timeout: Duration,
    /// Whether a rank adds whole subtrees of a run of micro-batches before it sends (fewest bytes), or they are dealt in turn and
    /// sent at once (least memory).
    #[arg(long, value_name = "HOW", value_enum, default_value = "subtree")]
    schedule: How,
    /// Send from each rank to each other as if all were on one machine, instead of adding on each machine first.
    #[arg(long)]
    flat: bool,
    /// How tensors travel between ranks: from GPU to GPU by RCCL or NCCL (ZTRAIN_RCCL names the library to open), through
    /// plain memory by Gloo, or the first where every rank has it.
    #[arg(long, value_name = "HOW", value_enum, default_value = "auto")]
    transport: By,
    /// Take the ranks for so many on each machine, to try what crosses between them [default: as the launcher says].
    #[arg(long, value_name = "3,2", value_delimiter = ',')]
    nodes: Vec<u32>,
}

/// A schedule, by its name.
#[derive(Clone, Copy, clap::ValueEnum)]
enum How {
    Subtree,
    Streaming,
}

/// A transport, by its name.
#[derive(Clone, Copy, clap::ValueEnum)]
enum By {
    Auto,
    Gloo,
    Rccl,
}

impl Ranks {
    /// How tensors travel between the ranks.
    pub(crate) fn transport(&self) -> Transport {
        match self.transport {
            By::Auto => Transport::Auto,
            By::Gloo => Transport::Gloo,
            By::Rccl => Transport::Rccl,
        }
    }

    /// How many ranks to start, if it is for this process to start them.
    pub(crate) fn to_spawn(&self) -> Result<Option<u32>> {
        let Some(count) = self.nproc.filter(|_| !launched_us()) else { return Ok(None) };
        if self.launched()?.is_some() {
            return Err(Fault::usage("a launcher has started this rank already")
                .at("--nproc")
                .found(count)
                .hint("leave --nproc out under torchrun, srun and mpirun"));
        }
        Ok((count > 1).then_some(count))
    }

    /// The place of this process among others, if it has one.
    pub(crate) fn launched(&self) -> Result<Option<Launched>> {
        let mut launched = launch::place(|name| std::env::var(name).ok())?;
        if let (Some(Launched { place, .. }), false) = (&mut launched, self.nodes.is_empty()) {
            let ranks = (0..).zip(&self.nodes);
            let mut ranks = ranks.flat_map(|(node, count)| (0..*count).map(move |_| node));
            let wrong = || {
                Fault::usage("the machines do not have as many ranks as there are")
                    .at("--nodes")
                    .found(format!("{:?}", self.nodes))
                    .wanted(format!("ranks of each machine, {} in all", place.world))
            };
            if self.nodes.iter().map(|count| u64::from(*count)).sum::<u64>()
                != u64::from(place.world)
            {
                return Err(wrong());
            }
            let node: Option<u32> = ranks.nth(place.rank as usize);
            place.node = node.ok_or_else(wrong)?.to_string();
        }
        Ok(launched)
    }

    /// How the ranks deal micro-batches, and whether they pass over machines.
    pub(crate) fn ways(&self) -> (Schedule, bool) {
        let schedule = match self.schedule {
            How::Subtree => Schedule::Subtree,
            How::Streaming => Schedule::Streaming,
        };
        (schedule, self.flat)
    }

    /// Meets the other ranks. `stop` is set when the launcher asks this rank to stop.
    pub(crate) fn meet(&self, launched: &Launched, stop: &Arc<AtomicBool>) -> Result<Group> {
        if launched_us() {
            follow_launcher(Arc::clone(stop));
        }
        // Our own launcher knows its processes, which start one after the other.
        let timeout = if launched_us() { START.max(self.rank_timeout) } else { self.rank_timeout };
        let mut group =
            Group::open(&launched.place, timeout, &|word| eprintln!("{word}")).map_err(lost)?;
        group.wait_at_most(self.rank_timeout);
        Ok(group)
    }
}

/// Whether this process is a rank that [`ranks`] started.
pub(crate) fn launched_us() -> bool {
    std::env::var_os(LAUNCHER).is_some()
}

/// Does what the launcher says, until it says nothing more.
fn follow_launcher(stop: Arc<AtomicBool>) {
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            match line.as_deref() {
                Ok("stop") => stop.store(true, Ordering::Relaxed),
                _ => break,
            }
        }
        group::vanish(Class::Machine.exit_code());
    });
}

/// Starts `count` ranks of this very command and waits for them.
pub(crate) fn ranks(count: u32) -> Result<u8> {
    let store = Store::serve("127.0.0.1", 0, "launcher/", START).map_err(lost)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(|error| Fault::machine(format!("cannot listen to signals: {error}")))?;
    }
    let program = std::env::current_exe()
        .map_err(|error| Fault::machine(format!("cannot find this program: {error}")))?;
    let mut children = Vec::new();
    for rank in 0..count {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).stdin(Stdio::piped());
        let number = |name: &str, value: u32| (name.to_owned(), value.to_string());
        command.envs([
            number("RANK", rank),
            number("LOCAL_RANK", rank),
            number("WORLD_SIZE", count),
            number("LOCAL_WORLD_SIZE", count),
            number("GROUP_RANK", 0),
            number("MASTER_PORT", u32::from(store.port())),
        ]);
        command.env("MASTER_ADDR", "127.0.0.1").env("TORCHELASTIC_USE_AGENT_STORE", "True");
        command.env(LAUNCHER, std::process::id().to_string());
        let child = command.spawn().map_err(|error| {
            Fault::machine(format!("cannot start rank {rank}: {error}")).hint("raise `ulimit -u`")
        })?;
        children.push(Rank { rank, child, ended: None });
    }
    wait(children, &stop)
}

/// A rank that was started.
struct Rank {
    rank: u32,
    child: Child,
    ended: Option<ExitStatus>,
}

/// Waits for all; when one fails, the others get a moment to end by themselves.
fn wait(mut ranks: Vec<Rank>, stop: &AtomicBool) -> Result<u8> {
    let (mut failed, mut asked): (Option<Instant>, bool) = (None, false);
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        if stop.load(Ordering::Relaxed) && !asked {
            asked = true;
            for rank in &mut ranks {
                // A rank that is gone already needs no word.
                let _ = rank.child.stdin.as_mut().map(|input| input.write_all(b"stop\n"));
            }
        }
        for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            let ended = rank.child.try_wait().map_err(|error| {
                Fault::machine(format!("cannot wait for rank {}: {error}", rank.rank))
            })?;
            if let Some(status) = ended.filter(|status| !status.success()) {
                failed.get_or_insert_with(Instant::now);
                if status.code().is_none() {
                    eprintln!("error: rank {} was ended from outside: {status}", rank.rank);
                }
            }
            rank.ended = ended;
        }
        if failed.is_some_and(|since| since.elapsed() > GRACE) {
            for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
                let _ = rank.child.kill();
            }
        }
        thread::sleep(LOOK);
    }
    Ok(exit_code(&ranks))
}

/// The code of the rank that knows most: those that only lost another one say "machine".
fn exit_code(ranks: &[Rank]) -> u8 {
    let lost = Class::Machine.exit_code();
    let code = |rank: &Rank| {
        let code = rank.ended.and_then(|status| status.code());
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(lost)
    };
    let codes: Vec<u8> = ranks.iter().map(code).filter(|code| *code != 0).collect();
    let told = codes.iter().find(|code| **code != lost);
    told.or(codes.first()).copied().unwrap_or(0)
}
