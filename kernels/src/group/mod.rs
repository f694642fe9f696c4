//! Ranks that exchange bytes: a store of our own in which they meet, libtorch's Gloo, reached through the shim; between GPUs also
//! RCCL or NCCL.
//!
//! ```text
//! meeting    how they come together
//! peers      who the ranks are (always over Gloo), who is missing; gathering  what they tell all, between machines by node
//! store      where they meet and leave word; server  the process that holds it; wire  what travels between them
//! key        the run's secret, which each end of a connection proves before anything else is said
//! bridge     the store as Gloo asks for it, to connect the ranks
//! transport  the choice of how tensors travel
//! axis       lines of ranks in a mesh: exchanges that run beside each other, and why that never stands still
//! exchange   tensors from rank to rank, over Gloo or by the communication thread; exchange_id  which it is
//! work       a transfer over Gloo
//! rendezvous how those who are left after a loss agree on it, and meet again
//! word       why ranks stop, as the first of them says it
//! whereabouts how far a rank has come, for those who miss it
//! comm_thread the thread that has RCCL move them, and why nothing wrong is written down where it fails
//! comm_stream rounds of transfers, and the stream on which they are queued
//! ```
//!
//! Only bytes move here; whoever receives them adds them up, in the order that the tree says. Every wait has a deadline.
//! Before each exchange a rank writes into the store how far it has come, so that those who wait in vain can say who is
//! missing and where it was last seen. The first rank to notice writes that down for all the others.
//!
//! Invariant: exchanges of an axis are begun in the same order on every rank of its line, each by one thread at a time.

#![expect(unsafe_code, reason = "calls the C++ shim")]

mod axis;
mod bridge;
mod clock;
mod comm_loop;
mod comm_stream;
mod comm_thread;
mod exchange;
mod exchange_id;
mod ffi;
mod gathering;
mod key;
mod meeting;
mod peers;
mod rendezvous;
mod server;
mod store;
#[cfg(test)]
mod stranger_tests;
#[cfg(test)]
mod tests;
mod transport;
mod whereabouts;
mod wire;
mod word;
mod work;

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::{Device, Tensor};

pub use axis::Axis;
pub use exchange::{Arrival, Exchange};
pub use key::{RunKey, is_loopback};
pub use rendezvous::{Agent, Change, Rendezvous};
pub use server::Strangers;
pub use store::Store;
pub use transport::{Chosen, Transport};
pub use whereabouts::Whereabouts;

use crate::shim::guarded;
use crate::{Error, Result};
use comm_thread::CommThread;
use ffi::{shim_collective, shim_vanish};
use peers::Peers;

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
    /// What every connection between the ranks has to prove.
    pub key: RunKey,
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

/// All ranks of a run, and how tensors travel between them. A rank may be alone: it hears only itself, and opens nothing.
#[derive(Debug)]
pub struct Group {
    /// Ends before the ranks are parted from.
    bulk: Bulk,
    /// `None` for a rank that is alone.
    peers: Option<Arc<Peers>>,
    /// See [`Group::launched_as`].
    launched_as: u32,
}

/// How tensors travel.
#[derive(Debug)]
struct Bulk {
    /// Where they live.
    device: Device,
    /// Who moves them, if not Gloo.
    comm: Option<Arc<CommThread>>,
    /// Who moves them along the lines of other axes, as far as one was asked for.
    along: Mutex<Along>,
}

/// By axis: the ranks of a line, and its communication thread.
type Along = BTreeMap<usize, (Vec<u32>, Arc<CommThread>)>;

impl Bulk {
    /// Nobody yet: over Gloo.
    fn of(device: Device) -> Bulk {
        Bulk { device, comm: None, along: Mutex::new(BTreeMap::new()) }
    }
}

/// The machine of a rank that is alone: nobody asks for its name.
static ALONE: [String; 1] = [String::new()];

