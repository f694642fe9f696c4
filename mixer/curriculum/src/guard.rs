//! Skipped steps, and a clip that follows recent gradient norms; both depend only on the step and the steps before it.
//!
//! ```text
//! before     the losses and gradient norms of the last `window` steps, oldest first, skipped steps included;
//!            a step without labels, or whose loss or gradient is not finite, is not among them
//! mean, sd   sums oldest first, in f64; sd = sqrt(sum of squared deviations / (n - 1))
//! skipped    loss - mean(losses) > sigma * sd(losses), or the same of the norm
//! threshold  the k-th smallest of the norms before, k = ceil(percentile * n / 100)
//! ```
//!
//! No step is judged until `window / 2` steps (at least 2) precede it. Every number is in the ledger, so the windows
//! are a function of the ledger alone. No running sum is kept: its rounding would depend on where it began.
//! (`SkipStepOptimizer` of OLMo-core; AutoClip, arXiv 2007.14469, over a window.) Training and the ledger's
//! verification both use this code.

use contract::Packed;
use serde::{Deserialize, Serialize};

use super::{AutoClipSpec, Hyperparameters, NonFinite, SkipStepSpec, stats};

/// The curriculum's rules for skipping and clipping.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpikePolicy {
    /// Which steps are skipped.
    pub skip: Option<SkipStepSpec>,
    /// The percentile clip.
    pub clip: Option<AutoClipSpec>,
}

/// What is measured of a step before the update.
#[derive(Clone, Copy, Debug)]
pub struct StepMeasure {
    /// Its labels.
    pub labels: u64,
    /// The mean loss per label; NaN without labels.
    pub loss: f64,
    /// The gradient norm before clipping.
    pub norm: f64,
}

/// The part of the training state on which these decisions depend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Windows {
    /// Steps so far that were skipped without an amendment: Adam's bias correction must not count them.
    pub skipped: u64,
    /// Mean losses of the last steps, oldest first, as the bits of f64.
    pub losses: Packed,
    /// Gradient norms before clipping, in the same way.
    pub norms: Packed,
}

/// Why a step was skipped, if it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Skipped {
    /// It was not skipped.
    No,
    /// For its loss.
    Loss,
    /// For its gradient norm; its loss was in bounds.
    Norm,
    /// An amendment skips this step.
    Amended,
    /// No token of the step is a label.
    NoLabels,
    /// Its loss or gradient is not finite, and `[skip_step]` skips such steps.
    NonFinite,
}

impl Skipped {
    /// Text to append to the numbers of a skipped step.
    pub fn note(skipped: Option<Skipped>) -> String {
        let skipped = skipped.filter(|skipped| *skipped != Skipped::No);
        skipped.map_or_else(String::new, |skipped| format!(" | {}", skipped.words()))
    }

    /// A description for people.
    pub fn words(self) -> &'static str {
        match self {
            Skipped::No => "not skipped",
            Skipped::Loss => "skipped for its loss",
            Skipped::Norm => "skipped for its gradient norm",
            Skipped::Amended => "skipped by an amendment",
            Skipped::NoLabels => "skipped: it has no labels",
            Skipped::NonFinite => "skipped: its loss or gradient is not finite",
        }
    }
}

/// The decision on a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Whether it is skipped; `None` if no rule judges steps and nothing else skips this one.
    pub skipped: Option<Skipped>,
    /// The clip threshold by the preceding norms; `None` without `[auto_clip]`, infinite until enough steps precede.
    pub longest: Option<f64>,
}

impl SpikePolicy {
    /// The rules in these numbers.
    pub fn of(numbers: &Hyperparameters) -> Self {
        SpikePolicy { skip: numbers.skip_step, clip: numbers.auto_clip }
    }

    /// Empty windows, before the first step; `None` if the curriculum has no rules.
    pub fn windows(&self) -> Option<Windows> {
        (self.skip.is_some() || self.clip.is_some()).then(Windows::default)
    }

    /// Whether a step whose loss or gradient is not finite is skipped, instead of ending the run.
    pub fn skips_non_finite(&self) -> bool {
        self.skip.is_some_and(|skip| skip.non_finite == NonFinite::Skip)
    }

    /// Decides on a step and records its loss and norm. `amended`: an amendment skips the step, whatever they are.
    ///
    /// Creates the windows at the first step that is judged or is skipped without an amendment.
    pub fn decide(
        &self,
        windows: &mut Option<Windows>,
        step: StepMeasure,
        amended: bool,
    ) -> Decision {
        let StepMeasure { labels, loss, norm } = step;
        let measured = labels > 0 && loss.is_finite() && norm.is_finite();
        let (losses, norms) = match windows.as_ref() {
            Some(windows) => (windows.losses.0.as_slice(), windows.norms.0.as_slice()),
            None => (&[][..], &[][..]),
        };
        let skipped = match (amended, labels, measured) {
            (true, ..) => Some(Skipped::Amended),
            (_, 0, _) => Some(Skipped::NoLabels),
            (.., false) => Some(Skipped::NonFinite),
            (.., true) => self.skip.map(|skip| judge(skip, losses, loss, norms, norm)),
        };
        let longest = self.clip.map(|clip| longest(clip, norms));
        let decision = Decision { skipped, longest };
        // Amended skips are not counted: the curriculum lists them.
        let counted = !amended && !decision.moves();
        if windows.is_none() && counted {
            *windows = Some(Windows::default());
        }
        if windows.is_none() {
            *windows = self.windows();
        }
        if let Some(Windows { skipped, losses, norms }) = windows {
            *skipped += u64::from(counted);
            if measured {
                let (skip, clip) =
                    (self.skip.map(|skip| skip.window), self.clip.map(|clip| clip.window));
                push(losses, loss, skip.unwrap_or(0));
                push(norms, norm, skip.max(clip).unwrap_or(0));
            }
        }
        decision
    }
}

