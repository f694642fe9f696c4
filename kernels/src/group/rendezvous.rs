//! Lets ranks continue without the lost ones: who is left is agreed in a store that outlives each group of ranks.
//!
//! ```text
//! generation 0        all ranks that were launched
//! generation g + 1    those of generation g that came to its meeting before that was closed
//!
//! here/RANK           the generation to whose meeting the rank has come last
//! ended/RANK          written by its launcher when the process ends, and how: the rank is not waited for
//! ready/RANK          address of that rank's standby store, see below
//! members/G           the members of generation G: written once, by the first rank that has waited long enough
//! join/RANK           the rank was restarted, and waits for a generation that includes it
//! joining             the restarted ranks that the launcher has noticed
//! born/RANK           the first generation of the process that is this rank now, if it was restarted
//! stood               the last generation whose ranks were connected: changes since then are reported
//! ```
//!
//! Ranks are identified here by the numbers that they were launched with; within a generation they are renumbered in
//! the same order. The store decides: of two lists that are written at once the first one stands, and a rank that is
//! not on it ends. A rank whose process has ended is not waited for, nor is one that was blamed for the end of the
//! previous generation; any other rank is waited for as long as in an exchange. A rank that was blamed but was only
//! slow may still join until the list is written.
//!
//! If a rank holds the store, every other rank keeps a standby store, and all know the addresses. If the store is lost,
//! so is its holder; the remaining ranks meet at the next store that answers, in the order of ranks. Ranks that cannot
//! reach each other may then form separate groups; requiring more than half of the ranks allows one run at most.
//!
//! A restarted rank joins the next generation, whatever the reason for its meeting: a loss, or that the others have
//! noticed the restart and end their generation when convenient.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{ToSocketAddrs as _, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::clock::{LOOK, lived};
use super::whereabouts::RankProgress;
use super::{Group, KeyValueStore, RankAddress, UnauthenticatedConnections};
use crate::{Error, Result};

/// How long connecting the ranks that have met may take: all of them were present a moment ago.
const CONNECT: Duration = Duration::from_secs(20);

/// How long to try a standby store.
const PROBE: Duration = Duration::from_secs(5);

/// What a launcher writes about a process that ended well, and about any other.
const ENDED: [&str; 2] = ["well", "lost"];

/// What it writes instead after it has restarted the rank.
const AGAIN: &str = "again";

/// See [`Rendezvous::rejoin`].
const COMES: &str = "comes";

/// The ranks that wait for a generation, as noticed by their launcher.
const JOINING: &str = "joining";

/// The last generation whose ranks were connected.
const STOOD: &str = "stood";

/// Differences between a generation and the last one that was connected, by launch numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MembershipChange {
    /// Ranks whose processes ended; includes ranks that were restarted in the meantime.
    pub lost: Vec<u32>,
    /// Ranks that were restarted and have joined.
    pub joined: Vec<u32>,
}

/// Takes one rank from generation to generation.
#[derive(Debug)]
pub struct Rendezvous {
    store: KeyValueStore,
    /// The store that rank 0 holds, kept open even when the first group ends.
    _held: Option<Arc<KeyValueStore>>,
    /// Standby stores, if a rank holds the current store: host and port by launch number.
    standby: BTreeMap<u32, (String, u16)>,
    /// This rank's standby store, and how many of its refused connections were reported.
    ready: Option<KeyValueStore>,
    reported: AtomicU64,
    /// The rank that holds the current store, if one does.
    holder: Option<u32>,
    /// The place at launch, with the current store.
    place: RankAddress,
    generation: u64,
    members: Vec<u32>,
    /// The last generation that was connected, and its members.
    stood: (u64, Vec<u32>),
}

