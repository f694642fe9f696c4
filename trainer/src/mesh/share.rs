//! What owners send to all ranks at the end of a step: their new weights, as they are computed, and checksums of their
//! pieces.

use std::cmp::Reverse;

use contract::Result;
use kernels::group::{Arrival, Exchange};
use kernels::tree;
use tch::{Device, Kind, Tensor};

use super::ProcessMesh;
use super::words::WordReader;
use crate::model::{Overlap, WeightShards};
use crate::refusal::{lost, refused};
use crate::state::ownership::{Ownership, ParamShard};
use crate::state::{ShardChecksums, State};
use crate::timing;

/// The messages in which a rank sends the weights of its pieces. The first leaves when a part of the pieces is updated,
/// so all but the last travel while others are computed; more would be small where many ranks share a model.
pub const MESSAGES: usize = 4;

/// Sends this rank's new weights to every other rank, in the dtype in which the model reads them, and receives theirs.
pub fn weights(team: &ProcessMesh<'_>, state: &State) -> Result<()> {
    WeightSharing::begin(team, state)?.finish(state)
}

/// The exchange of the new weights that every rank holds whole, under way. Each weight is sent to another machine once:
/// the leader there forwards it. Sharded weights are sent at the end, directly by their owners, to each rank its
/// shards.
///
/// Round m of the exchange has message m of every owner, and round `MESSAGES` + m the same forwarded.
pub struct WeightSharing<'a> {
    team: &'a ProcessMesh<'a>,
    /// Aliases of the weights as the model reads them.
    weights: Vec<Tensor>,
    /// `None` on a rank that is alone.
    exchange: Option<Exchange<'a>>,
    /// Message by message, that of each owner.
    messages: [Vec<Message<'a>>; MESSAGES],
    /// How many of its messages this rank has sent.
    sent: usize,
    /// Owners whose messages come from themselves, and through the leader of this machine.
    direct: Vec<usize>,
    passed: Vec<usize>,
    /// Messages of `direct`, in the order of messages and then of owners.
    coming: Vec<Arrival<'a>>,
}

impl<'a> WeightSharing<'a> {
    /// Begins the exchange, unless this rank is alone. Nothing is sent yet.
    pub fn begin(team: &'a ProcessMesh<'a>, state: &'a State) -> Result<Self> {
        let (group, nodes, me) = (team.group, &team.nodes, team.group.rank());
        let alone = group.world() == 1;
        let exchange = (!alone).then(|| group.begin("the sharing of new weights"));
        let exchange = exchange.transpose().map_err(lost)?;
        let messages = messages(team, state);
        let weights = state.weights.iter().map(Tensor::shallow_clone).collect();
        let others = (0..group.world() as usize).filter(|owner| *owner != me as usize);
        let (direct, passed) =
            others.partition(|owner| nodes.relay(me, *owner as u32) == *owner as u32);
        let (sent, coming) = (0, Vec::new());
        Ok(WeightSharing { team, weights, exchange, messages, sent, direct, passed, coming })
    }

    /// Sends the messages whose pieces are all among the first `pieces` of this rank.
    pub fn done(&mut self, pieces: usize) -> Result<()> {
        let _watch = timing::part(timing::StepPart::Share);
        let me = self.team.group.rank() as usize;
        while self.exchange.is_some()
            && self.sent < MESSAGES
            && self.messages[self.sent][me].needs <= pieces
        {
            self.send_next()?;
        }
        Ok(())
    }

    /// Sends the next message to all, and begins to receive the same one of each other rank.
    fn send_next(&mut self) -> Result<()> {
        let WeightSharing { team, weights, exchange: Some(exchange), messages, sent, .. } = self
        else {
            return Ok(());
        };
        let (group, nodes, me) = (team.group, &team.nodes, team.group.rank());
        let round = *sent as u64;
        for owner in &self.direct {
            let bytes = length(weights, &messages[*sent][*owner]);
            let arrival = exchange.receive(round, *owner as u32, Kind::Uint8, bytes);
            self.coming.push(arrival.map_err(lost)?);
        }
        let payload = pack(weights, &messages[*sent][me as usize])?;
        for to in group.others().filter(|to| nodes.relay(*to, me) == me) {
            exchange.send(round, to, &payload).map_err(lost)?;
        }
        *sent += 1;
        exchange.close(round).map_err(lost)
    }

