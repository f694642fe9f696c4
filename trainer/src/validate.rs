//! The validation loss: a function of weights, text, `seq_len`, chunks, shards, number format and kernel table only.
//! The interval and the number of windows are flags, since they do not affect the run; so the results are in
//! `events.jsonl`, not in the ledger. Computed again after a kill, they have the same bits.

use contract::Result;
use loader::validation;
use serde_json::{Value, json};

use crate::model::{self, MicroBatchContext};
use crate::passes::{self, PassResult, Passes};
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{FrozenModel, StepContext, Weights, rows};

/// The interval and size of validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validation {
    /// Steps between two validations; 0 for none.
    pub every: u64,
    /// Windows per source, spread evenly over its held-out text; all windows if there are fewer.
    pub windows: u64,
}

/// The loss of one source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceLoss {
    /// The source's name.
    pub source: String,
    /// Sum of token losses, in nats.
    pub loss: f64,
    /// Labels.
    pub labels: u64,
}

impl SourceLoss {
    /// Mean loss per label.
    pub fn mean(&self) -> f64 {
        self.loss / self.labels.max(1) as f64
    }

    /// The total over sources: every label has the same weight.
    pub fn over(sources: &[SourceLoss]) -> SourceLoss {
        let (loss, labels) = sources
            .iter()
            .fold((0.0, 0), |(loss, labels), one| (loss + one.loss, labels + one.labels));
        SourceLoss { source: "all".to_owned(), loss, labels }
    }

    /// Its fields for the events; `bits` are those of the sum.
    pub fn to_json(&self) -> Value {
        let bits = format!("{:016x}", self.loss.to_bits());
        json!({"loss": self.mean(), "labels": self.labels, "bits": bits})
    }
}

impl Validation {
    /// Whether to validate after `step`, if the run's last step is `last`.
    pub(crate) fn is_due(&self, step: u64, last: u64) -> bool {
        self.every > 0 && (step == last || step.is_multiple_of(self.every))
    }

    /// Validates on the ranks of `cx`, which divide the text among them. The sources are in the order of the plan,
    /// without those that have no held-out text. `None` if a rank was `asked` to stop before the end.
    pub fn take(
        &self,
        cx: StepContext<'_>,
        state: &State,
        asked: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<SourceLoss>>> {
        let windows =
            Windows { spec: cx.spec, step: state.step, all: self.windows_of(cx.spec, state.step)? };
        let Some(results) = passes::divided(cx, state, &windows, asked)? else { return Ok(None) };
        let mut sums: Vec<SourceLoss> = Vec::new();
        for (Window { source, .. }, PassResult { loss, count: labels }) in
            windows.all.into_iter().zip(results)
        {
            match sums.last_mut() {
                Some(sum) if sum.source == source => {
                    (sum.loss, sum.labels) = (sum.loss + loss, sum.labels + labels);
                }
                _ => sums.push(SourceLoss { source, loss, labels }),
            }
        }
        sums.retain(|sum| sum.labels > 0);
        Ok(Some(sums))
    }

    /// The windows to validate on after `step`.
    fn windows_of(&self, spec: &RunSpec, step: u64) -> Result<Vec<Window>> {
        let seq_len = spec.plan.step(step.max(1))?.seq_len;
        let mut all = Vec::new();
        for source in spec.plan.sources() {
            let total = validation::windows(&spec.data, &source.name, seq_len)?;
            let spread = spread(total, self.windows);
            all.extend(spread.map(|number| Window { source: source.name.clone(), number }));
        }
        Ok(all)
    }
}

/// A sequence of a source's held-out text.
struct Window {
    source: String,
    number: u64,
}

/// The windows to validate on after a step.
struct Windows<'a> {
    spec: &'a RunSpec,
    step: u64,
    all: Vec<Window>,
}

impl Passes for Windows<'_> {
    fn title(&self) -> String {
        format!("validation after step {}", self.step)
    }

    fn count(&self) -> usize {
        self.all.len()
    }

    fn place(&self, index: usize) -> String {
        let Window { source, number } = &self.all[index];
        format!("validation of {source} after step {}, window {number}", self.step)
    }

    fn compute(
        &self,
        index: usize,
        model: &FrozenModel<'_>,
        how: MicroBatchContext<'_>,
    ) -> Result<PassResult> {
        let Window { source, number } = &self.all[index];
        let seq_len = self.spec.plan.step(self.step.max(1))?.seq_len;
        let batch = validation::batch(&self.spec.data, source, seq_len, *number, 1)?;
        let input = rows(&batch, 0..batch.rows);
        let compute = |Weights { weights, biases }: Weights<'_>| {
            model::losses(how, model.config(), weights, biases, &input)
        };
        let loss = model.read(compute, || self.place(index))?;
        Ok(PassResult { loss, count: batch.label_count })
    }
}

/// At most `wanted` of `total` windows, spread evenly: each is the first of its share of the text.
fn spread(total: u64, wanted: u64) -> impl Iterator<Item = u64> {
    let wanted = wanted.min(total);
    (0..wanted).map(move |index| index + index * (total - wanted) / wanted)
}
