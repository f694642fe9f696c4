//! What is usual, and when a value is a spike: one definition for everything that looks for odd steps.
//!
//! ```text
//! slope   (median of the later half - median of the earlier half) / the distance between their middles
//! usual   the median of the last 64 values, each extrapolated along the slope to the current step
//! spread  the standard deviation, for normal noise: 1.4826 x the median distance from the usual, or from each value to
//!         the next over the root of two if that is less: on a curve the first counts the trend as noise
//! level   the median of the last 24 values
//! score   (value - usual) / max(spread, least), or by the level if that is nearer; 0 between the two
//! spike   the loss or the logarithm of the gradient norm scores more than 8, or both more than 5, above or below;
//!         or one of them is not finite
//! ```
//!
//! - `ztrain spikes` and the page of a run list these steps, and `--snapshots` writes the state before them.
//! - `ztrain explain` was asked about one step, not about a million, and lowers the bounds (`explain::moved`).
//! - A straggler is a rank whose time is far from the median rank's, in the same spreads over ranks ([`spread`]).
//! - `[skip_step]` and `[auto_clip]` decide what a run computes, and take what other trainers call by these names: mean
//!   and standard deviation, and a percentile, of a window ([`super::guard`]).
//!
//! Once the window is full, trend and noise are computed only every eight steps: they hardly change faster, and a run
//! of 10^6 steps is read in seconds.
//!
//! After a change (a phase, an amendment), earlier values are used until there are eight new ones, and are dropped
//! then. The spread of fewer than 32 values is uncertain: it is increased, and is at least that from before the change.
//!
//! A median is robust against spikes, so one spike does not hide the next. A loss that keeps falling is not odd, nor is
//! one that stops falling.

use std::collections::VecDeque;
use std::f64::consts::SQRT_2;

use serde::Serialize;

/// The maximum number of values to compare with.
pub const LENGTH: usize = 64;

/// Fewer values are not judged by.
const LEAST: usize = 32;

/// Except after a change, or if a single step is explained.
pub const FEW: usize = 8;

/// A normal distribution's standard deviation divided by its median absolute deviation.
const NORMAL: f64 = 1.4826;

/// The number of values for the level.
const LATELY: usize = 24;

/// The trend of a full window is reused for this many steps.
const FRESH: u64 = 8;

/// The previous values, oldest first.
#[derive(Clone, Debug, Default)]
pub struct RecentValues {
    values: VecDeque<f64>,
    /// Whether eight values are enough.
    few: bool,
    /// Number of values since a change, until earlier ones are dropped.
    since: Option<usize>,
    /// The minimum spread, from before a change.
    noise: f64,
    /// Number of values so far.
    came: u64,
    /// The last trend, and the number of values at that time.
    trend: Option<(u64, Trend)>,
    median: Option<(u64, f64)>,
}

/// The trend of some values.
#[derive(Clone, Copy, Debug)]
struct Trend {
    /// The expected next value.
    next: f64,
    slope: f64,
    level: f64,
    spread: f64,
}

/// The position of a value relative to those before it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Deviation {
    /// The expected value.
    pub usual: f64,
    /// The distance from it in spreads, negative if below.
    pub score: f64,
}

/// A loss or gradient norm is a spike from this distance in spreads. A spread estimated from 32 steps may be half of
/// the true one, and noise has heavier tails than a normal distribution.
pub const FAR: f64 = 8.0;

/// Both are from this fraction of [`FAR`] on: by chance that is rare.
const TOGETHER: f64 = 5.0 / 8.0;

/// The maximum distance in steps of two spikes that are one.
pub const GAP: u64 = 3;

/// The minimum spread of a loss, as a fraction: training noise is never smaller.
const LOSS_FLOOR: f64 = 2e-3;

/// The minimum spread of the logarithm of a gradient norm.
const NORM_FLOOR: f64 = 0.05;

/// The logarithm by which gradient norms are compared: they differ by factors. A norm that is no number has none.
pub fn log_norm(norm: f64) -> f64 {
    if norm.is_nan() { norm } else { norm.max(f64::MIN_POSITIVE).ln() }
}

/// The distance above which a value of a step is a spike, by the distances of its loss and its gradient norm: `far`, or
/// less if both are far.
pub fn bound(loss: f64, norm: f64, far: f64) -> f64 {
    if loss.min(norm) > TOGETHER * far { TOGETHER * far } else { far }
}

impl RecentValues {
    /// A window that judges by as few as eight values.
    pub fn of_few() -> RecentValues {
        RecentValues { few: true, ..RecentValues::default() }
    }

    /// Records a change from the next value on.
    pub fn change(&mut self) {
        self.since = Some(0);
    }