impl Rendezvous {
    /// For a rank that was launched at `place` and met the others in `group`, the first generation.
    pub fn open(place: &RankAddress, group: &Group, timeout: Duration) -> Result<Rendezvous> {
        let (name, key) = (meeting(&place.name), &place.key);
        let store = KeyValueStore::connect(&place.host, place.port, &name, key, timeout)?;
        let members: Vec<u32> = (0..place.world).collect();
        let (mut standby, mut own, mut holder) = (BTreeMap::new(), None, None);
        if place.rank_0_serves {
            holder = Some(0);
            if place.rank > 0 {
                let host = own_address(&place.host, place.port)?;
                let ready = KeyValueStore::serve(&host, 0, &name, key, timeout)?;
                store.set(&ready_key(place.rank), &format!("{} {host}", ready.port()))?;
                own = Some(ready);
            }
            for rank in 1..place.world {
                standby.insert(rank, ready_of(&store, rank, timeout)?);
            }
        }
        let stood = (0, members.clone());
        let alone = Rendezvous::new(store, place, 0, members, stood);
        Ok(Rendezvous { _held: group.store(), standby, ready: own, holder, ..alone })
    }

    /// For a rank that neither holds a store nor knows of a standby: the launcher holds it.
    fn new(
        store: KeyValueStore,
        place: &RankAddress,
        generation: u64,
        members: Vec<u32>,
        stood: (u64, Vec<u32>),
    ) -> Rendezvous {
        let (standby, reported, place) = (BTreeMap::new(), AtomicU64::new(0), place.clone());
        let (_held, ready, holder) = (None, None, None);
        Rendezvous {
            store,
            _held,
            standby,
            ready,
            reported,
            holder,
            place,
            generation,
            members,
            stood,
        }
    }

    /// For a restarted rank that replaces a lost one, under a launcher: returns once a generation includes it. If that
    /// never happens, the launcher ends the process.
    pub fn rejoin(place: &RankAddress, timeout: Duration) -> Result<Rendezvous> {
        let (name, me) = (meeting(&place.name), place.rank);
        let store = KeyValueStore::connect(&place.host, place.port, &name, &place.key, timeout)?;
        let mut generation = 0;
        while store.find(&members_key(generation + 1))?.is_some() {
            generation += 1;
        }
        // Whichever generation is next: this rank has come to its meeting.
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
        // Read before the other ranks can connect this generation, which would make it the last one that stood.
        let last = number(&store, STOOD)?;
        let list = if last > 0 { store.find(&members_key(last))? } else { None };
        let stood = (last, list.map_or_else(|| (0..place.world).collect(), |list| read(&list)));
        store.set(&born(me), &generation.to_string())?;
        Ok(Rendezvous::new(store, place, generation, members, stood))
    }

    /// For a rank that was launched at `place`, under a launcher, and could not meet the others: lets it meet the
    /// remaining ranks. `None` if the launcher does not report a loss.
    pub fn unmet(place: &RankAddress, timeout: Duration) -> Result<Option<Rendezvous>> {
        let reach =
            |name: &str| KeyValueStore::connect(&place.host, place.port, name, &place.key, timeout);
        let (first, start) = (reach(&place.name)?, lived());
        let word = loop {
            match first.word()? {
                // The other ranks may notice the end of a rank before its launcher does.
                None if lived() - start < PROBE => std::thread::sleep(LOOK),
                word => break word,
            }
        };
        if word.and_then(|word| word.lost).is_none() {
            return Ok(None);
        }
        let members: Vec<u32> = (0..place.world).collect();
        let (store, stood) = (reach(&meeting(&place.name))?, (0, members.clone()));
        Ok(Some(Rendezvous::new(store, place, 0, members, stood)))
    }

    /// Changes since the last generation that was connected. Call it once this one is connected: it records that it is.
    pub fn stands(&mut self) -> Result<MembershipChange> {
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
        Ok(MembershipChange { lost, joined })
    }

    /// Whether a restarted rank waits for the next generation.
    pub fn is_awaited(&self) -> bool {
        // If the store is lost, the next exchange fails.
        self.joining().is_ok_and(|ranks| !ranks.is_empty())
    }

    /// The ranks that wait for the next generation.
    fn joining(&self) -> Result<Vec<u32>> {
        let list = self.store.find(JOINING)?.unwrap_or_default();
        Ok(read(&list).into_iter().filter(|rank| !self.members.contains(rank)).collect())
    }

