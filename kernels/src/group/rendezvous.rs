//! Ranks that go on without those that are lost: who is left is agreed in a store that outlives each group of ranks.
//!
//! ```text
//! generation 0        all ranks that were launched
//! generation g + 1    those of generation g that came to its meeting before that was closed
//!
//! here/RANK           the generation to whose meeting the rank has come last
//! ended/RANK          its launcher saw its process end, and how: nobody waits for it
//! ready/RANK          where that rank keeps a store ready, see below
//! members/G           who generation G is: written once, by the first that has waited for all it may wait for
//! join/RANK           the rank was started again, and waits for a generation that has it
//! joining             the ranks of which the launcher has seen that
//! born/RANK           the first generation of the process that is this rank now, where it was started again
//! stood               the last generation whose ranks were connected: what has changed since is told
//! ```
//!
//! Ranks are named here by the numbers that they were launched with; within a generation they are numbered anew, in the same
//! order. The store decides: of two lists that are written at once the first one stands, and a rank that is not on it ends.
//! Nobody waits for a rank whose process has ended, nor for one that was blamed for the end of the generation before, and for
//! any other no longer than for a rank in an exchange. A rank that was only slow, and was blamed, is welcome until the list is
//! written.
//!
//! Where a rank holds the store, every other one keeps one ready, and all know where. If the store is lost, so is its holder, and
//! those who are left meet at the next one that answers, in the order of ranks. Ranks that do not reach each other may then meet
//! apart: who asks for more than half of the ranks to be left has one run at most.
//!
//! A rank that was started again joins the next generation, whatever the reason of that meeting: a loss, or that the others have
//! seen it come, and end theirs when it suits them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{ToSocketAddrs as _, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::clock::{LOOK, lived};
use super::whereabouts::Whereabouts;
use super::{Group, Place, RunKey, Store, Strangers};
use crate::{Error, Result};

/// How long connecting those who have met may take: they were all there a moment ago.
const CONNECT: Duration = Duration::from_secs(20);

/// How long a store that others may need is tried.
const PROBE: Duration = Duration::from_secs(5);

/// What a launcher writes of a process that ended well, and of any other.
const ENDED: [&str; 2] = ["well", "lost"];

/// What it writes instead once it has started that rank again.
const AGAIN: &str = "again";

/// See [`Rendezvous::rejoin`].
const COMES: &str = "comes";

/// The ranks that wait for a generation, as their launcher has seen them come.
const JOINING: &str = "joining";

/// The last generation whose ranks were connected.
const STOOD: &str = "stood";

/// What is different in a generation from the last one that stood, by the numbers that ranks were launched with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Those whose processes are gone; a rank that was started again in the meantime is among them.
    pub lost: Vec<u32>,
    /// Those that were started again and have come.
    pub joined: Vec<u32>,
}

/// One rank's way to the generations to come.
#[derive(Debug)]
pub struct Rendezvous {
    store: Store,
    /// Where rank 0 holds the store it does so here, whatever becomes of the first group.
    _held: Option<Arc<Store>>,
    /// Stores that are ready where a rank holds the one that is met at: by rank, as launched, host and port.
    standby: BTreeMap<u32, (String, u16)>,
    /// This rank's among them, and how many strangers it has told of.
    ready: Option<Store>,
    told: AtomicU64,
    /// The rank that holds the store, if one does.
    holder: Option<u32>,
    /// As launched, with the store that is met at.
    place: Place,
    generation: u64,
    members: Vec<u32>,
    /// The last generation that stood, and who it was.
    stood: (u64, Vec<u32>),
}

