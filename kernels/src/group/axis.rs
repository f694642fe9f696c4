//! A line of ranks of a mesh, with an order of exchanges of its own.
//!
//! Along each axis of a mesh a rank exchanges with the others of its line: gradients along one, what a layer needs along
//! another. The ranks of a line begin its exchanges in one order, each from one thread at a time; between axes there is no
//! order, and a rank may be anywhere in one exchange while another thread of it waits in one of another axis.
//!
//! Why no ranks wait for each other for ever:
//! - A transfer is named by its two ends and its tag, which holds the axis and the number of the exchange on it. No two
//!   transfers under way share a name, so whatever arrives first is not taken for another.
//! - Gloo sends a tensor when the receiver has said where it goes, and what waits for that holds up nothing else: there is no
//!   queue in which the transfer of one axis could stand before that of another. So a transfer ends as soon as both ends have
//!   begun it, and nothing but the other end can delay a rank that waits for one.
//! - Every rank runs one program: steps, in them micro-batches by turns, in them layers. An exchange inside a layer waits for
//!   what its line does in the same turn; one of gradients waits, at turn n, only for blocks of turns before n. Take the
//!   earliest wait of this order that does not end: its other end has passed, or still computes, everything before it, waits for
//!   nothing there (that would be an earlier wait that does not end), and so begins the transfer. It ends after all.
//!
//! Where RCCL moves tensors, each line has a communicator, a communication thread and a stream of its own, so what holds for
//! transfers holds for rounds (see `comm_thread`): those of one line wait for nothing of another's. A round is queued when
//! all of its ranks have come to it, and what the device then runs is a kernel that waits for theirs alone; kernels of up to
//! four lines and those that compute, each of which ends by itself, find room beside each other on a device, as NCCL asks of
//! those who use several communicators at a time.

use std::sync::Arc;

use tch::Device;

use super::Group;
use super::comm_loop::Party;
use super::comm_thread::CommThread;
use super::exchange::Exchange;
use super::exchange_id::AXES;
use super::peers::Peers;
use crate::{Error, Result};

/// A line of ranks.
#[derive(Debug)]
pub struct Axis {
    peers: Option<Arc<Peers>>,
    axis: usize,
    members: Vec<u32>,
    device: Device,
    /// Who moves tensors, if not Gloo.
    comm: Option<Arc<CommThread>>,
}

impl Group {
    /// The line of `members`, of which this rank is one, along axis `axis` from 1. Every rank of the line makes it, with the
    /// same members; lines of one axis share no rank.
    pub fn axis(&self, axis: usize, members: &[u32]) -> Result<Axis> {
        let known = (1..AXES).contains(&axis) && members.contains(&self.rank());
        if !known || members.iter().any(|rank| *rank >= self.world()) {
            let reason = format!("axis {axis} of {members:?} is no line of rank {}", self.rank());
            return Err(Error::Foreign { call: "make an axis", reason });
        }
        let (peers, device, members) = (self.peers.clone(), self.device(), members.to_vec());
        let comm = match members.len() {
            1 => None,
            _ => self.comm_along(Party { axis, members: members.clone() })?,
        };
        Ok(Axis { peers, axis, members, device, comm })
    }
}

impl Axis {
    /// The ranks of the line, as numbered among all.
    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// The other ranks of the line.
    pub fn others(&self) -> impl Iterator<Item = u32> + '_ {
        let me = self.peers.as_ref().map_or(0, |peers| peers.rank());
        self.members.iter().copied().filter(move |rank| *rank != me)
    }

    /// Begins an exchange that every rank of the line begins, named for whoever misses one.
    pub fn begin<'a>(&'a self, what: &'a str) -> Result<Exchange<'a>> {
        let alone =
            || Error::Foreign { call: "exchange tensors", reason: "this rank is alone".to_owned() };
        let peers = self.peers.as_ref().ok_or_else(alone)?;
        let comm = self.comm.as_deref();
        comm.map_or(Ok(()), CommThread::look)?;
        let id = peers.next(self.axis, what)?;
        Ok(Exchange::new(peers, what, id, self.device, comm))
    }
}
