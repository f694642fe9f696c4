//! The clock of deadlines for other ranks.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::ffi::shim_lived;
use crate::{Error, Result};

/// Pause between polls for ranks that have not arrived yet.
pub(super) const LOOK: Duration = Duration::from_millis(5);

/// How long this process has run since the first call, without time in which it was stopped: the clock of every
/// deadline between ranks.
pub(super) fn lived() -> Duration {
    let mut lived = 0;
    // SAFETY: the out-pointer outlives the call. Where the clock cannot start there are no threads left at all.
    let _ = unsafe { shim_lived(&raw mut lived) };
    Duration::from_millis(lived as u64)
}

/// The last second since 1970 at which ranks may meet. libtorch computes the end of a wait as a date in nanoseconds of
/// 63 bits; after 2262 it overflows, and two ranks would wait for each other forever in a busy loop. The margin of 5
/// years allows for waits of up to a year and for the length of a run.
const LAST: u64 = (i64::MAX as u64) / 1_000_000_000 - 5 * 366 * 24 * 3600;

/// Refuses to meet other ranks if the wall clock is so far off that waits would not end.
pub(super) fn refuse_date() -> Result<()> {
    #[expect(
        clippy::disallowed_methods,
        reason = "libtorch waits by the date, so it has to be one that it can count"
    )]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    refuse_after(now.as_secs())
}

fn refuse_after(seconds: u64) -> Result<()> {
    if seconds <= LAST {
        return Ok(());
    }
    let year = 1970 + seconds / (365 * 24 * 3600 + 6 * 3600);
    let reason = format!(
        "this machine's clock shows the year {year}, and libtorch counts to 2262: set the clock"
    );
    Err(Error::Foreign { call: "wait for other ranks", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_that_libtorch_cannot_count_to_is_refused() {
        refuse_date().unwrap();
        // The years 2256, 2262 and 2300.
        for (seconds, year) in
            [(9_030_000_000, None), (9_223_372_036, Some("2262")), (10_420_000_000, Some("2300"))]
        {
            let refused = refuse_after(seconds).err().map(|error| error.to_string());
            assert_eq!(refused.is_some(), year.is_some(), "{refused:?}");
            assert!(refused.is_none_or(|error| error.contains(year.unwrap())));
        }
    }
}
