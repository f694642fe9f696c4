//! A counterfactual change to a run: replays simulate it, forks train with it.
//!
//! Both turn it into an amendment of the run's curriculum, so a fork computes what the replay did, bit for bit.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use contract::{Fault, Result, words};
use curriculum::{Amendment, Dtype, NumbersChange, OptimizerChange, ScheduleChange, ScheduleKind};
use mixer::Curriculum;

use trainer::spec::RunSpec;

/// What changes from a step on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WhatIfChange {
    /// Documents whose text is masked, `ID` or `SOURCE:ID`; everything else keeps its position.
    pub drop_documents: Vec<String>,
    /// Sources that are removed from every mix; text of the others takes their place.
    pub drop_sources: Vec<String>,
    /// The learning rate of the first step; later ones are scaled by the same factor.
    pub lr: Option<f64>,
    /// The largest gradient norm; 0 for no clipping.
    pub clip: Option<f64>,
    /// Whether a bf16 run computes in f32.
    pub fp32: bool,
    /// Whether the first step is skipped: it updates nothing.
    pub skip: bool,
}

/// Numbers of documents by source, counted in its training stream.
pub type DocumentsBySource = BTreeMap<String, BTreeSet<u64>>;

impl WhatIfChange {
    /// Whether anything is changed.
    pub fn is_some(&self) -> bool {
        *self != WhatIfChange::default()
    }

    /// The curriculum of `spec` with this change from the first of `steps` on; `documents` are the numbers of the
    /// dropped documents. Sources are removed from the mixes of these steps.
    pub fn amended(
        &self,
        spec: &RunSpec,
        steps: Range<u64>,
        documents: DocumentsBySource,
    ) -> Result<Curriculum> {
        let (mut curriculum, step) = (spec.curriculum.clone(), steps.start);
        let numbers = self.numbers(spec, step)?;
        if let Some(lr) = self.lr {
            let held = !scales(spec, step);
            scale_later(&mut curriculum, step, lr / rate_at(spec, step), held);
        }
        // The change applies to all of these steps, so later amendments must not undo it.
        for later in curriculum.amendments.iter_mut().filter(|one| one.step > step) {
            let NumbersChange { optimizer, dtype, .. } = &mut later.numbers;
            optimizer.clip = optimizer.clip.filter(|_| self.clip.is_none());
            *dtype = dtype.filter(|_| !self.fp32);
        }
        curriculum.amendments.retain(|one| !one.is_empty());
        let first =
            Amendment { step, ban: documents, numbers, skip: self.skip, ..Amendment::default() };
        if !first.is_empty() {
            curriculum.amend(vec![first]);
        }
        for source in &self.drop_sources {
            let dropped = curriculum.drop_source(source, steps.clone());
            if !dropped.map_err(|fault| fault.at(format!("--drop-source {source}")))? {
                // A mix may name a source whose buckets the plan has: their shares are its curve's.
                let segments = spec.curriculum.segments();
                let sources: BTreeSet<_> =
                    segments.iter().flat_map(|segment| segment.spec.mix.sources()).collect();
                let last = (steps.end - 1).min(spec.plan.steps());
                let what = format!("no mix of {} has source {source:?}", words::steps(step, last));
                let others = sources.into_iter().filter(|name| *name != source);
                let others: Vec<_> = others.map(String::as_str).collect();
                let others =
                    if others.is_empty() { "no other".to_owned() } else { others.join(", ") };
                return Err(Fault::usage(what)
                    .at("--drop-source")
                    .hint(format!("other sources of this run: {others}")));
            }
        }
        Ok(curriculum)
    }

