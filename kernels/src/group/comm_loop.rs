//! The two threads of a communicator: one waits for the ranks of a round and queues it, the other waits for its end.

use std::sync::mpsc::{Receiver, SendError, Sender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rccl_sys::Communicator;
use tch::{Device, Kind, Tensor};

use super::comm_stream::{CommStream, End, Round, refused};
use super::parts::{Part, parts};
use super::peers::{Peers, late};
use super::vanish;
use super::word::seconds;
use crate::{Error, Result, device};

/// Tag of the messages that a rank has reached a round, on the axis of all ranks. Exchanges have smaller tags; the tags
/// of other axes are `FAREWELL + axis`.
const TOKEN: i32 = 1 << 30;

/// Tag of a rank's farewell to the rank that watches it.
pub(super) const FAREWELL: i32 = TOKEN + 1;

/// How long to wait for the communication thread to end, and for one that failed: other ranks wait to hear why.
pub(super) const PARTING: [Duration; 2] = [Duration::from_secs(5), Duration::from_millis(500)];

/// Pause between checks for a reason that another rank left in the store.
pub(super) const WORDS: Duration = Duration::from_millis(100);

/// The ranks of a communicator, which numbers them by their positions in this list.
#[derive(Clone, Debug)]
pub(super) struct Members {
    /// The axis of their line; 0 is the axis of all ranks.
    pub(super) axis: usize,
    pub(super) members: Vec<u32>,
}

impl Members {
    /// The position of a rank; fails for a rank that is not a member.
    pub(super) fn place(&self, rank: u32) -> Result<u32> {
        let place = self.members.iter().position(|member| *member == rank);
        place.map(|place| place as u32).ok_or_else(|| refused(format!("rank {rank} is elsewhere")))
    }

    /// Tag of the messages that a rank has reached a round.
    pub(super) fn token(&self) -> i32 {
        if self.axis == 0 { TOKEN } else { FAREWELL + self.axis as i32 }
    }
}

/// Shortest and longest pause between polls of a round; in between, an eighth of the time since the round was queued.
const LOOKS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(2)];

/// Exit code of a process whose device does not return, as for any fault of the machine.
const STUCK: u8 = 6;

/// State shared by the communication thread and the threads that wait for it.
#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    /// Number of rounds that were closed, of those that are done, and of those that a computing stream waits for.
    pub(super) posted: u64,
    pub(super) passed: u64,
    pub(super) held: u64,
    /// What has failed; `failed` is the same error until a caller takes it.
    pub(super) why: Option<String>,
    pub(super) failed: Option<Error>,
    /// Set when the exchanging side ends: no more rounds come.
    pub(super) parted: bool,
    /// When the communication thread entered its current library call, and for which round.
    pub(super) call: Option<(Instant, String)>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this is the first failure.
    pub(super) fn fail(&self, error: Error) -> bool {
        let mut state = self.lock();
        let first = state.why.is_none();
        if first {
            state.why = Some(error.to_string());
            state.failed = Some(error);
        }
        self.changed.notify_all();
        first
    }
}

/// State of both threads.
pub(super) struct CommLoop {
    pub(super) peers: Arc<Peers>,
    pub(super) party: Members,
    pub(super) device: Device,
    pub(super) communicator: Arc<Communicator>,
    /// Held by the thread that is inside a call of the communicator.
    pub(super) inside: Mutex<()>,
    pub(super) shared: Arc<Shared>,
}

