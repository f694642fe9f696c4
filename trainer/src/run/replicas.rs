//! Replicas in memory of the state after the last steps: each rank keeps a copy of what it owns, and of what one other
//! rank owns, on another machine if there is one. After a loss the state is restored from the remaining ranks, so that
//! only the current step is recomputed.
//!
//! ```text
//! keep      after a step: copies what this rank owns, and sends it to its partner           rank to rank, one message
//! choice    which pieces of which steps each rank has copies of                             all-gather, small
//! restore   each piece is sent to its new owner, then all weights to all ranks              rank to rank
//! ```
//!
//! The copies of the previous step are kept until the next ones are complete, since a rank may be lost during the
//! exchange. Pieces depend only on the parameters, so the copies are valid for any number of ranks.
//!
//! Invariant: when a rank completes step N + 1, every rank has complete copies of step N.

use std::collections::VecDeque;

use contract::{Digest, Result};
use kernels::device::PendingCopies;
use kernels::group::Group;
use kernels::tree;
use tch::{Device, Kind, Tensor};

use crate::checkpoint::StateLayout;
use crate::mesh::copies::{Partners, STEPS, length};
use crate::mesh::words::{WordReader, WordWriter};
use crate::mesh::{ProcessMesh, share};
use crate::model::WeightShards;
use crate::optim::balance::RouterBalance;
use crate::optim::guard::Windows;
use crate::refusal::{lost, refused};
use crate::state::ownership::{Ownership, ParamShard};
use crate::state::{self, OwnedState, State};
use crate::workers::Workers;

/// The copies held by a rank.
pub(super) struct Replicas {
    asked: bool,
    kept: VecDeque<ReplicaState>,
}

/// The copy of a state.
struct ReplicaState {
    step: u64,
    balance: Vec<RouterBalance>,
    windows: Option<Windows>,
    /// By index in canonical order, ascending; each with its values as packed by [`pack`].
    pieces: Vec<(usize, Tensor)>,
}

impl Replicas {
    /// Without copies; [`Replicas::keep`] makes them only if `asked`.
    pub(super) fn new(asked: bool) -> Self {
        Replicas { asked, kept: VecDeque::new() }
    }

    /// Keeps copies of what this rank owns of `state`, and of what its partner owns.
    pub(super) fn keep(&mut self, team: &ProcessMesh<'_>, state: &State) -> Result<()> {
        let (group, owners) = (team.group, &state.owners);
        if !self.asked || group.world() == 1 {
            return Ok(());
        }
        let (to, from) = Partners::new(group.nodes()).of(group.rank());
        let own_pieces = pack(state)?;
        let mut exchange = group.begin("the replication of the state").map_err(lost)?;
        let length = owners.of(from).map(length).sum();
        let received = exchange.receive(0, from, Kind::Float, length).map_err(lost)?;
        exchange.send(0, to, &own_pieces).map_err(lost)?;
        exchange.close(0).map_err(lost)?;
        let received = received.wait().map_err(lost)?;
        exchange.finish().map_err(lost)?;
        // A replica is trusted after a rank is lost, so make sure that it has arrived completely.
        group.settled().map_err(lost)?;
        let mut pieces = cut(owners, group.rank(), &own_pieces);
        pieces.extend(cut(owners, from, &received));
        pieces.sort_by_key(|(index, _)| *index);
        let State { step, balance, windows, .. } = state;
        // Later steps were never recorded.
        self.kept.retain(|kept| kept.step <= *step);
        let (balance, windows) = (balance.clone(), windows.clone());
        self.kept.push_back(ReplicaState { step: *step, balance, windows, pieces });
        while self.kept.len() > STEPS {
            self.kept.pop_front();
        }
        Ok(())
    }

