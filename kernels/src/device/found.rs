//! What `--device cuda` would use on this machine, for users: nothing here affects bits.

use std::collections::BTreeMap;

use tch::Device;

use super::library::{Compiler, DeviceDescription, described};
use super::own::vendors;
use super::{architecture, count, half, table};
use crate::Result;

/// A GPU that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// As in the kernel table; empty if the runtime library does not report it.
    pub architecture: String,
    /// Its product name, if the driver reports it.
    pub name: Option<String>,
    /// Its UUID in hexadecimal digits, if the driver reports it.
    pub uuid: Option<String>,
    /// Its memory in bytes, if the driver reports it.
    pub memory: Option<u64>,
    /// Its entries in the kernel table: compute units, memory, releases of driver, runtime and libraries.
    pub table: BTreeMap<String, String>,
}

/// The libraries for the GPUs of this machine, and the GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// The GPU half of libtorch that was opened: a path, or a name that the loader resolved.
    pub library: String,
    /// The run-time compiler for our own kernels with its release, or why there is none.
    pub compiler: std::result::Result<String, String>,
    /// Release of RCCL or NCCL, or why there is none.
    pub between: std::result::Result<String, String>,
    /// By device index.
    pub devices: Vec<Gpu>,
}

/// The GPUs of this machine, or why none can be used. Opens the GPU half of libtorch; allocates nothing and creates no
/// context.
pub fn gpus() -> std::result::Result<Gpus, String> {
    half::open()?;
    let words = |error: crate::Error| error.to_string();
    let [first, second] = vendors();
    let compiler = Compiler::open(first).or_else(|_| Compiler::open(second));
    let between = rccl_sys::Library::open().and_then(rccl_sys::Library::version);
    Ok(Gpus {
        library: half::opened().map_or_else(String::new, |path| path.display().to_string()),
        compiler: compiler.map(|compiler| compiler.name()).map_err(words),
        between: between.map(release),
        devices: (0..count().map_err(words)?).map(gpu).collect::<Result<_>>().map_err(words)?,
    })
}

/// The name of the first GPU that a driver of this machine reports to this process; empty if it says none. Opens no
/// half of libtorch and creates no context.
pub fn visible() -> Option<String> {
    let found = vendors().into_iter().find_map(|vendor| described(vendor, 0))?;
    Some(found.name.unwrap_or_default())
}

/// A release of NCCL as users know it: 22809 is 2.28.9.
fn release(number: i32) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

fn gpu(index: i32) -> Result<Gpu> {
    let device = Device::Cuda(usize::try_from(index).unwrap_or_default());
    let DeviceDescription { name, uuid, memory } = of(index).unwrap_or_default();
    Ok(Gpu { architecture: architecture(device)?, name, uuid, memory, table: table(device)? })
}

/// Description of a device: from HIP if this program was built with it, otherwise from the driver.
fn of(index: i32) -> Option<DeviceDescription> {
    let found = vendors().into_iter().find_map(|vendor| described(vendor, index))?;
    #[cfg(feature = "hip")]
    if let Ok(crate::hip::HipIdentity { name, uuid, .. }) = crate::hip::identity(index) {
        return Some(DeviceDescription { name: Some(name), uuid: Some(uuid), ..found });
    }
    Some(found)
}

/// Name and UUID of the computing GPU, as far as reported: for the log of where a run was.
pub fn identity(device: Device) -> Option<[Option<String>; 2]> {
    let DeviceDescription { name, uuid, .. } = described_at(device)?;
    Some([name, uuid])
}

/// Bytes of memory of the computing GPU, if its driver reports them. Creates no context there.
pub fn memory(device: Device) -> Option<u64> {
    described_at(device)?.memory
}

fn described_at(device: Device) -> Option<DeviceDescription> {
    let Device::Cuda(index) = device else { return None };
    of(i32::try_from(index).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_as_their_libraries_write_them() {
        assert_eq!([22_809, 21_805, 22_703].map(release), ["2.28.9", "2.18.5", "2.27.3"]);
    }
}
