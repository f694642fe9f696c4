//! Devices, and how a batch gets there.
//!
//! We link the CPU half of libtorch only. The GPU half (`libtorch_cuda.so`, `libtorch_hip.so`) is opened at run time
//! when `--device cuda` asks for it (`half`), and then registers itself. Batches are copied to a GPU from pinned memory
//! on a separate stream; the computing stream waits for an event.
//!
//! Our own kernels (`device/`) are compiled for a GPU at first use, by its vendor's run-time compiler.
//!
//! Tests run the GPU code on a stand-in (`device/standin`); docs/proof.md lists the GPUs on which it ran.

#![expect(unsafe_code, reason = "opens libraries and hands memory, streams and events to C++")]

pub(crate) mod additions;
mod cpp_tokens;
#[cfg(test)]
pub(crate) mod emulated;
mod found;
mod half;
mod kept;
mod leave;
mod library;
mod own;
pub(crate) mod pieces;
pub(crate) mod queue;
mod stage;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use crate::shim::{guarded, number, said};
use crate::{Error, Result};
pub use found::{Gpu, Gpus, gpus, identity, memory, visible};
pub use leave::{HostCopier, HostCopies, PendingCopies};
pub(crate) use own::digest as kernels_digest;
pub use stage::{Staged, Stager, StagingBuffer, StagingRing};

unsafe extern "C" {
    fn shim_gpu_count(out: *mut c_int) -> c_int;
    fn shim_gpu_architecture(index: c_int) -> c_int;
    fn shim_gpu_table(index: c_int) -> c_int;
    fn shim_side_stream(index: c_int, out: *mut *mut c_void) -> c_int;
    fn shim_side_stream_free(side: *mut c_void);
    fn shim_side_handle(side: *mut c_void, out: *mut *mut c_void) -> c_int;
    fn shim_side_after(side: *mut c_void, event: *mut c_void) -> c_int;
    fn shim_mark(index: c_int, event: *mut *mut c_void) -> c_int;
    fn shim_mark_side(side: *mut c_void, event: *mut *mut c_void) -> c_int;
    fn shim_hold(index: c_int, event: *mut c_void) -> c_int;
    fn shim_enter_gpu(index: c_int) -> c_int;
    fn shim_upload(index: c_int, words: *const i64, count: i64, out: *mut *mut C_tensor) -> c_int;
    fn shim_workspace(out: *mut usize) -> c_int;
    fn shim_event_over(event: *mut c_void, out: *mut c_int) -> c_int;
    fn shim_event_wait(event: *mut c_void) -> c_int;
    fn shim_event_free(event: *mut c_void);
}

/// The device that `--device` names: `cpu`, `cuda` (same as `cuda:0`) or `cuda:1`. Opens its library if necessary.
pub fn open(name: &str) -> Result<Device> {
    let refuse = |reason: String| Error::NoDevice { device: name.to_owned(), reason };
    let index = match name.split_once(':') {
        None if name == "cpu" => return Ok(Device::Cpu),
        None if name == "cuda" => 0,
        Some(("cuda", index)) => index
            .parse::<u16>()
            .map_err(|_| refuse("a device's number is a small integer, as in cuda:1".to_owned()))?,
        _ => return Err(refuse("known devices are cpu, cuda and cuda:N".to_owned())),
    };
    half::open().map_err(&refuse)?;
    match count()? {
        count if i32::from(index) < count => Ok(Device::Cuda(usize::from(index))),
        0 => Err(refuse("its library is here, but the driver shows no device".to_owned())),
        count => Err(refuse(format!("this machine shows {count} of them, numbered from 0"))),
    }
}

/// Number of GPUs that the driver reports; 0 if the GPU half of libtorch is not open.
fn count() -> Result<i32> {
    // SAFETY: asks the registered implementation for a number; the out-pointer outlives the call.
    number("count the devices", |out| unsafe { shim_gpu_count(out) })
}

/// Architecture of a device for the kernel table; empty for a CPU, whose instruction set the table has already.
pub fn architecture(device: Device) -> Result<String> {
    let Device::Cuda(index) = device else { return Ok(String::new()) };
    // SAFETY: a plain number in.
    guarded("ask for the architecture", unsafe { shim_gpu_architecture(index as c_int) })?;
    Ok(said())
}

/// Properties of a device, besides its architecture, that affect bits, by name, for the kernel table: compute units,
/// memory, releases of driver, runtime and libraries. Unavailable ones are left out; empty for a CPU.
///
/// NCCL and RCCL are not included: they only move bytes and add nothing.
pub(crate) fn table(device: Device) -> Result<BTreeMap<String, String>> {
    let Device::Cuda(index) = device else { return Ok(BTreeMap::new()) };
    // SAFETY: a plain number in.
    guarded("ask what a GPU is", unsafe { shim_gpu_table(index as c_int) })?;
    let said = said();
    let pairs = said.lines().filter_map(|line| line.split_once('='));
    Ok(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

/// A stream of a GPU next to the computing one.
#[derive(Debug)]
pub(crate) struct SideStream {
    handle: *mut c_void,
    device: Device,
}

// SAFETY: a handle of libtorch, usable from any thread; it is not Sync, so one thread uses it at a time.
unsafe impl Send for SideStream {}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: made by `shim_side_stream`, freed once.
        unsafe { shim_side_stream_free(self.handle) }
    }
}

