//! Handles signals that arrive while libtorch is loaded, before `main`.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::io;
use std::process::{Child, Command};

unsafe extern "C" {
    fn shim_keep_signals() -> u32;
    fn shim_hear_signals(kept: u32);
}

/// Starts a program that calls [`unblock`], with those signals blocked: none of them ends it while its libraries are
/// loaded, and between fork and exec none runs a handler of this process.
///
/// # Errors
///
/// If it cannot be started.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    // SAFETY: takes no argument, and changes the signal mask of this thread.
    let kept = unsafe { shim_keep_signals() };
    let child = command.spawn();
    // SAFETY: as above; the number is the result of the function above.
    unsafe { shim_hear_signals(kept) };
    child
}

/// Unblocks SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2. A program that calls this blocks them from its start on;
/// signals that have arrived meanwhile are delivered now, to its handlers or to end it.
// Inlined: a program that does not call it does not link the shim's code, and blocks no signals.
#[inline]
pub fn unblock() {
    // SAFETY: takes a number without a bit of any signal, and changes the signal mask of this thread.
    unsafe { shim_hear_signals(0) }
}
