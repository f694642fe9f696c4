//! How tensors travel between ranks: chosen once, by all of them together; it affects no bit of the results.

use std::sync::{Arc, PoisonError};

use rccl_sys::{Library, UniqueId};
use tch::{Device, Kind, Tensor};

use super::comm_loop::Members;
use super::comm_stream::CommStream;
use super::comm_thread::CommThread;
use super::exchange::Exchange;
use super::peers::Peers;
use super::{Group, TensorTransport};
use crate::{Error, Result};

/// What a rank asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// RCCL between GPUs where every rank has it, else Gloo.
    #[default]
    Auto,
    /// Through host memory and libtorch's Gloo, everywhere.
    Gloo,
    /// RCCL or NCCL; fails where that is impossible.
    Rccl,
}

/// What the ranks have chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportChoice {
    /// Whether tensors travel from device to device; otherwise through host memory over Gloo.
    pub rccl: bool,
    /// Release of the library, as it encodes it.
    pub release: Option<i32>,
    /// Why GPUs use host memory although that was not requested.
    pub reason: Option<String>,
}

impl TransportChoice {
    /// A short message, for a line at the start.
    pub fn words(&self) -> String {
        match (self.rccl, self.release, &self.reason) {
            (true, release, _) => format!("RCCL (release {})", release.unwrap_or(0)),
            (false, _, None) => "Gloo".to_owned(),
            (false, _, Some(reason)) => format!("Gloo, through plain memory ({reason})"),
        }
    }
}

/// One rank's message: what it requests, and why it cannot use RCCL.
type TransportRequest = (Transport, Option<String>);

impl Group {
    /// Agrees with all ranks how tensors on `device` travel from here on. Every rank calls it before the first
    /// [`Group::begin`]; another call makes a new choice.
    ///
    /// Ranks join RCCL only after all have reported that they have it, and use it only after all have reported that
    /// joining succeeded: so no rank waits in the library for one that will not come.
    pub fn choose_transport(&mut self, device: Device, wish: Transport) -> Result<TransportChoice> {
        self.bulk = TensorTransport::of(device);
        let Some(peers) = &self.peers else { return Ok(TransportChoice::default()) };
        let asked = match wish {
            Transport::Auto => device != Device::Cpu,
            Transport::Gloo => false,
            Transport::Rccl => true,
        };
        let stream = if asked { CommStream::new(device) } else { Err(String::new()) };
        let named = match (&stream, self.rank()) {
            (Ok(_), 0) => Library::open().and_then(Library::unique_id).map(|id| id.bytes),
            _ => Ok([0; 128]),
        };
        let against = stream.as_ref().err().or(named.as_ref().err()).cloned();
        let mut message = vec![wish as u8, u8::from(against.is_some())];
        message.extend(named.unwrap_or([0; 128]));
        message.extend(against.unwrap_or_default().into_bytes());
        let gathered = self.all_gather("the choice of a transport", &message)?;
        let words: Vec<TransportRequest> = gathered.iter().map(|word| read(word)).collect();
        let (mut chosen, mut comm) = (decide(&words)?, None);
        if let (true, Ok(stream)) = (chosen.rccl, stream) {
            let mut id = UniqueId { bytes: [0; 128] };
            id.bytes.copy_from_slice(&gathered[0][2..130]);
            let party = Members { axis: 0, members: (0..self.world()).collect() };
            let joined = CommThread::join(peers, device, stream, party, id);
            let against = joined.as_ref().err().cloned();
            let message = [&[wish as u8], against.unwrap_or_default().as_bytes()].concat();
            let gathered = self.all_gather("the joining of a communicator", &message)?;
            let words: Vec<TransportRequest> =
                gathered.iter().map(|word| joined_word(word)).collect();
            chosen = decide(&words)?;
            comm = joined.ok().filter(|_| chosen.rccl);
            chosen.release = Library::open().and_then(Library::version).ok();
        }
        self.bulk.comm = comm.map(Arc::new);
        Ok(chosen)
    }

    /// The communication thread of a line of ranks; `None` with Gloo. The ranks of a line join it together when they
    /// first ask for it, and leave it when its axis gets another line.
    pub(super) fn comm_along(&self, party: Members) -> Result<Option<Arc<CommThread>>> {
        let Some(peers) = self.peers.as_ref().filter(|_| self.by_rccl()) else { return Ok(None) };
        let mut along = self.bulk.along.lock().unwrap_or_else(PoisonError::into_inner);
        let known = along.get(&party.axis).filter(|(members, _)| *members == party.members);
        if let Some((_, comm)) = known {
            return Ok(Some(Arc::clone(comm)));
        }
        let (axis, members, device) = (party.axis, party.members.clone(), self.device());
        along.remove(&axis);
        let refused = |reason| Error::Foreign { call: "join a line of devices", reason };
        let stream = CommStream::new(device).map_err(refused)?;
        let id = named(peers, &party)?;
        let comm = Arc::new(CommThread::join(peers, device, stream, party, id).map_err(refused)?);
        along.insert(axis, (members, Arc::clone(&comm)));
        Ok(Some(comm))
    }
}