impl SideStream {
    /// A stream of GPU `index`, which [`open`] has opened.
    pub(crate) fn new(index: usize) -> Result<SideStream> {
        let (device, mut handle) = (Device::Cuda(index), ptr::null_mut());
        enter(device)?;
        // SAFETY: `handle` outlives the call, which fills it exactly if it succeeds.
        guarded("make a stream", unsafe { shim_side_stream(index as c_int, &raw mut handle) })?;
        Ok(SideStream { handle, device })
    }

    /// The stream's handle for the vendor's own libraries.
    pub(crate) fn raw(&self) -> Result<*mut c_void> {
        let mut raw = ptr::null_mut();
        // SAFETY: the stream is alive and the out-pointer outlives the call.
        guarded("ask for a stream", unsafe { shim_side_handle(self.handle, &raw mut raw) })?;
        Ok(raw)
    }

    /// Makes everything queued from here on wait for the event.
    pub(crate) fn after(&self, mark: &Event) -> Result<()> {
        enter(self.device)?;
        // SAFETY: both handles are alive; the shim only queues a wait.
        guarded("make a stream wait", unsafe { shim_side_after(self.handle, mark.handle) })
    }

    /// Records an event after everything queued so far.
    pub(crate) fn mark(&self) -> Result<Event> {
        enter(self.device)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the stream is alive; `handle` outlives the call, which fills it exactly if it succeeds.
        guarded("mark a stream", unsafe { shim_mark_side(self.handle, &raw mut handle) })?;
        Ok(Event { handle, device: self.device })
    }
}

/// Records an event after everything that the calling thread has queued on `device`; `None` on a CPU, which works
/// synchronously.
pub(crate) fn mark(device: Device) -> Result<Option<Event>> {
    let Device::Cuda(index) = device else { return Ok(None) };
    enter(device)?;
    let mut handle = ptr::null_mut();
    // SAFETY: `handle` outlives the call, which fills it exactly if it succeeds.
    guarded("mark a stream", unsafe { shim_mark(index as c_int, &raw mut handle) })?;
    Ok(Some(Event { handle, device }))
}

/// Selects `device`, and creates its context, for the calling thread's calls of the vendor's own libraries. Every
/// thread that loads, launches, sends, or uses a stream or event calls this first; repeated calls are cheap.
///
/// A thread that has not called it is at the first GPU. When such a thread uses another GPU, code that restores the
/// previous device, as libtorch's does around events, creates a context on the first: hundreds of megabytes on another
/// rank's GPU.
pub(crate) fn enter(device: Device) -> Result<()> {
    // Only this function changes it: what libtorch's guards change they restore.
    thread_local!(static ENTERED: Cell<Option<usize>> = const { Cell::new(None) });
    let Device::Cuda(index) = device else { return Ok(()) };
    if ENTERED.get() != Some(index) {
        // SAFETY: a plain number in, this thread's own setting touched, no exception out.
        guarded("choose a device", unsafe { shim_enter_gpu(index as c_int) })?;
        ENTERED.set(Some(index));
    }
    Ok(())
}

/// Removes the variable for the matmul workspace from the environment if its value equals libtorch's default.
///
/// libtorch (2.11) parses the variable with a regular expression before every matmul, which takes about 50 us of host
/// time, more than many matmuls take. The size is read with and without the variable, so that no bit can depend on the
/// removal.
///
/// # Errors
/// If libtorch cannot parse the variable.
pub(crate) fn settle_workspace(variable: &str) -> Result<()> {
    settle(variable, || {
        let mut bytes = 0;
        // SAFETY: the out-pointer outlives the call, which fills it exactly if it succeeds.
        guarded("ask for a workspace", unsafe { shim_workspace(&raw mut bytes) }).map(|()| bytes)
    })
}

/// Removes a variable from the environment if `ask` returns the same without it; 0 means unknown.
fn settle(variable: &str, ask: impl Fn() -> Result<usize>) -> Result<()> {
    let Some(value) = std::env::var_os(variable) else { return Ok(()) };
    let asked = ask()?;
    // SAFETY: as where it was set: at process start. Threads that a driver has started by now read other variables.
    unsafe { std::env::remove_var(variable) };
    if asked == 0 || ask()? != asked {
        // SAFETY: as above.
        unsafe { std::env::set_var(variable, value) };
    }
    Ok(())
}

