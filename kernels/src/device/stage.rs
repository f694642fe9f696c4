//! Batches on their way to a device: a ring of buffers, which the threads of a prefetcher fill in place, and one copy out of
//! each.
//!
//! ```text
//! readers: take a buffer, fill it --(in step order)--> send: a copy on a side stream, an event behind it
//!     ^                                                   |                        |
//!     +------- the event has passed: the buffer is free --+     the computing stream waits for the event
//! ```
//!
//! For a GPU a buffer is pinned memory, registered when it is first needed and kept; on a CPU the tensor lies in the buffer
//! itself, which comes back when the last tensor over it is gone. There are as many buffers as a prefetcher has batches in
//! flight: where none is free and a copy is under way, its end is waited for; only else one more is made. The host waits for
//! nothing but such a copy, which waits for nobody, so no order of threads can hold another up for ever.
//!
//! The other way round no event is needed: `record_stream` keeps the copy's memory on the device from being used again before
//! the computing stream is done with it.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::{Event, SideStream};
use crate::runtime::guarded;
use crate::{Error, Result};

unsafe extern "C" {
    fn shim_adopt(
        data: *mut c_void,
        sizes: *const i64,
        dims: i64,
        kind: c_int,
        owner: *mut c_void,
        drop: extern "C" fn(*mut c_void),
        out: *mut *mut C_tensor,
    ) -> c_int;
    fn shim_pinned(index: c_int, words: i64, out: *mut *mut C_tensor) -> c_int;
    fn shim_stage(
        side: *mut c_void,
        pinned: *const C_tensor,
        words: i64,
        out: *mut *mut C_tensor,
        event: *mut *mut c_void,
    ) -> c_int;
    fn shim_await(event: *mut c_void, tensor: *const C_tensor) -> c_int;
}

/// The number of 64-bit integers among libtorch's scalar types.
const INT64: c_int = 4;

/// A ring of buffers from which one device is fed. A clone is the same ring; any thread may take from it.
#[derive(Clone, Debug)]
pub struct Buffers(Arc<Ring>);

#[derive(Debug)]
struct Ring {
    device: Device,
    waiting: Mutex<Waiting>,
}

/// Memory that nobody fills and no tensor lies in.
#[derive(Debug, Default)]
struct Waiting {
    free: Vec<Memory>,
    /// Copies under way, in the order in which they were begun, with what they read.
    leaving: VecDeque<(Arc<Event>, Memory)>,
}

#[derive(Debug)]
enum Memory {
    Plain(Vec<i64>),
    Pinned(Tensor),
}

/// Words of 64 bits, to be filled in place; unless it is sent it comes back to its ring when it is dropped.
#[derive(Debug)]
pub struct Buffer {
    memory: Option<Memory>,
    length: usize,
    ring: Arc<Ring>,
}

impl Memory {
    fn new(device: Device, words: usize) -> Result<Memory> {
        let Device::Cuda(index) = device else { return Ok(Memory::Plain(vec![0; words])) };
        let mut tensor = ptr::null_mut();
        // SAFETY: plain numbers in; the out-pointer outlives the call, which fills it exactly if it succeeds.
        guarded("pin memory", unsafe {
            shim_pinned(index as c_int, words as i64, &raw mut tensor)
        })?;
        // SAFETY: a new tensor that nobody else owns.
        Ok(Memory::Pinned(unsafe { Tensor::from_ptr(tensor) }))
    }

    fn words(&mut self) -> &mut [i64] {
        match self {
            Memory::Plain(words) => words,
            // SAFETY: a contiguous tensor of so many i64 in memory of the host, which only this value has; who reads it as a
            // device does has it in `Waiting::leaving`, where nobody asks for its words.
            Memory::Pinned(tensor) => unsafe {
                std::slice::from_raw_parts_mut(tensor.data_ptr().cast(), tensor.numel())
            },
        }
    }

    fn length(&self) -> usize {
        match self {
            Memory::Plain(words) => words.len(),
            Memory::Pinned(tensor) => tensor.numel(),
        }
    }
}

impl Waiting {
    /// Memory out of which nothing is being copied, if there is any or will be.
    fn next(&mut self) -> Result<Option<Memory>> {
        while let Some((event, _)) = self.leaving.front() {
            if !event.is_over()? {
                if !self.free.is_empty() {
                    break;
                }
                event.wait()?;
            }
            let over = self.leaving.pop_front();
            self.free.extend(over.map(|(_, memory)| memory));
        }
        Ok(self.free.pop())
    }
}

impl Ring {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffers {
    /// An empty ring for `device`, which [`super::open`] has opened.
    pub fn new(device: Device) -> Buffers {
        Buffers(Arc::new(Ring { device, waiting: Mutex::default() }))
    }

    /// A buffer of `length` words, whatever they are: the caller writes every one.
    pub fn take(&self, length: usize) -> Result<Buffer> {
        let next = self.0.waiting().next()?;
        // One that is too small is made anew: batches grow where a phase says so.
        let memory = match next.filter(|memory| memory.length() >= length) {
            Some(memory) => memory,
            None => Memory::new(self.0.device, length)?,
        };
        Ok(Buffer { memory: Some(memory), length, ring: Arc::clone(&self.0) })
    }
}

impl Buffer {
    /// Its words.
    pub fn words(&mut self) -> &mut [i64] {
        let length = self.length;
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory.words()[..length])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.ring.waiting().free.push(memory);
        }
    }
}

/// Moves filled buffers to a device; on a GPU beside the computation.
#[derive(Debug)]
pub struct Stager {
    buffers: Buffers,
    side: Option<SideStream>,
}

