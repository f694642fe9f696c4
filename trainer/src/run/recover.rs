//! After a loss, the remaining ranks meet again in the same processes, and continue as a run of fewer ranks.

use std::time::{Duration, Instant};

use contract::{Class, Fault, Result, Symptom};
use kernels::group::MembershipChange;
use serde_json::json;

use super::World;
use crate::events::Events;
use crate::exec::ExecOptions;
use crate::launch::last_words;
use crate::refusal::lost;

/// How often within [`WHILE`] ranks meet again although none was lost before they give up: the network may be at fault.
const IN_VAIN: usize = 3;

/// See [`IN_VAIN`].
const WHILE: Duration = Duration::from_secs(3600);

/// The reason if ranks meet again and none was lost.
const JOINS: &str = "a rank that was started again joins";

/// The reason that a restarted rank gives for an earlier loss.
const BEFORE: &str =
    "a rank that was restarted since says so: the output of the ranks that were there says why";

/// A survived loss, or the arrival of a restarted rank.
pub(super) struct Recovery {
    /// When this rank noticed.
    pub(super) since: Instant,
    /// Why the previous group of ranks stopped.
    pub(super) reason: String,
    /// The lost ranks, as launched (including those that have rejoined), and the ranks that joined.
    pub(super) change: MembershipChange,
    /// All ranks that continue.
    pub(super) members: Vec<u32>,
    /// How often ranks have met so far.
    pub(super) generation: u64,
    /// How long to wait for a rank.
    pub(super) patience: Duration,
}

impl Recovery {
    /// Records which ranks were lost after `step`, the last recorded one, and which continue.
    pub(super) fn record(&self, events: &mut Events, step: u64) -> Result<()> {
        let Recovery { since, reason, change, members, generation, patience: _ } = self;
        let MembershipChange { lost, joined } = change;
        let left: Vec<u32> = members.iter().copied().filter(|it| !joined.contains(it)).collect();
        let seconds = since.elapsed().as_secs_f64();
        let named = |ranks: &[u32]| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        // If no rank joined and none is missing, ranks met because of a suspected loss.
        if !lost.is_empty() || joined.is_empty() {
            let fields = json!({
                "step": step, "lost": lost, "left": left, "generation": generation, "because": reason,
                "seconds": seconds,
            });
            events.write("loss", fields)?;
            let lost = if lost.is_empty() { "none".to_owned() } else { named(lost) };
            contract::note!("lost ranks: {lost}; ranks that go on: {}", named(&left));
        }
        if !joined.is_empty() {
            let fields = json!({
                "step": step, "joined": joined, "ranks": members, "generation": generation, "seconds": seconds,
            });
            events.write("joined", fields)?;
            contract::note!(
                "ranks that joined: {}; all ranks now: {}",
                named(joined),
                named(members)
            );
        }
        Ok(())
    }
}

/// Meets the other ranks and a restarted rank that waits to join; all results are on disk.
pub(super) fn admit(world: &mut World, exec: &ExecOptions) -> Result<Recovery> {
    let fault = Fault::machine(JOINS);
    meet_again(world, exec.min_ranks.unwrap_or(1), Vec::new(), fault)
}

/// What a restarted rank that has met the others knows of the reason; it may have become rank 0, which records it.
pub(super) fn joined(world: &mut World) -> Result<Option<Recovery>> {
    let Some(rendezvous) = world.rendezvous.as_mut().filter(|_| world.joins) else {
        return Ok(None);
    };
    let (since, patience, change) =
        (Instant::now(), world.patience, rendezvous.stands().map_err(lost)?);
    let (members, generation) = (rendezvous.members().to_vec(), rendezvous.generation());
    let reason = if change.lost.is_empty() { JOINS } else { BEFORE }.to_owned();
    Ok(Some(Recovery { since, reason, change, members, generation, patience }))
}

/// Why ranks stopped, without hints for people.
fn reason(fault: &Fault) -> String {
    let text = fault.to_string();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("hint:"));
    lines.map(str::trim).collect::<Vec<_>>().join(" ")
}

/// Meets the remaining ranks if `fault` was the loss of a rank and the run may continue; else returns the fault and
/// reports it to the others.
pub(super) fn recover(world: &mut World, exec: &ExecOptions, fault: Fault) -> Result<Recovery> {
    // Any fault may result from tensors that were not received completely.
    let found = fault.class() != Class::Machine || fault.symptom() == Some(Symptom::Untrusted);
    let trouble = if found { world.comm.trouble() } else { None };
    let fault = trouble.map_or(fault, lost);
    let lost_ranks = world.comm.lost().filter(|_| fault.class() == Class::Machine);
    let lost_ranks = lost_ranks.filter(|_| fault.symptom() != Some(Symptom::Untrusted));
    let (Some(least), Some(blamed), true) =
        (exec.min_ranks, lost_ranks, world.rendezvous.is_some())
    else {
        match (exec.min_ranks, fault.symptom()) {
            // The others continue without this machine, and may end this process as soon as they are notified.
            (Some(_), Some(Symptom::Untrusted)) => {
                last_words(Some(world.comm.launched_as()), None, &fault, true);
                world.comm.give_up(&fault.to_string());
            }
            // Otherwise they would see only a closed connection.
            _ => world.comm.report(&fault.to_string()),
        }
        return Err(fault);
    };
    if world.comm.spoke_first() {
        contract::note!("{}; those who are left go on", fault.what());
    }
    meet_again(world, least, blamed, fault)
}

/// Meets the remaining ranks and those that join. `blamed` are the ranks known to be lost.
fn meet_again(
    world: &mut World,
    least: u32,
    mut blamed: Vec<u32>,
    fault: Fault,
) -> Result<Recovery> {
    let (since, patience) = (Instant::now(), world.patience);
    let Some(rendezvous) = &mut world.rendezvous else { return Err(fault) };
    let before = rendezvous.members().len();
    let record = |word: &str| contract::note!("{word}");
    for _ in 0..before + IN_VAIN {
        // Closes its connections, so that ranks that still wait for this one notice the loss.
        world.comm = kernels::group::Group::alone();
        let agreed = rendezvous.agree(&blamed, least, patience);
        agreed.map_err(|error| lost(error).found(fault.what()))?;
        blamed.clear();
        let Ok(comm) = rendezvous.group(patience, &record) else { continue };
        // If the store is lost by now, the next meeting notices it.
        let Ok(change) = rendezvous.stands() else { continue };
        world.comm = comm;
        world.in_vain.retain(|at| at.elapsed() < WHILE);
        let same = change == MembershipChange::default();
        world.in_vain.extend(same.then_some(since));
        if world.in_vain.len() > IN_VAIN {
            return Err(fault);
        }
        let (members, generation) = (rendezvous.members().to_vec(), rendezvous.generation());
        let reason = reason(&fault);
        return Ok(Recovery { since, reason, change, members, generation, patience });
    }
    Err(fault)
}
