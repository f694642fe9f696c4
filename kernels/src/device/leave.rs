//! Copies of a device's tensors in host memory, made in parallel with the computation.
//!
//! ```text
//! computing stream:  ... | mark --------- the next step's passes --- order_after | writes the tensors ...
//! side stream:           +-> after --> copies into pinned memory --> event ----^
//! host:                                                                +--> Copies::wait: reads them
//! ```
//!
//! The copies wait for the work that the computing stream had when they were requested, and later writes of the tensors
//! wait for the copies: one event each way. The host waits on the thread that reads them. `record_stream` keeps the
//! memory of a tensor that is dropped meanwhile. Pinned memory comes from libtorch's allocator, which keeps it
//! registered and reuses it for later copies.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::kept::PerGpu;
use super::{Event, SideStream, mark};
use crate::Result;
use crate::shim::guarded;

unsafe extern "C" {
    fn shim_fetch(side: *mut c_void, from: *const C_tensor, out: *mut *mut C_tensor) -> c_int;
}

/// Makes copies of one device's tensors.
#[derive(Debug)]
pub struct HostCopier {
    side: Option<(usize, Mutex<SideStream>)>,
}

/// Copies under way: before the copied tensors are written again, call [`PendingCopies::order_after`].
#[derive(Debug, Default)]
pub struct PendingCopies(Mutex<Vec<Arc<Event>>>);

/// Copies in host memory, constant once they have arrived.
#[derive(Debug, Default)]
pub struct HostCopies {
    /// Contiguous, without another owner.
    tensors: Vec<Tensor>,
    landing: Option<Arc<Event>>,
}

impl HostCopier {
    /// For `device`, which [`super::open`] has opened.
    pub fn new(device: Device) -> Result<HostCopier> {
        let Device::Cuda(index) = device else { return Ok(HostCopier { side: None }) };
        Ok(HostCopier { side: Some((index, Mutex::new(SideStream::new(index)?))) })
    }

    /// The shared unloader of `device` for occasional copies: a state to save or replay. One per GPU.
    pub fn kept(device: Device) -> Result<Arc<HostCopier>> {
        static KEPT: PerGpu<HostCopier> = PerGpu::new();
        KEPT.of(device, HostCopier::new)
    }

    /// Copies tensors as they are after all work that the calling thread has queued, into plain or pinned host memory.
    /// On a CPU they are made at once.
    pub fn copies(&self, tensors: &[Tensor], departures: &PendingCopies) -> Result<HostCopies> {
        let Some((index, side)) = &self.side else {
            let copy = |tensor: &Tensor| -> Result<Tensor> {
                let mut copy = Tensor::f_empty(tensor.size(), (tensor.kind(), Device::Cpu))?;
                copy.f_copy_(tensor)?;
                Ok(copy)
            };
            let tensors = tensors.iter().map(copy).collect::<Result<_>>()?;
            return Ok(HostCopies { tensors, landing: None });
        };
        let side = side.lock().unwrap_or_else(PoisonError::into_inner);
        // Also enters the device, on whichever thread this is.
        if let Some(now) = mark(Device::Cuda(*index))? {
            side.after(&now)?;
        }
        let mut copies = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let mut copy = ptr::null_mut();
            // SAFETY: stream and tensor live; the out-pointer outlives the call and is filled exactly if it succeeds.
            guarded("copy to the host", unsafe {
                shim_fetch(side.handle, tensor.as_ptr(), &raw mut copy)
            })?;
            // SAFETY: a new tensor with no other owner.
            copies.push(unsafe { Tensor::from_ptr(copy) });
        }
        let event = Arc::new(side.mark()?);
        departures.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&event));
        Ok(HostCopies { tensors: copies, landing: Some(event) })
    }
}

impl PendingCopies {
    /// Makes what the calling thread queues on `device` from here on wait for the copies, so that it may write the
    /// tensors. The host does not wait.
    pub fn order_after(&self, device: Device) -> Result<()> {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.drain(..).try_for_each(|event| event.order_after(device))
    }
}

impl HostCopies {
    /// Blocks the calling thread until the copies have arrived.
    pub fn wait(&self) -> Result<()> {
        self.landing.as_ref().map_or(Ok(()), |event| event.wait())
    }

    /// Waits, and returns the bytes of each tensor's elements, the last dimension fastest.
    pub fn bytes(&self) -> Result<Vec<&[u8]>> {
        self.wait()?;
        let bytes = |tensor: &Tensor| -> &[u8] {
            let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
            if bytes == 0 {
                return &[];
            }
            // SAFETY: a contiguous tensor of so many bytes in host memory that lives as long as this value is borrowed;
            // it has no other owner, and the copy into it is complete.
            unsafe { slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), bytes) }
        };
        Ok(self.tensors.iter().map(bytes).collect())
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn copies_on_a_cpu_are_there_at_once_and_share_nothing() {
        let (unloader, departures) =
            (HostCopier::new(Device::Cpu).unwrap(), PendingCopies::default());
        let whole = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
        let mut tensors = [whole.shallow_clone(), whole.tr()];
        let copies = unloader.copies(&tensors, &departures).unwrap();
        departures.order_after(Device::Cpu).unwrap();
        let _ = tensors[0].fill_(9.0);
        let bytes = |values: [f32; 6]| values.map(f32::to_le_bytes).concat();
        let wanted = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]];
        assert_eq!(copies.bytes().unwrap(), wanted.map(bytes));
        let none = unloader.copies(&[whole.narrow(0, 0, 0)], &departures).unwrap();
        assert_eq!(none.bytes().unwrap(), [Vec::<u8>::new()]);
    }
}
