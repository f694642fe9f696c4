//! What a ledger line holds, and where two lines part.

use std::fmt::Write as _;

use contract::{Digest, Identity};
use kernels::tree::Counter;
use serde::{Deserialize, Serialize};

use crate::optim::guard::Skipped;

/// Line 0: what everything after it is a function of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Always "head".
    pub kind: String,
    /// Version of these lines.
    pub format: u32,
    /// Instruction set, library versions, kernels, math threads.
    pub kernel_table: serde_json::Value,
    /// The curriculum as the run began with it, in canonical form.
    pub curriculum: String,
    /// The digests of the stores, in the order of the curriculum.
    pub stores: Vec<Identity>,
    /// SHA-256 of the tokenizer.
    pub tokenizer: Identity,
    /// What is promised ("D", "L0", "L1", "L2"), as in the README.
    pub levels: Vec<String>,
    /// The parameters, in canonical order: the packed arrays of every step follow it.
    pub parameters: Vec<String>,
}

/// 64-bit words as one string of hexadecimal digits, sixteen for each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Packed(pub Vec<u64>);

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
    pub data: Digest,
    /// Labels in the step: what the sum of losses is divided by.
    pub divisor: u64,
    /// The mean loss in nats for each label, for people; its bits follow from `leaf_losses`.
    pub loss: f64,
    /// Labels of each leaf.
    pub leaf_labels: Vec<u64>,
    /// Sum of token losses of each leaf, as the bits of an f64.
    pub leaf_losses: Packed,
    /// Tokens that each layer's router sent to each class, over the whole batch.
    pub router: Vec<Vec<u64>>,
    /// Checksum of each leaf's gradient.
    pub leaf_gradients: Packed,
    /// Checksum of the summed gradient of each tensor, before clipping.
    pub gradients: Packed,
    /// The gradient norm before clipping, as the bits of an f64.
    pub norm: Packed,
    /// The longest gradient that passes by the norms before, as the bits of an f64; only where `[auto_clip]` is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest: Option<Packed>,
    /// Whether the step moved nothing, and why; only where `[skip_step]` is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skipped>,
    /// The learning rate, as the bits of an f64.
    pub lr: Packed,
    /// Checksum of each new weight.
    pub weights: Packed,
    /// Digest of the whole state after the step: weights, moments, balancing biases, windows.
    pub state: Digest,
    /// The curriculum in force from this step on, in canonical form, where it is another than before: an accepted edit has
    /// reached the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub curriculum: Option<String>,
    /// Sum of token losses and labels of each row, where the step was just computed: for curves, never written.
    #[serde(skip)]
    pub rows: Vec<(f64, u64)>,
}

/// Where in a step a quantity is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Which step it is, and what it reads.
    Data,
    /// From the weights at its start to the losses.
    Forward,
    /// Back from the losses to the gradient of a leaf.
    Backward,
    /// The addition of gradients, their norm, and what follows from it.
    Sum,
    /// The new weights and moments.
    Update,
}

/// The first quantity in which two records of a step differ, in the order in which a step computes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Which ("gradient of micro-batch 3").
    pub quantity: String,
    /// Where in the step it is made.
    pub stage: Stage,
    /// Its value on the left.
    pub left: String,
    /// Its value on the right.
    pub right: String,
}

impl StepRecord {
    /// Its leaves.
    pub fn leaves(&self) -> usize {
        self.leaf_labels.len()
    }

    /// The mean loss of a label, from the losses of the leaves.
    fn mean(&self) -> f64 {
        let mut sum = Counter::new();
        self.leaf_losses.0.iter().for_each(|bits| sum.push(f64::from_bits(*bits)));
        sum.finish().unwrap_or(0.0) / self.divisor as f64
    }

    /// Says what does not follow from the rest of a record that was read: the loss that people see, or the label count.
    pub(super) fn check(&self) -> Result<(), String> {
        let labels = self.leaf_labels.iter().sum::<u64>().max(1);
        if labels != self.divisor {
            return Err(format!("its divisor is {}, its labels add up to {labels}", self.divisor));
        }
        // As text and back: decimal digits are read to the same number each time, but not always to the one written.
        let mean = serde_json::to_string(&self.mean()).unwrap_or_default();
        let wanted: Option<f64> = serde_json::from_str(&mean).ok();
        match wanted.is_some_and(|wanted| wanted.to_bits() == self.loss.to_bits()) {
            true => Ok(()),
            false => Err(format!("its loss is {}, those of its leaves make {mean}", self.loss)),
        }
    }