    /// Adds a value; ignores values that are not finite.
    pub fn push(&mut self, value: f64) {
        if !value.is_finite() {
            return;
        }
        if let Some(since) = &mut self.since {
            *since += 1;
            if *since == FEW {
                self.forget();
            }
        }
        if self.values.len() == LENGTH {
            self.values.pop_front();
        }
        self.values.push_back(value);
        self.came += 1;
    }

    /// The median of the values, or of those up to eight steps before, if there are enough.
    pub fn median(&mut self) -> Option<f64> {
        let all = || median(self.values.iter().copied()).unwrap_or_default();
        self.median = self.fresh(self.median, all);
        self.median.map(|(_, median)| median)
    }

    /// The position of `value`, the next one, with this minimum spread; `None` if there are too few values.
    pub fn position(&mut self, value: f64, floor: f64) -> Option<Deviation> {
        self.trend = self.fresh(self.trend, || self.found());
        let (at, Trend { next, slope, level, spread }) = self.trend?;
        let expected = next + slope * (self.came - at) as f64;
        let (by_trend, by_level) = (value - expected, value - level);
        let count = self.values.len();
        let spread = match count < LEAST {
            true => (spread * (1.0 + 4.0 / count as f64)).max(self.noise),
            false => spread,
        };
        let spread = spread.max(floor);
        let (usual, by) = match by_trend.abs() <= by_level.abs() {
            true => (expected, by_trend),
            false => (level, by_level),
        };
        let score = if by_trend * by_level > 0.0 { by / spread } else { 0.0 };
        Some(Deviation { usual, score })
    }

    /// The position of a loss among those before it, to which it is then added; `None` if there are too few.
    pub fn place_loss(&mut self, loss: f64) -> Option<Deviation> {
        let found = self.position(loss, LOSS_FLOOR * loss.abs());
        self.push(loss);
        found
    }

    /// The same for a gradient norm: the usual value is a norm, the score is that of the logarithm.
    pub fn place_norm(&mut self, norm: f64) -> Option<Deviation> {
        let log = log_norm(norm);
        let found = self.position(log, NORM_FLOOR);
        self.push(log);
        found.map(|found| Deviation { usual: found.usual.exp(), ..found })
    }

    /// The cached result while it is fresh, else a new one; `None` if there are too few values.
    fn fresh<T>(&self, known: Option<(u64, T)>, find: impl FnOnce() -> T) -> Option<(u64, T)> {
        let full = self.values.len() == LENGTH;
        let enough = self.values.len() >= if self.few { FEW } else { LEAST };
        let still = known.filter(|(at, _)| full && self.came - at < FRESH);
        still.or_else(|| enough.then(|| (self.came, find())))
    }

    /// Drops the values before a change: keeps only the last ones, to which the next is about to be added.
    fn forget(&mut self) {
        let since = self.values.split_off(self.values.len().saturating_sub(FEW - 1));
        if self.values.len() >= FEW {
            self.noise = self.found().spread;
        }
        let (values, came, noise) = (since, self.came, self.noise);
        *self = RecentValues { values, came, noise, ..RecentValues::of_few() };
    }

    fn found(&self) -> Trend {
        let (count, half) = (self.values.len(), self.values.len() / 2);
        let part = |from: usize, to: usize| {
            median(self.values.range(from..to).copied()).unwrap_or_default()
        };
        let slope = (part(count - half, count) - part(0, half)) / (count - half) as f64;
        let moved = self.values.iter().enumerate();
        let moved: Vec<f64> = moved.map(|(at, one)| one + slope * (count - at) as f64).collect();
        let next = median(moved.iter().copied()).unwrap_or_default();
        let around = spread(moved.iter().copied(), next);
        let pairs = self.values.iter().zip(self.values.iter().skip(1));
        let between = spread(pairs.map(|(one, next)| next - one), 0.0) / SQRT_2;
        let spread = around.min(between);
        let level = part(count.saturating_sub(LATELY), count);
        Trend { next, slope, level, spread }
    }
}

/// The value at a percentile from 0 to 100 by the nearest rank: the k-th smallest, `k = ceil(percent n / 100)`, from 1.
/// `None` without values.
pub fn percentile(values: impl IntoIterator<Item = f64>, percent: u64) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    let rank = (percent * values.len() as u64).div_ceil(100).max(1) as usize;
    let found =
        (rank <= values.len()).then(|| values.select_nth_unstable_by(rank - 1, f64::total_cmp));
    found.map(|(_, found, _)| *found)
}

/// The median: the middle value, the lower one of two. `None` without values.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    percentile(values, 50)
}

/// The standard deviation of values around `middle` if they are normal, whatever a few of them are: 1.4826 times their
/// median distance. 0 without values.
pub fn spread(values: impl IntoIterator<Item = f64>, middle: f64) -> f64 {
    NORMAL * median(values.into_iter().map(|value| (value - middle).abs())).unwrap_or_default()
}

