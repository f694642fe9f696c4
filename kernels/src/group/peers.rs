//! The ranks of a run: what they send to each other, and what is reported about a missing one.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use super::clock::{LOOK, refuse_date};
use super::exchange_id::ExchangeId;
use super::ffi::{shim_group_free, shim_recv, shim_send};
use super::key::{Bytes32, PROOF, is_loopback, nonce, same};
use super::mailbox::{Mailbox, PAUSE};
use super::meeting::{announce, meet};
use super::store::TAKEN;
use super::whereabouts::{RankProgress, observer};
use super::word::{StopReason, seconds};
use super::work::GlooTransfer;
use super::{KeyValueStore, RankAddress, SentBytes, UnauthenticatedConnections, bridge};
use crate::shim::guarded;
use crate::{Error, Result};

/// Tag of the proofs; exchanges and the communication thread use smaller ones.
const PROVING: c_int = (1 << 30) + 2;

/// How long to wait for the report of a rank that ends.
const WORD: Duration = Duration::from_millis(600);

/// How long ranks that time out together wait for each other's entries in the store. Well below [`WORD`]: later their
/// connections may be closed.
const ROLL: Duration = Duration::from_millis(300);

/// The part of [`ROLL`] after which a rank that lives has published each exchange that it had begun before.
const PUBLISHED: Duration = PAUSE.saturating_mul(2);

/// All ranks of a run, from the view of one of them.
#[derive(Debug)]
pub(super) struct Peers {
    place: RankAddress,
    timeout: Duration,
    store: Arc<KeyValueStore>,
    handle: *mut c_void,
    /// The progress of this rank.
    progress: Mailbox,
    /// Held while a transfer is begun: threads of several axes may do so at once.
    posting: Mutex<()>,
    /// Whether the report that stands is this rank's.
    spoke_first: AtomicBool,
    /// The machine of each rank.
    nodes: Vec<String>,
    /// Bytes sent to any rank, and to ranks on other machines.
    sent: [AtomicU64; 2],
}

// SAFETY: Gloo locks its own sends and receives; what must not overlap is begun under `posting` or by one thread.
unsafe impl Send for Peers {}
// SAFETY: as above.
unsafe impl Sync for Peers {}

impl Drop for Peers {
    fn drop(&mut self) {
        // Before the connections close: who misses this rank then reads where it was.
        self.progress.flush();
        // SAFETY: made by `shim_group_open`, freed once; a work keeps the parts that it needs alive.
        unsafe { shim_group_free(self.handle) }
    }
}

