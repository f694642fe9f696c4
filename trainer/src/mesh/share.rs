//! What owners send to all ranks at the end of a step: their new weights, and checksums of their pieces.

use contract::Result;
use kernels::tree;
use tch::{Kind, Tensor};

use super::ProcessMesh;
use super::words::WordReader;
use crate::model::{Overlap, WeightShards};
use crate::refusal::{lost, refused};
use crate::state::ownership::{Ownership, ParamShard};
use crate::state::{ShardChecksums, State};
use crate::timing;

/// Sends this rank's new weights to every other rank, in the dtype in which the model reads them, and receives theirs.
/// Each weight is sent to another machine once: the leader there forwards it in a second round. Sharded weights are
/// sent directly by their owners, to each rank its shards.
pub fn weights(team: &ProcessMesh<'_>, state: &State) -> Result<()> {
    if team.group.world() == 1 {
        return Ok(());
    }
    let _watch = timing::part(timing::StepPart::Share);
    whole(team, state)?;
    if state.fold.degree() > 1 { shards(team, state) } else { Ok(()) }
}

/// Exchanges the new weights that every rank holds whole.
fn whole(team: &ProcessMesh<'_>, state: &State) -> Result<()> {
    let (owners, weights) = (&state.owners, &state.weights);
    let (group, nodes, me) = (team.group, &team.nodes, owners.rank());
    let here = |rank: &u32| nodes.of(*rank) == nodes.here();
    let payload = pack(state)?;
    let mut exchange = group.begin("the sharing of new weights").map_err(lost)?;
    // Posted in the order in which each rank sends: first its own, then what it forwards.
    let (direct, passed): (Vec<u32>, Vec<u32>) = (0..group.world())
        .filter(|owner| *owner != me)
        .partition(|owner| nodes.relay(me, *owner) == *owner);
    let mut arrivals = Vec::new();
    for owner in direct.iter().chain(&passed).copied() {
        let from = nodes.relay(me, owner);
        let round = u64::from(from != owner);
        let bytes = order(state, owner).iter().map(|piece| bytes(piece, weights)).sum();
        let arrival = exchange.receive(round, from, Kind::Uint8, bytes).map_err(lost)?;
        arrivals.push((owner, arrival));
    }
    for to in group.others().filter(|to| nodes.relay(*to, me) == me) {
        exchange.send(0, to, &payload).map_err(lost)?;
    }
    exchange.close(0).map_err(lost)?;
    let relayed = arrivals.split_off(direct.len());
    for (owner, arrival) in arrivals {
        let packed = arrival.wait().map_err(lost)?;
        if !here(&owner) {
            for to in group.others().filter(here) {
                exchange.send(1, to, &packed).map_err(lost)?;
            }
        }
        take(state, owner, &packed)?;
    }
    exchange.close(1).map_err(lost)?;
    for (owner, arrival) in relayed {
        take(state, owner, &arrival.wait().map_err(lost)?)?;
    }
    exchange.finish().map_err(lost)
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
    found.sort_by_key(|(_, weight)| std::cmp::Reverse(wide(weight)));
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
    parts.sort_by_key(|part| std::cmp::Reverse(wide(part)));
    tree::pack(&parts, state.device()).map_err(refused)
}

/// The pieces of `owner` in the order in which they are sent whole: the widest dtypes first, so that all are aligned.
fn order(state: &State, owner: u32) -> Vec<&ParamShard> {
    let whole = state.owners.of(owner).filter(|piece| !state.fold.cuts(piece.tensor));
    let mut pieces: Vec<&ParamShard> = whole.collect();
    pieces.sort_by_key(|piece| std::cmp::Reverse(wide(&state.weights[piece.tensor])));
    pieces
}

/// The bytes of a piece as it is sent.
fn bytes(piece: &ParamShard, weights: &[Tensor]) -> i64 {
    piece.length() * wide(&weights[piece.tensor])
}

/// The weights of this rank's pieces, byte after byte.
fn pack(state: &State) -> Result<Tensor> {
    let weights = &state.weights;
    let pieces = order(state, state.owners.rank()).into_iter();
    let parts =
        pieces.map(|piece| piece.of(&weights[piece.tensor]).f_contiguous().map_err(refused));
    tree::pack(&parts.collect::<Result<Vec<_>>>()?, state.device()).map_err(refused)
}

/// Copies the received new weights of `owner` into this rank's.
fn take(state: &State, owner: u32, packed: &Tensor) -> Result<()> {
    let (weights, mut at, mut pairs) = (&state.weights, 0, Vec::new());
    for piece in order(state, owner) {
        let (whole, length) = (&weights[piece.tensor], bytes(piece, weights));
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
