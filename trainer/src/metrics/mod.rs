//! Curves for TensorBoard (`metrics/`), for a user's program (`--metrics-exec`) and for scrapers of `ztrain watch`,
//! under the same names. All values except speeds are in the ledger or follow from it; a run never reads them.
//!
//! ```text
//! total/loss   loss/NAME                   mean loss of a label, over the step and by source
//! head/z_loss                              mean z-loss of a label, where `z_loss` is not 0
//! optimizer/gradient_norm   optimizer/lr   before clipping; the rate applied
//! gradient_norm/LAYER   update_norm/LAYER  of the embedding, each layer and the final norm
//! router/entropy   router/entropy_least    load over the experts, 1 for even: mean and least over the layers
//! router/skipped                           share of tokens on the skip class
//! optimizer/clip_threshold                 the clip of `[auto_clip]`
//! optimizer/skipped                        1 where `[skip_step]` skipped the step, else 0
//! data/tokens                              tokens of all steps so far
//! speed/tokens_per_second   speed/data_stall   and the share of the time in which the step waited for its batch
//! speed/tflops                             operations that the model defines, in units of 10^12 a second, of one rank
//! speed/mfu                                the same as a share of what its device can do, where that is known
//! speed/memory                             bytes that the process of rank 0 holds
//! total/validation   validation/NAME       mean loss of a label on held-out text
//! accuracy/TASK   accuracy_norm/TASK       share of right examples of a task, and with scores by character
//! log_likelihood/TASK                      mean log-likelihood of a right answer
//! ```
//!
//! Totals have a group of their own: a source may have any name, and MLflow's files cannot have both `loss` and
//! `loss/NAME`.

mod feed;
mod peak;
mod tensorboard;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::Result;
use curriculum::Dtype;
use serde_json::{Value, json};
use store::disk;

use crate::ledger::{self, StepRecord, StepSummaryFields};
use crate::optim::guard::Skipped;
use crate::spec::RunSpec;
pub(crate) use feed::MetricsFeed;
use tensorboard::Writer;

/// The curves of one process's part of a run.
pub struct Metrics {
    writer: Writer,
    feed: Option<Arc<MetricsFeed>>,
    waited: Duration,
    stall: DataStall,
}

/// How long the steps of a process have waited for their batches. The first step is separate: its batch is never
/// prefetched.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DataStall {
    /// Number of steps.
    pub steps: u64,
    /// Wait of the first step.
    pub first: Duration,
    /// Total wait of all others.
    pub waited: Duration,
    /// Total duration of all others.
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

    /// The fraction of their time that all steps but the first waited.
    pub fn share(&self) -> f64 {
        share(self.waited, self.taken)
    }
}

/// The fraction of `taken` that was `waited`.
pub(crate) fn share(waited: Duration, taken: Duration) -> f64 {
    (waited.as_secs_f64() / taken.as_secs_f64().max(1e-9)).min(1.0)
}

impl Metrics {
    /// Creates a file in `folder`, which supersedes other files there for steps after `step`.
    pub fn open(folder: &Path, step: u64) -> Result<Self> {
        disk::create_folder(folder)?;
        let (writer, waited) = (Writer::create(folder, step)?, Duration::ZERO);
        Ok(Metrics { writer, feed: None, waited, stall: DataStall::default() })
    }

    /// The next batch; measures how long it took.
    pub fn wait<T>(&mut self, next: impl FnOnce() -> Option<T>) -> Option<T> {
        let begin = Instant::now();
        let batch = next();
        self.waited = begin.elapsed();
        batch
    }

    /// How long the current batch was waited for.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// How long batches were waited for since the process started.
    pub fn stall(&self) -> DataStall {
        self.stall
    }

    /// Writes the curves of one step.
    pub(crate) fn step(
        &mut self,
        spec: &RunSpec,
        record: &StepRecord,
        speed: &StepSpeed,
        again: bool,
    ) -> Result<()> {
        self.stall.add(self.waited, speed.taken);
        let values =
            curves(&StepSummaryFields::of(record), &layer_names(&spec.names()), Some(speed));
        if let (Some(feed), false) = (&self.feed, again) {
            feed.step(record.step, line(record.step, &values));
        }
        self.writer.scalars(record.step, &values)
    }

    /// Sends the curves of every step from now on to a program as well.
    pub(crate) fn feed(&mut self, feed: Arc<MetricsFeed>) {
        self.feed = Some(feed);
    }

    /// Writes the curves of an event between two steps, and has them sent; the run's folder has the event.
    pub(crate) fn between(&mut self, step: u64, event: &str, fields: &Value) -> Result<()> {
        if let Some(feed) = &self.feed {
            feed.between();
        }
        self.writer.scalars(step, &between(event, fields).unwrap_or_default())
    }
}

/// The curves of a validation or of scores of tasks, as an event has them; `None` for any other event.
pub fn between(event: &str, fields: &Value) -> Option<Vec<(String, f64)>> {
    let each = |field: &str| fields[field].as_object().into_iter().flatten();
    let loss = |of: &Value| of["loss"].as_f64();
    match event {
        "validation" => {
            let all = ("total/validation".to_owned(), loss(&fields["all"])?);
            let named = each("sources")
                .filter_map(|(name, of)| Some((format!("validation/{name}"), loss(of)?)));
            Some(named.chain([all]).collect())
        }
        "evaluation" => {
            let curves = each("tasks").flat_map(|(task, scores)| {
                let curve = move |name| Some((format!("{name}/{task}"), scores[name].as_f64()?));
                ["accuracy", "accuracy_norm", "log_likelihood"].into_iter().filter_map(curve)
            });
            Some(curves.collect())
        }
        _ => None,
    }
}

