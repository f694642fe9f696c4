//! The rule of a mix that reacts to the loss: from the losses of windows to the weights of a later one.
//!
//! Everything is whole numbers, so that every machine finds the same weights. A ledger's sum of losses is a float; it
//! enters as a multiple of 2^-20 nats, by one multiplication by 2^20, which is exact, and one rounding to the nearest
//! whole number, which IEEE 754 defines. Sums over steps, means by label and weights are integers from then on.
//!
//! - `excess-loss`: the mass of a source is its weight times `exp(rate x excess)`, where the excess is its mean loss
//!   less that of the reference, at least 0. This is the update of DoReMi (Xie et al. 2023) with the excess clipped by
//!   source and not by token.
//! - `learnability`: weights move by the part `rate` of the way to `start x progress`, where the progress is the fall
//!   of the mean loss from one window to the next, at least 0; they stay where no loss falls. This is the rule of ADO
//!   (Jiang et al. 2024) with a difference in place of a fitted scaling law.
//! - `fixed`: the masses are those of `start`.
//!
//! The exponential is a product of `2^(-1/2), 2^(-1/4), ...`, each an integer square root of the one before in units of
//! 2^-62, so no table and no library decides a bit. [`curriculum::apportion`] turns masses into parts of 65,536 within
//! their bounds.

use std::collections::BTreeMap;

use contract::Ratio;
use curriculum::{Reaction, ReactionRule};

/// One nat, as losses are counted.
const NAT: u64 = 1 << 20;

/// The largest mean loss that counts, in nats.
const LOSS_MAX: u64 = 1 << 16;

/// One, in the units of exponentials.
const ONE: u128 = 1 << 62;

/// The binary logarithm of e, in units of 2^-40.
const LOG2_E: u128 = 1_586_259_972_792;

/// Binary digits of an exponent after the point: those of a rate, a loss and [`LOG2_E`].
const EXPONENT_BITS: u32 = 16 + 20 + 40;

/// Binary digits of an exponent that count.
const ROOTS: u32 = 40;

/// Steps of a run whose mix reacts: where its windows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReactingSteps {
    /// The first step.
    pub(crate) first: u64,
    /// The number after the last.
    pub(crate) end: u64,
    /// Steps of a window.
    pub(crate) window: u64,
}

/// Labels and losses of a source over some steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceLossSum {
    /// Labels.
    pub labels: u64,
    /// Sum of losses, in units of 2^-20 nats.
    pub loss: i128,
}

/// The losses of a run by source, summed over the windows of mixes that react. Steps are added in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowLosses {
    spans: Vec<ReactingSteps>,
    through: u64,
    /// By the first step of a window.
    windows: BTreeMap<u64, BTreeMap<String, SourceLossSum>>,
}

impl SourceLossSum {
    /// Adds the sum of losses of a step. A sum that is not finite counts as a step without labels.
    pub fn add(&mut self, labels: u64, loss: f64) {
        if loss.is_finite() {
            self.labels = self.labels.saturating_add(labels);
            let loss = (loss * NAT as f64).round_ties_even() as i128;
            self.loss = self.loss.saturating_add(loss);
        }
    }

    /// The mean loss of a label, to the nearest 2^-20 nats, halves up.
    fn mean(&self) -> Option<u64> {
        let labels = i128::from(self.labels);
        let twice = self.loss.max(0).saturating_mul(2).saturating_add(labels);
        let mean = twice.checked_div(2 * labels)?;
        Some(u64::try_from(mean).map_or(LOSS_MAX * NAT, |mean| mean.min(LOSS_MAX * NAT)))
    }
}

impl WindowLosses {
    pub(crate) fn new(spans: &[ReactingSteps]) -> Self {
        WindowLosses { spans: spans.to_vec(), ..WindowLosses::default() }
    }

    /// The last step whose losses it has.
    pub fn through(&self) -> u64 {
        self.through
    }

