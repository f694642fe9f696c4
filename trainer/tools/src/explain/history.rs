//! The steps before the explained one, from the ledger.

use contract::Result;

use curriculum::stats::{self, FEW};
use trainer::ledger::{Ledger, StepRecord};

/// Steps over which the cost of a source is averaged: few, since losses fall.
const COST: usize = 32;

/// The number of steps that count as recent.
const LATELY: usize = 16;

/// The last steps before one, oldest first.
pub(super) struct PreviousSteps {
    pub(super) records: Vec<StepRecord>,
}

impl PreviousSteps {
    /// The `window` steps before `step`, or as many as there are.
    pub(super) fn read(ledger: &Ledger, step: u64, window: u64) -> Result<PreviousSteps> {
        let last = (step - 1).min(ledger.last_step());
        let first = last.saturating_sub(window) + 1;
        Ok(PreviousSteps {
            records: (first..=last).map(|step| ledger.record(step)).collect::<Result<_>>()?,
        })
    }

    /// The steps from `first` on, if there are enough to judge by; else all.
    pub(super) fn since(&self, first: u64) -> &[StepRecord] {
        let since = &self.records[self.records.partition_point(|record| record.step < first)..];
        if since.len() < FEW { &self.records } else { since }
    }

    /// What a label of `source` cost, in nats; if the source had no labels, the cost of any label. `None` before the
    /// first step.
    pub(super) fn cost(&self, source: &str) -> Option<f64> {
        let sums = |wanted: Option<&str>| {
            let all = self.records.iter().rev().take(COST).flat_map(|record| &record.sources);
            let of = all.filter(|(name, _)| wanted.is_none_or(|wanted| wanted == *name));
            let (loss, labels) = of.fold((0.0, 0), |(loss, labels), (_, one)| {
                (loss + one.loss.float(), labels + one.labels)
            });
            (labels > 0).then(|| loss / labels as f64)
        };
        sums(Some(source)).or_else(|| sums(None))
    }

    /// The median of a quantity over these steps; `None` where no step has it.
    pub(super) fn median(&self, quantity: impl Fn(&StepRecord) -> Option<f64>) -> Option<f64> {
        stats::median(self.records.iter().filter_map(quantity))
    }

    /// The same over the most recent steps.
    pub(super) fn lately(&self, quantity: impl Fn(&StepRecord) -> Option<f64>) -> Option<f64> {
        stats::median(self.records.iter().rev().take(LATELY).filter_map(quantity))
    }
}
