//! What one rank holds of the state: every weight, and the moments of the pieces that it owns.

use contract::Result;
use kernels::checksum;
use tch::{Device, Kind, Tensor};

use crate::checkpoint::region::Region;
use crate::checkpoint::{Layout, Owned, Reader, Set, Snapshot, Want};
use crate::mesh::Team;
use crate::mesh::words::{self, Writer};
use crate::optim::balance::Balance;
use crate::optim::guard::Windows;
use crate::optim::{self, At, Settings};
use crate::refusal::lost;
use crate::spec::RunSpec;
#[cfg(test)]
use crate::state::State;
use crate::state::ownership::{self, Piece, pack};
use crate::state::{self, Part, StateSums, salt};
use crate::step;
use crate::timing;
use crate::workers::Workers;

/// A rank's part of the state after a step.
pub struct Shard {
    /// The step; 0 before the first.
    pub step: u64,
    /// All weights, the same on every rank.
    pub weights: Vec<Tensor>,
    /// The routers' balancing biases, the same on every rank.
    pub balance: Vec<Balance>,
    /// What decides on skipping and clipping, the same on every rank.
    pub windows: Option<Windows>,
    /// All pieces, in canonical order.
    pieces: Vec<Piece>,
    rank: u32,
    /// Moments of the pieces of this rank, in the order of `pieces`.
    moments: Vec<Moments>,
}

/// The moments of one piece, in its shape.
struct Moments {
    first: Tensor,
    second: Option<Tensor>,
}

impl Shard {
    /// What is `rank`'s before the first step.
    pub fn begin(spec: &RunSpec, device: Device, pieces: Vec<Piece>, rank: u32) -> Result<Self> {
        let (weights, balance) = step::beginning(spec, device)?;
        let zeros = |piece: &Piece| Tensor::zeros(&piece.shape, (Kind::Float, device));
        let begin = |piece: &Piece| Moments {
            first: zeros(piece),
            second: piece.rule.has_second_moment().then(|| zeros(piece)),
        };
        let moments = pieces.iter().filter(|piece| piece.owner == rank).map(begin).collect();
        let windows = spec.settings.guard.windows();
        Ok(Shard { step: 0, weights, balance, windows, pieces, rank, moments })
    }

    /// Keeps what is `rank`'s of a whole state.
    #[cfg(test)]
    pub(super) fn cut(state: State, pieces: Vec<Piece>, rank: u32) -> Self {
        let State { step, weights, first, second, balance, windows } = state;
        let keep = |piece: &Piece| Moments {
            first: piece.of(&first[piece.tensor]).copy(),
            second: second[piece.tensor].as_ref().map(|second| piece.of(second).copy()),
        };
        let moments = pieces.iter().filter(|piece| piece.owner == rank).map(keep).collect();
        Shard { step, weights, balance, windows, pieces, rank, moments }
    }

