//! The fields of a ledger line that people are shown. Checksums, most of its bytes, are not parsed.

use std::collections::BTreeMap;

use contract::{Digest, StepSums};
use serde::Deserialize;

use super::{Packed, SourceSums, StepFields, StepRecord};
use crate::optim::guard::Skipped;

/// A step as shown to people.
#[derive(Clone, Debug, Deserialize)]
pub struct StepSummaryFields {
    /// Its number, from 1.
    pub step: u64,
    /// The phase's name.
    pub phase: String,
    /// The batch digest.
    pub batch_digest: Digest,
    /// Digest of the state after the step.
    pub state_digest: Digest,
    /// Labels.
    pub label_count: u64,
    /// Kept until the line is checked.
    micro_batch_labels: Vec<u64>,
    micro_batch_losses: Packed,
    /// Mean loss per label, in nats; NaN without labels.
    #[serde(deserialize_with = "contract::read_number")]
    pub loss: f64,
    #[serde(default)]
    z_loss: Option<Packed>,
    norm: Packed,
    lr: Packed,
    /// Tokens that each layer's router sent to each class, the skip class last; empty for a layer without a router.
    pub tokens_per_expert: Vec<Vec<u64>>,
    /// Labels and losses of each source with rows in the step, by name.
    pub sources: BTreeMap<String, SourceSums>,
    layer_gradient_norms: Packed,
    layer_update_norms: Packed,
    #[serde(default)]
    clip_threshold: Option<Packed>,
    /// Whether the step was skipped, and why; without `[skip_step]`, present only if it was.
    #[serde(default)]
    pub skipped: Option<Skipped>,
    /// The weights of a mix that reacts, in the first step of each window.
    #[serde(default)]
    pub mix_weights: Option<BTreeMap<String, u64>>,
    /// The curriculum from this step on, if it has changed.
    #[serde(default)]
    pub curriculum: Option<String>,
}

impl StepFields for StepSummaryFields {
    fn checked(mut self) -> Result<Self, String> {
        let sums = StepSums {
            label_count: self.label_count,
            loss: self.loss,
            micro_batch_labels: &self.micro_batch_labels,
            micro_batch_losses: &self.micro_batch_losses,
            sources: &self.sources,
            tokens_per_expert: &self.tokens_per_expert,
            norm: &self.norm,
            layer_gradient_norms: &self.layer_gradient_norms,
        };
        sums.check()?;
        (self.micro_batch_labels, self.micro_batch_losses) = (Vec::new(), Packed(Vec::new()));
        Ok(self)
    }
}

impl StepSummaryFields {
    /// The shown fields of a record.
    pub(crate) fn of(record: &StepRecord) -> StepSummaryFields {
        StepSummaryFields {
            step: record.step,
            phase: record.phase.clone(),
            batch_digest: record.batch_digest,
            state_digest: record.state_digest,
            label_count: record.label_count,
            micro_batch_labels: Vec::new(),
            micro_batch_losses: Packed(Vec::new()),
            loss: record.loss,
            z_loss: record.z_loss.clone(),
            norm: record.norm.clone(),
            lr: record.lr.clone(),
            tokens_per_expert: record.tokens_per_expert.clone(),
            sources: record.sources.clone(),
            layer_gradient_norms: record.layer_gradient_norms.clone(),
            layer_update_norms: record.layer_update_norms.clone(),
            clip_threshold: record.clip_threshold.clone(),
            skipped: record.skipped,
            mix_weights: record.mix_weights.clone(),
            curriculum: record.curriculum.clone(),
        }
    }

    /// The mean z-loss per label, in steps with a coefficient.
    pub fn z_loss(&self) -> Option<f64> {
        self.z_loss.as_ref().map(Packed::float)
    }

    /// The norm at which `[auto_clip]` clips.
    pub(crate) fn clip_threshold(&self) -> Option<f64> {
        self.clip_threshold.as_ref().map(Packed::float)
    }

    /// The gradient norm of each layer, in the order of [`crate::ledger::layers()`].
    pub fn layer_gradient_norms(&self) -> Vec<f64> {
        self.layer_gradient_norms.values().collect()
    }

    /// The norm of each layer's update.
    pub fn layer_update_norms(&self) -> Vec<f64> {
        self.layer_update_norms.values().collect()
    }

    /// The gradient norm before clipping.
    pub fn norm(&self) -> f64 {
        self.norm.float()
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.lr.float()
    }

    /// Why it was skipped, if it was.
    pub fn skipped(&self) -> Option<Skipped> {
        self.skipped.filter(|skipped| *skipped != Skipped::No)
    }
}
