//! Consistency checks of a ledger line: labels, losses and norms of a step follow from those of its micro-batches,
//! sources and layers. Training and verification both run them when they read a ledger.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::Packed;

/// The relative tolerance for sums that were added in another order.
const ROUNDING: f64 = 1e-9;

/// The share of one source in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSums {
    /// Its labels.
    pub labels: u64,
    /// The sum of their losses over the source's rows, in batch order, by the fixed tree; as the bits of an f64.
    pub loss: Packed,
}

impl SourceSums {
    /// The mean loss per label; `None` without labels.
    pub fn mean(&self) -> Option<f64> {
        (self.labels > 0).then(|| self.loss.float() / self.labels as f64)
    }
}

/// The fields of a step's line that follow from each other.
#[derive(Clone, Copy, Debug)]
pub struct StepSums<'a> {
    /// Labels in the step.
    pub label_count: u64,
    /// The mean loss per label, read from decimal digits; NaN where it is not finite.
    pub loss: f64,
    /// Labels of each micro-batch.
    pub micro_batch_labels: &'a [u64],
    /// Sum of the token losses of each.
    pub micro_batch_losses: &'a Packed,
    /// Labels and losses by source.
    pub sources: &'a BTreeMap<String, SourceSums>,
    /// Tokens that each layer's router sent to each class.
    pub tokens_per_expert: &'a [Vec<u64>],
    /// The gradient norm.
    pub norm: &'a Packed,
    /// The same by layer.
    pub layer_gradient_norms: &'a Packed,
}

impl StepSums<'_> {
    /// Reports a field that does not follow from the others.
    pub fn check(&self) -> Result<(), String> {
        self.check_micro_batches()?;
        self.check_sources()?;
        self.check_norm()?;
        self.check_routers()
    }

    /// The label count and the loss follow from the micro-batches.
    fn check_micro_batches(&self) -> Result<(), String> {
        let labels = self.micro_batch_labels.iter().sum::<u64>();
        if labels != self.label_count {
            return Err(format!(
                "its label count is {}, its labels add up to {labels}",
                self.label_count
            ));
        }
        let mean = self.micro_batch_losses.tree_sum() / self.label_count as f64;
        let read = as_read(mean);
        match read.map_or(self.loss.is_nan(), |read| read.to_bits() == self.loss.to_bits()) {
            true => Ok(()),
            false => {
                Err(format!("its loss is {}, those of its micro-batches make {mean}", self.loss))
            }
        }
    }

    /// The labels and losses of sources add up to those of the step, up to rounding: they are added in another order.
    fn check_sources(&self) -> Result<(), String> {
        let labels = self.sources.values().map(|source| source.labels).sum::<u64>();
        if labels != self.label_count {
            return Err(format!(
                "its label count is {}, the labels of its sources add up to {labels}",
                self.label_count
            ));
        }
        let found = self.sources.values().map(|source| source.loss.float()).sum::<f64>();
        let micro_batches = self.micro_batch_losses.tree_sum();
        match adds_up(found, micro_batches) {
            true => Ok(()),
            false => Err(format!(
                "its losses add up to {micro_batches}, those of its sources to {found}"
            )),
        }
    }

    /// The squares of the layers' gradient norms add up to the square of the gradient norm.
    fn check_norm(&self) -> Result<(), String> {
        let norm = self.norm.float();
        let found = self.layer_gradient_norms.values().map(|norm| norm * norm).sum::<f64>().sqrt();
        match adds_up(found, norm) {
            true => Ok(()),
            false => Err(format!("its norm is {norm}, those of its layers make {found}")),
        }
    }

    /// Every router sees every token.
    fn check_routers(&self) -> Result<(), String> {
        let counted = self.tokens_per_expert.iter().map(|counts| counts.iter().sum::<u64>());
        let mut counted = counted.filter(|tokens| *tokens > 0);
        let Some(first) = counted.next() else { return Ok(()) };
        match counted.find(|tokens| *tokens != first) {
            None => Ok(()),
            Some(other) => Err(format!("one router counted {first} tokens, another {other}")),
        }
    }
}

/// Whether two sums of the same numbers agree, up to rounding. Sums that are not finite agree if neither is.
fn adds_up(found: f64, wanted: f64) -> bool {
    match wanted.is_finite() {
        true => (found - wanted).abs() <= ROUNDING * wanted.abs(),
        false => !found.is_finite(),
    }
}