    fn numbers(&self, spec: &RunSpec, step: u64) -> Result<NumbersChange> {
        let (mut optimizer, mut schedule) = (OptimizerChange::default(), ScheduleChange::default());
        optimizer.clip = self.clip;
        if let Some(clip) = self.clip.filter(|clip| *clip == spec.settings_at(step).clip) {
            return Err(already("--clip", clip));
        }
        if let Some(lr) = self.lr {
            let now = spec.settings_at(step).schedule;
            let rate = rate_at(spec, step);
            if lr == rate {
                return Err(already("--lr", lr));
            }
            if scales(spec, step) {
                // One factor on the peak and the final rate keeps the shape.
                let peak = now.peak * (lr / rate);
                if !peak.is_finite() {
                    let what = "with later steps in proportion the highest rate would be infinite";
                    return Err(Fault::usage(what)
                        .at("--lr")
                        .found(format!("{lr:e}, where the run has {rate:e}")));
                }
                optimizer.lr = Some(peak);
                let last = now.spec.effective().final_lr;
                schedule.final_lr = last.map(|last| last * (lr / rate));
            } else {
                // The new rate is constant, up to the next phase with a schedule of its own.
                optimizer.lr = Some(lr);
                (schedule.kind, schedule.warmup_steps) = (Some(ScheduleKind::Constant), Some(0));
            }
        }
        let dtype = self.fp32.then_some(Dtype::F32);
        if self.fp32 && spec.dtype_at(step) == Dtype::F32 {
            return Err(Fault::usage("the run computes in f32 already").at("--fp32"));
        }
        Ok(NumbersChange { optimizer, schedule, dtype, ..NumbersChange::default() })
    }
}

/// The error for a number that the step has in any case.
fn already(flag: &str, number: f64) -> Fault {
    Fault::usage("the step has this value already").at(flag).found(format!("{number:e}"))
}

/// The learning rate of a step.
pub fn rate_at(spec: &RunSpec, step: u64) -> f64 {
    spec.settings_at(step).schedule.rate(step)
}

/// Whether one factor on the peak and the final rate scales the rates from `step` on: not a rate of 0, and not a
/// warm-up from the rate before a phase, which no factor reaches, now or by a later amendment.
fn scales(spec: &RunSpec, step: u64) -> bool {
    let (curriculum, schedule) = (&spec.curriculum, spec.settings_at(step).schedule);
    let origin = schedule.origin;
    let warms = |one: &Amendment| {
        let later = one.step > step && one.numbers.schedule.warmup_steps.is_some();
        later && curriculum.numbers_at(one.step).origin == origin
    };
    let warm = schedule.is_warming_up(step) || curriculum.amendments.iter().any(warms);
    schedule.rate(step) > 0.0 && (!warm || origin.rate == 0.0)
}

/// Multiplies the rates of amendments and phases after `step` by `factor`, as the change does with the rate in force.
/// If the new rate is `held` instead, drops the amendments of its schedule; and where the factor is not finite, since
/// that rate was 0, all later rates.
fn scale_later(curriculum: &mut Curriculum, step: u64, factor: f64, held: bool) {
    let origin = curriculum.numbers_at(step).origin;
    let origins: Vec<_> =
        curriculum.amendments.iter().map(|one| curriculum.numbers_at(one.step).origin).collect();
    for (later, at) in curriculum.amendments.iter_mut().zip(origins) {
        let NumbersChange { optimizer, schedule, .. } = &mut later.numbers;
        match later.step > step {
            false => {}
            true if !factor.is_finite() || (held && at == origin) => {
                optimizer.lr = None;
                *schedule = ScheduleChange::default();
            }
            true => {
                let rates = [&mut optimizer.lr, &mut schedule.final_lr];
                rates.into_iter().flatten().for_each(|rate| *rate *= factor);
            }
        }
    }
    let mut first = 1;
    for phase in &mut curriculum.phases {
        if first > step && factor.is_finite() {
            let schedule = phase.schedule.as_mut();
            let rates = schedule.map(|own| [own.lr.as_mut(), own.spec.final_lr.as_mut()]);
            rates.into_iter().flatten().flatten().for_each(|rate| *rate *= factor);
        } else if first > step {
            phase.schedule = None;
        }
        first += phase.steps;
    }
}
