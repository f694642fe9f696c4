//! Which exchange it is: its axis, and its number there.

use std::ffi::c_int;

/// How many axes there may be: that of all ranks, which is number 0, and three more.
pub(super) const AXES: usize = 4;

/// An exchange among those of its axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExchangeId {
    pub(super) axis: usize,
    /// From 1.
    pub(super) number: u64,
}

impl ExchangeId {
    /// What marks its transfers: below the tags of the communication thread. The number comes around after 2^28 exchanges, of
    /// which no two so far apart are under way.
    pub(super) fn tag(self) -> c_int {
        (((self.axis as u64) << 28) | (self.number % (1 << 28))) as c_int
    }
}
