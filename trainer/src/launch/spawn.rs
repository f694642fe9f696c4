//! `--nproc N`: this program, started N times on this machine, with the store in which the ranks meet.

use std::io::BufRead as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use contract::{Class, Fault, Result};
use kernels::group::{self, Agent, Group, Rendezvous, RunKey, Store};

use super::key::{KEY, KEY_FILE};
use super::place::{self, Launched};
use super::supervise::{Elastic, Rank, supervise};
use crate::refusal::lost;

/// Set for the ranks that we start ourselves.
pub(super) const LAUNCHER: &str = "ZTRAIN_LAUNCHER";

/// However short the patience later, the first meeting of the ranks that we start gets this much: they start one after the
/// other, on a machine that may have few cores.
const START: Duration = Duration::from_secs(60);

/// Whether this process is a rank that [`spawn`] started.
pub fn spawned_us() -> bool {
    std::env::var_os(LAUNCHER).is_some()
}

/// Starts `count` ranks of this very command and waits for them; once `stop` is set they are asked to stop. When one fails the
/// others are ended, unless as many as `min_ranks` are left to go on. The exit code is that of the rank that knows most.
pub fn spawn(count: u32, min_ranks: Option<u32>, stop: &AtomicBool) -> Result<u8> {
    let secret = RunKey::draw().map_err(lost)?;
    let key = RunKey::of(&secret);
    let store = Store::serve("127.0.0.1", 0, "launcher/", &key, START).map_err(lost)?;
    let program = std::env::current_exe()
        .map_err(|error| Fault::machine(format!("cannot find this program: {error}")))?;
    let start = |rank: u32| {
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
        command.env("MASTER_ADDR", "127.0.0.1").env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.env(LAUNCHER, std::process::id().to_string());
        // An environment is for its owner's eyes alone, unlike the arguments of a command.
        command.env(KEY, &secret).env_remove(KEY_FILE);
        let child = command.spawn().map_err(|error| {
            Fault::machine(format!("cannot start rank {rank}: {error}")).hint("raise `ulimit -u`")
        })?;
        Ok(Rank::new(rank, child))
    };
    let name = place::name(&|variable: &str| std::env::var(variable).ok());
    let agent = |least| {
        let agent = Agent::open(store.port(), &name, &key, count, START).map_err(lost)?;
        Ok(Elastic::new(agent, least))
    };
    let elastic = min_ranks.map(agent).transpose()?;
    supervise((0..count).map(start).collect::<Result<_>>()?, elastic, stop)
}

/// Meets the other ranks, of which each is awaited for `timeout`. `stop` is set when our launcher asks this rank to stop.
pub fn meet(launched: &Launched, timeout: Duration, stop: &Arc<AtomicBool>) -> Result<Group> {
    if spawned_us() {
        follow_launcher(Arc::clone(stop));
    }
    let first = if spawned_us() { START.max(timeout) } else { timeout };
    let tell = |word: &str| contract::note!("{word}");
    let mut group = Group::open(&launched.place, first, &tell).map_err(lost)?;
    group.wait_at_most(timeout);
    Ok(group)
}

/// Where the ranks of `group`, which were launched so, meet again if some are lost.
pub fn rendezvous(launched: &Launched, group: &Group) -> Result<Rendezvous> {
    Rendezvous::open(&launched.place, group, group.timeout()).map_err(lost)
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
