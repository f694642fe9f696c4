//! Ranks that exchange bytes: they meet in a store of our own and communicate through libtorch's Gloo (by the shim),
//! and between GPUs also through RCCL or NCCL.
//!
//! ```text
//! meeting    how ranks meet
//! peers      the ranks (always over Gloo), which are missing; gathering  all-gather of bytes, by node
//! store      where ranks meet and leave messages; server  the process that holds it; wire  its protocol
//! key        the run's secret, which both ends of each connection prove first
//! bridge     the store as Gloo uses it, to connect the ranks
//! transport  the choice of how tensors travel
//! axis       lines of ranks in a mesh: concurrent exchanges, and why they cannot deadlock
//! exchange   tensors from rank to rank, over Gloo or by the communication thread; exchange_id  identifies one
//! work       a transfer over Gloo
//! rendezvous how the ranks left after a loss agree on who they are, and meet again
//! word       why ranks stop, as reported by the first that stops
//! whereabouts the progress of a rank, for error messages and monitoring
//! mailbox    the newest progress of this rank, and the thread that writes it into the store
//! comm_thread the thread that moves tensors with RCCL, and why a failure leaves no wrong record
//! comm_stream rounds of transfers, and the stream on which they are queued; parts  the group calls of a round
//! ```
//!
//! Only bytes move here; the receivers sum them, in the order that the tree defines. Every wait has a deadline. A rank
//! writes its progress into the store, a tenth of a second after an exchange has begun at the latest and without a wait
//! of the exchange, so that ranks that wait in vain can report who is missing and where it was last seen. The first
//! rank to notice writes this report for all others.
//!
//! Invariant: all ranks of a line begin the exchanges of its axis in the same order, each from one thread at a time.

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
mod mailbox;
mod meeting;
mod parts;
mod peers;
#[cfg(test)]
mod progress_tests;
mod rendezvous;
mod server;
mod store;
#[cfg(test)]
mod tests;
mod transport;
#[cfg(test)]
mod unauthenticated_tests;
mod whereabouts;
mod wire;
mod word;
mod work;

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::{Device, Tensor};

pub use axis::AxisRanks;
pub use exchange::{Arrival, Exchange};
pub use key::{RunKey, is_loopback};
pub use rendezvous::{Agent, MembershipChange, Rendezvous};
pub use server::UnauthenticatedConnections;
pub use store::KeyValueStore;
pub use transport::{Transport, TransportChoice};
pub use whereabouts::RankProgress;

use crate::shim::guarded;
use crate::{Error, Result};
use comm_thread::CommThread;
use ffi::{shim_collective, shim_vanish};
use peers::Peers;

/// A rank's identity and how it reaches the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankAddress {
    /// The rank, from 0.
    pub rank: u32,
    /// The number of ranks.
    pub world: u32,
    /// Host of the store.
    pub host: String,
    /// Port of the store.
    pub port: u16,
    /// Whether rank 0 holds the store; otherwise the launcher does.
    pub rank_0_serves: bool,
    /// The key that both ends of every connection between ranks have to prove.
    pub key: RunKey,
    /// Prefix that separates the keys of this launch from those of an earlier one, if the store outlives a launch.
    pub name: String,
    /// The network interface to use; if empty, the one to which this machine's host name resolves.
    pub interface: String,
    /// The machine of the rank: equal texts mean the same machine.
    pub node: String,
}

/// Bytes that a rank sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentBytes {
    /// To any rank.
    pub all: u64,
    /// To ranks on other machines.
    pub between_nodes: u64,
}

/// All ranks of a run, and how tensors travel between them. A single rank opens no connections.
#[derive(Debug)]
pub struct Group {
    /// Declared first: it must be dropped before the peers.
    bulk: TensorTransport,
    /// `None` for a single rank.
    peers: Option<Arc<Peers>>,
    /// See [`Group::launched_as`].
    launched_as: u32,
}

/// How tensors travel.
#[derive(Debug)]
struct TensorTransport {
    /// The device of the tensors.
    device: Device,
    /// Moves the tensors; `None` with Gloo.
    comm: Option<Arc<CommThread>>,
    /// The communication threads of other axes, made when first used.
    along: Mutex<AxisThreads>,
}