    /// Sends what is left, and writes the weights of the other ranks into this rank's.
    pub fn finish(mut self, state: &State) -> Result<()> {
        self.done(usize::MAX)?;
        let WeightSharing { team, weights, exchange, messages, direct, passed, coming, .. } = self;
        let Some(mut exchange) = exchange else { return Ok(()) };
        let _watch = timing::part(timing::StepPart::Share);
        let (group, nodes, me) = (team.group, &team.nodes, team.group.rank());
        let here = |rank: &u32| nodes.of(*rank) == nodes.here();
        let (mut coming, mut forwarded) = (coming.into_iter(), Vec::new());
        for (number, messages) in messages.iter().enumerate() {
            let round = (MESSAGES + number) as u64;
            for owner in &passed {
                let (message, from) = (&messages[*owner], nodes.relay(me, *owner as u32));
                let arrival = exchange.receive(round, from, Kind::Uint8, length(&weights, message));
                forwarded.push((message, arrival.map_err(lost)?));
            }
            for (owner, arrival) in direct.iter().zip(&mut coming) {
                let packed = arrival.wait().map_err(lost)?;
                if !here(&(*owner as u32)) {
                    for to in group.others().filter(here) {
                        exchange.send(round, to, &packed).map_err(lost)?;
                    }
                }
                take(&weights, &messages[*owner], &packed)?;
            }
            exchange.close(round).map_err(lost)?;
        }
        for (message, arrival) in forwarded {
            take(&weights, message, &arrival.wait().map_err(lost)?)?;
        }
        exchange.finish().map_err(lost)?;
        if state.fold.degree() > 1 { shards(team, state) } else { Ok(()) }
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
struct Message<'a> {
    /// Its pieces, the widest dtypes first, so that all are aligned.
    pieces: Vec<&'a ParamShard>,
    /// How many of the owner's pieces, in their order, must be done before it is sent.
    needs: usize,
}

/// Message by message, that of each owner: its pieces in their order, cut where the bytes before a piece reach the next
/// part of all.
fn messages<'a>(team: &ProcessMesh<'_>, state: &'a State) -> [Vec<Message<'a>>; MESSAGES] {
    let world = team.group.world() as usize;
    let (mut bytes, mut count) = (vec![(0, 0); world], vec![0; world]);
    let whole = |piece: &ParamShard| !state.fold.cuts(piece.tensor);
    for piece in state.owners.pieces().iter().filter(|piece| whole(piece)) {
        bytes[piece.owner as usize].1 += bytes_of(piece, &state.weights);
    }
    let mut messages = [(); MESSAGES].map(|()| vec![Message::default(); world]);
    for piece in state.owners.pieces() {
        let owner = piece.owner as usize;
        count[owner] += 1;
        if whole(piece) {
            let (before, all) = &mut bytes[owner];
            let message = &mut messages[(*before * MESSAGES as i64 / *all) as usize][owner];
            message.pieces.push(piece);
            message.needs = count[owner];
            *before += bytes_of(piece, &state.weights);
        }
    }
    for message in messages.iter_mut().flatten() {
        message.pieces.sort_by_key(|piece| Reverse(wide(&state.weights[piece.tensor])));
    }
    messages
}

/// The bytes of a piece as it is sent.
fn bytes_of(piece: &ParamShard, weights: &[Tensor]) -> i64 {
    piece.length() * wide(&weights[piece.tensor])
}

/// The bytes of a message.
fn length(weights: &[Tensor], message: &Message<'_>) -> i64 {
    message.pieces.iter().map(|piece| bytes_of(piece, weights)).sum()
}

/// The weights of a message of this rank, byte after byte.
fn pack(weights: &[Tensor], message: &Message<'_>) -> Result<Tensor> {
    let part = |piece: &&ParamShard| piece.of(&weights[piece.tensor]).f_contiguous();
    let parts: std::result::Result<Vec<_>, _> = message.pieces.iter().map(part).collect();
    tree::pack(&parts.map_err(refused)?, place(weights)).map_err(refused)
}

