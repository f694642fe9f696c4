//! A computing thread: one math thread, denormal numbers kept.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::c_int;

use crate::shim::{guarded, number};
use crate::{Error, Result};

unsafe extern "C" {
    fn shim_enter_thread(threads: c_int) -> c_int;
    fn shim_threads(out: *mut c_int) -> c_int;
    fn shim_flushes_denormals() -> c_int;
}

/// Math threads of a micro-batch on a CPU. More cores compute more micro-batches at once, which changes no bit.
pub const THREADS_PER_MICRO_BATCH: u32 = 1;

/// Sets up the calling thread for computing: one math thread, denormal numbers kept. Repeated calls are cheap.
pub fn enter_thread() -> Result<()> {
    thread_local!(static ENTERED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
    if ENTERED.get() {
        return Ok(());
    }
    // SAFETY: plain integers in, only this thread's settings are modified, no exception out.
    guarded("enter a compute thread", unsafe {
        shim_enter_thread(THREADS_PER_MICRO_BATCH as c_int)
    })?;
    let threads = threads()?;
    let flushes = flushes_denormals();
    expect("threads_per_micro_batch", threads, THREADS_PER_MICRO_BATCH as i32)?;
    if flushes >= 0 {
        expect("flush_denormals", flushes, 0)?;
    }
    ENTERED.set(true);
    Ok(())
}

/// Math threads of the calling thread.
pub(crate) fn threads() -> Result<c_int> {
    number("ask for the math threads", |out| {
        // SAFETY: reads this thread's settings into an out-pointer that outlives the call.
        unsafe { shim_threads(out) }
    })
}

/// 1 if this thread flushes denormal numbers to zero, 0 if it keeps them, negative if unknown.
pub(crate) fn flushes_denormals() -> c_int {
    // SAFETY: reads a register of this thread.
    unsafe { shim_flushes_denormals() }
}

/// Fails if a switch reads back as another value than was set.
pub(crate) fn expect(switch: &'static str, found: i32, wanted: i32) -> Result<()> {
    if found == wanted { Ok(()) } else { Err(Error::NotInForce { switch, found, wanted }) }
}
