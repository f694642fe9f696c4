//! A vendor's libraries, opened at run time: the compiler, and the driver that loads and launches its output.
//!
//! NVRTC and hipRTC have the same C interface with different prefixes, and so have the few driver functions that are
//! called here. Building needs nothing of a vendor.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use rccl_sys::LoadedLibrary;

use super::half;
use crate::{Error, Result};

type Handle = *mut c_void;

/// A vendor's names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vendor<'a> {
    /// Names of the compiler library, newest first.
    pub(super) compilers: &'a [&'a CStr],
    /// Libraries that the compiler loads by name when it compiles.
    pub(super) helpers: &'a [&'a CStr],
    /// Names of the driver library.
    pub(super) drivers: &'a [&'a CStr],
    pub(super) compiler_prefix: &'a str,
    /// The compiler's name for its output.
    pub(super) code: &'a str,
    pub(super) driver_prefix: &'a str,
    pub(super) launch: &'a str,
    /// The function that returns a device's memory size, without the prefix.
    pub(super) total_memory: &'a str,
    pub(super) options: &'a [&'a str],
    /// The option that names an architecture; a compiler without one compiles for the device in use.
    pub(super) architecture: Option<&'a str>,
}

/// NVIDIA's.
pub(super) const NVIDIA: Vendor<'static> = Vendor {
    compilers: &[c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so"],
    helpers: &[c"libnvrtc-builtins.so.13.0"],
    drivers: &[c"libcuda.so.1"],
    compiler_prefix: "nvrtc",
    code: "CUBIN",
    driver_prefix: "cu",
    launch: "cuLaunchKernel",
    // The first version of the function has 32-bit sizes.
    total_memory: "DeviceTotalMem_v2",
    options: &["--std=c++17", "--fmad=false"],
    architecture: Some("--gpu-architecture="),
};

/// AMD's.
pub(super) const AMD: Vendor<'static> = Vendor {
    compilers: &[c"libhiprtc.so.7", c"libhiprtc.so.6", c"libhiprtc.so"],
    helpers: &[],
    drivers: &[c"libamdhip64.so.7", c"libamdhip64.so.6", c"libamdhip64.so"],
    compiler_prefix: "hiprtc",
    code: "Code",
    driver_prefix: "hip",
    launch: "hipModuleLaunchKernel",
    total_memory: "DeviceTotalMem",
    options: &["-std=c++17", "-O3", "-ffp-contract=off"],
    architecture: None,
};

fn refuse(call: &'static str, reason: String) -> Error {
    Error::Foreign { call, reason }
}

/// The first of these that the loader finds, or that is installed with the GPU half of libtorch.
fn open(names: &[&CStr]) -> Result<LoadedLibrary> {
    let none = || refuse("open a GPU's library", format!("none of {names:?} is here"));
    let beside = || {
        let paths = half::beside().into_iter().flat_map(|folder| {
            let path = move |name: &&CStr| {
                CString::new(
                    [folder.as_os_str().as_encoded_bytes(), b"/", name.to_bytes()].concat(),
                )
                .ok()
            };
            names.iter().filter_map(path).collect::<Vec<_>>()
        });
        let paths: Vec<_> = paths.collect();
        LoadedLibrary::first(&paths.iter().map(CString::as_c_str).collect::<Vec<_>>())
    };
    LoadedLibrary::first(names).or_else(beside).ok_or_else(none)
}

/// A driver's description of a device, for users.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceDescription {
    /// Its product name.
    pub(super) name: Option<String>,
    /// Its UUID, in hexadecimal digits.
    pub(super) uuid: Option<String>,
    /// Its memory in bytes.
    pub(super) memory: Option<u64>,
}