impl Decision {
    /// Whether weights, moments and balancing biases are updated.
    pub fn moves(&self) -> bool {
        matches!(self.skipped, None | Some(Skipped::No))
    }

    /// The norm to clip at, if the curriculum's fixed clip is `clip` (0: none). Thresholds of 0 are ignored.
    pub fn clip(&self, clip: f64) -> f64 {
        let bounds = |longest: f64| longest > 0.0 && longest.is_finite();
        match self.longest {
            Some(longest) if bounds(longest) && (clip == 0.0 || longest < clip) => longest,
            _ => clip,
        }
    }
}

fn push(window: &mut Packed, value: f64, length: u64) {
    window.0.push(value.to_bits());
    let excess = window.0.len().saturating_sub(length as usize);
    window.0.drain(..excess);
}

/// The last `window` values, once there are enough to judge by.
fn before(window: u64, kept: &[u64]) -> Option<Vec<f64>> {
    let from = kept.len().saturating_sub(window as usize);
    let found: Vec<f64> = kept[from..].iter().map(|bits| f64::from_bits(*bits)).collect();
    (found.len() as u64 >= (window / 2).max(2)).then_some(found)
}

fn judge(
    SkipStepSpec { window, sigma, non_finite: _ }: SkipStepSpec,
    losses: &[u64],
    loss: f64,
    norms: &[u64],
    norm: f64,
) -> Skipped {
    let far = |kept: &[u64], value: f64| {
        before(window, kept).is_some_and(|before| {
            let (mean, deviation) = stats::mean_and_deviation(&before);
            value - mean > sigma * deviation
        })
    };
    match (far(losses, loss), far(norms, norm)) {
        (true, _) => Skipped::Loss,
        (false, true) => Skipped::Norm,
        (false, false) => Skipped::No,
    }
}

