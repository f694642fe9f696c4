//! Identifies an exchange: its axis, and its number on that axis.

use std::ffi::c_int;

/// Number of axes: axis 0 contains all ranks, and there may be three more.
pub(super) const AXES: usize = 4;

/// An exchange among those of its axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExchangeId {
    pub(super) axis: usize,
    /// From 1.
    pub(super) number: u64,
}

impl ExchangeId {
    /// Tag of its transfers, below the tags of the communication thread. The number wraps after 2^28 exchanges; two
    /// exchanges so far apart are never under way together.
    pub(super) fn tag(self) -> c_int {
        (((self.axis as u64) << 28) | (self.number % (1 << 28))) as c_int
    }
}
