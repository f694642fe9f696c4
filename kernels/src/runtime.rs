//! The switches that affect bits: set once at the start, read back, and recorded as the kernel table.
//!
//! Invariant: after [`start`] every micro-batch of this process runs on one math thread with deterministic algorithms;
//! a setting that cannot be enforced is an error, never a warning.

#![expect(
    unsafe_code,
    reason = "calls the C++ shim and sets environment variables before any thread exists"
)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::device::queue::Queue;
use crate::shim::{compiled_against, describe, guarded, number};
pub use crate::thread::{THREADS_PER_MICRO_BATCH, enter_thread};
use crate::thread::{expect, flushes_denormals};
use crate::{Error, Result, ops};

unsafe extern "C" {
    fn shim_set_switches() -> c_int;
    fn shim_set_interop_threads(threads: c_int) -> c_int;
    fn shim_interop_threads(out: *mut c_int) -> c_int;
    fn shim_switch(name: *const c_char, out: *mut c_int) -> c_int;
    fn shim_in_parallel_region(out: *mut c_int) -> c_int;
    fn shim_gpu_context_exists(out: *mut c_int) -> c_int;
}

/// Every process-wide switch and the value it must read back.
const SWITCHES: [(&CStr, c_int); 13] = [
    (c"deterministic_algorithms", 1),
    (c"fill_uninitialized", 0),
    (c"deterministic_cudnn", 1),
    (c"deterministic_onednn", 1),
    (c"benchmark_cudnn", 0),
    (c"tf32_cudnn", 0),
    (c"tf32_cublas", 0),
    (c"tf32_onednn", 0),
    (c"float32_matmul_highest", 1),
    (c"fp16_reduction_cpu", 0),
    (c"fp16_reduction_cublas", 0),
    (c"bf16_reduction_cublas", 0),
    (c"fp16_accumulation_cublas", 0),
];

/// Variables that GPU libraries read once, when their context is created: set here unless the user did.
const DEVICE_ENVIRONMENT: [(&str, &str); 3] = [
    (WORKSPACE, ":4096:8"),
    ("ROCBLAS_DEFAULT_ATOMICS_MODE", "0"),
    // With this hipBLASLt does not use Stream-K, whose order of additions depends on the number of free compute units.
    ("TENSILE_SOLUTION_SELECTION_METHOD", "0"),
];

/// Size of the workspace that a cuBLAS matmul may use.
const WORKSPACE: &str = "CUBLAS_WORKSPACE_CONFIG";

/// PyTorch's choice of kernels by timing them.
const TUNABLE: &str = "PYTORCH_TUNABLEOP_ENABLED";

/// Variables that affect the choice of kernels on a CPU; their values are part of its kernel table. oneDNN reads each
/// of its own under two names.
const CPU_ENVIRONMENT: [&str; 11] = [
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "GLIBC_TUNABLES",
];

/// The same for a GPU and its libraries.
const GPU_ENVIRONMENT: [&str; 22] = [
    WORKSPACE,
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "DISABLE_ADDMM_CUDA_LT",
    "ROCBLAS_DEFAULT_ATOMICS_MODE",
    "ROCBLAS_USE_HIPBLASLT",
    "ROCBLAS_TENSILE_LIBPATH",
    "HIPBLASLT_TENSILE_LIBPATH",
    "HIPBLASLT_WORKSPACE_SIZE",
    "TENSILE_SOLUTION_SELECTION_METHOD",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "DISABLE_ADDMM_HIP_LT",
    "MIOPEN_FIND_MODE",
    "ROCM_ALLOW_GROUP_GEMM_CK",
    TUNABLE,
    "PYTORCH_TUNABLEOP_FILENAME",
    "HSA_OVERRIDE_GFX_VERSION",
    "ZTRAIN_GROUPED",
    "ZTRAIN_ATTENTION",
];

