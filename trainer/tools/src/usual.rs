//! The usual value of a quantity: the trend and the noise of the steps just before.
//!
//! ```text
//! slope   (median of the later half - median of the earlier half) / the distance between their middles
//! usual   the median of the last 64 values, each extrapolated along the slope to the current step
//! spread  the standard deviation, for normal noise: 1.4826 x the median distance from the usual, or from each value to
//!         the next over the root of two if that is less: on a curve the first counts the trend as noise
//! level   the median of the last 24 values
//! score   (value - usual) / max(spread, least), or by the level if that is nearer; 0 between the two
//! ```
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
pub(crate) const LENGTH: usize = 64;

/// Fewer values are not judged by.
const LEAST: usize = 32;

/// Except after a change, or if a single step is explained.
pub(crate) const FEW: usize = 8;

/// A normal distribution's standard deviation divided by its median absolute deviation.
const NORMAL: f64 = 1.4826;

/// The number of values for the level.
const LATELY: usize = 24;

/// The trend of a full window is reused for this many steps.
const FRESH: u64 = 8;

/// The previous values, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentValues {
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

impl RecentValues {
    /// A window that judges by as few as eight values.
    pub(crate) fn of_few() -> RecentValues {
        RecentValues { few: true, ..RecentValues::default() }
    }

    /// Records a change from the next value on.
    pub(crate) fn change(&mut self) {
        self.since = Some(0);
    }

    /// Adds a value; ignores values that are not finite.
    pub(crate) fn push(&mut self, value: f64) {
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
    pub(crate) fn median(&mut self) -> Option<f64> {
        let found = self.fresh(self.median, || median(self.values.iter().copied()));
        self.median = found;
        found.map(|(_, median)| median)
    }

    /// The position of `value`, the next one, with this minimum spread; `None` if there are too few values.
    pub(crate) fn position(&mut self, value: f64, floor: f64) -> Option<Deviation> {
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
        let part = |from: usize, to: usize| median(self.values.range(from..to).copied());
        let slope = (part(count - half, count) - part(0, half)) / (count - half) as f64;
        let moved = self.values.iter().enumerate();
        let moved: Vec<f64> = moved.map(|(at, one)| one + slope * (count - at) as f64).collect();
        let next = median(moved.iter().copied());
        let around = NORMAL * median(moved.iter().map(|one| (one - next).abs()));
        let pairs = self.values.iter().zip(self.values.iter().skip(1));
        let between = NORMAL / SQRT_2 * median(pairs.map(|(one, next)| (next - one).abs()));
        let spread = around.min(between);
        let level = part(count.saturating_sub(LATELY), count);
        Trend { next, slope, level, spread }
    }
}

/// The median of at least one value.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    let half = values.len() / 2;
    let even = values.len().is_multiple_of(2);
    let (below, middle, _) = values.select_nth_unstable_by(half, f64::total_cmp);
    let highest_below = below.iter().copied().max_by(f64::total_cmp);
    match highest_below.filter(|_| even) {
        Some(before) => (before + *middle) / 2.0,
        None => *middle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// By definition: the middle of the sorted values, or the mean of the middle two.
        #[test]
        fn a_median_is_that_of_the_sorted_values(values in prop::collection::vec(-9i32..9, 1..70)) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            let (count, half) = (sorted.len(), sorted.len() / 2);
            let wanted = if count % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 };
            prop_assert_eq!(median(values.into_iter()), wanted);
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
