//! Moves tensors between the devices of ranks with RCCL or NCCL; ranks get the communicator's id through the group.
//!
//! Properties of these libraries, and what follows:
//! - A send completes with its receive: two ranks that each queue a send before the receive deadlock. So transfers come
//!   in rounds. A round is one group call, within which the library advances all transfers together. As a call holds at
//!   most 2,048 transfers, a larger round is several calls, in an order that cannot deadlock (see `parts`): from 1,025
//!   ranks on, or with several transfers between two of very many.
//! - Work on a stream runs in order. Both ends put a transfer into the round of the same number, and every rank closes
//!   its rounds in ascending order. Of all unfinished rounds take one with the smallest number (of the oldest
//!   exchange): all that its ranks have queued before is done, so it is first on the stream of each of them, and runs.
//!   Before a rank closes a round it may only wait for arrivals of rounds with smaller numbers; by induction none is
//!   stuck. Where exchanges overlap (new weights, with those of the next step), every rank closes the rounds of all of
//!   them in one order, which takes the place of their numbers.
//! - Calls may block, and a communicator may be used by one thread at a time. So one thread, the communication thread,
//!   makes all calls but one, and computing threads never block in one. Another thread polls the rounds under way, and
//!   asks the library for errors while the first is in no call (see `comm_loop`).
//! - A kernel that waits for a rank that still computes keeps a GPU busy, and one whose rank is lost never returns. So
//!   the ranks of a round first tell each other over Gloo that they have reached it: a rank that is lost before is
//!   noticed there, at once and by name. After that the end of the round is polled against the deadline, together with
//!   errors of the library and reasons that other ranks left, and the communicator is given up if necessary. If the
//!   call itself hangs, a thread that waits for the round gives it up.
//! - The library does not report a rank that is lost within a round. So each rank keeps a receive from the next rank
//!   open over Gloo, which fails when that rank's connections close ([`watch`]): one rank notices at once, and the
//!   reason that it leaves in the store ends the others.
//! - Giving up a communicator may hang as well, so waits for it are short ([`PARTING`]).
//!
//! **Events instead of host waits.** After each round the communication thread records an event on its stream. A thread
//! that waits for a tensor to arrive or leave sleeps only until the round is queued, and makes the computing stream
//! wait for the event; the bytes may arrive much later. So the host runs ahead of the device. Two rounds are under way:
//! while one runs, its ranks agree on the next and queue it, so that it follows on the stream without a gap; the third
//! is queued when the first is done. More rounds would gain nothing where a round takes as long as agreeing on one, and
//! would cost memory: the tensors of a round are kept until its event has passed. Queueing the next round early does
//! not break the induction above, because it waits for no arrival of that round.
//!
//! Events add no deadlock: a stream waits for a round only where the thread would otherwise have slept until the bytes
//! arrive, and would have queued the work behind it later, too. Threads of a rank share the computing stream, so the
//! work of one may queue behind a wait of another. Each line is used by one thread; gradients are handed over by one
//! thread at a time in the order of rounds, so work queued behind a wait for one round is sent in a later round.
//!
//! **Why no wrong number reaches the ledger.** If a round fails, its event passes once the communicator is given up,
//! and later work on the stream reads whatever the memory holds. (Only numbers travel, never a size or an index, so
//! nothing else is affected.) But:
//! - The communication thread records a failure before it gives the communicator up. A number computed after a failed
//!   round is read later than that, and the reader gets the failure from its next call of an exchange or of
//!   `Group::check`.
//! - Before a rank sends anything to all others ([`super::Group::all_gather`]) it waits until every round that its
//!   stream waits for has passed without an error of the library ([`CommThread::settled`]). What it sends was read
//!   after those rounds, so this takes no longer than one poll. A step's record is made of such messages; the last are
//!   the checksums of the new state, of weights that their owners computed: new weights may arrive later, and are then
//!   read before the messages of the next step. A rank with a failure does not send them, and
//!   without them no rank can write a record.
//! - A fault found in numbers from a failed round (a loss that is not finite, a micro-batch whose checksums differ) is
//!   reported as the failure of the round ([`super::Group::trouble`]).
//! - If the library does not release the stream, a thread may sleep forever in a read of the device: if the exchanges
//!   are not given up within two more deadlines, the communication thread ends the process.
//!
//! **Where the host waits.** Over Gloo and over streams of host memory, which have no events: until the bytes have
//! arrived. Otherwise: for a round to be queued, and in [`CommThread::settled`] for what has been read already.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rccl_sys::{Communicator, UniqueId};
use tch::{Device, Kind, Tensor};

use super::comm_loop::{CommLoop, FAREWELL, Members, PARTING, Shared, State, WORDS};
use super::comm_stream::{CommStream, End, Round, Ticket, refused};
use super::exchange_id::ExchangeId;
use super::peers::Peers;
use super::word::seconds;
use crate::device;
use crate::{Error, Result};

/// Practically forever: a watch ends with a farewell or a loss.
const LONG: Duration = Duration::from_secs(365 * 24 * 3600);

/// A thread that moves tensors, round after round.
pub(super) struct CommThread {
    peers: Arc<Peers>,
    device: Device,
    /// `None` asks the thread to end.
    inbox: Option<Sender<Round>>,
    shared: Arc<Shared>,
    /// Weak: the thread owns it.
    communicator: Weak<Communicator>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Receiver<()>>,
    /// Disconnected when the watch has ended; `None` along a line, where the watch of all ranks suffices.
    watched: Option<Mutex<Receiver<()>>>,
}

