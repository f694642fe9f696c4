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
//!   ranks of machines go through node leaders and stay far below.
//! - Calls may block the caller, and a communicator is for one thread at a time. So one thread, the communication thread,
//!   makes all them but one, and nobody who computes ever waits in one. Another thread looks at the rounds under way, and
//!   asks for errors while the first is in no call (see `comm_loop`).
//! - A kernel that waits for a rank that still computes keeps a GPU busy, and one whose rank is lost never returns. So
//!   before a round is queued its ranks tell each other over Gloo that they have come to it. A rank that is lost before is
//!   missed there, at once and by name. From then on the round's end is looked at, against the deadline, with errors
//!   of the library and another rank's word, and the communicator is given up if it has to be. If the call itself hangs,
//!   whoever waits for the round does so.
//! - A rank that is lost within a round leaves no sign in the library. So each rank also keeps a receive from the next one
//!   open over Gloo, which fails when that one's connections close ([`watch`]): one of the ranks notices at once, and its
//!   word ends the others.
//! - To give a communicator up may hang as well: nobody waits long for it ([`PARTING`]).
//!
//! **Events, not the host.** Behind each round the communication thread records an event on its stream. Who waits for a
//! tensor, or for one to have left, waits until the round is queued, and has the computing stream wait for that event; the
//! bytes may still be far away. So the host is ahead of the device. Two rounds are under way: while one is looked after, its
//! ranks meet for the next and queue it, so that it stands on the stream when the first has passed; the third is queued when
//! it has. More would gain nothing where a round takes as long as ranks take to meet, and hold memory: what a round sends and
//! receives is kept until its event was seen. That a rank has queued the next round ends no induction of those above: it
//! waits for no arrival of it.
//!
//! No ranks wait for each other for ever by that: a stream is held behind a round only where the thread would have slept until
//! the bytes are there, and what it queues from then on would have come later too. Threads of a rank share the computing
//! stream, so one's work may stand behind what another one waits for. Who exchanges along a line is one thread; gradients are
//! handed over by one thread at a time in the order of rounds, so what stands behind a wait for one is sent in a later one.
//!
//! **Why nothing wrong reaches the ledger.** Where a round fails, its event passes once the communicator is given up, and what is
//! computed behind it is computed from whatever lies in the memory. (Only numbers travel, never a size or an index, so
//! it touches nothing else.) But:
//! - The communication thread writes a failure down before it gives the communicator up. Whoever reads a number that was
//!   computed behind a round that failed reads it after that, and hears of it at the next call of an exchange or of
//!   `Group::check`.
//! - Before a rank tells the others anything ([`super::Group::all_gather`]) it asks that every round that its stream was made
//!   to wait for has passed, without an error of the library ([`CommThread::settled`]). What it tells was read behind those
//!   rounds, so that this takes no longer than one look. A step's record is made of what ranks tell each other, last of all
//!   the checksums of the new state, read behind all rounds of the step: a rank with a failure does not tell them, and
//!   without them nobody has a record to write down.
//! - A fault found in numbers that came out of a failed round (a loss that is none, a micro-batch that came out otherwise) is
//!   told as the failure ([`super::Group::trouble`]).
//! - If the library does not even let go of the stream, a thread may sleep for ever in a read of the device: when the exchanges
//!   are not given up within two more deadlines the communication thread ends the process.
//!
//! **Where the host waits.** Over Gloo and over streams of plain memory, which know no events, until the bytes are there; for a
//! round to be queued; in [`CommThread::settled`], for what has been read already.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rccl_sys::{Communicator, UniqueId};
use tch::{Device, Kind, Tensor};

use super::comm_loop::{CommLoop, FAREWELL, PARTING, Party, Shared, State, WORDS};
use super::comm_stream::{CommStream, End, Round, Ticket, refused};
use super::exchange_id::ExchangeId;
use super::peers::Peers;
use super::word::seconds;
use crate::device;
use crate::{Error, Result};

/// For ever: a watch ends by a farewell or a loss.
const LONG: Duration = Duration::from_secs(365 * 24 * 3600);

/// Moves tensors, round after round, on a thread of its own.
pub(super) struct CommThread {
    peers: Arc<Peers>,
    device: Device,
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

impl std::fmt::Debug for CommThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommThread").finish_non_exhaustive()
    }
}

