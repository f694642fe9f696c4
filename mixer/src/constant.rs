//! Constant weights: a Huffman tree over the integers.
//!
//! A node of weight `T` whose left child weighs `a` sends `(2 n a + T) / 2 T`, rounded down, of its first `n` samples
//! to the left (that is `n a / T`, rounded to nearest), and the rest to the right.
//! Both counts are monotone and grow by at most one per sample. So "which child gets sample `j`" and "which is the
//! `k`-th sample of this child" are one division each, and a source is found, counted or inverted along one path.
//!
//! **Bound.** Rounding adds at most 1/2 at each node, and a deviation shrinks by child / parent on the way down, so a
//! source of weight `w0` whose ancestors weigh `w1 < w2 < ... < wd` deviates by at most
//! `(1 + w0/w1 + w0/w2 + ... + w0/w(d-1)) / 2`. Huffman merges the two lightest nodes, so the sibling of an
//! ancestor weighs at least as much as that ancestor's heavier child: `w(k+1) >= w(k) + w(k-1)`. The ancestors grow
//! like Fibonacci numbers, the sum stays below their reciprocals' 3.3599, and every count is within **1.68** of
//! weight x samples, at every prefix, for any weights.

use std::collections::BTreeSet;

use curriculum::WEIGHT_MAX;

/// The tree. Sources are numbered in the order in which their weights were given.
#[derive(Clone, Debug)]
pub(crate) struct HuffmanTree {
    sources: usize,
    nodes: Vec<Node>,
    /// The parent of each source, then of each node, and whether it is the left child; `None` for the root.
    parents: Vec<Option<(usize, bool)>>,
}

/// An inner node; children below the number of sources are sources, the others are nodes.
#[derive(Clone, Copy, Debug)]
struct Node {
    left: usize,
    right: usize,
    left_weight: u64,
    total: u64,
}

impl HuffmanTree {
    /// The tree over `weights`; equal weights merge in the order given.
    ///
    /// # Panics
    /// If there is no weight, one is zero, or they sum to more than [`WEIGHT_MAX`].
    pub(crate) fn new(weights: &[u64]) -> Self {
        let total = weights.iter().try_fold(0u64, |sum, &weight| sum.checked_add(weight));
        assert!(
            total.is_some_and(|total| 0 < total && total <= WEIGHT_MAX),
            "weights out of range"
        );
        assert!(weights.iter().all(|&weight| weight > 0), "a weight is zero");
        let mut open: BTreeSet<(u64, usize)> =
            weights.iter().enumerate().map(|(source, &weight)| (weight, source)).collect();
        let mut nodes = Vec::with_capacity(weights.len() - 1);
        let mut parents = vec![None; weights.len()];
        while let (Some((left_weight, left)), Some((right_weight, right))) =
            (open.pop_first(), open.first().copied())
        {
            open.pop_first();
            let (node, id) = (nodes.len(), parents.len());
            let total = left_weight + right_weight;
            nodes.push(Node { left, right, left_weight, total });
            parents[left] = Some((node, true));
            parents[right] = Some((node, false));
            parents.push(None);
            open.insert((total, id));
        }
        HuffmanTree { sources: weights.len(), nodes, parents }
    }

    /// The source of sample `j`, and how many samples of that source precede it.
    pub(crate) fn pick(&self, j: u64) -> (usize, u64) {
        let (mut at, mut ordinal) = (self.parents.len() - 1, j);
        while let Some(index) = at.checked_sub(self.sources) {
            let node = &self.nodes[index];
            let (left, goes_left) = node.split(ordinal);
            (at, ordinal) =
                if goes_left { (node.left, left) } else { (node.right, ordinal - left) };
        }
        (at, ordinal)
    }

    /// How many of the first `n` samples come from `source`.
    pub(crate) fn count(&self, source: usize, n: u64) -> u64 {
        match self.parents[source] {
            None => n,
            Some((node, is_left)) => {
                let above = self.count(node + self.sources, n);
                let left = self.nodes[node].split(above).0;
                if is_left { left } else { above - left }
            }
        }
    }

    /// [`Self::count`] of every source.
    pub(crate) fn counts(&self, n: u64) -> Vec<u64> {
        let mut counts = vec![0; self.parents.len()];
        counts[self.parents.len() - 1] = n;
        for (index, node) in self.nodes.iter().enumerate().rev() {
            let above = counts[index + self.sources];
            let left = node.split(above).0;
            counts[node.left] = left;
            counts[node.right] = above - left;
        }
        counts.truncate(self.sources);
        counts
    }

    /// The sample that is number `ordinal` of `source`: the inverse of [`Self::pick`].
    pub(crate) fn nth(&self, source: usize, ordinal: u64) -> u64 {
        let (mut at, mut ordinal) = (source, ordinal);
        while let Some((node, is_left)) = self.parents[at] {
            ordinal = self.nodes[node].join(ordinal, is_left);
            at = node + self.sources;
        }
        ordinal
    }
}

impl Node {
    /// How many of this node's first `n` samples go left, and whether sample `n` does.
    fn split(&self, n: u64) -> (u64, bool) {
        let (twice_left, twice_total) =
            (2 * u128::from(self.left_weight), 2 * u128::from(self.total));
        let scaled = u128::from(n) * twice_left + u128::from(self.total);
        let left = scaled / twice_total;
        // At most n, since a < T.
        (left as u64, scaled - left * twice_total + twice_left >= twice_total)
    }

    /// The number among this node's samples of sample `k` of its left or right child.
    fn join(&self, k: u64, is_left: bool) -> u64 {
        let scaled = u128::from(self.total) * (2 * u128::from(k) + 1);
        let sample = if is_left {
            scaled.div_ceil(2 * u128::from(self.left_weight)) - 1
        } else {
            scaled / (2 * u128::from(self.total - self.left_weight))
        };
        // Samples of a phase are numbered below 2^63, and this is one of them if `k` is a sample of the child.
        sample as u64
    }
}
