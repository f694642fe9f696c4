//! Signals that come while libtorch is loaded, before this program has begun.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::io;
use std::process::{Child, Command};

unsafe extern "C" {
    fn shim_keep_signals() -> u32;
    fn shim_hear_signals(kept: u32);
}

/// Starts a program that calls [`hear`] with those signals kept: none ends it while its libraries are linked, before its own
/// first moment, and none is taken between fork and exec by what this process would do with it.
///
/// # Errors
///
/// Where it cannot be started.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    // SAFETY: takes nothing, and changes the mask of signals of this thread.
    let kept = unsafe { shim_keep_signals() };
    let child = command.spawn();
    // SAFETY: as above; the number is what the function above gave.
    unsafe { shim_hear_signals(kept) };
    child
}

/// Lets SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 through. A program that calls this keeps them from its first moment on, and
/// hears those that came meanwhile now: once it listens to them, or ends by them.
// Inlined: a program that does not call it has nothing of it, and keeps nothing.
#[inline]
pub fn hear() {
    // SAFETY: takes a number without a bit of any signal, and changes the mask of signals of this thread.
    unsafe { shim_hear_signals(0) }
}
