//! The one order in which leaves are added: a fixed binary tree on leaf numbers, built by a binary counter.
//!
//! `tree(lo, hi)` of more than one leaf is `tree(lo, lo + p) + tree(lo + p, hi)` with `p` the largest power of two
//! below `hi - lo`. The counter evaluates that expression in leaf order with at most log2 V + 1 values pending. Any
//! aligned block of `2^level` leaves is a node of the tree, so a rank, or all ranks of a machine, may add their own
//! blocks ([`Blocks`]) and pass each on ([`Counter::push_block`]): same expression, same bits.
//!
//! Invariant: a value without a partner moves up unchanged. It is never added to zero, which would turn -0.0 into 0.0.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::device::additions::{self, Addition};
use crate::device::pieces::{self, TensorRange};
use crate::device::queue::Queue;
use crate::{Error, Result};

/// A value that can be added to its right neighbour.
pub trait Sum: Sized {
    /// Why adding failed.
    type Error;

    /// `self + right`; the storage of `self` may be reused.
    fn sum(self, right: Self) -> Result<Self, Self::Error>;
}

impl Sum for f32 {
    type Error = Infallible;

    fn sum(self, right: Self) -> Result<Self, Infallible> {
        Ok(self + right)
    }
}

impl Sum for f64 {
    type Error = Infallible;

    fn sum(self, right: Self) -> Result<Self, Infallible> {
        Ok(self + right)
    }
}

impl Sum for Tensor {
    type Error = Error;

    fn sum(mut self, right: Self) -> Result<Self> {
        let _ = self.f_add_(&right)?;
        Ok(self)
    }
}

impl<T: Sum> Sum for Vec<T> {
    type Error = T::Error;

    fn sum(self, right: Self) -> Result<Self, T::Error> {
        assert_eq!(self.len(), right.len(), "leaves of one tree have the same parts");
        self.into_iter().zip(right).map(|(left, right)| left.sum(right)).collect()
    }
}

/// The sum of numbers in the order of the tree; 0 if there are none.
pub fn total(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let mut counter = Counter::new();
    for number in numbers {
        let Ok(()) = counter.push(number);
    }
    let Ok(sum) = counter.finish();
    sum.unwrap_or(0.0)
}

/// Adds the right tensor of each pair to the left one, contiguous f32 of one shape and device: on a GPU all in one
/// launch, or, if our kernels cannot be compiled, by an operator each. The bits are those of [`Sum`].
pub fn add_all(pairs: &mut [(Tensor, Tensor)]) -> Result<()> {
    let device = pairs.first().map_or(Device::Cpu, |(left, _)| left.device());
    match Queue::of(device) {
        Ok(queue) if pairs.iter().all(fits) => {
            let rows = pairs.iter().map(|(left, right)| Addition {
                right: Some(right.into()),
                ..Addition::of(left.into(), Some(left))
            });
            additions::make(&queue, &rows.collect::<Vec<_>>()).map(drop)
        }
        _ => {
            for (left, right) in pairs {
                let _ = left.f_add_(right)?;
            }
            Ok(())
        }
    }
}

/// Copies the right tensor of each pair into the left one, of one shape, kind and device: in one launch, as
/// [`add_all`], if all are contiguous f32 or bf16.
pub fn copy_all(pairs: &mut [(Tensor, Tensor)]) -> Result<()> {
    let device = pairs.first().map_or(Device::Cpu, |(left, _)| left.device());
    match Queue::of(device) {
        Ok(queue) if pairs.iter().all(copied) => {
            let pieces = pairs.iter().map(|(left, right)| piece(right, left));
            pieces::copy(&queue, &pieces.collect::<Vec<_>>())
        }
        _ => {
            pairs.iter_mut().try_for_each(|(left, right)| left.f_copy_(right))?;
            Ok(())
        }
    }
}