/// Reads a number of a ledger's line; `null` is one that is not finite.
pub fn read_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// A number as a reader of the ledger gets it: decimal digits always read back as the same number, but not always as
/// the one that was written. `None` if it is not finite.
fn as_read(number: f64) -> Option<f64> {
    serde_json::to_string(&number).ok().and_then(|text| serde_json::from_str(&text).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A consistent line of 7 labels.
    #[derive(Clone)]
    struct Line {
        label_count: u64,
        loss: f64,
        sources: BTreeMap<String, SourceSums>,
        tokens_per_expert: Vec<Vec<u64>>,
        norm: Packed,
        layers: Packed,
    }

    fn line() -> Line {
        let source = |labels: u64, loss: f64| SourceSums { labels, loss: Packed::floats([loss]) };
        Line {
            label_count: 7,
            loss: as_read(5.75 / 7.0).unwrap(),
            sources: [("web".into(), source(3, 2.0)), ("math".into(), source(4, 3.75))].into(),
            tokens_per_expert: vec![vec![3, 5], vec![], vec![8, 0]],
            norm: Packed::floats([5.0]),
            layers: Packed::floats([3.0, 4.0]),
        }
    }

    impl Line {
        fn check(&self) -> Result<(), String> {
            self.check_losses([1.25, 4.5])
        }

        /// Checks the line with other micro-batch losses.
        fn check_losses(&self, losses: [f64; 2]) -> Result<(), String> {
            let sums = StepSums {
                label_count: self.label_count,
                loss: self.loss,
                micro_batch_labels: &[2, 5],
                micro_batch_losses: &Packed::floats(losses),
                sources: &self.sources,
                tokens_per_expert: &self.tokens_per_expert,
                norm: &self.norm,
                layer_gradient_norms: &self.layers,
            };
            sums.check()
        }
    }

    #[test]
    fn everything_has_to_add_up() {
        type Edit = fn(&mut Line);
        let forged: [(Edit, &str); 10] = [
            (|line| line.loss += 1e-9, "its loss is"),
            (|line| line.loss = f64::NAN, "its loss is"),
            (|line| (line.label_count, line.loss) = (8, 5.75 / 8.0), "add up to 7"),
            (|line| line.sources.get_mut("web").unwrap().labels += 1, "labels of its sources"),
            (
                |line| line.sources.get_mut("web").unwrap().loss = Packed::floats([2.5]),
                "those of its sources to",
            ),
            (|line| drop(line.sources.remove("math")), "labels of its sources"),
            (|line| line.norm = Packed::floats([5.001]), "its norm is 5.001"),
            (|line| line.norm = Packed::floats([f64::NAN]), "its norm is NaN"),
            (|line| line.layers = Packed::floats([3.0, 4.0, 0.1]), "those of its layers"),
            (|line| line.tokens_per_expert[2][1] += 1, "one router counted 8 tokens, another 9"),
        ];
        assert_eq!(line().check(), Ok(()));
        for (forge, words) in forged {
            let mut line = line();
            forge(&mut line);
            let said = line.check().unwrap_err();
            assert!(said.contains(words), "{said}");
        }
        // A loss and a norm that are not finite, and what makes them so.
        let mut diverged = line();
        diverged.loss = f64::NAN;
        diverged.sources.get_mut("web").unwrap().loss = Packed::floats([f64::INFINITY]);
        diverged.norm = Packed::floats([f64::INFINITY]);
        diverged.layers = Packed::floats([f64::NAN, 4.0]);
        assert_eq!(diverged.check_losses([f64::INFINITY, 4.5]), Ok(()));
        assert!(diverged.check_losses([1.25, 4.5]).is_err());
        // No labels, no loss.
        let nothing = |loss: f64| {
            let none = SourceSums { labels: 0, loss: Packed::floats([0.0]) };
            let sources = [("web".to_owned(), none)].into();
            let sums = StepSums {
                label_count: 0,
                loss,
                micro_batch_labels: &[0, 0],
                micro_batch_losses: &Packed::floats([0.0, 0.0]),
                sources: &sources,
                tokens_per_expert: &[],
                norm: &Packed::floats([0.0]),
                layer_gradient_norms: &Packed::floats([0.0]),
            };
            sums.check()
        };
        assert_eq!(nothing(f64::NAN), Ok(()));
        assert!(nothing(0.0).is_err());
        // One bit is enough: the loss follows exactly.
        for bits in [line().loss.to_bits() - 1, line().loss.to_bits() + 1] {
            let beside = Line { loss: f64::from_bits(bits), ..line() };
            assert!(beside.check().unwrap_err().contains("its loss is"));
        }
    }
}