/// Copies words to the memory of `device`, ordered before what the calling thread queues there; the host does not wait.
pub(crate) fn upload(device: Device, words: &[i64]) -> Result<Tensor> {
    let Device::Cuda(index) = device else {
        return Ok(Tensor::f_from_slice(words)?.f_to_device(device)?);
    };
    enter(device)?;
    let (mut tensor, count) = (ptr::null_mut(), words.len() as i64);
    // SAFETY: the call reads `count` words before it returns; the out-pointer outlives it and is filled exactly if it
    // succeeds.
    guarded("upload a table", unsafe {
        shim_upload(index as c_int, words.as_ptr(), count, &raw mut tensor)
    })?;
    // SAFETY: a new tensor with no other owner.
    Ok(unsafe { Tensor::from_ptr(tensor) })
}

/// Copies integers to the memory of `device`, ordered before what the calling thread queues there; the host does not
/// wait.
///
/// # Errors
/// If the device refuses or memory runs out.
pub fn integers(device: Device, numbers: &[i64]) -> Result<Tensor> {
    match numbers {
        [] => Ok(Tensor::f_empty([0], (tch::Kind::Int64, device))?),
        _ => upload(device, numbers),
    }
}

/// The same for f32.
///
/// # Errors
/// As [`integers`].
pub fn floats(device: Device, numbers: &[f32]) -> Result<Tensor> {
    let word = |pair: &[f32]| {
        let bits = |at: usize| pair.get(at).map_or(0, |number| i64::from(number.to_bits()));
        bits(0) | bits(1) << 32
    };
    let words: Vec<i64> = numbers.chunks(2).map(word).collect();
    let numbers = numbers.len() as i64;
    Ok(integers(device, &words)?.f_view_dtype(tch::Kind::Float)?.f_narrow(0, 0, numbers)?)
}

/// A position in the work of a stream.
#[derive(Debug)]
pub(crate) struct Event {
    handle: *mut c_void,
    /// The device of the stream.
    device: Device,
}

// SAFETY: a handle of libtorch, usable from any thread, owned by one value.
unsafe impl Send for Event {}
// SAFETY: it was recorded before this value was made. Waiting for it and querying it do not modify it, and vendors
// allow both from any number of threads.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // If this fails, the event is freed from whichever device this thread is at.
        let _ = enter(self.device);
        // SAFETY: made by a function of the shim, freed once.
        unsafe { shim_event_free(self.handle) }
    }
}

impl Event {
    /// Whether the device has reached it.
    pub(crate) fn is_over(&self) -> Result<bool> {
        enter(self.device)?;
        // SAFETY: the event is alive and the out-pointer outlives the call.
        let over = |out| unsafe { shim_event_over(self.handle, out) };
        Ok(number("look at an event", over)? != 0)
    }

    /// Makes what the calling thread queues on `device` from here on wait for the event. The host does not wait, and
    /// neither does a CPU, which has no events.
    pub(crate) fn order_after(&self, device: Device) -> Result<()> {
        let Device::Cuda(index) = device else { return Ok(()) };
        enter(device)?;
        // SAFETY: the event is alive; the shim only queues a wait.
        guarded("wait for an event", unsafe { shim_hold(index as c_int, self.handle) })
    }

    /// Blocks the calling thread until the device has reached the event.
    pub(crate) fn wait(&self) -> Result<()> {
        enter(self.device)?;
        // SAFETY: the event is alive.
        guarded("wait for an event", unsafe { shim_event_wait(self.handle) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_says_why() {
        use std::io::Write as _;

        for name in ["gpu", "cuda:x", "cuda:-1", "cpu:0", ""] {
            assert!(matches!(open(name), Err(Error::NoDevice { .. })), "{name}");
        }
        // With a usable GPU this opens it; otherwise the reason names what is missing, the library or the GPU.
        match open("cuda") {
            Ok(device) => {
                println!("a GPU is at hand: {}", architecture(device).unwrap());
                let stager = Stager::new(device).unwrap();
                let mut buffer = stager.buffers().take(0, 3).unwrap();
                buffer.parts_mut().unwrap().1.copy_from_slice(&[1, 2, 3]);
                let (_, words) = stager.send(&mut buffer, 3).unwrap().arrive().unwrap();
                assert_eq!(words.sum(tch::Kind::Int64).int64_value(&[]), 6);
            }
            Err(error) => {
                // Written past the test runner's capture, so that every log reports the skipped GPU test.
                writeln!(std::io::stderr(), "1 GPU test skipped: {error}").unwrap();
                let error = error.to_string();
                assert!(error.contains("libtorch") || error.contains("no device"), "{error}");
            }
        }
    }

    #[test]
    fn a_workspace_leaves_the_environment_only_where_its_size_stays() {
        const NAME: &str = "ZTRAIN_TEST_WORKSPACE";
        for (with, without, stays) in [(8, 8, false), (8, 4, true), (0, 0, true)] {
            // SAFETY: no other test reads or writes this variable.
            unsafe { std::env::set_var(NAME, ":4096:8") };
            let ask = || Ok(if std::env::var_os(NAME).is_some() { with } else { without });
            settle(NAME, ask).unwrap();
            assert_eq!(
                std::env::var_os(NAME).is_some(),
                stays,
                "{with} with it, {without} without"
            );
        }
        settle("ZTRAIN_TEST_NO_WORKSPACE", || panic!("there is nothing to ask for")).unwrap();
    }
}