/// The speed of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepSpeed {
    /// Its duration.
    pub taken: Duration,
    /// How long it waited for its batch.
    pub waited: Duration,
    /// Its number of tokens.
    pub tokens: u64,
    /// Tokens of all steps so far.
    pub all_tokens: u64,
    /// FLOPs of one rank.
    pub flops: f64,
    /// Peak FLOP/s of its device, if known.
    pub peak: Option<f64>,
    /// Memory of the process of rank 0 in bytes.
    pub memory: u64,
}

impl StepSpeed {
    fn seconds(&self) -> f64 {
        self.taken.as_secs_f64().max(1e-9)
    }

    /// Tokens per second.
    pub(crate) fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds()
    }

    /// TFLOP/s.
    pub(crate) fn tflops(&self) -> f64 {
        self.flops / self.seconds() / 1e12
    }

    /// Model FLOPs utilisation.
    pub(crate) fn mfu(&self) -> Option<f64> {
        Some(1e12 * self.tflops() / self.peak?)
    }

    fn curves(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let mfu = self.mfu().map(|mfu| ("speed/mfu", mfu));
        let all = [
            ("data/tokens", self.all_tokens as f64),
            ("speed/tokens_per_second", self.rate()),
            ("speed/data_stall", share(self.waited, self.taken)),
            ("speed/tflops", self.tflops()),
            ("speed/memory", self.memory as f64),
        ];
        all.into_iter().chain(mfu)
    }
}

/// Peak FLOP/s of `device` in `dtype`, if known.
pub(crate) fn peak(device: tch::Device, dtype: Dtype) -> Option<f64> {
    let [name, _] = kernels::device::identity(device)?;
    peak::of(&name?, dtype)
}

/// Curves as a line of JSON.
fn line(step: u64, values: &[(String, f64)]) -> String {
    let finite = values.iter().filter(|(_, value)| value.is_finite());
    let mut fields: serde_json::Map<_, _> =
        finite.map(|(name, value)| (name.clone(), json!(value))).collect();
    fields.insert("step".to_owned(), json!(step));
    feed::json(&fields)
}

/// Starts a program for the run at `root`, whose ledger ends with step `last`: it gets the curves of all steps.
pub(crate) fn feed(
    command: &str,
    root: &Path,
    spec: &RunSpec,
    last: u64,
) -> Result<Arc<MetricsFeed>> {
    let layers = layer_names(&spec.names());
    let of_record = move |record: &StepRecord| {
        line(record.step, &curves(&StepSummaryFields::of(record), &layers, None))
    };
    MetricsFeed::start(command, root, last, of_record).map(Arc::new)
}

/// The names of the layers in a ledger's norms.
fn layer_names(parameters: &[String]) -> Vec<String> {
    ledger::layers(parameters).into_iter().map(|layer| layer.name).collect()
}

/// The curves of a step; without labels it has no loss.
pub fn curves(
    seen: &StepSummaryFields,
    layers: &[String],
    speed: Option<&StepSpeed>,
) -> Vec<(String, f64)> {
    let mut values = vec![
        ("total/loss".to_owned(), seen.loss),
        ("optimizer/gradient_norm".to_owned(), seen.norm()),
        ("optimizer/lr".to_owned(), seen.lr()),
    ];
    let speeds = speed.into_iter().flat_map(StepSpeed::curves);
    values.extend(speeds.map(|(name, value)| (name.to_owned(), value)));
    values.retain(|(_, value)| !value.is_nan());
    values.extend(seen.z_loss().map(|z_loss| ("head/z_loss".to_owned(), z_loss)));
    if let Some(threshold) = seen.clip_threshold().filter(|it| it.is_finite()) {
        values.push(("optimizer/clip_threshold".to_owned(), threshold));
    }
    if let Some(skipped) = seen.skipped {
        let skipped = if skipped == Skipped::No { 0.0 } else { 1.0 };
        values.push(("optimizer/skipped".to_owned(), skipped));
    }
    let losses = seen.sources.iter().filter_map(|(name, sums)| Some((name, sums.mean()?)));
    values.extend(losses.map(|(name, loss)| (format!("loss/{name}"), loss)));
    let norms = seen.layer_gradient_norms().into_iter().zip(seen.layer_update_norms());
    for (name, (gradient, update)) in layers.iter().zip(norms) {
        values.push((format!("gradient_norm/{name}"), gradient));
        values.push((format!("update_norm/{name}"), update));
    }
    values.extend(routers(&seen.tokens_per_expert));
    values
}

/// The curves of the routers; empty if no layer has one.
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

/// Entropy of the load over the experts (without the skip class, which is last), relative to that of an even load; 1
/// for a single expert.
pub fn entropy(counts: &[u64]) -> f64 {
    let experts = &counts[..counts.len().saturating_sub(1)];
    let total: u64 = experts.iter().sum();
    if total == 0 || experts.len() < 2 {
        return 1.0;
    }
    let share = |count: u64| count as f64 / total as f64;
    let used = experts.iter().filter(|count| **count > 0).map(|count| share(*count));
    // All tokens at one expert sum to a negative zero.
    (used.map(|share| -share * share.ln()).sum::<f64>() / (experts.len() as f64).ln()).max(0.0)
        + 0.0
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

    /// Curves average only over layers with a router.
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
