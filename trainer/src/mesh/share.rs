//! What owners give to all ranks at the end of a step: their new weights, and checksums of their pieces.

use contract::Result;
use tch::{Kind, Tensor};

use super::Team;
use super::words::Reader;
use crate::refusal::lost;
use crate::state::PieceSums;
use crate::state::ownership::{Ownership, pack};
use crate::timing;

/// Sends this rank's new weights to every other and takes theirs. Each crosses to another machine once: the gate there
/// passes it on, in a second round.
pub(crate) fn weights(team: &Team<'_>, owners: &Ownership, weights: &[Tensor]) -> Result<()> {
    if team.group.world() == 1 {
        return Ok(());
    }
    let _watch = timing::part(timing::Part::Share);
    let (group, nodes, me) = (team.group, &team.nodes, owners.rank());
    let here = |rank: &u32| nodes.of(*rank) == nodes.here();
    let mine = pack(owners.pieces(), &[me], weights);
    let mut exchange = group.begin("the sharing of new weights").map_err(lost)?;
    // Asked for in the order in which each rank sends: first its own, then what it passes on.
    let (direct, passed): (Vec<u32>, Vec<u32>) = (0..group.world())
        .filter(|owner| *owner != me)
        .partition(|owner| nodes.teller(me, *owner) == *owner);
    let mut arrivals = Vec::new();
    for owner in direct.iter().chain(&passed).copied() {
        let from = nodes.teller(me, owner);
        let (round, length) = (u64::from(from != owner), owners.length(owner));
        let arrival = exchange.receive(round, from, Kind::Float, length).map_err(lost)?;
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

/// Takes over the new weights of `owner`.
fn take(owners: &Ownership, owner: u32, packed: &Tensor, weights: &[Tensor]) {
    let parts = owners.unpack(owner, packed);
    tch::no_grad(|| {
        for (piece, part) in owners.of(owner).zip(parts) {
            piece.of(&weights[piece.tensor]).copy_(&part);
        }
    });
}

/// The checksums of all pieces in canonical order, out of what each rank said of its own, which ends with them.
pub(crate) fn sums(owners: &Ownership, mut said: Vec<Reader<'_>>) -> Result<Vec<PieceSums>> {
    let of_piece = |piece: &crate::state::ownership::Piece| {
        let said = &mut said[piece.owner as usize];
        Ok([said.word()?, said.word()?, said.word()?])
    };
    let sums = owners.pieces().iter().map(of_piece).collect::<Result<_>>()?;
    said.into_iter().try_for_each(Reader::end)?;
    Ok(sums)
}