fn longest(AutoClipSpec { window, percentile }: AutoClipSpec, norms: &[u64]) -> f64 {
    let longest = before(window, norms).and_then(|norms| stats::percentile(norms, percentile));
    longest.unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn step_of(loss: f64, norm: f64) -> StepMeasure {
        StepMeasure { labels: 7, loss, norm }
    }

    /// Steps without a finite loss and norm update nothing and are not added to the windows. Otherwise their norm could
    /// become the clip, and a clip of 0 means none.
    #[test]
    fn what_is_not_measured_is_not_remembered() {
        let clip = Some(AutoClipSpec { window: 4, percentile: 50 });
        let guard = SpikePolicy { skip: None, clip };
        let mut windows = guard.windows();
        for norm in [3.0, 4.0, 5.0] {
            assert!(guard.decide(&mut windows, step_of(1.0, norm), false).moves());
        }
        let before = windows.clone().unwrap();
        let silent = StepMeasure { labels: 0, loss: f64::NAN, norm: 0.0 };
        for (step, why) in [
            (silent, Skipped::NoLabels),
            (step_of(f64::NAN, 1.0), Skipped::NonFinite),
            (step_of(1.0, f64::INFINITY), Skipped::NonFinite),
        ] {
            for _ in 0..9 {
                let found = guard.decide(&mut windows, step, false);
                assert_eq!((found.skipped, found.clip(9.0)), (Some(why), 4.0));
            }
        }
        let after = windows.unwrap();
        assert_eq!((&after.losses, &after.norms), (&before.losses, &before.norms));
        assert_eq!(after.skipped, 27);
        // If every earlier gradient was 0, the curriculum's fixed clip applies.
        let mut zeros = guard.windows();
        for _ in 0..4 {
            guard.decide(&mut zeros, step_of(1.0, 0.0), false);
        }
        let found = guard.decide(&mut zeros, step_of(1.0, 7.0), false);
        assert_eq!((found.longest, found.clip(1.0), found.clip(0.0)), (Some(0.0), 1.0, 0.0));
    }

    /// A run without rules has windows from the first step without labels on: the moments need the count of skipped
    /// steps.
    #[test]
    fn steps_that_move_nothing_are_counted_in_any_run() {
        let (guard, mut windows) = (SpikePolicy::default(), None);
        guard.decide(&mut windows, step_of(1.0, 1.0), false);
        guard.decide(&mut windows, step_of(1.0, 1.0), true);
        assert_eq!(windows, None);
        guard.decide(&mut windows, StepMeasure { labels: 0, loss: f64::NAN, norm: 0.0 }, true);
        assert_eq!(windows, None, "the curriculum says that it moved nothing");
        guard.decide(&mut windows, StepMeasure { labels: 0, loss: f64::NAN, norm: 0.0 }, false);
        assert_eq!(windows, Some(Windows { skipped: 1, ..Windows::default() }));
        assert_eq!(guard.decide(&mut windows, step_of(1.0, 1.0), false).skipped, None);
        assert_eq!(windows, Some(Windows { skipped: 1, ..Windows::default() }));
    }

    proptest! {
        /// Compares the windows with the whole history, recomputed for each step by other formulas.
        #[test]
        fn decisions_are_those_of_the_whole_history(
            steps in prop::collection::vec((0.1..9.0f64, 0.1..9.0f64, 0u8..12), 1..80),
            windows in (4u64..24, 4u64..24), sigma in 0.5..4.0f64, percentile in 1u64..=100,
            parts in (any::<bool>(), any::<bool>()),
        ) {
            let skip = parts.0.then_some(SkipStepSpec { window: windows.0, sigma, ..Default::default() });
            let clip = parts.1.then_some(AutoClipSpec { window: windows.1, percentile });
            let guard = SpikePolicy { skip, clip };
            let mut state = guard.windows();
            prop_assert_eq!(state.is_some(), parts.0 || parts.1);
            // An occasional spike.
            let spiked = |(loss, norm, kind): &(f64, f64, u8)| match kind {
                0 => (loss * 50.0, *norm),
                1 => (*loss, norm * 50.0),
                _ => (*loss, *norm),
            };
            let history: Vec<(f64, f64)> = steps.iter().map(spiked).collect();
            let mut skipped = 0;
            for (step, (loss, norm)) in history.iter().enumerate() {
                let found = guard.decide(&mut state, step_of(*loss, *norm), false);
                let last = |window: u64| &history[step.saturating_sub(window as usize)..step];
                let z = |value: f64, of: Vec<f64>| {
                    let (n, sum) = (of.len() as f64, of.iter().sum::<f64>());
                    let square = of.iter().map(|one| one * one).sum::<f64>();
                    (value - sum / n) / ((square - sum * sum / n) / (n - 1.0)).sqrt()
                };
                if parts.0 && last(windows.0).len() as u64 >= (windows.0 / 2).max(2) {
                    let by_loss = z(*loss, last(windows.0).iter().map(|of| of.0).collect());
                    let by_norm = z(*norm, last(windows.0).iter().map(|of| of.1).collect());
                    // Too close to the bound: other roundings may fall on either side.
                    if (by_loss - sigma).abs() > 1e-6 && (by_norm - sigma).abs() > 1e-6 {
                        let wanted = match (by_loss > sigma, by_norm > sigma) {
                            (true, _) => Skipped::Loss,
                            (false, true) => Skipped::Norm,
                            (false, false) => Skipped::No,
                        };
                        prop_assert_eq!(found.skipped, Some(wanted));
                    }
                } else {
                    prop_assert_eq!(found.skipped, parts.0.then_some(Skipped::No));
                }
                let before = last(windows.1);
                match found.longest {
                    Some(longest) if before.len() as u64 >= (windows.1 / 2).max(2) => {
                        let share = |least: bool| {
                            let under = before.iter().filter(|of| if least { of.1 < longest } else { of.1 <= longest });
                            under.count() as u64 * 100
                        };
                        let wanted = percentile * before.len() as u64;
                        prop_assert!(share(true) < wanted && wanted <= share(false));
                        prop_assert_eq!(found.clip(0.0), longest);
                        prop_assert_eq!(found.clip(1e-9), 1e-9);
                    }
                    Some(longest) => prop_assert!(longest == f64::INFINITY && found.clip(3.0) == 3.0),
                    None => prop_assert!(!parts.1 && found.clip(3.0) == 3.0),
                }
                skipped += u64::from(!found.moves());
            }
            prop_assert_eq!(state.map_or(0, |state| state.skipped), skipped);
        }

        /// Only the window decides: earlier history has no effect.
        #[test]
        fn a_window_forgets(
            early in prop::collection::vec(0.1..9.0f64, 0..40),
            late in prop::collection::vec(0.1..9.0f64, 16..40),
        ) {
            let guard = SpikePolicy {
                skip: Some(SkipStepSpec { window: 16, sigma: 1.0, ..Default::default() }),
                clip: Some(AutoClipSpec { window: 9, percentile: 50 }),
            };
            let (mut long, mut short) = (guard.windows(), guard.windows());
            early.iter().for_each(|value| { guard.decide(&mut long, step_of(*value, *value), false); });
            for value in &late {
                guard.decide(&mut long, step_of(*value, *value), false);
                guard.decide(&mut short, step_of(*value, *value), false);
            }
            let (long, short) = (long.unwrap(), short.unwrap());
            prop_assert_eq!(long.losses.0.len(), 16);
            prop_assert_eq!((long.losses, long.norms), (short.losses, short.norms));
        }
    }
}
