//! Want of memory: what foreign code was refused, which libtorch's wrapper hands on in words alone, and what our own is.

#![expect(unsafe_code, reason = "calls the C++ shim, and stands before the system's allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_int;
use std::io::Write as _;

unsafe extern "C" {
    fn shim_was_refused() -> c_int;
    fn shim_is_refused() -> c_int;
    fn shim_nothing_left() -> c_int;
    fn _exit(code: c_int) -> !;
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

/// The system's allocator for a program that ends in order where our own code gets no memory: with a message and code 6, which
/// others know as the machine's fault, instead of a signal.
pub struct OrEnd;

/// Whoever wants more than this at once may be able to do without, and is told (`try_reserve`).
const ASKED: usize = 64 << 20;

impl OrEnd {
    fn given(place: *mut u8, bytes: usize) -> *mut u8 {
        if place.is_null() && bytes < ASKED {
            let hint = "use fewer workers or smaller micro-batches; the same command goes on where it stopped";
            // Written at once, without memory. There is nobody left to tell that it could not be.
            let _ =
                writeln!(std::io::stderr(), "error: there is not enough memory\n  hint:   {hint}");
            // SAFETY: ends the process as a kill would, which everything on disk outlives.
            unsafe { _exit(6) }
        }
        place
    }
}

// SAFETY: the system's allocator, whose answers are handed on.
unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as whoever calls this promises.
        Self::given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as whoever calls this promises.
        Self::given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as whoever calls this promises.
        Self::given(unsafe { System.realloc(place, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: as whoever calls this promises.
        unsafe { System.dealloc(place, layout) }
    }
}
