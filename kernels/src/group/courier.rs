//! Tensors between the devices of ranks: RCCL or NCCL, whose communicator is named through the group.
//!
//! What those libraries do, and what follows from it:
//! - A send is done when its receive is. Two ranks that each queue a send before the receive wait for ever. So transfers come
//!   in rounds: a round is one group call, within which the library lets all of them make progress together.
//! - What is queued on a stream runs in order. Both ends put a transfer into the round of the same number, and every rank
//!   closes its rounds in ascending order. Of all rounds that are not done take one with the smallest number (of the oldest
//!   exchange): all that its ranks have queued before it is done, so it is at the head on every one of them, and runs. For a
//!   rank to close a round it may only wait for arrivals of rounds with smaller numbers; then, by induction, none is stuck.
//! - A group holds at most 2,048 transfers. A rank that speaks directly with more than 1,023 others is refused by the library;
//!   ranks of machines go through gates and stay far below.
//! - Calls may block the caller, and a communicator is for one thread at a time. So one thread, the courier, makes all of
//!   them, and nobody who computes ever waits in one.
//! - A kernel that waits for a rank that still computes keeps a GPU busy, and one whose rank is lost never returns. So
//!   before a round is queued its ranks tell each other over Gloo that they have come to it. A rank that is lost before is
//!   missed there, at once and by name. From then on the courier asks the stream whether it is done, against the deadline,
//!   looks for errors of the library and for another rank's word, and gives the communicator up if it has to. If the call
//!   itself hangs, whoever waits for the round does so.
//! - A rank that is lost within a round leaves no sign in the library. So each rank also keeps a receive from the next one
//!   open over Gloo, which fails when that one's connections close ([`watch`]): one of the ranks notices at once, and its
//!   word ends the others.
//! - To give a communicator up may hang as well: nobody waits long for it ([`PARTING`]).

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rccl_sys::{Communicator, HostStream, Library, UniqueId};
use tch::{Device, Kind, Tensor};

use super::axis::Turn;
use super::peers::{Peers, late};
use super::word::seconds;
use crate::device::{self, Event, SideStream};
use crate::{Error, Result};

/// The tag of the words that a rank has come to a round of the axis of all ranks; exchanges have smaller tags, and those of
/// another axis the one beyond [`FAREWELL`] that its number says.
const TOKEN: i32 = 1 << 30;

/// The tag of a rank's farewell to the one that watches it.
const FAREWELL: i32 = TOKEN + 1;

/// For ever: a watch ends by a farewell or a loss.
const LONG: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long the end of the courier is waited for, and of one that failed: the other ranks wait to hear why.
const PARTING: [Duration; 2] = [Duration::from_secs(5), Duration::from_millis(500)];

/// Between two looks at a stream: the first, and the longest.
const LOOKS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(2)];

/// Between two looks for another rank's word.
const WORDS: Duration = Duration::from_millis(100);

/// Says whether a transfer's round was closed, and as which one: 0 before.
pub(super) type Ticket = Arc<AtomicU64>;

/// Transfers that are queued as one.
pub(super) struct Round {
    what: String,
    number: Turn,
    sends: Vec<(u32, Tensor)>,
    receives: Vec<(u32, Tensor)>,
    /// What the computing stream had to do before it was closed.
    ready: Option<Event>,
    ticket: Ticket,
}

impl Round {
    /// Of the exchange `number`.
    pub(super) fn new(what: &str, number: Turn) -> Self {
        let (sends, receives, ticket) = (Vec::new(), Vec::new(), Ticket::default());
        Round { what: what.to_owned(), number, sends, receives, ready: None, ticket }
    }

    pub(super) fn send(&mut self, to: u32, tensor: &Tensor) -> Ticket {
        self.sends.push((to, tensor.shallow_clone()));
        Arc::clone(&self.ticket)
    }

    pub(super) fn receive(&mut self, from: u32, tensor: &Tensor) -> Ticket {
        self.receives.push((from, tensor.shallow_clone()));
        Arc::clone(&self.ticket)
    }

    /// The other ranks of it.
    fn partners(&self) -> Vec<u32> {
        let all = self.sends.iter().chain(&self.receives);
        let mut partners: Vec<u32> = all.map(|(rank, _)| *rank).collect();
        partners.sort_unstable();
        partners.dedup();
        partners
    }
}

