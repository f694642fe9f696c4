//! The learning rate of a step. With `s` the steps since the schedule's origin, from 1:
//!
//! ```text
//! s < warmup          rate + (lr - rate) * s / warmup, where `rate` is that of the origin, 0 at the run's beginning
//! cosine, linear      final + (lr - final) * f((s - warmup) / decay), then final
//! wsd                 lr over stable steps, then final + (lr - final) * f((s - warmup - stable) / decay), then final
//! inverse-sqrt        max(lr * sqrt(warmup / s), final)
//! constant            lr
//! f(t)                cosine (1 + cos(pi t)) / 2, linear 1 - t, sqrt 1 - sqrt(t)
//! ```
//!
//! Never derived from the length of a phase to come: a longer phase leaves every earlier step unchanged. Only
//! additions, multiplications, divisions and square roots are used, whose results IEEE 754 fixes. A `cos` or `powi` of
//! the system's math library would make a run's bits depend on its version.

use super::schedule::{DecayShape, ScheduleKind, ScheduleSpec};

/// A schedule of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The rate after warm-up.
    pub peak: f64,
    /// How it changes.
    pub spec: ScheduleSpec,
    /// Where it begins.
    pub origin: ScheduleOrigin,
}

/// Where a schedule begins: with the run, or with a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScheduleOrigin {
    /// Steps of the run before it.
    pub after: u64,
    /// The rate of the last of them, from which warm-up begins.
    pub rate: f64,
}

/// A part of a schedule with one formula; equal parts have equal rates at each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SchedulePart {
    /// A line from `origin` to `peak` over `steps`.
    WarmUp { origin: ScheduleOrigin, peak: f64, steps: u64 },
    /// One rate.
    Constant { rate: f64 },
    /// From `peak` after step `begin` to `last` over `steps`.
    Decay { begin: u64, steps: u64, shape: DecayShape, peak: f64, last: f64 },
    /// `peak` times the root of `steps` over the steps since `after`, at least `last`.
    InverseSqrt { after: u64, steps: u64, peak: f64, last: f64 },
}

impl Schedule {
    /// The learning rate of `step` (from 1).
    pub fn rate(&self, step: u64) -> f64 {
        self.part(step).0.rate(step)
    }

    /// Whether `step` is in the warm-up.
    pub fn is_warming_up(&self, step: u64) -> bool {
        step < self.origin.after.saturating_add(self.spec.warmup_steps)
    }

    /// The part that `step` is in, and the first step after it.
    pub(super) fn part(&self, step: u64) -> (SchedulePart, u64) {
        let Schedule { peak, spec, origin } = *self;
        let ScheduleSpec { kind, warmup_steps, decay_steps, final_lr, .. } = spec;
        let warm = origin.after.saturating_add(warmup_steps);
        if self.is_warming_up(step) {
            return (SchedulePart::WarmUp { origin, peak, steps: warmup_steps }, warm);
        }
        if kind == ScheduleKind::InverseSqrt {
            let (after, last) = (origin.after, final_lr.unwrap_or(0.0));
            return (
                SchedulePart::InverseSqrt { after, steps: warmup_steps, peak, last },
                u64::MAX,
            );
        }
        let (stable, shape) = match kind {
            ScheduleKind::Wsd => (spec.stable_steps, spec.decay_shape),
            ScheduleKind::Linear => (0, DecayShape::Linear),
            _ => (0, DecayShape::Cosine),
        };
        let begin = warm.saturating_add(stable);
        let end = begin.saturating_add(decay_steps);
        let last = final_lr.unwrap_or(peak);
        match spec.decays() {
            true if step >= end => (SchedulePart::Constant { rate: last }, u64::MAX),
            true if step >= begin => {
                (SchedulePart::Decay { begin, steps: decay_steps, shape, peak, last }, end)
            }
            true => (SchedulePart::Constant { rate: peak }, begin),
            false => (SchedulePart::Constant { rate: peak }, u64::MAX),
        }
    }
}

impl SchedulePart {
    /// The rate of a step of this part.
    fn rate(self, step: u64) -> f64 {
        match self {
            SchedulePart::WarmUp { origin: ScheduleOrigin { after, rate }, peak, steps } => {
                rate + (peak - rate) * (step.saturating_sub(after) as f64 / steps as f64)
            }
            SchedulePart::Constant { rate } => rate,
            SchedulePart::Decay { begin, steps, shape, peak, last } => {
                let t = (step - begin) as f64 / steps as f64;
                let left = match shape {
                    DecayShape::Linear => 1.0 - t,
                    DecayShape::Cosine => 0.5 * (1.0 + cos_pi(t)),
                    DecayShape::Sqrt => 1.0 - t.sqrt(),
                };
                last + (peak - last) * left
            }
            SchedulePart::InverseSqrt { after, steps, peak, last } => {
                (peak * (steps as f64 / (step - after) as f64).sqrt()).max(last)
            }
        }
    }
}

/// cos(pi * t) for t in 0..=1, to within 2 units in the last place of 1.
fn cos_pi(t: f64) -> f64 {
    match t {
        _ if t > 0.5 => -cos_pi(1.0 - t),
        _ if t > 0.25 => sine(std::f64::consts::PI * (0.5 - t)),
        _ => cosine(std::f64::consts::PI * t),
    }
}

