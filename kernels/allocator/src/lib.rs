//! The allocator of both programs, and how they end where it has nothing to give.
//!
//! mimalloc replaces the C library's `malloc` by being linked (its feature `override`): Rust's system allocator, C and C++ all
//! ask it. This crate stands beside `kernels`, and not in it, because `zdata` links no libtorch.

#![expect(unsafe_code, reason = "stands before the system's allocator, and is called by mimalloc")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

unsafe extern "C" {
    fn write(to: c_int, bytes: *const c_void, count: usize) -> isize;
    fn _exit(code: c_int) -> !;
}

/// The system's allocator for a program that ends in order where our own code gets no memory: with a message and code 6, which
/// others know as the machine's fault, instead of a signal.
pub struct OrEnd;

/// No machine gives so much at once: a file made it up, and the caller, who is refused (`try_reserve`), names that file.
const MADE_UP: usize = 1 << 36;

/// What is said at the end, written at once and without memory.
const LAST_WORDS: &str = "error: there is not enough memory\n  hint:   free some, raise `ulimit -v`, or use fewer workers or \
                          smaller micro-batches; the same command goes on where it stopped\n";

/// What mimalloc calls a lack of memory: `ENOMEM`, the same number on every Unix.
const NO_MEMORY: c_int = 12;

thread_local! {
    /// Whether this thread asks for what may be made up.
    static MAY_BE_REFUSED: Cell<bool> = const { Cell::new(false) };
}

impl OrEnd {
    /// Ends the program in the same way where C code gets no memory: Oniguruma does not look at what every `malloc` gave.
    ///
    /// Not for programs that link libtorch, whose C++ is told by an exception.
    pub fn in_c_too() {
        // SAFETY: stores a function that any thread may call at any time, and that ignores its argument.
        unsafe { libmimalloc_sys::mi_register_error(Some(refused), ptr::null_mut()) }
    }

    /// What `ask` was given for this many bytes.
    fn given(bytes: usize, ask: impl FnOnce() -> *mut u8) -> *mut u8 {
        if bytes < MADE_UP {
            let place = ask();
            return if place.is_null() { end() } else { place };
        }
        MAY_BE_REFUSED.set(true);
        let place = ask();
        MAY_BE_REFUSED.set(false);
        place
    }
}

extern "C" fn refused(what: c_int, _: *mut c_void) {
    if what == NO_MEMORY && !MAY_BE_REFUSED.get() {
        end()
    }
}

fn end() -> ! {
    static ENDS: AtomicBool = AtomicBool::new(false);
    if ENDS.swap(true, Ordering::Relaxed) {
        // Another thread is about to end the process, and one message is enough.
        loop {
            thread::yield_now();
        }
    }
    // SAFETY: the bytes are the program's own; whether anybody reads them changes nothing.
    unsafe { write(2, LAST_WORDS.as_ptr().cast(), LAST_WORDS.len()) };
    // SAFETY: ends the process as a kill would, which everything on disk outlives.
    unsafe { _exit(6) }
}

// SAFETY: the system's allocator, whose answers are handed on.
unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as whoever calls this promises.
        Self::given(layout.size(), || unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as whoever calls this promises.
        Self::given(layout.size(), || unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as whoever calls this promises.
        Self::given(bytes, || unsafe { System.realloc(place, layout, bytes) })
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: as whoever calls this promises.
        unsafe { System.dealloc(place, layout) }
    }
}