impl CommLoop {
    /// Queues round after round; a second thread waits for the end of each.
    pub(super) fn issue_all(
        self: Arc<Self>,
        stream: &CommStream,
        rounds: Receiver<Round>,
        end: Sender<()>,
    ) {
        // Capacity 0: a round is handed over once the one before it is done.
        let (hand, queued) = sync_channel(0);
        let other = Arc::clone(&self);
        let begun = std::thread::Builder::new().spawn(move || {
            let _end = end;
            match device::enter(other.device) {
                Ok(()) => other.see_through(queued),
                Err(error) => {
                    other.shared.fail(error);
                    other.communicator.abort();
                }
            }
        });
        if let Err(error) = begun {
            self.shared.fail(refused(format!("there is no thread for it: {error}")));
            return self.communicator.abort();
        }
        for round in rounds {
            let round = match self.pass(stream, &round) {
                Ok(()) => match hand.send(round) {
                    Ok(()) => continue,
                    // The other thread has failed and given up everything.
                    Err(SendError(round)) => round,
                },
                Err(error) => {
                    self.give_up(error, &round);
                    round
                }
            };
            if round.ticket.end().is_none()
                && let Ok(end) = stream.mark()
            {
                round.ticket.queued(end);
            }
            return release(round);
        }
    }

    /// Waits for the end of each queued round, in order.
    fn see_through(&self, queued: Receiver<Round>) {
        for round in queued {
            if let Err(error) = self.through(&round) {
                self.give_up(error, &round);
                return release(round);
            }
            drop(round);
            self.shared.lock().passed += 1;
            self.shared.changed.notify_all();
        }
    }

    /// Records the failure first, because giving up may hang. The round keeps its tensors until then.
    fn give_up(&self, error: Error, round: &Round) {
        self.fail(error, round);
        self.communicator.abort();
    }

    fn fail(&self, error: Error, round: &Round) {
        if self.shared.fail(self.named(error, round)) {
            self.see_it_end();
        }
    }

    /// The same error with the ranks of the round, which the library's message does not name.
    fn named(&self, error: Error, round: &Round) -> Error {
        let Error::Foreign { call, reason } = error else { return error };
        let ranks: Vec<String> = round.partners().iter().map(u32::to_string).collect();
        let (me, others) = (self.peers.rank(), ranks.join(", "));
        let reason = format!("{reason}, on rank {me} in {} with ranks {others}", round.operation);
        Error::Foreign { call, reason }
    }

    /// Ends the process if the exchanges are not given up within two deadlines of a failure (another thread may spend
    /// one of them waiting over Gloo): by then a thread hangs in a device call that will not return.
    fn see_it_end(&self) {
        if self.device == Device::Cpu {
            return;
        }
        let (peers, shared) = (Arc::clone(&self.peers), Arc::clone(&self.shared));
        // If this thread cannot be started, the launcher has to end the process.
        let _ = std::thread::Builder::new().spawn(move || {
            let patience = 2 * peers.timeout();
            std::thread::sleep(patience);
            let state = shared.lock();
            if let Some(why) = state.why.as_ref().filter(|_| !state.parted) {
                let text = format!(
                    "{why}; its device did not come back for another {}",
                    seconds(patience)
                );
                eprintln!("rank {}: {text}", peers.rank());
                peers.report(&text);
                vanish(STUCK);
            }
        });
    }

