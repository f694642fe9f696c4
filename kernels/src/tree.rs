//! The one order in which leaves are added: a fixed binary tree on leaf numbers, built by a binary counter.
//!
//! `tree(lo, hi)` of more than one leaf is `tree(lo, lo + p) + tree(lo + p, hi)` with `p` the largest power of two
//! below `hi - lo`. The counter evaluates that expression in leaf order with at most log2 V + 1 values pending.
//! Any aligned block of `2^level` leaves is a node of the tree, so a rank may add its blocks alone and hand each on
//! ([`Counter::push_block`]): same expression, same bits.
//!
//! Invariant: a value without a partner is moved up unchanged. It is never added to zero, which would turn -0.0 into 0.0.

use tch::Tensor;

/// A value that can be added to its right neighbour.
pub trait Sum {
    /// `self + right`; the storage of `self` may be reused.
    fn sum(self, right: Self) -> Self;
}

impl Sum for f32 {
    fn sum(self, right: Self) -> Self {
        self + right
    }
}

impl Sum for f64 {
    fn sum(self, right: Self) -> Self {
        self + right
    }
}

impl Sum for Tensor {
    fn sum(mut self, right: Self) -> Self {
        self += right;
        self
    }
}

impl<T: Sum> Sum for Vec<T> {
    fn sum(self, right: Self) -> Self {
        assert_eq!(self.len(), right.len(), "leaves of one tree have the same parts");
        self.into_iter().zip(right).map(|(left, right)| left.sum(right)).collect()
    }
}

/// Adds leaves in the order of the tree, given in leaf order.
///
/// ```
/// let mut counter = kernels::tree::Counter::new();
/// for leaf in [1e8f32, 1.0, -1e8, 1.0] {
///     counter.push(leaf);
/// }
/// assert_eq!(counter.finish(), Some((1e8f32 + 1.0) + (-1e8 + 1.0)));
/// ```
#[derive(Debug)]
pub struct Counter<T> {
    /// Partials by level, largest first: bit `level` of `leaves` is set for each.
    pending: Vec<(u32, T)>,
    leaves: u64,
}

impl<T> Default for Counter<T> {
    fn default() -> Self {
        Counter { pending: Vec::new(), leaves: 0 }
    }
}

impl<T: Sum> Counter<T> {
    /// A counter that has seen no leaf.
    pub fn new() -> Self {
        Counter::default()
    }

    /// Takes the next leaf.
    pub fn push(&mut self, leaf: T) {
        self.push_block(0, leaf);
    }

    /// Takes the sum of the next `2^level` leaves, which must start at a multiple of `2^level`.
    pub fn push_block(&mut self, level: u32, block: T) {
        assert!(
            self.leaves.is_multiple_of(1 << level),
            "a block of 2^{level} leaves cannot start at {}",
            self.leaves
        );
        let (mut level_now, mut sum) = (level, block);
        while let Some((_, left)) = self.pending.pop_if(|(pending, _)| *pending == level_now) {
            sum = left.sum(sum);
            level_now += 1;
        }
        self.pending.push((level_now, sum));
        self.leaves += 1 << level;
    }

    /// Leaves taken so far.
    pub fn leaves(&self) -> u64 {
        self.leaves
    }

    /// The sum of all leaves; `None` if there was none.
    pub fn finish(mut self) -> Option<T> {
        let (_, last) = self.pending.pop()?;
        Some(self.pending.into_iter().rev().fold(last, |right, (_, left)| left.sum(right)))
    }
}

/// The maximal aligned blocks that cover leaves `first..end`, as (level, first leaf), in leaf order: what a rank that
/// owns these leaves adds by itself.
pub fn blocks(first: u64, end: u64) -> Vec<(u32, u64)> {
    let (mut at, mut found) = (first, Vec::new());
    while at < end {
        let fits = (end - at).ilog2();
        let level = if at == 0 { fits } else { fits.min(at.trailing_zeros()) };
        found.push((level, at));
        at += 1 << level;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The expression itself, so that order and grouping are compared and not only a value.
    #[derive(Clone, Debug, PartialEq)]
    struct Term(String);

    impl Sum for Term {
        fn sum(self, right: Self) -> Self {
            Term(format!("({}+{})", self.0, right.0))
        }
    }

    fn tree<T: Sum + Clone>(leaves: &[T]) -> T {
        match leaves {
            [only] => only.clone(),
            _ => {
                let split = 1 << (leaves.len() - 1).ilog2();
                tree(&leaves[..split]).sum(tree(&leaves[split..]))
            }
        }
    }

    fn counted<T: Sum>(leaves: impl IntoIterator<Item = T>) -> Option<T> {
        let mut counter = Counter::new();
        leaves.into_iter().for_each(|leaf| counter.push(leaf));
        counter.finish()
    }

    #[test]
    fn counter_is_the_recursive_tree() {
        assert_eq!(counted::<f32>([]), None);
        for count in 1..=64 {
            let leaves: Vec<_> = (0..count).map(|leaf| Term(leaf.to_string())).collect();
            assert_eq!(counted(leaves.clone()), Some(tree(&leaves)), "{count} leaves");
        }
    }

    #[test]
    fn ranks_that_add_their_own_blocks_build_the_same_expression() {
        for count in 1..=64u64 {
            let leaves: Vec<_> = (0..count).map(|leaf| Term(leaf.to_string())).collect();
            for ranks in 1..=count.min(9) {
                let mut owner = Counter::new();
                for rank in 0..ranks {
                    let (first, end) = (count * rank / ranks, count * (rank + 1) / ranks);
                    for (level, at) in blocks(first, end) {
                        let own = leaves[at as usize..(at + (1 << level)) as usize].to_vec();
                        owner.push_block(level, counted(own).unwrap());
                    }
                }
                assert_eq!(owner.leaves(), count);
                assert_eq!(owner.finish(), Some(tree(&leaves)), "{count} leaves, {ranks} ranks");
            }
        }
    }

    #[test]
    fn a_lone_negative_zero_stays_negative() {
        assert_eq!(counted([-0.0f32]).map(f32::to_bits), Some((-0.0f32).to_bits()));
        // Leaf 2 has no partner until the end, where it meets the sum of the others.
        assert_eq!(counted([-0.0f32, -0.0, -0.0]).map(f32::to_bits), Some((-0.0f32).to_bits()));
    }

    #[test]
    #[should_panic(expected = "cannot start at 1")]
    fn a_block_out_of_place_is_refused() {
        let mut counter = Counter::new();
        counter.push(1.0f32);
        counter.push_block(1, 2.0);
    }

    proptest! {
        #[test]
        fn tensors_add_like_their_elements(
            leaves in prop::collection::vec(prop::collection::vec(any::<f32>(), 3), 1..20)
        ) {
            let sum = counted(leaves.iter().map(|leaf| Tensor::from_slice(leaf))).unwrap();
            let sum = Vec::<f32>::try_from(sum).unwrap();
            for (element, found) in sum.into_iter().enumerate() {
                let column: Vec<_> = leaves.iter().map(|leaf| leaf[element]).collect();
                let wanted = tree(&column);
                prop_assert!(found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan());
            }
        }
    }
}
