//! Want of memory: what foreign code was refused, which libtorch's wrapper hands on in words alone.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::c_int;

unsafe extern "C" {
    fn shim_was_refused() -> c_int;
    fn shim_is_refused() -> c_int;
    fn shim_nothing_left() -> c_int;
}

/// Whether libtorch, or C++ under it, was refused memory on this thread since this was asked last.
pub fn was_refused() -> bool {
    // SAFETY: reads and writes a mark of this thread.
    unsafe { shim_was_refused() != 0 }
}

/// The same for whoever only looks: [`was_refused`] will say it again.
pub fn is_refused() -> bool {
    // SAFETY: reads a mark of this thread.
    unsafe { shim_is_refused() != 0 }
}

/// Whether the system has as good as nothing left to give: then what failed for no other known reason failed for that.
pub(crate) fn nothing_left() -> bool {
    // SAFETY: asks for memory and gives it back.
    unsafe { shim_nothing_left() != 0 }
}
