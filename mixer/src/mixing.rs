//! Which source sample number `j` of a phase comes from, exactly and without a table.
//!
//! Constant weights and ramps are two trees with the same queries. Both are proven: a count is within **1.68** of
//! weight x samples for constant weights (`constant.rs`), and within half the depth of a balanced tree, at most 5
//! at 1,000 sources, of the integral of a ramp (`ramp.rs`); at every prefix, for any weights and any length.

use contract::Hasher;
use curriculum::MixWeights;

pub use curriculum::WEIGHT_MAX;

use crate::constant::HuffmanTree;
use crate::ramp::RampTree;

/// The sources of a phase, numbered in the order in which their weights were given.
#[derive(Clone, Debug)]
pub struct Mixing {
    weights: MixWeights,
    /// Samples over which a ramp extends: those of its whole phase, also where an amendment ends it early.
    samples: u64,
    tree: Tree,
    /// How many samples an earlier segment of the plan has of the same mix, and how many of them by source.
    before: (u64, Vec<u64>),
}

#[derive(Clone, Debug)]
enum Tree {
    Constant(HuffmanTree),
    Ramp(RampTree),
}

impl Mixing {
    /// The mix of these weights; a ramp extends over `samples` samples.
    ///
    /// # Panics
    /// If the weights are not those of a mix that was read: one is zero everywhere, or they are too large.
    pub fn new(weights: &MixWeights, samples: u64) -> Self {
        let tree = match weights {
            MixWeights::Constant(weights) => Tree::Constant(HuffmanTree::new(weights)),
            MixWeights::Ramp { from, to, knots } => {
                Tree::Ramp(RampTree::new([from, to], knots, samples))
            }
        };
        let sources = match weights {
            MixWeights::Constant(weights) | MixWeights::Ramp { from: weights, .. } => weights.len(),
        };
        Mixing { weights: weights.clone(), samples, tree, before: (0, vec![0; sources]) }
    }

    /// The same from its sample `before` on: a segment that continues a mix, whose batch alone changes.
    pub(crate) fn after(self, before: u64) -> Self {
        let counts = self.counts(before);
        Mixing { before: (before, counts), ..self }
    }

    /// The integer weights.
    pub fn weights(&self) -> &MixWeights {
        &self.weights
    }

    /// The source of sample `j`, and how many samples of that source precede it.
    pub fn pick(&self, j: u64) -> (usize, u64) {
        let (first, before) = &self.before;
        let (source, ordinal) = match &self.tree {
            Tree::Constant(tree) => tree.pick(first + j),
            Tree::Ramp(tree) => tree.pick(first + j),
        };
        (source, ordinal - before[source])
    }

    /// How many of the first `n` samples come from `source`.
    pub fn count(&self, source: usize, n: u64) -> u64 {
        let (first, before) = &self.before;
        let count = match &self.tree {
            Tree::Constant(tree) => tree.count(source, first + n),
            Tree::Ramp(tree) => tree.count(source, first + n),
        };
        count - before[source]
    }

    /// [`Self::count`] of every source.
    pub fn counts(&self, n: u64) -> Vec<u64> {
        let (first, before) = &self.before;
        let counts = match &self.tree {
            Tree::Constant(tree) => tree.counts(first + n),
            Tree::Ramp(tree) => tree.counts(first + n),
        };
        counts.iter().zip(before).map(|(count, before)| count - before).collect()
    }

    /// Whether it continues the mix of the segment before.
    pub(crate) fn continues(&self) -> bool {
        self.before.0 > 0
    }

    /// The samples from its first one to the end of its phase.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// The bound on how far a count is from its weight x samples, or from the integral of its ramp.
    pub(crate) fn deviation(&self) -> u64 {
        match &self.weights {
            MixWeights::Constant(_) => 2,
            MixWeights::Ramp { from, .. } => {
                let depth = from.len().next_power_of_two().trailing_zeros();
                1 + u64::from(depth).div_ceil(2)
            }
        }
    }

    /// The sample that is number `ordinal` of `source`, one of those that it has: the inverse of [`Self::pick`].
    pub fn nth(&self, source: usize, ordinal: u64) -> u64 {
        let (first, before) = &self.before;
        let ordinal = ordinal + before[source];
        let sample = match &self.tree {
            Tree::Constant(tree) => tree.nth(source, ordinal),
            Tree::Ramp(tree) => tree.nth(source, ordinal),
        };
        sample - first
    }

    /// The share of `source` at sample `j`, for people.
    pub fn share(&self, source: usize, j: u64) -> f64 {
        self.weights.share(source, (self.before.0 + j) as f64 / self.samples as f64)
    }

    /// Hashes what decides its queries; `names` are those of its sources.
    pub(crate) fn feed<'a>(&self, names: impl Iterator<Item = &'a str>, hasher: &mut Hasher) {
        let Mixing { weights, samples, tree: _, before } = self;
        let first = match weights {
            MixWeights::Constant(weights) | MixWeights::Ramp { from: weights, .. } => weights,
        };
        hasher.u64(first.len() as u64);
        for (name, weight) in names.zip(first) {
            hasher.str(name).u64(*weight);
        }
        if before.0 > 0 {
            hasher.tag("continued.v1");
        }
        if let MixWeights::Ramp { from: _, to, knots } = weights {
            hasher.tag("ramp.v1").u64(*samples).u64(knots.len() as u64);
            to.iter().chain(knots).for_each(|number| {
                hasher.u64(*number);
            });
        }
    }
}
