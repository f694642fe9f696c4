//! What one rank holds of the state: every weight, and the moments of the pieces that it owns.

use contract::Result;
use kernels::checksum;
use kernels::group::Group;
use tch::{Device, Kind, Tensor};

use super::lost;
use super::owners::Piece;
use super::words::{self, Writer};
use crate::checkpoint::region::Region;
use crate::checkpoint::{Layout, Owned, Reader, Set, Snapshot, Want};
use crate::lanes::Lanes;
use crate::optim::balance::Balance;
use crate::optim::guard::Windows;
use crate::optim::{self, At, Settings};
use crate::state::{self, Part, State, StateSums, salt};

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
    /// Keeps what is `rank`'s of a whole state.
    pub fn cut(state: State, pieces: Vec<Piece>, rank: u32) -> Self {
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
        self.of(rank).map(Piece::length).sum()
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
        lanes: Lanes,
    ) -> Result<()> {
        let mut items = Vec::new();
        let own = self.pieces.iter().filter(|piece| piece.owner == self.rank);
        for ((piece, Moments { first, second }), gradient) in own.zip(&self.moments).zip(gradients)
        {
            let weight = piece.of(&self.weights[piece.tensor]);
            optim::split(piece.rule, &weight, (first, second.as_ref()), gradient, &mut items);
        }
        optim::run(settings, items, at, lanes)
    }

    /// Sends this rank's new weights to every other and takes theirs.
    pub fn share_weights(&mut self, group: &Group) -> Result<()> {
        let mine = pack(&self.pieces, self.rank, &self.weights);
        let mut exchange = group.begin("the sharing of new weights").map_err(lost)?;
        let mut arrivals = Vec::new();
        for other in group.others() {
            let arrival = exchange.receive(other, Kind::Float, self.length(other)).map_err(lost)?;
            arrivals.push((other, arrival));
        }
        for other in group.others() {
            exchange.send(other, &mine).map_err(lost)?;
        }
        for (other, arrival) in arrivals {
            let packed = arrival.wait().map_err(lost)?;
            let parts = self.unpack(other, &packed);
            tch::no_grad(|| {
                for (piece, part) in self.of(other).zip(parts) {
                    piece.of(&self.weights[piece.tensor]).copy_(&part);
                }
            });
        }
        exchange.finish().map_err(lost)
    }

    /// Writes down checksums of this rank's pieces, in their order: weight, first and second moment.
    pub(super) fn say_sums(&self, words: &mut Writer, lanes: Lanes) -> Result<()> {
        let own = self.pieces.iter().filter(|piece| piece.owner == self.rank).zip(&self.moments);
        let items = own.map(|(piece, Moments { first, second })| {
            let weight = piece.of(&self.weights[piece.tensor]);
            let second = second.as_ref().map(Tensor::shallow_clone);
            (piece.clone(), weight, first.shallow_clone(), second)
        });
        let sums = lanes.map(items.collect(), |(piece, weight, first, second)| {
            let (at, index) = (piece.first as u64, piece.tensor);
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
        lanes: Lanes,
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
        reader.fill(wants, lanes)?;
        let balance = reader.balance(layout, lanes)?;
        let (step, windows) = (reader.manifest().step, reader.manifest().windows.clone());
        Ok(Shard { step, weights, balance, windows, pieces, rank, moments })
    }
}

/// What is `rank`'s of whole tensors, one piece after the other in memory that can be sent.
pub(super) fn pack(pieces: &[Piece], rank: u32, whole: &[Tensor]) -> Tensor {
    let own = pieces.iter().filter(|piece| piece.owner == rank);
    packed(&own.map(|piece| piece.of(&whole[piece.tensor]).reshape([-1])).collect::<Vec<_>>())
}

/// One tensor in memory that can be sent.
fn packed(parts: &[Tensor]) -> Tensor {
    if parts.is_empty() {
        return Tensor::empty([0], tch::kind::FLOAT_CPU);
    }
    Tensor::cat(parts, 0).to_device(Device::Cpu)
}