impl Group {
    /// Meets the other ranks. A rank that does not come within `timeout` is named; `tell` hears meanwhile who is awaited.
    pub fn open(place: &Place, timeout: Duration, tell: &dyn Fn(&str)) -> Result<Group> {
        let serves = place.rank_0_serves && place.rank == 0;
        let peers = Peers::open(place, serves, timeout, tell)?;
        Ok(Group { peers: Some(Arc::new(peers)), ..Group::only(place.rank) })
    }

    /// The same where the store is there already, for a rank that was launched with another number.
    fn join(
        place: &Place,
        launched_as: u32,
        timeout: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Group> {
        let peers = Peers::open(place, false, timeout, tell)?;
        Ok(Group { peers: Some(Arc::new(peers)), ..Group::only(launched_as) })
    }

    /// The group of a rank that is alone.
    pub fn alone() -> Group {
        Group::only(0)
    }

    /// The group of a rank that is left alone.
    fn only(launched_as: u32) -> Group {
        Group { bulk: Bulk::of(Device::Cpu), peers: None, launched_as }
    }

    /// From here on another rank is missed after `timeout`. For the time before tensors travel.
    pub fn wait_at_most(&mut self, timeout: Duration) {
        if let Some(peers) = self.peers.as_mut().and_then(Arc::get_mut) {
            peers.wait_at_most(timeout);
        }
    }

    /// The number that this rank was launched with, by which people know it: after a loss ranks are numbered anew.
    pub fn launched_as(&self) -> u32 {
        self.launched_as
    }

    /// This rank, from 0.
    pub fn rank(&self) -> u32 {
        self.peers.as_ref().map_or(0, |peers| peers.rank())
    }

    /// How many ranks there are.
    pub fn world(&self) -> u32 {
        self.peers.as_ref().map_or(1, |peers| peers.world())
    }

    /// How long a rank is waited for.
    pub fn timeout(&self) -> Duration {
        self.peers.as_ref().map_or(Duration::ZERO, |peers| peers.timeout())
    }

    /// The store that the ranks share, for what is said beside the exchanges; `None` for a rank that is alone.
    pub fn store(&self) -> Option<Arc<Store>> {
        self.peers.as_ref().map(|peers| peers.store())
    }

    /// The machine of each rank, as its [`Place`] named it.
    pub fn nodes(&self) -> &[String] {
        self.peers.as_ref().map_or(&ALONE, |peers| peers.nodes())
    }

    /// What this rank has sent since it met the others; libtorch's own collectives are not counted.
    pub fn sent(&self) -> Sent {
        self.peers.as_ref().map_or_else(Sent::default, |peers| peers.sent())
    }

    /// The other ranks, the next one first: so that not everybody turns to the same one at once.
    pub fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (self.rank(), self.world());
        (1..world).map(move |distance| (rank + distance) % world)
    }

    /// Tells the others what this rank is at ("step 12, micro-batch 3"), for the moment in which they miss it.
    pub fn reached(&self, whereabouts: &str) {
        self.peers.iter().for_each(|peers| peers.reached(whereabouts));
    }

    /// Takes note that this rank has computed for so long in `step`, for whoever watches over the ranks.
    pub fn computed(&self, step: u64, time: Duration) {
        self.peers.iter().for_each(|peers| peers.computed(step, time));
    }

    /// Leaves word that this rank is lost to the others although it runs: its results cannot be trusted.
    pub fn give_up(&self, why: &str) {
        self.peers.iter().for_each(|peers| peers.give_up(why));
    }

    /// Hands `mine` to every rank and returns what each of them handed over, by rank. Lengths may differ. A rank whose tensors
    /// did not travel as they should have hands over nothing and fails: see [`Group::settled`].
    pub fn all_gather(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.settled()?;
        match &self.peers {
            Some(peers) => peers.all_gather(what, mine),
            None => Ok(vec![mine.to_vec()]),
        }
    }

    /// Waits until every rank is here.
    pub fn barrier(&self, what: &str) -> Result<()> {
        self.all_gather(what, &[]).map(|_| ())
    }

