//! Ownership: every piece of the parameters has one rank that adds its gradients, keeps its moments and updates it.
//!
//! A piece can be updated alone: it is a whole matrix under Muon, some matrices of stacked experts, or whole chunks of
//! any other tensor. Each starts at a chunk of the gradient norm, so that its owner has whole chunks.
//!
//! Small neighbouring pieces form a bundle, which has one owner and is one blob of a checkpoint: so each rank writes
//! what it owns, and the files do not depend on the number of ranks. No bundle of several pieces costs more, or has
//! more elements, than the largest piece, so ranks are loaded as evenly as with single pieces.
//!
//! Invariant: pieces and bundles depend only on the parameters; only their owners depend on the number of ranks.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use tch::Tensor;

use crate::model::ParamSpec;
use crate::optim::norm::CHUNK;
use crate::optim::{CHUNKS, OptimizerRule};
use crate::spec::RunSpec;

/// Cost of each element of an elementwise update, in floating-point operations.
const ELEMENTWISE: u128 = 20;

/// A contiguous part of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamShard {
    /// The tensor's index in canonical order.
    pub tensor: usize,
    /// Its first element in the tensor.
    pub first: i64,
    /// Its shape: the matrix, the matrices, or a flat run of elements.
    pub shape: Vec<i64>,
    /// How it is updated.
    pub rule: OptimizerRule,
    /// The bundle that it belongs to, numbered from 0 in canonical order.
    pub bundle: usize,
    /// The rank that owns it.
    pub owner: u32,
}

impl ParamShard {
    /// Its elements.
    pub fn length(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Bytes of its weights and moments, f32, in a checkpoint.
    pub fn kept(&self) -> u64 {
        4 * (2 + u64::from(self.rule.has_second_moment())) * self.length().cast_unsigned()
    }

    /// The number of its chunks in the gradient norm.
    pub fn chunks(&self) -> usize {
        self.length().cast_unsigned().div_ceil(CHUNK.cast_unsigned()) as usize
    }

    /// This piece of `whole`, its tensor or one of the same shape, as an alias if that is contiguous.
    pub fn of(&self, whole: &Tensor) -> Tensor {
        if whole.size() == self.shape && whole.is_contiguous() {
            return whole.shallow_clone();
        }
        let part = whole.reshape([-1]).narrow(0, self.first, self.length());
        if self.shape.len() == 1 { part } else { part.view(self.shape.as_slice()) }
    }

    /// A cost proportional to the time of an update: Newton-Schulz is cubic in the short side of a matrix.
    fn cost(&self) -> u128 {
        let elements = self.length() as u128;
        match (self.rule, self.shape.as_slice()) {
            (OptimizerRule::Muon | OptimizerRule::MuonEach, [.., rows, columns]) => {
                elements * (ELEMENTWISE + 30 * (*rows).min(*columns) as u128)
            }
            _ => elements * ELEMENTWISE,
        }
    }
}

/// The pieces of all parameters in canonical order, in bundles that are assigned to `world` ranks: the costliest first,
/// always to the rank with the least load.
pub fn pieces(parameters: &[ParamSpec], rules: &[OptimizerRule], world: u32) -> Vec<ParamShard> {
    let mut pieces = Vec::new();
    for (tensor, (parameter, rule)) in parameters.iter().zip(rules).enumerate() {
        cut(tensor, &parameter.shape, *rule, &mut pieces);
    }
    let costs = bundle(&mut pieces);
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|index| (Reverse(costs[*index]), *index));
    // Of ranks with equal load the first.
    let mut loads: BinaryHeap<_> = (0..world.max(1)).map(|rank| Reverse((0u128, rank))).collect();
    let mut owners = vec![0; costs.len()];
    for index in order {
        if let Some(mut least) = loads.peek_mut() {
            let Reverse((load, owner)) = &mut *least;
            *load += costs[index];
            owners[index] = *owner;
        }
    }
    pieces.iter_mut().for_each(|piece| piece.owner = owners[piece.bundle]);
    pieces
}

/// The number of elements in the pieces of `owner`.
pub fn length(pieces: &[ParamShard], owner: u32) -> i64 {
    pieces.iter().filter(|piece| piece.owner == owner).map(ParamShard::length).sum()
}

/// All pieces, and which of them are this rank's.
#[derive(Clone, Debug)]
pub struct Ownership {
    pieces: Arc<[ParamShard]>,
    rank: u32,
}

impl Ownership {
    /// For the parameters of a run, as seen by `rank` of `world`.
    pub fn new(spec: &RunSpec, rank: u32, world: u32) -> Self {
        Ownership::cut(pieces(&spec.parameters, &spec.rules, world), rank)
    }

