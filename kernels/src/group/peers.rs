//! The ranks of a run, what they tell each other, and what is said of one that is missing.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use super::clock::{LOOK, refuse_date};
use super::exchange_id::ExchangeId;
use super::ffi::{shim_group_free, shim_recv, shim_send};
use super::key::{Bytes32, PROOF, is_loopback, nonce, same};
use super::meeting::{announce, meet};
use super::store::TAKEN;
use super::whereabouts::Whereabouts;
use super::word::{Word, seconds};
use super::work::Work;
use super::{Place, Sent, Store, Strangers, bridge};
use crate::shim::guarded;
use crate::{Error, Result};

/// The tag of the proofs; exchanges and the communication thread have smaller ones.
const PROVING: c_int = (1 << 30) + 2;

/// How long a rank that ends may take to leave word.
const WORD: Duration = Duration::from_millis(600);

/// How long ranks whose time ran out together wait for each other's sign of life: well below [`WORD`], for their connections
/// may be closed by then.
const ROLL: Duration = Duration::from_millis(300);

/// All ranks of a run, as one of them sees them: who they are and what they say.
#[derive(Debug)]
pub(super) struct Peers {
    place: Place,
    timeout: Duration,
    store: Arc<Store>,
    handle: *mut c_void,
    /// How far this rank has come.
    now: Mutex<Whereabouts>,
    /// Held while a transfer is begun: exchanges of several axes may be, each by its own thread.
    posting: Mutex<()>,
    /// Whether this rank's word of why the ranks stop is the one that stands.
    spoke_first: AtomicBool,
    /// The machine of each rank.
    nodes: Vec<String>,
    /// Bytes sent to any rank, and to ranks on other machines.
    sent: [AtomicU64; 2],
}

// SAFETY: sends and receives of Gloo take its own locks; what must not overlap is begun under `now` or by one thread.
unsafe impl Send for Peers {}
// SAFETY: as above.
unsafe impl Sync for Peers {}

impl Drop for Peers {
    fn drop(&mut self) {
        // SAFETY: made by `shim_group_open`, freed once; a work holds what it needs of it.
        unsafe { shim_group_free(self.handle) }
    }
}

