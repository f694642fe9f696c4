//! Identity of a ROCm device, as HIP reports it: for the log of where a run was; it never affects bits.
//!
//! Requires the feature `hip`, because `hip-sys` needs ROCm's headers and `libamdhip64` at build time. It avoids
//! `hipDeviceProp_t`, whose layout differs between ROCm 5, for which the bindings are, and ROCm 6.

#![expect(unsafe_code, reason = "calls HIP")]

use std::ffi::{CStr, c_int};

use hip_sys::hiprt;

use crate::{Error, Result};

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HipIdentity {
    /// Its product name.
    pub name: String,
    /// Its UUID, in hexadecimal digits.
    pub uuid: String,
    /// Release of the HIP runtime, as HIP encodes it.
    pub runtime: i32,
}

/// Number of devices that the driver reports.
pub fn count() -> Result<i32> {
    let mut count = 0;
    // SAFETY: the out-pointer outlives the call.
    checked("hipGetDeviceCount", unsafe { hiprt::hipGetDeviceCount(&raw mut count) })?;
    Ok(count)
}

/// The identity of device `index`.
pub fn identity(index: i32) -> Result<HipIdentity> {
    let mut name = [0; 256];
    // SAFETY: HIP writes at most the number of bytes passed, so the last byte stays zero.
    let answer =
        unsafe { hiprt::hipDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, index) };
    checked("hipDeviceGetName", answer)?;
    let mut uuid = hiprt::hipUUID { bytes: [0; 16] };
    // SAFETY: the out-pointer outlives the call.
    checked("hipDeviceGetUuid", unsafe { hiprt::hipDeviceGetUuid(&raw mut uuid, index) })?;
    let mut runtime = 0;
    // SAFETY: the out-pointer outlives the call.
    checked("hipRuntimeGetVersion", unsafe { hiprt::hipRuntimeGetVersion(&raw mut runtime) })?;
    // SAFETY: zero-terminated, as explained above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let uuid = uuid.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
    Ok(HipIdentity { name, uuid, runtime })
}

fn checked(call: &'static str, answer: hiprt::hipError_t) -> Result<()> {
    if answer == hiprt::hipError_t::hipSuccess {
        return Ok(());
    }
    Err(Error::Foreign { call, reason: format!("HIP error {}", answer as u32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_says_who_it_is_or_there_is_none() {
        match count() {
            Ok(devices @ 1..) => (0..devices).for_each(|index| {
                assert_eq!(identity(index).unwrap().uuid.len(), 32);
            }),
            other => {
                use std::io::Write as _;
                writeln!(std::io::stderr(), "1 GPU test skipped: no ROCm device: {other:?}")
                    .unwrap();
                assert!(identity(0).is_err());
            }
        }
    }
}