/// The bytes of contiguous tensors of `device` concatenated in new memory, to be sent as one. They are copied as by
/// [`copy_all`]. Wider kinds must come first, so that all are aligned.
pub fn pack(parts: &[Tensor], device: Device) -> Result<Tensor> {
    let bytes = |part: &Tensor| (part.numel() * part.kind().elt_size_in_bytes()) as i64;
    let packed = Tensor::f_empty([parts.iter().map(bytes).sum::<i64>()], (Kind::Uint8, device))?;
    let (mut at, mut pairs) = (0, Vec::new());
    for part in parts.iter().filter(|part| part.numel() > 0) {
        let into = packed.f_narrow(0, at, bytes(part))?.f_view_dtype(part.kind())?;
        at += bytes(part);
        pairs.push((into, part.f_view([-1])?));
    }
    tch::no_grad(|| copy_all(&mut pairs))?;
    Ok(packed)
}

/// The numbers of contiguous tensors of one kind, concatenated in new memory: an alias would keep the whole tensor of a
/// part alive. Kind and device are parameters, as there may be no part.
pub fn joined(parts: &[Tensor], kind: Kind, device: Device) -> Result<Tensor> {
    Ok(pack(parts, device)?.f_view_dtype(kind)?)
}

/// Sums over chunks where only the device knows which chunks contribute: all are computed in one launch.
#[derive(Debug, Default)]
pub struct DeviceSums {
    /// As for [`add_all`].
    pub added: Vec<(Tensor, Tensor)>,
    /// The same for an expert, with the numbers of rows in the left and the right one, i64. If only one has rows, the
    /// sum is that one.
    pub experts: Vec<((Tensor, Tensor), [Tensor; 2])>,
    /// Such numbers of rows for many experts: the third is set to the sum of the other two.
    pub rows: Vec<[Tensor; 3]>,
}

impl DeviceSums {
    /// Computes the sums.
    ///
    /// # Errors
    /// If the device has no kernels of ours, a tensor has another kind or layout, or a launch fails.
    pub fn make(&self) -> Result<()> {
        let DeviceSums { added, experts, rows } = self;
        let mut pairs = added.iter().chain(experts.iter().map(|(pair, _)| pair));
        let Some((one, _)) = pairs.clone().next() else { return Ok(()) };
        let queue = Queue::of(one.device())?;
        let whole = |tensor: &Tensor| tensor.kind() == Kind::Int64 && tensor.is_contiguous();
        let counted = experts.iter().flat_map(|(_, rows)| rows).chain(rows.iter().flatten());
        if !pairs.all(fits) || !counted.into_iter().all(whole) {
            let wanted = "contiguous f32 with contiguous i64".to_owned();
            let (operation, found) = ("add_present", "others".to_owned());
            return Err(Error::Operand { operation, operand: "pairs", found, wanted });
        }
        let address = |tensor: &Tensor| (tensor.data_ptr() as i64).cast_unsigned();
        let mut pieces: Vec<TensorRange> =
            added.iter().map(|(left, right)| piece(left, right)).collect();
        pieces.extend(experts.iter().map(|((left, right), [here, there])| TensorRange {
            first: address(here),
            salt: address(there),
            ..piece(left, right)
        }));
        pieces.extend(
            rows.iter().map(|[left, right, sum]| TensorRange {
                first: address(sum),
                ..piece(left, right)
            }),
        );
        pieces::add_present(&queue, &pieces)
    }
}

/// Whether a pair can be in a table for adding.
fn fits(pair: &(Tensor, Tensor)) -> bool {
    pair.0.kind() == Kind::Float && copied(pair)
}

/// Whether a pair can be in a table for copying.
fn copied(pair: &(Tensor, Tensor)) -> bool {
    let (left, right) = pair;
    let float = [Kind::Float, Kind::BFloat16].contains(&left.kind());
    let alike = left.kind() == right.kind() && left.size() == right.size();
    float && alike && left.is_contiguous() && right.is_contiguous()
}