/// Mean and standard deviation of at least two values, by sums in their order.
pub fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let sum = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, |sum, value| sum + value);
    let mean = sum(&mut values.iter().copied()) / values.len() as f64;
    let squares = sum(&mut values.iter().map(|value| (value - mean) * (value - mean)));
    (mean, (squares / (values.len() - 1) as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// By definition: fewer than this share of the values are below it, and at least as many not above.
        #[test]
        fn a_percentile_divides_the_values(values in prop::collection::vec(-9i32..9, 1..70), percent in 0u64..=100) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let found = percentile(values.iter().copied(), percent).unwrap();
            let share = |is_in: &dyn Fn(&f64) -> bool| 100 * values.iter().filter(|one| is_in(one)).count() as u64;
            let wanted = percent * values.len() as u64;
            prop_assert!(values.contains(&found));
            prop_assert!(share(&|one| *one < found) <= wanted && share(&|one| *one <= found) >= wanted);
            prop_assert!(percent == 0 || share(&|one| *one < found) < wanted);
        }

        #[test]
        fn the_median_is_that_of_the_last_values(values in prop::collection::vec(-1e3..1e3f64, 32..200)) {
            let mut window = RecentValues::default();
            values.iter().for_each(|value| window.push(*value));
            let mut last: Vec<f64> = values[values.len().saturating_sub(LENGTH)..].to_vec();
            last.sort_by(f64::total_cmp);
            let found = window.median().unwrap();
            let (below, above) = last.iter().fold((0, 0), |(below, above), one| {
                (below + usize::from(*one < found), above + usize::from(*one > found))
            });
            prop_assert!(below <= last.len() / 2 && above <= last.len() / 2);
            // The next value is judged by the same trend, one after eight more by another.
            let before = window.position(1e6, 1e-9).unwrap();
            window.push(1e6);
            prop_assert!((window.position(1e6, 1e-9).unwrap().usual - before.usual).abs() < 1e3);
        }

        #[test]
        fn where_a_value_lies_does_not_depend_on_unit_or_origin(
            values in prop::collection::vec(-1e3..1e3f64, 64), value in -1e4..1e4f64, scale in 0.1..10f64, shift in -1e3..1e3f64,
        ) {
            let (mut plain, mut moved) = (RecentValues::default(), RecentValues::default());
            for one in &values {
                plain.push(*one);
                moved.push(one * scale + shift);
            }
            let plain = plain.position(value, 1e-9).unwrap();
            let moved = moved.position(value * scale + shift, 1e-9).unwrap();
            prop_assert!((plain.score - moved.score).abs() <= 1e-6 * (1.0 + plain.score.abs()));
        }
    }

    /// A norm that is no number leaves the window as it was.
    #[test]
    fn a_value_that_is_not_finite_is_not_compared_with() {
        let mut window = RecentValues::of_few();
        let place = |window: &mut RecentValues, norm| {
            window.place_norm(norm);
        };
        (0..40).for_each(|step| place(&mut window, f64::from(step * 7919 % 13) + 1.0));
        let before = window.clone().place_norm(9.0).unwrap();
        [f64::NAN, f64::INFINITY].repeat(9).into_iter().for_each(|one| place(&mut window, one));
        assert_eq!(window.place_norm(9.0), Some(before));
    }

    /// A shift at a phase is no longer odd after eight of its steps, and an odd value among those is found.
    #[test]
    fn what_came_before_a_change_is_forgotten() {
        let mut window = RecentValues::default();
        let noise = |step: u32| f64::from(step * 7919 % 13) / 13.0;
        for step in 0..100 {
            window.push(9.0 + noise(step));
        }
        assert!(window.position(3.0, 1e-6).unwrap().score < -8.0);
        window.change();
        for step in 0..8 {
            assert!(window.position(3.0, 1e-6).unwrap().usual > 8.0, "step {step}");
            window.push(3.0 + noise(step));
        }
        assert!(window.position(3.5, 1e-6).unwrap().score.abs() < 2.0);
        assert!(window.position(9.0, 1e-6).unwrap().score > 8.0);
        let mut young = RecentValues::default();
        (0..31).for_each(|step| young.push(noise(step)));
        assert!(young.position(9.0, 1e-6).is_none());
    }

    #[test]
    fn a_steady_fall_is_not_odd_and_a_spike_does_not_hide_the_next() {
        let mut window = RecentValues::default();
        for step in 0..200 {
            let value = 10.0 - 0.01 * f64::from(step);
            if let Some(found) = window.position(value, 1e-6) {
                assert!(found.score.abs() < 1e-3, "step {step}: {found:?}");
            }
            window.push(value);
        }
        for _ in 0..10 {
            let found = window.position(14.0, 1e-6).unwrap();
            assert!(found.score > 20.0, "{found:?}");
            window.push(14.0);
        }
        window.push(f64::NAN);
        assert!(window.position(8.0, 1e-6).unwrap().score.is_finite());
    }
}
