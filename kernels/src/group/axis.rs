//! One axis of a rank mesh, with its own sequence of exchanges.
//!
//! Along each axis of the mesh a rank exchanges tensors with the other ranks of its line: gradients along one axis,
//! what a layer needs along another. All ranks of a line begin its exchanges in the same order, each from one thread at
//! a time. Axes are not ordered among each other: one thread of a rank may wait in an exchange of one axis while
//! another thread is anywhere in another axis.
//!
//! Why this cannot deadlock:
//! - A transfer is identified by its two ends and its tag, which contains the axis and the number of the exchange on
//!   it. No two transfers under way share this identity, so transfers cannot be confused, whichever arrives first.
//! - Gloo sends a tensor once the receiver has posted its buffer. A send that waits for this blocks no other send:
//!   there is no queue in which a transfer of one axis could block one of another. So a transfer ends as soon as both
//!   ends have begun it; a rank that waits for it can be delayed by the other end only.
//! - Every rank runs the same program: steps, micro-batches in turn within a step, layers within those. An exchange
//!   inside a layer waits for what its line does in the same turn; one of gradients waits, at turn n, only for blocks
//!   of turns before n. Assume some waits never end and take the earliest in this order. Its other end has passed, or
//!   still computes, everything before it; it cannot be stuck there, as that would be an earlier wait that does not
//!   end. So it begins the transfer, and the wait ends.
//!
//! With RCCL each line has its own communicator, communication thread and stream, so the same holds for rounds (see
//! `comm_thread`): rounds of one line never wait for rounds of another. A round is queued only after all of its ranks
//! have reached it, so on the device its kernel waits for the kernels of those ranks alone. The kernels of up to four
//! lines and the computing kernels, each of which ends by itself, fit on a device at the same time, as NCCL requires of
//! programs that use several communicators at once.

use std::sync::Arc;

use tch::Device;

use super::Group;
use super::comm_loop::Members;
use super::comm_thread::CommThread;
use super::exchange::Exchange;
use super::exchange_id::AXES;
use super::peers::Peers;
use crate::{Error, Result};

/// The ranks of this rank's line along one axis of the mesh.
#[derive(Debug)]
pub struct AxisRanks {
    peers: Option<Arc<Peers>>,
    axis: usize,
    members: Vec<u32>,
    device: Device,
    /// Moves the tensors; `None` with Gloo.
    comm: Option<Arc<CommThread>>,
}

impl Group {
    /// The line of `members`, which include this rank, along axis `axis` (1 or higher). Every rank of the line calls
    /// this with the same members. Lines of one axis share no rank.
    pub fn axis(&self, axis: usize, members: &[u32]) -> Result<AxisRanks> {
        let known = (1..AXES).contains(&axis) && members.contains(&self.rank());
        if !known || members.iter().any(|rank| *rank >= self.world()) {
            let reason = format!("axis {axis} of {members:?} is no line of rank {}", self.rank());
            return Err(Error::Foreign { call: "make an axis", reason });
        }
        let (peers, device, members) = (self.peers.clone(), self.device(), members.to_vec());
        let comm = match members.len() {
            1 => None,
            _ => self.comm_along(Members { axis, members: members.clone() })?,
        };
        Ok(AxisRanks { peers, axis, members, device, comm })
    }
}

impl AxisRanks {
    /// The ranks of the line, by their numbers in the group.
    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// The other ranks of the line.
    pub fn others(&self) -> impl Iterator<Item = u32> + '_ {
        let me = self.peers.as_ref().map_or(0, |peers| peers.rank());
        self.members.iter().copied().filter(move |rank| *rank != me)
    }

    /// Begins an exchange that every rank of the line begins. Messages about missing ranks name it `operation`.
    pub fn begin<'a>(&'a self, operation: &'a str) -> Result<Exchange<'a>> {
        let alone =
            || Error::Foreign { call: "exchange tensors", reason: "this rank is alone".to_owned() };
        let peers = self.peers.as_ref().ok_or_else(alone)?;
        let comm = self.comm.as_deref();
        comm.map_or(Ok(()), CommThread::look)?;
        let id = peers.next(self.axis, operation)?;
        Ok(Exchange::new(peers, operation, id, self.device, comm))
    }
}
