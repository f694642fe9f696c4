//! Lack of memory in foreign code, which libtorch's wrapper reports only as text.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::c_int;

unsafe extern "C" {
    fn shim_was_refused() -> c_int;
    fn shim_is_refused() -> c_int;
    fn shim_nothing_left() -> c_int;
}

/// Whether an allocation of libtorch, or of C++ below it, has failed on this thread since the last call.
pub fn was_refused() -> bool {
    // SAFETY: reads and writes a flag of this thread.
    unsafe { shim_was_refused() != 0 }
}

/// The same without resetting the flag: [`was_refused`] will report it again.
pub fn is_refused() -> bool {
    // SAFETY: reads a flag of this thread.
    unsafe { shim_is_refused() != 0 }
}

/// Whether the system has practically no memory left: then this is the reason for a failure without another known one.
pub(crate) fn nothing_left() -> bool {
    // SAFETY: allocates memory and frees it.
    unsafe { shim_nothing_left() != 0 }
}
