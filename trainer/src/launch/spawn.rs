//! `--nproc N`: starts this program N times on this machine, and serves the store in which the ranks meet.

use std::ffi::OsString;
use std::io::BufRead as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use contract::{Class, Fault, Result};
use kernels::group::{self, Agent, Group, KeyValueStore, Rendezvous, RunKey};
use kernels::signals;

use super::background::in_background;
use super::key::{KEY, KEY_FILE};
use super::launcher::{Elastic, Launcher, Rank};
use super::place::{self, LAUNCHER, LaunchedRank, spawned_us};
use super::supervisor::SupervisorLink;
use crate::refusal::lost;

/// Set for a restarted rank that has to join the others.
const AGAIN: &str = "ZTRAIN_STARTED_AGAIN";

/// The minimum timeout for the first meeting of the ranks that we start: they start one after the other, on a machine
/// that may have few cores.
const START: Duration = Duration::from_secs(60);

/// The minimum memory of a rank before it loads anything of a run: that of the program with its libraries.
const LEAST: u64 = 64 << 20;

/// The ranks to start, and how failures are handled.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The number of ranks.
    pub count: u32,
    /// After a rank is lost, the others continue if at least this many are left; `None`: they stop.
    pub min_ranks: Option<u32>,
    /// Evictions by a supervisor leave at least this many.
    pub stay: u32,
    /// The supervisor's requests, if there is one.
    pub supervised: Option<SupervisorLink>,
    /// Additional arguments of each rank.
    pub arguments: Vec<OsString>,
}

/// Starts `launch.count` ranks of the same command and waits for them; asks them to stop once `stop` is set. If one
/// fails, the others are ended, unless enough are left to continue. The exit code is the most specific one of the
/// ranks.
pub fn spawn(launch: &Launch, stop: &AtomicBool) -> Result<u8> {
    let Launch { count, min_ranks, stay, supervised, arguments } = launch;
    refuse_too_many(*count, store::memory::limit())?;
    let secret = RunKey::draw().map_err(lost)?;
    let key = RunKey::of(&secret);
    let store = KeyValueStore::serve("127.0.0.1", 0, "launcher/", &key, START).map_err(lost)?;
    let program = std::env::current_exe()
        .map_err(|error| Fault::machine(format!("cannot find this program: {error}")))?;
    let start = |rank: u32, again: bool| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).args(arguments).stdin(Stdio::piped());
        let number = |name: &str, value: u32| (name.to_owned(), value.to_string());
        command.envs([
            number("RANK", rank),
            number("LOCAL_RANK", rank),
            number("WORLD_SIZE", *count),
            number("LOCAL_WORLD_SIZE", *count),
            number("GROUP_RANK", 0),
            number("MASTER_PORT", u32::from(store.port())),
        ]);
        command.env("MASTER_ADDR", "127.0.0.1").env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.env(LAUNCHER, std::process::id().to_string());
        // The environment is readable only by the user, unlike arguments.
        command.env(KEY, &secret).env_remove(KEY_FILE);
        if again {
            command.env(AGAIN, "1");
        }
        let started = signals::spawn(&mut command);
        started.map_err(|error| Fault::not_started(&format!("rank {rank}"), &error))
    };
    let name = place::name(&|variable: &str| std::env::var(variable).ok());
    let watched = min_ranks.is_some() || supervised.is_some();
    let elastic = watched.then(|| Elastic::new(Agent::new(&store, &name, *count), *min_ranks));
    let ranks = (0..*count).map(|rank| Ok(Rank::new(rank, start(rank, false)?)));
    let ranks = ranks.collect::<Result<_>>()?;
    let supervision = supervised.clone().map(|supervised| supervised.begin(*stay));
    Launcher { ranks, elastic, supervision, store: &store, start: &start, stop }.run()
}

