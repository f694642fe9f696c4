//! Transfers between ranks, each with a deadline.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::comm_stream::{Round, Ticket};
use super::comm_thread::CommThread;
use super::exchange_id::ExchangeId;
use super::peers::Peers;
use super::work::GlooTransfer;
use crate::Result;

/// One exchange: any number of transfers between ranks, each with a deadline.
///
/// Transfers between two ranks arrive in the order in which they were begun. Each belongs to a round: both ends give it
/// the same number, and each rank closes its rounds in ascending order. Over Gloo a transfer starts at once and rounds
/// mean nothing; over RCCL a round is queued as a whole when it is closed (see `comm_thread`).
///
/// Between devices waits block the computing stream of the calling thread, not the thread. A failure in the meantime is
/// returned by the next call here, by [`super::Group::check`], or before a rank sends to all
/// ([`super::Group::all_gather`]).
pub struct Exchange<'a> {
    peers: &'a Peers,
    operation: &'a str,
    id: ExchangeId,
    /// Where tensors live.
    device: Device,
    comm: Option<&'a CommThread>,
    /// Sends that may still be under way, oldest first.
    pub(super) sends: VecDeque<(u32, Transfer<'a>)>,
    /// How many sends were begun.
    begun: usize,
    /// Rounds to which transfers may still be added.
    open: BTreeMap<u64, Round>,
    /// Every round below this is closed.
    closed: u64,
}

/// A tensor on its way here.
pub struct Arrival<'a> {
    peers: &'a Peers,
    operation: &'a str,
    id: ExchangeId,
    from: u32,
    tensor: Tensor,
    device: Device,
    way: Option<Transfer<'a>>,
}

/// A transfer under way.
pub(super) enum Transfer<'a> {
    Plain(GlooTransfer),
    Issued(&'a CommThread, Arc<Ticket>),
}

impl<'a> Exchange<'a> {
    pub(super) fn new(
        peers: &'a Peers,
        operation: &'a str,
        id: ExchangeId,
        device: Device,
        comm: Option<&'a CommThread>,
    ) -> Self {
        let (sends, open) = (VecDeque::new(), BTreeMap::new());
        Exchange { peers, operation, id, device, comm, sends, begun: 0, open, closed: 0 }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> u32 {
        self.peers.rank()
    }

    /// Starts to send `tensor`, contiguous and on the group's device. It may be overwritten by work that is queued
    /// after [`Exchange::finish`] or after [`Exchange::left`] for it.
    pub fn send(&mut self, round: u64, to: u32, tensor: &Tensor) -> Result<()> {
        self.check_comm()?;
        if tensor.numel() == 0 {
            return Ok(());
        }
        assert!(tensor.is_contiguous() && tensor.device() == self.device, "sent as it lies there");
        let way = match self.comm {
            Some(comm) => Transfer::Issued(comm, self.round(round).send(to, tensor)),
            None => {
                // On a GPU this copies to host memory; on a CPU it is the tensor itself.
                let plain = tensor.f_to_device(Device::Cpu)?;
                let begun = self.peers.send(to, &plain, self.tag());
                let missing = |error| self.peers.missing(self.operation, self.id, to, &error);
                Transfer::Plain(begun.map_err(missing)?)
            }
        };
        self.sends.push_back((to, way));
        self.begun += 1;
        self.peers.count(to, tensor.numel() as u64 * tensor.kind().elt_size_in_bytes() as u64);
        Ok(())
    }

    /// How many sends were begun so far.
    pub fn begun(&self) -> usize {
        self.begun
    }

    /// Waits until the first `count` sends have left, and releases their memory. Their rounds must be closed. Between
    /// devices the computing stream waits instead, and the communication thread releases the memory.
    pub fn left(&mut self, count: usize) -> Result<()> {
        self.check_comm()?;
        while self.begun - self.sends.len() < count {
            let Some((to, way)) = self.sends.pop_front() else { break };
            wait(self.peers, self.operation, self.id, to, way, self.device)?;
        }
        Ok(())
    }

    /// Starts to receive `count` elements.
    pub fn receive(
        &mut self,
        round: u64,
        from: u32,
        kind: Kind,
        count: i64,
    ) -> Result<Arrival<'a>> {
        self.check_comm()?;
        let lies = if self.comm.is_some() { self.device } else { Device::Cpu };
        let tensor = Tensor::f_empty([count], (kind, lies))?;
        let way = match self.comm {
            _ if count == 0 => None,
            Some(comm) => Some(Transfer::Issued(comm, self.round(round).receive(from, &tensor))),
            None => {
                let begun = self.peers.receive(from, &tensor, self.tag());
                let missing = |error| self.peers.missing(self.operation, self.id, from, &error);
                Some(Transfer::Plain(begun.map_err(missing)?))
            }
        };
        let Exchange { peers, operation, id, device, .. } = *self;
        Ok(Arrival { peers, operation, id, from, tensor, device, way })
    }

    /// Declares the rounds up to this one complete: over RCCL they are queued now, in order.
    pub fn close(&mut self, round: u64) -> Result<()> {
        self.check_comm()?;
        self.closed = self.closed.max(round + 1);
        while let Some(first) = self.open.first_entry().filter(|first| *first.key() <= round) {
            let round = first.remove();
            if let Some(comm) = self.comm {
                comm.post(round, self.device)?;
            }
        }
        Ok(())
    }

    /// Waits until everything sent has left, as [`Exchange::left`] does.
    pub fn finish(mut self) -> Result<()> {
        self.close(u64::MAX - 1)?;
        self.left(self.begun)
    }

    /// Fails if the communication thread has failed.
    fn check_comm(&self) -> Result<()> {
        self.comm.map_or(Ok(()), CommThread::look)
    }

    fn round(&mut self, round: u64) -> &mut Round {
        assert!(round >= self.closed, "round {round} is closed");
        self.open.entry(round).or_insert_with(|| Round::new(self.operation, self.id))
    }

    fn tag(&self) -> c_int {
        self.id.tag()
    }
}

impl Arrival<'_> {
    /// The tensor on the group's device, once it has arrived. Between devices, what the calling thread queues from here
    /// on waits for it, and the host may read it. Its round must be closed.
    pub fn wait(self) -> Result<Tensor> {
        let Arrival { peers, operation, id, from, tensor, device, way } = self;
        way.map_or(Ok(()), |way| wait(peers, operation, id, from, way, device))?;
        Ok(tensor.f_to_device(device)?)
    }
}

fn wait(
    peers: &Peers,
    operation: &str,
    id: ExchangeId,
    peer: u32,
    way: Transfer<'_>,
    device: Device,
) -> Result<()> {
    match way {
        Transfer::Plain(work) => {
            work.wait(peers.timeout()).map_err(|error| peers.missing(operation, id, peer, &error))
        }
        Transfer::Issued(comm, ticket) => comm.wait(&ticket, device),
    }
}
