//! What the sequences of a phase are made of: how many are one run of text, joined from several, or padded.

use std::ops::{Add, AddAssign};

use crate::order::SourceOrder;
use crate::plan::{Plan, SourceUse};
use crate::segment::SourceSegment;

/// Sequences, by what they are made of; each is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Makeup {
    /// Full, and one run of neighbouring tokens.
    pub contiguous: u64,
    /// Full, but made of several runs.
    pub joined: u64,
    /// With padding at the end.
    pub padded: u64,
}

impl Makeup {
    /// `samples` sequences, of which so many are joined and padded.
    pub(crate) fn of(samples: u64, joined: u64, padded: u64) -> Self {
        Makeup { contiguous: samples - joined - padded, joined, padded }
    }
}

impl Add for Makeup {
    type Output = Makeup;

    fn add(self, other: Makeup) -> Makeup {
        Makeup {
            contiguous: self.contiguous + other.contiguous,
            joined: self.joined + other.joined,
            padded: self.padded + other.padded,
        }
    }
}

impl AddAssign for Makeup {
    fn add_assign(&mut self, other: Makeup) {
        *self = *self + other;
    }
}

impl Plan {
    /// What a source's sequences in a phase are made of; `phase` and `entry` index [`Plan::phases`] and its `uses`.
    pub fn makeup(&self, phase: usize, entry: usize) -> Makeup {
        let SourceUse { segment, samples, .. } = &self.phases[phase].uses[entry];
        segment.makeup(*samples)
    }
}

impl SourceSegment {
    /// What the first `samples` samples are made of.
    pub(crate) fn makeup(&self, order: &SourceOrder, samples: u64) -> Makeup {
        let epoch = order.epoch(self.start.epoch);
        let mut all = Makeup::default();
        for part in self.parts() {
            let group = epoch.group(part.left.group, part.left.cut);
            all += part.makeup(&group, samples);
        }
        let (first, later) = self.windows_taken(samples);
        let short = |number: u64, windows: std::ops::Range<u64>| {
            let short = order.epoch(number).short_window(self.seq_len);
            u64::from(short.is_some_and(|short| windows.contains(&short)))
        };
        all += Makeup::of(first, 0, short(self.start.epoch, self.window_range(first)));
        let (whole, rest) = (later / self.windows, later % self.windows);
        let number = self.start.epoch + 1;
        let padded = whole * short(number, 0..self.windows) + short(number + whole, 0..rest);
        all + Makeup::of(later, 0, padded)
    }
}
