//! New weights on their way: owners send them as they are computed, and a rank waits for them where a forward pass
//! first reads them. Also the checksums of all pieces at the end of a step.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use contract::Result;
use kernels::group::{Arrival, Exchange, SentBytes};
use kernels::tree;
use tch::{Device, Kind, Tensor};

use super::ProcessMesh;
use super::words::WordReader;
use crate::model::{Overlap, WeightArrival, WeightShards};
use crate::refusal::{lost, refused};
use crate::state::ownership::{Ownership, ParamShard};
use crate::state::{ShardChecksums, State};
use crate::timing;

/// The messages in which a rank sends the weights of its pieces. The first leaves when a part of the pieces is updated,
/// so all but the last travel while others are computed; more would be small where many ranks share a model.
pub const MESSAGES: usize = 4;

/// Sends this rank's new weights to every other rank, in the dtype in which the model reads them, and receives theirs.
pub fn weights(team: &ProcessMesh<'_>, state: &State) -> Result<()> {
    let sharing = WeightSharing::new(team);
    sharing.begin(state)?;
    sharing.updated(state)?;
    sharing.finish()
}

/// The exchange of new weights: begins with the update of a step, and ends in the forward pass of the next step, or
/// before anything else reads the weights of other ranks ([`WeightSharing::finish`]).
///
/// Every rank receives the messages in the same order, and forwards all of them before it sends a gradient: over RCCL
/// the rounds of two exchanges must have one order. The first failure is the failure of every later call.
pub struct WeightSharing<'a> {
    team: &'a ProcessMesh<'a>,
    /// How many of the first weights, in canonical order, are new on this rank; `usize::MAX`: all.
    complete: AtomicUsize,
    /// `None` if nothing is under way.
    exchange: Mutex<Result<Option<WeightExchange<'a>>>>,
    /// Nanoseconds in which messages were received.
    waited: AtomicU64,
}

impl<'a> WeightSharing<'a> {
    /// With nothing under way.
    pub fn new(team: &'a ProcessMesh<'a>) -> Self {
        let (complete, waited) = (AtomicUsize::new(usize::MAX), AtomicU64::new(0));
        WeightSharing { team, complete, exchange: Mutex::new(Ok(None)), waited }
    }

    /// Begins the exchange for an update of `state`, unless this rank is alone. Nothing is sent yet.
    pub fn begin(&self, state: &State) -> Result<()> {
        self.finish()?;
        if self.team.group.world() > 1 {
            *self.exchange() = Ok(Some(WeightExchange::begin(self.team, state)?));
            self.complete.store(0, Ordering::Release);
        }
        Ok(())
    }

    /// Sends the messages whose pieces are all among the first `pieces` of this rank.
    pub fn done(&self, pieces: usize) -> Result<()> {
        let _watch = timing::part(timing::StepPart::Share);
        match &mut *self.exchange() {
            Ok(Some(exchange)) => exchange.done(pieces),
            Ok(None) => Ok(()),
            Err(fault) => Err(fault.clone()),
        }
    }

    /// Sends the messages that are left. Sharded weights are exchanged now, directly by their owners, to each rank its
    /// shards.
    pub fn updated(&self, state: &State) -> Result<()> {
        self.done(usize::MAX)?;
        let _watch = timing::part(timing::StepPart::Share);
        if state.fold.degree() > 1 { shards(self.team, state) } else { Ok(()) }
    }

    /// Waits until all weights have arrived: for readers other than a forward pass of the next step.
    pub fn finish(&self) -> Result<()> {
        self.wait(usize::MAX)
    }

    /// Bytes that this rank has sent, with those that it still has to forward.
    pub fn sent(&self) -> SentBytes {
        let sent = self.team.group.sent();
        let exchange = self.exchange();
        let left = exchange.as_ref().ok().and_then(|exchange| exchange.as_ref());
        SentBytes { all: sent.all + left.map_or(0, WeightExchange::to_forward), ..sent }
    }

