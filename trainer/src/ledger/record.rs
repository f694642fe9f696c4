//! The content of a ledger line, and its consistency checks.

use std::collections::BTreeMap;

use contract::{Digest, Identity, StepSums};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Packed, SourceSums};
use crate::optim::guard::Skipped;

/// The fields read from a step's line.
pub trait StepFields: DeserializeOwned {
    /// Checks that its numbers are consistent; else returns which one is not.
    fn checked(self) -> Result<Self, String>;
}

/// Line 0: the inputs of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LedgerHead {
    /// Always "head".
    pub kind: String,
    /// Version of these lines.
    pub format: u32,
    /// Instruction set, library versions, kernels, math threads.
    pub kernel_table: serde_json::Value,
    /// The version of the rules that turn the curriculum into text, [`mixer::PLAN_VERSION`]; a head without it has the
    /// first.
    #[serde(default = "first_plan")]
    pub plan: u32,
    /// The curriculum with which the run began, in canonical form.
    pub curriculum: String,
    /// The digests of the stores, in the order of the curriculum.
    pub stores: Vec<Identity>,
    /// SHA-256 of the tokenizer.
    pub tokenizer: Identity,
    /// The determinism levels ("D", "L0", "L1", "L2", "L3"), as in `trainer/docs/determinism.md`.
    pub levels: Vec<String>,
    /// The parameters, in canonical order, which is that of the packed arrays of every step.
    pub parameters: Vec<String>,
}

fn first_plan() -> u32 {
    1
}

/// One step. Every field is a function of the run and the step's number.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRecord {
    /// Always "step".
    pub kind: String,
    /// Its number, from 1.
    pub step: u64,
    /// The phase's name.
    pub phase: String,
    /// The batch digest.
    pub batch_digest: Digest,
    /// Labels in the step: the divisor of the summed losses.
    pub label_count: u64,
    /// The mean loss per label in nats, for people: its bits follow from `micro_batch_losses`. NaN (`null`) if it is
    /// not finite, or the step has no label.
    #[serde(deserialize_with = "contract::read_number")]
    pub loss: f64,
    /// The mean z-loss per label, as the bits of an f64: not in `loss`; absent where [`ZayaConfig::z_loss`] is 0.
    ///
    /// [`ZayaConfig::z_loss`]: crate::model::ZayaConfig::z_loss
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub z_loss: Option<Packed>,
    /// Labels of each micro-batch.
    pub micro_batch_labels: Vec<u64>,
    /// Sum of token losses of each micro-batch, as the bits of an f64.
    pub micro_batch_losses: Packed,
    /// Labels and losses of each source with rows in the step, by name.
    pub sources: BTreeMap<String, SourceSums>,
    /// Tokens that each layer's router sent to each class, over the whole batch; empty for a layer without a router.
    pub tokens_per_expert: Vec<Vec<u64>>,
    /// Checksum of each micro-batch's gradient.
    pub micro_batch_grad_checksums: Packed,
    /// Checksum of the summed gradient of each tensor, before clipping.
    pub grad_checksums: Packed,
    /// The gradient norm before clipping, as the bits of an f64.
    pub norm: Packed,
    /// The same by layer ([`super::layers()`]), as the bits of f64.
    pub layer_gradient_norms: Packed,
    /// The norm at which `[auto_clip]` clips the gradient, as the bits of an f64; absent without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_threshold: Option<Packed>,
    /// Whether the step was skipped, and why; without `[skip_step]`, present only if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skipped>,
    /// The learning rate, as the bits of an f64.
    pub lr: Packed,
    /// The norm of new weights minus old ones by layer, as the bits of f64: zeros if the step was skipped.
    pub layer_update_norms: Packed,
    /// Checksum of each new weight.
    pub weight_checksums: Packed,
    /// Digest of the whole state after the step: weights, moments, balancing biases, windows.
    pub state_digest: Digest,
    /// In the first step of each window of a mix that reacts to the loss: the weights from this step on, in parts of
    /// 65,536 by source of the mix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix_weights: Option<BTreeMap<String, u64>>,
    /// The curriculum in force from this step on, in canonical form, if it has changed: an accepted edit took effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub curriculum: Option<String>,
}

