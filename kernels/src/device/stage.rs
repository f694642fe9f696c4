//! Batches on their way to a device: prefetcher threads assemble them in a ring of buffers, and each buffer is sent
//! with one copy.
//!
//! ```text
//! readers: take a buffer, write it --(in step order)--> send: one copy on a side stream, two conversions, an event
//!     ^                                                   |                          |
//!     +-- the event has passed and the host is done with  +        the computing stream waits for the event
//!         the buffer: it is free
//! ```
//!
//! A buffer has 8-bit flags and, from the next multiple of 64 bytes on, 32-bit words: half the bytes of what a model
//! reads. Only these travel; the device converts them to f32 and 64-bit words once per batch.
//!
//! For a GPU a buffer is pinned memory, registered at first use and kept. The host may read it at any time, even while
//! it is copied. When dropped it returns to its ring, and it is reused after the copy has ended; writing it earlier
//! waits for the copy. There are as many buffers as live batches: if none is free but a dropped one is still being
//! copied, `take` waits for that copy; otherwise it allocates a new one. The host waits for nothing but such a copy,
//! which depends on no other thread, so this cannot deadlock.
//!
//! The other direction needs no event: `record_stream` keeps the memory on the device from being reused before the
//! computing stream is done with it.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::kept::PerGpu;
use super::{Event, SideStream, enter};
use crate::shim::guarded;
use crate::thread;
use crate::{Error, Result};

unsafe extern "C" {
    fn shim_pinned(index: c_int, bytes: i64, out: *mut *mut C_tensor) -> c_int;
    fn shim_stage(
        side: *mut c_void,
        memory: *const C_tensor,
        counts: *const i64,
        out: *mut *mut C_tensor,
        event: *mut *mut c_void,
    ) -> c_int;
    fn shim_await(event: *mut c_void, tensor: *const C_tensor) -> c_int;
}

/// Alignment of the words after the flags: a multiple of a CPU cache line and of any load of a device. The shim has it,
/// too.
const ALIGNED: usize = 64;

/// A ring of buffers that feeds one device. A clone is the same ring; any thread may take from it.
#[derive(Clone, Debug)]
pub struct StagingRing(Arc<Ring>);

#[derive(Debug)]
struct Ring {
    device: Device,
    waiting: Mutex<FreeBuffers>,
}

/// Memory of buffers that were dropped.
#[derive(Debug, Default)]
struct FreeBuffers {
    free: Vec<HostBytes>,
    /// Memory that copies may still be reading, in the order in which it was dropped.
    leaving: VecDeque<HostBytes>,
}

/// Bytes of host memory.
#[derive(Debug)]
struct HostBytes {
    /// Owns the bytes; contiguous, without another owner.
    tensor: Tensor,
    place: *mut u8,
    bytes: usize,
    /// Copies from it that may be under way.
    copies: Vec<Arc<Event>>,
    /// Set if a copy may be under way whose end is unknown.
    lost: bool,
}

// SAFETY: it owns its bytes, which any thread may free.
unsafe impl Send for HostBytes {}
// SAFETY: shared references allow no writes, neither to the bytes nor to the tensor.
unsafe impl Sync for HostBytes {}

/// Flags and words, written in place; returns to its ring when dropped.
#[derive(Debug)]
pub struct StagingBuffer {
    memory: Option<HostBytes>,
    flags: usize,
    words: usize,
    ring: Arc<Ring>,
}

/// Offset of the words after so many flags.
fn padded(flags: usize) -> usize {
    flags.next_multiple_of(ALIGNED)
}

impl HostBytes {
    fn new(device: Device, bytes: usize) -> Result<HostBytes> {
        let tensor = match device {
            Device::Cuda(index) => {
                let mut tensor = ptr::null_mut();
                // SAFETY: plain numbers in; the out-pointer outlives the call, which fills it exactly if it succeeds.
                guarded("pin memory", unsafe {
                    shim_pinned(index as c_int, bytes as i64, &raw mut tensor)
                })?;
                // SAFETY: a new tensor with no other owner.
                unsafe { Tensor::from_ptr(tensor) }
            }
            _ => Tensor::f_zeros([bytes as i64], (Kind::Uint8, Device::Cpu))?,
        };
        let place = tensor.data_ptr().cast();
        Ok(HostBytes { tensor, place, bytes, copies: Vec::new(), lost: false })
    }