    /// Waits for the round's ranks, queues the round and wakes the threads that wait for it.
    fn pass(&self, stream: &CommStream, round: &Round) -> Result<()> {
        self.meet(round, &round.partners())?;
        let inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut state = self.shared.lock();
            if state.why.is_some() {
                return Err(refused("given up"));
            }
            state.call = Some((Instant::now(), round.operation.clone()));
        }
        let queued = self.queue(stream, round);
        let in_time = self.shared.lock().call.take().is_some();
        let has_no_error =
            queued.and_then(|end| self.communicator.error().map(|()| end).map_err(refused));
        match has_no_error {
            Ok(end) if in_time => round.ticket.queued(end),
            Ok(_) => return Err(refused("too late")),
            Err(error) => {
                // Before the other thread sees the error: it would attribute it to the previous round.
                self.fail(error, round);
                return Err(refused("given up"));
            }
        }
        drop(inside);
        // Notify under the lock, so that a thread that has just checked the state does not miss it.
        let _state = self.shared.lock();
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Tells the round's ranks that this one has reached the round, and waits for the same message from each of them.
    fn meet(&self, round: &Round, partners: &[u32]) -> Result<()> {
        let missing = |peer, error| match late(&error) {
            true => self.peers.stalled(&round.operation, round.id, partners),
            false => self.peers.missing(&round.operation, round.id, peer, &error),
        };
        let (token, tag) = (|| Tensor::zeros([1], (Kind::Uint8, Device::Cpu)), self.party.token());
        let mut words = Vec::new();
        for rank in partners.iter().copied() {
            let has_no_error = self.peers.receive(rank, &token(), tag);
            words.push((rank, has_no_error.map_err(|error| missing(rank, error))?));
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

    /// Queues the transfers, part after part, and an event that marks the end of all.
    fn queue(&self, stream: &CommStream, round: &Round) -> Result<End> {
        stream.after(round.ready.as_ref())?;
        let places = |transfers: &[(u32, Tensor)]| {
            transfers.iter().map(|(rank, _)| self.party.place(*rank)).collect::<Result<Vec<_>>>()
        };
        let (to, from) = (places(&round.sends)?, places(&round.receives)?);
        let (world, me) = (self.party.members.len() as u32, self.party.place(self.peers.rank())?);
        let (all, raw) = (&self.communicator, stream.raw());
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let call = |Part { sends, receives }: Part| {
            for (to, (_, tensor)) in sends.into_iter().map(|at| (to[at], &round.sends[at])) {
                let data = tensor.data_ptr().cast_const();
                // SAFETY: the round keeps the tensor, contiguous and on the stream's device, until the stream has
                // passed it, and the sender does not write it before.
                unsafe { all.send(data, bytes(tensor), to, raw)? };
            }
            for (from, (_, tensor)) in
                receives.into_iter().map(|at| (from[at], &round.receives[at]))
            {
                // SAFETY: as above; the tensor is neither read nor written before it has arrived.
                unsafe { all.receive(tensor.data_ptr(), bytes(tensor), from, raw)? };
            }
            Ok(())
        };
        for part in parts(world, me, &to, &from).into_values() {
            all.together(|| call(part)).map_err(refused)?;
        }
        stream.mark()
    }

    /// Waits until the stream has passed the round; fails if the library reports an error.
    fn through(&self, round: &Round) -> Result<()> {
        let end = round.ticket.end().ok_or_else(|| refused("it was not queued"))?;
        let (start, mut looked, [least, most]) = (Instant::now(), Instant::now(), LOOKS);
        loop {
            let over = end.is_over()?;
            if self.has_no_error()? && over {
                return Ok(());
            }
            if !over && start.elapsed() > self.peers.timeout() {
                return Err(self.peers.stalled(&round.operation, round.id, &round.partners()));
            }
            if looked.elapsed() > WORDS {
                looked = Instant::now();
                if let Some(word) = self.peers.word() {
                    return Err(word.error());
                }
            }
            let state = self.shared.lock();
            if state.why.is_some() {
                return Err(refused("given up"));
            }
            // `settled` wakes this thread early.
            let pause = (start.elapsed() / 8).clamp(least, most);
            drop(self.shared.changed.wait_timeout(state, pause));
        }
    }

    /// Whether the library was asked for errors and has none. It is not asked while the next round is being queued; a
    /// hang there is noticed by the threads that wait for the round ([`CommThread::look`]).
    fn has_no_error(&self) -> Result<bool> {
        let _inside = match self.inside.try_lock() {
            Ok(inside) => inside,
            Err(TryLockError::Poisoned(inside)) => inside.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        self.communicator.error().map(|()| true).map_err(refused)
    }
}

/// Drops a failed round after its stream has passed it. Giving up a communicator does not end its kernels, which could
/// then write into memory that was freed and reused. A round that the stream does not pass in time is leaked.
fn release(round: Round) {
    let (start, end) = (Instant::now(), round.ticket.end());
    while let Some(end) = end
        && start.elapsed() < PARTING[1]
    {
        match end.is_over() {
            Ok(true) => return,
            Ok(false) => std::thread::sleep(LOOKS[1]),
            Err(_) => break,
        }
    }
    std::mem::forget(round);
}