impl Rendezvous {
    /// For a rank that was launched at `place` and has met the others in `group`, the first generation.
    pub fn open(place: &Place, group: &Group, timeout: Duration) -> Result<Rendezvous> {
        let (name, key) = (meeting(&place.name), &place.key);
        let store = Store::connect(&place.host, place.port, &name, key, timeout)?;
        let members: Vec<u32> = (0..place.world).collect();
        let (mut standby, mut own, mut holder) = (BTreeMap::new(), None, None);
        if place.rank_0_serves {
            holder = Some(0);
            if place.rank > 0 {
                let host = own_address(&place.host, place.port)?;
                let ready = Store::serve(&host, 0, &name, key, timeout)?;
                store.set(&ready_key(place.rank), &format!("{} {host}", ready.port()))?;
                own = Some(ready);
            }
            for rank in 1..place.world {
                standby.insert(rank, ready_of(&store, rank, timeout)?);
            }
        }
        let stood = (0, members.clone());
        let alone = Rendezvous::new(store, place, (0, members), stood);
        Ok(Rendezvous { _held: group.store(), standby, ready: own, holder, ..alone })
    }

    /// Of a rank that holds no store, nor knows of one besides: it is the launcher's.
    fn new(
        store: Store,
        place: &Place,
        (generation, members): (u64, Vec<u32>),
        stood: (u64, Vec<u32>),
    ) -> Rendezvous {
        let (standby, told, place) = (BTreeMap::new(), AtomicU64::new(0), place.clone());
        let (_held, ready, holder) = (None, None, None);
        Rendezvous { store, _held, standby, ready, told, holder, place, generation, members, stood }
    }

    /// For a rank that was started again in the place of one that is lost, under a launcher: comes back once a generation has it.
    /// Whoever started it ends it where that does not happen.
    pub fn rejoin(place: &Place, timeout: Duration) -> Result<Rendezvous> {
        let (name, me) = (meeting(&place.name), place.rank);
        let store = Store::connect(&place.host, place.port, &name, &place.key, timeout)?;
        let mut generation = 0;
        while store.find(&members_key(generation + 1))?.is_some() {
            generation += 1;
        }
        // Whichever comes next: this rank is at its meeting.
        store.set(&here(me), &u64::MAX.to_string())?;
        store.set(&join(me), COMES)?;
        let members = loop {
            match store.find(&members_key(generation + 1))?.map(|list| read(&list)) {
                None => std::thread::sleep(4 * LOOK),
                Some(members) => {
                    generation += 1;
                    if members.contains(&me) {
                        break members;
                    }
                }
            }
        };
        store.set(&here(me), &generation.to_string())?;
        // Before the others can have connected this generation: it is not the one that stood last.
        let last = number(&store, STOOD)?;
        let list = if last > 0 { store.find(&members_key(last))? } else { None };
        let stood = (last, list.map_or_else(|| (0..place.world).collect(), |list| read(&list)));
        store.set(&born(me), &generation.to_string())?;
        Ok(Rendezvous::new(store, place, (generation, members), stood))
    }

    /// For a rank that was launched at `place`, under a launcher, and could not meet the others: where it meets those who are
    /// left. `None` where the launcher does not say that one is lost.
    pub fn unmet(place: &Place, timeout: Duration) -> Result<Option<Rendezvous>> {
        let reach = |name: &str| Store::connect(&place.host, place.port, name, &place.key, timeout);
        let (first, start) = (reach(&place.name)?, lived());
        let word = loop {
            match first.word()? {
                // The others may see the end of a rank before its launcher does.
                None if lived() - start < PROBE => std::thread::sleep(LOOK),
                word => break word,
            }
        };
        if word.and_then(|word| word.lost).is_none() {
            return Ok(None);
        }
        let members: Vec<u32> = (0..place.world).collect();
        let (store, stood) = (reach(&meeting(&place.name))?, (0, members.clone()));
        Ok(Some(Rendezvous::new(store, place, (0, members), stood)))
    }

    /// What is different from the last generation that stood, asked once this one is connected: it has stood from then on.
    pub fn stands(&mut self) -> Result<Change> {
        let (last, before) = &self.stood;
        let mut fresh = Vec::new();
        for rank in &self.members {
            fresh.extend((number(&self.store, &born(*rank))? > *last).then_some(*rank));
        }
        let is_gone = |rank: &u32| !self.members.contains(rank) || fresh.contains(rank);
        let lost = before.iter().copied().filter(is_gone).collect();
        let is_new = |rank: &u32| !before.contains(rank) || fresh.contains(rank);
        let joined = self.members.iter().copied().filter(is_new).collect();
        self.store.set(STOOD, &self.generation.to_string())?;
        self.stood = (self.generation, self.members.clone());
        Ok(Change { lost, joined })
    }