fn piece<'a>(tensor: &'a Tensor, other: &'a Tensor) -> TensorRange<'a> {
    TensorRange { tensor, other: Some(other), first: 0, salt: 0 }
}

/// Adds leaves in the order of the tree; they must be pushed in leaf order.
///
/// ```
/// let mut counter = kernels::tree::Counter::new();
/// for leaf in [1e8f32, 1.0, -1e8, 1.0] {
///     counter.push(leaf)?;
/// }
/// assert_eq!(counter.finish()?, Some((1e8f32 + 1.0) + (-1e8 + 1.0)));
/// # Ok::<(), std::convert::Infallible>(())
/// ```
#[derive(Debug)]
pub struct Counter<T> {
    /// Partial sums by level, largest first: bit `level` of `leaves` is set for each.
    pending: Vec<(u32, T)>,
    leaves: u64,
}

impl<T> Default for Counter<T> {
    fn default() -> Self {
        Counter { pending: Vec::new(), leaves: 0 }
    }
}

impl<T: Sum> Counter<T> {
    /// A counter without leaves.
    pub fn new() -> Self {
        Counter::default()
    }

    /// Pushes the next leaf.
    ///
    /// # Errors
    /// The error of a sum.
    pub fn push(&mut self, leaf: T) -> Result<(), T::Error> {
        self.push_block(0, leaf)
    }

    /// Pushes the sum of the next `2^level` leaves, which must start at a multiple of `2^level`.
    pub fn push_block(&mut self, level: u32, block: T) -> Result<(), T::Error> {
        assert!(
            self.leaves.is_multiple_of(1 << level),
            "a block of 2^{level} leaves cannot start at {}",
            self.leaves
        );
        let (mut level_now, mut sum) = (level, block);
        while let Some((_, left)) = self.pending.pop_if(|(pending, _)| *pending == level_now) {
            sum = left.sum(sum)?;
            level_now += 1;
        }
        self.pending.push((level_now, sum));
        self.leaves += 1 << level;
        Ok(())
    }

    /// Number of leaves so far.
    pub fn leaves(&self) -> u64 {
        self.leaves
    }

    /// The sum of all leaves; `None` if there was none.
    pub fn finish(mut self) -> Result<Option<T>, T::Error> {
        let Some((_, last)) = self.pending.pop() else { return Ok(None) };
        let left = self.pending.into_iter().rev();
        left.map(|(_, left)| left).try_fold(last, |right, left| left.sum(right)).map(Some)
    }
}

impl<T: Sum<Error = Error>> Counter<T> {
    /// The sum of all leaves.
    ///
    /// # Errors
    /// The error of a sum, or that there was no leaf, which is a bug of the caller.
    pub fn total(self) -> Result<T> {
        self.finish()?.ok_or_else(no_part)
    }
}

/// The error for a sum over no parts.
pub(crate) fn no_part() -> Error {
    let (operation, operand) = ("a sum over parts", "the number of parts");
    Error::Operand { operation, operand, found: "0".to_owned(), wanted: "1 or more".to_owned() }
}

/// The maximal aligned blocks that cover leaves `first..end`, as (level, first leaf), in leaf order: the rank that owns
/// these leaves adds them by itself.
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

/// Adds leaves up to their maximal aligned blocks; takes the leaves, or smaller blocks of them, in leaf order.
///
/// ```
/// let mut blocks = kernels::tree::Blocks::new(2..7);
/// let found = (2..7).filter_map(|leaf| blocks.push_block(0, leaf as f32).transpose());
/// assert_eq!(found.collect::<Result<Vec<_>, _>>()?, [(1, 2.0 + 3.0), (1, 4.0 + 5.0), (0, 6.0)]);
/// # Ok::<(), std::convert::Infallible>(())
/// ```
#[derive(Debug)]
pub struct Blocks<T> {
    left: std::vec::IntoIter<(u32, u64)>,
    now: Option<(u32, Counter<T>)>,
}

