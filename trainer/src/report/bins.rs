//! Columns of a page: numbers of many steps in few bytes.
//!
//! What a click shows is kept of each step (f32). What is only looked at from afar is kept of bins of consecutive steps: when
//! there are too many, every two become one, so that a run of any length is read once and held in bounded memory.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// How the values of two steps become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    /// Their sum.
    Sum,
    /// The larger.
    Most,
}

/// Values of several lanes (layers, sources) by bins of as many steps.
#[derive(Clone, Debug)]
pub(super) struct Bins {
    fold: Fold,
    /// Bins, at most; even.
    most: usize,
    lanes: usize,
    /// Steps in a bin.
    width: u64,
    /// Steps so far.
    steps: u64,
    /// Bin by bin, lane by lane.
    values: Vec<f64>,
}

impl Bins {
    /// Of no step yet; at least two bins.
    pub(super) fn new(fold: Fold, most: usize) -> Bins {
        let most = most.max(2).next_multiple_of(2);
        Bins { fold, most, lanes: 0, width: 1, steps: 0, values: Vec::new() }
    }

    /// Steps in a bin.
    pub(super) fn width(&self) -> u64 {
        self.width
    }

    /// Lanes.
    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// Bins.
    pub(super) fn count(&self) -> usize {
        self.values.len() / self.lanes.max(1)
    }

    /// Bin by bin, lane by lane.
    pub(super) fn values(&self) -> &[f64] {
        &self.values
    }

    /// The values of the next step, none of them below zero. A lane that a later step brings had zeros before.
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

    /// The same in bins that are so much wider that there are no more than `most`.
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

impl Fold {
    fn of(self, left: f64, right: f64) -> f64 {
        match self {
            Fold::Sum => left + right,
            Fold::Most => left.max(right),
        }
    }
}

/// Numbers as a page reads them: base64 of f32, little-endian.
pub(super) fn f32s(values: impl Iterator<Item = f32>) -> Value {
    json!(STANDARD.encode(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()))
}

/// Shares from 0 to 1 as base64 of bytes: 255 is 1.
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
            let fold = if sum { Fold::Sum } else { Fold::Most };
            let mut bins = Bins::new(fold, most);
            // The second lane comes with the fourth step.
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
                        Fold::Sum => (first.sum(), second.sum()),
                        Fold::Most => (first.fold(0.0, f64::max), second.fold(0.0, f64::max)),
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
