//! Counts bytes of live tensors in main memory or on a GPU, and their maximum: to verify a formula for memory.
//!
//! Main memory is not counted before [`count`] is called, which a training run never does. A GPU's allocator counts by
//! itself.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::c_int;

use tch::Device;

use crate::Result;
use crate::shim::guarded;

unsafe extern "C" {
    fn shim_count_memory() -> c_int;
    #[cfg(test)]
    fn shim_live_bytes() -> i64;
    fn shim_most_bytes() -> i64;
    fn shim_most_anew();
    fn shim_most_bytes_on(index: c_int, out: *mut i64) -> c_int;
    fn shim_most_anew_on(index: c_int) -> c_int;
}

/// Counts, from now to the end of the process, the tensors that libtorch allocates in main memory.
///
/// # Errors
/// If libtorch refuses another allocator, or memory runs out.
pub fn count() -> Result<()> {
    // SAFETY: takes no argument; the allocator that it sets stays for the life of the process.
    guarded("count tensors", unsafe { shim_count_memory() })
}

/// Bytes of live tensors.
#[cfg(test)]
fn live() -> u64 {
    // SAFETY: reads a number.
    unsafe { shim_live_bytes() }.max(0).cast_unsigned()
}

/// The maximum of live bytes since the last call of [`anew`].
pub fn most() -> u64 {
    // SAFETY: reads a number.
    unsafe { shim_most_bytes() }.max(0).cast_unsigned()
}

/// Resets the maximum.
pub fn anew() {
    // SAFETY: writes a number.
    unsafe { shim_most_anew() }
}

/// The maximum of live bytes on a GPU since the last call of [`anew_on`], as counted by libtorch's allocator there; 0
/// for a CPU.
pub fn most_on(device: Device) -> Result<u64> {
    let Device::Cuda(index) = device else { return Ok(0) };
    let mut bytes = 0;
    // SAFETY: the out-pointer outlives the call.
    guarded("ask a device's allocator", unsafe {
        shim_most_bytes_on(index as c_int, &raw mut bytes)
    })?;
    Ok(bytes.max(0).cast_unsigned())
}

/// Resets the maximum there.
pub fn anew_on(device: Device) -> Result<()> {
    let Device::Cuda(index) = device else { return Ok(()) };
    // SAFETY: a plain number in.
    guarded("ask a device's allocator", unsafe { shim_most_anew_on(index as c_int) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    /// Other tests allocate concurrently, but nothing as large. Nothing is written, so the system commits no pages.
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
