//! Our own kernels on a GPU (`device/`): compiled for it where it is first used, kept in a folder, loaded and launched.
//!
//! So far the checksum of a tensor is theirs. Its value does not depend on who computes it: where no compiler is at hand, or
//! anything else is missing, libtorch's operators come to the same sum with many more launches.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::library::{AMD, Compiler, Module, NVIDIA, Vendor};
use crate::{Error, Result, checksum};

macro_rules! sources {
    ($($name:literal),*) => {
        /// The source of all kernels: the first file includes the others.
        const SOURCES: &[(&CStr, &CStr)] = &[$((
            match CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without zeros"),
            },
            match CStr::from_bytes_with_nul(concat!(include_str!(concat!("../../device/", $name)), "\0").as_bytes()) {
                Ok(text) => text,
                Err(_) => panic!("a text without zeros"),
            },
        )),*];
    };
}
sources!(
    "kernels.h",
    "attention.h",
    "dispatch.h",
    "elements.h",
    "embedding.h",
    "exact.h",
    "experts.h",
    "ground.h",
    "loss.h",
    "numbers.h",
    "optimizer.h",
    "router.h",
    "rows.h",
    "sums.h",
    "transport.h"
);

/// Threads of a block, and elements that a block of `exact.h` takes.
const THREADS: u32 = 256;
const ELEMENTS: u64 = 4096;

/// Compiles the kernels, or takes what was compiled from the same source by the same compiler, and loads them.
pub(super) fn module(vendor: Vendor, architecture: &str, kept: Option<&Path>) -> Result<Module> {
    let compiler = Compiler::open(vendor)?;
    let options = compiler.options(architecture);
    let mut whole =
        format!("{} {:?} {options:?} {architecture}", vendor.compiler_prefix, compiler.release)
            .into_bytes();
    for (name, text) in SOURCES {
        whole.extend(name.to_bytes_with_nul());
        whole.extend(text.to_bytes_with_nul());
    }
    let name = format!("{:016x}{:016x}", checksum::bytes(&whole, 1), checksum::bytes(&whole, 2));
    let file = kept.map(|folder| folder.join(name));
    if let Some(code) = file.as_deref().and_then(taken) {
        return Module::load(vendor, &code);
    }
    let code = compiled(&compiler, architecture)?;
    let module = Module::load(vendor, &code)?;
    // Kept or not, it works; who cannot write there compiles again.
    if let Some(file) = &file {
        let _ = keep(file, &code);
    }
    Ok(module)
}

/// The machine code of all kernels.
pub(super) fn compiled(compiler: &Compiler, architecture: &str) -> Result<Vec<u8>> {
    compiler.compile(SOURCES, &compiler.options(architecture))
}

/// Code that was kept, with its checksum before it; `None` where it is not whole.
fn taken(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (sum, code) = bytes.split_at_checked(8)?;
    (sum == checksum::bytes(code, 3).to_le_bytes()).then(|| code.to_vec())
}

fn keep(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let bytes = [&checksum::bytes(code, 3).to_le_bytes(), code].concat();
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let own = file.with_extension(std::process::id().to_string());
    std::fs::write(&own, bytes)?;
    std::fs::rename(own, file)
}

/// Where machine code is kept: a cache of this user.
fn folder() -> Option<PathBuf> {
    let of = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("ztrain/kernels"))
}

/// The checksum of the elements of a contiguous tensor, by the kernels of `module`, queued on a stream of its device.
pub(super) fn checksum(
    module: &Module,
    tensor: &Tensor,
    [first, salt]: [u64; 2],
    stream: *mut c_void,
) -> Result<u64> {
    let (device, elements) = (tensor.device(), tensor.numel() as u64);
    if elements == 0 {
        return Ok(0);
    }
    let blocks = u32::try_from(elements.div_ceil(ELEMENTS)).map_err(|_| Error::Foreign {
        call: "add up a tensor",
        reason: format!("{elements} elements in one piece"),
    })?;
    let width = tensor.kind().elt_size_in_bytes() as u64;
    // A row of the table of pieces, as `exact.h` lays it out.
    let row = [tensor.data_ptr() as u64, 0, elements, first, salt, width].map(u64::cast_signed);
    let pieces = Tensor::f_from_slice(&row)?.f_to_device(device)?;
    let room = |count: i64| Tensor::f_empty([count], (Kind::Int64, device));
    let (partial, out) = (room(i64::from(blocks))?, room(1)?);
    let [mut pieces, mut partial, mut sum] =
        [&pieces, &partial, &out].map(|tensor| tensor.data_ptr());
    let mut count = 1u32;
    let [pieces, partial, sum] =
        [&raw mut pieces, &raw mut partial, &raw mut sum].map(|at| at.cast::<c_void>());
    let count = (&raw mut count).cast();
    // SAFETY: parameters as `exact.h` has them. The tensors belong to this device and outlive the answer, for which the stream
    // has to have done both; what an argument points at is read before a call returns.
    unsafe {
        module.launch(
            c"checksum_blocks",
            [blocks, THREADS],
            &mut [pieces, count, partial],
            stream,
        )?;
        module.launch(c"checksum_pieces", [1, THREADS], &mut [pieces, partial, sum], stream)?;
    }
    Ok(out.f_int64_value(&[0])?.cast_unsigned())
}

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The stream on which the calling thread computes, as the driver knows it.
fn current_stream(index: usize) -> Result<*mut c_void> {
    type Ask = unsafe extern "C" fn(i32, *mut *mut c_void) -> c_int;
    let refuse =
        |reason: &str| Error::Foreign { call: "ask for a stream", reason: reason.to_owned() };
    // SAFETY: no library: the whole process is searched, where the GPU half of libtorch has been opened.
    let found =
        unsafe { dlsym(std::ptr::null_mut(), c"aoti_torch_get_current_cuda_stream".as_ptr()) };
    if found.is_null() {
        return Err(refuse("libtorch does not tell"));
    }
    // SAFETY: its type in libtorch's `shim.h`.
    let ask = unsafe { std::mem::transmute::<*mut c_void, Ask>(found) };
    let mut stream = std::ptr::null_mut();
    // SAFETY: the out-pointer outlives the call.
    match unsafe { ask(index as i32, &raw mut stream) } {
        0 => Ok(stream),
        _ => Err(refuse("libtorch refuses")),
    }
}

/// The kernels on a GPU, compiled once a process; `None` where that cannot be.
fn on_gpu(index: usize) -> Option<Arc<Module>> {
    static MODULES: Mutex<BTreeMap<usize, Option<Arc<Module>>>> = Mutex::new(BTreeMap::new());
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let open = || {
        let architecture = super::architecture(Device::Cuda(index)).ok()?;
        let kept = folder();
        let own = |vendor| module(vendor, &architecture, kept.as_deref()).ok();
        own(NVIDIA).or_else(|| own(AMD)).map(Arc::new)
    };
    modules.entry(index).or_insert_with(open).clone()
}

/// The checksum of a contiguous tensor of a GPU by one pass over its memory; `None` where the kernels cannot be had.
pub(crate) fn gpu_checksum(tensor: &Tensor, first: u64, salt: u64) -> Option<u64> {
    let Device::Cuda(index) = tensor.device() else { return None };
    super::enter(tensor.device()).ok()?;
    let module = on_gpu(index)?;
    checksum(&module, tensor, [first, salt], current_stream(index).ok()?).ok()
}
