//! Memory that is asked for before its turn.
//!
//! A pass that reads one stream waits for memory: a processor follows it ahead by less than a core could use (on an Emerald
//! Rapids 7 GB/s; 17 where it is asked for in time). Passes over several streams have enough on the way by themselves.

/// How far ahead, bytes: some hundred nanoseconds of the fastest pass.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 4096;

/// Asks for the memory that lies [`AHEAD`] bytes behind the start of `block`, if anything lies there.
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "an instruction"))]
#[inline(always)]
pub(crate) fn ask<T, const N: usize>(block: &[T; N]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let place = block.as_ptr().wrapping_byte_add(AHEAD);
        // SAFETY: a hint, for which no address is wrong.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = block;
}
