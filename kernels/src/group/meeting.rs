//! How ranks meet in a store: each registers itself and waits for the others.

use std::time::Duration;

use super::clock::{LOOK, lived};
use super::key::Bytes32;
use super::word::{StopReason, seconds};
use super::{KeyValueStore, RankAddress};
use crate::{Error, Result};

/// Prefix of what a rank registers; the name of its machine follows.
const HERE: &str = "on ";

/// At most so many ranks are listed by number.
const NAMED: usize = 16;

/// Pause between messages about awaited ranks.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a rank has registered.
#[derive(Clone)]
struct Registration {
    node: String,
    process: String,
    nonce: Bytes32,
    /// The number of ranks that it was started with.
    world: u32,
}

/// Registers this rank and its nonce. If two processes register as the same rank, both fail, and so do all other ranks;
/// after all ranks have met, only the surplus process fails.
pub(super) fn announce(store: &KeyValueStore, place: &RankAddress, nonce: &Bytes32) -> Result<()> {
    let RankAddress { rank, world, node, .. } = place;
    let key = format!("here/{rank}");
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let process = format!("process {} on {}", std::process::id(), machine.trim());
    let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    let registration = format!("{HERE}{node}\n{process}\n{nonce}\n{world}");
    let first = store.first(&key, &registration)?;
    if first == registration {
        return Ok(());
    }
    let other = first.lines().nth(1).unwrap_or("another process");
    let what = format!(
        "two processes are rank {rank}: {other} and {process}; check RANK, or how the launcher numbers its processes"
    );
    Err(mistaken(store, read(&first).map_or(*world, |said| said.world), what)?)
}

/// Error for a process that was started wrongly. All registered ranks get it too, unless all `world` ranks have met
/// already: those continue.
fn mistaken(store: &KeyValueStore, world: u32, what: String) -> Result<Error> {
    for rank in 0..world {
        if store.find(&format!("here/{rank}"))?.is_none() {
            store.leave(&StopReason::mistake(what.clone()))?;
            break;
        }
    }
    Ok(Error::Mistaken { what })
}

fn read(said: &str) -> Option<Registration> {
    let mut lines = said.lines();
    let node = lines.next()?.trim_start_matches(HERE).to_owned();
    let process = lines.next()?.to_owned();
    let (digits, mut nonce) = (lines.next()?, Bytes32::default());
    for (index, byte) in nonce.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(Registration { node, process, nonce, world: lines.next()?.parse().ok()? })
}

/// Refuses a rank that was started with another number of ranks, and reports it to all registered ranks.
fn same_world(
    store: &KeyValueStore,
    place: &RankAddress,
    rank: usize,
    said: &Registration,
) -> Result<()> {
    let (me, world, other_world, process) = (place.rank, place.world, said.world, &said.process);
    if other_world == world {
        return Ok(());
    }
    let what = format!(
        "rank {me} is one of {world} ranks, rank {rank} ({process}) is one of {other_world}; start all with one WORLD_SIZE"
    );
    Err(mistaken(store, other_world, what)?)
}

/// Lists ranks for a message.
fn listed(are: &str, ranks: &[usize]) -> String {
    match ranks {
        [] => format!("{are} is none"),
        [one] => format!("{are} is rank {one}"),
        several => {
            let named = &several[..several.len().min(NAMED)];
            let numbers: Vec<String> = named.iter().map(usize::to_string).collect();
            let more = several.len() - named.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{are} are ranks {}{more}", numbers.join(", "))
        }
    }
}

/// Waits until every rank has registered; returns what they registered.
pub(super) fn meet(
    store: &KeyValueStore,
    place: &RankAddress,
    timeout: Duration,
    tell: &dyn Fn(&str),
) -> Result<Vec<(String, Bytes32)>> {
    let RankAddress { world, host, port, .. } = place;
    let (start, mut told) = (lived(), Duration::ZERO);
    let mut found: Vec<Option<Registration>> = vec![None; *world as usize];
    loop {
        for (rank, one) in found.iter_mut().enumerate().filter(|(_, one)| one.is_none()) {
            // Querying many ranks may itself take longer than the timeout.
            if lived() - start > timeout {
                break;
            }
            *one = store.find(&format!("here/{rank}"))?.as_deref().and_then(read);
            one.as_ref().map_or(Ok(()), |said| same_world(store, place, rank, said))?;
        }
        if found.iter().all(Option::is_some) {
            let said = |Registration { node, nonce, .. }: Registration| (node, nonce);
            return Ok(found.into_iter().flatten().map(said).collect());
        }
        if let Some(word) = store.word()? {
            return Err(word.error());
        }
        let waited_for = || {
            let (here, absent): (Vec<_>, Vec<_>) =
                (0..found.len()).partition(|rank| found[*rank].is_some());
            let unauthenticated =
                store.unauthenticated().ok().and_then(|unauthenticated| unauthenticated.words());
            let unauthenticated =
                unauthenticated.map_or(String::new(), |words| format!("; {words}"));
            format!("{}; {}{unauthenticated}", listed("here", &here), listed("missing", &absent))
        };
        if lived() - start > timeout {
            return Err(Error::Missing {
                what: format!(
                    "of {world} ranks some did not come to {host}:{port} within {}: {}; check that they were started, \
                     with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
                    seconds(timeout),
                    waited_for()
                ),
            });
        }
        if lived() - start > told + PATIENCE {
            told = lived() - start;
            tell(&format!("waiting at {host}:{port} for {world} ranks: {}", waited_for()));
        }
        std::thread::sleep(LOOK);
    }
}