    /// Adds the step after [`WindowLosses::through`]: labels and summed loss by source. Returns whether a window ends
    /// with it.
    pub fn add<'a>(&mut self, sources: impl IntoIterator<Item = (&'a str, u64, f64)>) -> bool {
        self.through += 1;
        let step = self.through;
        let Some(span) = self.spans.iter().find(|span| (span.first..span.end).contains(&step))
        else {
            return false;
        };
        let into = (step - span.first) % span.window;
        let window = self.windows.entry(step - into).or_default();
        for (name, labels, loss) in sources {
            match window.get_mut(name) {
                Some(sum) => sum.add(labels, loss),
                None => window.entry(name.to_owned()).or_default().add(labels, loss),
            }
        }
        into + 1 == span.window
    }

    /// Whether any of its steps is in a mix that reacts.
    pub fn matters(&self, step: u64) -> bool {
        self.spans.iter().any(|span| (span.first..span.end).contains(&step))
    }

    /// The windows so far, by their first steps.
    pub fn windows(&self) -> &BTreeMap<u64, BTreeMap<String, SourceLossSum>> {
        &self.windows
    }

    /// The same of another process, which has added these steps.
    pub fn restored(
        &self,
        through: u64,
        windows: BTreeMap<u64, BTreeMap<String, SourceLossSum>>,
    ) -> Self {
        WindowLosses { spans: self.spans.clone(), through, windows }
    }

    /// The losses of the window of `steps` steps that begins at `first`, once they are all known.
    fn window(&self, first: u64, steps: u64) -> Option<&BTreeMap<String, SourceLossSum>> {
        (self.through >= first + steps - 1).then(|| self.windows.get(&first)).flatten()
    }
}

/// The weights of a window of a mix that reacts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixWindow {
    /// Its first step.
    pub first_step: u64,
    /// Its last step.
    pub last_step: u64,
    /// The key of its mix.
    pub mix_key: String,
    /// The weights in force, in parts of [`MIX_PARTS`](curriculum::MIX_PARTS), by the names of the mix's sources.
    pub weights: Vec<(String, u64)>,
}

impl MixWindow {
    /// The weights by source.
    pub fn by_source(&self) -> BTreeMap<String, u64> {
        self.weights.iter().cloned().collect()
    }
}

/// The weights of a mix that reacts, window after window.
#[derive(Clone, Debug)]
pub(crate) struct WindowWeights {
    pub(crate) reaction: Reaction,
    /// Its first step.
    pub(crate) first: u64,
    /// The weights in force in the last window, in parts.
    pub(crate) parts: Vec<u64>,
    /// Samples since they changed.
    pub(crate) unchanged: u64,
    /// The last mean loss of each source.
    means: Vec<Option<u64>>,
}

impl WindowWeights {
    pub(crate) fn new(reaction: &Reaction, first: u64) -> Self {
        let parts = reaction.start_parts();
        let means = vec![None; parts.len()];
        WindowWeights { reaction: reaction.clone(), first, parts, unchanged: 0, means }
    }

    /// The masses of the sources in window `number`, the one after the last; `None` as long as the losses of the second
    /// window before it are not known.
    pub(crate) fn masses(&mut self, number: u64, losses: &WindowLosses) -> Option<Vec<u128>> {
        let steps = self.reaction.window;
        let start: Vec<u128> = self.reaction.start_parts().into_iter().map(u128::from).collect();
        let Some(before) = number.checked_sub(2) else { return Some(start) };
        if self.reaction.rule == ReactionRule::Fixed {
            return Some(start);
        }
        let window = losses.window(self.first + before * steps, steps)?;
        let members = self.reaction.members();
        let means: Vec<Option<u64>> = members
            .map(|members| {
                let sums = members.iter().filter_map(|(name, _)| window.get(*name));
                let sum = sums.fold(SourceLossSum::default(), |sum, one| SourceLossSum {
                    labels: sum.labels.saturating_add(one.labels),
                    loss: sum.loss.saturating_add(one.loss),
                });
                sum.mean()
            })
            .collect();
        let masses = match self.reaction.rule {
            ReactionRule::ExcessLoss => self.by_excess(&means),
            ReactionRule::Learnability => self.by_progress(&start, &means),
            ReactionRule::Fixed => start,
        };
        for (last, mean) in self.means.iter_mut().zip(means) {
            *last = mean.or(*last);
        }
        Some(masses)
    }