/// By axis: the ranks of a line, and its communication thread.
type AxisThreads = BTreeMap<usize, (Vec<u32>, Arc<CommThread>)>;

impl TensorTransport {
    /// No communication thread yet: tensors travel over Gloo.
    fn of(device: Device) -> TensorTransport {
        TensorTransport { device, comm: None, along: Mutex::new(BTreeMap::new()) }
    }
}

/// The machine name of a single rank, which is not used.
static ALONE: [String; 1] = [String::new()];

impl Group {
    /// Meets the other ranks. The error names ranks that do not come within `timeout`; `tell` gets messages about
    /// awaited ranks.
    pub fn open(place: &RankAddress, timeout: Duration, tell: &dyn Fn(&str)) -> Result<Group> {
        let serves = place.rank_0_serves && place.rank == 0;
        let peers = Peers::open(place, serves, timeout, tell)?;
        Ok(Group { peers: Some(Arc::new(peers)), ..Group::only(place.rank) })
    }

    /// The same with an open store, for a rank that was launched with another number.
    fn join(
        place: &RankAddress,
        launched_as: u32,
        timeout: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Group> {
        let peers = Peers::open(place, false, timeout, tell)?;
        Ok(Group { peers: Some(Arc::new(peers)), ..Group::only(launched_as) })
    }

    /// The group of a single rank.
    pub fn alone() -> Group {
        Group::only(0)
    }

    /// The group of a rank that is the only one left.
    fn only(launched_as: u32) -> Group {
        Group { bulk: TensorTransport::of(Device::Cpu), peers: None, launched_as }
    }

    /// Sets the timeout for other ranks from here on. Must be called before any tensor travels.
    pub fn wait_at_most(&mut self, timeout: Duration) {
        if let Some(peers) = self.peers.as_mut().and_then(Arc::get_mut) {
            peers.wait_at_most(timeout);
        }
    }

    /// The number that this rank was launched with, which users know; after a loss ranks are renumbered.
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

    /// How long to wait for a rank.
    pub fn timeout(&self) -> Duration {
        self.peers.as_ref().map_or(Duration::ZERO, |peers| peers.timeout())
    }

    /// The store that the ranks share, for messages outside of exchanges; `None` for a single rank.
    pub fn store(&self) -> Option<Arc<KeyValueStore>> {
        self.peers.as_ref().map(|peers| peers.store())
    }

    /// The machine of each rank, as its [`RankAddress`] named it.
    pub fn nodes(&self) -> &[String] {
        self.peers.as_ref().map_or(&ALONE, |peers| peers.nodes())
    }

    /// Bytes that this rank has sent since it met the others, without libtorch's own collectives.
    pub fn sent(&self) -> SentBytes {
        self.peers.as_ref().map_or_else(SentBytes::default, |peers| peers.sent())
    }

    /// The other ranks, starting with the next one, so that not all ranks send to the same one first.
    pub fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (self.rank(), self.world());
        (1..world).map(move |distance| (rank + distance) % world)
    }

    /// Publishes what this rank is doing ("step 12, micro-batch 3"), for the error messages of ranks that miss it.
    pub fn reached(&self, whereabouts: &str) {
        self.peers.iter().for_each(|peers| peers.reached(whereabouts));
    }

    /// Publishes the time in which this rank computed a micro-batch of `step`, for the monitoring of ranks; `None` if
    /// it had none.
    pub fn computed(&self, step: u64, time: Option<Duration>) {
        self.peers.iter().for_each(|peers| peers.computed(step, time));
    }

    /// Reports that this rank counts as lost although it still runs, because its results cannot be trusted.
    pub fn give_up(&self, why: &str) {
        self.peers.iter().for_each(|peers| peers.give_up(why));
    }

    /// Sends `message` to every rank and returns the bytes of all ranks, by rank. Lengths may differ. Fails without
    /// sending if a transfer of this rank has failed: see [`Group::settled`].
    pub fn all_gather(&self, operation: &str, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.settled()?;
        match &self.peers {
            Some(peers) => peers.all_gather(operation, message),
            None => Ok(vec![message.to_vec()]),
        }
    }