/// For device `index`; `None` without such a driver.
pub(super) fn described(vendor: Vendor, index: c_int) -> Option<DeviceDescription> {
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type Total = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    type Uuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int;
    let driver = open(vendor.drivers).ok()?;
    let prefix = vendor.driver_prefix;
    let mut device = 0;
    // SAFETY: types of both vendors' headers; out-pointers outlive the calls, and the size given for the name leaves
    // its last byte zero. A driver may be initialized any number of times, which creates no context.
    unsafe {
        let init = function::<Init>(&driver, &format!("{prefix}Init")).ok()?;
        check("set a driver up", init(0)).ok()?;
        let get = function::<Get>(&driver, &format!("{prefix}DeviceGet")).ok()?;
        check("find a device", get(&raw mut device, index)).ok()?;
        let name =
            function::<Name>(&driver, &format!("{prefix}DeviceGetName")).ok().and_then(|ask| {
                let mut text = [0; 256];
                check("name a device", ask(text.as_mut_ptr(), 255, device)).ok()?;
                Some(CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
            });
        let total = function::<Total>(&driver, &format!("{prefix}{}", vendor.total_memory)).ok();
        let memory = total.and_then(|ask| {
            let mut bytes = 0;
            check("ask for memory", ask(&raw mut bytes, device)).ok()?;
            u64::try_from(bytes).ok()
        });
        // NVIDIA's first function of this name does not distinguish the partitions of a GPU (MIG).
        let ask = |name: &str| function::<Uuid>(&driver, &format!("{prefix}{name}"));
        let ask = ask("DeviceGetUuid_v2").or_else(|_| ask("DeviceGetUuid")).ok();
        let uuid = ask.and_then(|ask| {
            let mut bytes = [0; 16];
            check("number a device", ask(&raw mut bytes, device)).ok()?;
            Some(bytes.map(|byte| format!("{byte:02x}")).concat())
        });
        Some(DeviceDescription { name, uuid, memory })
    }
}

/// The function of this name.
///
/// # Safety
/// As [`LoadedLibrary::function`].
unsafe fn function<F: Copy>(library: &LoadedLibrary, name: &str) -> Result<F> {
    let wanted = CString::new(name).unwrap_or_default();
    // SAFETY: the caller's promise.
    let found = unsafe { library.function(&wanted) };
    found.map_err(|reason| refuse("open a GPU's library", reason))
}

fn check(call: &'static str, answer: c_int) -> Result<()> {
    match answer {
        0 => Ok(()),
        code => Err(refuse(call, format!("error {code}"))),
    }
}

/// Files of a source, by name; the first is compiled and includes the others.
pub(super) type SourceFiles<'a> = &'a [(&'a CStr, &'a CStr)];

/// A run-time compiler.
#[derive(Debug)]
pub(super) struct Compiler<'a> {
    library: LoadedLibrary,
    vendor: Vendor<'a>,
    /// Its release.
    pub(super) release: [c_int; 2],
}

type Create = unsafe extern "C" fn(
    *mut Handle,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;

impl<'a> Compiler<'a> {
    pub(super) fn open(vendor: Vendor<'a>) -> Result<Compiler<'a>> {
        let library = open(vendor.compilers)?;
        // The compiler then finds it by name, as it is open already. Other systems find it by themselves.
        let _ = open(vendor.helpers);
        let mut compiler = Compiler { library, vendor, release: [0; 2] };
        let [major, minor] = &mut compiler.release;
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        // SAFETY: its type in both vendors' headers; the out-pointers outlive the call.
        let answer = unsafe {
            let name = format!("{}Version", vendor.compiler_prefix);
            function::<Version>(&compiler.library, &name)?(major, minor)
        };
        check("ask a compiler for its release", answer)?;
        Ok(compiler)
    }

    /// Name and release, for the kernel table.
    pub(super) fn name(&self) -> String {
        let [major, minor] = self.release;
        format!("{} {major}.{minor}", self.vendor.compiler_prefix)
    }

    /// # Safety
    /// As [`LoadedLibrary::function`]; `name` is without its prefix.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller's promise.
        unsafe { function(&self.library, &format!("{}{name}", self.vendor.compiler_prefix)) }
    }

    /// The options for a device of this architecture.
    pub(super) fn options(&self, architecture: &str) -> Vec<String> {
        let named = self.vendor.architecture.map(|option| format!("{option}{architecture}"));
        self.vendor.options.iter().map(|option| (*option).to_owned()).chain(named).collect()
    }

    /// Compiles a source to machine code.
    pub(super) fn compile(&self, files: SourceFiles, options: &[String]) -> Result<Vec<u8>> {
        let Some(((name, source), headers)) = files.split_first() else { return Ok(Vec::new()) };
        let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let texts: Vec<_> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let options: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()).unwrap_or_default())
            .collect();
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = ptr::null_mut();
        // SAFETY: types of both vendors' headers; all strings and lists outlive the calls and have the lengths passed.
        unsafe {
            let create = self.function::<Create>("CreateProgram")?;
            let count = names.len() as c_int;
            let (source, name) = (source.as_ptr(), name.as_ptr());
            let answer =
                create(&raw mut program, source, name, count, texts.as_ptr(), names.as_ptr());
            check("give a compiler its source", answer)?;
            let compile = self.function::<Compile>("CompileProgram")?;
            let made = match compile(program, options.len() as c_int, options.as_ptr()) {
                0 => self.taken(program, &format!("Get{}", self.vendor.code)),
                code => {
                    let log = self.taken(program, "GetProgramLog").unwrap_or_default();
                    let log =
                        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
                    Err(refuse("compile kernels for a GPU", format!("error {code}: {log}")))
                }
            };
            type Destroy = unsafe extern "C" fn(*mut Handle) -> c_int;
            self.function::<Destroy>("DestroyProgram")?(&raw mut program);
            made
        }
    }

    /// A named part of a program's output.
    ///
    /// # Safety
    /// The program is alive, and `name` is a function that copies bytes; the function `name` + `Size` returns
    /// their number.
    unsafe fn taken(&self, program: Handle, name: &str) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: a live program; the out-pointer outlives the call.
        check("read from a compiler", unsafe {
            self.function::<Size>(&format!("{name}Size"))?(program, &raw mut size)
        })?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the buffer has the size that the compiler reported.
        check("read from a compiler", unsafe {
            self.function::<Bytes>(name)?(program, bytes.as_mut_ptr().cast())
        })?;
        Ok(bytes)
    }
}

