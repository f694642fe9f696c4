//! The numbers of a step: those of `[optimizer]`, `[schedule]`, `[skip_step]`, `[auto_clip]` and `dtype`, and how
//! amendments change them.
//!
//! From its step on, an amended key counts as if it had that value from the beginning: a rate is a function of the step
//! number and these keys, not of the step of the amendment. Windows are filled from the first step that needs them: an
//! amendment that introduces them begins with empty ones.

use std::ops::Range;

use contract::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::places::{KeySpans, check_numbers, check_windows};
use super::rate::{Schedule, ScheduleOrigin};
use super::text::{Text as Out, float, inline, quoted};
use super::{
    AutoClipSpec, Curriculum, Dtype, NonFinite, OptimizerSpec, Phase, ScheduleChange, ScheduleSpec,
    SkipStepSpec,
};

/// The numbers in force at a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Hyperparameters {
    /// `[optimizer]`.
    pub optimizer: OptimizerSpec,
    /// `[schedule]`, or the latest phase's.
    pub schedule: ScheduleSpec,
    /// Where that schedule begins.
    pub origin: ScheduleOrigin,
    /// `[skip_step]`.
    pub skip_step: Option<SkipStepSpec>,
    /// `[auto_clip]`.
    pub auto_clip: Option<AutoClipSpec>,
    /// What the model computes in.
    pub dtype: Dtype,
}

/// A number that changed; `not set` where the run does not have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChangedHyperparameter {
    /// Its key, as `zdata amend --set` takes it.
    pub key: &'static str,
    /// Its old value.
    pub was: String,
    /// Its new value.
    pub becomes: String,
}

/// The numbers that an amendment changes; `None` if a key is unchanged.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NumbersChange {
    /// Keys of `[optimizer]`.
    pub optimizer: OptimizerChange,
    /// Keys of `[schedule]`.
    pub schedule: ScheduleChange,
    /// Keys of `[skip_step]`.
    pub skip_step: SkipStepChange,
    /// Keys of `[auto_clip]`.
    pub auto_clip: AutoClipChange,
    /// The number format of the model's computation.
    pub dtype: Option<Dtype>,
}

/// `optimizer` of an amendment: the other keys of `[optimizer]` say what the moments mean, so they stay.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerChange {
    /// The peak learning rate.
    pub lr: Option<f64>,
    /// The largest global gradient norm; 0 for no clipping.
    pub clip: Option<f64>,
}

/// `skip_step` of an amendment; a run without the section has its defaults for the keys that are not named.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SkipStepChange {
    /// Steps that a step is measured against, at most.
    pub window: Option<u64>,
    /// Standard deviations.
    pub sigma: Option<f64>,
    /// What becomes of a step whose loss or gradient is not finite.
    pub non_finite: Option<NonFinite>,
}

/// `auto_clip` of an amendment.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AutoClipChange {
    /// Steps that a norm is measured against, at most.
    pub window: Option<u64>,
    /// 1 to 100.
    pub percentile: Option<u64>,
}

impl Curriculum {
    /// The numbers in force at `step`.
    pub fn numbers_at(&self, step: u64) -> Hyperparameters {
        let mut numbers = Hyperparameters {
            optimizer: self.optimizer.clone(),
            schedule: self.schedule,
            origin: ScheduleOrigin::default(),
            skip_step: self.skip_step,
            auto_clip: self.auto_clip,
            dtype: self.dtype,
        };
        let mut at = 0;
        for amendment in self.amendments.iter().filter(|amendment| amendment.step <= step) {
            numbers.advance(&self.phases, at..amendment.step);
            numbers.change(&amendment.numbers);
            at = amendment.step;
        }
        numbers.advance(&self.phases, at..step);
        numbers
    }
}

impl Hyperparameters {
    /// The learning rate by step if these numbers applied from the beginning.
    pub fn rates(&self) -> Schedule {
        Schedule { peak: self.optimizer.lr, spec: self.schedule, origin: self.origin }
    }

    /// The numbers of step `steps.end`, from those of step `steps.start`: begins the schedules of the phases whose
    /// first step lies after `start`, up to `end`.
    pub fn advance(&mut self, phases: &[Phase], steps: Range<u64>) {
        let mut before = 0;
        for phase in phases {
            let first = before + 1;
            if let Some(schedule) =
                phase.schedule.filter(|_| steps.start < first && first <= steps.end)
            {
                let rate = self.rates().rate(before);
                self.optimizer.lr = schedule.lr.unwrap_or(rate);
                self.schedule = schedule.spec;
                self.origin = ScheduleOrigin { after: before, rate };
            }
            before += phase.steps;
        }
    }

    /// The amendable keys whose values differ in `later`.
    pub fn changed(&self, later: &Hyperparameters) -> Vec<ChangedHyperparameter> {
        let shown = |value: Option<String>| match value {
            Some(value) => value.trim_matches('"').to_owned(),
            None => "not set".to_owned(),
        };
        let all = self.amendable().values().into_iter().zip(later.amendable().values());
        let all = all.filter(|((_, was), (_, becomes))| was != becomes);
        let number = |((key, was), (_, becomes))| {
            let [was, becomes] = [was, becomes].map(shown);
            ChangedHyperparameter { key, was, becomes }
        };
        all.map(number).collect()
    }

