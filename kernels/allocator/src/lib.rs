//! The allocator of both programs, and how they end when memory runs out.
//!
//! mimalloc replaces the C library's `malloc` by being linked (its feature `override`), so Rust's system allocator, C
//! and C++ all use it. This crate is separate from `kernels` because `zdata` does not link libtorch.

#![expect(unsafe_code, reason = "stands before the system's allocator, and is called by mimalloc")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::hint;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

unsafe extern "C" {
    fn write(to: c_int, bytes: *const c_void, count: usize) -> isize;
    fn _exit(code: c_int) -> !;
}

/// The system's allocator, which ends the program properly when our own code gets no memory: with a message and exit
/// code 6, which means a fault of the machine, instead of a signal.
pub struct ExitWithoutMemory;

/// No machine can allocate this much at once: the size comes from a corrupt file. The caller (`try_reserve`) gets an
/// error and names that file.
const MADE_UP: usize = 1 << 36;

/// The last message, written without allocating memory.
const LAST_WORDS: &str = "error: there is not enough memory\n  hint:   free some, raise `ulimit -v`, or use fewer workers or \
                          smaller micro-batches; the same command continues where it stopped\n";

/// mimalloc's error code for a lack of memory: `ENOMEM`, the same number on every Unix.
const NO_MEMORY: c_int = 12;

/// More than the main thread of a program needs, in bytes; `tests/faults.rs` runs both programs with this limit.
const STACK: usize = 2 << 20;

thread_local! {
    /// Whether this thread is allocating a size that may be corrupt.
    static MAY_BE_REFUSED: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread is asking for small blocks.
    static ASKS: Cell<bool> = const { Cell::new(false) };
}

impl ExitWithoutMemory {
    /// Also ends the program this way when C code gets no memory: Oniguruma does not check every result of `malloc`.
    ///
    /// Not for programs that link libtorch, whose C++ reports a lack of memory with an exception: they use
    /// [`ExitWithoutMemory::in_c_for_small_blocks`].
    pub fn in_c_too() {
        // SAFETY: stores a function that any thread may call at any time, and that ignores its argument.
        unsafe { libmimalloc_sys::mi_register_error(Some(refused), ptr::null_mut()) }
    }

    /// The same only where there is no memory for small blocks either. libtorch's C++ throws where it gets none for a
    /// tensor, but oneDNN does not check every result for its own small blocks.
    pub fn in_c_for_small_blocks() {
        // SAFETY: as above.
        unsafe { libmimalloc_sys::mi_register_error(Some(refused_where_small), ptr::null_mut()) }
    }

    /// Lets the stack of the calling thread grow now. Later, where the machine has no page left for it, the system
    /// would end the process by a signal, and nothing would say why.
    #[inline(never)]
    pub fn reserve_stack() {
        hint::black_box(&mut [0u8; STACK]);
    }

    /// The result of `ask` for this many bytes.
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

/// mimalloc does not say how much it was asked for. It keeps blocks of similar size together, four sizes from one power
/// of two to the next, so blocks of all small sizes are asked for.
extern "C" fn refused_where_small(what: c_int, _: *mut c_void) {
    if what != NO_MEMORY || ASKS.replace(true) {
        return;
    }
    let sizes = (6..=16).flat_map(|power| (4..8).map(move |quarters| quarters << (power - 2)));
    for size in sizes {
        // SAFETY: any thread may ask at any time.
        let block = unsafe { libmimalloc_sys::mi_malloc(size) };
        if block.is_null() {
            end()
        }
        // SAFETY: a block that nothing else has.
        unsafe { libmimalloc_sys::mi_free(block) }
    }
    ASKS.set(false);
}

fn end() -> ! {
    static ENDS: AtomicBool = AtomicBool::new(false);
    if ENDS.swap(true, Ordering::Relaxed) {
        // Another thread is ending the process already, and one message is enough.
        loop {
            thread::yield_now();
        }
    }
    // SAFETY: the bytes belong to the program; a failed write changes nothing.
    unsafe { write(2, LAST_WORDS.as_ptr().cast(), LAST_WORDS.len()) };
    // SAFETY: ends the process like a kill, which all files survive.
    unsafe { _exit(6) }
}

// SAFETY: returns the results of the system's allocator.
unsafe impl GlobalAlloc for ExitWithoutMemory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::given(layout.size(), || unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::given(layout.size(), || unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::given(bytes, || unsafe { System.realloc(place, layout, bytes) })
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(place, layout) }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    unsafe extern "C" {
        fn malloc(bytes: usize) -> *mut c_void;
    }

    /// Set in the process that a test starts.
    const CHILD: &str = "ZSTACK_ALLOCATOR_TEST";

    #[test]
    fn small_blocks_that_are_refused_end_the_program_and_large_ones_do_not() {
        if let Some(bytes) = std::env::var(CHILD).ok().and_then(|bytes| bytes.parse().ok()) {
            ExitWithoutMemory::in_c_for_small_blocks();
            // SAFETY: the blocks are not used.
            while !hint::black_box(unsafe { malloc(bytes) }).is_null() {}
            // SAFETY: ends the process.
            unsafe { _exit(3) }
        }
        let own = std::env::current_exe().unwrap();
        for (bytes, code) in [("10000", 6), ("3000000000", 3)] {
            let script = format!("ulimit -v {}; exec \"$0\" \"$@\"", 2 << 20);
            let mut command = Command::new("sh");
            command.args(["-c", &script]).arg(&own).env(CHILD, bytes);
            let ran = command.arg("small_blocks").output().unwrap();
            let told = String::from_utf8_lossy(&ran.stderr);
            assert_eq!(ran.status.code(), Some(code), "{bytes}: {told}");
            assert_eq!(told.contains("not enough memory"), code == 6, "{bytes}: {told}");
        }
    }
}
