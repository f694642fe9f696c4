//! Bytes of tensors that are alive in main memory or on a GPU, and the most that were: what a formula of memory is held against.
//! And whether foreign code was refused memory, which libtorch's wrapper does not hand on but in words.
//!
//! Nothing in main memory is counted before [`count`] is called, and a training run never calls it. A GPU's allocator counts by
//! itself.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_int;
use std::io::Write as _;

use tch::Device;

use crate::Result;
use crate::shim::guarded;

unsafe extern "C" {
    fn shim_was_refused() -> c_int;
    fn shim_is_refused() -> c_int;
    fn shim_count_memory() -> c_int;
    fn shim_live_bytes() -> i64;
    fn shim_most_bytes() -> i64;
    fn shim_most_anew();
    fn shim_most_bytes_on(index: c_int, out: *mut i64) -> c_int;
    fn shim_most_anew_on(index: c_int) -> c_int;
    fn _exit(code: c_int) -> !;
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

/// Counts, from here to the end of the process, the tensors that libtorch allocates in main memory.
///
/// # Errors
/// Where libtorch refuses another allocator, or memory ends.
pub fn count() -> Result<()> {
    // SAFETY: takes no argument; the allocator that it sets stays for the life of the process.
    guarded("count tensors", unsafe { shim_count_memory() })
}

/// Bytes that are alive.
pub fn live() -> u64 {
    // SAFETY: reads a number.
    unsafe { shim_live_bytes() }.max(0).cast_unsigned()
}

/// The most bytes that were alive at a time since [`anew`] was called last.
pub fn most() -> u64 {
    // SAFETY: reads a number.
    unsafe { shim_most_bytes() }.max(0).cast_unsigned()
}

/// Forgets the most that was alive before.
pub fn anew() {
    // SAFETY: writes a number.
    unsafe { shim_most_anew() }
}

/// The most bytes that were alive at a time on a GPU since [`anew_on`] was called last, as libtorch's allocator there counts
/// them; 0 for a CPU.
pub fn most_on(device: Device) -> Result<u64> {
    let Device::Cuda(index) = device else { return Ok(0) };
    let mut bytes = 0;
    // SAFETY: the out-pointer outlives the call.
    guarded("ask a device's allocator", unsafe {
        shim_most_bytes_on(index as c_int, &raw mut bytes)
    })?;
    Ok(bytes.max(0).cast_unsigned())
}

/// Forgets the most that was alive there before.
pub fn anew_on(device: Device) -> Result<()> {
    let Device::Cuda(index) = device else { return Ok(()) };
    // SAFETY: a plain number in.
    guarded("ask a device's allocator", unsafe { shim_most_anew_on(index as c_int) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    /// Other tests allocate beside this one, but nothing as large. Nothing is written, so the system hands out no pages.
    #[test]
    fn a_tensor_is_counted_as_long_as_it_lives() {
        const LARGE: i64 = 3 << 30;
        count().unwrap();
        count().unwrap();
        let before = live();
        let tensor = Tensor::empty([LARGE], (Kind::Uint8, Device::Cpu));
        let alias = tensor.narrow(0, 5, 7);
        drop(tensor);
        let near = |found: u64, wanted: u64| found.abs_diff(wanted) < LARGE.cast_unsigned() / 4;
        assert!(
            near(live(), before + LARGE.cast_unsigned()),
            "an alias keeps it: {before}, {}",
            live()
        );
        drop(alias);
        assert!(near(live(), before), "{before}, {}", live());
        assert!(near(most(), before + LARGE.cast_unsigned()), "{before}, {}", most());
        anew();
        assert!(near(most(), before), "{before}, {}", most());
    }
}