/// Words on their way; [`Staged::arrive`] gives them to the computation.
#[derive(Debug)]
pub struct Staged {
    words: Tensor,
    arrival: Option<Arc<Event>>,
}

impl Stager {
    /// A stager for `device`, which [`super::open`] has opened, with a ring of its own.
    pub fn new(device: Device) -> Result<Stager> {
        let side = match device {
            Device::Cuda(index) => Some(SideStream::new(index)?),
            _ => None,
        };
        Ok(Stager { buffers: Buffers::new(device), side })
    }

    /// Where buffers for it are taken.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Starts moving what `buffer`, of this stager's ring, holds; on a CPU nothing moves. The buffer comes back by itself.
    pub fn send(&self, mut buffer: Buffer) -> Result<Staged> {
        let Some(side) = &self.side else {
            return Ok(Staged { words: adopt(buffer)?, arrival: None });
        };
        let Some(Memory::Pinned(pinned)) = buffer.memory.take() else {
            let reason = "it is of another device's ring".to_owned();
            return Err(Error::Foreign { call: "send a buffer", reason });
        };
        let length = buffer.length as i64;
        let (mut words, mut event) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: stream and tensor are alive, which has at least so many words; both out-pointers outlive the call and are
        // filled exactly if it succeeds. Nobody writes the memory before the event: until then it is not handed out.
        // Where it fails nothing says until when a copy may read the memory: it is given up.
        guarded("send a buffer", unsafe {
            shim_stage(side.0, pinned.as_ptr(), length, &raw mut words, &raw mut event)
        })?;
        let arrival = Arc::new(Event(event));
        let leaving = (Arc::clone(&arrival), Memory::Pinned(pinned));
        self.buffers.0.waiting().leaving.push_back(leaving);
        // SAFETY: a new tensor that nobody else owns.
        Ok(Staged { words: unsafe { Tensor::from_ptr(words) }, arrival: Some(arrival) })
    }
}

impl Staged {
    /// Some of the words, as an alias that another thread may have.
    pub fn part(&self, first: i64, length: i64) -> Result<Staged> {
        let words = self.words.f_narrow(0, first, length)?;
        Ok(Staged { words, arrival: self.arrival.clone() })
    }

    /// The words as a tensor, i64, safe to use in the current stream of this thread.
    pub fn arrive(self) -> Result<Tensor> {
        if let Some(event) = &self.arrival {
            // SAFETY: both handles are alive; the shim only queues a wait.
            guarded("wait for a copy", unsafe { shim_await(event.0, self.words.as_ptr()) })?;
        }
        Ok(self.words)
    }
}

/// A CPU tensor that lies in `buffer`.
fn adopt(buffer: Buffer) -> Result<Tensor> {
    extern "C" fn release(owner: *mut c_void) {
        // SAFETY: `owner` came from `Box::into_raw` of this very type below, and libtorch calls this once, after the
        // last tensor over the buffer is gone.
        drop(unsafe { Box::from_raw(owner.cast::<Buffer>()) });
    }
    let mut owner = Box::new(buffer);
    let (place, sizes) = (owner.words().as_mut_ptr(), [owner.length as i64]);
    let (owner, mut tensor) = (Box::into_raw(owner), ptr::null_mut());
    // SAFETY: `place` points at as many i64 as `sizes` says and stays there until `release` runs: moving the box did not move
    // the memory. A buffer is Send, so any thread may free it. From here on the owner is the shim's, also where it fails.
    guarded("adopt a buffer", unsafe {
        shim_adopt(place.cast(), sizes.as_ptr(), 1, INT64, owner.cast(), release, &raw mut tensor)
    })?;
    // SAFETY: a new tensor that nobody else owns.
    Ok(unsafe { Tensor::from_ptr(tensor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many were made, where all have come back.
    fn made(stager: &Stager) -> usize {
        stager.buffers.0.waiting().free.len()
    }

    fn filled(stager: &Stager, words: &[i64]) -> Staged {
        let mut buffer = stager.buffers().take(words.len()).unwrap();
        buffer.words().copy_from_slice(words);
        stager.send(buffer).unwrap()
    }

    #[test]
    fn a_tensor_of_a_cpu_lies_in_the_buffer_which_comes_back() {
        let stager = Stager::new(Device::Cpu).unwrap();
        let mut buffer = stager.buffers().take(12).unwrap();
        let place = buffer.words().as_ptr();
        (0..12).zip(buffer.words()).for_each(|(value, word)| *word = value);
        let staged = stager.send(buffer).unwrap();
        let part = staged.part(4, 3).unwrap().arrive().unwrap();
        let whole = staged.arrive().unwrap();
        assert_eq!(whole.data_ptr().cast_const(), place.cast());
        drop(whole);
        assert_eq!(Vec::<i64>::try_from(&part).unwrap(), [4, 5, 6]);
        assert_ne!(filled(&stager, &[7]).words.data_ptr().cast_const(), place.cast());
        drop(part);
        let mut again = stager.buffers().take(5).unwrap();
        assert_eq!(again.words().as_ptr(), place, "the last view has given it back");
        drop(again);
        assert_eq!(made(&stager), 2);
    }

    #[test]
    fn as_many_are_made_as_are_in_flight() {
        let stager = Stager::new(Device::Cpu).unwrap();
        for round in 0..100 {
            let words = vec![round; 1000 + 100 * (round as usize % 7)];
            let staged: Vec<_> = (0..3).map(|_| filled(&stager, &words)).collect();
            std::thread::spawn(move || {
                for one in staged {
                    assert_eq!(one.arrive().unwrap().min().int64_value(&[]), round);
                }
            })
            .join()
            .unwrap();
        }
        assert_eq!(made(&stager), 3);
    }
}