    /// Waits until every rank has reached the barrier.
    pub fn barrier(&self, operation: &str) -> Result<()> {
        self.all_gather(operation, &[]).map(|_| ())
    }

    /// Reports why this rank stops, for the ranks that will miss it. The first report stands.
    pub fn report(&self, reason: &str) {
        self.peers.iter().for_each(|peers| peers.report(reason));
    }

    /// Connections that the store refused because they did not prove the run's key; none if the store cannot be
    /// reached.
    pub fn unauthenticated(&self) -> UnauthenticatedConnections {
        self.peers.as_ref().and_then(|peers| peers.unauthenticated()).unwrap_or_default()
    }

    /// If the report that stands says that ranks are lost: these ranks, as far as known. `None` if there is no report,
    /// or if a rank gave up by itself.
    pub fn lost(&self) -> Option<Vec<u32>> {
        self.peers.as_ref()?.lost()
    }

    /// Waits until every transfer that a stream of this rank waits for is done, and fails if one has failed. Results
    /// computed from tensors of other ranks are valid from then on, so call this before sending or saving them. Right
    /// after a read of the results from the device it returns at once.
    pub fn settled(&self) -> Result<()> {
        self.comm_threads().into_iter().try_for_each(|comm| comm.settled())
    }

    /// The failure of a transfer, if there is one: numbers computed since then may be wrong. Ends the exchanges of this
    /// rank, so it is for a caller that gives up because of such numbers.
    pub fn trouble(&self) -> Option<Error> {
        self.comm_threads().into_iter().for_each(|comm| comm.part());
        self.settled().err()
    }

    /// The communication threads of all axes.
    fn comm_threads(&self) -> Vec<Arc<CommThread>> {
        let along = self.bulk.along.lock().unwrap_or_else(PoisonError::into_inner);
        let along = along.values().map(|(_, comm)| comm);
        self.bulk.comm.iter().chain(along).cloned().collect()
    }

    /// Fails if a transfer has failed, or if a rank has reported that the ranks stop.
    pub fn check(&self) -> Result<()> {
        self.comm_threads().into_iter().try_for_each(|comm| comm.look())?;
        match self.peers.as_ref().and_then(|peers| peers.word()) {
            Some(word) => Err(word.error()),
            None => Ok(()),
        }
    }

    /// Whether the report that stands is this rank's, or no other rank can report: then this rank prints it.
    pub fn spoke_first(&self) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.spoke_first())
    }

    /// The other ranks; fails for a single rank.
    fn peers(&self) -> Result<&Arc<Peers>> {
        let alone =
            || Error::Foreign { call: "exchange tensors", reason: "this rank is alone".to_owned() };
        self.peers.as_ref().ok_or_else(alone)
    }

    /// The device of the tensors of [`Group::begin`].
    pub fn device(&self) -> Device {
        self.bulk.device
    }

    /// Whether RCCL moves the tensors.
    pub fn by_rccl(&self) -> bool {
        self.bulk.comm.is_some()
    }

    /// Begins an exchange that every rank begins; messages about missing ranks name it `operation` ("the gathering of
    /// gradients"). Tensors travel as [`Group::choose_transport`] has agreed; before that call, between CPUs over Gloo.
    pub fn begin<'a>(&'a self, operation: &'a str) -> Result<Exchange<'a>> {
        let (peers, comm) = (self.peers()?, self.bulk.comm.as_deref());
        comm.map_or(Ok(()), CommThread::look)?;
        Ok(Exchange::new(peers, operation, peers.next(0, operation)?, self.device(), comm))
    }

    /// Runs one of libtorch's own collectives on f32 tensors: for the benchmark only, never for training.
    pub fn collective(&self, which: Collective, input: &Tensor, output: &Tensor) -> Result<()> {
        let peers = self.peers()?;
        // SAFETY: both tensors outlive the call, which waits for the end of the collective.
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

/// Ends this process at once, without exit handlers: they must not run while other threads compute. For a rank that has
/// lost its launcher.
pub fn vanish(code: u8) -> ! {
    // SAFETY: does not return; the operating system releases all resources.
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