impl<T: Sum> Blocks<T> {
    /// For the leaves `leaves`.
    pub fn new(leaves: Range<u64>) -> Self {
        Blocks { left: blocks(leaves.start, leaves.end).into_iter(), now: None }
    }

    /// Pushes the sum of the next `2^level` leaves; returns the block that this completes, and its level.
    pub fn push_block(&mut self, level: u32, block: T) -> Result<Option<(u32, T)>, T::Error> {
        let next = || self.left.next().map(|(level, _)| (level, Counter::new()));
        let Some((whole, mut counter)) = self.now.take().or_else(next) else { return Ok(None) };
        counter.push_block(level, block)?;
        if counter.leaves() < 1 << whole {
            self.now = Some((whole, counter));
            return Ok(None);
        }
        Ok(counter.finish()?.map(|sum| (whole, sum)))
    }
}

/// Adds the maximal aligned blocks of runs of leaves, pushed in any order: a node as soon as both halves are known.
///
/// ```
/// let mut nodes = kernels::tree::TreeNodes::new(&[2..7]);
/// [6, 3, 4, 2, 5].into_iter().try_for_each(|leaf| nodes.push(leaf, leaf as f32))?;
/// assert_eq!(nodes.take(2), Some(2.0 + 3.0));
/// assert_eq!(nodes.finish()?, None, "a block was taken");
/// # Ok::<(), std::convert::Infallible>(())
/// ```
#[derive(Debug)]
pub struct TreeNodes<T> {
    blocks: Vec<(u32, u64)>,
    /// Sums that wait for their partner, by level and first leaf.
    waiting: BTreeMap<(u32, u64), T>,
}

/// A node of the tree whose sum is known: that of the `2^level` leaves from `first` on.
#[derive(Debug)]
pub struct Node<T> {
    /// 0 for a leaf.
    pub level: u32,
    /// Its first leaf.
    pub first: u64,
    /// The sum.
    pub value: T,
}

/// A node of the tree whose halves are known.
#[derive(Debug)]
pub struct Pair<T> {
    /// Its level.
    pub level: u32,
    /// Its first leaf.
    pub first: u64,
    /// The left operand.
    pub left: T,
    /// The right operand.
    pub right: T,
}

impl<T> TreeNodes<T> {
    /// For the leaves of `parts`, in ascending order; no node spans two parts.
    pub fn new(parts: &[Range<u64>]) -> Self {
        let blocks = parts.iter().flat_map(|part| blocks(part.start, part.end)).collect();
        TreeNodes { blocks, waiting: BTreeMap::new() }
    }

    /// Takes a leaf, or the sum of a pair that it returned before. Stores it, or, if its partner is known, returns the
    /// pair. The caller adds the pair and passes the sum back; other nodes that arrive meanwhile wait for it.
    pub fn meet(&mut self, node: Node<T>) -> Option<Pair<T>> {
        let Node { level, first, value } = node;
        let block = self.blocks.iter().rfind(|(_, begins)| *begins <= first);
        let (top, other) = (block.map_or(0, |(level, _)| *level), first ^ (1 << level));
        let partner = if level < top { self.waiting.remove(&(level, other)) } else { None };
        let Some(partner) = partner else {
            self.waiting.insert((level, first), value);
            return None;
        };
        let (left, right) = if other < first { (partner, value) } else { (value, partner) };
        Some(Pair { level: level + 1, first: first.min(other), left, right })
    }

    /// The sum of the block that begins with leaf `first`; `None` until all its leaves are known.
    pub fn take(&mut self, first: u64) -> Option<T> {
        let block = self.blocks.iter().find(|(_, begins)| *begins == first)?;
        self.waiting.remove(block)
    }
}

impl<T: Sum> TreeNodes<T> {
    /// Pushes a leaf, each once.
    pub fn push(&mut self, leaf: u64, value: T) -> Result<(), T::Error> {
        let mut node = Node { level: 0, first: leaf, value };
        while let Some(Pair { level, first, left, right }) = self.meet(node) {
            node = Node { level, first, value: left.sum(right)? };
        }
        Ok(())
    }