impl std::fmt::Debug for CommThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommThread").finish_non_exhaustive()
    }
}

impl CommThread {
    /// Joins the communicator that `id` names. All ranks of the party do so at once; the caller reports a rank that
    /// does not join within the deadline.
    pub(super) fn join(
        peers: &Arc<Peers>,
        device: Device,
        stream: CommStream,
        party: Members,
        id: UniqueId,
    ) -> std::result::Result<CommThread, String> {
        let (inbox, rounds) = channel();
        let (joined, answer) = channel();
        let (end, ended) = channel::<()>();
        let shared = Arc::<Shared>::default();
        let (peers_there, shared_there) = (Arc::clone(peers), Arc::clone(&shared));
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
            // If joining took too long, no one receives this any more.
            if joined.send(Ok(Arc::downgrade(&communicator))).is_ok() {
                let inside = Mutex::default();
                let (peers, shared) = (peers_there, shared_there);
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

    /// Hands a closed round to the thread, which queues it.
    pub(super) fn post(&self, mut round: Round, device: Device) -> Result<()> {
        round.ready = device::mark(device)?;
        let mut state = self.shared.lock();
        state.posted += 1;
        round.ticket.close(state.posted);
        // If the thread has ended, waits for the round report why.
        let _ = self.inbox.as_ref().map(|inbox| inbox.send(round));
        Ok(())
    }

    /// Makes what the calling thread queues on `device` from here on wait for the round's end: sleeps until the round
    /// is queued there. On streams of host memory it sleeps until the round is done.
    pub(super) fn wait(&self, ticket: &Ticket, device: Device) -> Result<()> {
        let number = ticket.number();
        let queued = || ticket.end().and_then(End::event);
        self.until(|state| state.passed >= number || queued().is_some())?;
        if let Some(end) = queued() {
            // Before the wait: another thread may ask to settle work that is queued behind it.
            let mut state = self.shared.lock();
            state.held = state.held.max(number);
            drop(state);
            end.order_after(device)?;
        }
        Ok(())
    }

    /// Sleeps until every round that a computing stream waits for is done. After a read of results computed behind
    /// those rounds this takes no longer than one poll of the communication thread.
    pub(super) fn settled(&self) -> Result<()> {
        let held = self.shared.lock().held;
        self.shared.changed.notify_all();
        self.until(|state| state.passed >= held)
    }

    /// Fails if a round or the watch over the next rank has failed.
    pub(super) fn look(&self) -> Result<()> {
        let mut state = self.shared.lock();
        if let Some(what) = state.why.clone() {
            return Err(state.failed.take().unwrap_or(Error::Reported { what }));
        }
        let late = state.call.take_if(|call| call.0.elapsed() > self.peers.timeout());
        drop(state);
        late.map_or(Ok(()), |(_, operation)| Err(self.held_up(&operation)))
    }

    /// Notes that the exchanges of this rank are over.
    pub(super) fn part(&self) {
        self.shared.lock().parted = true;
    }

    /// Sleeps until the rounds have come so far.
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
                // The communication thread may be waiting for a healthy rank that itself waits for the lost one.
                if let Some(word) = self.peers.word() {
                    self.shared.fail(word.error());
                }
            }
        }
    }

    /// The communication thread hangs in a call: gives up the communicator from another thread.
    fn held_up(&self, operation: &str) -> Error {
        let error = self.peers.held_up(operation);
        self.shared.lock().why.get_or_insert_with(|| error.to_string());
        let (communicator, device) = (self.communicator.upgrade(), self.device);
        let abort = move || {
            // It is given up on whichever device this thread is.
            let _ = device::enter(device);
            drop(communicator.inspect(|communicator| communicator.abort()));
        };
        // If no thread can be started, the communicator ends with the process.
        let _ = std::thread::Builder::new().spawn(abort);
        error
    }
}

impl Drop for CommThread {
    fn drop(&mut self) {
        // The thread finishes the rounds that it has, and destroys the communicator unless it was given up.
        self.inbox = None;
        self.part();
        let over = self.shared.lock().why.is_some() || self.peers.word().is_some();
        let patience = PARTING[usize::from(over)];
        // Both receivers only report the end of a thread.
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

/// Watches the next rank on a thread until its farewell; the returned receiver reports the end.
fn watch(peers: &Arc<Peers>, shared: &Arc<Shared>) -> Result<Receiver<()>> {
    let ((next, _), word) = (peers.neighbours(), Tensor::zeros([1], (Kind::Uint8, Device::Cpu)));
    let farewell = peers.receive(next, &word, FAREWELL)?;
    let (end, ended) = channel::<()>();
    let (peers, shared) = (Arc::clone(peers), Arc::clone(shared));
    let watching = move || {
        let _end = end;
        // No exchange: no rank can lag behind it.
        let id = ExchangeId { axis: 0, number: 0 };
        if let Err(error) = farewell.wait(LONG) {
            shared.fail(peers.missing("the watch over the next rank", id, next, &error));
        }
    };
    let begun = std::thread::Builder::new().spawn(watching);
    begun.map_err(|error| refused(format!("there is no thread for a watch: {error}")))?;
    Ok(ended)
}
