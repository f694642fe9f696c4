//! Exact removal: recomputes the step without some of its documents, to show the difference.
//!
//! Positions stay; the labels of these documents are masked and their keys hidden, as a ban does, and labels are
//! counted again. The result is a counterfactual, not a replay.

use contract::Result;
use kernels::tree;
use loader::Batch;
use serde::Serialize;

use super::documents::DocumentEvidence;
use trainer::model;
use trainer::optim::guard::Skipped;
use trainer::replay::{Replayer, tokens};
use trainer::spec::RunSpec;
use trainer::state::State;
use trainer::step::{Detail, FrozenModel, Weights};
use trainer::workers::Workers;

/// A step without some of its documents.
#[derive(Clone, Debug, Serialize)]
pub struct Removal {
    /// The documents' ids.
    pub documents: Vec<String>,
    /// The number of labels that were masked.
    pub labels: u64,
    /// The mean loss of a label without them.
    pub loss: f64,
    /// The gradient norm without them; `None` if the step still diverges.
    pub norm: Option<f64>,
    /// Whether the step would have been skipped, and why; `None` where the curriculum skips no step.
    pub skipped: Option<Skipped>,
    /// The mean loss of the next step afterwards; `None` if there is none with labels.
    pub next_loss: Option<f64>,
}

/// The step after a state, to recompute without some of its documents.
#[derive(Clone, Copy)]
pub(super) struct RemovalReplay<'a> {
    pub(super) replayer: &'a Replayer,
    pub(super) before: &'a State,
    pub(super) batch: &'a Batch,
    /// The batch of the next step, if there is one with labels.
    pub(super) next: Option<&'a Batch>,
}

impl RemovalReplay<'_> {
    /// Computes the step without `documents`.
    pub(super) fn remove(&self, documents: &[&DocumentEvidence]) -> Result<Removal> {
        let RemovalReplay { replayer, before, batch, next } = *self;
        let (spec, workers) = (replayer.spec(), replayer.workers());
        let (mut batch, mut state) = (batch.clone(), before.copy()?);
        let mut labels = 0;
        for place in documents.iter().flat_map(|one| &one.document.places) {
            labels += batch.hide(place.row, place.columns.clone())?;
        }
        let (gradient, outcome) = replayer.compute(spec, &mut state, &batch, Detail::Sums)?;
        replayer.passed(tokens(&batch), true);
        let loss = gradient.mean();
        // The only error is that the step diverges.
        let record = outcome.ok();
        let (norm, skipped) = record.map_or((None, None), |one| (Some(one.norm()), one.skipped));
        let next = next.filter(|_| norm.is_some());
        let next_loss = next.map(|next| loss_of(spec, &state, next, workers)).transpose()?;
        replayer.passed(next.map_or(0, tokens), false);
        let documents = documents.iter().map(|one| one.document.id.clone()).collect();
        Ok(Removal { documents, labels, loss, norm, skipped, next_loss })
    }
}

/// The mean loss per label of `batch`, which has some, with the weights of `state`, by a forward pass.
pub(super) fn loss_of(
    spec: &RunSpec,
    state: &State,
    batch: &Batch,
    workers: Workers,
) -> Result<f64> {
    let model = FrozenModel::at(spec, batch.step, state, workers)?;
    let losses = model.map(batch, |input, Weights { weights, biases }| {
        model::losses(model.options(), model.config(), weights, biases, input)
    })?;
    Ok(tree::total(losses) / batch.label_count as f64)
}