impl StepRecord {
    /// The number of its micro-batches.
    pub fn micro_batches(&self) -> usize {
        self.micro_batch_labels.len()
    }

    /// Returns which field of a record is inconsistent with the rest.
    fn check(&self) -> Result<(), String> {
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
        sums.check()
    }

    /// The gradient norm.
    pub fn norm(&self) -> f64 {
        self.norm.float()
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.lr.float()
    }
}

impl StepFields for StepRecord {
    fn checked(self) -> Result<Self, String> {
        self.check().map(|()| self)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kernels::tree;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A record is read back as it was written; a number that is inconsistent with the others is found.
        #[test]
        fn a_record_follows_from_its_parts(seed: u64, part in 0usize..5) {
            let text = serde_json::to_string(&record(3, seed)).unwrap();
            let right: StepRecord = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(right.check(), Ok(()));
            let mut wrong = right;
            let moved = |packed: &Packed| Packed::floats(packed.values().map(|value| value * 1.001 + 1.0));
            match part {
                0 => wrong.label_count += 1,
                1 => wrong.norm = moved(&wrong.norm),
                2 => wrong.layer_gradient_norms = moved(&wrong.layer_gradient_norms),
                3 => wrong.sources.values_mut().for_each(|source| source.loss = moved(&source.loss)),
                _ => wrong.sources.values_mut().for_each(|source| source.labels += 1),
            }
            prop_assert!(wrong.check().is_err());
        }
    }

    proptest! {
        /// The check adds losses in the same tree as training.
        #[test]
        fn the_tree_of_a_check_is_that_of_training(values in prop::collection::vec(-1e9..1e9f64, 1..40)) {
            let wanted = tree::total(values.iter().copied());
            prop_assert_eq!(Packed::floats(values).tree_sum(), wanted);
        }
    }

    /// A record in which every quantity depends on `seed`.
    pub(crate) fn record(step: u64, seed: u64) -> StepRecord {
        let word = |index: u64| {
            contract::draw(
                contract::Key::from_seed(seed).nth(step),
                contract::Purpose::Generate,
                index,
            )
        };
        let words = |from: u64, count: u64| Packed((from..from + count).map(word).collect());
        let labels = [1 + word(2) % 99, word(3) % 99];
        let losses = [word(4), word(5)].map(|word| (word % 10_000) as f64 / 7.0);
        let norm = (1 + word(13) % 10_000) as f64 / 3.0;
        let source =
            |(labels, loss): (u64, f64)| SourceSums { labels, loss: Packed::floats([loss]) };
        let sources = [("web", 0), ("math", 1)]
            .map(|(name, at): (&str, usize)| (name.to_owned(), source((labels[at], losses[at]))));
        StepRecord {
            kind: "step".into(),
            step,
            phase: "first".into(),
            batch_digest: Digest(u128::from(word(0))),
            label_count: labels.iter().sum(),
            loss: losses.iter().sum::<f64>() / labels.iter().sum::<u64>() as f64,
            z_loss: Some(words(22, 1)),
            micro_batch_labels: labels.to_vec(),
            micro_batch_losses: Packed::floats(losses),
            sources: sources.into(),
            tokens_per_expert: vec![vec![word(6) % 99, word(7) % 99]],
            micro_batch_grad_checksums: words(8, 2),
            grad_checksums: words(10, 3),
            norm: Packed::floats([norm]),
            layer_gradient_norms: Packed::floats([norm * 0.6, norm * 0.8]),
            clip_threshold: Some(words(19, 1)),
            skipped: Some(Skipped::No),
            lr: words(14, 1),
            layer_update_norms: words(20, 2),
            weight_checksums: words(15, 3),
            state_digest: Digest(u128::from(word(18))),
            mix_weights: None,
            curriculum: None,
        }
    }
}