    /// Reports to the current store the connections that this rank's standby store refused. Best effort.
    pub fn report_unauthenticated(&self) {
        let Some(unauthenticated) =
            self.ready.as_ref().and_then(|ready| ready.unauthenticated().ok())
        else {
            return;
        };
        let new = unauthenticated.refused
            - self.reported.swap(unauthenticated.refused, Ordering::Relaxed);
        // If the standby store has become the current one, they are counted already.
        if new > 0 && self.holder != Some(self.place.rank) {
            let _ = self.store.add_unauthenticated(&UnauthenticatedConnections {
                refused: new,
                ..unauthenticated
            });
        }
    }

    /// The number of this generation.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The members of this generation, by launch number.
    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// Agrees on the next generation with all remaining ranks. `blamed` are the ranks that ended this generation, by
    /// their numbers in it. Fails if fewer than `least` ranks are left, or if the others continued without this one.
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

    /// Connects to the next standby store that answers; `None` if there is none.
    fn next_store(&mut self) -> Option<()> {
        while let Some((rank, (host, port))) = self.standby.pop_first() {
            let name = meeting(&self.place.name);
            let store = KeyValueStore::ready(&host, port, &name, &self.place.key, PROBE);
            if let Some(store) = store {
                (self.store, self.holder) = (store, Some(rank));
                (self.place.host, self.place.port) = (host, port);
                return Some(());
            }
        }
        None
    }

    /// The member list of the next generation, once it is written.
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
                // A rank that was one generation ahead when a store was lost has come to this one, too.
                match at.is_some_and(|at| at.parse().is_ok_and(|at: u64| at >= next)) {
                    true => come.push(rank),
                    false => awaited |= !blamed.contains(&rank),
                }
            }
            if !awaited || lived() - start > timeout {
                // A rank that ended well has finished the run: nothing is left to compute.
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

    /// Connects this generation. If this fails, another rank was lost meanwhile: agree on the next generation.
    pub fn group(&self, timeout: Duration, report_lost: &dyn Fn(&str)) -> Result<Group> {
        let position = |id: &u32| *id == self.place.rank;
        let rank = self.members.iter().position(position).unwrap_or_default() as u32;
        let world = self.members.len() as u32;
        if world == 1 {
            return Ok(Group::only(self.place.rank));
        }
        let name = generation_name(&self.place.name, self.generation);
        let place = RankAddress { rank, world, name, ..self.place.clone() };
        let mut group = Group::join(&place, self.place.rank, timeout.min(CONNECT), report_lost)?;
        group.wait_at_most(timeout);
        Ok(group)
    }
}

/// The launcher's side: it knows which processes have ended, and reports this to the ranks at once. It holds the store
/// itself, so it asks without a connection, however often.
#[derive(Debug)]
pub struct Agent {
    store: KeyValueStore,
    name: String,
    generation: u64,
    members: Vec<u32>,
    ended: BTreeMap<u32, String>,
    /// Restarted ranks that are in no generation yet, each with the generation in which it was restarted.
    back: BTreeMap<u32, u64>,
    /// The list of these ranks that the store has.
    awaited: Vec<u32>,
}

impl Agent {
    /// For `count` ranks whose places have this name and that meet in this store.
    pub fn new(store: &KeyValueStore, name: &str, count: u32) -> Agent {
        Agent {
            store: store.named(&meeting(name)),
            name: name.to_owned(),
            generation: 0,
            members: (0..count).collect(),
            ended: BTreeMap::new(),
            back: BTreeMap::new(),
            awaited: Vec::new(),
        }
    }

    /// Publishes that the process of `rank`, which had ended, was restarted and will join.
    pub fn started_again(&mut self, rank: u32) -> Result<()> {
        self.ended.remove(&rank);
        self.back.insert(rank, self.generation);
        self.store.set(&join(rank), "")?;
        self.store.set(&ended(rank), AGAIN)
    }