    /// All pieces, in canonical order.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The pieces of `rank`.
    pub fn of(&self, rank: u32) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(move |piece| piece.owner == rank)
    }

    /// The elements of the pieces of `rank`.
    pub fn length(&self, rank: u32) -> i64 {
        ownership::length(&self.pieces, rank)
    }

    /// Cuts what `pack` made for `rank` into its pieces again.
    pub fn unpack(&self, rank: u32, packed: &Tensor) -> Vec<Tensor> {
        let mut at = 0;
        let cut = |piece: &Piece| {
            at += piece.length();
            packed.narrow(0, at - piece.length(), piece.length()).view(piece.shape.as_slice())
        };
        self.of(rank).map(cut).collect()
    }

    /// Moves this rank's pieces by their gradients, which come in the order of its pieces.
    pub fn update(
        &mut self,
        settings: &Settings,
        gradients: &[Tensor],
        at: At,
        workers: Workers,
    ) -> Result<()> {
        let mut items = Vec::new();
        let own = self.pieces.iter().filter(|piece| piece.owner == self.rank);
        for ((piece, Moments { first, second }), gradient) in own.zip(&self.moments).zip(gradients)
        {
            let weight = piece.of(&self.weights[piece.tensor]);
            optim::split(piece.rule, &weight, (first, second.as_ref()), gradient, &mut items);
        }
        optim::run(settings, items, at, workers)
    }

    /// Sends this rank's new weights to every other and takes theirs. Each crosses to another machine once: the gate there
    /// passes it on, in a second round.
    pub(super) fn share_weights(&mut self, team: &Team<'_>) -> Result<()> {
        let _watch = timing::part(timing::Part::Share);
        let (group, nodes, me) = (team.group, &team.nodes, self.rank);
        let here = |rank: &u32| nodes.of(*rank) == nodes.here();
        let mine = pack(&self.pieces, &[me], &self.weights);
        let mut exchange = group.begin("the sharing of new weights").map_err(lost)?;
        // Asked for in the order in which each rank sends: first its own, then what it passes on.
        let (direct, passed): (Vec<u32>, Vec<u32>) = (0..group.world())
            .filter(|owner| *owner != me)
            .partition(|owner| nodes.teller(me, *owner) == *owner);
        let mut arrivals = Vec::new();
        for owner in direct.iter().chain(&passed).copied() {
            let from = nodes.teller(me, owner);
            let (round, length) = (u64::from(from != owner), self.length(owner));
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
            self.take(owner, &packed);
        }
        exchange.close(1).map_err(lost)?;
        for (owner, arrival) in told {
            self.take(owner, &arrival.wait().map_err(lost)?);
        }
        exchange.finish().map_err(lost)
    }

    /// Takes over the new weights of `owner`.
    fn take(&mut self, owner: u32, packed: &Tensor) {
        let parts = self.unpack(owner, packed);
        tch::no_grad(|| {
            for (piece, part) in self.of(owner).zip(parts) {
                piece.of(&self.weights[piece.tensor]).copy_(&part);
            }
        });
    }

    /// Writes down checksums of this rank's pieces, in their order: weight, first and second moment.
    pub(super) fn say_sums(&self, words: &mut Writer, workers: Workers) -> Result<()> {
        let own = self.pieces.iter().filter(|piece| piece.owner == self.rank).zip(&self.moments);
        let items = own.map(|(piece, Moments { first, second })| {
            let weight = piece.of(&self.weights[piece.tensor]);
            let second = second.as_ref().map(Tensor::shallow_clone);
            (piece.clone(), weight, first.shallow_clone(), second)
        });
        let sums = workers.map(items.collect(), |(piece, weight, first, second)| {
            let (at, index) = (piece.first as u64, piece.tensor);
            let _watch = timing::part(timing::Part::StateSums);
            let sum = |tensor: &Tensor, part| checksum::slice(tensor, at, salt(part, index));
            let second = second.map_or(0, |second| sum(&second, Part::Second));
            Ok([sum(&weight, Part::Weight), sum(&first, Part::First), second])
        })?;
        sums.iter().flatten().for_each(|sum| {
            words.word(*sum);
        });
        Ok(())
    }

    /// The checksums of the whole state, from what every rank said of its pieces.
    pub(super) fn hear_sums(&self, heard: &mut [words::Reader<'_>]) -> Result<StateSums> {
        let count = self.weights.len();
        let (mut weights, mut first, mut second) =
            (vec![0u64; count], vec![0u64; count], vec![0u64; count]);
        let mut has_second = vec![false; count];
        for piece in &self.pieces {
            let (heard, index) = (&mut heard[piece.owner as usize], piece.tensor);
            for sums in [&mut weights, &mut first, &mut second] {
                sums[index] = sums[index].wrapping_add(heard.word()?);
            }
            has_second[index] = piece.rule.has_second_moment();
        }
        let with_second =
            second.iter().zip(&has_second).filter(|(_, has)| **has).map(|(sum, _)| *sum);
        let all: Vec<u64> = weights.iter().chain(&first).copied().chain(with_second).collect();
        let digest =
            state::digest(self.step, &has_second, &all, (&self.balance, self.windows.as_ref()));
        Ok(StateSums { weights, digest })
    }

    /// A copy of what this rank owns; rank 0 owns the balance.
    pub fn snapshot(&self) -> Snapshot {
        let own = self.pieces.iter().filter(|piece| piece.owner == self.rank).zip(&self.moments);
        let owned = own.map(|(piece, Moments { first, second }): (&Piece, _)| -> Owned<'_> {
            (piece, piece.of(&self.weights[piece.tensor]), first, second.as_ref())
        });
        let balance = (self.rank == 0).then_some(self.balance.as_slice());
        Snapshot::new(self.step, owned, balance, self.windows.as_ref())
    }

    /// Reads what is `rank`'s out of a checkpoint: all weights, and the moments of its pieces. The state as a whole is
    /// checked when all ranks have read theirs.
    pub fn read(
        reader: &Reader<'_>,
        layout: &Layout,
        pieces: Vec<Piece>,
        rank: u32,
        workers: Workers,
    ) -> Result<Self> {
        reader.compare(layout)?;
        let empty = |shape: &[i64]| Tensor::empty(shape, (Kind::Float, layout.device));
        let (mut weights, mut moments, mut wants) = (Vec::new(), Vec::new(), Vec::new());
        for parameter in &layout.parameters {
            let weight = empty(&parameter.shape);
            let (into, region) = (weight.shallow_clone(), Region::whole(&parameter.shape));
            wants.push(Want { set: Set::Weights, name: parameter.name.clone(), region, into });
            weights.push(weight);
        }
        for piece in pieces.iter().filter(|piece| piece.owner == rank) {
            let parameter = &layout.parameters[piece.tensor];
            let mut want = |set: Set| {
                let tensor = empty(&piece.shape);
                let (flat, mut at) = (tensor.view([-1]), 0);
                for region in Region::run(&parameter.shape, piece.first, piece.length()) {
                    let into = flat.narrow(0, at, region.volume());
                    let into = into.view(region.lengths.as_slice());
                    at += region.volume();
                    wants.push(Want { set, name: parameter.name.clone(), region, into });
                }
                tensor
            };
            let first = want(Set::First);
            let second = piece.rule.has_second_moment().then(|| want(Set::Second));
            moments.push(Moments { first, second });
        }
        reader.fill(wants, workers)?;
        let balance = reader.balance(layout, workers)?;
        let (step, windows) = (reader.manifest().step, reader.manifest().windows.clone());
        Ok(Shard { step, weights, balance, windows, pieces, rank, moments })
    }
}
