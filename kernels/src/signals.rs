//! Signals that come while libtorch is loaded, before this program has begun.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::os::unix::process::CommandExt as _;
use std::process::Command;

unsafe extern "C" {
    fn shim_keep_signals();
    fn shim_hear_signals();
}

/// Starts a program that calls [`hear`] with those signals kept: none ends it while its libraries are linked, before its own
/// first moment.
pub fn keep_in(command: &mut Command) -> &mut Command {
    let keep = || {
        // SAFETY: takes nothing, changes the mask of signals of this thread, and allocates nothing.
        unsafe { shim_keep_signals() };
        Ok(())
    };
    // SAFETY: between fork and exec, where only what is safe in a handler of signals may be called: `sigprocmask` is.
    unsafe { command.pre_exec(keep) }
}

/// Lets SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 through. A program that calls this keeps them from its first moment on, and
/// hears those that came meanwhile now: once it listens to them, or ends by them.
// Inlined: a program that does not call it has nothing of it, and keeps nothing.
#[inline]
pub fn hear() {
    // SAFETY: takes nothing, and changes the mask of signals of this thread.
    unsafe { shim_hear_signals() }
}