/// The communicator id that the first rank of a line creates. It also shows that all ranks of the line have come this
/// far.
fn named(peers: &Peers, Members { axis, members }: &Members) -> Result<UniqueId> {
    const WHAT: &str = "the naming of a line";
    let (me, mut id) = (peers.rank(), UniqueId { bytes: [0; 128] });
    if members.first() == Some(&me) {
        let drawn = Library::open().and_then(Library::unique_id);
        id = drawn.map_err(|reason| Error::Foreign { call: "name a line", reason })?;
    }
    let mut exchange = Exchange::new(peers, WHAT, peers.next(*axis, WHAT)?, Device::Cpu, None);
    let others = || members.iter().filter(|rank| **rank != me);
    let receive = |rank: &u32| exchange.receive(0, *rank, Kind::Uint8, 128);
    let arrivals = others().map(receive).collect::<Result<Vec<_>>>()?;
    let payload = Tensor::from_slice(&id.bytes);
    others().try_for_each(|rank| exchange.send(0, *rank, &payload))?;
    for (at, arrival) in arrivals.into_iter().enumerate() {
        let heard = arrival.wait()?;
        // Every rank but the first receives the first rank's id first.
        if at == 0 && members[0] != me {
            heard.f_copy_data_u8(&mut id.bytes, 128)?;
        }
    }
    exchange.finish()?;
    Ok(id)
}

fn wish_of(byte: u8) -> Transport {
    let all = [Transport::Auto, Transport::Gloo, Transport::Rccl];
    all.into_iter().find(|wish| *wish as u8 == byte).unwrap_or_default()
}

fn read(word: &[u8]) -> TransportRequest {
    let reason = word.get(130..).map(|reason| String::from_utf8_lossy(reason).into_owned());
    (wish_of(word[0]), reason.filter(|_| word[1] != 0))
}

fn joined_word(word: &[u8]) -> TransportRequest {
    let reason = String::from_utf8_lossy(&word[1..]).into_owned();
    (wish_of(word[0]), (!reason.is_empty()).then_some(reason))
}

/// The decision, equal on every rank since all have the same messages. A rank that did not try has no objection.
fn decide(words: &[TransportRequest]) -> Result<TransportChoice> {
    let against = words.iter().position(|(_, against)| against.is_some());
    let said = |rank: usize| {
        let reason = words[rank].1.clone().unwrap_or_default();
        let reason = if reason.is_empty() { "not asked for" } else { &reason };
        format!("rank {rank}: {reason}")
    };
    let insists = words.iter().any(|(wish, _)| *wish == Transport::Rccl);
    match against {
        None => Ok(TransportChoice { rccl: true, ..TransportChoice::default() }),
        Some(rank) if insists => {
            Err(Error::Foreign { call: "open RCCL on every rank", reason: said(rank) })
        }
        Some(_) => {
            let told = words
                .iter()
                .position(|(_, against)| against.as_ref().is_some_and(|reason| !reason.is_empty()));
            Ok(TransportChoice { reason: told.map(said), ..TransportChoice::default() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_without_a_library_decides_for_all() {
        use Transport::{Auto, Gloo, Rccl};
        let (has, lacks) = (None, Some("no library".to_owned()));
        let idle = Some(String::new());
        let choose = |words: &[(Transport, &Option<String>)]| {
            let words: Vec<TransportRequest> =
                words.iter().map(|(wish, said)| (*wish, (*said).clone())).collect();
            decide(&words).map(|chosen| (chosen.rccl, chosen.reason)).map_err(|e| e.to_string())
        };
        assert_eq!(choose(&[(Auto, &has), (Auto, &has)]), Ok((true, None)));
        assert_eq!(choose(&[(Auto, &idle), (Gloo, &idle)]), Ok((false, None)));
        let told = Some("rank 1: no library".to_owned());
        assert_eq!(choose(&[(Auto, &has), (Auto, &lacks)]), Ok((false, told)));
        let refused = choose(&[(Rccl, &has), (Rccl, &lacks)]).unwrap_err();
        assert!(refused.contains("rank 1: no library"), "{refused}");
        let refused = choose(&[(Rccl, &has), (Gloo, &idle)]).unwrap_err();
        assert!(refused.contains("rank 1: not asked for"), "{refused}");
    }
}
