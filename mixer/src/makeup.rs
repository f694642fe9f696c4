//! What the sequences of a phase are made of: how many are one run of text, joined from several, or padded.

use std::ops::AddAssign;

use serde::Serialize;

/// Sequences, by what they are made of; each is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
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

impl AddAssign for Makeup {
    fn add_assign(&mut self, other: Makeup) {
        self.contiguous += other.contiguous;
        self.joined += other.joined;
        self.padded += other.padded;
    }
}
