//! After a loss: the ranks that are left meet again, in the same processes, and go on as a run of fewer ranks.

use std::time::{Duration, Instant};

use contract::{Class, Fault, Result};

use serde_json::json;

use super::World;
use crate::events::Events;
use crate::exec::ExecOptions;
use crate::refusal::lost;

/// How often within [`WHILE`] ranks meet anew although nobody was lost, before they give up: the network may be at fault.
const IN_VAIN: usize = 3;

/// See [`IN_VAIN`].
const WHILE: Duration = Duration::from_secs(3600);

/// A loss that was survived.
pub(super) struct Recovery {
    /// When this rank noticed.
    pub(super) since: Instant,
    /// Why the ranks before stopped.
    pub(super) reason: String,
    /// The ranks that are gone, as they were launched.
    pub(super) lost: Vec<u32>,
    /// Those that go on.
    pub(super) left: Vec<u32>,
    /// How often ranks have met so far.
    pub(super) generation: u64,
    /// How long a rank is waited for.
    pub(super) patience: Duration,
}

impl Recovery {
    /// Writes down which ranks are gone after `step`, the last one recorded, and who goes on.
    pub(super) fn tell(&self, events: &mut Events, step: u64) -> Result<()> {
        let Recovery { since, reason, lost, left, generation, patience: _ } = self;
        let fields = json!({
            "step": step, "lost": lost, "left": left, "generation": generation, "because": reason,
            "seconds": since.elapsed().as_secs_f64(),
        });
        events.write("loss", fields)?;
        let named = |ranks: &[u32]| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let lost = if lost.is_empty() { "none".to_owned() } else { named(lost) };
        contract::note!("lost ranks: {lost}; ranks that go on: {}", named(left));
        Ok(())
    }
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
    let lost_ranks = world.comm.lost().filter(|_| fault.class() == Class::Machine);
    let (Some(least), Some(mut blamed), true) =
        (exec.min_ranks, lost_ranks, world.rendezvous.is_some())
    else {
        // The others would only see a connection close.
        world.comm.report(&fault.to_string());
        return Err(fault);
    };
    let (since, patience) = (Instant::now(), world.comm.timeout());
    if world.comm.spoke_first() {
        contract::note!("{}; those who are left go on", fault.what());
    }
    let Some(rendezvous) = &mut world.rendezvous else { return Err(fault) };
    let before = rendezvous.members().to_vec();
    let tell = |word: &str| contract::note!("{word}");
    for _ in 0..before.len() + IN_VAIN {
        // Closes its connections: whoever still waits for this rank hears of the loss.
        world.comm = kernels::group::Group::alone();
        let agreed = rendezvous.agree(&blamed, least, patience);
        agreed.map_err(|error| lost(error).found(fault.what()))?;
        blamed.clear();
        if let Ok(comm) = rendezvous.group(patience, &tell) {
            world.comm = comm;
            let left = rendezvous.members().to_vec();
            let lost: Vec<u32> = before.into_iter().filter(|rank| !left.contains(rank)).collect();
            world.in_vain.retain(|at| at.elapsed() < WHILE);
            world.in_vain.extend(lost.is_empty().then_some(since));
            if world.in_vain.len() > IN_VAIN {
                return Err(fault);
            }
            let (reason, generation) = (reason(&fault), rendezvous.generation());
            return Ok(Recovery { since, reason, lost, left, generation, patience });
        }
    }
    Err(fault)
}