    /// So many flags, and the words after them.
    fn parts(&self, flags: usize, words: usize) -> (&[u8], &[i32]) {
        if self.bytes == 0 {
            return (&[], &[]);
        }
        // SAFETY: the buffer is large enough for both; libtorch aligns it to 64 bytes, and it was zeroed when
        // allocated. It is written only through `parts_mut`, which borrows it exclusively; a device only reads it.
        unsafe {
            let behind = self.place.add(padded(flags)).cast::<i32>();
            (slice::from_raw_parts(self.place, flags), slice::from_raw_parts(behind, words))
        }
    }

    /// The same for writing: waits until no copy reads them.
    fn parts_mut(&mut self, flags: usize, words: usize) -> Result<(&mut [u8], &mut [i32])> {
        self.wait()?;
        if self.bytes == 0 {
            return Ok((&mut [], &mut []));
        }
        // SAFETY: as above; this is the only reference, and no device reads them any more. The two do not overlap.
        Ok(unsafe {
            let behind = self.place.add(padded(flags)).cast::<i32>();
            (slice::from_raw_parts_mut(self.place, flags), slice::from_raw_parts_mut(behind, words))
        })
    }

    /// Whether no copy reads it any more.
    fn is_free(&self) -> Result<bool> {
        for copy in &self.copies {
            if !copy.is_over()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Blocks the calling thread until no copy reads it any more.
    fn wait(&mut self) -> Result<()> {
        if self.lost {
            let reason = "an earlier copy from this buffer failed".to_owned();
            return Err(Error::Foreign { call: "write a buffer", reason });
        }
        while let Some(copy) = self.copies.last() {
            copy.wait()?;
            self.copies.pop();
        }
        Ok(())
    }
}

impl Ring {
    fn waiting(&self) -> MutexGuard<'_, FreeBuffers> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory that is not being copied, waiting for the end of a copy if necessary; `None` if there is none.
    fn next(&self) -> Result<Option<HostBytes>> {
        let next = {
            let mut waiting = self.waiting();
            while let Some(first) = waiting.leaving.front() {
                if !first.is_free()? {
                    break;
                }
                let first = waiting
                    .leaving
                    .pop_front()
                    .map(|memory| HostBytes { copies: Vec::new(), ..memory });
                waiting.free.extend(first);
            }
            waiting.free.pop().or_else(|| waiting.leaving.pop_front())
        };
        // Outside of the lock, so that no other thread waits for this copy.
        next.map(|mut memory| memory.wait().map(|()| memory)).transpose()
    }
}

impl StagingRing {
    /// An empty ring for `device`, which [`super::open`] has opened.
    pub fn new(device: Device) -> StagingRing {
        StagingRing(Arc::new(Ring { device, waiting: Mutex::default() }))
    }

    /// A buffer of so many flags and words with arbitrary content: the caller writes all of them.
    pub fn take(&self, flags: usize, words: usize) -> Result<StagingBuffer> {
        let bytes = padded(flags) + words * size_of::<i32>();
        enter(self.0.device)?;
        // A buffer that is too small is replaced: batches grow between phases.
        let memory = match self.0.next()?.filter(|memory| memory.bytes >= bytes) {
            Some(memory) => memory,
            None => HostBytes::new(self.0.device, bytes)?,
        };
        Ok(StagingBuffer { memory: Some(memory), flags, words, ring: Arc::clone(&self.0) })
    }
}

impl StagingBuffer {
    /// Its flags and words.
    pub fn parts(&self) -> (&[u8], &[i32]) {
        self.memory.as_ref().map_or((&[], &[]), |memory| memory.parts(self.flags, self.words))
    }

    /// The same for writing; waits until no copy reads them.
    pub fn parts_mut(&mut self) -> Result<(&mut [u8], &mut [i32])> {
        let (flags, words) = (self.flags, self.words);
        self.memory.as_mut().map_or(Ok((&mut [], &mut [])), |memory| memory.parts_mut(flags, words))
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        // If the end of a copy is unknown, the memory is returned to libtorch, which keeps it until then.
        let Some(memory) = self.memory.take().filter(|memory| !memory.lost) else { return };
        let mut waiting = self.ring.waiting();
        match memory.copies.is_empty() {
            true => waiting.free.push(memory),
            false => waiting.leaving.push_back(memory),
        }
    }
}

/// Copies buffers to a device; on a GPU in parallel with the computation. Any thread may send.
#[derive(Debug)]
pub struct Stager {
    buffers: StagingRing,
    side: Option<Mutex<SideStream>>,
}

/// Flags and words under way; [`Staged::arrive`] passes them to the computation.
#[derive(Debug)]
pub struct Staged {
    flags: Tensor,
    words: Tensor,
    arrival: Option<Arc<Event>>,
}

impl Stager {
    /// A stager for `device`, which [`super::open`] has opened, with its own ring.
    pub fn new(device: Device) -> Result<Stager> {
        let side = match device {
            Device::Cuda(index) => Some(Mutex::new(SideStream::new(index)?)),
            _ => None,
        };
        Ok(Stager { buffers: StagingRing::new(device), side })
    }

    /// The shared stager of `device` for occasional batches: held-out text, a micro-batch that is recomputed. One per
    /// GPU.
    pub fn kept(device: Device) -> Result<Arc<Stager>> {
        static KEPT: PerGpu<Stager> = PerGpu::new();
        KEPT.of(device, Stager::new)
    }

    /// The ring from which its buffers are taken.
    pub fn buffers(&self) -> &StagingRing {
        &self.buffers
    }

    /// Starts copying the flags and the first `words` words of `buffer`, which is from this stager's ring; on a CPU it
    /// completes at once. The host may continue to read the buffer, and may drop it at any time.
    pub fn send(&self, buffer: &mut StagingBuffer, words: usize) -> Result<Staged> {
        let refuse =
            |reason: &str| Error::Foreign { call: "send a buffer", reason: reason.to_owned() };
        if !Arc::ptr_eq(&buffer.ring, &self.buffers.0) {
            return Err(refuse("it is of another ring"));
        }
        let (flags, there) = (buffer.flags, buffer.words);
        let Some(memory) = buffer.memory.as_mut().filter(|_| words <= there) else {
            return Err(refuse("it has not so many words"));
        };
        // On a CPU libtorch converts on the calling thread alone, like everything else.
        thread::enter_thread()?;
        let device = self.buffers.0.device;
        enter(device)?;
        let side =
            self.side.as_ref().map(|side| side.lock().unwrap_or_else(PoisonError::into_inner));
        let (counts, mut event) = ([flags as i64, words as i64], ptr::null_mut());
        let mut wide = [ptr::null_mut(); 2];
        // SAFETY: stream and tensor are alive, and the tensor is large enough for both; the out-pointers outlive the
        // call and are filled exactly if it succeeds. The memory is not written before the event, as `copies` marks it
        // as being read. If the call fails, the end of the copy is unknown.
        let sent = guarded("send a buffer", unsafe {
            shim_stage(
                side.as_ref().map_or(ptr::null_mut(), |side| side.handle),
                memory.tensor.as_ptr(),
                counts.as_ptr(),
                wide.as_mut_ptr(),
                &raw mut event,
            )
        });
        if let Err(error) = sent {
            memory.lost = side.is_some();
            return Err(error);
        }
        let arrival = (!event.is_null()).then(|| Arc::new(Event { handle: event, device }));
        memory.copies.extend(arrival.clone());
        // SAFETY: new tensors with no other owner.
        let [flags, words] = wide.map(|tensor| unsafe { Tensor::from_ptr(tensor) });
        Ok(Staged { flags, words, arrival })
    }
}

impl Staged {
    /// An alias for another thread.
    pub fn alias(&self) -> Result<Staged> {
        let alias = |tensor: &Tensor| tensor.f_narrow(0, 0, tensor.numel() as i64);
        let (flags, words) = (alias(&self.flags)?, alias(&self.words)?);
        Ok(Staged { flags, words, arrival: self.arrival.clone() })
    }

    /// The flags as an f32 tensor and the words as an i64 tensor, safe to use in this thread's current stream.
    pub fn arrive(self) -> Result<(Tensor, Tensor)> {
        if let Some(event) = &self.arrival {
            enter(event.device)?;
            // SAFETY: both handles are alive; the shim only queues a wait. Both tensors are in one allocation.
            guarded("wait for a copy", unsafe { shim_await(event.handle, self.words.as_ptr()) })?;
        }
        Ok((self.flags, self.words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of buffers allocated, if all have been returned.
    fn made(stager: &Stager) -> usize {
        stager.buffers.0.waiting().free.len()
    }

    /// A buffer with these flags and words.
    fn written(stager: &Stager, flags: &[u8], words: &[i32]) -> StagingBuffer {
        let mut buffer = stager.buffers().take(flags.len(), words.len()).unwrap();
        let (own_flags, own_words) = buffer.parts_mut().unwrap();
        own_flags.copy_from_slice(flags);
        own_words.copy_from_slice(words);
        buffer
    }

    #[test]
    fn what_is_sent_is_wider_and_a_buffer_comes_back_when_it_is_dropped() {
        let stager = Stager::new(Device::Cpu).unwrap();
        let mut buffer = written(&stager, &[1, 0, 1], &[7, -8, i32::MAX, 9]);
        let place = buffer.parts().1.as_ptr();
        assert_eq!(place.addr() % ALIGNED, 0);
        let staged = stager.send(&mut buffer, 3).unwrap();
        let (flags, words) = staged.alias().unwrap().arrive().unwrap();
        assert_eq!(Vec::<f32>::try_from(&flags).unwrap(), [1.0, 0.0, 1.0]);
        assert_eq!(Vec::<i64>::try_from(&words).unwrap(), [7, -8, i64::from(i32::MAX)]);
        assert_eq!((flags.data_ptr().addr() % ALIGNED, words.data_ptr().addr() % ALIGNED), (0, 0));
        assert_eq!(
            buffer.parts(),
            (&[1, 0, 1][..], &[7, -8, i32::MAX, 9][..]),
            "the host reads on"
        );
        let other = written(&stager, &[1], &[1]);
        assert_ne!(other.parts().1.as_ptr(), place, "the host still has the first");
        drop(buffer);
        let again = written(&stager, &[0, 0], &[5]);
        assert_eq!(again.parts().1.as_ptr(), place);
        assert_eq!(
            Vec::<i64>::try_from(staged.arrive().unwrap().1).unwrap()[0],
            7,
            "what was sent stays"
        );
        drop((other, again));
        assert_eq!(made(&stager), 2);
    }

    #[test]
    fn nothing_is_sent_of_another_ring_or_past_an_end() {
        let (one, other) = (Stager::new(Device::Cpu).unwrap(), Stager::new(Device::Cpu).unwrap());
        let mut buffer = written(&one, &[], &[1, 2]);
        assert!(other.send(&mut buffer, 2).is_err());
        assert!(one.send(&mut buffer, 3).is_err());
        let (flags, words) = one.send(&mut buffer, 2).unwrap().arrive().unwrap();
        assert_eq!((flags.numel(), Vec::<i64>::try_from(&words).unwrap()), (0, vec![1, 2]));
        let mut nothing = written(&one, &[], &[]);
        assert_eq!(one.send(&mut nothing, 0).unwrap().arrive().unwrap().1.numel(), 0);
    }

    #[test]
    fn as_many_are_made_as_are_in_flight() {
        let stager = Stager::new(Device::Cpu).unwrap();
        for round in 0..100 {
            let words = vec![round; 1000 + 100 * (round as usize % 7)];
            let mut buffers: Vec<_> = (0..3).map(|_| written(&stager, &[1], &words)).collect();
            let sent: Vec<_> =
                buffers.iter_mut().map(|one| stager.send(one, 1000).unwrap()).collect();
            std::thread::spawn(move || {
                for one in sent {
                    assert_eq!(one.arrive().unwrap().1.min().int64_value(&[]), i64::from(round));
                }
                drop(buffers);
            })
            .join()
            .unwrap();
        }
        assert_eq!(made(&stager), 3);
    }
}
