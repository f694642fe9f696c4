//! Kernels launched as a process does: source through a compiler's C interface, code through a driver's, on the
//! emulator. Also compiles with NVRTC, up to machine code, if its wheel is installed.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tch::{Kind, Tensor};

use super::build::{fresh, library, texts};
use super::numbers;
use crate::checksum;
use crate::device::library::{AMD, Compiler, Module, NVIDIA, Vendor};
use crate::device::own;
use crate::device::pieces::{self, TensorRange};
use crate::device::queue::Queue;

/// The stand-in for both vendors' libraries.
fn standin() -> &'static CStr {
    static NAME: OnceLock<CString> = OnceLock::new();
    NAME.get_or_init(|| CString::new(library("driver.cpp").as_os_str().as_bytes()).unwrap())
}

/// A module of each vendor's interface.
fn modules(kept: Option<&Path>) -> [Module; 2] {
    let name = [standin()];
    [NVIDIA, AMD].map(|vendor| {
        let vendor = Vendor { compilers: &name, drivers: &name, ..vendor };
        own::module(vendor, "sm_90", kept).unwrap()
    })
}

/// The kernels on the emulator, with tensors in main memory.
pub(crate) fn queue(device: tch::Device) -> crate::Result<Queue> {
    static MODULES: OnceLock<[Module; 2]> = OnceLock::new();
    Ok(Queue::new(&MODULES.get_or_init(|| modules(None))[0], device, std::ptr::null_mut()))
}

#[test]
fn checksums_go_through_the_interface_of_both_vendors() {
    for module in modules(None) {
        let queue = Queue::new(Box::leak(Box::new(module)), tch::Device::Cpu, std::ptr::null_mut());
        for (count, first) in [(1usize, 0u64), (5000, 7), (4096, (1 << 32) - 5)] {
            let tensor = Tensor::from_slice(&numbers(count, first));
            for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
                let tensor = tensor.to_kind(kind);
                let piece = |tensor, salt| TensorRange { tensor, other: None, first, salt };
                let both = [piece(&tensor, 9), piece(&tensor, 1 << 40)];
                let found = pieces::checksums(&queue, &both).unwrap();
                let found =
                    Vec::<i64>::try_from(&found).unwrap().into_iter().map(i64::cast_unsigned);
                let wanted =
                    [9, 1 << 40].map(|salt| checksum::slice(&tensor, first, salt).unwrap());
                assert_eq!(found.collect::<Vec<_>>(), wanted, "{kind:?} {count}");
            }
        }
        let x = Tensor::from_slice(&numbers(3, 1));
        for wrong in [x.to_kind(Kind::Double), x.reshape([3, 1]).expand([3, 2], false)] {
            let arguments = [(&wrong).into(), (&x).into(), (&x).into(), 1.into(), 3.into()];
            let refused = queue.launch(c"column_products", 1, &arguments).unwrap_err().to_string();
            assert!(refused.contains("column_products: argument 0"), "{refused}");
        }
        assert!(queue.launch(c"column_products", 1, &[(&x).into()]).is_err());
        assert!(queue.launch(c"no_kernel", 1, &[]).is_err());
    }
}

/// A launch reports to the race detector of the stand-in GPU what the kernel reads and writes; for a kernel with a
/// table this requires knowledge of its rows.
#[test]
fn what_every_kernel_touches_is_told() {
    let queue = queue(tch::Device::Cpu).unwrap();
    for name in texts().iter().flat_map(|(_, text)| text.split("\nKERNEL(").skip(1)) {
        let name = CString::new(name.split(',').next().unwrap()).unwrap();
        // The driver finds the kernel, and refuses a launch without blocks.
        let refused = queue.launch_words(&name, 0, &mut []).unwrap_err().to_string();
        assert!(refused.contains("launch a kernel"), "{name:?}: {refused}");
    }
    let refused = queue.launch_words(c"no_kernel", 0, &mut []).unwrap_err().to_string();
    assert!(refused.contains("find a kernel"), "{refused}");
}

/// One file per vendor; a corrupted file is replaced.
#[test]
fn code_is_kept() {
    let folder = fresh();
    let files = || {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    modules(Some(&folder));
    let made = files();
    assert_eq!(made.len(), 2);
    let whole: Vec<_> = made.iter().map(|file| std::fs::read(file).unwrap()).collect();
    modules(Some(&folder));
    assert_eq!(files(), made);
    for (file, bytes) in made.iter().zip(&whole) {
        std::fs::write(file, &bytes[..bytes.len() - 1]).unwrap();
    }
    modules(Some(&folder));
    assert_eq!(made.iter().map(|file| std::fs::read(file).unwrap()).collect::<Vec<_>>(), whole);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_cannot_be_had_is_said() {
    let (here, missing) = ([standin()], [c"libthat_is_nowhere.so"]);
    let vendor = Vendor { compilers: &here, drivers: &here, ..NVIDIA };
    let refused = own::module(vendor, "no_such_device", None).unwrap_err().to_string();
    assert!(refused.contains("invalid value of --gpu-architecture=no_such_device"), "{refused}");
    let refused = own::module(Vendor { compilers: &missing, ..vendor }, "sm_90", None);
    assert!(refused.unwrap_err().to_string().contains("libthat_is_nowhere.so"));
    let refused = own::module(Vendor { drivers: &missing, ..vendor }, "sm_90", None);
    assert!(refused.unwrap_err().to_string().contains("libthat_is_nowhere.so"));
    assert!(Module::load(vendor, b"no machine code", Default::default()).is_err());
}

/// The real compiler accepts our options and headers; runs only where `resources.py --install` has put its wheel. That
/// it accepts all kernels is what `resources.py` shows.
#[test]
fn a_real_compiler_takes_options_and_headers() {
    let folder = std::env::temp_dir().join("ztrain-nvrtc/nvidia/cu13/lib");
    let name = |name| CString::new(folder.join(name).as_os_str().as_bytes()).unwrap();
    let [helper, name] = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"].map(name);
    // The compiler loads its helper library by name, and finds it if it is open already.
    assert!(Compiler::open(Vendor { compilers: &[&helper], ..NVIDIA }).is_err());
    let vendor = Vendor { compilers: &[&name], ..NVIDIA };
    let Ok(compiler) = Compiler::open(vendor) else {
        eprintln!("SKIPPED: no NVRTC in {}; resources.py --install gets it", folder.display());
        return;
    };
    let mut sources = own::SOURCES.to_vec();
    sources[0].1 = c"#include \"exact.h\"\n";
    let code = compiler.compile(&sources, &compiler.options("sm_90a")).unwrap();
    assert!(code.starts_with(b"\x7FELF"), "{} bytes", code.len());
    assert!(String::from_utf8_lossy(&code).contains("checksum_blocks"));
}