/// The caller's choices for the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeOptions {
    /// As in `--device`: `cpu`, `cuda` or `cuda:1`.
    pub device: String,
}

/// Everything besides weights and data that affects the bits of a micro-batch.
///
/// On a GPU the fields of the CPU are empty, as no operation of a step runs there. The host uses only operations that
/// IEEE 754 defines, and our own functions instead of the C library's (for the learning rate and the initial weights);
/// angles, matmuls and sums of tensors run on the device. So a run can continue on a machine with another CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelTable {
    /// Release of libtorch, as the library reports it.
    pub libtorch: String,
    /// For a CPU: release of MKL, which libtorch uses for f32 matmuls; the switches show if oneDNN computes them
    /// instead.
    pub mkl: String,
    /// For a CPU: release of oneDNN.
    pub onednn: String,
    /// For a CPU: vendor, family and model, by which MKL chooses its kernels.
    pub cpu: String,
    /// For a CPU: instruction set of libtorch's own CPU kernels.
    pub cpu_capability: String,
    /// For a CPU: instruction sets that this process may use. oneDNN and MKL choose kernels by them, and a virtual
    /// machine may lack some that its CPU model has.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub extensions: String,
    /// `cpu`, or `cuda` (also for HIP).
    pub device: String,
    /// Architecture of the device; empty for a CPU.
    pub architecture: String,
    /// Other properties of a GPU that affect bits: compute units, memory, releases of driver, runtime and libraries.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpu: BTreeMap<String, String>,
    /// For a CPU: digest of results of the mathematics library, called directly and through libtorch: it affects bits,
    /// and its release cannot be queried.
    pub mathematics: String,
    /// Name and version of the table of operations.
    pub operations: String,
    /// Name and release of the run-time compiler of our own kernels for a device; empty elsewhere.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub compiler: String,
    /// Math threads of one micro-batch.
    pub threads_per_micro_batch: u32,
    /// The switches, as read back.
    pub switches: BTreeMap<String, i32>,
    /// Environment variables that affect the choice of kernels, if set.
    pub environment: BTreeMap<String, String>,
}

impl KernelTable {
    /// The table of operations that it names.
    pub fn ops(&self) -> Result<ops::OpsTable> {
        ops::named(&self.operations).ok_or_else(|| Error::NoDevice {
            device: self.device.clone(),
            reason: format!("this program has no operations {:?}", self.operations),
        })
    }

    /// One line that is equal on two machines exactly if their tables are equal.
    pub fn fingerprint(&self) -> String {
        let Self {
            libtorch,
            mkl,
            onednn,
            cpu,
            cpu_capability,
            extensions,
            device,
            architecture,
            gpu,
            mathematics,
            operations,
            compiler,
            threads_per_micro_batch,
            switches,
            environment,
        } = self;
        let pairs = |map: &BTreeMap<String, String>| {
            map.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
        };
        let switches = switches.iter().map(|(name, value)| (name.clone(), value.to_string()));
        let gpu = (!gpu.is_empty()).then(|| format!("gpu={}", pairs(gpu)));
        let extensions = (!extensions.is_empty()).then(|| format!("extensions={extensions}"));
        let fields = [
            format!("libtorch={libtorch}"),
            format!("mkl={mkl}"),
            format!("onednn={onednn}"),
            format!("cpu={cpu}"),
            format!("capability={cpu_capability}"),
            format!("device={device}"),
            format!("architecture={architecture}"),
            format!("mathematics={mathematics}"),
            format!("operations={operations}"),
            format!("compiler={compiler}"),
            format!("threads={threads_per_micro_batch}"),
            format!("switches={}", pairs(&switches.collect())),
            format!("environment={}", pairs(environment)),
        ];
        fields.into_iter().chain(extensions).chain(gpu).collect::<Vec<_>>().join("; ")
    }
}