    /// How long this rank has waited for new weights since the start.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    fn exchange(&self) -> MutexGuard<'_, Result<Option<WeightExchange<'a>>>> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WeightArrival for WeightSharing<'_> {
    fn wait(&self, weights: usize) -> Result<()> {
        if self.complete.load(Ordering::Acquire) >= weights {
            return Ok(());
        }
        let _watch = timing::part(timing::StepPart::Share);
        let (mut exchange, start) = (self.exchange(), Instant::now());
        // Another worker may have received them meanwhile.
        while self.complete.load(Ordering::Acquire) < weights {
            let now = std::mem::replace(&mut *exchange, Ok(None));
            *exchange = now.and_then(|now| now.map_or(Ok(None), WeightExchange::receive));
            let complete = match &*exchange {
                Ok(Some(exchange)) => exchange.ends[exchange.received - 1],
                Ok(None) => usize::MAX,
                Err(fault) => return Err(fault.clone()),
            };
            self.complete.store(complete, Ordering::Release);
        }
        self.waited.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// The exchange of the weights that every rank holds whole, under way: round m has message m of every owner. Each
/// weight is sent to another machine once: the leader there forwards it.
struct WeightExchange<'a> {
    team: &'a ProcessMesh<'a>,
    owners: Ownership,
    /// Aliases of the weights as the model reads them.
    weights: Vec<Tensor>,
    exchange: Exchange<'a>,
    /// Between ranks of a machine, of what comes from other machines.
    forwarding: Exchange<'a>,
    /// Message by message, that of each owner.
    messages: [Vec<Message>; MESSAGES],
    /// How many of the first weights are complete after each message.
    ends: [usize; MESSAGES],
    /// How many messages this rank has sent, and how many of each owner it has received.
    sent: usize,
    received: usize,
    /// For each message sent: how many sends had begun after it.
    leaving: Vec<usize>,
    /// Owners whose messages come from themselves, and through the leader of this machine.
    direct: Vec<usize>,
    passed: Vec<usize>,
    /// Messages of `direct`, in the order of messages and then of owners.
    coming: VecDeque<Arrival<'a>>,
}

impl<'a> WeightExchange<'a> {
    fn begin(team: &'a ProcessMesh<'a>, state: &State) -> Result<Self> {
        let (group, nodes, me) = (team.group, &team.nodes, team.group.rank());
        let forwarding = group.begin("the forwarding of new weights").map_err(lost)?;
        let exchange = group.begin("the sharing of new weights").map_err(lost)?;
        let weights = state.weights.iter().map(Tensor::shallow_clone).collect();
        let (owners, messages) = (state.owners.clone(), messages(group.world(), state));
        let ends = ends(&messages, owners.pieces(), state.weights.len());
        let others = (0..group.world() as usize).filter(|owner| *owner != me as usize);
        let (direct, passed) =
            others.partition(|owner| nodes.relay(me, *owner as u32) == *owner as u32);
        let (sent, received, leaving, coming) = (0, 0, Vec::new(), VecDeque::new());
        Ok(WeightExchange {
            team,
            owners,
            weights,
            exchange,
            forwarding,
            messages,
            ends,
            sent,
            received,
            leaving,
            direct,
            passed,
            coming,
        })
    }

    /// Sends the messages whose pieces are all among the first `pieces` of this rank.
    fn done(&mut self, pieces: usize) -> Result<()> {
        let me = self.team.group.rank() as usize;
        while self.sent < MESSAGES && self.messages[self.sent][me].needs <= pieces {
            self.send_next()?;
        }
        Ok(())
    }

    /// Sends the next message to all, and begins to receive the same one of each other rank.
    fn send_next(&mut self) -> Result<()> {
        let WeightExchange { team, owners, weights, exchange, .. } = self;
        let (group, nodes, me) = (team.group, &team.nodes, team.group.rank());
        let (round, messages) = (self.sent as u64, &self.messages[self.sent]);
        for owner in &self.direct {
            let bytes = messages[*owner].bytes;
            let arrival = exchange.receive(round, *owner as u32, Kind::Uint8, bytes);
            self.coming.push_back(arrival.map_err(lost)?);
        }
        let payload = pack(weights, messages[me as usize].pieces(owners))?;
        for to in group.others().filter(|to| nodes.relay(*to, me) == me) {
            exchange.send(round, to, &payload).map_err(lost)?;
        }
        self.sent += 1;
        self.leaving.push(exchange.begun());
        exchange.close(round).map_err(lost)
    }

