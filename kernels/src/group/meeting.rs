//! How ranks meet in a store: each says that it is here, and waits for the others.

use std::time::Duration;

use super::key::Bytes32;
use super::store::{LOOK, lived};
use super::word::Word;
use super::{Place, Store};
use crate::{Error, Result};

/// What a rank that is here writes before the name of its machine.
const HERE: &str = "on ";

/// Between two words on who is awaited.
const PATIENCE: Duration = Duration::from_secs(5);

/// Says that this rank is here, and what it has drawn for its proofs. Two processes that both take themselves for it are told
/// so, and all others with them.
pub(super) fn announce(store: &Store, rank: u32, node: &str, nonce: &Bytes32) -> Result<()> {
    let key = format!("here/{rank}");
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let process = format!("process {} on {}", std::process::id(), machine.trim());
    let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    let mine = format!("{HERE}{node}\n{process}\n{nonce}");
    let first = store.first(&key, &mine)?;
    if first == mine {
        return Ok(());
    }
    let other = first.lines().nth(1).unwrap_or("another process");
    let what = format!(
        "two processes are rank {rank}: {other} and {process}; check RANK, or how the launcher numbers its processes"
    );
    store.leave(&Word { lost: None, text: what.clone() })?;
    Err(Error::Missing { what })
}

/// What a rank has said of itself: its machine, and what it has drawn.
fn read(said: &str) -> Option<(String, Bytes32)> {
    let mut lines = said.lines();
    let node = lines.next()?.trim_start_matches(HERE).to_owned();
    let (digits, mut nonce) = (lines.nth(1)?, Bytes32::default());
    for (index, byte) in nonce.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some((node, nonce))
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
    let mut found = vec![None; *world as usize];
    loop {
        for (rank, one) in found.iter_mut().enumerate().filter(|(_, one)| one.is_none()) {
            *one = store.find(&format!("here/{rank}"))?.as_deref().and_then(read);
        }
        let absent = |(rank, one): (usize, &Option<_>)| one.is_none().then_some(rank);
        let absent: Vec<_> = found.iter().enumerate().filter_map(absent).collect();
        if absent.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        if let Some(word) = store.word()? {
            return Err(Error::Reported { what: word.text });
        }
        let who = || {
            let names =
                |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            let here: Vec<_> = (0..found.len()).filter(|rank| !absent.contains(rank)).collect();
            let strangers = store.strangers().ok().and_then(|strangers| strangers.words());
            let strangers = strangers.map_or(String::new(), |words| format!("; {words}"));
            format!("here are {}, missing are {}{strangers}", names(&here), names(&absent))
        };
        if lived() - start > timeout {
            return Err(Error::Missing {
                what: format!(
                    "of {world} ranks some did not come to {host}:{port} within {timeout:?}: {}; check that they were started, \
                     with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
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