    /// The gradient norm.
    pub fn norm(&self) -> f64 {
        self.norm.float()
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.lr.float()
    }

    /// Where this record and `other` part first; `parameters` names the tensors.
    pub fn difference(&self, other: &StepRecord, parameters: &[String]) -> Option<Difference> {
        // A new quantity must take its place in this order. `loss` follows from `leaf_losses`, and when an edit of the
        // curriculum was accepted is no quantity.
        let StepRecord { kind: _, step, phase, data, divisor, loss: _, leaf_labels, .. } = self;
        let StepRecord {
            leaf_losses,
            router,
            leaf_gradients,
            gradients,
            norm,
            longest,
            skipped,
            lr,
            weights,
            state,
            ..
        } = self;
        let leaf = |index: usize| format!("of micro-batch {index}");
        let tensor =
            |index: usize| format!("of {}", parameters.get(index).map_or("?", String::as_str));
        let layer = |index: usize| format!("of layer {index}");
        let text = |value: &Vec<u64>| format!("{value:?}");
        let hex = |value: &u64| format!("{value:016x}");
        let float = |value: &u64| format!("{:e} (bits {value:016x})", f64::from_bits(*value));
        let none = |_: usize| String::new();
        let data = || {
            None.or_else(|| single("step", step, &other.step))
                .or_else(|| single("phase", phase, &other.phase))
                .or_else(|| single("data digest", data, &other.data))
                .or_else(|| single("loss divisor", divisor, &other.divisor))
                .or_else(|| listed("labels", leaf_labels, &other.leaf_labels, leaf, u64::to_string))
        };
        let forward = || {
            listed("loss", &leaf_losses.0, &other.leaf_losses.0, leaf, float)
                .or_else(|| listed("router counts", router, &other.router, layer, text))
        };
        let backward = || listed("gradient", &leaf_gradients.0, &other.leaf_gradients.0, leaf, hex);
        let sum = || {
            listed("summed gradient", &gradients.0, &other.gradients.0, tensor, hex)
                .or_else(|| listed("gradient norm", &norm.0, &other.norm.0, none, float))
                .or_else(|| {
                    single("clip of the window", &longest_of(longest), &longest_of(&other.longest))
                })
                .or_else(|| single("skipping", &skip_of(skipped), &skip_of(&other.skipped)))
        };
        let update = || {
            listed("learning rate", &lr.0, &other.lr.0, none, float)
                .or_else(|| listed("new weights", &weights.0, &other.weights.0, tensor, hex))
                .or_else(|| single("state digest", state, &other.state))
        };
        let at = |stage: Stage| {
            move |(quantity, left, right)| Difference { quantity, stage, left, right }
        };
        data()
            .map(at(Stage::Data))
            .or_else(|| forward().map(at(Stage::Forward)))
            .or_else(|| backward().map(at(Stage::Backward)))
            .or_else(|| sum().map(at(Stage::Sum)))
            .or_else(|| update().map(at(Stage::Update)))
    }
}

fn longest_of(longest: &Option<Packed>) -> String {
    longest.clone().map_or_else(
        || "none".to_owned(),
        |longest| format!("{:e} (bits {})", longest.float(), String::from(longest)),
    )
}

fn skip_of(skipped: &Option<Skipped>) -> String {
    match skipped {
        None => "never".to_owned(),
        Some(skipped) => skipped.words().to_owned(),
    }
}

/// A quantity that differs, and both of its values.
type Differs = Option<(String, String, String)>;

fn single<T: PartialEq + ToString>(quantity: &str, left: &T, right: &T) -> Differs {
    (left != right).then(|| (quantity.to_owned(), left.to_string(), right.to_string()))
}

fn listed<T: PartialEq>(
    quantity: &str,
    left: &[T],
    right: &[T],
    place: impl Fn(usize) -> String,
    show: impl Fn(&T) -> String,
) -> Differs {
    if left.len() != right.len() {
        return single(&format!("number of values of {quantity}"), &left.len(), &right.len());
    }
    let index = left.iter().zip(right).position(|(left, right)| left != right)?;
    let quantity = format!("{quantity} {}", place(index)).trim_end().to_owned();
    Some((quantity, show(&left[index]), show(&right[index])))
}