    /// Whether a rank that was started again waits for the next generation.
    pub fn is_awaited(&self) -> bool {
        // A store that is gone shows in the next exchange.
        self.joining().is_ok_and(|ranks| !ranks.is_empty())
    }

    /// The ranks that wait for the next generation.
    fn joining(&self) -> Result<Vec<u32>> {
        let list = self.store.find(JOINING)?.unwrap_or_default();
        Ok(read(&list).into_iter().filter(|rank| !self.members.contains(rank)).collect())
    }

    /// Tells the store that is met at of strangers who came to the one that this rank keeps ready. Best effort.
    pub fn tell_of_strangers(&self) {
        let Some(strangers) = self.ready.as_ref().and_then(|ready| ready.strangers().ok()) else {
            return;
        };
        let new = strangers.refused - self.told.swap(strangers.refused, Ordering::Relaxed);
        // Where all have turned to that very store they are counted already.
        if new > 0 && self.holder != Some(self.place.rank) {
            let _ = self.store.add_strangers(&Strangers { refused: new, ..strangers });
        }
    }

    /// The number of this generation.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Who it is, by the numbers that ranks were launched with.
    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// Agrees on the next generation with everybody who is left. `blamed` are the ranks that ended this one, by their numbers
    /// in it. Fails where fewer than `least` are left, or where the others went on without this one.
    pub fn agree(&mut self, blamed: &[u32], least: u32, timeout: Duration) -> Result<()> {
        let (me, next) = (self.place.rank, self.generation + 1);
        let blamed = blamed.iter().filter_map(|rank| self.members.get(*rank as usize)).copied();
        let mut blamed: Vec<u32> = blamed.collect();
        let members = loop {
            match self.close(next, &blamed, least, timeout) {
                Ok(members) => break members,
                Err(error @ Error::Missing { .. }) => return Err(error),
                Err(error) => {
                    blamed.extend(self.holder);
                    self.next_store().ok_or(error)?;
                }
            }
        };
        if !members.contains(&me) {
            let what =
                format!("the other ranks went on without rank {me}, which was taken for lost");
            return Err(Error::Missing { what });
        }
        (self.generation, self.members) = (next, members);
        Ok(())
    }

    /// Turns to the next store that answers; `None` where there is none.
    fn next_store(&mut self) -> Option<()> {
        while let Some((rank, (host, port))) = self.standby.pop_first() {
            let name = meeting(&self.place.name);
            let store = Store::ready(&host, port, &name, &self.place.key, PROBE);
            if let Some(store) = store {
                (self.store, self.holder) = (store, Some(rank));
                (self.place.host, self.place.port) = (host, port);
                return Some(());
            }
        }
        None
    }

