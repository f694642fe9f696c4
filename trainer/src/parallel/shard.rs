//! What one rank holds of the state: every weight, and the moments of the pieces that it owns.

use contract::Result;
use kernels::checksum;
use kernels::group::{Exchange, Group};
use tch::{Device, Kind, Tensor};

use super::lost;
use super::owners::Piece;
use super::words::{Reader, Writer};
use crate::lanes::Lanes;
use crate::optim::balance::Balance;
use crate::optim::{self, At, Settings};
use crate::state::{Part, State, salt};

/// A rank's part of the state after a step.
pub struct Shard {
    /// The step; 0 before the first.
    pub step: u64,
    /// All weights, the same on every rank.
    pub weights: Vec<Tensor>,
    /// The routers' balancing biases, the same on every rank.
    pub balance: Vec<Balance>,
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

/// What is said about a piece after a step: checksums of its part of each set of tensors.
pub(super) struct PieceSums {
    pub(super) weight: u64,
    pub(super) first: u64,
    pub(super) second: u64,
}

impl Shard {
    /// Keeps what is `rank`'s of a whole state.
    pub fn cut(state: State, pieces: Vec<Piece>, rank: u32) -> Self {
        let State { step, weights, first, second, balance } = state;
        let keep = |piece: &Piece| Moments {
            first: piece.of(&first[piece.tensor]).copy(),
            second: second[piece.tensor].as_ref().map(|second| piece.of(second).copy()),
        };
        let moments = pieces.iter().filter(|piece| piece.owner == rank).map(keep).collect();
        Shard { step, weights, balance, pieces, rank, moments }
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

    /// Checksums of this rank's pieces, in their order.
    pub(super) fn sums(&self, lanes: Lanes) -> Result<Vec<PieceSums>> {
        let own = self.pieces.iter().filter(|piece| piece.owner == self.rank).zip(&self.moments);
        let items = own.map(|(piece, Moments { first, second })| {
            let weight = piece.of(&self.weights[piece.tensor]);
            let second = second.as_ref().map(Tensor::shallow_clone);
            (piece.clone(), weight, first.shallow_clone(), second)
        });
        lanes.map(items.collect(), |(piece, weight, first, second)| {
            let (at, index) = (piece.first as u64, piece.tensor);
            let sum = |tensor: &Tensor, part| checksum::slice(tensor, at, salt(part, index));
            Ok(PieceSums {
                weight: sum(&weight, Part::Weight),
                first: sum(&first, Part::First),
                second: second.map_or(0, |second| sum(&second, Part::Second)),
            })
        })
    }

    /// Brings the moments of whole tensors to where they are wanted: `writer` says which rank wants tensor `t` of the
    /// first moments (set 0) or the second (set 1). In what is returned, only what this rank wants is filled; the
    /// weights are aliases.
    pub fn gather(&self, group: &Group, writer: impl Fn(usize, usize) -> u32) -> Result<State> {
        let mut exchange = group.begin("the gathering of moments").map_err(lost)?;
        let mut state = self.without_moments();
        let mut arrivals = Vec::new();
        let mut own = self.moments.iter();
        for piece in &self.pieces {
            let moments = if piece.owner == self.rank { own.next() } else { None };
            for set in 0..1 + usize::from(piece.rule.has_second_moment()) {
                let to = writer(set, piece.tensor);
                let mine = moments.and_then(|moments| moments.set(set));
                match mine {
                    Some(mine) if to != self.rank => {
                        exchange.send(to, &packed(&[mine.reshape([-1])])).map_err(lost)?;
                    }
                    Some(mine) => fill(&mut state, set, piece, mine),
                    None if to == self.rank => {
                        let arrival = exchange.receive(piece.owner, Kind::Float, piece.length());
                        arrivals.push((set, piece, arrival.map_err(lost)?));
                    }
                    None => (),
                }
            }
        }
        for (set, piece, arrival) in arrivals {
            let arrived = arrival.wait().map_err(lost)?.view(piece.shape.as_slice());
            fill(&mut state, set, piece, &arrived);
        }
        exchange.finish().map_err(lost)?;
        Ok(state)
    }

    /// A whole state with this one's weights and room for the moments, which costs nothing before it is filled.
    pub fn without_moments(&self) -> State {
        let mut second: Vec<Option<Tensor>> = self.weights.iter().map(|_| None).collect();
        for piece in self.pieces.iter().filter(|piece| piece.rule.has_second_moment()) {
            second[piece.tensor].get_or_insert_with(|| self.weights[piece.tensor].empty_like());
        }
        State {
            step: self.step,
            weights: self.weights.iter().map(Tensor::shallow_clone).collect(),
            first: self.weights.iter().map(Tensor::empty_like).collect(),
            second,
            balance: self.balance.clone(),
        }
    }
}

impl Moments {
    fn set(&self, set: usize) -> Option<&Tensor> {
        if set == 0 { Some(&self.first) } else { self.second.as_ref() }
    }
}

/// Puts one piece of the moments into a whole state.
fn fill(state: &mut State, set: usize, piece: &Piece, from: &Tensor) {
    let whole = if set == 0 {
        Some(&state.first[piece.tensor])
    } else {
        state.second[piece.tensor].as_ref()
    };
    if let Some(whole) = whole {
        tch::no_grad(|| piece.of(whole).copy_(from));
    }
}

/// Hands rank 0's whole state to every rank: weights and balance to all, moments to their owners.
///
/// The others bring the state before the first step: where rank 0 begins there too, nothing is sent.
pub fn deal(group: &Group, mut state: State, pieces: Vec<Piece>) -> Result<Shard> {
    let what = "the dealing of the state";
    let mut head = Writer::default();
    head.word(state.step);
    balance_words(&mut state.balance, |value| {
        head.word(u64::from(value.to_bits()));
        Ok(())
    })?;
    let heads = group.all_gather(what, head.bytes()).map_err(lost)?;
    let mut head = Reader::new(&heads[0]);
    state.step = head.word()?;
    balance_words(&mut state.balance, |value| {
        *value = f32::from_bits(head.word()? as u32);
        Ok(())
    })?;
    head.end()?;
    if state.step == 0 {
        return Ok(Shard::cut(state, pieces, group.rank()));
    }
    let mut exchange = group.begin(what).map_err(lost)?;
    if group.rank() == 0 {
        for other in group.others() {
            send_to(&mut exchange, other, &state, &pieces)?;
        }
        exchange.finish().map_err(lost)?;
        return Ok(Shard::cut(state, pieces, 0));
    }
    let whole = |exchange: &Exchange<'_>, like: &Tensor| {
        let arrival = exchange.receive(0, Kind::Float, like.numel() as i64).map_err(lost)?;
        Ok(arrival.wait().map_err(lost)?.view(like.size().as_slice()).to_device(like.device()))
    };
    let weights: Vec<Tensor> =
        state.weights.iter().map(|like| whole(&exchange, like)).collect::<Result<_>>()?;
    state.weights = weights;
    let mut shard = Shard::cut(state, pieces, group.rank());
    for Moments { first, second } in &mut shard.moments {
        *first = whole(&exchange, first)?;
        if let Some(second) = second {
            *second = whole(&exchange, second)?;
        }
    }
    exchange.finish().map_err(lost)?;
    Ok(shard)
}

/// Sends one rank its part of a whole state, in the order in which [`deal`] takes it.
fn send_to(exchange: &mut Exchange<'_>, to: u32, state: &State, pieces: &[Piece]) -> Result<()> {
    for weight in &state.weights {
        exchange.send(to, &packed(&[weight.reshape([-1])])).map_err(lost)?;
    }
    for piece in pieces.iter().filter(|piece| piece.owner == to) {
        let flat = |whole: &Tensor| packed(&[piece.of(whole).reshape([-1])]);
        exchange.send(to, &flat(&state.first[piece.tensor])).map_err(lost)?;
        if let Some(second) = &state.second[piece.tensor] {
            exchange.send(to, &flat(second)).map_err(lost)?;
        }
    }
    Ok(())
}

/// Visits every number of the balance in a fixed order.
fn balance_words(
    balance: &mut [Balance],
    mut visit: impl FnMut(&mut f32) -> Result<()>,
) -> Result<()> {
    for Balance { bias, first, second } in balance {
        bias.iter_mut().chain(first).chain(second).try_for_each(&mut visit)?;
    }
    Ok(())
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