impl CommThread {
    /// Joins the communicator that `id` names. All ranks of the party do so at once; who is not there within the deadline is
    /// missed by the caller.
    pub(super) fn join(
        peers: &Arc<Peers>,
        (device, stream): (Device, CommStream),
        party: Party,
        id: UniqueId,
    ) -> std::result::Result<CommThread, String> {
        let (inbox, rounds) = channel();
        let (joined, answer) = channel();
        let (end, ended) = channel::<()>();
        let shared = Arc::<Shared>::default();
        let (theirs, there) = (Arc::clone(peers), Arc::clone(&shared));
        let (axis, size) = (party.axis, party.members.len() as u32);
        let place = party.place(peers.rank()).map_err(|error| error.to_string())?;
        let run = move || {
            let _end = end.clone();
            let chosen = device::enter(device).map_err(|error| error.to_string());
            let communicator = chosen.and_then(|()| Communicator::join(id, place, size));
            let communicator = match communicator {
                Ok(communicator) => Arc::new(communicator),
                Err(reason) => return drop(joined.send(Err(reason))),
            };
            // Nobody listens any more if this took too long.
            if joined.send(Ok(Arc::downgrade(&communicator))).is_ok() {
                let inside = Mutex::default();
                let (peers, shared) = (theirs, there);
                let both = CommLoop { peers, party, device, communicator, inside, shared };
                Arc::new(both).issue_all(&stream, rounds, end);
            }
        };
        std::thread::Builder::new().spawn(run).map_err(|error| error.to_string())?;
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
        Ok(CommThread { peers, device, inbox, shared, communicator, ended, watched })
    }

    /// Hands over a closed round, to be queued.
    pub(super) fn post(&self, mut round: Round, device: Device) -> Result<()> {
        round.ready = device::mark(device)?;
        let mut state = self.shared.lock();
        state.posted += 1;
        round.ticket.close(state.posted);
        // If the thread has ended, those who wait for the round hear why.
        let _ = self.inbox.as_ref().map(|inbox| inbox.send(round));
        Ok(())
    }

    /// Has what the calling thread queues on `device` from here on wait for the round's end: sleeps until the round is queued
    /// there. On streams of plain memory it sleeps until the round is done.
    pub(super) fn wait(&self, ticket: &Ticket, device: Device) -> Result<()> {
        let number = ticket.number();
        let queued = || ticket.end().and_then(End::event);
        self.until(|state| state.passed >= number || queued().is_some())?;
        if let Some(end) = queued() {
            // First this: what is queued behind it from now on may be asked to be settled by another thread.
            let mut state = self.shared.lock();
            state.held = state.held.max(number);
            drop(state);
            end.hold(device)?;
        }
        Ok(())
    }

    /// Sleeps until every round that a computing stream was made to wait for is done. Right after a read of what was computed
    /// behind them, no longer than the communication thread takes to look.
    pub(super) fn settled(&self) -> Result<()> {
        let held = self.shared.lock().held;
        self.shared.changed.notify_all();
        self.until(|state| state.passed >= held)
    }

    /// Fails if a round has, or the watch over the next rank.
    pub(super) fn look(&self) -> Result<()> {
        let mut state = self.shared.lock();
        if let Some(what) = state.why.clone() {
            return Err(state.failed.take().unwrap_or(Error::Reported { what }));
        }
        let late = state.call.take_if(|call| call.0.elapsed() > self.peers.timeout());
        drop(state);
        late.map_or(Ok(()), |(_, what)| Err(self.held_up(&what)))
    }

    /// Hears that nobody exchanges any more.
    pub(super) fn part(&self) {
        self.shared.lock().parted = true;
    }

    /// Sleeps until the rounds are as far as that.
    fn until(&self, far: impl Fn(&State) -> bool) -> Result<()> {
        loop {
            self.look()?;
            let state = self.shared.lock();
            if far(&state) {
                return Ok(());
            }
            if state.why.is_some() {
                continue;
            }
            let changed = self.shared.changed.wait_timeout(state, WORDS);
            let (state, slept) = changed.unwrap_or_else(PoisonError::into_inner);
            if slept.timed_out() && state.why.is_none() {
                drop(state);
                // The communication thread may be waiting for a rank that is well, and waits for the lost one itself.
                if let Some(word) = self.peers.word() {
                    self.shared.fail(word.error());
                }
            }
        }
    }

    /// The communication thread hangs in a call: the communicator is given up under it.
    fn held_up(&self, what: &str) -> Error {
        let error = self.peers.held_up(what);
        self.shared.lock().why.get_or_insert_with(|| error.to_string());
        let (communicator, device) = (self.communicator.upgrade(), self.device);
        let abort = move || {
            // It is given up wherever this thread is.
            let _ = device::enter(device);
            drop(communicator.inspect(|communicator| communicator.abort()));
        };
        // Without a thread for it, it ends with the process.
        let _ = std::thread::Builder::new().spawn(abort);
        error
    }
}

impl Drop for CommThread {
    fn drop(&mut self) {
        // The thread works off what it has, and destroys the communicator if nobody has given it up.
        self.inbox = None;
        self.part();
        let over = self.shared.lock().why.is_some() || self.peers.word().is_some();
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
    let watching = move || {
        let _end = end;
        // No exchange: nobody can be behind it.
        let id = ExchangeId { axis: 0, number: 0 };
        if let Err(error) = farewell.wait(LONG) {
            shared.fail(peers.missing("the watch over the next rank", id, next, &error));
        }
    };
    let begun = std::thread::Builder::new().spawn(watching);
    begun.map_err(|error| refused(format!("there is no thread for a watch: {error}")))?;
    Ok(ended)
}