/// Copies a received message into this rank's weights.
fn take(weights: &[Tensor], message: &Message<'_>, packed: &Tensor) -> Result<()> {
    let (mut at, mut pairs) = (0, Vec::new());
    for piece in &message.pieces {
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
    use std::thread;
    use std::time::Duration;

    /// Each rank has the weights of its own pieces and no others, and finds its pieces done one after the other. Then
    /// all have all weights, and each message but the last has left before the last piece was done.
    #[test]
    fn weights_travel_while_others_are_computed() {
        for world in [1, 2, 3, 4, 8] {
            for narrow in [false, true] {
                let layout = layout();
                on_ranks(world, |place| {
                    let group = Group::open(&place, PATIENCE, &|_| ()).unwrap();
                    let reduce = GradReduce::default();
                    let team = ProcessMesh::new(&group, Degrees::ALONE, reduce, false).unwrap();
                    let pieces = ownership::pieces(&layout.parameters, &layout.rules, world);
                    let mut state = whole(&layout, 5).cut(5, &pieces, place.rank);
                    for weight in state.weights.iter_mut().skip(1).step_by(2).filter(|_| narrow) {
                        *weight = weight.to_kind(Kind::BFloat16);
                    }
                    let wanted: Vec<Tensor> = state.weights.iter().map(Tensor::copy).collect();
                    for piece in pieces.iter().filter(|piece| piece.owner != place.rank) {
                        let _ = piece.of(&state.weights[piece.tensor]).fill_(7.0);
                    }
                    let mut sharing = WeightSharing::begin(&team, &state).unwrap();
                    let (own, begun) = (state.owners.own().count(), group.sent().all);
                    for pieces in 1..=own {
                        let mixed = (pieces as u64 + 1) * (u64::from(place.rank) + 7) * 0x9e37_79b9;
                        thread::sleep(Duration::from_micros(mixed >> 5 & 0x3ff));
                        sharing.done(pieces).unwrap();
                        let mine = sharing.messages.iter().map(|all| &all[place.rank as usize]);
                        let sent = mine.filter(|one| one.needs <= pieces);
                        let sent: i64 = sent.map(|one| length(&state.weights, one)).sum();
                        let direct = team
                            .group
                            .others()
                            .filter(|to| team.nodes.relay(*to, place.rank) == place.rank);
                        let found = group.sent().all - begun;
                        assert_eq!(found, sent as u64 * direct.count() as u64, "{pieces} of {own}");
                    }
                    sharing.finish(&state).unwrap();
                    for (found, wanted) in state.weights.iter().zip(&wanted) {
                        let bits =
                            |tensor: &Tensor| kernels::checksum::tensor(&tensor.reshape([-1]), 1);
                        assert_eq!(bits(found).unwrap(), bits(wanted).unwrap());
                    }
                    group.barrier("the end").unwrap();
                });
            }
        }
    }

    /// Every piece is in one message of its owner, none waits for pieces behind it in an earlier message, and messages
    /// are about as large.
    #[test]
    fn messages_are_parts_of_what_a_rank_owns() {
        let layout = layout();
        on_ranks(3, |place| {
            let group = Group::open(&place, PATIENCE, &|_| ()).unwrap();
            let team =
                ProcessMesh::new(&group, Degrees::ALONE, GradReduce::default(), false).unwrap();
            let pieces = ownership::pieces(&layout.parameters, &layout.rules, 3);
            let state = whole(&layout, 5).cut(5, &pieces, place.rank);
            let messages = messages(&team, &state);
            for owner in 0..3 {
                let messages: Vec<_> = messages.iter().map(|all| &all[owner as usize]).collect();
                let own: Vec<&ParamShard> = state.owners.of(owner).collect();
                let count: usize = messages.iter().map(|one| one.pieces.len()).sum();
                assert_eq!(count, own.len());
                let largest = own.iter().map(|piece| piece.length()).max().unwrap() * 4;
                let all = state.owners.length(owner) * 4;
                let mut before = 0;
                for message in messages.into_iter().filter(|one| !one.pieces.is_empty()) {
                    assert_eq!(message.needs, before + message.pieces.len());
                    assert!(
                        message.pieces.iter().all(|one| own[before..message.needs].contains(one))
                    );
                    assert!(length(&state.weights, message) <= all / MESSAGES as i64 + largest);
                    before = message.needs;
                }
            }
            group.barrier("the end").unwrap();
        });
    }
}
