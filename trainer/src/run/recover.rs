//! After a loss: the ranks that are left meet again, in the same processes, and go on as a run of fewer ranks.

use std::time::{Duration, Instant};

use contract::{Class, Fault, Result, Symptom};
use kernels::group::Change;
use serde_json::json;

use super::World;
use crate::events::Events;
use crate::exec::ExecOptions;
use crate::launch::last_words;
use crate::refusal::lost;

/// How often within [`WHILE`] ranks meet anew although nobody was lost, before they give up: the network may be at fault.
const IN_VAIN: usize = 3;

/// See [`IN_VAIN`].
const WHILE: Duration = Duration::from_secs(3600);

/// Why ranks meet anew where none was lost.
const JOINS: &str = "a rank that was started again joins";

/// What a rank that was started again knows of a loss that was before its time.
const BEFORE: &str =
    "told by a rank that was started again since: the output of those that were there says why";

/// A loss that was survived, or the coming of a rank that was started again.
pub(super) struct Recovery {
    /// When this rank noticed.
    pub(super) since: Instant,
    /// Why the ranks before stopped.
    pub(super) reason: String,
    /// The ranks that are gone, as they were launched, those among them that have come again, and those that were started again.
    pub(super) change: Change,
    /// All that go on.
    pub(super) members: Vec<u32>,
    /// How often ranks have met so far.
    pub(super) generation: u64,
    /// How long a rank is waited for.
    pub(super) patience: Duration,
}

impl Recovery {
    /// Writes down which ranks are gone after `step`, the last one recorded, and who goes on.
    pub(super) fn tell(&self, events: &mut Events, step: u64) -> Result<()> {
        let Recovery { since, reason, change, members, generation, patience: _ } = self;
        let Change { lost, joined } = change;
        let left: Vec<u32> = members.iter().copied().filter(|it| !joined.contains(it)).collect();
        let seconds = since.elapsed().as_secs_f64();
        let named = |ranks: &[u32]| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        // A meeting in which nobody came and nobody was missing was called for a loss.
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

/// Meets the others together with a rank that was started again and waits for that; all that was computed is on the disk.
pub(super) fn admit(world: &mut World, exec: &ExecOptions) -> Result<Recovery> {
    let fault = Fault::machine(JOINS);
    meet_again(world, exec.min_ranks.unwrap_or(1), Vec::new(), fault)
}

/// What a rank that was started again and has met the others knows of the reason: it may be the one that writes things down.
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

/// Why ranks stopped, without what a person would do about it.
fn reason(fault: &Fault) -> String {
    let text = fault.to_string();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("hint:"));
    lines.map(str::trim).collect::<Vec<_>>().join(" ")
}

/// Meets those who are left after `fault`, if that was the loss of a rank and may be survived; else hands it back, and tells the
/// others.
pub(super) fn recover(world: &mut World, exec: &ExecOptions, fault: Fault) -> Result<Recovery> {
    // Out of tensors that did not come whole anything may have been found.
    let found = fault.class() != Class::Machine || fault.symptom() == Some(Symptom::Untrusted);
    let trouble = if found { world.comm.trouble() } else { None };
    let fault = trouble.map_or(fault, lost);
    let lost_ranks = world.comm.lost().filter(|_| fault.class() == Class::Machine);
    let lost_ranks = lost_ranks.filter(|_| fault.symptom() != Some(Symptom::Untrusted));
    let (Some(least), Some(blamed), true) =
        (exec.min_ranks, lost_ranks, world.rendezvous.is_some())
    else {
        match (exec.min_ranks, fault.symptom()) {
            // The others can do without this machine, and may end this process as soon as they hear of it.
            (Some(_), Some(Symptom::Untrusted)) => {
                last_words((Some(world.comm.launched_as()), None), &fault, true);
                world.comm.give_up(&fault.to_string());
            }
            // They would only see a connection close.
            _ => world.comm.report(&fault.to_string()),
        }
        return Err(fault);
    };
    if world.comm.spoke_first() {
        contract::note!("{}; those who are left go on", fault.what());
    }
    meet_again(world, least, blamed, fault)
}

/// Meets those who are left, and who has come anew. `blamed` are the ranks that are lost, as far as it is known.
fn meet_again(
    world: &mut World,
    least: u32,
    mut blamed: Vec<u32>,
    fault: Fault,
) -> Result<Recovery> {
    let (since, patience) = (Instant::now(), world.patience);
    let Some(rendezvous) = &mut world.rendezvous else { return Err(fault) };
    let before = rendezvous.members().len();
    let tell = |word: &str| contract::note!("{word}");
    for _ in 0..before + IN_VAIN {
        // Closes its connections: whoever still waits for this rank hears of the loss.
        world.comm = kernels::group::Group::alone();
        let agreed = rendezvous.agree(&blamed, least, patience);
        agreed.map_err(|error| lost(error).found(fault.what()))?;
        blamed.clear();
        let Ok(comm) = rendezvous.group(patience, &tell) else { continue };
        // A store that is lost by now shows in the next meeting.
        let Ok(change) = rendezvous.stands() else { continue };
        world.comm = comm;
        world.in_vain.retain(|at| at.elapsed() < WHILE);
        let same = change == Change::default();
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
