//! `metrics/`: curves for TensorBoard, written while the run goes on. What they show is in the ledger or follows from it,
//! but for the speeds; nothing here is read again by a run.
//!
//! ```text
//! loss/all   loss/NAME                     mean loss of a label, over the step and by source
//! optimizer/gradient_norm   optimizer/lr   before clipping; the rate applied
//! gradient_norm/LAYER   update_norm/LAYER  of the embedding, each layer and the final norm
//! router/entropy   router/entropy_least    load over the experts, 1 for even: mean and least over the layers
//! router/skipped                           share of tokens on the skip class
//! optimizer/clip_threshold optimizer/skipped     the clip of `[auto_clip]`; 1 where `[skip_step]` skipped the step, else 0
//! speed/tokens_per_second   speed/data_stall   and the share of the time in which the step waited for its batch
//! validation/all   validation/NAME         mean loss of a label on held-out text
//! ```

mod tensorboard;

use std::path::Path;
use std::time::{Duration, Instant};

use contract::Result;
use store::disk;

use crate::ledger::{self, LayerParameters, Packed, StepRecord};
use crate::optim::guard::Skipped;
use crate::spec::RunSpec;
use crate::validate::SourceLoss;
use tensorboard::Writer;

/// The curves of one process's part of a run.
pub struct Metrics {
    writer: Writer,
    waited: Duration,
    stall: DataStall,
}

/// How long the steps of a process have waited for their batches. Nobody reads ahead of the first one, which says nothing about
/// the others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DataStall {
    /// Steps.
    pub steps: u64,
    /// What the first one waited.
    pub first: Duration,
    /// What all others waited.
    pub waited: Duration,
    /// How long all others took.
    pub taken: Duration,
}

impl DataStall {
    fn add(&mut self, waited: Duration, taken: Duration) {
        match self.steps {
            0 => self.first = waited,
            _ => {
                self.waited += waited;
                self.taken += taken;
            }
        }
        self.steps += 1;
    }

    /// The share of their time in which all steps but the first waited.
    pub fn share(&self) -> f64 {
        share(self.waited, self.taken)
    }
}

/// The share of `taken` that was `waited`.
pub(crate) fn share(waited: Duration, taken: Duration) -> f64 {
    (waited.as_secs_f64() / taken.as_secs_f64().max(1e-9)).min(1.0)
}

impl Metrics {
    /// Begins a file in `folder`; what other files there say of steps after `step` is void from now on.
    pub fn open(folder: &Path, step: u64) -> Result<Self> {
        disk::create_folder(folder)?;
        let (writer, waited) = (Writer::create(folder, step)?, Duration::ZERO);
        Ok(Metrics { writer, waited, stall: DataStall::default() })
    }

    /// The next batch, and a note of how long it took to come.
    pub fn wait<T>(&mut self, next: impl FnOnce() -> Option<T>) -> Option<T> {
        let begin = Instant::now();
        let batch = next();
        self.waited = begin.elapsed();
        batch
    }

    /// How long the batch at hand was waited for.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// How long batches were waited for since the process began.
    pub fn stall(&self) -> DataStall {
        self.stall
    }

    /// The curves of one step, which took `taken` in all.
    pub fn step(
        &mut self,
        spec: &RunSpec,
        record: &StepRecord,
        tokens: u64,
        taken: Duration,
    ) -> Result<()> {
        let seconds = taken.as_secs_f64().max(1e-9);
        self.stall.add(self.waited, taken);
        let mut values = vec![
            ("loss/all".to_owned(), record.loss),
            ("optimizer/gradient_norm".to_owned(), record.norm()),
            ("optimizer/lr".to_owned(), record.lr()),
            ("speed/tokens_per_second".to_owned(), tokens as f64 / seconds),
            ("speed/data_stall".to_owned(), share(self.waited, taken)),
        ];
        // A step without labels has no loss.
        values.retain(|(_, value)| !value.is_nan());
        if let Some(threshold) =
            record.clip_threshold.as_ref().map(Packed::float).filter(|it| it.is_finite())
        {
            values.push(("optimizer/clip_threshold".to_owned(), threshold));
        }
        if let Some(skipped) = record.skipped {
            let skipped = if skipped == Skipped::No { 0.0 } else { 1.0 };
            values.push(("optimizer/skipped".to_owned(), skipped));
        }
        let sources = record.sources.iter();
        let losses = sources.filter_map(|(name, sums)| Some((name, sums.mean()?)));
        values.extend(losses.map(|(name, loss)| (format!("loss/{name}"), loss)));
        let layers = ledger::layers(&spec.names()).into_iter();
        let norms = record.layer_gradient_norms.values().zip(record.layer_update_norms.values());
        for (LayerParameters { name, .. }, (gradient, update)) in layers.zip(norms) {
            values.push((format!("gradient_norm/{name}"), gradient));
            values.push((format!("update_norm/{name}"), update));
        }
        values.extend(routers(&record.tokens_per_expert));
        self.writer.scalars(record.step, &values)
    }

