//! Progress and remaining time of work that takes longer than two seconds.
//!
//! The clock only decides when to print.

use std::path::Path;
use std::time::{Duration, Instant};

use contract::note;

use crate::events;
use crate::shown::clock;

/// Shorter work prints nothing.
const SILENCE: Duration = Duration::from_secs(2);

/// The time between two lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Counts what is done, and prints it to standard error.
pub struct WaitCounter {
    what: String,
    total: u64,
    done: u64,
    begun: Instant,
    /// When to print next.
    next: Instant,
}

impl WaitCounter {
    /// For `total` items, which `what` names.
    pub fn new(what: impl Into<String>, total: u64) -> Self {
        let begun = Instant::now();
        WaitCounter { what: what.into(), total, done: 0, begun, next: begun + SILENCE }
    }

    /// Counts one more, and prints if it is time.
    pub fn one(&mut self) {
        self.done += 1;
        let now = Instant::now();
        if now < self.next || self.done >= self.total {
            return;
        }
        self.next = now + LINE_EVERY;
        let left = left(now - self.begun, self.done, self.total);
        note!("{}: {} of {} | {} left", self.what, self.done, self.total, clock(left));
    }
}

/// How long `steps` steps take at the recent pace of the run with the events at `path`; `None` if that is not worth a
/// word.
pub(crate) fn expected(path: &Path, steps: u64) -> Option<String> {
    let seconds = events::pace(path)? * steps as f64;
    let time = Duration::from_secs_f64(seconds.clamp(0.0, 1e9));
    (time >= SILENCE).then(|| clock(time))
}

/// The remaining time if `done` of `total` took this long.
fn left(taken: Duration, done: u64, total: u64) -> Duration {
    let rest = total.saturating_sub(done) as f64 / done.max(1) as f64;
    Duration::from_secs_f64((taken.as_secs_f64() * rest).min(1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_takes_as_long_as_what_is_done() {
        let taken = Duration::from_secs(30);
        assert_eq!(left(taken, 10, 40), Duration::from_secs(90));
        assert_eq!(left(taken, 40, 40), Duration::ZERO);
        assert_eq!(left(taken, 50, 40), Duration::ZERO);
        // Even the longest time must have a format.
        assert!(!clock(left(Duration::from_secs(u64::MAX / 4), 1, u64::MAX)).is_empty());
    }
}