impl Packed {
    /// The bits of floats.
    pub fn floats(values: impl IntoIterator<Item = f64>) -> Self {
        Packed(values.into_iter().map(f64::to_bits).collect())
    }

    /// The only float.
    pub fn float(&self) -> f64 {
        self.0.first().map_or(f64::NAN, |bits| f64::from_bits(*bits))
    }
}

impl From<Packed> for String {
    fn from(packed: Packed) -> String {
        let mut text = String::with_capacity(packed.0.len() * 16);
        for word in packed.0 {
            let _ = write!(text, "{word:016x}");
        }
        text
    }
}

impl TryFrom<String> for Packed {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || {
            format!(
                "expected sixteen hexadecimal digits for each word, found {} characters",
                text.len()
            )
        };
        if !text.is_ascii() || !text.len().is_multiple_of(16) {
            return Err(wrong());
        }
        let words = text.as_bytes().chunks_exact(16).map(|digits| {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            u64::from_str_radix(digits, 16).map_err(|_| wrong())
        });
        words.collect::<Result<_, _>>().map(Packed)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A record whose every quantity follows from `seed`.
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
        StepRecord {
            kind: "step".into(),
            step,
            phase: "first".into(),
            data: Digest(u128::from(word(0))),
            divisor: labels.iter().sum(),
            loss: losses.iter().sum::<f64>() / labels.iter().sum::<u64>() as f64,
            leaf_labels: labels.to_vec(),
            leaf_losses: Packed::floats(losses),
            router: vec![vec![word(6) % 99, word(7) % 99]],
            leaf_gradients: words(8, 2),
            gradients: words(10, 3),
            norm: words(13, 1),
            longest: Some(words(19, 1)),
            skipped: Some(Skipped::No),
            lr: words(14, 1),
            weights: words(15, 3),
            state: Digest(u128::from(word(18))),
            curriculum: None,
            rows: Vec::new(),
        }
    }

    proptest! {
        #[test]
        fn packed_words_survive_text(words: Vec<u64>) {
            let text = String::from(Packed(words.clone()));
            prop_assert_eq!(Packed::try_from(text), Ok(Packed(words)));
        }
    }

    #[test]
    fn the_first_difference_is_named() {
        let parameters = ["a", "b", "c"].map(str::to_owned);
        let left = record(7, 1);
        assert_eq!(left.difference(&left.clone(), &parameters), None);
        let differs = |change: &dyn Fn(&mut StepRecord)| {
            let mut right = left.clone();
            // What comes later differs as well, as it would.
            right.state = Digest(0);
            change(&mut right);
            left.difference(&right, &parameters).unwrap().quantity
        };
        assert_eq!(differs(&|_| ()), "state digest");
        assert_eq!(differs(&|right| right.weights.0[1] ^= 1), "new weights of b");
        assert_eq!(differs(&|right| right.lr.0[0] ^= 1), "learning rate");
        assert_eq!(differs(&|right| right.skipped = Some(Skipped::Loss)), "skipping");
        assert_eq!(differs(&|right| right.longest = None), "clip of the window");
        assert_eq!(differs(&|right| right.norm.0[0] ^= 1), "gradient norm");
        assert_eq!(differs(&|right| right.gradients.0[2] ^= 1), "summed gradient of c");
        assert_eq!(differs(&|right| right.leaf_gradients.0[1] ^= 1), "gradient of micro-batch 1");
        assert_eq!(differs(&|right| right.router[0][1] += 1), "router counts of layer 0");
        assert_eq!(differs(&|right| right.leaf_losses.0[0] ^= 1), "loss of micro-batch 0");
        assert_eq!(differs(&|right| right.leaf_labels[0] += 1), "labels of micro-batch 0");
        assert_eq!(differs(&|right| right.leaf_labels.push(1)), "number of values of labels");
        assert_eq!(differs(&|right| right.divisor += 1), "loss divisor");
        assert_eq!(differs(&|right| right.data = Digest(1)), "data digest");
    }
}
