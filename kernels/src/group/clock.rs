//! The clock of whoever waits for ranks.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::time::Duration;

use super::ffi::shim_lived;

/// Between two looks for ranks that have not come yet.
pub(super) const LOOK: Duration = Duration::from_millis(5);

/// How long this process has lived since it was first asked: the clock of every deadline between ranks.
pub(super) fn lived() -> Duration {
    let mut lived = 0;
    // SAFETY: the out-pointer outlives the call. Where the clock cannot start there are no threads left at all.
    let _ = unsafe { shim_lived(&raw mut lived) };
    Duration::from_millis(lived as u64)
}