/// The stream on which a communicator works.
pub(super) enum Lane {
    /// Beside the one that computes.
    Device(SideStream, *mut c_void),
    /// Of the library itself, over plain memory.
    Host(HostStream),
}

// SAFETY: a stream may be used from any thread, and the courier is the only one that does.
unsafe impl Send for Lane {}

impl Lane {
    /// A stream for `device`, or why there is none.
    pub(super) fn new(device: Device) -> std::result::Result<Lane, String> {
        let library = Library::open()?;
        let Device::Cuda(index) = device else {
            return library.host_stream().map(Lane::Host);
        };
        let made = SideStream::new(index).and_then(|side| side.raw().map(|raw| (side, raw)));
        made.map(|(side, raw)| Lane::Device(side, raw)).map_err(|error| error.to_string())
    }

    fn raw(&self) -> *mut c_void {
        match self {
            Lane::Device(_, raw) => *raw,
            Lane::Host(stream) => stream.raw(),
        }
    }

    fn idle(&self) -> Result<bool> {
        match self {
            Lane::Device(side, _) => side.idle(),
            Lane::Host(stream) => stream.idle().map_err(refused),
        }
    }

    fn after(&self, ready: Option<&Event>) -> Result<()> {
        match (self, ready) {
            (Lane::Device(side, _), Some(mark)) => side.after(mark),
            _ => Ok(()),
        }
    }
}

/// The ranks of a communicator, which numbers them by their places here.
#[derive(Clone, Debug)]
pub(super) struct Party {
    /// The axis along which they lie; 0 is that of all ranks.
    pub(super) axis: usize,
    pub(super) members: Vec<u32>,
}

impl Party {
    /// The place of a rank; a rank that is none of them has none.
    fn place(&self, rank: u32) -> Result<u32> {
        let place = self.members.iter().position(|member| *member == rank);
        place.map(|place| place as u32).ok_or_else(|| refused(format!("rank {rank} is elsewhere")))
    }

    /// The tag of the words that a rank has come to a round.
    fn token(&self) -> i32 {
        if self.axis == 0 { TOKEN } else { FAREWELL + self.axis as i32 }
    }
}

/// Moves tensors, round after round, on a thread of its own.
pub(super) struct Courier {
    peers: Arc<Peers>,
    /// `None` when it shall end.
    inbox: Option<Sender<Round>>,
    shared: Arc<Shared>,
    /// The thread owns it.
    communicator: Weak<Communicator>,
    /// Hears when the thread has ended.
    ended: Mutex<Receiver<()>>,
    /// Hears when the watch has; along a line there is none, for that of all ranks covers it.
    watched: Option<Mutex<Receiver<()>>>,
}

impl std::fmt::Debug for Courier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Courier").finish_non_exhaustive()
    }
}

/// What the courier and those who wait for it both see.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Rounds that were closed, and of them those that are done.
    posted: u64,
    passed: u64,
    failed: Option<Error>,
    over: bool,
    /// Since when the courier is in a call of the library, and for which round.
    call: Option<(Instant, String)>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: Error) {
        let mut state = self.lock();
        state.failed.get_or_insert(error);
        state.over = true;
        self.changed.notify_all();
    }
}

impl Courier {
    /// Joins the communicator that `id` names. All ranks of the party do so at once; who is not there within the deadline is
    /// missed by the caller.
    pub(super) fn join(
        peers: &Arc<Peers>,
        (device, lane): (Device, Lane),
        party: Party,
        id: UniqueId,
    ) -> std::result::Result<Courier, String> {
        let (inbox, rounds) = channel();
        let (joined, answer) = channel();
        let (end, ended) = channel::<()>();
        let shared = Arc::<Shared>::default();
        let (theirs, there) = (Arc::clone(peers), Arc::clone(&shared));
        let (axis, size) = (party.axis, party.members.len() as u32);
        let place = party.place(peers.rank()).map_err(|error| error.to_string())?;
        std::thread::spawn(move || {
            let _end = end;
            let chosen = device::enter(device).map_err(|error| error.to_string());
            let communicator = chosen.and_then(|()| Communicator::join(id, place, size));
            let communicator = match communicator {
                Ok(communicator) => Arc::new(communicator),
                Err(reason) => return drop(joined.send(Err(reason))),
            };
            // Nobody listens any more if this took too long.
            if joined.send(Ok(Arc::downgrade(&communicator))).is_ok() {
                let carrier = Carrier { peers: theirs, party, lane, communicator, shared: there };
                rounds.into_iter().try_for_each(|round| carrier.carry(round));
            }
        });
        let communicator = match answer.recv_timeout(peers.timeout()) {
            Ok(joined) => joined?,
            Err(_) => return Err(format!("not all joined within {}", seconds(peers.timeout()))),
        };
        let watched = match axis {
            0 => Some(Mutex::new(watch(peers, &shared).map_err(|error| error.to_string())?)),
            _ => None,
        };
        let (peers, inbox) = (Arc::clone(peers), Some(inbox));
        let ended = Mutex::new(ended);
        Ok(Courier { peers, inbox, shared, communicator, ended, watched })
    }