    /// A source that had no label in the window has its last mean.
    fn by_excess(&self, means: &[Option<u64>]) -> Vec<u128> {
        let rate = u128::from(fixed(self.reaction.rate, 1 << 16).max(1));
        let all = means.iter().zip(&self.means).zip(self.reaction.reference.values());
        let exponents: Vec<u128> = all
            .map(|((mean, last), reference)| {
                let mean = mean.or(*last).unwrap_or_default();
                rate * u128::from(mean.saturating_sub(fixed(*reference, NAT)))
            })
            .collect();
        let top = exponents.iter().max().copied().unwrap_or_default();
        let masses = exponents.iter().zip(&self.parts);
        masses
            .map(|(exponent, part)| {
                let (whole, factor) = exp2((top - exponent) * LOG2_E);
                ((u128::from(*part) * factor) >> whole.min(127)).max(1)
            })
            .collect()
    }

    /// A source that had no label in one of two windows has made no progress.
    fn by_progress(&self, start: &[u128], means: &[Option<u64>]) -> Vec<u128> {
        let all = means.iter().zip(&self.means).zip(start);
        let progress: Vec<u128> = all
            .map(|((mean, last), start)| {
                let fall = last.zip(*mean).map_or(0, |(last, mean)| last.saturating_sub(mean));
                u128::from(fall) * start
            })
            .collect();
        let sum: u128 = progress.iter().sum();
        let rate = u128::from(fixed(self.reaction.rate, 1 << 16).max(1));
        let old: u128 = self.parts.iter().map(|part| u128::from(*part)).sum();
        let moved = |(part, progress): (&u64, &u128)| match sum {
            0 => u128::from(*part),
            _ => ((1 << 16) - rate) * u128::from(*part) * sum + rate * old * progress,
        };
        self.parts.iter().zip(&progress).map(moved).collect()
    }
}

/// A ratio in units of `1 / one`, to the nearest, halves up.
fn fixed(ratio: Ratio, one: u64) -> u64 {
    let twice = 2 * u128::from(ratio.num()) * u128::from(one) + u128::from(ratio.den());
    u64::try_from(twice / (2 * u128::from(ratio.den()))).unwrap_or(u64::MAX)
}

/// Two to the power of `-exponent`, in units of 2^-[`EXPONENT_BITS`]: how often one is halved, and the rest in units of
/// 1 / [`ONE`].
fn exp2(exponent: u128) -> (u32, u128) {
    let whole = u32::try_from(exponent >> EXPONENT_BITS).unwrap_or(u32::MAX);
    let (mut factor, mut root) = (ONE, ONE / 2);
    for digit in 1..=ROOTS {
        // The square root of the one before.
        root = (root * ONE).isqrt();
        if exponent >> (EXPONENT_BITS - digit) & 1 == 1 {
            factor = factor * root / ONE;
        }
    }
    (whole, factor)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_logarithm_is_that_of_the_library() {
        assert_eq!(LOG2_E as f64, (std::f64::consts::LOG2_E * 2f64.powi(40)).floor());
    }

    proptest! {
        #[test]
        fn powers_of_two_are_those_of_the_library(exponent in 0.0..60.0f64) {
            let (whole, factor) = exp2((exponent * 2f64.powi(60)) as u128 * (1 << 16));
            let found = factor as f64 / ONE as f64 / 2f64.powi(whole as i32);
            prop_assert!((found / (-exponent).exp2() - 1.0).abs() < 1e-11, "{} {}", found, exponent);
        }

        #[test]
        fn means_are_those_of_floats(steps in prop::collection::vec((1u64..5000, 0.0..12.0f64), 1..50)) {
            let mut sum = SourceLossSum::default();
            let (mut labels, mut loss) = (0, 0.0);
            for (count, mean) in steps {
                sum.add(count, count as f64 * mean);
                (labels, loss) = (labels + count, loss + count as f64 * mean);
            }
            let mean = sum.mean().unwrap() as f64 / NAT as f64;
            prop_assert!((mean - loss / labels as f64).abs() < 2.0 / NAT as f64);
            let before = sum;
            [f64::NAN, f64::INFINITY].into_iter().for_each(|loss| sum.add(7, loss));
            prop_assert_eq!(sum, before);
        }
    }
}
