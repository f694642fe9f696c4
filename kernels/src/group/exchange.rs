//! Transfers between ranks, each with a deadline.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;

use tch::{Device, Kind, Tensor};

use super::ffi::{shim_recv, shim_send, shim_work_free, shim_work_wait};
use super::{Group, milliseconds};
use crate::Result;
use crate::runtime::guarded;

/// One exchange: any number of transfers between ranks, each with a deadline.
///
/// Transfers between two ranks arrive in the order in which they were begun.
pub struct Exchange<'a> {
    pub(super) group: &'a Group,
    pub(super) what: &'a str,
    pub(super) number: u64,
    /// What may not have left yet, oldest first.
    pub(super) sends: VecDeque<(u32, Work)>,
    /// How many sends were begun.
    pub(super) begun: usize,
}

/// A tensor on its way here.
pub struct Arrival<'a> {
    group: &'a Group,
    what: &'a str,
    number: u64,
    from: u32,
    tensor: Tensor,
    work: Option<Work>,
}

/// A transfer under way. The tensor is kept as long as the transfer; dropping it gives the transfer up.
#[derive(Debug)]
pub(super) struct Work(*mut c_void);

// SAFETY: what it holds are handles of transfers, which any thread may wait for or free.
unsafe impl Send for Work {}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: made by `shim_send` or `shim_recv`, freed once. Gloo then forgets the buffer under its lock.
        unsafe { shim_work_free(self.0) }
    }
}

impl<'a> Exchange<'a> {
    /// This rank, from 0.
    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// Starts to send `tensor`, contiguous and on CPU. It must not be written before [`Exchange::finish`].
    pub fn send(&mut self, to: u32, tensor: &Tensor) -> Result<()> {
        if tensor.numel() == 0 {
            return Ok(());
        }
        assert!(tensor.is_contiguous() && tensor.device() == Device::Cpu, "plain memory is sent");
        let mut work = ptr::null_mut();
        // SAFETY: the tensor is alive, and the work holds on to it; the out-pointer outlives the call.
        let answer = guarded("send", unsafe {
            shim_send(self.group.handle, tensor.as_ptr(), to as c_int, self.tag(), &raw mut work)
        });
        answer.map_err(|error| self.group.missing(self.what, self.number, to, &error))?;
        self.sends.push_back((to, Work(work)));
        self.begun += 1;
        self.group.count(to, tensor.numel() as u64 * tensor.kind().elt_size_in_bytes() as u64);
        Ok(())
    }

    /// How many sends were begun so far.
    pub fn begun(&self) -> usize {
        self.begun
    }

    /// Waits until the first `count` sends have left, and lets go of their memory.
    pub fn left(&mut self, count: usize) -> Result<()> {
        let Exchange { group, what, number, sends, begun } = self;
        while *begun - sends.len() < count {
            let Some((to, work)) = sends.pop_front() else { break };
            group.wait(what, *number, to, &work)?;
        }
        Ok(())
    }

    /// Starts to receive `count` elements.
    pub fn receive(&self, from: u32, kind: Kind, count: i64) -> Result<Arrival<'a>> {
        let tensor = Tensor::empty([count], (kind, Device::Cpu));
        let Exchange { group, what, number, .. } = *self;
        let mut work = None;
        if count > 0 {
            let mut raw = ptr::null_mut();
            // SAFETY: the tensor is alive, and the work holds on to it; the out-pointer outlives the call.
            let answer = guarded("receive", unsafe {
                shim_recv(group.handle, tensor.as_ptr(), from as c_int, self.tag(), &raw mut raw)
            });
            answer.map_err(|error| group.missing(what, number, from, &error))?;
            work = Some(Work(raw));
        }
        Ok(Arrival { group, what, number, from, tensor, work })
    }

    /// Waits until everything sent has left.
    pub fn finish(self) -> Result<()> {
        let Exchange { group, what, number, sends, begun: _ } = self;
        sends.iter().try_for_each(|(to, work)| group.wait(what, number, *to, work))
    }

    fn tag(&self) -> c_int {
        (self.number % (1 << 30)) as c_int
    }
}

impl Arrival<'_> {
    /// The tensor, once it is here.
    pub fn wait(self) -> Result<Tensor> {
        let Arrival { group, what, number, from, tensor, work } = self;
        work.map_or(Ok(()), |work| group.wait(what, number, from, &work))?;
        Ok(tensor)
    }
}

impl Group {
    fn wait(&self, what: &str, number: u64, peer: u32, work: &Work) -> Result<()> {
        // SAFETY: the work is alive.
        let answer = unsafe { shim_work_wait(work.0, milliseconds(self.timeout)) };
        guarded("wait for a rank", answer).map_err(|error| self.missing(what, number, peer, &error))
    }
}
