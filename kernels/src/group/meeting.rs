//! How ranks meet in a store: each says that it is here, and waits for the others.

use std::time::Duration;

use super::clock::{LOOK, lived};
use super::key::Bytes32;
use super::word::{Word, seconds};
use super::{Place, Store};
use crate::{Error, Result};

/// What a rank that is here writes before the name of its machine.
const HERE: &str = "on ";

/// So many ranks are named one by one.
const NAMED: usize = 16;

/// Between two words on who is awaited.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a rank has said of itself.
#[derive(Clone)]
struct Said {
    node: String,
    process: String,
    nonce: Bytes32,
    /// Of how many it takes itself for one.
    world: u32,
}

/// Says that this rank is here, and what it has drawn for its proofs. Two processes that both take themselves for it are told
/// so, and all others with them; once all ranks have met, a process too many is told so alone.
pub(super) fn announce(store: &Store, place: &Place, nonce: &Bytes32) -> Result<()> {
    let Place { rank, world, node, .. } = place;
    let key = format!("here/{rank}");
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let process = format!("process {} on {}", std::process::id(), machine.trim());
    let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    let mine = format!("{HERE}{node}\n{process}\n{nonce}\n{world}");
    let first = store.first(&key, &mine)?;
    if first == mine {
        return Ok(());
    }
    let other = first.lines().nth(1).unwrap_or("another process");
    let what = format!(
        "two processes are rank {rank}: {other} and {process}; check RANK, or how the launcher numbers its processes"
    );
    Err(mistaken(store, read(&first).map_or(*world, |said| said.world), what)?)
}

/// What to say of a process that was started wrongly: to all that are here, unless the `world` ranks there should be have met.
/// Those go on.
fn mistaken(store: &Store, world: u32, what: String) -> Result<Error> {
    for rank in 0..world {
        if store.find(&format!("here/{rank}"))?.is_none() {
            store.leave(&Word::mistake(what.clone()))?;
            break;
        }
    }
    Ok(Error::Mistaken { what })
}

fn read(said: &str) -> Option<Said> {
    let mut lines = said.lines();
    let node = lines.next()?.trim_start_matches(HERE).to_owned();
    let process = lines.next()?.to_owned();
    let (digits, mut nonce) = (lines.next()?, Bytes32::default());
    for (index, byte) in nonce.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(Said { node, process, nonce, world: lines.next()?.parse().ok()? })
}

/// Refuses a rank that takes itself for one of another number of ranks, and tells all that are here.
fn same_world(store: &Store, place: &Place, (rank, said): (usize, &Said)) -> Result<()> {
    let (me, world, theirs, process) = (place.rank, place.world, said.world, &said.process);
    if theirs == world {
        return Ok(());
    }
    let what = format!(
        "rank {me} is one of {world} ranks, rank {rank} ({process}) is one of {theirs}; start all with one WORLD_SIZE"
    );
    Err(mistaken(store, theirs, what)?)
}

/// Which ranks are so, for people.
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

/// Waits until every rank has written that it is here; what they said.
pub(super) fn meet(
    store: &Store,
    place: &Place,
    timeout: Duration,
    tell: &dyn Fn(&str),
) -> Result<Vec<(String, Bytes32)>> {
    let Place { world, host, port, .. } = place;
    let (start, mut told) = (lived(), Duration::ZERO);
    let mut found: Vec<Option<Said>> = vec![None; *world as usize];
    loop {
        for (rank, one) in found.iter_mut().enumerate().filter(|(_, one)| one.is_none()) {
            // Asking for many may take longer than they may.
            if lived() - start > timeout {
                break;
            }
            *one = store.find(&format!("here/{rank}"))?.as_deref().and_then(read);
            one.as_ref().map_or(Ok(()), |said| same_world(store, place, (rank, said)))?;
        }
        if found.iter().all(Option::is_some) {
            let said = |Said { node, nonce, .. }: Said| (node, nonce);
            return Ok(found.into_iter().flatten().map(said).collect());
        }
        if let Some(word) = store.word()? {
            return Err(word.error());
        }
        let who = || {
            let (here, absent): (Vec<_>, Vec<_>) =
                (0..found.len()).partition(|rank| found[*rank].is_some());
            let strangers = store.strangers().ok().and_then(|strangers| strangers.words());
            let strangers = strangers.map_or(String::new(), |words| format!("; {words}"));
            format!("{}; {}{strangers}", listed("here", &here), listed("missing", &absent))
        };
        if lived() - start > timeout {
            return Err(Error::Missing {
                what: format!(
                    "of {world} ranks some did not come to {host}:{port} within {}: {}; check that they were started, \
                     with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
                    seconds(timeout),
                    who()
                ),
            });
        }
        if lived() - start > told + PATIENCE {
            told = lived() - start;
            tell(&format!("waiting at {host}:{port} for {world} ranks: {}", who()));
        }
        std::thread::sleep(LOOK);
    }
}