/// Sets every switch and returns what is in force; must be the first action of a process.
///
/// A second call with the same options returns the same table.
pub fn start(options: &RuntimeOptions) -> Result<KernelTable> {
    static STARTED: Mutex<Option<(RuntimeOptions, KernelTable)>> = Mutex::new(None);
    let mut started = STARTED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some((before, table)) = started.as_ref() {
        return match before == options {
            true => Ok(table.clone()),
            false => Err(Error::TooLate { what: "a runtime for another device" }),
        };
    }
    refuse_if_late()?;
    refuse_what_the_processor_lacks()?;
    refuse_what_chooses_by_time(&options.device)?;
    ops::known_choices()?;
    set_device_environment(options);
    let device = crate::device::open(&options.device)?;
    keep_memory();
    bound_prepared_products();
    // SAFETY: takes no argument, modifies libtorch's own globals, and lets no exception out.
    guarded("set the determinism switches", unsafe { shim_set_switches() })?;
    set_interop_threads()?;
    enter_thread()?;
    let table = read_table(device)?;
    if device.is_cuda() {
        crate::device::settle_workspace(WORKSPACE)?;
    }
    *started = Some((options.clone(), table.clone()));
    Ok(table)
}

/// libtorch trusts this variable; on a processor without these instructions the process would crash.
fn refuse_what_the_processor_lacks() -> Result<()> {
    let asked = std::env::var("ATEN_CPU_CAPABILITY").unwrap_or_default();
    if can_do(&asked) {
        return Ok(());
    }
    let what = format!(
        "this processor does not have the instructions of ATEN_CPU_CAPABILITY={asked}: unset it"
    );
    Err(Error::Mistaken { what })
}

/// It chooses kernels by timing each matmul, so two runs with one kernel table could use different kernels.
fn refuse_what_chooses_by_time(device: &str) -> Result<()> {
    let asked = std::env::var(TUNABLE).unwrap_or_default();
    if device == "cpu" || ["", "0"].contains(&asked.as_str()) {
        return Ok(());
    }
    let what = format!(
        "{TUNABLE}={asked} lets libtorch choose a device's kernels by how fast they are today, so that no step could be computed \
         again: unset it"
    );
    Err(Error::Mistaken { what })
}