    /// From these pieces.
    pub fn cut(pieces: Vec<ParamShard>, rank: u32) -> Self {
        Ownership { pieces: pieces.into(), rank }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// All pieces, in canonical order.
    pub fn pieces(&self) -> &[ParamShard] {
        &self.pieces
    }

    /// This rank's pieces.
    pub fn own(&self) -> impl Iterator<Item = &ParamShard> {
        self.of(self.rank)
    }

    /// The pieces of `rank`.
    pub fn of(&self, rank: u32) -> impl Iterator<Item = &ParamShard> {
        self.pieces.iter().filter(move |piece| piece.owner == rank)
    }

    /// The number of elements in the pieces of `rank`.
    pub fn length(&self, rank: u32) -> i64 {
        length(&self.pieces, rank)
    }

    /// Splits a tensor that has the pieces of `rank` one after the other.
    pub fn unpack(&self, rank: u32, packed: &Tensor) -> Vec<Tensor> {
        let mut at = 0;
        let cut = |piece: &ParamShard| {
            at += piece.length();
            packed.narrow(0, at - piece.length(), piece.length()).view(piece.shape.as_slice())
        };
        self.of(rank).map(cut).collect()
    }
}

/// Assigns pieces to bundles, and returns the cost of each bundle.
fn bundle(pieces: &mut [ParamShard]) -> Vec<u128> {
    let most_cost = pieces.iter().map(ParamShard::cost).max().unwrap_or(0);
    let most_elements =
        pieces.iter().map(ParamShard::length).max().unwrap_or(0).max(CHUNK * CHUNKS);
    let (mut costs, mut elements) = (Vec::new(), 0);
    for piece in pieces {
        let (cost, length) = (piece.cost(), piece.length());
        match costs.last_mut() {
            Some(sum) if *sum + cost <= most_cost && elements + length <= most_elements => {
                *sum += cost;
                elements += length;
            }
            _ => {
                costs.push(cost);
                elements = length;
            }
        }
        piece.bundle = costs.len() - 1;
    }
    costs
}

fn cut(tensor: usize, shape: &[i64], rule: OptimizerRule, pieces: &mut Vec<ParamShard>) {
    let length: i64 = shape.iter().product();
    let mut push =
        |first, shape| pieces.push(ParamShard { tensor, first, shape, rule, bundle: 0, owner: 0 });
    match (rule, shape) {
        (OptimizerRule::MuonEach, [experts, rows, columns]) => {
            // The smallest number of experts that fills whole chunks.
            let matrix = rows * columns;
            let together = CHUNK / common_divisor(CHUNK, matrix);
            for first in (0..*experts).step_by(together as usize) {
                let count = together.min(experts - first);
                push(first * matrix, vec![count, *rows, *columns]);
            }
        }
        (OptimizerRule::AdamW { .. }, _) => {
            for first in (0..length).step_by((CHUNK * CHUNKS) as usize) {
                push(first, vec![(CHUNK * CHUNKS).min(length - first)]);
            }
        }
        _ => push(0, shape.to_vec()),
    }
}

fn common_divisor(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ZayaConfig, parameters};
    use crate::optim;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn nano() -> Vec<ParamSpec> {
        parameters(&ZayaConfig::resolve(Some("zaya1-nano"), &BTreeMap::new()).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn pieces_tile_every_tensor_on_chunk_bounds(world in 1u32..12, muon: bool) {
            let parameters = nano();
            let kind = if muon { optim::MatrixOptimizer::Muon } else { optim::MatrixOptimizer::AdamW };
            let rules: Vec<_> = parameters.iter().map(|parameter| OptimizerRule::of(kind, parameter)).collect();
            let pieces = pieces(&parameters, &rules, world);
            let (mut tensor, mut next) = (0, 0);
            for piece in &pieces {
                if piece.tensor != tensor {
                    prop_assert_eq!(next, parameters[tensor].shape.iter().product::<i64>());
                    (tensor, next) = (tensor + 1, 0);
                }
                prop_assert_eq!((piece.tensor, piece.first), (tensor, next));
                prop_assert_eq!(piece.first % CHUNK, 0);
                prop_assert!(piece.owner < world);
                prop_assert_eq!(piece.rule, rules[tensor]);
                next += piece.length();
            }
            prop_assert_eq!(tensor + 1, parameters.len());
        }

        #[test]
        fn a_bundle_has_one_owner_and_neighbours_only(world in 1u32..12, muon: bool) {
            let parameters = nano();
            let kind = if muon { optim::MatrixOptimizer::Muon } else { optim::MatrixOptimizer::AdamW };
            let rules: Vec<_> = parameters.iter().map(|parameter| OptimizerRule::of(kind, parameter)).collect();
            let found = pieces(&parameters, &rules, world);
            let alone = pieces(&parameters, &rules, 1);
            prop_assert_eq!(found[0].bundle, 0);
            for (piece, next) in found.iter().zip(&found[1..]) {
                prop_assert!(next.bundle == piece.bundle + 1 || next.bundle == piece.bundle);
                prop_assert!(next.bundle != piece.bundle || next.owner == piece.owner);
            }
            let bundles = |pieces: &[ParamShard]| pieces.iter().map(|piece| piece.bundle).collect::<Vec<_>>();
            prop_assert_eq!(bundles(&found), bundles(&alone));
            prop_assert!(found.last().unwrap().bundle + 1 < found.len(), "vectors go together");
        }

        #[test]
        fn no_rank_has_much_more_than_another(world in 1u32..12) {
            let parameters = nano();
            let rule = |parameter| OptimizerRule::of(optim::MatrixOptimizer::Muon, parameter);
            let rules: Vec<_> = parameters.iter().map(rule).collect();
            let pieces = pieces(&parameters, &rules, world);
            let load = |rank| {
                pieces.iter().filter(|piece| piece.owner == rank).map(ParamShard::cost).sum::<u128>()
            };
            let most = (0..world).map(load).max().unwrap();
            let (mean, largest) =
                ((0..world).map(load).sum::<u128>() / u128::from(world), pieces.iter().map(ParamShard::cost).max());
            prop_assert!(most <= mean + largest.unwrap());
        }
    }

    #[test]
    fn a_piece_is_an_alias() {
        let whole = Tensor::arange(24, tch::kind::FLOAT_CPU).reshape([2, 3, 4]);
        let piece = ParamShard {
            tensor: 0,
            first: 12,
            shape: vec![1, 3, 4],
            rule: OptimizerRule::MuonEach,
            bundle: 0,
            owner: 0,
        };
        let mut part = piece.of(&whole);
        let _ = part.fill_(7.0);
        assert_eq!(
            whole.sum(tch::Kind::Float).double_value(&[]),
            f64::from((0..12).sum::<i32>() + 84)
        );
    }
}
