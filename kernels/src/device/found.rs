//! What a machine has for `--device cuda`, for people: nothing here decides bits.

use std::collections::BTreeMap;

use tch::Device;

use super::library::{Compiler, Described, described};
use super::own::vendors;
use super::{architecture, count, half, table};
use crate::Result;

/// A GPU that the driver shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// As the kernel table has it; empty where the runtime library does not say.
    pub architecture: String,
    /// Its product name, where the driver says it.
    pub name: Option<String>,
    /// Its unique number, in hexadecimal digits, where the driver says it.
    pub uuid: Option<String>,
    /// Its memory in bytes, where the driver says it.
    pub memory: Option<u64>,
    /// What the kernel table has of it: compute units and memory, releases of driver, runtime and libraries.
    pub table: BTreeMap<String, String>,
}

/// What serves the GPUs of this machine, and which they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// The GPU half of libtorch that was opened, as path or as the loader knows it.
    pub library: String,
    /// The run-time compiler for our own kernels with its release, or why there is none.
    pub compiler: std::result::Result<String, String>,
    /// Release of RCCL or NCCL, or why there is none.
    pub between: std::result::Result<String, String>,
    /// In the order of their numbers.
    pub devices: Vec<Gpu>,
}

/// The GPUs of this machine, or why it has none that could be used. Opens the GPU half of libtorch; allocates nothing, and
/// makes no context.
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

/// A release of NCCL as people know it: 22809 is 2.28.9.
fn release(number: i32) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

fn gpu(index: i32) -> Result<Gpu> {
    let device = Device::Cuda(usize::try_from(index).unwrap_or_default());
    let Described { name, uuid, memory } = of(index).unwrap_or_default();
    Ok(Gpu { architecture: architecture(device)?, name, uuid, memory, table: table(device)? })
}

/// What a device is: where this program was built with HIP, by HIP's own word, else by that of its driver.
fn of(index: i32) -> Option<Described> {
    let found = vendors().into_iter().find_map(|vendor| described(vendor, index))?;
    #[cfg(feature = "hip")]
    if let Ok(crate::hip::Identity { name, uuid, .. }) = crate::hip::identity(index) {
        return Some(Described { name: Some(name), uuid: Some(uuid), ..found });
    }
    Some(found)
}

/// Name and unique number of the GPU that is computed on, as far as they are said: for the log of where a run was.
pub fn identity(device: Device) -> Option<[Option<String>; 2]> {
    let Described { name, uuid, .. } = described_at(device)?;
    Some([name, uuid])
}

/// Bytes of memory of the GPU that is computed on, where its driver says it. Makes no context there.
pub fn memory(device: Device) -> Option<u64> {
    described_at(device)?.memory
}

fn described_at(device: Device) -> Option<Described> {
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
