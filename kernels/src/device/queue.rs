//! Launches our own kernels, checking each argument against the kernel's parameters in its source.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

use super::library::Module;
use super::own::{SOURCES, on_gpu};
use crate::shim::symbol;
use crate::{Error, Result, layout, shapes};

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument<'a> {
    /// Contiguous memory that the kernel reads or writes.
    Memory(&'a Tensor),
    /// A null pointer, if the kernel allows it.
    Nothing,
    /// A count.
    Word(i64),
    /// A number.
    Float(f32),
}

impl<'a> From<&'a Tensor> for Argument<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Argument::Memory(tensor)
    }
}

impl From<i64> for Argument<'_> {
    fn from(count: i64) -> Self {
        Argument::Word(count)
    }
}

impl From<f32> for Argument<'_> {
    fn from(number: f32) -> Self {
        Argument::Float(number)
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Parameter {
    Memory(Kind),
    Word,
    Float,
}

/// A kernel's number, and its parameters.
type Signature = (usize, Vec<Parameter>);

/// The signatures of all kernels by name, parsed from the source.
fn signatures() -> &'static BTreeMap<&'static [u8], Signature> {
    static FOUND: OnceLock<BTreeMap<&'static [u8], Signature>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let texts = SOURCES.iter().filter_map(|(_, text)| text.to_str().ok());
        let found = texts.flat_map(|text| text.split("\nKERNEL(").skip(1)).filter_map(signature);
        let numbered = found.enumerate();
        numbered.map(|(at, (name, parameters))| (name.as_bytes(), (at, parameters))).collect()
    })
}

/// The most parameters of a kernel.
const MOST: usize = 32;

/// Parses what follows `KERNEL(`: its name, and the parameters after its limits.
fn signature(text: &'static str) -> Option<(&'static str, Vec<Parameter>)> {
    let (name, rest) = text.split_once(',')?;
    let list = rest.split_once("LIMIT(")?.1.split_once('(')?.1.split_once(')')?.0;
    let parameters = list.split(',').map(|one| {
        let (kind, pointer) = match one.split_once('*') {
            Some((kind, _)) => (kind, true),
            None => (one.trim().split(' ').next()?, false),
        };
        Some(match (kind.trim().trim_start_matches("const ").trim(), pointer) {
            ("f32", true) => Parameter::Memory(Kind::Float),
            ("f64", true) => Parameter::Memory(Kind::Double),
            ("bf16", true) => Parameter::Memory(Kind::BFloat16),
            ("u8", true) => Parameter::Memory(Kind::Uint8),
            ("u32" | "int", true) => Parameter::Memory(Kind::Int),
            // Tables consist of 64-bit words.
            (
                "u64" | "i64" | "Piece" | "Move" | "Product" | "Span" | "Unfinished" | "Addition",
                true,
            ) => Parameter::Memory(Kind::Int64),
            ("u32", false) => Parameter::Word,
            ("f32", false) => Parameter::Float,
            _ => return None,
        })
    });
    Some((name, parameters.collect::<Option<_>>()?))
}

/// An argument in the driver's form, which takes its address.
#[derive(Clone, Copy)]
union Slot {
    address: *mut c_void,
    word: u32,
    float: f32,
}

thread_local! {
    /// The GPU of this thread's last queue, and its kernels.
    static LAST: Cell<Option<(usize, &'static Module)>> = const { Cell::new(None) };
}

/// The kernels of a device, and the stream on which the calling thread computes there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queue {
    /// `None` where tensors have no numbers: launches are checked, and do nothing.
    module: Option<&'static Module>,
    device: Device,
    stream: *mut c_void,
}

impl Queue {
    /// For a stream of the stand-in driver.
    #[cfg(test)]
    pub(super) fn new(module: &'static Module, device: Device, stream: *mut c_void) -> Queue {
        Queue { module: Some(module), device, stream }
    }

    /// The queue of a GPU, or why the kernels are unavailable.
    pub(crate) fn of(device: Device) -> Result<Queue> {
        if device == shapes::DEVICE && shapes::queues(device) {
            return Ok(Queue { module: None, device, stream: std::ptr::null_mut() });
        }
        let refuse = |reason| Error::NoDevice { device: format!("{device:?}"), reason };
        let Device::Cuda(index) = device else { return Err(refuse("it is no GPU".to_owned())) };
        super::enter(device)?;
        let module = match LAST.get() {
            Some((last, module)) if last == index => module,
            _ => on_gpu(index).map_err(refuse)?,
        };
        LAST.set(Some((index, module)));
        Ok(Queue { module: Some(module), device, stream: current_stream(index)? })
    }

    /// Name and release of the compiler that made the kernels.
    pub(crate) fn compiler(&self) -> &str {
        self.module.map_or("", |module| &module.compiler)
    }

    /// Architecture of the device, as its runtime library reports it; empty if it does not.
    pub(crate) fn architecture(&self) -> &str {
        self.module.map_or("", |module| &module.architecture)
    }

    /// Whether launches do something: not where tensors have no numbers.
    pub(crate) fn launches(&self) -> bool {
        self.module.is_some()
    }

