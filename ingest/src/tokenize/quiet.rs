//! Panics of libraries that are answered, and therefore not printed.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is expected.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs what may panic. The libraries' panics are answered with another encoder or an error that names the document,
/// so that what they print would only mislead; every other panic speaks as before.
pub(super) fn quietly<T>(work: impl FnOnce() -> T) -> std::result::Result<T, ()> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let speak = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                speak(info);
            }
        }));
    });
    let before = QUIET.replace(true);
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    QUIET.set(before);
    done.map_err(|_| ())
}