#[cfg(target_arch = "x86_64")]
fn can_do(capability: &str) -> bool {
    match capability {
        "avx512" => {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }
        "avx2" => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        _ => true,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn can_do(_: &str) -> bool {
    true
}

/// Reads every process-wide switch again; the error names the first that is no longer in force.
pub fn verify() -> Result<BTreeMap<String, i32>> {
    let mut found = BTreeMap::new();
    for (name, wanted) in SWITCHES {
        let value = switch(name)?;
        let name = name.to_str().unwrap_or("?");
        expect(name, value, wanted)?;
        found.insert(name.to_owned(), value);
    }
    Ok(found)
}

/// 1 or 0 for a known switch, -1 for another name.
fn switch(name: &CStr) -> Result<c_int> {
    number("read a switch", |out| {
        // SAFETY: the name is a C string; it and the out-pointer outlive the call.
        unsafe { shim_switch(name.as_ptr(), out) }
    })
}

fn refuse_if_late() -> Result<()> {
    // SAFETY: reads a flag of this thread into an out-pointer that outlives the call.
    let parallel = |out| unsafe { shim_in_parallel_region(out) };
    if number("ask for a parallel region", parallel)? != 0 {
        return Err(Error::TooLate { what: "a parallel region" });
    }
    // SAFETY: asks the device library, if one is loaded, whether it has created a context.
    let context = |out| unsafe { shim_gpu_context_exists(out) };
    if number("ask for a device context", context)? != 0 {
        return Err(Error::TooLate { what: "a device context" });
    }
    Ok(())
}

/// One thread between operators too: a second pool would only take cores from the workers.
fn set_interop_threads() -> Result<()> {
    // SAFETY: a plain integer in, no exception out.
    let refused = guarded("set the interop threads", unsafe { shim_set_interop_threads(1) });
    // SAFETY: reads a number into an out-pointer that outlives the call.
    let threads = |out| unsafe { shim_interop_threads(out) };
    if refused.is_err() && number("ask for the interop threads", threads)? != 1 {
        return Err(Error::TooLate { what: "libtorch's pool of inter-operator threads" });
    }
    Ok(())
}

/// Keeps freed pages in the process: every step allocates the same sizes as the one before, and the kernel would have
/// to clear returned pages again. (mimalloc replaces the C library's allocator, also for libtorch, because it is
/// linked.)
fn keep_memory() {
    /// `mi_option_purge_delay` of mimalloc's header, which the crate does not name; -1 is never.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: stores one number in the allocator's table of options, which is made of atomics.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}

/// oneDNN caches prepared matmuls by shape. Experts have another number of rows each time, so with the default capacity
/// of 1,024 many entries are never used again; 512 still keep nearly all reusable ones. Preparing one
/// takes as long as a matmul of 4 million operations.
fn bound_prepared_products() {
    const CAPACITY: &str = "ONEDNN_PRIMITIVE_CACHE_CAPACITY";
    if std::env::var_os(CAPACITY).is_none()
        && std::env::var_os("DNNL_PRIMITIVE_CACHE_CAPACITY").is_none()
    {
        // SAFETY: as for the variables of devices below; oneDNN reads this one at its first matmul.
        unsafe { std::env::set_var(CAPACITY, "512") };
    }
}

fn set_device_environment(options: &RuntimeOptions) {
    if options.device == "cpu" {
        return;
    }
    for (name, value) in DEVICE_ENVIRONMENT {
        if std::env::var_os(name).is_none() {
            // SAFETY: `start` is called first in a process, before it has a second thread that could read the
            // environment; libraries loaded later see the value.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

fn read_table(device: tch::Device) -> Result<KernelTable> {
    let mut switches = verify()?;
    // On a GPU, too: the host adds losses and squares.
    switches.insert("flush_denormals".to_owned(), flushes_denormals());
    let on_cpu = device == tch::Device::Cpu;
    if on_cpu {
        switches.insert("f32_products_by_onednn".to_owned(), crate::product::by_onednn()?.into());
    }
    let variables = if on_cpu { &CPU_ENVIRONMENT[..] } else { &GPU_ENVIRONMENT[..] };
    let environment = variables
        .iter()
        .filter_map(|&name| Some((name.to_owned(), std::env::var(name).ok()?)))
        .collect();
    let operations = ops::choose(device)?;
    let of_cpu = |what: &CStr| if on_cpu { describe(what) } else { Ok(String::new()) };
    Ok(KernelTable {
        libtorch: libtorch_release()?,
        mkl: of_cpu(c"mkl")?,
        onednn: of_cpu(c"onednn")?,
        cpu: of_cpu(c"cpu")?,
        cpu_capability: of_cpu(c"cpu_capability")?,
        extensions: of_cpu(c"extensions")?,
        device: if device.is_cuda() { "cuda" } else { "cpu" }.to_owned(),
        architecture: crate::device::architecture(device)?,
        gpu: gpu_table(device, operations)?,
        mathematics: if on_cpu { crate::probe::digest()? } else { String::new() },
        operations: operations.name().to_owned(),
        compiler: match operations == ops::DEVICE {
            true => Queue::of(device)?.compiler().to_owned(),
            false => String::new(),
        },
        threads_per_micro_batch: THREADS_PER_MICRO_BATCH,
        switches,
        environment,
    })
}

/// Properties of a GPU, besides its architecture, that affect bits.
fn gpu_table(device: tch::Device, operations: ops::OpsTable) -> Result<BTreeMap<String, String>> {
    let mut table = crate::device::table(device)?;
    if operations == ops::DEVICE {
        let by = if ops::multiplies_wide(device)? { "libtorch" } else { "operands in f32" };
        table.insert("products of bf16 in f32".to_owned(), by.to_owned());
    }
    Ok(table)
}

/// The release that the loaded library reports; the headers only show what we were compiled against.
fn libtorch_release() -> Result<String> {
    let config = describe(c"config")?;
    let stated = config.split("TORCH_VERSION=").nth(1).and_then(|rest| rest.split(',').next());
    stated.map_or_else(compiled_against, |text| Ok(text.trim().to_owned()))
}

/// Vendor, family and model of the processor and the instruction set of libtorch's kernels on it, for the log of where
/// a run was.
pub fn processor() -> Result<String> {
    Ok(format!("{}, {}", describe(c"cpu")?, describe(c"cpu_capability")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_onednn_reads_under_two_names_is_known_by_both() {
        let of = |prefix| CPU_ENVIRONMENT.iter().filter_map(move |name| name.strip_prefix(prefix));
        assert_eq!(of("ONEDNN_").count(), 3);
        assert!(of("ONEDNN_").eq(of("DNNL_")));
    }

    #[test]
    fn choices_between_kernels_are_in_the_table() {
        assert!(ops::CHOICES.iter().all(|choice| GPU_ENVIRONMENT.contains(&choice.variable)));
    }

    #[test]
    fn switches_are_in_force_on_every_thread() {
        let options = RuntimeOptions { device: "cpu".to_owned() };
        let table = start(&options).unwrap();
        assert_eq!(table, start(&options).unwrap());
        assert_eq!(table.threads_per_micro_batch, 1);
        assert_eq!(table.ops().unwrap().name(), table.operations);
        assert!(table.libtorch.starts_with("2."), "{}", table.libtorch);
        assert!(table.fingerprint().contains(&table.cpu_capability));
        std::thread::spawn(|| {
            enter_thread().unwrap();
            assert_eq!(crate::thread::threads().unwrap(), 1);
        })
        .join()
        .unwrap();
        let other = RuntimeOptions { device: "cuda:1".to_owned() };
        assert!(matches!(start(&other), Err(Error::TooLate { .. })));
    }

    /// Queried in another way than ours.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn instructions_are_known_by_name() {
        let table = start(&RuntimeOptions { device: "cpu".to_owned() }).unwrap();
        let listed = |name: &str| table.extensions.split(' ').any(|one| one == name);
        assert_eq!(listed("fma"), is_x86_feature_detected!("fma"));
        assert_eq!(listed("avx2"), is_x86_feature_detected!("avx2"));
        assert_eq!(listed("avx512"), can_do("avx512"));
        assert_eq!(listed("avx512_vnni"), is_x86_feature_detected!("avx512vnni"));
        assert_eq!(listed("avx512_bf16"), is_x86_feature_detected!("avx512bf16"));
        assert_eq!(listed("avx512_fp16"), is_x86_feature_detected!("avx512fp16"));
        assert_eq!(listed("avx_vnni"), is_x86_feature_detected!("avxvnni"));
        let system = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = system.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
        for name in ["amx_bf16", "amx_int8", "amx_fp16"] {
            assert_eq!(listed(name), flags.split_whitespace().any(|flag| flag == name), "{name}");
        }
        assert!(table.fingerprint().contains(&format!("extensions={}", table.extensions)));
    }

    #[test]
    fn a_switch_that_was_turned_back_is_noticed() {
        start(&RuntimeOptions { device: "cpu".to_owned() }).unwrap();
        verify().unwrap();
        // Another test may verify at the same time, so this one only reads a switch that no other test uses.
        assert_eq!(switch(c"no such switch").unwrap(), -1);
        assert!(matches!(expect("tf32_cublas", 1, 0), Err(Error::NotInForce { .. })));
    }

    #[test]
    fn a_table_survives_text() {
        let table = start(&RuntimeOptions { device: "cpu".to_owned() }).unwrap();
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<KernelTable>(&text).unwrap(), table);
    }
}