    /// The newest state up to step `last` for which these ranks have copies of every piece, with its digest. Only rank
    /// 0 needs to know `last`. `None` if every step misses a piece.
    pub(super) fn restore(
        &self,
        team: &ProcessMesh<'_>,
        layout: &StateLayout,
        owners: &Ownership,
        last: u64,
        workers: Workers,
    ) -> Result<Option<(State, Digest)>> {
        if !self.asked {
            return Ok(None);
        }
        let group = team.group;
        let Some((step, holders)) = self.choose(group, owners.pieces().len(), last)? else {
            return Ok(None);
        };
        let found = self.hand_over(group, owners, step, &holders)?;
        let Some(kept) = self.kept.iter().rev().find(|kept| kept.step == step) else {
            return Ok(None);
        };
        let weights = state::room(&layout.parameters, layout.dtype_after(step), layout.device);
        let weights = weights.map_err(refused)?;
        let (balance, windows) = (kept.balance.clone(), kept.windows.clone());
        let put =
            |(piece, packed): (&ParamShard, &Tensor)| unpack(piece, packed, &weights[piece.tensor]);
        let owned = owners.own().zip(&found).map(put).collect::<kernels::Result<_>>();
        let owned = owned.map_err(refused)?;
        let owners = owners.clone();
        let (fold, departures) = (WeightShards::default(), PendingCopies::default());
        let state = State { step, weights, fold, balance, windows, owners, owned, departures };
        state.round(workers)?;
        share::weights(team, &state)?;
        let mut message = WordWriter::default();
        message.sums(&state.own_sums(workers)?);
        let gathered = team.all_gather("the checksums of the state", &message)?;
        let digest = state.sums_of(&share::sums(&state.owners, gathered.readers())?).digest;
        Ok(Some((state, digest)))
    }

    /// The step to continue from, and the sender of each piece: the same on every rank.
    fn choose(&self, group: &Group, pieces: usize, last: u64) -> Result<Option<(u64, Vec<u32>)>> {
        let mut message = WordWriter::default();
        message.word(last).word(self.kept.len() as u64);
        for kept in &self.kept {
            message.word(kept.step).word(kept.pieces.len() as u64);
            kept.pieces.iter().for_each(|(index, _)| {
                message.word(*index as u64);
            });
        }
        let gathered = group.all_gather("the choice of a state", message.bytes()).map_err(lost)?;
        let mut held = Vec::new();
        for gathered in &gathered {
            held.push(read(&mut WordReader::new(gathered))?);
        }
        Ok(chosen(&held, pieces))
    }

    /// Sends pieces to their new owners, and receives those of this rank: the values of each, in order.
    fn hand_over(
        &self,
        group: &Group,
        owners: &Ownership,
        step: u64,
        holders: &[u32],
    ) -> Result<Vec<Tensor>> {
        let me = group.rank();
        let has = |index: usize| {
            let of_step = self.kept.iter().filter(|kept| kept.step == step);
            let mut pieces = of_step.flat_map(|kept| &kept.pieces);
            pieces.find(|(found, _)| *found == index).map(|(_, packed)| packed.shallow_clone())
        };
        let all = || owners.pieces().iter().zip(holders).enumerate();
        if group.world() == 1 {
            return Ok(all().filter_map(|(index, _)| has(index)).collect());
        }
        let mut exchange = group.begin("the handing over of the state").map_err(lost)?;
        let mut arrivals = Vec::new();
        for (_, (piece, holder)) in all().filter(|(_, (piece, _))| piece.owner == me) {
            let arrival = (*holder != me)
                .then(|| exchange.receive(0, *holder, Kind::Float, length(piece)))
                .transpose();
            arrivals.push(arrival.map_err(lost)?);
        }
        for (index, (piece, holder)) in all() {
            if *holder == me && piece.owner != me {
                let packed = has(index).unwrap_or_else(empty);
                let packed = packed.f_to_device(group.device()).map_err(refused)?;
                exchange.send(0, piece.owner, &packed).map_err(lost)?;
            }
        }
        exchange.close(0).map_err(lost)?;
        let own = all().filter(|(_, (piece, _))| piece.owner == me).zip(arrivals);
        let mut found = Vec::new();
        for ((index, _), arrival) in own {
            found.push(match arrival {
                Some(arrival) => arrival.wait().map_err(lost)?,
                None => has(index).unwrap_or_else(empty),
            });
        }
        exchange.finish().map_err(lost)?;
        Ok(found)
    }
}

/// What a rank has: the last step that it knows to be recorded, and the steps that it has copies of, with their pieces.
type ReplicaInventory = (u64, Vec<(u64, Vec<usize>)>);

fn read(words: &mut WordReader<'_>) -> Result<ReplicaInventory> {
    let last = words.word()?;
    let kept = (0..words.word()?).map(|_| {
        let step = words.word()?;
        let pieces = (0..words.word()?).map(|_| Ok(words.word()? as usize));
        Ok((step, pieces.collect::<Result<_>>()?))
    });
    Ok((last, kept.collect::<Result<_>>()?))
}