    /// Receives the next message of every owner into this rank's weights, and forwards those of other machines.
    /// Returns `None` after the last.
    fn receive(mut self) -> Result<Option<Self>> {
        let (group, nodes, me) = (self.team.group, &self.team.nodes, self.team.group.rank());
        let (round, messages) = (self.received as u64, &self.messages[self.received]);
        let here = |rank: &u32| nodes.of(*rank) == nodes.here();
        // A forward pass needs the memory of the messages before.
        let before = self.received.checked_sub(1).map_or(0, |before| self.leaving[before]);
        self.exchange.left(before).map_err(lost)?;
        self.forwarding.left(self.forwarding.begun()).map_err(lost)?;
        let mut forwarded = Vec::new();
        for owner in &self.passed {
            let (message, from) = (&messages[*owner], nodes.relay(me, *owner as u32));
            let arrival = self.forwarding.receive(round, from, Kind::Uint8, message.bytes);
            forwarded.push((message, arrival.map_err(lost)?));
        }
        for (owner, arrival) in self.direct.iter().zip(self.coming.drain(..self.direct.len())) {
            let packed = arrival.wait().map_err(lost)?;
            if !here(&(*owner as u32)) {
                for to in group.others().filter(here) {
                    self.forwarding.send(round, to, &packed).map_err(lost)?;
                }
            }
            take(&self.weights, messages[*owner].pieces(&self.owners), &packed)?;
        }
        self.forwarding.close(round).map_err(lost)?;
        for (message, arrival) in forwarded {
            let packed = arrival.wait().map_err(lost)?;
            take(&self.weights, message.pieces(&self.owners), &packed)?;
        }
        self.received += 1;
        if self.received < MESSAGES {
            return Ok(Some(self));
        }
        self.exchange.finish().and_then(|()| self.forwarding.finish()).map_err(lost)?;
        Ok(None)
    }

    /// Bytes that this rank still has to forward.
    fn to_forward(&self) -> u64 {
        let nodes = &self.team.nodes;
        let elsewhere = |owner: &&usize| nodes.of(**owner as u32) != nodes.here();
        let neighbours = nodes.ranks(nodes.here()).len() as u64 - 1;
        let owners = || self.direct.iter().filter(elsewhere);
        let messages = self.messages[self.received..].iter();
        let bytes = messages.flat_map(|all| owners().map(|owner| all[*owner].bytes as u64));
        neighbours * bytes.sum::<u64>()
    }
}

/// Exchanges the new weights that are sharded: all ranks at one position of the axis hold the same shards.
fn shards(team: &ProcessMesh<'_>, state: &State) -> Result<()> {
    let (group, degree) = (team.group, state.fold.degree());
    let packed = (0..degree).map(|place| packed(state, &state.fold.at(place)));
    let packed = packed.collect::<Result<Vec<Tensor>>>()?;
    let mut exchange = group.begin("the sharing of new shards").map_err(lost)?;
    let mut arrivals = Vec::new();
    for owner in group.others() {
        let bytes = held(state, owner, &state.fold);
        let bytes = bytes.map(|(common, weight)| wide(weight) * common.count()).sum();
        let arrival = exchange.receive(0, owner, Kind::Uint8, bytes).map_err(lost)?;
        arrivals.push((owner, arrival));
    }
    for to in group.others() {
        exchange.send(0, to, &packed[(to % degree) as usize]).map_err(lost)?;
    }
    exchange.close(0).map_err(lost)?;
    for (owner, arrival) in arrivals {
        let (packed, mut at, mut pairs) = (arrival.wait().map_err(lost)?, 0, Vec::new());
        for (common, weight) in held(state, owner, &state.fold) {
            let into = common.of_held(weight).map_err(refused)?;
            let length = wide(weight) * common.count();
            let part = packed.narrow(0, at, length).view_dtype(weight.kind());
            at += length;
            let part = part.view(into.size().as_slice());
            pairs.push((into, part));
        }
        copied(&mut pairs)?;
    }
    exchange.finish().map_err(lost)
}

/// Bytes of a number of this tensor.
fn wide(weight: &Tensor) -> i64 {
    weight.kind().elt_size_in_bytes() as i64
}

/// The runs of `owner`'s pieces that a rank with `fold` holds, and their weights, in the order of sending.
fn held<'a>(
    state: &'a State,
    owner: u32,
    fold: &WeightShards,
) -> impl Iterator<Item = (Overlap, &'a Tensor)> {
    let cut = state.owners.of(owner).filter(|piece| state.fold.cuts(piece.tensor));
    let common = cut.flat_map(|piece| {
        let common = fold.common(piece.tensor, piece.first..piece.first + piece.length());
        common.into_iter().map(|common| (common, &state.weights[piece.tensor]))
    });
    let mut found: Vec<_> = common.collect();
    found.sort_by_key(|(_, weight)| Reverse(wide(weight)));
    found.into_iter()
}