    /// All amendable numbers, as an amendment would set them.
    fn amendable(&self) -> NumbersChange {
        // The origin of a schedule is a phase's, not an amendment's.
        let Hyperparameters { optimizer, schedule, origin: _, .. } = self;
        let Hyperparameters { skip_step: skip, auto_clip: clip, dtype, .. } = self;
        NumbersChange {
            optimizer: OptimizerChange { lr: Some(optimizer.lr), clip: Some(optimizer.clip) },
            schedule: schedule.effective(),
            skip_step: SkipStepChange {
                window: skip.map(|skip| skip.window),
                sigma: skip.map(|skip| skip.sigma),
                non_finite: skip.map(|skip| skip.non_finite),
            },
            auto_clip: AutoClipChange {
                window: clip.map(|clip| clip.window),
                percentile: clip.map(|clip| clip.percentile),
            },
            dtype: Some(*dtype),
        }
    }

    /// Applies an amendment's changes.
    pub fn change(&mut self, change: &NumbersChange) {
        let NumbersChange { optimizer, schedule, skip_step, auto_clip, dtype } = change;
        let OptimizerChange { lr, clip } = *optimizer;
        if *skip_step != SkipStepChange::default() {
            let SkipStepChange { window, sigma, non_finite } = *skip_step;
            let skip = self.skip_step.get_or_insert_default();
            skip.window = window.unwrap_or(skip.window);
            skip.sigma = sigma.unwrap_or(skip.sigma);
            skip.non_finite = non_finite.unwrap_or(skip.non_finite);
        }
        let AutoClipChange { window, percentile } = *auto_clip;
        let before = self.auto_clip.map(|clip| clip.percentile);
        // Without a percentile there is no clip: `check` refuses a window alone.
        if let Some(percentile) = percentile.or(before) {
            let window = window.or(self.auto_clip.map(|clip| clip.window));
            let window = window.unwrap_or_else(super::window);
            self.auto_clip = Some(AutoClipSpec { window, percentile });
        }
        self.optimizer.lr = lr.unwrap_or(self.optimizer.lr);
        self.optimizer.clip = clip.unwrap_or(self.optimizer.clip);
        self.schedule = self.schedule.with(*schedule);
        self.dtype = dtype.unwrap_or(self.dtype);
    }
}

impl NumbersChange {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == NumbersChange::default()
    }

    /// Refuses changes that `before`, the numbers in force, does not allow. `path` is the amendment's.
    pub(super) fn check(
        &self,
        places: &KeySpans,
        path: &str,
        before: &Hyperparameters,
    ) -> Result<()> {
        let NumbersChange { optimizer, schedule, skip_step: _, auto_clip, dtype: _ } = self;
        let key = |name: &str| format!("{path}.{name}");
        let numbers = [("optimizer.lr", optimizer.lr), ("optimizer.clip", optimizer.clip)];
        for (name, number) in numbers {
            check_numbers(places, &[(&key(name), number.unwrap_or(0.0), f64::INFINITY)])?;
        }
        schedule.apply(places, &key("schedule"), before.schedule)?;
        let mut after = before.clone();
        after.change(self);
        if auto_clip.window.is_some() && after.auto_clip.is_none() {
            let what = "the run has no [auto_clip], and this brings no `percentile`";
            return Err(places.fault(&key("auto_clip.window"), what));
        }
        check_windows(places, &format!("{path}."), after.skip_step, after.auto_clip)?;
        if !self.is_empty() && after == *before {
            let what = "these are the values that the run has already";
            return Err(places.fault(&key(self.first_key()), what));
        }
        Ok(())
    }

    /// A key for error messages.
    fn first_key(&self) -> &'static str {
        let named = self.values().into_iter().find(|(_, value)| value.is_some());
        table_of(named.unwrap_or_default().0)
    }

    /// Every amendable key with its value in canonical text: the only list of them.
    pub fn values(&self) -> [(&'static str, Option<String>); 14] {
        // No `..`: a new key does not compile until it is listed here.
        let NumbersChange {
            optimizer: OptimizerChange { lr, clip },
            schedule,
            skip_step: SkipStepChange { window, sigma, non_finite },
            auto_clip: AutoClipChange { window: norms, percentile },
            dtype,
        } = self;
        let number = |value: &Option<f64>| value.map(float);
        let count = |value: &Option<u64>| value.map(|value| value.to_string());
        let [kind, warmup, stable, decay, shape, last] = schedule.values();
        [
            ("optimizer.lr", number(lr)),
            ("optimizer.clip", number(clip)),
            kind,
            warmup,
            stable,
            decay,
            shape,
            last,
            ("skip_step.window", count(window)),
            ("skip_step.sigma", number(sigma)),
            ("skip_step.non_finite", non_finite.map(|rule| quoted(rule.name()))),
            ("auto_clip.window", count(norms)),
            ("auto_clip.percentile", count(percentile)),
            ("dtype", dtype.map(|dtype| quoted(dtype.name()))),
        ]
    }

    /// Writes its canonical text.
    pub(super) fn write(&self, out: &mut Out) {
        let named = self.values().into_iter().filter_map(|(key, value)| Some((key, value?)));
        let named: Vec<_> = named.collect();
        for table in named.chunk_by(|(one, _), (other, _)| table_of(one) == table_of(other)) {
            let pair = |(key, value): &(&str, String)| {
                let name = key.split_once('.').map_or(*key, |(_, name)| name);
                format!("{name} = {value}")
            };
            match table {
                [(key, value)] if !key.contains('.') => out.line(key, value),
                [(key, _), ..] => out.line(table_of(key), inline(table.iter().map(pair).collect())),
                [] => {}
            }
        }
    }
}

/// The table of a key; the key itself if it is in none.
fn table_of(key: &str) -> &str {
    key.split('.').next().unwrap_or(key)
}
