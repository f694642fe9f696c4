//! What owners give to all ranks at the end of a step: their new weights, and checksums of their pieces.

use contract::Result;
use tch::{Device, Kind, Tensor};

use super::Team;
use super::words::Reader;
use crate::refusal::lost;
use crate::state::PieceSums;
use crate::state::ownership::{Ownership, Piece};
use crate::timing;

/// Sends this rank's new weights to every other, in the numbers in which the model reads them, and takes theirs. Each crosses to
/// another machine once: the gate there passes it on, in a second round.
pub(crate) fn weights(team: &Team<'_>, owners: &Ownership, weights: &[Tensor]) -> Result<()> {
    if team.group.world() == 1 {
        return Ok(());
    }
    let _watch = timing::part(timing::Part::Share);
    let (group, nodes, me) = (team.group, &team.nodes, owners.rank());
    let here = |rank: &u32| nodes.of(*rank) == nodes.here();
    let mine = pack(owners, me, weights);
    let mut exchange = group.begin("the sharing of new weights").map_err(lost)?;
    // Asked for in the order in which each rank sends: first its own, then what it passes on.
    let (direct, passed): (Vec<u32>, Vec<u32>) = (0..group.world())
        .filter(|owner| *owner != me)
        .partition(|owner| nodes.teller(me, *owner) == *owner);
    let mut arrivals = Vec::new();
    for owner in direct.iter().chain(&passed).copied() {
        let from = nodes.teller(me, owner);
        let round = u64::from(from != owner);
        let bytes = order(owners, owner, weights).iter().map(|piece| bytes(piece, weights)).sum();
        let arrival = exchange.receive(round, from, Kind::Uint8, bytes).map_err(lost)?;
        arrivals.push((owner, arrival));
    }
    for to in group.others().filter(|to| nodes.teller(*to, me) == me) {
        exchange.send(0, to, &mine).map_err(lost)?;
    }
    exchange.close(0).map_err(lost)?;
    let told = arrivals.split_off(direct.len());
    for (owner, arrival) in arrivals {
        let packed = arrival.wait().map_err(lost)?;
        if !here(&owner) {
            for to in group.others().filter(here) {
                exchange.send(1, to, &packed).map_err(lost)?;
            }
        }
        take(owners, owner, &packed, weights);
    }
    exchange.close(1).map_err(lost)?;
    for (owner, arrival) in told {
        take(owners, owner, &arrival.wait().map_err(lost)?, weights);
    }
    exchange.finish().map_err(lost)
}

/// The pieces of `owner` in the order in which they travel: those of the widest numbers first, so that each lies where its
/// numbers may.
fn order<'a>(owners: &'a Ownership, owner: u32, weights: &[Tensor]) -> Vec<&'a Piece> {
    let mut pieces: Vec<&Piece> = owners.of(owner).collect();
    let width = |piece: &&Piece| weights[piece.tensor].kind().elt_size_in_bytes();
    pieces.sort_by_key(|piece| std::cmp::Reverse(width(piece)));
    pieces
}

/// The bytes of a piece as it travels.
fn bytes(piece: &Piece, weights: &[Tensor]) -> i64 {
    piece.length() * weights[piece.tensor].kind().elt_size_in_bytes() as i64
}

/// The weights of the pieces of `owner`, byte after byte.
fn pack(owners: &Ownership, owner: u32, weights: &[Tensor]) -> Tensor {
    let pieces = order(owners, owner, weights).into_iter();
    let flat = |piece: &Piece| piece.of(&weights[piece.tensor]).reshape([-1]);
    let parts: Vec<Tensor> = pieces.map(|piece| flat(piece).view_dtype(Kind::Uint8)).collect();
    if parts.is_empty() {
        return Tensor::empty(
            [0],
            (Kind::Uint8, weights.first().map_or(Device::Cpu, Tensor::device)),
        );
    }
    Tensor::cat(&parts, 0)
}

/// Takes over the new weights of `owner`.
fn take(owners: &Ownership, owner: u32, packed: &Tensor, weights: &[Tensor]) {
    let mut at = 0;
    for piece in order(owners, owner, weights) {
        let (whole, length) = (&weights[piece.tensor], bytes(piece, weights));
        let part = packed.narrow(0, at, length).view_dtype(whole.kind());
        at += length;
        tch::no_grad(|| piece.of(whole).copy_(&part.view(piece.shape.as_slice())));
    }
}

/// The checksums of all pieces in canonical order, out of what each rank said of its own, which ends with them.
pub(crate) fn sums(owners: &Ownership, mut said: Vec<Reader<'_>>) -> Result<Vec<PieceSums>> {
    let of_piece = |piece: &Piece| {
        let said = &mut said[piece.owner as usize];
        Ok([said.word()?, said.word()?, said.word()?])
    };
    let sums = owners.pieces().iter().map(of_piece).collect::<Result<_>>()?;
    said.into_iter().try_for_each(Reader::end)?;
    Ok(sums)
}