type Function = unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int;
type Launch = unsafe extern "C" fn(
    Handle,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    Handle,
    *mut Handle,
    *mut Handle,
) -> c_int;

/// How many kernels a module remembers.
pub(super) const FOUND: usize = 128;

/// Machine code that a driver has loaded.
#[derive(Debug)]
pub(super) struct Module {
    handle: Handle,
    function: Function,
    launch: Launch,
    /// Kernels found so far by number: looking one up takes a driver longer than launching it.
    found: [AtomicPtr<c_void>; FOUND],
    /// Name and release of the compiler that made the code.
    pub(super) compiler: String,
    /// The architecture for which the code was compiled.
    pub(super) architecture: String,
}

// SAFETY: handles and functions of a driver, which any thread may use at any time; the module is never unloaded.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads code for the device in use, which has this architecture; a compiler of this name and release made it.
    pub(super) fn load(
        vendor: Vendor,
        code: &[u8],
        [compiler, architecture]: [String; 2],
    ) -> Result<Module> {
        type Load = unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int;
        let library = open(vendor.drivers)?;
        let prefix = vendor.driver_prefix;
        let mut handle = ptr::null_mut();
        // SAFETY: types of both vendors' headers; the code is whole, as the compiler made it.
        unsafe {
            let load = function::<Load>(&library, &format!("{prefix}ModuleLoadData"))?;
            check("load kernels", load(&raw mut handle, code.as_ptr().cast()))?;
            Ok(Module {
                handle,
                compiler,
                architecture,
                found: [const { AtomicPtr::new(ptr::null_mut()) }; FOUND],
                function: function(&library, &format!("{prefix}ModuleGetFunction"))?,
                launch: function(&library, vendor.launch)?,
            })
        }
    }

    /// Looks up the kernel of this number and name in the driver.
    fn kernel(&self, numbered: (usize, &CStr)) -> Result<Handle> {
        let (number, name) = numbered;
        let found = self.found.get(number);
        let mut kernel = found.map_or(ptr::null_mut(), |found| found.load(Ordering::Acquire));
        if kernel.is_null() {
            // SAFETY: a loaded module, and a C string.
            check("find a kernel", unsafe {
                (self.function)(&raw mut kernel, self.handle, name.as_ptr())
            })?;
            found.inspect(|found| found.store(kernel, Ordering::Release));
        }
        Ok(kernel)
    }

    /// Queues a kernel on a stream of the device.
    ///
    /// # Safety
    /// The arguments have the types of the kernel's parameters, in their order. Memory that they refer to is
    /// on the device, large enough for the kernel's accesses, and not freed before the stream has run it.
    pub(super) unsafe fn launch(
        &self,
        kernel: (usize, &CStr),
        [blocks, threads]: [u32; 2],
        arguments: &mut [*mut c_void],
        stream: *mut c_void,
    ) -> Result<()> {
        let function = self.kernel(kernel)?;
        let arguments = arguments.as_mut_ptr();
        // SAFETY: the caller's promise.
        let answer = unsafe {
            (self.launch)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                arguments,
                ptr::null_mut(),
            )
        };
        check("launch a kernel", answer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    static LOOKED: AtomicU32 = AtomicU32::new(0);

    /// A driver that finds every kernel by the first letter of its name, except `none`.
    unsafe extern "C" fn look(out: *mut Handle, _: Handle, name: *const c_char) -> c_int {
        LOOKED.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's out-pointer and C string.
        unsafe {
            *out = ptr::without_provenance_mut(*name as usize);
            if CStr::from_ptr(name) == c"none" { 500 } else { 0 }
        }
    }

    unsafe extern "C" fn no_launch(
        _: Handle,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: Handle,
        _: *mut Handle,
        _: *mut Handle,
    ) -> c_int {
        1
    }

    #[test]
    fn a_kernel_is_looked_up_once() {
        let module = Module {
            handle: ptr::null_mut(),
            function: look,
            launch: no_launch,
            found: [const { AtomicPtr::new(ptr::null_mut()) }; FOUND],
            compiler: String::new(),
            architecture: String::new(),
        };
        for _ in 0..3 {
            for (number, name) in [c"adamw", c"finish"].into_iter().enumerate() {
                let first = usize::from(name.to_bytes()[0]);
                assert_eq!(module.kernel((number, name)).unwrap().addr(), first);
            }
        }
        assert_eq!(LOOKED.load(Ordering::SeqCst), 2);
        assert!([2, FOUND].iter().all(|number| module.kernel((*number, c"none")).is_err()));
        assert_eq!(LOOKED.load(Ordering::SeqCst), 4, "what is not there is asked for again");
    }
}