    /// The device.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Queues `kernel` for so many blocks of 256 threads; launches nothing for 0 blocks.
    ///
    /// The caller must pass sizes with which the kernel stays within its arguments; the kernel's source states them.
    pub(crate) fn launch(&self, kernel: &CStr, blocks: i64, arguments: &[Argument]) -> Result<()> {
        let refuse = |reason: String| Error::Foreign {
            call: "launch a kernel",
            reason: format!("{}: {reason}", kernel.to_string_lossy()),
        };
        let (number, parameters) = signatures()
            .get(kernel.to_bytes())
            .ok_or_else(|| refuse("there is none".to_owned()))?;
        if parameters.len() != arguments.len() || arguments.len() > MOST {
            return Err(refuse(format!("{} arguments", arguments.len())));
        }
        if blocks == 0 {
            return Ok(());
        }
        let mut slots = [Slot { address: std::ptr::null_mut() }; MOST];
        for (index, (argument, parameter)) in arguments.iter().zip(parameters).enumerate() {
            slots[index] = match (*argument, *parameter) {
                (Argument::Memory(tensor), Parameter::Memory(kind)) => {
                    layout::address(tensor, kind, self.device).map(|address| Slot { address })
                }
                (Argument::Nothing, Parameter::Memory(_)) => Some(slots[index]),
                (Argument::Word(count), Parameter::Word) => {
                    u32::try_from(count).ok().map(|word| Slot { word })
                }
                (Argument::Float(float), Parameter::Float) => Some(Slot { float }),
                _ => None,
            }
            .ok_or_else(|| refuse(format!("argument {index}: {argument:?}")))?;
        }
        let blocks = u32::try_from(blocks).map_err(|_| refuse(format!("{blocks} blocks")))?;
        let Some(module) = self.module else {
            shapes::launched();
            return Ok(());
        };
        let mut places = slots.each_mut().map(|slot| (&raw mut *slot).cast());
        // SAFETY: types and number of the arguments match the source, which was compiled into this module. Memory is on
        // the device and of this stream: libtorch reuses it only for work that is queued later. The kernel stays within
        // it if the sizes are right, which the caller ensures.
        unsafe { module.launch((*number, kernel), [blocks, 256], &mut places, self.stream) }
    }

    /// The same with unchecked words: addresses of device memory, counts, bits of numbers.
    #[cfg(test)]
    pub(super) fn launch_words(&self, kernel: &CStr, blocks: u32, words: &mut [u64]) -> Result<()> {
        let Some(module) = self.module else { return Ok(()) };
        let number = signatures().get(kernel.to_bytes()).map_or(usize::MAX, |(number, _)| *number);
        let mut places: Vec<*mut c_void> =
            words.iter_mut().map(|word| (&raw mut *word).cast()).collect();
        // SAFETY: the words are those of a tape that the emulator has played under a sanitizer.
        unsafe { module.launch((number, kernel), [blocks, 256], &mut places, self.stream) }
    }

    /// Copies words to the device through pinned memory; the host does not wait.
    pub(crate) fn upload(&self, words: &[i64]) -> Result<Tensor> {
        super::upload(self.device, words)
    }

    /// Uninitialized memory on the device.
    pub(crate) fn room(&self, shape: &[i64], kind: Kind) -> Result<Tensor> {
        layout::room(shape, kind, self.device)
    }
}

/// The stream on which the calling thread computes, as the driver's handle.
fn current_stream(index: usize) -> Result<*mut c_void> {
    type Ask = unsafe extern "C" fn(i32, *mut *mut c_void) -> c_int;
    let refuse =
        |reason: &str| Error::Foreign { call: "ask for a stream", reason: reason.to_owned() };
    // Looked up once: a search through all libraries takes longer than a launch, and each launch needs the stream.
    static FOUND: OnceLock<Option<Ask>> = OnceLock::new();
    let search = || {
        // The GPU half of libtorch was opened before any device existed.
        let found = symbol(c"aoti_torch_get_current_cuda_stream");
        // SAFETY: its type in libtorch's `shim.h`; null is `None`.
        unsafe { std::mem::transmute::<*mut c_void, Option<Ask>>(found) }
    };
    let ask = FOUND.get_or_init(search).ok_or_else(|| refuse("libtorch does not tell"))?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: the out-pointer outlives the call.
    match unsafe { ask(index as i32, &raw mut stream) } {
        0 => Ok(stream),
        _ => Err(refuse("libtorch refuses")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::library::FOUND;

    /// The emulator's list and the parser find the same kernels in the source.
    #[test]
    fn every_kernel_has_a_signature() {
        let texts = SOURCES.iter().map(|(_, text)| text.to_str().unwrap());
        let written: usize = texts.map(|text| text.matches("\nKERNEL(").count()).sum();
        assert_eq!(signatures().len(), written);
        assert!(signatures().values().all(|(number, all)| *number < FOUND && all.len() <= MOST));
        let parameters = |name: &str| &signatures()[name.as_bytes()].1;
        assert_eq!(
            parameters("scale_rows_bf16")[..],
            [
                Parameter::Memory(Kind::BFloat16),
                Parameter::Memory(Kind::Float),
                Parameter::Memory(Kind::BFloat16),
                Parameter::Float,
                Parameter::Word
            ]
        );
        assert_eq!(parameters("router_f32")[0], Parameter::Memory(Kind::Float));
    }
}