    /// Leaves word of why this rank stops, for those who will miss it. The word of who came first stands.
    pub fn report(&self, reason: &str) {
        self.peers.iter().for_each(|peers| peers.report(reason));
    }

    /// Who came to the store without the run's key, and was refused. Nobody, for a rank that is alone or reaches no store.
    pub fn strangers(&self) -> Strangers {
        self.peers.as_ref().and_then(|peers| peers.strangers()).unwrap_or_default()
    }

    /// Whether the word that stands is that ranks are lost: which, as far as it is known. `None` where no word stands, or
    /// where a rank gave up by itself.
    pub fn lost(&self) -> Option<Vec<u32>> {
        self.peers.as_ref()?.lost()
    }

    /// Waits until every transfer that a stream of this rank was made to wait for is done, and fails if one has failed. What was
    /// computed from tensors of other ranks is good from then on: before somebody hears it, or it is kept. Whoever has just read
    /// it from the device waits for nothing.
    pub fn settled(&self) -> Result<()> {
        self.comm_threads().into_iter().try_for_each(|comm| comm.settled())
    }

    /// What has failed in a transfer, if something has: then numbers that were computed since may be anything. For whoever gives
    /// up what these ranks do because of such numbers, and exchanges nothing more.
    pub fn trouble(&self) -> Option<Error> {
        self.comm_threads().into_iter().for_each(|comm| comm.part());
        self.settled().err()
    }

    /// Those who move tensors, along all axes.
    fn comm_threads(&self) -> Vec<Arc<CommThread>> {
        let along = self.bulk.along.lock().unwrap_or_else(PoisonError::into_inner);
        let along = along.values().map(|(_, comm)| comm);
        self.bulk.comm.iter().chain(along).cloned().collect()
    }

    /// Fails if a transfer has failed, or a rank has left word that the ranks stop.
    pub fn check(&self) -> Result<()> {
        self.comm_threads().into_iter().try_for_each(|comm| comm.look())?;
        match self.peers.as_ref().and_then(|peers| peers.word()) {
            Some(word) => Err(word.error()),
            None => Ok(()),
        }
    }

    /// Whether it is this rank that left the word, or nobody else could: then it is the one to tell people.
    pub fn spoke_first(&self) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.spoke_first())
    }

    /// The others, for what cannot be done alone.
    fn peers(&self) -> Result<&Arc<Peers>> {
        let alone =
            || Error::Foreign { call: "exchange tensors", reason: "this rank is alone".to_owned() };
        self.peers.as_ref().ok_or_else(alone)
    }

    /// Where the tensors live that [`Group::begin`] is for.
    pub fn device(&self) -> Device {
        self.bulk.device
    }

    /// Whether RCCL moves them.
    pub fn by_rccl(&self) -> bool {
        self.bulk.comm.is_some()
    }

    /// Begins an exchange that every rank begins, named for whoever misses one ("the gathering of gradients"). Tensors
    /// travel as [`Group::choose_transport`] has agreed; before, between CPUs over Gloo.
    pub fn begin<'a>(&'a self, what: &'a str) -> Result<Exchange<'a>> {
        let (peers, comm) = (self.peers()?, self.bulk.comm.as_deref());
        comm.map_or(Ok(()), CommThread::look)?;
        Ok(Exchange::new(peers, what, peers.next(0, what)?, self.device(), comm))
    }

    /// Runs one of libtorch's own collectives on f32 tensors: for the benchmark, never for training.
    pub fn collective(&self, which: Collective, input: &Tensor, output: &Tensor) -> Result<()> {
        let peers = self.peers()?;
        // SAFETY: both tensors outlive the call, which waits for the end.
        guarded("a collective of libtorch", unsafe {
            shim_collective(
                peers.handle(),
                which as c_int,
                input.as_ptr(),
                output.as_ptr(),
                milliseconds(peers.timeout()),
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
