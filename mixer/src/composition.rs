//! How the sequences of a phase are composed: how many are contiguous text, joined, or padded.

use std::ops::AddAssign;

use serde::Serialize;

/// Sequences by composition; each is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Composition {
    /// Full, and one run of contiguous tokens.
    pub contiguous: u64,
    /// Full, of several runs.
    pub joined: u64,
    /// With padding at the end.
    pub padded: u64,
}

impl Composition {
    /// `samples` sequences, of which `joined` are joined and `padded` are padded.
    pub(crate) fn of(samples: u64, joined: u64, padded: u64) -> Self {
        Composition { contiguous: samples - joined - padded, joined, padded }
    }
}

impl AddAssign for Composition {
    fn add_assign(&mut self, other: Composition) {
        self.contiguous += other.contiguous;
        self.joined += other.joined;
        self.padded += other.padded;
    }
}