    /// The list of the next generation, once it is written.
    fn close(&self, next: u64, blamed: &[u32], least: u32, timeout: Duration) -> Result<Vec<u32>> {
        let (start, key) = (lived(), members_key(next));
        self.store.set(&here(self.place.rank), &next.to_string())?;
        loop {
            if let Some(list) = self.store.find(&key)? {
                return Ok(read(&list));
            }
            let (mut come, mut awaited, mut done) = (Vec::new(), false, false);
            let candidates: BTreeSet<u32> =
                self.members.iter().copied().chain(self.joining()?).collect();
            for rank in candidates {
                let ended = self.store.find(&ended(rank))?.filter(|how| how != AGAIN);
                done |= ended.as_deref() == Some(ENDED[0]);
                if ended.is_some() {
                    continue;
                }
                let at = self.store.find(&here(rank))?;
                // One that was a generation further when a store was lost has come to this one too.
                match at.is_some_and(|at| at.parse().is_ok_and(|at: u64| at >= next)) {
                    true => come.push(rank),
                    false => awaited |= !blamed.contains(&rank),
                }
            }
            if !awaited || lived() - start > timeout {
                // A rank that ended well has seen the end of the run: nothing is left to compute.
                if (come.len() as u64) < u64::from(least) && !done {
                    let (left, ranks, were) = (come.len(), listed(&come), self.members.len());
                    let what = format!(
                        "too few ranks are left to go on: {left} of {were} (ranks {ranks}), wanted {least}"
                    );
                    return Err(Error::Missing { what });
                }
                self.store.first(&key, &listed(&come))?;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Connects this generation. Where that fails, another rank was lost meanwhile: the next one is to be agreed.
    pub fn group(&self, timeout: Duration, tell: &dyn Fn(&str)) -> Result<Group> {
        let position = |id: &u32| *id == self.place.rank;
        let rank = self.members.iter().position(position).unwrap_or_default() as u32;
        let world = self.members.len() as u32;
        if world == 1 {
            return Ok(Group::only(self.place.rank));
        }
        let name = generation_name(&self.place.name, self.generation);
        let place = Place { rank, world, name, ..self.place.clone() };
        let mut group = Group::join(&place, self.place.rank, timeout.min(CONNECT), tell)?;
        group.wait_at_most(timeout);
        Ok(group)
    }
}

/// A launcher's part: it knows which processes have ended, and tells the ranks at once.
#[derive(Debug)]
pub struct Agent {
    store: Store,
    port: u16,
    name: String,
    key: RunKey,
    generation: u64,
    members: Vec<u32>,
    ended: BTreeMap<u32, String>,
    /// Ranks that were started again and are in no generation since, each with the one in which it was started.
    back: BTreeMap<u32, u64>,
    /// The list of them that the ranks see.
    awaited: Vec<u32>,
    timeout: Duration,
}

impl Agent {
    /// For `count` ranks whose places have this name, which meet on this machine at `port`.
    pub fn open(
        port: u16,
        name: &str,
        key: &RunKey,
        count: u32,
        timeout: Duration,
    ) -> Result<Agent> {
        let store = Store::connect("127.0.0.1", port, &meeting(name), key, timeout)?;
        let (name, key, members) = (name.to_owned(), key.clone(), (0..count).collect());
        let (generation, ended) = (0, BTreeMap::new());
        let (back, awaited) = (BTreeMap::new(), Vec::new());
        Ok(Agent { store, port, name, key, generation, members, ended, back, awaited, timeout })
    }

    /// Tells the others that the process of `rank`, which had ended, was started again, to join them.
    pub fn started_again(&mut self, rank: u32) -> Result<()> {
        self.ended.remove(&rank);
        self.back.insert(rank, self.generation);
        self.store.set(&join(rank), "")?;
        self.store.set(&ended(rank), AGAIN)
    }

    /// Whether `rank` was started again, and the others have not taken it in yet.
    pub fn is_awaited(&self, rank: u32) -> bool {
        self.back.contains_key(&rank)
    }

    /// What each rank of the newest generation said last of where it is; nothing of one that has said nothing yet.
    pub fn whereabouts(&mut self) -> Result<Vec<(u32, Option<Whereabouts>)>> {
        self.members()?;
        let name = generation_name(&self.name, self.generation);
        let store = Store::connect("127.0.0.1", self.port, &name, &self.key, self.timeout)?;
        let of = |(at, rank): (u32, &u32)| Ok((*rank, Whereabouts::find(&store, at)?));
        (0..).zip(&self.members).map(of).collect()
    }

    /// Tells the others that the process of `rank` has ended, well or as `how` says.
    pub fn ended(&mut self, rank: u32, well: bool, how: &str) -> Result<()> {
        self.store.set(&ended(rank), ENDED[usize::from(!well)])?;
        self.back.remove(&rank);
        self.members()?;
        if !well {
            self.ended.insert(rank, how.to_owned());
            self.tell(&[rank])?;
        }
        Ok(())
    }

    /// Who the newest generation is.
    pub fn members(&mut self) -> Result<&[u32]> {
        while let Some(list) = self.store.find(&members_key(self.generation + 1))? {
            self.generation += 1;
            self.members = read(&list);
            // They may have ended between coming to the meeting and its end.
            let lost: Vec<u32> = self.ended.keys().copied().collect();
            self.tell(&lost)?;
        }
        let (now, members) = (self.generation, &self.members);
        self.back.retain(|rank, started| *started == now || !members.contains(rank));
        let came = |rank: &u32| -> Result<bool> {
            Ok(self.store.find(&join(*rank))?.as_deref() == Some(COMES))
        };
        let mut awaited = Vec::new();
        for rank in self.back.keys() {
            awaited.extend(came(rank)?.then_some(*rank));
        }
        if awaited != self.awaited {
            self.store.set(JOINING, &listed(&awaited))?;
            self.awaited = awaited;
        }
        Ok(&self.members)
    }

    /// Leaves word for the members of this generation that some of them are lost.
    fn tell(&self, lost: &[u32]) -> Result<()> {
        let position = |rank: &u32| self.members.iter().position(|member| member == rank);
        let lost: Vec<u32> = lost.iter().filter(|rank| position(rank).is_some()).copied().collect();
        if lost.is_empty() || self.members.len() == 1 {
            return Ok(());
        }
        let how = |rank: &u32| format!("rank {rank}: {}", self.ended[rank]);
        let how: Vec<String> = lost.iter().map(how).collect();
        let name = generation_name(&self.name, self.generation);
        let store = Store::connect("127.0.0.1", self.port, &name, &self.key, self.timeout)?;
        let numbers: Vec<u32> = lost.iter().filter_map(position).map(|at| at as u32).collect();
        store.lose(&numbers, &format!("a rank is gone: {}", how.join("; ")))
    }
}

/// The address of this machine as whoever is at `host` sees it.
fn own_address(host: &str, port: u16) -> Result<String> {
    let cannot = |error: std::io::Error| Error::Foreign {
        call: "find this machine's address",
        reason: error.to_string(),
    };
    let address = (host, port).to_socket_addrs().map_err(cannot)?.next();
    let address = address.ok_or_else(|| cannot(std::io::ErrorKind::AddrNotAvailable.into()))?;
    let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    // Nothing is sent: the system only says from where it would be.
    let socket = UdpSocket::bind(any).map_err(cannot)?;
    socket.connect(address).map_err(cannot)?;
    Ok(socket.local_addr().map_err(cannot)?.ip().to_string())
}

/// Where the store is that `rank` keeps ready.
fn ready_of(store: &Store, rank: u32, timeout: Duration) -> Result<(String, u16)> {
    let text = store.wait(&ready_key(rank), timeout)?;
    let found = text.as_deref().and_then(|text| text.split_once(' '));
    let found = found.and_then(|(port, host)| Some((host.to_owned(), port.parse().ok()?)));
    found.ok_or_else(|| Error::Missing { what: format!("rank {rank} keeps no store ready") })
}

fn ready_key(rank: u32) -> String {
    format!("ready/{rank}")
}

fn join(rank: u32) -> String {
    format!("join/{rank}")
}

fn here(rank: u32) -> String {
    format!("here/{rank}")
}

fn born(rank: u32) -> String {
    format!("born/{rank}")
}

/// A number in the store; zero where there is none.
fn number(store: &Store, key: &str) -> Result<u64> {
    Ok(store.find(key)?.and_then(|text| text.parse().ok()).unwrap_or(0))
}

fn ended(rank: u32) -> String {
    format!("ended/{rank}")
}

fn members_key(generation: u64) -> String {
    format!("members/{generation}")
}

/// Where the keys of meetings stand.
fn meeting(name: &str) -> String {
    format!("{name}meeting/")
}

/// Where those of a generation do: the first has what its launcher said.
fn generation_name(name: &str, generation: u64) -> String {
    if generation == 0 { name.to_owned() } else { format!("{name}{generation}/") }
}

fn listed(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

fn read(list: &str) -> Vec<u32> {
    list.split(',').filter_map(|rank| rank.parse().ok()).collect()
}