impl Peers {
    /// Meets the other ranks, at the store that this one holds if it `serves`. A rank that does not come within `timeout` is
    /// named.
    pub(super) fn open(
        place: &Place,
        serves: bool,
        timeout: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Peers> {
        refuse_date()?;
        let Place { rank, host, port, rank_0_serves, name, key, .. } = place;
        let store = match serves {
            true => Store::serve(host, *port, name, key, timeout),
            false => Store::connect(host, *port, name, key, timeout),
        };
        let store = store.map_err(|error| match error {
            Error::Stranger { what } => Error::Stranger { what: format!("rank {rank} met a stranger: {what}") },
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

    /// The same where the store is known.
    pub(super) fn at(
        store: Store,
        place: &Place,
        timeout: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Peers> {
        let Place { rank, world, host, port, interface, .. } = place;
        let mine = nonce()?;
        let met = announce(&store, place, &mine).and_then(|()| meet(&store, place, timeout, tell));
        let met = met.inspect_err(|error| {
            if let Error::Mistaken { .. } = error {
                linger(place);
            }
        })?;
        let (nodes, nonces): (Vec<_>, Vec<_>) = met.into_iter().unzip();
        // On one machine its own name may lead nowhere; the loopback always works.
        let device_host = if is_loopback(host) { "127.0.0.1" } else { "" };
        let store = Arc::new(store);
        let connected = bridge::connect(&store, (*rank, *world), [interface, device_host], timeout);
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
        let (place, now) = (place.clone(), Mutex::new(Whereabouts::start()));
        let spoke_first = AtomicBool::new(false);
        let sent = [AtomicU64::new(0), AtomicU64::new(0)];
        let posting = Mutex::new(());
        let peers = Peers { place, timeout, store, handle, now, posting, spoke_first, nodes, sent };
        peers.prove(&nonces)?;
        Ok(peers)
    }

    /// Proves the run's key to each other rank, on the connection over which tensors are to travel, and has it proven there,
    /// before anything else is sent. `nonces` are what the ranks have drawn for it and left in the store.
    fn prove(&self, nonces: &[Bytes32]) -> Result<()> {
        let Place { rank, world, name, key, .. } = &self.place;
        let proof = |from: u32, to: u32| {
            let numbers = [*world, from, to].map(u32::to_le_bytes).concat();
            let [sender, receiver] = [from, to].map(|rank| &nonces[rank as usize][..]);
            key.proof("transfers", &[name.as_bytes(), &numbers, sender, receiver])
        };
        // Another rank may have been the first to find a stranger, and have left.
        let silent = |peer: u32, error: &Error| match self.word_of_another() {
            Some(word) => word.error(),
            None => Error::Missing {
                what: format!(
                    "rank {peer} came to the meeting, but rank {rank} hears nothing of it: {error}"
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

    /// Ends the meeting: what is connected in the place of `peer` does not have the run's key.
    fn impostor(&self, peer: u32) -> Error {
        let rank = self.place.rank;
        let what = format!(
            "what is connected to rank {rank} in the place of rank {peer} did not prove the run's key; check who else reaches \
             these machines, and start again"
        );
        // Best effort: the others hear nothing from this rank either.
        let _ = self.store.leave(&Word::stops(what.clone()));
        Error::Missing { what }
    }

    /// Who came to the store without the run's key, as far as it answers.
    pub(super) fn strangers(&self) -> Option<Strangers> {
        self.store.strangers().ok()
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

    /// How long a rank is waited for.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The store that the ranks share, for what is said beside the exchanges.
    pub(super) fn store(&self) -> Arc<Store> {
        Arc::clone(&self.store)
    }

    /// The machine of each rank, as its [`Place`] named it.
    pub(super) fn nodes(&self) -> &[String] {
        &self.nodes
    }

    /// What this rank has sent since it met the others; libtorch's own collectives are not counted.
    pub(super) fn sent(&self) -> Sent {
        let [all, between] = &self.sent;
        Sent { all: all.load(Ordering::Relaxed), between_nodes: between.load(Ordering::Relaxed) }
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

    /// The other ranks, the next one first: so that not everybody turns to the same one at once.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let Place { rank, world, .. } = self.place;
        (1..world).map(move |distance| (rank + distance) % world)
    }

    /// Tells the others what this rank is at ("step 12, micro-batch 3"), for the moment in which they miss it. Best effort:
    /// a store that is gone shows in the next exchange.
    pub(super) fn reached(&self, whereabouts: &str) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.place = whereabouts.to_owned();
        let _ = now.post(&self.store, self.place.rank);
    }

    /// Takes note that this rank has computed for so long in `step`: it is told with what it says next.
    pub(super) fn computed(&self, step: u64, time: Duration) {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).add(step, time);
    }

    /// Takes note that the next exchange of an axis begins; its number there.
    pub(super) fn next(&self, axis: usize, what: &str) -> Result<ExchangeId> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.begun[axis] += 1;
        now.exchange = what.to_owned();
        if let Err(error) = now.post(&self.store, self.place.rank) {
            return Err(self.without_store(what, &error));
        }
        Ok(ExchangeId { axis, number: now.begun[axis] })
    }

    /// Leaves word of why this rank stops, for those who will miss it. The word of who came first stands.
    pub(super) fn report(&self, reason: &str) {
        let word = Word::stops(format!("rank {}: {reason}", self.place.rank));
        if self.store.leave(&word).is_ok_and(|other| other.is_none()) {
            self.spoke_first.store(true, Ordering::Relaxed);
        }
        linger(&self.place);
    }

    /// Whether it is this rank that left the word: then it is the one to tell people.
    pub(super) fn spoke_first(&self) -> bool {
        self.spoke_first.load(Ordering::Relaxed)
    }

    /// The rank after this one, and the one before.
    pub(super) fn neighbours(&self) -> (u32, u32) {
        let Place { rank, world, .. } = self.place;
        ((rank + 1) % world, (rank + world - 1) % world)
    }

    /// Starts to send `tensor`, which is contiguous and on CPU, and is kept as long as the work.
    pub(super) fn send(&self, to: u32, tensor: &Tensor, tag: c_int) -> Result<Work> {
        assert!(tensor.is_contiguous() && tensor.device() == Device::Cpu, "plain memory is sent");
        let _posting = self.posting.lock();
        let mut work = ptr::null_mut();
        // SAFETY: the tensor is alive, and the work holds on to it; the out-pointer outlives the call.
        guarded("send", unsafe {
            shim_send(self.handle, tensor.as_ptr(), to as c_int, tag, &raw mut work)
        })?;
        Ok(Work(work))
    }

    /// Starts to receive into `tensor`, in the same way.
    pub(super) fn receive(&self, from: u32, tensor: &Tensor, tag: c_int) -> Result<Work> {
        let _posting = self.posting.lock();
        let mut work = ptr::null_mut();
        // SAFETY: the tensor is alive, and the work holds on to it; the out-pointer outlives the call.
        guarded("receive", unsafe {
            shim_recv(self.handle, tensor.as_ptr(), from as c_int, tag, &raw mut work)
        })?;
        Ok(Work(work))
    }

    /// What to say when `peer` could not be reached in exchange `id`.
    pub(super) fn missing(&self, what: &str, id: ExchangeId, peer: u32, error: &Error) -> Error {
        if late(error) {
            return self.stalled(what, id, &[peer]);
        }
        match self.word_of_another() {
            Some(word) => word.error(),
            None => self.blame(what, vec![peer], false),
        }
    }

    /// What to say when the time ran out in what `partners` share with this rank. Suspect is who has not come as far as this
    /// exchange, or else the partners; but they may only wait, further back, for a rank that we do not wait for. So whoever's
    /// time runs out writes that into the store, and of those who do not the suspects are missing, or else the others.
    pub(super) fn stalled(&self, what: &str, id: ExchangeId, partners: &[u32]) -> Error {
        if let Some(word) = self.word() {
            return word.error();
        }
        let behind = self.behind(id, partners);
        let suspects = if behind.is_empty() { partners.to_vec() } else { behind };
        let silent = self.silent(self.others().collect());
        let near = silent.iter().copied().filter(|rank| suspects.contains(rank)).collect();
        let lost = [near, silent, suspects].into_iter().find(|lost| !lost.is_empty());
        self.blame(what, lost.unwrap_or_default(), true)
    }

    /// Writes down that this rank's time ran out, and who of `suspects` does not do so too. A single one is none the less
    /// suspect for that.
    fn silent(&self, mut suspects: Vec<u32>) -> Vec<u32> {
        let sign = |rank: u32| format!("late/{rank}");
        if self.store.set(&sign(self.place.rank), "here").is_err() || suspects.len() < 2 {
            return suspects;
        }
        let (start, all) = (Instant::now(), suspects.clone());
        while !suspects.is_empty() && start.elapsed() < ROLL {
            suspects.retain(|rank| !matches!(self.store.find(&sign(*rank)), Ok(Some(_))));
            std::thread::sleep(LOOK);
        }
        if suspects.is_empty() { all } else { suspects }
    }

    /// Who has not come as far as an exchange: a rank that has only waits as we do. In a line only its ranks count, and those
    /// that this one waits for are asked about.
    fn behind(&self, id: ExchangeId, partners: &[u32]) -> Vec<u32> {
        let asked = |rank: &u32| id.axis == 0 || partners.contains(rank);
        let behind =
            |rank: &u32| self.seen(*rank).is_none_or(|seen| seen.begun[id.axis] < id.number);
        self.others().filter(asked).filter(behind).collect()
    }

    /// Leaves word that these ranks are missing, unless another word stands already.
    fn blame(&self, what: &str, mut lost: Vec<u32>, late: bool) -> Error {
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
            "is gone".to_owned()
        };
        let mine = format!("a rank {how}: {lost}; missed in {what} at {}", self.here());
        self.speak(what, numbers, mine)
    }

    /// What to say when this rank itself is held up in a call of a library.
    pub(super) fn held_up(&self, what: &str) -> Error {
        let (time, here) = (seconds(self.timeout), self.here());
        let mine = format!("a call for {what} did not return within {time}, at {here}");
        self.speak(what, Vec::new(), mine)
    }

    /// What this rank is at.
    fn here(&self) -> String {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).place.clone()
    }

    /// Leaves word that this rank misses others, unless another word stands already.
    fn speak(&self, what: &str, lost: Vec<u32>, mine: String) -> Error {
        let text = format!("rank {}: {mine}", self.place.rank);
        match self.store.leave(&Word::loses(lost, text)) {
            Err(error) => self.without_store(what, &error),
            Ok(None) => {
                self.spoke_first.store(true, Ordering::Relaxed);
                Error::Missing { what: mine }
            }
            Ok(Some(first)) => first.error(),
        }
    }

    /// The word that stands of why the ranks stop, if there is one.
    pub(super) fn word(&self) -> Option<Word> {
        self.store.word().ok()?
    }

    /// The ranks that are lost by the word that stands. Without a store nobody knows which.
    pub(super) fn lost(&self) -> Option<Vec<u32>> {
        self.store.word().map_or(Some(Vec::new()), |word| word?.lost)
    }

    /// What another rank says of why it stops, if it does so at once: one that misses a third rank closes its
    /// connections to all of them first, and would be taken for the one that is gone.
    fn word_of_another(&self) -> Option<Word> {
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

    fn without_store(&self, what: &str, error: &Error) -> Error {
        let holder = if self.place.rank_0_serves { "rank 0" } else { "the launcher" };
        // Nobody can speak for a rank that is cut off.
        self.spoke_first.store(true, Ordering::Relaxed);
        Error::Missing {
            what: format!(
                "{holder}, which holds the store, is gone or cut off: missed in {what} ({error})"
            ),
        }
    }

    /// How far a rank has come, as far as it is known.
    fn seen(&self, rank: u32) -> Option<Whereabouts> {
        Whereabouts::find(&self.store, rank).ok()?
    }

    /// Leaves word that this rank is lost to the others, by its own judgement.
    pub(super) fn give_up(&self, why: &str) {
        let text = format!("rank {}: {why}", self.place.rank);
        let word = Word::loses(vec![self.place.rank], text);
        if self.store.leave(&word).is_ok_and(|other| other.is_none()) {
            self.spoke_first.store(true, Ordering::Relaxed);
        }
    }
}

/// Where the store goes with this process the others get a moment to read what stands in it.
fn linger(place: &Place) {
    if place.rank_0_serves && place.rank == 0 {
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// What to say where the port of this rank's store is taken. If that is by another process that takes itself for this rank, both
/// say so: the other one would wait for the rest in vain.
fn taken(place: &Place, reason: &str) -> Error {
    let Place { rank, host, port, name, key, .. } = place;
    if let (Some(store), Ok(mine)) = (Store::ready(host, *port, name, key, WORD), nonce()) {
        // Where this one has said first that it is here, the other one finds it out.
        let told = announce(&store, place, &mine).and_then(|()| store.wait("nobody", WORD));
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

/// Whether it was the time that ran out.
pub(super) fn late(error: &Error) -> bool {
    matches!(error, Error::Late { .. })
}
