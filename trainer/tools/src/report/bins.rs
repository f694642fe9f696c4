//! Columns of a page: values of many steps in few bytes.
//!
//! Values shown on a click are stored for each step (f32). Values seen only in overview are stored in bins of
//! consecutive steps: when there are too many bins, each two are merged, so that a run of any length is read once in
//! bounded memory.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// How the values of two steps are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Merge {
    /// Their sum.
    Sum,
    /// The maximum.
    Most,
}

/// Values of several lanes (layers, sources) in bins of equally many steps.
#[derive(Clone, Debug)]
pub(super) struct Bins {
    fold: Merge,
    /// The maximum number of bins; even.
    most: usize,
    lanes: usize,
    /// Steps per bin.
    width: u64,
    /// Number of steps so far.
    steps: u64,
    /// Bin by bin, lane by lane.
    values: Vec<f64>,
}

impl Bins {
    /// Without steps; with at most `most` bins, at least two.
    pub(super) fn new(fold: Merge, most: usize) -> Bins {
        let most = most.max(2).next_multiple_of(2);
        Bins { fold, most, lanes: 0, width: 1, steps: 0, values: Vec::new() }
    }

    /// Steps per bin.
    pub(super) fn width(&self) -> u64 {
        self.width
    }

    /// The number of lanes.
    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// The number of bins.
    pub(super) fn count(&self) -> usize {
        self.values.len() / self.lanes.max(1)
    }

    /// Bin by bin, lane by lane.
    pub(super) fn values(&self) -> &[f64] {
        &self.values
    }

    /// Adds the values of the next step, which are not negative. Lanes that are new in this step get zeros for earlier
    /// ones.
    pub(super) fn push(&mut self, values: &[f64]) {
        let lanes = values.len().max(1);
        if lanes > self.lanes {
            self.widen(lanes);
        }
        if self.steps.is_multiple_of(self.width) {
            if self.count() == self.most {
                self.halve();
            }
            self.values.resize(self.values.len() + self.lanes, 0.0);
        }
        let begin = self.values.len() - self.lanes;
        for (into, value) in self.values[begin..].iter_mut().zip(values) {
            *into = self.fold.of(*into, *value);
        }
        self.steps += 1;
    }

    /// The same with bins merged until there are at most `most`.
    pub(super) fn at_most(&self, most: usize) -> Bins {
        let mut bins = self.clone();
        while bins.count() > most.max(1) {
            bins.halve();
        }
        bins
    }

    fn widen(&mut self, lanes: usize) {
        let added = lanes - self.lanes;
        let bins = self.values.chunks(self.lanes.max(1));
        let wide = bins.flat_map(|bin| bin.iter().copied().chain(std::iter::repeat_n(0.0, added)));
        self.values = wide.collect();
        self.lanes = lanes;
    }

    fn halve(&mut self) {
        let (fold, lanes) = (self.fold, self.lanes);
        let merged = self.values.chunks(2 * lanes).flat_map(|pair| {
            let (left, right) = pair.split_at(lanes);
            (0..lanes).map(move |lane| {
                right.get(lane).map_or(left[lane], |right| fold.of(left[lane], *right))
            })
        });
        self.values = merged.collect();
        self.width *= 2;
    }
}

impl Merge {
    fn of(self, left: f64, right: f64) -> f64 {
        match self {
            Merge::Sum => left + right,
            Merge::Most => left.max(right),
        }
    }
}

/// Numbers in the page's format: base64 of f32, little-endian.
pub(super) fn f32s(values: impl Iterator<Item = f32>) -> Value {
    json!(STANDARD.encode(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()))
}

/// Fractions from 0 to 1 as base64 of bytes: 255 is 1.
pub(super) fn shares(values: impl Iterator<Item = f64>) -> Value {
    let byte = |value: f64| (value.clamp(0.0, 1.0) * 255.0).round() as u8;
    json!(STANDARD.encode(values.map(byte).collect::<Vec<u8>>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_bin_is_the_fold_of_its_steps(values in prop::collection::vec(0u32..1000, 1..300), most in 2usize..40, sum: bool) {
            let fold = if sum { Merge::Sum } else { Merge::Most };
            let mut bins = Bins::new(fold, most);
            // The second lane appears in the fourth step.
            for (index, value) in values.iter().enumerate() {
                let value = f64::from(*value);
                if index < 3 { bins.push(&[value]) } else { bins.push(&[value, 2.0 * value]) }
            }
            prop_assert!(bins.count() <= most.next_multiple_of(2));
            for bins in [bins.clone(), bins.at_most(3)] {
                let width = bins.width() as usize;
                prop_assert_eq!(bins.count(), values.len().div_ceil(width));
                for (bin, steps) in values.chunks(width).enumerate() {
                    let first = steps.iter().map(|value| f64::from(*value));
                    let late = (bin * width..).zip(steps).filter(|(index, _)| *index >= 3);
                    let second = late.map(|(_, value)| 2.0 * f64::from(*value));
                    let (wanted, other) = match fold {
                        Merge::Sum => (first.sum(), second.sum()),
                        Merge::Most => (first.fold(0.0, f64::max), second.fold(0.0, f64::max)),
                    };
                    prop_assert_eq!(bins.values()[bin * bins.lanes()], wanted);
                    if bins.lanes() == 2 {
                        prop_assert_eq!(bins.values()[bin * 2 + 1], other);
                    }
                }
            }
        }
    }
}