/// The newest step of which all ranks have copies and together have every piece, up to the last one that rank 0 knows
/// to be recorded; and the first rank that has each piece.
fn chosen(held: &[ReplicaInventory], pieces: usize) -> Option<(u64, Vec<u32>)> {
    let (last, first) = held.first()?;
    let mut steps: Vec<u64> = first.iter().map(|(step, _)| *step).collect();
    steps.sort_unstable_by(|one, other| other.cmp(one));
    steps.into_iter().filter(|step| step <= last).find_map(|step| {
        let mut holders = vec![None; pieces];
        for (rank, (_, kept)) in (0..).zip(held) {
            // Every rank needs its own copy of balance and windows.
            kept.iter().find(|(of, _)| *of == step)?;
            let of_step = kept.iter().filter(|(of, _)| *of == step);
            for index in of_step.flat_map(|(_, pieces)| pieces) {
                holders.get_mut(*index)?.get_or_insert(rank);
            }
        }
        let holders = holders.into_iter().collect::<Option<Vec<u32>>>()?;
        Some((step, holders))
    })
}

/// Packs this rank's pieces: f32 weights, first moments, second moments, piece after piece.
fn pack(state: &State) -> Result<Tensor> {
    let mut parts = Vec::new();
    for (_, weight, owned) in state.own() {
        parts.extend([weight.reshape([-1]), owned.first.reshape([-1])]);
        parts.extend(owned.second.as_ref().map(|second| second.reshape([-1])));
    }
    let device = parts.first().map_or(Device::Cpu, Tensor::device);
    tree::joined(&parts, Kind::Float, device).map_err(refused)
}

/// The pieces of `rank` by index, as views of its packed values.
fn cut(owners: &Ownership, rank: u32, packed: &Tensor) -> Vec<(usize, Tensor)> {
    let mut at = 0;
    let own = owners.pieces().iter().enumerate().filter(|(_, piece)| piece.owner == rank);
    let one = |(index, piece): (usize, &ParamShard)| {
        at += length(piece);
        (index, packed.narrow(0, at - length(piece), length(piece)))
    };
    own.map(one).collect()
}

/// Unpacks a piece; `weight` is the tensor that the model reads.
fn unpack(piece: &ParamShard, packed: &Tensor, weight: &Tensor) -> kernels::Result<OwnedState> {
    let part = |number: i64| {
        let flat = packed.f_narrow(0, number * piece.length(), piece.length())?;
        flat.f_view(piece.shape.as_slice())
    };
    let room = || Ok(Tensor::f_empty(piece.shape.as_slice(), (Kind::Float, weight.device()))?);
    let mut owned = OwnedState::of(piece, weight, room)?;
    let mut wide = owned.master.as_ref().map_or_else(|| piece.of(weight), Tensor::shallow_clone);
    tch::no_grad(|| {
        wide.f_copy_(&part(0)?)?;
        owned.first.f_copy_(&part(1)?)?;
        owned.second.iter_mut().try_for_each(|second| second.f_copy_(&part(2)?))
    })?;
    Ok(owned)
}

fn empty() -> Tensor {
    Tensor::empty([0], (Kind::Float, Device::Cpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// For any lost ranks, a state is chosen exactly if the others have every piece, and each piece from a rank
        /// that has it.
        #[test]
        fn what_is_chosen_is_whole(
            world in 2usize..6,
            owners in prop::collection::vec(0usize..6, 1..12),
            lost in prop::collection::btree_set(0usize..6, 1..4),
            ahead in prop::collection::vec(any::<bool>(), 6),
            last in 4u64..8,
        ) {
            let pieces = owners.len();
            let holds = |rank: usize| -> Vec<usize> {
                let from = (rank + world - 1) % world;
                (0..pieces).filter(|index| [rank, from].contains(&(owners[*index] % world))).collect()
            };
            // Some ranks are one step ahead.
            let kept = |rank: usize| {
                let newest = if ahead[rank] { 6 } else { 5 };
                vec![(newest - 1, holds(rank)), (newest, holds(rank))]
            };
            let left: Vec<usize> = (0..world).filter(|rank| !lost.contains(rank)).collect();
            let held: Vec<ReplicaInventory> = left.iter().map(|rank| (last, kept(*rank))).collect();
            let whole = (0..pieces).all(|index| left.iter().any(|rank| holds(*rank).contains(&index)));
            match chosen(&held, pieces) {
                None => prop_assert!(left.is_empty() || !whole || last < 5),
                Some((step, holders)) => {
                    prop_assert!(whole && step <= last);
                    for (index, holder) in holders.iter().enumerate() {
                        prop_assert!(holds(left[*holder as usize]).contains(&index));
                    }
                    let everywhere = |step: u64| left.iter().all(|rank| kept(*rank).iter().any(|(of, _)| *of == step));
                    prop_assert!(everywhere(step) && !(everywhere(step + 1) && step < last));
                }
            }
        }
    }
}
