//! How far a step is from what the steps before it predict, by the same measure as odd steps in `report`: that of
//! [`curriculum::stats`].

use std::collections::BTreeMap;

use serde::Serialize;

use super::RunChange;
use super::history::PreviousSteps;
use curriculum::stats::{self, Deviation, RecentValues, log_norm};
use trainer::ledger::{Packed, StepRecord};
use trainer::optim::guard::Skipped;

/// The distance in spreads from which a value counts as moved.
const FAR: f64 = 4.5;

/// The same where both loss and gradient norm are that far, which rarely happens by chance.
const FAR_TOGETHER: f64 = 3.0;

/// The minimum spread of a loss, as a fraction of the loss.
const LOSS_FLOOR: f64 = 5e-3;

/// The minimum spread of the logarithm of a norm.
const NORM_FLOOR: f64 = 0.08;

/// An update has moved if its ratio to those before is above this, or below the inverse.
const UPDATE: f64 = 1.45;

/// The mean loss of a source with a smaller share of the labels says little.
const PART: f64 = 0.05;

/// How far a step is from usual; `None` where there are too few steps before it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Deviations {
    /// Its loss.
    pub loss: Option<Deviation>,
    /// The loss of its sources.
    pub sources: BTreeMap<String, Deviation>,
    /// The logarithm of its gradient norm.
    pub norm: Option<Deviation>,
    /// The update of the weights by this step or by the one before, whichever is larger, relative to the median before.
    pub update: Option<f64>,
    /// Its learning rate, and that of the step before.
    pub rates: [f64; 2],
    /// Why it was skipped, if it was.
    pub skipped: Option<Skipped>,
}

impl Deviations {
    /// For a step with this loss and norm, and its record if there is one.
    pub(super) fn of(
        history: &PreviousSteps,
        changes: &[RunChange],
        loss: f64,
        norm: f64,
        record: Option<&StepRecord>,
    ) -> Deviations {
        let position = |value: f64, floor: f64, of: &dyn Fn(&StepRecord) -> Option<f64>| {
            let mut window = RecentValues::of_few();
            for record in &history.records {
                if changes.iter().any(|change| change.step == record.step && change.kind.moves()) {
                    window.change();
                }
                of(record).into_iter().for_each(|value| window.push(value));
            }
            match value.is_finite() {
                true => window.position(value, floor),
                false => Some(Deviation { usual: window.median()?, score: f64::INFINITY }),
            }
        };
        let of_norm = position(log_norm(norm), NORM_FLOOR, &|record| Some(log_norm(record.norm())));
        let mut sources = BTreeMap::new();
        for (name, sum) in record.iter().flat_map(|record| &record.sources) {
            let labels = sum.labels as f64;
            let of = |record: &StepRecord| record.sources.get(name)?.mean();
            let usually = history.median(|record| Some(record.sources.get(name)?.labels as f64));
            let share = labels / record.map_or(1.0, |record| record.label_count as f64);
            let Some(mean) = sum.mean().filter(|_| share > PART) else { continue };
            let found = position(mean, LOSS_FLOOR * mean.abs(), &of);
            if let (Some(found), Some(usually)) = (found, usually) {
                // The mean of fewer labels is noisier.
                let score = found.score * (labels / usually.max(1.0)).sqrt().min(1.0);
                sources.insert(name.clone(), Deviation { score, ..found });
            }
        }
        Deviations {
            loss: position(loss, LOSS_FLOOR * loss.abs(), &|record| Some(record.loss)),
            sources,
            norm: of_norm.map(|found| Deviation { usual: found.usual.exp(), ..found }),
            update: update(history.since(super::changes::last(changes)), record),
            skipped: record.and_then(|record| record.skipped).filter(|why| *why != Skipped::No),
            ..Deviations::default()
        }
    }

    /// Whether loss or gradient norm are unusual; true if that is unknown.
    pub(super) fn learned(&self) -> bool {
        let [Some(loss), Some(norm)] = [&self.loss, &self.norm] else { return true };
        let losses = self.sources.values().chain([loss]).map(|one| one.score.abs());
        let (loss, norm) = (losses.fold(0.0, f64::max), norm.score.abs());
        loss.max(norm) > FAR || loss.min(norm) > FAR_TOGETHER
    }

    /// The same for the updates.
    pub(super) fn updated(&self) -> bool {
        self.update.is_none_or(|times| !(1.0 / UPDATE..=UPDATE).contains(&times))
    }
}

/// The ratio of an update to the median of those before: of this step or of the one before, the farther from 1.
fn update(history: &[StepRecord], record: Option<&StepRecord>) -> Option<f64> {
    let of = |record: &StepRecord| {
        let Packed(norms) = &record.layer_update_norms;
        norms.iter().map(|bits| f64::from_bits(*bits).powi(2)).sum::<f64>().sqrt()
    };
    let (last, rest) = history.split_last()?;
    let usual = stats::median(rest.iter().map(of).filter(|norm| *norm > 0.0))?;
    let both = [Some(last), record].into_iter().flatten().map(|record| of(record) / usual);
    both.filter(|times| *times > 0.0).max_by(|a, b| a.ln().abs().total_cmp(&b.ln().abs()))
}