    /// Whether `rank` was restarted and is in no generation yet.
    pub fn is_awaited(&self, rank: u32) -> bool {
        self.back.contains_key(&rank)
    }

    /// The last progress of each rank of the generation that [`Agent::members`] found; `None` for a rank that has not
    /// published any.
    pub fn whereabouts(&self) -> Result<Vec<(u32, Option<RankProgress>)>> {
        let store = self.generation_store();
        let of = |(at, rank): (u32, &u32)| Ok((*rank, RankProgress::find(&store, at)?));
        (0..).zip(&self.members).map(of).collect()
    }

    /// The part of the store that belongs to this generation.
    fn generation_store(&self) -> KeyValueStore {
        self.store.named(&generation_name(&self.name, self.generation))
    }

    /// Publishes that the process of `rank` has ended, well or as `how` says.
    pub fn ended(&mut self, rank: u32, well: bool, how: &str) -> Result<()> {
        self.store.set(&ended(rank), ENDED[usize::from(!well)])?;
        self.back.remove(&rank);
        self.members()?;
        if !well {
            self.ended.insert(rank, how.to_owned());
            self.report_lost(&[rank])?;
        }
        Ok(())
    }

    /// The members of the newest generation.
    pub fn members(&mut self) -> Result<&[u32]> {
        while let Some(list) = self.store.find(&members_key(self.generation + 1))? {
            self.generation += 1;
            self.members = read(&list);
            // They may have ended after they came to the meeting and before it was closed.
            let lost: Vec<u32> = self.ended.keys().copied().collect();
            self.report_lost(&lost)?;
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

    /// Reports to the members of this generation that some of them are lost.
    fn report_lost(&self, lost: &[u32]) -> Result<()> {
        let position = |rank: &u32| self.members.iter().position(|member| member == rank);
        let lost: Vec<u32> = lost.iter().filter(|rank| position(rank).is_some()).copied().collect();
        if lost.is_empty() || self.members.len() == 1 {
            return Ok(());
        }
        let how = |rank: &u32| format!("rank {rank}: {}", self.ended[rank]);
        let how: Vec<String> = lost.iter().map(how).collect();
        let numbers: Vec<u32> = lost.iter().filter_map(position).map(|at| at as u32).collect();
        self.generation_store().lose(&numbers, &format!("a rank has ended: {}", how.join("; ")))
    }
}

/// The address of this machine as seen from `host`.
fn own_address(host: &str, port: u16) -> Result<String> {
    let cannot = |error: std::io::Error| Error::Foreign {
        call: "find this machine's address",
        reason: error.to_string(),
    };
    let address = (host, port).to_socket_addrs().map_err(cannot)?.next();
    let address = address.ok_or_else(|| cannot(std::io::ErrorKind::AddrNotAvailable.into()))?;
    let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    // Nothing is sent: the system only says which local address it would use.
    let socket = UdpSocket::bind(any).map_err(cannot)?;
    socket.connect(address).map_err(cannot)?;
    Ok(socket.local_addr().map_err(cannot)?.ip().to_string())
}

/// The address of `rank`'s standby store.
fn ready_of(store: &KeyValueStore, rank: u32, timeout: Duration) -> Result<(String, u16)> {
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

/// A number in the store; zero if missing.
fn number(store: &KeyValueStore, key: &str) -> Result<u64> {
    Ok(store.find(key)?.and_then(|text| text.parse().ok()).unwrap_or(0))
}

fn ended(rank: u32) -> String {
    format!("ended/{rank}")
}

fn members_key(generation: u64) -> String {
    format!("members/{generation}")
}

/// Prefix of the keys of meetings.
fn meeting(name: &str) -> String {
    format!("{name}meeting/")
}

/// Prefix of the keys of a generation; the first one has the launcher's prefix.
fn generation_name(name: &str, generation: u64) -> String {
    if generation == 0 { name.to_owned() } else { format!("{name}{generation}/") }
}

fn listed(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

fn read(list: &str) -> Vec<u32> {
    list.split(',').filter_map(|rank| rank.parse().ok()).collect()
}