    /// The sum of all leaves, which must begin with leaf 0; `None` if one is missing, or there are none.
    pub fn finish(mut self) -> Result<Option<T>, T::Error> {
        let mut counter = Counter::new();
        for block in std::mem::take(&mut self.blocks) {
            let Some(sum) = self.waiting.remove(&block) else { return Ok(None) };
            counter.push_block(block.0, sum)?;
        }
        counter.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The expression itself, to compare order and grouping and not only a value.
    #[derive(Clone, Debug, PartialEq)]
    struct Term(String);

    impl Sum for Term {
        type Error = Infallible;

        fn sum(self, right: Self) -> Result<Self, Infallible> {
            Ok(Term(format!("({}+{})", self.0, right.0)))
        }
    }

    fn tree<T: Sum<Error = Infallible> + Clone>(leaves: &[T]) -> T {
        match leaves {
            [only] => only.clone(),
            _ => {
                let split = 1 << (leaves.len() - 1).ilog2();
                let Ok(sum) = tree(&leaves[..split]).sum(tree(&leaves[split..]));
                sum
            }
        }
    }

    fn counted<T: Sum<Error: std::fmt::Debug>>(leaves: impl IntoIterator<Item = T>) -> Option<T> {
        let mut counter = Counter::new();
        leaves.into_iter().for_each(|leaf| counter.push(leaf).unwrap());
        counter.finish().unwrap()
    }

    #[test]
    fn counter_is_the_recursive_tree() {
        assert_eq!(counted::<f32>([]), None);
        for count in 1..=64 {
            let leaves: Vec<_> = (0..count).map(|leaf| Term(leaf.to_string())).collect();
            assert_eq!(counted(leaves.clone()), Some(tree(&leaves)), "{count} leaves");
        }
    }

    /// The blocks of `part`, from blocks of consecutive smaller parts.
    fn rejoined<T: Sum<Error = Infallible>>(part: Range<u64>, of: Vec<(u32, T)>) -> Vec<(u32, T)> {
        let wanted = blocks(part.start, part.end);
        let mut sums = Blocks::new(part);
        let push = |(level, block)| {
            let Ok(complete) = sums.push_block(level, block);
            complete
        };
        let found: Vec<_> = of.into_iter().filter_map(push).collect();
        let levels = |(level, _): &(u32, T)| *level;
        let wanted: Vec<_> = wanted.into_iter().map(|(level, _)| level).collect();
        assert_eq!(found.iter().map(levels).collect::<Vec<_>>(), wanted, "every block comes out");
        found
    }

    /// Leaves in rounds of `round`, assigned to ranks in runs, the ranks of a machine combined: the sums that the owner
    /// adds.
    fn owner(leaves: &[Term], round: u64, ranks: u64, machine: u64) -> Counter<Term> {
        let (mut owner, count) = (Counter::new(), leaves.len() as u64);
        for first in (0..count).step_by(round as usize) {
            let size = round.min(count - first);
            let part = |a, b| first + size * a / ranks..first + size * b / ranks;
            for machine_first in (0..ranks).step_by(machine as usize) {
                let machine_end = ranks.min(machine_first + machine);
                let rank = |rank| {
                    let leaf = |leaf: u64| (0, leaves[leaf as usize].clone());
                    rejoined(part(rank, rank + 1), part(rank, rank + 1).map(leaf).collect())
                };
                let found = (machine_first..machine_end).flat_map(rank).collect();
                for (level, block) in rejoined(part(machine_first, machine_end), found) {
                    let Ok(()) = owner.push_block(level, block);
                }
            }
        }
        owner
    }

    #[test]
    fn ranks_and_machines_that_add_their_own_blocks_build_the_same_expression() {
        for count in 1..=40u64 {
            let leaves: Vec<_> = (0..count).map(|leaf| Term(leaf.to_string())).collect();
            for ranks in 1..=9 {
                for (round, machine) in [(count, 1), (count, 3), (ranks, 1), (ranks, 2), (7, 4)] {
                    let owner = owner(&leaves, round, ranks, machine);
                    let how = format!("{count} leaves, {ranks} ranks, {round}, {machine}");
                    assert_eq!(owner.leaves(), count);
                    assert_eq!(owner.finish(), Ok(Some(tree(&leaves))), "{how}");
                }
            }
        }
    }

    #[test]
    fn a_lone_negative_zero_stays_negative() {
        assert_eq!(counted([-0.0f32]).map(f32::to_bits), Some((-0.0f32).to_bits()));
        // Leaf 2 has no partner until the end, when it meets the sum of the others.
        assert_eq!(counted([-0.0f32, -0.0, -0.0]).map(f32::to_bits), Some((-0.0f32).to_bits()));
    }

    #[test]
    #[should_panic(expected = "cannot start at 1")]
    fn a_block_out_of_place_is_refused() {
        let mut counter = Counter::new();
        let Ok(()) = counter.push(1.0f32);
        let Ok(()) = counter.push_block(1, 2.0);
    }

    proptest! {
        /// In any order of arrival: the expression of the leaves in order, and of each block of a part of them.
        #[test]
        fn the_order_of_arrival_is_no_argument(
            (first, order) in (0u64..40, 1u64..40).prop_flat_map(|(first, count)| {
                (Just(first), Just((0..count).collect::<Vec<_>>()).prop_shuffle())
            })
        ) {
            let term = |leaf: u64| Term(leaf.to_string());
            let count = order.len() as u64;
            let mut all = TreeNodes::new(std::slice::from_ref(&(0..count)));
            order.iter().for_each(|leaf| all.push(*leaf, term(*leaf)).unwrap());
            prop_assert_eq!(all.finish(), Ok(counted((0..count).map(term))));

            let part = first..first + count;
            let mut some = TreeNodes::new(std::slice::from_ref(&part));
            for (seen, leaf) in order.iter().enumerate() {
                let done = |(level, begins): &(u32, u64)| {
                    let block = *begins..*begins + (1 << level);
                    block.into_iter().all(|leaf| order[..seen].contains(&(leaf - first)))
                };
                for block in blocks(part.start, part.end).iter().filter(|block| !done(block)) {
                    prop_assert_eq!(some.take(block.1), None);
                }
                some.push(first + leaf, term(first + leaf)).unwrap();
            }
            let wanted = rejoined(part.clone(), part.clone().map(|leaf| (0, term(leaf))).collect());
            for ((_, begins), (_, wanted)) in blocks(part.start, part.end).into_iter().zip(wanted) {
                prop_assert_eq!(some.take(begins), Some(wanted));
            }
        }

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

        /// Two threads that take turns arbitrarily, and add outside of the tree.
        #[test]
        fn pairs_may_be_added_anywhere(turns in prop::collection::vec(any::<bool>(), 64), count in 2u64..24) {
            let mut nodes = TreeNodes::new(std::slice::from_ref(&(0..count)));
            let leaf = |first: u64| Node { level: 0, first, value: Term(first.to_string()) };
            let mut left: [Vec<Node<Term>>; 2] = [(0..count).step_by(2), (1..count).step_by(2)]
                .map(|leaves| leaves.map(leaf).collect());
            let mut turns = turns.into_iter().cycle();
            while left.iter().any(|left| !left.is_empty()) {
                let own = &mut left[usize::from(turns.next().unwrap())];
                let Some(node) = own.pop() else { continue };
                if let Some(Pair { level, first, left, right }) = nodes.meet(node) {
                    let Ok(value) = left.sum(right);
                    own.insert(own.len() / 2, Node { level, first, value });
                }
            }
            let wanted = counted((0..count).map(|leaf| Term(leaf.to_string())));
            prop_assert_eq!(nodes.finish(), Ok(wanted));
        }
    }
}
