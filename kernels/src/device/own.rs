//! Our own GPU kernels (`device/`): compiled at first use, cached in a folder, and loaded.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tch::Device;

use super::cpp_tokens;
use super::half;
use super::library::{AMD, Compiler, Module, NVIDIA, Vendor};
use crate::{Result, sums};

macro_rules! sources {
    ($($name:literal),*) => {
        /// The source of all kernels: the first file includes the others.
        pub(super) const SOURCES: &[(&CStr, &CStr)] = &[$((
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
    "conv.h",
    "dispatch.h",
    "elements.h",
    "embedding.h",
    "exact.h",
    "experts.h",
    "finish.h",
    "flash.h",
    "fours.h",
    "ground.h",
    "grouped.h",
    "loss.h",
    "mma.h",
    "numbers.h",
    "optimizer.h",
    "own_rows.h",
    "products.h",
    "router.h",
    "routed.h",
    "rows.h",
    "spans.h",
    "sums.h",
    "transport.h"
);

/// Digest of the kernels' source, apart from comments and white space, and of compiler options, for the kernel table.
pub(crate) fn digest() -> u64 {
    digest_by(&[NVIDIA, AMD])
}

fn digest_by(vendors: &[Vendor]) -> u64 {
    let mut whole = Vec::new();
    for vendor in vendors {
        for option in vendor.options.iter().copied().chain(vendor.architecture) {
            whole.extend(option.bytes().chain([0]));
        }
        whole.push(0);
    }
    for (name, text) in SOURCES {
        whole.extend(name.to_bytes_with_nul());
        cpp_tokens::append(&text.to_string_lossy(), &mut whole);
        whole.push(0);
    }
    sums::bytes(&whole, 4)
}

/// Loads the kernels: compiles them, or uses the cached result of the same source and compiler.
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
    let name = format!("{:016x}{:016x}", sums::bytes(&whole, 1), sums::bytes(&whole, 2));
    let file = kept.map(|folder| folder.join(name));
    if let Some(code) = file.as_deref().and_then(taken) {
        return Module::load(vendor, &code, [compiler.name(), architecture.to_owned()]);
    }
    let code = compiled(&compiler, architecture)?;
    let module = Module::load(vendor, &code, [compiler.name(), architecture.to_owned()])?;
    // The cache is optional: without write access the kernels are compiled again next time.
    if let Some(file) = &file {
        let _ = keep(file, &code);
    }
    Ok(module)
}

/// The machine code of all kernels.
pub(super) fn compiled(compiler: &Compiler, architecture: &str) -> Result<Vec<u8>> {
    compiler.compile(SOURCES, &compiler.options(architecture))
}

/// Cached code, preceded by its checksum; `None` if it is damaged.
fn taken(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (sum, code) = bytes.split_at_checked(8)?;
    (sum == sums::bytes(code, 3).to_le_bytes()).then(|| code.to_vec())
}

fn keep(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let bytes = [&sums::bytes(code, 3).to_le_bytes(), code].concat();
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let own = file.with_extension(std::process::id().to_string());
    std::fs::write(&own, bytes)?;
    std::fs::rename(own, file)
}

/// Both vendors, that of libtorch's GPU half first: a machine may have libraries of the other one, too.
pub(super) fn vendors() -> [Vendor<'static>; 2] {
    if half::is_amds() { [AMD, NVIDIA] } else { [NVIDIA, AMD] }
}

/// The folder for cached machine code, in this user's cache.
fn folder() -> Option<PathBuf> {
    let of = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("ztrain/kernels"))
}

/// The kernels on a GPU, compiled once per process, or why neither vendor's libraries provide them.
pub(super) fn on_gpu(index: usize) -> std::result::Result<&'static Module, String> {
    type Found = std::result::Result<&'static Module, String>;
    static MODULES: Mutex<BTreeMap<usize, Found>> = Mutex::new(BTreeMap::new());
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let open = || {
        let architecture =
            super::architecture(Device::Cuda(index)).map_err(|why| why.to_string())?;
        let kept = folder();
        let own = |vendor| module(vendor, &architecture, kept.as_deref());
        let [first, second] = vendors();
        let found = own(first).or_else(|why| own(second).map_err(|also| format!("{why}; {also}")));
        found.map(|found| &*Box::leak(Box::new(found)))
    };
    modules.entry(index).or_insert_with(open).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_of_a_compiler_is_in_the_digest() {
        let contracted = Vendor { options: &["--std=c++17", "--fmad=true"], ..NVIDIA };
        let moved = Vendor { options: &["--std=c++17--fmad=false"], ..NVIDIA };
        let other = Vendor { options: &["-std=c++17", "-O2", "-ffp-contract=off"], ..AMD };
        let cases = [[NVIDIA, AMD], [contracted, AMD], [moved, AMD], [NVIDIA, other]];
        let digests: std::collections::BTreeSet<u64> =
            cases.iter().map(|vendors| digest_by(vendors)).collect();
        assert_eq!(digests.len(), cases.len());
        assert!(digests.contains(&digest()));
    }
}