    /// Queues a closed round.
    pub(super) fn post(&self, mut round: Round, device: Device) -> Result<()> {
        round.ready = device::mark(device)?;
        let mut state = self.shared.lock();
        state.posted += 1;
        round.ticket.store(state.posted, Ordering::Release);
        // If the thread has ended, those who wait for the round hear why.
        let _ = self.inbox.as_ref().map(|inbox| inbox.send(round));
        Ok(())
    }

    /// Waits until the round is done.
    pub(super) fn wait(&self, ticket: &Ticket) -> Result<()> {
        let ticket = ticket.load(Ordering::Acquire);
        assert!(ticket > 0, "only what is closed is waited for");
        let mut state = self.shared.lock();
        while state.passed < ticket {
            if state.over {
                let told = Error::Reported { what: "the exchange has failed before".to_owned() };
                return Err(state.failed.take().unwrap_or(told));
            }
            let late = state.call.take_if(|call| call.0.elapsed() > self.peers.timeout());
            if let Some((_, what)) = late {
                drop(state);
                return Err(self.held_up(&what));
            }
            let changed = self.shared.changed.wait_timeout(state, WORDS);
            let (again, slept) = changed.unwrap_or_else(PoisonError::into_inner);
            state = again;
            if slept.timed_out() && !state.over {
                drop(state);
                // The courier may be waiting for a rank that is well, and waits for the lost one itself.
                let word = self.peers.word();
                state = self.shared.lock();
                if let Some(what) = word {
                    state.over = true;
                    state.failed.get_or_insert(Error::Reported { what });
                }
            }
        }
        Ok(())
    }

    /// The courier hangs in a call: the communicator is given up under it.
    fn held_up(&self, what: &str) -> Error {
        let error = self.peers.held_up(what);
        self.shared.lock().over = true;
        let communicator = self.communicator.upgrade();
        std::thread::spawn(move || communicator.inspect(|communicator| communicator.abort()));
        error
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        // The thread works off what it has, and destroys the communicator if nobody has given it up.
        self.inbox = None;
        let over = self.shared.lock().over || self.peers.word().is_some();
        let patience = PARTING[usize::from(over)];
        // Both receivers hear nothing but the end of a thread.
        let parted = |end: &mut Mutex<Receiver<()>>| {
            let _ = end.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(patience);
        };
        parted(&mut self.ended);
        if let Some(watched) = self.watched.as_mut().filter(|_| !over) {
            let farewell = Tensor::zeros([1], (Kind::Uint8, Device::Cpu));
            let said = self.peers.send(self.peers.neighbours().1, &farewell, FAREWELL);
            let _ = said.and_then(|said| said.wait(patience));
            parted(watched);
        }
    }
}

/// Watches the next rank until it says farewell, on a thread; what comes back hears of the end.
fn watch(peers: &Arc<Peers>, shared: &Arc<Shared>) -> Result<Receiver<()>> {
    let ((next, _), word) = (peers.neighbours(), Tensor::zeros([1], (Kind::Uint8, Device::Cpu)));
    let farewell = peers.receive(next, &word, FAREWELL)?;
    let (end, ended) = channel::<()>();
    let (peers, shared) = (Arc::clone(peers), Arc::clone(shared));
    std::thread::spawn(move || {
        let _end = end;
        // No exchange: nobody can be behind it.
        let turn = Turn { axis: 0, number: 0 };
        if let Err(error) = farewell.wait(LONG) {
            shared.fail(peers.missing("the watch over the next rank", turn, next, &error));
        }
    });
    Ok(ended)
}

