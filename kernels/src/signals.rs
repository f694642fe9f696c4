//! Signals that come while libtorch is loaded, before this program has begun.

#![expect(unsafe_code, reason = "calls the C++ shim")]

unsafe extern "C" {
    fn shim_hear_signals();
}

/// Lets SIGTERM, SIGINT and SIGHUP through. A program that calls this keeps them from its first moment on, and hears those that
/// came meanwhile now: once it listens to them, or ends by them.
// Inlined: a program that does not call it has nothing of it, and keeps nothing.
#[inline]
pub fn hear() {
    // SAFETY: takes nothing, and changes the mask of signals of this thread.
    unsafe { shim_hear_signals() }
}
