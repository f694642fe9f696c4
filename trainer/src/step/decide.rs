//! The decision of a step: whether it moves anything, and by which numbers. Every rank comes to the same one.

use contract::{Fault, Result};

use super::{Gradient, MicroBatchSums};
use crate::optim::guard::{Decision, Windows};
use crate::optim::{self, Settings, norm};
use crate::spec::RunSpec;

/// What a step was found to be before it moves anything.
pub(super) struct Decided {
    /// The gradient's norm.
    pub(super) norm: f64,
    /// The learning rate.
    pub(super) lr: f64,
    /// By which numbers it moves.
    pub(super) settings: Settings,
    /// Whether it moves, and by which clip.
    pub(super) decision: Decision,
    /// The numbers of the update.
    pub(super) at: optim::At,
}

/// A loss that is no number ends the run before anything moves.
pub(super) fn check_losses(step: u64, micro_batches: &[MicroBatchSums]) -> Result<()> {
    let Some(micro_batch) = micro_batches.iter().position(|one| !one.loss.is_finite()) else {
        return Ok(());
    };
    let found = format!("{} in micro-batch {micro_batch}", micro_batches[micro_batch].loss);
    Err(diverged("the loss is not finite", step).found(found))
}

/// So does a gradient that is none.
pub(super) fn check_norm(step: u64, norm: f64) -> Result<()> {
    if norm.is_finite() {
        return Ok(());
    }
    Err(diverged("the gradient is not finite", step).found(format!("a norm of {norm}")))
}

fn diverged(what: &str, step: u64) -> Fault {
    Fault::diverged(what).at(format!("step {step}"))
}

/// Decides on a step of this norm: a function of it, of the curriculum, and of the losses and norms before it.
pub(super) fn decide(
    spec: &RunSpec,
    windows: &mut Option<Windows>,
    gradient: &Gradient,
    norm: f64,
) -> Decided {
    let settings = spec.settings_at(gradient.step);
    let lr = settings.schedule.rate(gradient.step);
    let amended: Vec<u64> = spec.skips_through(gradient.step).collect();
    let skip = amended.last() == Some(&gradient.step);
    let decision = settings.guard.decide(windows, gradient.mean(), norm, skip);
    let scale = norm::scale(norm, decision.clip(settings.clip));
    let skipped = windows.as_ref().map_or(0, |windows| windows.skipped) + amended.len() as u64;
    let at = optim::At { step: gradient.step - skipped, lr, scale };
    Decided { norm, lr, settings, decision, at }
}