/// The thread's part.
struct Carrier {
    peers: Arc<Peers>,
    party: Party,
    lane: Lane,
    communicator: Arc<Communicator>,
    shared: Arc<Shared>,
}

impl Carrier {
    /// `None` ends the thread.
    fn carry(&self, round: Round) -> Option<()> {
        let answer = self.pass(&round);
        if let Err(error) = answer {
            // First the word, for giving up may hang. The tensors of the round stay until then.
            self.shared.fail(error);
            self.communicator.abort();
            return None;
        }
        drop(round);
        self.shared.lock().passed += 1;
        self.shared.changed.notify_all();
        Some(())
    }

    fn pass(&self, round: &Round) -> Result<()> {
        let partners = round.partners();
        self.meet(round, &partners)?;
        self.shared.lock().call = Some((Instant::now(), round.what.clone()));
        let queued = self.queue(round);
        let in_time = self.shared.lock().call.take().is_some();
        queued?;
        if in_time { self.through(round, &partners) } else { Err(refused("too late")) }
    }

    /// Tells the round's ranks that this one has come to it, and hears the same from them.
    fn meet(&self, round: &Round, partners: &[u32]) -> Result<()> {
        let missing = |peer, error| match late(&error) {
            true => self.peers.stalled(&round.what, round.number, partners),
            false => self.peers.missing(&round.what, round.number, peer, &error),
        };
        let (token, tag) = (|| Tensor::zeros([1], (Kind::Uint8, Device::Cpu)), self.party.token());
        let mut words = Vec::new();
        for rank in partners.iter().copied() {
            let heard = self.peers.receive(rank, &token(), tag);
            words.push((rank, heard.map_err(|error| missing(rank, error))?));
        }
        for rank in partners.iter().copied() {
            let said = self.peers.send(rank, &token(), tag);
            words.push((rank, said.map_err(|error| missing(rank, error))?));
        }
        for (rank, word) in words {
            word.wait(self.peers.timeout()).map_err(|error| missing(rank, error))?;
        }
        Ok(())
    }

    fn queue(&self, round: &Round) -> Result<()> {
        self.lane.after(round.ready.as_ref())?;
        let (all, stream) = (&self.communicator, self.lane.raw());
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let places = |transfers: &[(u32, Tensor)]| {
            transfers.iter().map(|(rank, _)| self.party.place(*rank)).collect::<Result<Vec<_>>>()
        };
        let (to, from) = (places(&round.sends)?, places(&round.receives)?);
        let queued = all.together(|| {
            for (to, (_, tensor)) in to.iter().zip(&round.sends) {
                let data = tensor.data_ptr().cast_const();
                // SAFETY: the round keeps the tensor, contiguous and on the stream's device, until the stream is through,
                // and whoever sends does not write it before.
                unsafe { all.send(data, bytes(tensor), *to, stream)? };
            }
            for (from, (_, tensor)) in from.iter().zip(&round.receives) {
                // SAFETY: as above; nobody reads or writes it before it has arrived.
                unsafe { all.receive(tensor.data_ptr(), bytes(tensor), *from, stream)? };
            }
            Ok(())
        });
        queued.map_err(refused)
    }

    /// Waits until the stream has passed the round.
    fn through(&self, round: &Round, partners: &[u32]) -> Result<()> {
        let (start, mut looked, [mut pause, longest]) = (Instant::now(), Instant::now(), LOOKS);
        while !self.lane.idle()? {
            self.communicator.error().map_err(refused)?;
            if start.elapsed() > self.peers.timeout() {
                return Err(self.peers.stalled(&round.what, round.number, partners));
            }
            if looked.elapsed() > WORDS {
                looked = Instant::now();
                if self.shared.lock().over {
                    return Err(refused("given up"));
                }
                if let Some(what) = self.peers.word() {
                    return Err(Error::Reported { what });
                }
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(longest);
        }
        self.communicator.error().map_err(refused)
    }
}

fn refused(reason: impl Into<String>) -> Error {
    Error::Foreign { call: "move tensors between devices", reason: reason.into() }
}