/// The bytes of this rank's weights to send to a rank with `fold`.
fn packed(state: &State, fold: &WeightShards) -> Result<Tensor> {
    let mut parts = Vec::new();
    for (piece, weight, _) in state.own().filter(|(piece, ..)| state.fold.cuts(piece.tensor)) {
        let (kind, flat) = (state.weights[piece.tensor].kind(), weight.reshape([-1]));
        for common in fold.common(piece.tensor, piece.first..piece.first + piece.length()) {
            let run = common.of_run(&flat).map_err(refused)?.f_to_kind(kind);
            parts.push(run.and_then(|run| run.f_contiguous()).map_err(refused)?);
        }
    }
    parts.sort_by_key(|part| Reverse(wide(part)));
    tree::pack(&parts, state.device()).map_err(refused)
}

/// The device of the weights.
fn place(weights: &[Tensor]) -> Device {
    weights.first().map_or(Device::Cpu, Tensor::device)
}

/// A message of an owner.
#[derive(Clone, Default)]
struct Message {
    /// Its pieces by their numbers, the widest dtypes first, so that all are aligned.
    pieces: Vec<usize>,
    /// How many of the owner's pieces, in their order, must be done before it is sent.
    needs: usize,
    /// Its length.
    bytes: i64,
}

impl Message {
    fn pieces<'a>(&'a self, owners: &'a Ownership) -> impl Iterator<Item = &'a ParamShard> {
        self.pieces.iter().map(|number| &owners.pieces()[*number])
    }
}

/// Message by message, that of each owner: its pieces in their order, cut where the bytes before a piece reach the next
/// part of all.
fn messages(world: u32, state: &State) -> [Vec<Message>; MESSAGES] {
    let (mut bytes, mut count) = (vec![(0, 0); world as usize], vec![0; world as usize]);
    let pieces = state.owners.pieces();
    let whole = |piece: &ParamShard| !state.fold.cuts(piece.tensor);
    for piece in pieces.iter().filter(|piece| whole(piece)) {
        bytes[piece.owner as usize].1 += bytes_of(piece, &state.weights);
    }
    let mut messages = [(); MESSAGES].map(|()| vec![Message::default(); world as usize]);
    for (number, piece) in pieces.iter().enumerate() {
        let owner = piece.owner as usize;
        count[owner] += 1;
        if whole(piece) {
            let (before, all) = &mut bytes[owner];
            let message = &mut messages[(*before * MESSAGES as i64 / *all) as usize][owner];
            message.pieces.push(number);
            message.needs = count[owner];
            message.bytes += bytes_of(piece, &state.weights);
            *before += bytes_of(piece, &state.weights);
        }
    }
    for message in messages.iter_mut().flatten() {
        let width = |number: &usize| Reverse(wide(&state.weights[pieces[*number].tensor]));
        message.pieces.sort_by_key(width);
    }
    messages
}

/// How many of the first `weights` weights are complete after each message: the same on every rank.
fn ends(
    messages: &[Vec<Message>; MESSAGES],
    pieces: &[ParamShard],
    weights: usize,
) -> [usize; MESSAGES] {
    // The last message that has a piece of each weight.
    let mut last = vec![0; weights];
    for (number, messages) in messages.iter().enumerate() {
        for piece in messages.iter().flat_map(|message| &message.pieces) {
            last[pieces[*piece].tensor] = number;
        }
    }
    std::array::from_fn(|number| last.iter().take_while(|last| **last <= number).count())
}

/// The bytes of a piece as it is sent.
fn bytes_of(piece: &ParamShard, weights: &[Tensor]) -> i64 {
    piece.length() * wide(&weights[piece.tensor])
}

/// These pieces of this rank, byte after byte.
fn pack<'a>(weights: &[Tensor], pieces: impl Iterator<Item = &'a ParamShard>) -> Result<Tensor> {
    let part = |piece: &ParamShard| piece.of(&weights[piece.tensor]).f_contiguous();
    let parts: std::result::Result<Vec<_>, _> = pieces.map(part).collect();
    tree::pack(&parts.map_err(refused)?, place(weights)).map_err(refused)
}

