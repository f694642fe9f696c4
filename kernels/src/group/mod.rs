//! Ranks that exchange bytes: libtorch's own TCPStore and Gloo, reached through the shim; between GPUs also RCCL or NCCL.
//!
//! ```text
//! peers      who the ranks are, what they tell each other (always over Gloo), who is missing
//! store      where they meet and leave word
//! transport  the choice of how tensors travel
//! exchange   tensors from rank to rank, over Gloo or by the courier
//! courier    the thread that has RCCL move them
//! ```
//!
//! Only bytes move here; whoever receives them adds them up, in the order that the tree says. Every wait has a deadline.
//! Before each exchange a rank writes into the store how far it has come, so that those who wait in vain can say who is
//! missing and where it was last seen. The first rank to notice writes that down for all the others.
//!
//! Invariant: exchanges are begun in the same order on every rank, each by one thread at a time.

#![expect(unsafe_code, reason = "calls the C++ shim")]

mod courier;
mod exchange;
mod ffi;
mod peers;
mod store;
#[cfg(test)]
mod tests;
mod transport;

use std::ffi::{CString, c_int};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tch::{Device, Tensor};

pub use exchange::{Arrival, Exchange};
pub use peers::Peers;
pub use store::Store;
pub use transport::{Carried, Transport};

use crate::runtime::guarded;
use crate::{Error, Result};
use courier::Courier;
use ffi::{shim_collective, shim_vanish};

/// A rank's place among the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank, from 0.
    pub rank: u32,
    /// How many there are.
    pub world: u32,
    /// Where the store is.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whether rank 0 holds the store; otherwise whoever launched the ranks does.
    pub rank_0_serves: bool,
    /// Keeps the keys of one launch apart from those of the launch before, if the store outlives it.
    pub name: String,
    /// The network interface to use; empty for the one that leads to this machine's name.
    pub interface: String,
    /// The machine that the rank is on: the same text on all ranks there, another one elsewhere.
    pub node: String,
}

/// Bytes that a rank sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// To any rank.
    pub all: u64,
    /// To ranks on other machines.
    pub between_nodes: u64,
}

/// All ranks of a run, and how tensors travel between them.
#[derive(Debug)]
pub struct Group {
    /// Ends before the ranks are parted from.
    bulk: OnceLock<Bulk>,
    peers: Arc<Peers>,
}

/// How tensors travel.
#[derive(Debug)]
struct Bulk {
    /// Where they live.
    device: Device,
    /// Who moves them, if not Gloo.
    courier: Option<Courier>,
}

impl Deref for Group {
    type Target = Peers;

    fn deref(&self) -> &Peers {
        &self.peers
    }
}

impl Group {
    /// Meets the other ranks. A rank that does not come within `timeout` is named; `tell` hears meanwhile who is awaited.
    pub fn open(place: &Place, timeout: Duration, tell: &dyn Fn(&str)) -> Result<Group> {
        Ok(Group { bulk: OnceLock::new(), peers: Arc::new(Peers::open(place, timeout, tell)?) })
    }

    /// From here on another rank is missed after `timeout`. For the time before tensors travel.
    pub fn wait_at_most(&mut self, timeout: Duration) {
        if let Some(peers) = Arc::get_mut(&mut self.peers) {
            peers.wait_at_most(timeout);
        }
    }

    /// Where the tensors live that [`Group::begin`] is for.
    pub fn device(&self) -> Device {
        self.bulk.get().map_or(Device::Cpu, |bulk| bulk.device)
    }

    /// Whether RCCL moves them.
    pub fn by_rccl(&self) -> bool {
        self.bulk.get().is_some_and(|bulk| bulk.courier.is_some())
    }

    /// Begins an exchange that every rank begins, named for whoever misses one ("the gathering of gradients"). Tensors
    /// travel as [`Group::carry`] has agreed; before, between CPUs over Gloo.
    pub fn begin<'a>(&'a self, what: &'a str) -> Result<Exchange<'a>> {
        let courier = self.bulk.get().and_then(|bulk| bulk.courier.as_ref());
        Ok(Exchange::new(&self.peers, what, self.next(what)?, self.device(), courier))
    }

    /// Runs one of libtorch's own collectives on f32 tensors: for the benchmark, never for training.
    pub fn collective(&self, which: Collective, input: &Tensor, output: &Tensor) -> Result<()> {
        // SAFETY: both tensors outlive the call, which waits for the end.
        guarded("a collective of libtorch", unsafe {
            shim_collective(
                self.handle(),
                which as c_int,
                input.as_ptr(),
                output.as_ptr(),
                milliseconds(self.timeout()),
            )
        })
    }
}

/// libtorch's own collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets the sum of all inputs.
    AllReduce = 0,
    /// Each rank gets its part of the sum.
    ReduceScatter = 1,
    /// Every rank gets all inputs.
    AllGather = 2,
    /// Every rank gets rank 0's input.
    Broadcast = 3,
    /// Each rank gets its part of every input.
    AllToAll = 4,
}

/// Ends this process at once. For a rank whose launcher is gone: other threads may be computing, and what is registered
/// for an orderly end must not run beside them.
pub fn vanish(code: u8) -> ! {
    // SAFETY: does not return; the operating system takes everything back.
    unsafe { shim_vanish(c_int::from(code)) }
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Foreign {
        call: "pass a text",
        reason: "it holds a zero byte".to_owned(),
    })
}

fn milliseconds(time: Duration) -> i64 {
    time.as_millis().clamp(1, i64::MAX as u128) as i64
}
