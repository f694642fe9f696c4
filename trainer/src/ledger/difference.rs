//! The first quantity in which two ledger lines differ, in the order in which a step computes them.

use std::collections::BTreeMap;

use serde::Serialize;

use super::layers::layers;
use super::record::StepRecord;
use super::{Packed, SourceSums};
use crate::optim::guard::Skipped;

/// The stage of a step that computes a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepStage {
    /// The step's number and its batch.
    Data,
    /// From the weights to the losses.
    Forward,
    /// From the losses to the gradient of a micro-batch.
    Backward,
    /// Gradient reduction, the norm, and clipping.
    Sum,
    /// The new weights and moments.
    Update,
}

/// The first quantity in which two records of a step differ, in the order in which a step computes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepDifference {
    /// Its name ("gradient of micro-batch 3").
    pub quantity: String,
    /// The stage that computes it.
    pub stage: StepStage,
    /// Its value on the left.
    pub left: String,
    /// Its value on the right.
    pub right: String,
}

impl StepRecord {
    /// The first difference between this record and `other`; `parameters` names the tensors.
    pub fn difference(&self, other: &StepRecord, parameters: &[String]) -> Option<StepDifference> {
        // A new field must be placed in this order; those of the batch and the forward pass are compared below. `loss`
        // follows from `micro_batch_losses`; the phase's name and the step at which an edit was accepted do not affect
        // results.
        let StepRecord {
            kind: _,
            step: _,
            phase: _,
            batch_digest: _,
            label_count: _,
            loss: _,
            z_loss: _,
            micro_batch_labels: _,
            micro_batch_losses: _,
            sources: _,
            tokens_per_expert: _,
            micro_batch_grad_checksums: Packed(first),
            grad_checksums: Packed(sums),
            norm,
            layer_gradient_norms,
            clip_threshold: clip,
            skipped,
            lr,
            layer_update_norms,
            weight_checksums: Packed(weights),
            state_digest,
            mix_weights: _,
            curriculum: _,
        } = self;
        let tensor =
            |index: usize| format!("of {}", parameters.get(index).map_or("?", String::as_str));
        let named = layers(parameters);
        let group =
            |index: usize| format!("of {}", named.get(index).map_or("?", |layer| &layer.name));
        let (hex, none) = (|value: &u64| format!("{value:016x}"), |_: usize| String::new());
        let backward = || {
            let other = &other.micro_batch_grad_checksums.0;
            listed("gradient", first, other, micro_batch, hex)
        };
        let sum = || {
            listed("summed gradient", sums, &other.grad_checksums.0, tensor, hex)
                .or_else(|| listed("gradient norm", &norm.0, &other.norm.0, none, float))
                .or_else(|| {
                    let other = &other.layer_gradient_norms.0;
                    listed("gradient norm", &layer_gradient_norms.0, other, group, float)
                })
                .or_else(|| optional("clip of the window", clip, &other.clip_threshold))
                .or_else(|| single("skipping", &skip_of(skipped), &skip_of(&other.skipped)))
        };
        let update = || {
            listed("learning rate", &lr.0, &other.lr.0, none, float)
                .or_else(|| listed("new weights", weights, &other.weight_checksums.0, tensor, hex))
                .or_else(|| {
                    let other = &other.layer_update_norms.0;
                    listed("update norm", &layer_update_norms.0, other, group, float)
                })
                .or_else(|| single("state digest", state_digest, &other.state_digest))
        };
        let at = |stage: StepStage| {
            move |(quantity, left, right)| StepDifference { quantity, stage, left, right }
        };
        self.data_difference(other)
            .map(at(StepStage::Data))
            .or_else(|| self.forward_difference(other).map(at(StepStage::Forward)))
            .or_else(|| backward().map(at(StepStage::Backward)))
            .or_else(|| sum().map(at(StepStage::Sum)))
            .or_else(|| update().map(at(StepStage::Update)))
    }

    /// Differences in the batch.
    fn data_difference(&self, other: &StepRecord) -> DifferingValues {
        let labels = |source: &SourceSums| source.labels.to_string();
        let weights = |weights: &Option<BTreeMap<String, u64>>| format!("{weights:?}");
        None.or_else(|| single("step", &self.step, &other.step))
            .or_else(|| {
                let [own, other] = [&self.mix_weights, &other.mix_weights].map(weights);
                single("mix weights", &own, &other)
            })
            .or_else(|| single("data digest", &self.batch_digest, &other.batch_digest))
            .or_else(|| single("label count", &self.label_count, &other.label_count))
            .or_else(|| {
                listed(
                    "labels",
                    &self.micro_batch_labels,
                    &other.micro_batch_labels,
                    micro_batch,
                    u64::to_string,
                )
            })
            .or_else(|| by_source("labels", &self.sources, &other.sources, labels))
    }

    /// Differences in the forward pass.
    fn forward_difference(&self, other: &StepRecord) -> DifferingValues {
        let layer = |index: usize| format!("of layer {index}");
        let text = |value: &Vec<u64>| format!("{value:?}");
        let loss =
            |source: &SourceSums| format!("{:e} (bits {})", source.loss.float(), source.loss);
        listed("loss", &self.micro_batch_losses.0, &other.micro_batch_losses.0, micro_batch, float)
            .or_else(|| by_source("loss", &self.sources, &other.sources, loss))
            .or_else(|| optional("z-loss", &self.z_loss, &other.z_loss))
            .or_else(|| {
                listed(
                    "router counts",
                    &self.tokens_per_expert,
                    &other.tokens_per_expert,
                    layer,
                    text,
                )
            })
    }
}