    /// The losses on held-out text after `step`.
    pub fn validation(&mut self, step: u64, sources: &[SourceLoss]) -> Result<()> {
        let named = sources.iter().map(|one| (format!("validation/{}", one.source), one.mean()));
        let all = ("validation/all".to_owned(), SourceLoss::over(sources).mean());
        self.writer.scalars(step, &named.chain([all]).collect::<Vec<_>>())
    }
}

/// The curves of the routers; none where no layer has one.
fn routers(counts: &[Vec<u64>]) -> Vec<(String, f64)> {
    let routers: Vec<&[u64]> =
        counts.iter().map(Vec::as_slice).filter(|counts| !counts.is_empty()).collect();
    if routers.is_empty() {
        return Vec::new();
    }
    let load = || routers.iter().map(|counts| entropy(counts));
    let curves = [
        ("router/entropy", mean(load())),
        ("router/entropy_least", load().fold(1.0, f64::min)),
        ("router/skipped", mean(routers.iter().map(|counts| share_of_last(counts)))),
    ];
    curves.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Entropy of the load over the experts (the last class is the skip), over that of an even one; 1 for a single expert.
pub(crate) fn entropy(counts: &[u64]) -> f64 {
    let experts = &counts[..counts.len().saturating_sub(1)];
    let total: u64 = experts.iter().sum();
    if total == 0 || experts.len() < 2 {
        return 1.0;
    }
    let share = |count: u64| count as f64 / total as f64;
    let used = experts.iter().filter(|count| **count > 0).map(|count| share(*count));
    used.map(|share| -share * share.ln()).sum::<f64>() / (experts.len() as f64).ln()
}

fn share_of_last(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    counts.last().map_or(0.0, |last| *last as f64 / total.max(1) as f64)
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Curves are of the layers that have a router.
    #[test]
    fn layers_without_a_router_are_no_even_ones() {
        assert!(routers(&[vec![], vec![]]).is_empty());
        let alone = routers(&[vec![4, 0, 1]]);
        assert_eq!(routers(&[vec![], vec![4, 0, 1], vec![]]), alone);
        let curve = |name: &str| alone.iter().find(|(one, _)| one == name).map(|(_, value)| *value);
        assert_eq!(curve("router/entropy"), Some(0.0));
        assert_eq!(curve("router/skipped"), Some(0.2));
    }

    #[test]
    fn the_first_step_is_told_apart() {
        let (second, mut stall) = (Duration::from_secs(1), DataStall::default());
        assert_eq!(stall.share(), 0.0);
        stall.add(9 * second, 10 * second);
        assert_eq!((stall.steps, stall.first, stall.share()), (1, 9 * second, 0.0));
        stall.add(second, 5 * second);
        stall.add(Duration::ZERO, 5 * second);
        assert_eq!((stall.steps, stall.first, stall.share()), (3, 9 * second, 0.1));
        assert_eq!(share(2 * second, second), 1.0);
    }

    #[test]
    fn an_even_load_has_entropy_one_and_a_lone_expert_none() {
        assert!((entropy(&[5, 5, 5, 5, 100]) - 1.0).abs() < 1e-12, "the skip is no load");
        assert_eq!(entropy(&[9, 0, 0, 0]), 0.0);
        assert!((entropy(&[1, 1, 0, 0, 0]) - 0.5).abs() < 1e-12, "two of four: half of the bits");
        assert_eq!(entropy(&[0, 0, 3]), 1.0, "nobody was asked");
        assert_eq!(share_of_last(&[1, 2, 1]), 0.25);
    }
}