/// The Taylor series of cos on 0..=pi/4, where its 10th term is below 1e-20.
fn cosine(x: f64) -> f64 {
    series(x, 1.0, 0)
}

/// The Taylor series of sin on 0..=pi/4.
fn sine(x: f64) -> f64 {
    series(x, x, 1)
}

/// `first - first x^2 / ((n+1)(n+2)) + ...`, summed from the smallest term.
fn series(x: f64, first: f64, power: u32) -> f64 {
    let mut sum = 1.0;
    for term in (1..10).rev() {
        let n = f64::from(power + 2 * term);
        sum = 1.0 - sum * (x * x) / (n * (n - 1.0));
    }
    first * sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = ScheduleKind> {
        prop::sample::select(vec![
            ScheduleKind::Cosine,
            ScheduleKind::Linear,
            ScheduleKind::Wsd,
            ScheduleKind::InverseSqrt,
            ScheduleKind::Constant,
        ])
    }

    prop_compose! {
        fn schedules()(
            kind in kinds(), warmup_steps in 1u64..50, stable_steps in 0u64..40, decay_steps in 0u64..200,
            decay_shape in prop::sample::select(vec![DecayShape::Linear, DecayShape::Cosine, DecayShape::Sqrt]),
            last in 0.0..=1.0f64, after in 0u64..30, rate in 0.0..=1.0f64,
        ) -> Schedule {
            let final_lr = Some(last);
            let spec = ScheduleSpec { kind, warmup_steps, stable_steps, decay_steps, decay_shape, final_lr };
            Schedule { peak: 1.0, spec, origin: ScheduleOrigin { after, rate } }
        }
    }

    /// The formulas of the head of this file, by the system's cosine.
    fn formula(schedule: &Schedule, step: u64) -> f64 {
        let Schedule { peak, spec, origin } = *schedule;
        let (s, w) = ((step - origin.after) as f64, spec.warmup_steps as f64);
        let (stable, decay) = (spec.stable_steps as f64, spec.decay_steps as f64);
        let last = spec.final_lr.unwrap();
        let cosine = |t: f64| (1.0 + (std::f64::consts::PI * t).cos()) / 2.0;
        let down = |since: f64, f: &dyn Fn(f64) -> f64| match decay {
            0.0 => peak,
            _ => last + (peak - last) * f((since.max(0.0) / decay).min(1.0)),
        };
        match spec.kind {
            _ if s < w => origin.rate + (peak - origin.rate) * s / w,
            ScheduleKind::Cosine => down(s - w, &cosine),
            ScheduleKind::Linear => down(s - w, &|t| 1.0 - t),
            ScheduleKind::Wsd => down(s - w - stable, &|t| match spec.decay_shape {
                DecayShape::Linear => 1.0 - t,
                DecayShape::Cosine => cosine(t),
                DecayShape::Sqrt => 1.0 - t.sqrt(),
            }),
            ScheduleKind::InverseSqrt => (peak * (w / s).sqrt()).max(last),
            ScheduleKind::Constant => peak,
        }
    }

    proptest! {
        #[test]
        fn the_cosine_is_the_cosine(t in 0.0..=1.0f64) {
            prop_assert!((cos_pi(t) - (std::f64::consts::PI * t).cos()).abs() < 5e-16);
        }

        #[test]
        fn rates_are_those_of_the_formulas(schedule in schedules(), step in 1u64..400) {
            let step = schedule.origin.after + step;
            let (now, next) = (schedule.rate(step), schedule.rate(step + 1));
            prop_assert!((now - formula(&schedule, step)).abs() < 1e-15, "{now} at {step}");
            prop_assert!((0.0..=1.0).contains(&now));
            let warm = step >= schedule.origin.after + schedule.spec.warmup_steps;
            prop_assert!(!warm || next <= now, "decay falls");
        }

        /// A difference of two curricula walks over parts instead of steps.
        #[test]
        fn parts_have_one_formula_up_to_their_end(schedule in schedules(), step in 1u64..400) {
            let (part, end) = schedule.part(step);
            prop_assert!(step < end);
            for later in step..end.min(step + 300) {
                prop_assert_eq!(schedule.part(later), (part, end));
            }
            prop_assert!(end == u64::MAX || schedule.part(end).0 != part);
        }
    }

    #[test]
    fn the_corners() {
        let spec = ScheduleSpec {
            warmup_steps: 4,
            decay_steps: 8,
            final_lr: Some(2e-4),
            ..ScheduleSpec::default()
        };
        let schedule = Schedule { peak: 6e-4, spec, origin: ScheduleOrigin::default() };
        assert_eq!(schedule.rate(1), 1.5e-4);
        assert_eq!(schedule.rate(4), 6e-4);
        assert!((schedule.rate(8) - 4e-4).abs() < 1e-18, "half way down");
        assert_eq!(schedule.rate(12), 2e-4);
        assert_eq!(schedule.rate(1_000_000), 2e-4);
    }
}