/// How a micro-batch is named.
fn micro_batch(index: usize) -> String {
    format!("of micro-batch {index}")
}

/// An f64 with its bits.
fn float(value: &u64) -> String {
    format!("{:e} (bits {value:016x})", f64::from_bits(*value))
}

/// A difference of floats that a record may lack.
fn optional(quantity: &str, left: &Option<Packed>, right: &Option<Packed>) -> DifferingValues {
    let text = |value: &Packed| format!("{:e} (bits {value})", value.float());
    let text = |value: &Option<Packed>| value.as_ref().map_or_else(|| "none".to_owned(), text);
    single(quantity, &text(left), &text(right))
}

fn skip_of(skipped: &Option<Skipped>) -> String {
    match skipped {
        None => "never".to_owned(),
        Some(skipped) => skipped.words().to_owned(),
    }
}

/// The name of a quantity that differs, and both values.
type DifferingValues = Option<(String, String, String)>;

fn single<T: PartialEq + ToString>(quantity: &str, left: &T, right: &T) -> DifferingValues {
    (left != right).then(|| (quantity.to_owned(), left.to_string(), right.to_string()))
}

/// The first source for which `show` differs, or that one side lacks.
fn by_source(
    quantity: &str,
    left: &BTreeMap<String, SourceSums>,
    right: &BTreeMap<String, SourceSums>,
    show: impl Fn(&SourceSums) -> String,
) -> DifferingValues {
    let shown = |side: Option<&SourceSums>| side.map_or_else(|| "none".to_owned(), &show);
    let mut names = left.keys().chain(right.keys().filter(|name| !left.contains_key(*name)));
    names.find_map(|name| {
        let (left, right) = (shown(left.get(name)), shown(right.get(name)));
        single(&format!("{quantity} of source {name}"), &left, &right)
    })
}

fn listed<T: PartialEq>(
    quantity: &str,
    left: &[T],
    right: &[T],
    place: impl Fn(usize) -> String,
    show: impl Fn(&T) -> String,
) -> DifferingValues {
    if left.len() != right.len() {
        return single(&format!("number of values of {quantity}"), &left.len(), &right.len());
    }
    let index = left.iter().zip(right).position(|(left, right)| left != right)?;
    let quantity = format!("{quantity} {}", place(index)).trim_end().to_owned();
    Some((quantity, show(&left[index]), show(&right[index])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::Digest;

    use crate::ledger::record::tests::record;

    #[test]
    fn the_first_difference_is_named() {
        let parameters = ["a", "b", "c"].map(str::to_owned);
        let left = record(7, 1);
        assert_eq!(left.difference(&left.clone(), &parameters), None);
        let differs = |change: &dyn Fn(&mut StepRecord)| {
            let mut right = left.clone();
            // Later quantities differ as a consequence.
            right.state_digest = Digest(0);
            change(&mut right);
            left.difference(&right, &parameters).unwrap().quantity
        };
        assert_eq!(differs(&|_| ()), "state digest");
        assert_eq!(differs(&|right| right.weight_checksums.0[1] ^= 1), "new weights of b");
        let update = "update norm of embedding";
        assert_eq!(differs(&|right| right.layer_update_norms.0[0] ^= 1), update);
        assert_eq!(differs(&|right| right.lr.0[0] ^= 1), "learning rate");
        assert_eq!(differs(&|right| right.skipped = Some(Skipped::Loss)), "skipping");
        assert_eq!(differs(&|right| right.clip_threshold = None), "clip of the window");
        let layer = "gradient norm of embedding";
        assert_eq!(differs(&|right| right.layer_gradient_norms.0[0] ^= 1), layer);
        assert_eq!(differs(&|right| right.norm.0[0] ^= 1), "gradient norm");
        assert_eq!(differs(&|right| right.grad_checksums.0[2] ^= 1), "summed gradient of c");
        assert_eq!(
            differs(&|right| right.micro_batch_grad_checksums.0[1] ^= 1),
            "gradient of micro-batch 1"
        );
        assert_eq!(
            differs(&|right| right.tokens_per_expert[0][1] += 1),
            "router counts of layer 0"
        );
        assert_eq!(differs(&|right| right.z_loss = None), "z-loss");
        let of = |right: &mut StepRecord, change: fn(&mut SourceSums)| {
            change(right.sources.get_mut("web").unwrap());
        };
        assert_eq!(differs(&|right| of(right, |web| web.loss.0[0] ^= 1)), "loss of source web");
        assert_eq!(differs(&|right| of(right, |web| web.labels += 1)), "labels of source web");
        let gone = |right: &mut StepRecord| drop(right.sources.remove("math"));
        assert_eq!(differs(&gone), "labels of source math");
        assert_eq!(differs(&|right| right.micro_batch_losses.0[0] ^= 1), "loss of micro-batch 0");
        assert_eq!(differs(&|right| right.micro_batch_labels[0] += 1), "labels of micro-batch 0");
        assert_eq!(
            differs(&|right| right.micro_batch_labels.push(1)),
            "number of values of labels"
        );
        assert_eq!(differs(&|right| right.label_count += 1), "label count");
        assert_eq!(differs(&|right| right.batch_digest = Digest(1)), "data digest");
    }
}