/// Refuses a number of ranks whose programs alone exceed the memory of the machine. The memory for training is checked
/// by each rank later.
fn refuse_too_many(ranks: u32, memory: u64) -> Result<()> {
    let most = memory / LEAST;
    if u64::from(ranks) <= most {
        return Ok(());
    }
    Err(Fault::machine("the memory of this machine is too small for so many ranks")
        .at("--nproc")
        .found(ranks)
        .wanted(format!("at most {most}: each program takes {} MiB and more", LEAST >> 20))
        .hint("give fewer: ranks on one machine that has no devices gain nothing over --workers"))
}

/// Whether this process replaces a lost rank, and has to join the others.
pub fn started_again() -> bool {
    std::env::var_os(AGAIN).is_some()
}

/// Joins running ranks in place of a lost one: returns when they have met again.
pub fn rejoin(
    launched: &LaunchedRank,
    least: u32,
    timeout: Duration,
    stop: &Arc<AtomicBool>,
) -> Result<(Group, Rendezvous)> {
    follow_launcher(Arc::clone(stop))?;
    let rendezvous = Rendezvous::rejoin(&launched.place, START.max(timeout)).map_err(lost)?;
    connected(rendezvous, least, timeout)
}

/// Connects the current generation, or the next one that succeeds.
fn connected(
    mut rendezvous: Rendezvous,
    least: u32,
    timeout: Duration,
) -> Result<(Group, Rendezvous)> {
    let tell = |word: &str| contract::note!("{word}");
    loop {
        match rendezvous.group(timeout, &tell) {
            Ok(group) => return Ok((group, rendezvous)),
            // Another rank was lost in the meantime.
            Err(_) => rendezvous.agree(&[], least, timeout).map_err(lost)?,
        }
    }
}

/// If ranks of our launcher failed to [`meet`] with `fault` because one of them was lost before, lets those that are
/// left meet; else returns the fault.
pub fn meet_without(
    launched: &LaunchedRank,
    least: u32,
    timeout: Duration,
    fault: Fault,
) -> Result<(Group, Rendezvous)> {
    if !spawned_us() || fault.class() != Class::Machine {
        return Err(fault);
    }
    let Ok(Some(mut rendezvous)) = Rendezvous::unmet(&launched.place, timeout) else {
        return Err(fault);
    };
    rendezvous.agree(&[], least, timeout).map_err(lost)?;
    connected(rendezvous, least, timeout)
}

/// Meets the other ranks, waiting for each up to `timeout`. `stop` is set when our launcher asks this rank to stop.
pub fn meet(launched: &LaunchedRank, timeout: Duration, stop: &Arc<AtomicBool>) -> Result<Group> {
    if spawned_us() {
        follow_launcher(Arc::clone(stop))?;
    }
    let first = if spawned_us() { START.max(timeout) } else { timeout };
    let tell = |word: &str| contract::note!("{word}");
    let mut group = Group::open(&launched.place, first, &tell).map_err(lost)?;
    group.wait_at_most(timeout);
    Ok(group)
}

/// The rendezvous where the ranks of `group` meet again if some are lost.
pub fn rendezvous(launched: &LaunchedRank, group: &Group) -> Result<Rendezvous> {
    Rendezvous::open(&launched.place, group, group.timeout()).map_err(lost)
}

/// Obeys the launcher's standard input until it ends.
fn follow_launcher(stop: Arc<AtomicBool>) -> Result<()> {
    in_background(move || {
        for line in std::io::stdin().lock().lines() {
            match line.as_deref() {
                Ok("stop") => stop.store(true, Ordering::Relaxed),
                _ => break,
            }
        }
        group::vanish(Class::Machine.exit_code());
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_programs_than_memory_holds_are_refused() {
        refuse_too_many(8, 8 * LEAST).unwrap();
        let fault = refuse_too_many(9, 8 * LEAST).unwrap_err();
        assert_eq!(fault.class(), Class::Machine);
        assert!(
            fault.to_string().contains("--nproc") && fault.to_string().contains('8'),
            "{fault}"
        );
    }
}