/// Copies received pieces into this rank's weights.
fn take<'a>(
    weights: &[Tensor],
    pieces: impl Iterator<Item = &'a ParamShard>,
    packed: &Tensor,
) -> Result<()> {
    let (mut at, mut pairs) = (0, Vec::new());
    for piece in pieces {
        let (whole, length) = (&weights[piece.tensor], bytes_of(piece, weights));
        let part = packed.narrow(0, at, length).view_dtype(whole.kind());
        at += length;
        pairs.push((piece.of(whole), part.view(piece.shape.as_slice())));
    }
    copied(&mut pairs)
}

/// Copies what was received, on a device by one launch.
fn copied(pairs: &mut [(Tensor, Tensor)]) -> Result<()> {
    tch::no_grad(|| tree::copy_all(pairs)).map_err(refused)
}

/// The checksums of all pieces in canonical order, from the ends of the messages that each rank sent about its own.
pub fn sums(owners: &Ownership, mut gathered: Vec<WordReader<'_>>) -> Result<Vec<ShardChecksums>> {
    let of_piece = |piece: &ParamShard| {
        let gathered = &mut gathered[piece.owner as usize];
        Ok([gathered.word()?, gathered.word()?, gathered.word()?])
    };
    let sums = owners.pieces().iter().map(of_piece).collect::<Result<_>>()?;
    gathered.into_iter().try_for_each(WordReader::end)?;
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tests::{layout, whole};
    use crate::mesh::sum::tests::{PATIENCE, on_ranks};
    use crate::mesh::{Degrees, GradReduce};
    use crate::state::ownership;
    use kernels::group::Group;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    /// The state of a rank that has the new weights of its own pieces and old ones of others; and all new weights.
    fn state(place: u32, world: u32, narrow: bool) -> (State, Vec<Tensor>) {
        let mut layout = layout();
        layout.parameters = vec![layout.parameters; 8].concat();
        layout.rules = layout.rules.repeat(8);
        let pieces = ownership::pieces(&layout.parameters, &layout.rules, world);
        let mut state = whole(&layout, 5).cut(5, &pieces, place);
        for weight in state.weights.iter_mut().skip(1).step_by(2).filter(|_| narrow) {
            *weight = weight.to_kind(Kind::BFloat16);
        }
        let wanted = state.weights.iter().map(Tensor::copy).collect();
        for piece in pieces.iter().filter(|piece| piece.owner != place) {
            let _ = piece.of(&state.weights[piece.tensor]).fill_(7.0);
        }
        (state, wanted)
    }

    fn assert_same<'a>(found: impl IntoIterator<Item = &'a Tensor>, wanted: &[Tensor]) {
        let bits = |tensor: &Tensor| kernels::checksum::tensor(&tensor.reshape([-1]), 1).unwrap();
        for (found, wanted) in found.into_iter().zip(wanted) {
            assert_eq!(bits(found), bits(wanted));
        }
    }

    /// Each rank finds its pieces done one after the other. Then all have all weights, and each message but the last
    /// has left before the last piece was done.
    #[test]
    fn weights_travel_while_others_are_computed() {
        for world in [1, 2, 3, 4, 8] {
            for narrow in [false, true] {
                on_ranks(world, |place| {
                    let group = Group::open(&place, PATIENCE, &|_| ()).unwrap();
                    let reduce = GradReduce::default();
                    let team = ProcessMesh::new(&group, Degrees::ALONE, reduce, false).unwrap();
                    let (state, wanted) = state(place.rank, world, narrow);
                    let sharing = WeightSharing::new(&team);
                    sharing.begin(&state).unwrap();
                    let messages = messages(world, &state);
                    let (own, begun) = (state.owners.own().count(), group.sent().all);
                    for pieces in 1..=own {
                        let mixed = (pieces as u64 + 1) * (u64::from(place.rank) + 7) * 0x9e37_79b9;
                        thread::sleep(Duration::from_micros(mixed >> 5 & 0x3ff));
                        sharing.done(pieces).unwrap();
                        let mine = messages.iter().map(|all| &all[place.rank as usize]);
                        let sent = mine.filter(|one| one.needs <= pieces);
                        let sent: i64 = sent.map(|one| one.bytes).sum();
                        let direct = team
                            .group
                            .others()
                            .filter(|to| team.nodes.relay(*to, place.rank) == place.rank);
                        let found = group.sent().all - begun;
                        assert_eq!(found, sent as u64 * direct.count() as u64, "{pieces} of {own}");
                    }
                    sharing.updated(&state).unwrap();
                    let promised = sharing.sent();
                    sharing.finish().unwrap();
                    assert_eq!((sharing.sent(), group.sent()), (promised, promised));
                    assert_same(&state.weights, &wanted);
                    group.barrier("the end").unwrap();
                });
            }
        }
    }

    /// One rank has not sent its last message yet. The others wait for the first weights and have them; a reader of all
    /// weights waits for that message, and so does every other worker.
    #[test]
    fn a_forward_pass_begins_before_the_last_message_has_arrived() {
        for world in [2, 4, 5] {
            let (begun, finished) = (AtomicU32::new(0), AtomicU32::new(0));
            on_ranks(world, |place| {
                let group = Group::open(&place, PATIENCE, &|_| ()).unwrap();
                let reduce = GradReduce::default();
                let team = ProcessMesh::new(&group, Degrees::ALONE, reduce, false).unwrap();
                let (state, wanted) = state(place.rank, world, false);
                let sharing = WeightSharing::new(&team);
                sharing.begin(&state).unwrap();
                let messages = messages(world, &state);
                let first = ends(&messages, state.owners.pieces(), wanted.len())[MESSAGES - 2];
                assert!((1..wanted.len()).contains(&first), "{first}");
                let needs = messages[MESSAGES - 1].iter().map(|message| message.needs);
                let (rank, needs) = needs.enumerate().max_by_key(|(_, needs)| *needs).unwrap();
                let late = place.rank as usize == rank;
                sharing.done(if late { needs - 1 } else { usize::MAX }).unwrap();
                // Also on the rank that is late: it forwards messages of other machines.
                sharing.wait(first).unwrap();
                assert_same(&state.weights[..first], &wanted);
                begun.fetch_add(1, Ordering::SeqCst);
                if !late {
                    thread::scope(|scope| {
                        for _ in 0..2 {
                            scope.spawn(|| {
                                sharing.finish().unwrap();
                                finished.fetch_add(1, Ordering::SeqCst);
                            });
                        }
                    });
                } else {
                    let start = Instant::now();
                    while begun.load(Ordering::SeqCst) < world && start.elapsed() < PATIENCE {
                        thread::sleep(Duration::from_millis(1));
                    }
                    thread::sleep(Duration::from_millis(50));
                    assert_eq!(finished.load(Ordering::SeqCst), 0);
                    sharing.updated(&state).unwrap();
                    sharing.finish().unwrap();
                }
                assert_same(&state.weights, &wanted);
                group.barrier("the end").unwrap();
            });
        }
    }

    /// Every piece is in one message of its owner, none waits for pieces behind it in an earlier message, and messages
    /// are about as large. The first weights are complete when no later message has a piece of one.
    #[test]
    fn messages_are_parts_of_what_a_rank_owns() {
        let (state, wanted) = state(0, 3, false);
        let (all, pieces) = (messages(3, &state), state.owners.pieces());
        for owner in 0..3 {
            let messages: Vec<_> = all.iter().map(|all| &all[owner as usize]).collect();
            let own: Vec<&ParamShard> = state.owners.of(owner).collect();
            let count: usize = messages.iter().map(|one| one.pieces.len()).sum();
            assert_eq!(count, own.len());
            let largest = own.iter().map(|piece| piece.length()).max().unwrap() * 4;
            let whole = state.owners.length(owner) * 4;
            let mut before = 0;
            for message in messages.into_iter().filter(|one| !one.pieces.is_empty()) {
                assert_eq!(message.needs, before + message.pieces.len());
                let mut sent = message.pieces(&state.owners);
                assert!(sent.all(|one| own[before..message.needs].contains(&one)));
                assert!(message.bytes <= whole / MESSAGES as i64 + largest);
                before = message.needs;
            }
        }
        let ends = ends(&all, pieces, wanted.len());
        for (number, end) in ends.iter().enumerate() {
            let later = all[number + 1..].iter().flatten().flat_map(|one| &one.pieces);
            let first = later.map(|piece| pieces[*piece].tensor).min();
            assert_eq!(*end, first.unwrap_or(wanted.len()));
        }
    }
}