impl Peers {
    /// Meets the other ranks at the store, which this rank holds if it `serves`. The error names ranks that do not come
    /// within `timeout`.
    pub(super) fn open(
        place: &RankAddress,
        serves: bool,
        timeout: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Peers> {
        refuse_date()?;
        let RankAddress { rank, host, port, rank_0_serves, name, key, .. } = place;
        let store = match serves {
            true => KeyValueStore::serve(host, *port, name, key, timeout),
            false => KeyValueStore::connect(host, *port, name, key, timeout),
        };
        let store = store.map_err(|error| match error {
            Error::Stranger { what } => {
                let what = format!("rank {rank} met an unauthenticated connection: {what}");
                Error::Stranger { what }
            }
            error @ Error::Short { .. } => error,
            Error::Foreign { call: TAKEN, reason } => taken(place, &reason),
            error => {
                let holder = if *rank_0_serves { "rank 0 holds" } else { "the launcher holds" };
                Error::Missing {
                    what: format!(
                        "rank {rank} did not reach the store at {host}:{port}, which {holder}: {error}; check that it runs \
                         there, MASTER_ADDR, MASTER_PORT, and the firewall"
                    ),
                }
            }
        })?;
        Peers::at(store, place, timeout, tell)
    }

    /// The same with an open store.
    pub(super) fn at(
        store: KeyValueStore,
        place: &RankAddress,
        timeout: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Peers> {
        let RankAddress { rank, world, host, port, interface, .. } = place;
        let own_nonce = nonce()?;
        let met =
            announce(&store, place, &own_nonce).and_then(|()| meet(&store, place, timeout, tell));
        let met = met.inspect_err(|error| {
            if let Error::Mistaken { .. } = error {
                linger(place);
            }
        })?;
        let (nodes, nonces): (Vec<_>, Vec<_>) = met.into_iter().unzip();
        // On one machine its own host name may not resolve; the loopback always works.
        let device_host = if is_loopback(host) { "127.0.0.1" } else { "" };
        let store = Arc::new(store);
        let (there, number) = (Arc::clone(&store), *rank);
        let post = move |progress: &RankProgress| progress.post(&there, number);
        let progress = Mailbox::open(RankProgress::start(), post)?;
        let connected = bridge::connect(&store, *rank, *world, [interface, device_host], timeout);
        let handle = connected.map_err(|error| match error {
            Error::Reported { .. } | Error::Mistaken { .. } | Error::Short { .. } => error,
            error => Error::Missing {
                what: format!(
                    "all {world} ranks came to {host}:{port}, but rank {rank} cannot connect with each of them: {error}; check \
                     GLOO_SOCKET_IFNAME ({}) and the firewall",
                    if interface.is_empty() { "not set" } else { interface.as_str() }
                ),
            },
        })?;
        let (place, posting) = (place.clone(), Mutex::new(()));
        let spoke_first = AtomicBool::new(false);
        let sent = [AtomicU64::new(0), AtomicU64::new(0)];
        let peers =
            Peers { place, timeout, store, handle, progress, posting, spoke_first, nodes, sent };
        peers.prove(&nonces)?;
        Ok(peers)
    }

    /// Proves the run's key to each other rank and checks the proof of that rank, on the connection that tensors will
    /// use, before anything else is sent. `nonces` are those that the ranks left in the store.
    fn prove(&self, nonces: &[Bytes32]) -> Result<()> {
        let RankAddress { rank, world, name, key, .. } = &self.place;
        let proof = |from: u32, to: u32| {
            let numbers = [*world, from, to].map(u32::to_le_bytes).concat();
            let [sender, receiver] = [from, to].map(|rank| &nonces[rank as usize][..]);
            key.proof("transfers", &[name.as_bytes(), &numbers, sender, receiver])
        };
        // Another rank may have found an impostor first and have left.
        let silent = |peer: u32, error: &Error| match self.word_of_another() {
            Some(word) => word.error(),
            None => Error::Missing {
                what: format!(
                    "rank {peer} has joined, but rank {rank} gets no answer from it: {error}"
                ),
            },
        };
        let mut heard = Vec::new();
        for from in self.others() {
            let word = Tensor::f_zeros([PROOF as i64], (Kind::Uint8, Device::Cpu))?;
            let work = self.receive(from, &word, PROVING).map_err(|error| silent(from, &error))?;
            heard.push((from, word, work));
        }
        let mut said = Vec::new();
        for to in self.others() {
            let word = Tensor::f_from_slice(&proof(*rank, to))?;
            let work = self.send(to, &word, PROVING).map_err(|error| silent(to, &error))?;
            said.push((to, work));
        }
        for (from, word, work) in heard {
            work.wait(self.timeout).map_err(|error| silent(from, &error))?;
            let mut found = Bytes32::default();
            word.f_copy_data(&mut found, PROOF)?;
            if !same(&proof(from, *rank), &found) {
                return Err(self.impostor(from));
            }
        }
        for (to, work) in said {
            work.wait(self.timeout).map_err(|error| silent(to, &error))?;
        }
        Ok(())
    }

    /// Ends the meeting: the process connected as `peer` does not have the run's key.
    fn impostor(&self, peer: u32) -> Error {
        let rank = self.place.rank;
        let what = format!(
            "what is connected to rank {rank} in the place of rank {peer} did not prove the run's key; check who else reaches \
             these machines, and start again"
        );
        // Best effort: the others do not hear from this rank otherwise either.
        let _ = self.store.leave(&StopReason::stops(what.clone()));
        Error::Missing { what }
    }

    /// Connections that the store refused for lack of the run's key; `None` if the store does not answer.
    pub(super) fn unauthenticated(&self) -> Option<UnauthenticatedConnections> {
        self.store.unauthenticated().ok()
    }

    pub(super) fn wait_at_most(&mut self, timeout: Duration) {
        self.timeout = timeout;
        self.store.wait_at_most(timeout);
    }

    /// This rank, from 0.
    pub(super) fn rank(&self) -> u32 {
        self.place.rank
    }

    /// How many ranks there are.
    pub(super) fn world(&self) -> u32 {
        self.place.world
    }

    /// How long to wait for a rank.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The store that the ranks share, for messages outside of exchanges.
    pub(super) fn store(&self) -> Arc<KeyValueStore> {
        Arc::clone(&self.store)
    }

    /// The machine of each rank, as its [`RankAddress`] named it.
    pub(super) fn nodes(&self) -> &[String] {
        &self.nodes
    }

    /// Bytes that this rank has sent since it met the others, without libtorch's own collectives.
    pub(super) fn sent(&self) -> SentBytes {
        let [all, between] = &self.sent;
        SentBytes {
            all: all.load(Ordering::Relaxed),
            between_nodes: between.load(Ordering::Relaxed),
        }
    }

    /// libtorch's process group, for the shim.
    pub(super) fn handle(&self) -> *mut c_void {
        self.handle
    }

    pub(super) fn count(&self, to: u32, bytes: u64) {
        let crosses = self.nodes[to as usize] != self.nodes[self.place.rank as usize];
        let [all, between] = &self.sent;
        all.fetch_add(bytes, Ordering::Relaxed);
        between.fetch_add(if crosses { bytes } else { 0 }, Ordering::Relaxed);
    }

    /// The other ranks, starting with the next one, so that not all ranks send to the same one first.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let RankAddress { rank, world, .. } = self.place;
        (1..world).map(move |distance| (rank + distance) % world)
    }

    /// Publishes what this rank is doing ("step 12, micro-batch 3"), for the error messages of ranks that miss it. Best
    /// effort: if the store is lost, the next exchange fails.
    pub(super) fn reached(&self, whereabouts: &str) {
        self.progress.update(|now| whereabouts.clone_into(&mut now.place));
        self.show();
    }

    /// Shows this rank's progress to a preloaded library, in the thread that made it and before that continues.
    fn show(&self) {
        if let Some(observer) = observer() {
            observer.show(&self.progress.newest());
        }
    }

    /// Publishes the time in which this rank computed a micro-batch of `step`.
    pub(super) fn computed(&self, step: u64, time: Option<Duration>) {
        self.progress.update(|now| now.add(step, time));
    }

    /// Publishes that the next exchange of an axis begins; returns its id. Fails if the store has failed to take what
    /// this rank published before.
    pub(super) fn next(&self, axis: usize, operation: &str) -> Result<ExchangeId> {
        let number = self.progress.update(|now| {
            now.begun[axis] += 1;
            operation.clone_into(&mut now.exchange);
            now.begun[axis]
        });
        self.show();
        match self.progress.failure() {
            Some(error) => Err(self.without_store(operation, &error)),
            None => Ok(ExchangeId { axis, number }),
        }
    }

    /// Reports why this rank stops, for the ranks that will miss it. The first report stands.
    pub(super) fn report(&self, reason: &str) {
        let word = StopReason::stops(format!("rank {}: {reason}", self.place.rank));
        self.progress.flush();
        if self.store.leave(&word).is_ok_and(|other| other.is_none()) {
            self.spoke_first.store(true, Ordering::Relaxed);
        }
        linger(&self.place);
    }

    /// Whether the report that stands is this rank's: then this rank prints it.
    pub(super) fn spoke_first(&self) -> bool {
        self.spoke_first.load(Ordering::Relaxed)
    }

    /// The rank after this one, and the one before.
    pub(super) fn neighbours(&self) -> (u32, u32) {
        let RankAddress { rank, world, .. } = self.place;
        ((rank + 1) % world, (rank + world - 1) % world)
    }

    /// Starts to send `tensor`, which is contiguous and on the CPU, and is kept as long as the work.
    pub(super) fn send(&self, to: u32, tensor: &Tensor, tag: c_int) -> Result<GlooTransfer> {
        assert!(tensor.is_contiguous() && tensor.device() == Device::Cpu, "plain memory is sent");
        let _posting = self.posting.lock();
        let mut work = ptr::null_mut();
        // SAFETY: the tensor is alive, and the work keeps it alive; the out-pointer outlives the call.
        guarded("send", unsafe {
            shim_send(self.handle, tensor.as_ptr(), to as c_int, tag, &raw mut work)
        })?;
        Ok(GlooTransfer(work))
    }

    /// Starts to receive into `tensor`, in the same way.
    pub(super) fn receive(&self, from: u32, tensor: &Tensor, tag: c_int) -> Result<GlooTransfer> {
        let _posting = self.posting.lock();
        let mut work = ptr::null_mut();
        // SAFETY: the tensor is alive, and the work keeps it alive; the out-pointer outlives the call.
        guarded("receive", unsafe {
            shim_recv(self.handle, tensor.as_ptr(), from as c_int, tag, &raw mut work)
        })?;
        Ok(GlooTransfer(work))
    }

    /// The error for a `peer` that could not be reached in exchange `id`.
    pub(super) fn missing(
        &self,
        operation: &str,
        id: ExchangeId,
        peer: u32,
        error: &Error,
    ) -> Error {
        if late(error) {
            return self.stalled(operation, id, &[peer]);
        }
        match self.word_of_another() {
            Some(word) => word.error(),
            None => self.blame(operation, vec![peer], false),
        }
    }

    /// The error when time runs out in something that `partners` share with this rank. Suspects are the ranks that have
    /// not come as far as this exchange, also once everything begun before is published; or else those that were behind
    /// when time ran out, or else the partners. But a suspect may itself be waiting for some other rank.
    /// So each rank that times out writes this into the store. Of the ranks that do not, the suspects are missing, or
    /// all if there are no suspects among them.
    pub(super) fn stalled(&self, operation: &str, id: ExchangeId, partners: &[u32]) -> Error {
        if let Some(word) = self.word() {
            return word.error();
        }
        let others: Vec<u32> = self.others().collect();
        let behind = self.behind(id, partners);
        let (signed, start) = (self.sign() && others.len() > 1, Instant::now());
        let mut still = behind.clone();
        if signed && !behind.is_empty() {
            std::thread::sleep(PUBLISHED);
            still.retain(|rank| self.is_behind(*rank, id));
        }
        let suspects = [still, behind, partners.to_vec()].into_iter().find(|some| !some.is_empty());
        let suspects = suspects.unwrap_or_default();
        let silent = if signed { self.silent(others, start) } else { others };
        let near = silent.iter().copied().filter(|rank| suspects.contains(rank)).collect();
        let lost = [near, silent, suspects].into_iter().find(|lost| !lost.is_empty());
        self.blame(operation, lost.unwrap_or_default(), true)
    }

    /// Notes in the store that this rank timed out, after its progress: a rank that reads the note can read how far
    /// this one has come. Returns whether the store has the note.
    fn sign(&self) -> bool {
        self.progress.flush();
        self.store.set(&late_key(self.place.rank), "here").is_ok()
    }

    /// Which of `suspects` do not note within [`ROLL`] of `start` that they timed out, too; all if each of them does.
    fn silent(&self, mut suspects: Vec<u32>, start: Instant) -> Vec<u32> {
        let all = suspects.clone();
        while !suspects.is_empty() && start.elapsed() < ROLL {
            suspects.retain(|rank| !matches!(self.store.find(&late_key(*rank)), Ok(Some(_))));
            std::thread::sleep(LOOK);
        }
        if suspects.is_empty() { all } else { suspects }
    }

    /// Ranks that have not come as far as an exchange; a rank that only waits like this one has. In a line only its own
    /// ranks count, and only those that this rank waits for are checked.
    fn behind(&self, id: ExchangeId, partners: &[u32]) -> Vec<u32> {
        let asked = |rank: &u32| id.axis == 0 || partners.contains(rank);
        self.others().filter(asked).filter(|rank| self.is_behind(*rank, id)).collect()
    }

    /// Whether a rank has not published that it has begun this exchange.
    fn is_behind(&self, rank: u32, id: ExchangeId) -> bool {
        self.seen(rank).is_none_or(|seen| seen.begun[id.axis] < id.number)
    }

    /// Reports that these ranks are missing, unless a report stands already.
    fn blame(&self, operation: &str, mut lost: Vec<u32>, late: bool) -> Error {
        lost.sort_unstable();
        let numbers = lost.clone();
        let seen = |rank: &u32| {
            let seen = self.seen(*rank).map_or_else(|| "nowhere".to_owned(), |seen| seen.place);
            format!("rank {rank}, last seen at {seen}")
        };
        let lost = lost.iter().map(seen).collect::<Vec<_>>().join("; ");
        let how = if late {
            format!("did not come within {}", seconds(self.timeout))
        } else {
            "has ended".to_owned()
        };
        let report = format!("a rank {how}: {lost}; missed in {operation} at {}", self.here());
        self.report_once(operation, numbers, report)
    }

    /// The error when this rank itself hangs in a library call.
    pub(super) fn held_up(&self, operation: &str) -> Error {
        let (time, here) = (seconds(self.timeout), self.here());
        let report = format!("a call for {operation} did not return within {time}, at {here}");
        self.report_once(operation, Vec::new(), report)
    }

    /// How often this rank has published its progress.
    #[cfg(test)]
    pub(super) fn posts(&self) -> u64 {
        self.progress.posts()
    }

    /// What this rank is doing.
    fn here(&self) -> String {
        self.progress.newest().place
    }

    /// Reports that this rank misses others, unless a report stands already.
    fn report_once(&self, operation: &str, lost: Vec<u32>, report: String) -> Error {
        let text = format!("rank {}: {report}", self.place.rank);
        self.progress.flush();
        match self.store.leave(&StopReason::loses(lost, text)) {
            Err(error) => self.without_store(operation, &error.to_string()),
            Ok(None) => {
                self.spoke_first.store(true, Ordering::Relaxed);
                Error::Missing { what: report }
            }
            Ok(Some(first)) => first.error(),
        }
    }

    /// The report that stands of why the ranks stop, if there is one.
    pub(super) fn word(&self) -> Option<StopReason> {
        self.store.word().ok()?
    }

    /// The lost ranks of the report that stands; unknown if the store is lost.
    pub(super) fn lost(&self) -> Option<Vec<u32>> {
        self.store.word().map_or(Some(Vec::new()), |word| word?.lost)
    }

    /// Another rank's reason to stop, if it reports one soon: a rank that misses a third rank first closes its own
    /// connections, and would be mistaken for the lost one.
    fn word_of_another(&self) -> Option<StopReason> {
        let start = Instant::now();
        while start.elapsed() < WORD {
            match self.store.word() {
                Ok(None) => std::thread::sleep(LOOK),
                Ok(found) => return found,
                Err(_) => return None,
            }
        }
        None
    }

    fn without_store(&self, operation: &str, error: &str) -> Error {
        let holder = if self.place.rank_0_serves { "rank 0" } else { "the launcher" };
        // This rank is cut off, so no other rank can report for it.
        self.spoke_first.store(true, Ordering::Relaxed);
        Error::Missing {
            what: format!(
                "{holder}, which holds the store, has ended or cannot be reached: missed in {operation} ({error})"
            ),
        }
    }

    /// The progress of a rank, as far as known.
    fn seen(&self, rank: u32) -> Option<RankProgress> {
        RankProgress::find(&self.store, rank).ok()?
    }

    /// Reports that this rank counts as lost, by its own judgement.
    pub(super) fn give_up(&self, why: &str) {
        let text = format!("rank {}: {why}", self.place.rank);
        let word = StopReason::loses(vec![self.place.rank], text);
        self.progress.flush();
        if self.store.leave(&word).is_ok_and(|other| other.is_none()) {
            self.spoke_first.store(true, Ordering::Relaxed);
        }
    }
}

/// Key of the note that a rank timed out.
fn late_key(rank: u32) -> String {
    format!("late/{rank}")
}

/// If the store ends with this process, gives the other ranks a moment to read it.
fn linger(place: &RankAddress) {
    if place.rank_0_serves && place.rank == 0 {
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// The error if the port of this rank's store is taken. If the other process was started as this same rank, both of
/// them report that; otherwise the other one would wait for the rest in vain.
fn taken(place: &RankAddress, reason: &str) -> Error {
    let RankAddress { rank, host, port, name, key, .. } = place;
    if let (Some(store), Ok(own_nonce)) =
        (KeyValueStore::ready(host, *port, name, key, WORD), nonce())
    {
        // If this process registers first, the other one detects the conflict.
        let told = announce(&store, place, &own_nonce).and_then(|()| store.wait("nobody", WORD));
        if let Err(error @ Error::Mistaken { .. }) = told {
            return error;
        }
    }
    Error::Mistaken {
        what: format!(
            "rank {rank} cannot hold the store at {host}:{port}: {TAKEN} ({reason}); is another rank 0 running, or another \
             program? End it, or choose another MASTER_PORT"
        ),
    }
}

/// Whether the error is a timeout.
pub(super) fn late(error: &Error) -> bool {
    matches!(error, Error::Late { .. })
}
