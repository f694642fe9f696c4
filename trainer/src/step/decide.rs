//! The decision of a step: whether it updates anything, and with which scalars. Every rank makes the same decision.

use contract::{Fault, Result};

use super::{MicroBatchSums, ReducedGradient};
use crate::optim::guard::{Decision, StepMeasure, Windows};
use crate::optim::{self, OptimizerSettings, norm};
use crate::spec::RunSpec;

/// The decision of a step, before anything is updated.
pub(super) struct StepDecision {
    /// The gradient's norm.
    pub(super) norm: f64,
    /// The learning rate.
    pub(super) lr: f64,
    /// The settings of the update.
    pub(super) settings: OptimizerSettings,
    /// Whether the step is skipped, and which clip threshold applies.
    pub(super) decision: Decision,
    /// The scalars of the update.
    pub(super) at: optim::StepScalars,
}

/// A loss that is not finite ends the run before anything is updated, unless the curriculum skips such a step.
fn check_losses(step: u64, micro_batches: &[MicroBatchSums]) -> Result<()> {
    let Some(micro_batch) = micro_batches.iter().position(|one| !one.loss.is_finite()) else {
        return Ok(());
    };
    let found = format!("{} in micro-batch {micro_batch}", micro_batches[micro_batch].loss);
    Err(diverged("the loss is not finite", step).found(found))
}

/// The same for a gradient norm that is not finite.
fn check_norm(step: u64, norm: f64) -> Result<()> {
    if norm.is_finite() {
        return Ok(());
    }
    Err(diverged("the gradient is not finite", step).found(format!("a norm of {norm}")))
}

fn diverged(what: &str, step: u64) -> Fault {
    Fault::diverged(what).at(format!("step {step}"))
}

/// Decides on a step: a function of its labels, loss and norm, of the curriculum, and of earlier losses and norms.
pub(super) fn decide(
    spec: &RunSpec,
    windows: &mut Option<Windows>,
    gradient: &ReducedGradient,
) -> Result<StepDecision> {
    let (step, norm) = (gradient.step, gradient.norms.norm);
    let settings = spec.settings_at(step);
    let lr = settings.schedule.rate(step);
    let amended: Vec<u64> = spec.skips_through(step).collect();
    let skip = amended.last() == Some(&step);
    if !skip && !settings.guard.skips_non_finite() {
        check_losses(step, &gradient.micro_batches)?;
        check_norm(step, norm)?;
    }
    let measure = StepMeasure { labels: gradient.label_count, loss: gradient.mean(), norm };
    let decision = settings.guard.decide(windows, measure, skip);
    let scale = norm::scale(norm, decision.clip(settings.clip));
    let skipped = windows.as_ref().map_or(0, |windows| windows.skipped) + amended.len() as u64;
    let at = optim::StepScalars { step: step - skipped, lr, scale };
    Ok(StepDecision { norm, lr, settings, decision, at })
}
