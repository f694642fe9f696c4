//! Best-fit packing: combines documents into sequences so that few are cut and little is padded.
//!
//! A document of at least `length` tokens first gives as many full sequences as it fills. Its remainder, or a shorter
//! document as a whole, is a piece. Pieces are placed by decreasing size, equal sizes in stream order. Each is added to
//! the pack with the least free space that still fits it (the oldest of equals), or starts a new pack if none fits
//! (best-fit-decreasing). A pack with the maximum number of pieces takes no more.
//!
//! Documents are packed [`BLOCK`] at a time, which bounds memory and lets threads share the work. Each block leaves
//! some packs partly empty; a block is so large that these are less than a fiftieth of all (a test).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use contract::{Key, Purpose, draw};
use curriculum::Packing;

use crate::sample::Span;

/// Documents that are packed together.
pub const BLOCK: usize = 1 << 20;

/// At which of its lengths (by index, ascending) a source packs each document: sampled by a keyed hash of the
/// document's number, so it depends on nothing else.
pub struct Lengths {
    key: Key,
    /// The cumulative weights of the lengths.
    sums: Vec<u64>,
}

impl Lengths {
    /// The lengths of source `name`.
    pub fn new(name: &str, packing: &Packing) -> Self {
        let weights = packing.lengths.values();
        let sums = weights.scan(0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Lengths { key: Key::from_seed(0).child("lengths").child(name), sums: sums.collect() }
    }

    /// The length at which document `document` of the source's training stream is packed.
    pub fn of(&self, document: u64) -> usize {
        let all = self.sums.last().copied().unwrap_or_default();
        let drawn = (u128::from(draw(self.key, Purpose::Length, document)) * u128::from(all)) >> 64;
        self.sums.partition_point(|sum| u128::from(*sum) <= drawn)
    }
}

/// The packs of one block of documents: a list of spans for each pack, in stream order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FittedPacks {
    /// Full packs of one contiguous span.
    pub contiguous: Vec<Span>,
    /// Full packs of several pieces.
    pub joined: Vec<Vec<Span>>,
    /// Packs with free space left.
    pub padded: Vec<Vec<Span>>,
    /// Documents that were packed.
    pub documents: u64,
    /// Documents longer than a sequence.
    pub cut: u64,
}

/// A pack with free space.
struct OpenPack {
    pieces: Vec<Span>,
    room: u32,
}

impl FittedPacks {
    /// Packs a block of documents, each a range of tokens of its stream; a pack takes pieces of at most `most`.
    ///
    /// # Panics
    /// If `length` or `most` is 0.
    pub fn of(documents: &[Range<u64>], length: u32, most: u32) -> Self {
        assert!(length > 0 && most > 0, "a pack needs tokens");
        let mut packs = FittedPacks { documents: documents.len() as u64, ..Self::default() };
        let mut pieces = Vec::new();
        for Range { start, end } in documents.iter().cloned() {
            let (tokens, length) = (end - start, u64::from(length));
            let whole = tokens / length;
            packs.contiguous.extend((0..whole).map(|at| Span::new(start + at * length, length)));
            packs.cut += u64::from(tokens > length);
            if tokens % length > 0 {
                pieces.push(Span::new(start + whole * length, tokens % length));
            }
        }
        // A stable sort: equal sizes stay in the order of the stream.
        pieces.sort_by_key(|piece| Reverse(piece.tokens));
        for OpenPack { mut pieces, room } in packed(&pieces, length, most) {
            pieces.sort_unstable();
            if room == 0 { &mut packs.joined } else { &mut packs.padded }.push(pieces);
        }
        packs
    }

    /// Packs of the block.
    pub fn packs(&self) -> usize {
        self.contiguous.len() + self.joined.len() + self.padded.len()
    }
}

/// Packs pieces that are shorter than `length` and sorted by decreasing size.
fn packed(pieces: &[Span], length: u32, most: u32) -> Vec<OpenPack> {
    let mut packs: Vec<OpenPack> = Vec::new();
    let mut by_room = FreeSpaceIndex::new(length);
    for piece in pieces {
        let number = by_room.take(piece.tokens).unwrap_or_else(|| {
            packs.push(OpenPack { pieces: Vec::new(), room: length });
            packs.len() - 1
        });
        let pack = &mut packs[number];
        pack.pieces.push(*piece);
        pack.room -= piece.tokens;
        if pack.room > 0 && (pack.pieces.len() as u64) < u64::from(most) {
            by_room.put(pack.room, number);
        }
    }
    packs
}

/// Packs indexed by free space: finds the least sufficient free space in a few steps, whatever the length.
struct FreeSpaceIndex {
    /// For each amount of free space, the numbers of the packs that have it, the lowest on top.
    packs: Vec<BinaryHeap<Reverse<usize>>>,
    /// A tree of bitmaps: a bit for each amount of free space that some pack has, a bit for each nonzero word of those,
    /// and so on up to a single word.
    levels: Vec<Vec<u64>>,
}

impl FreeSpaceIndex {
    /// No packs; free space is below `length`.
    fn new(length: u32) -> Self {
        let mut levels = vec![vec![0u64; (length as usize).div_ceil(64)]];
        while let Some(last) = levels.last().filter(|last| last.len() > 1) {
            levels.push(vec![0; last.len().div_ceil(64)]);
        }
        FreeSpaceIndex { packs: vec![BinaryHeap::new(); length as usize], levels }
    }

    fn put(&mut self, room: u32, pack: usize) {
        self.packs[room as usize].push(Reverse(pack));
        let mut at = room as usize;
        for level in &mut self.levels {
            level[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
    }

    /// Removes and returns the pack with the least sufficient free space.
    fn take(&mut self, room: u32) -> Option<usize> {
        let room = self.at_least(room as usize)?;
        let Reverse(pack) = self.packs[room].pop()?;
        if self.packs[room].is_empty() {
            let mut at = room;
            for level in &mut self.levels {
                level[at / 64] &= !(1 << (at % 64));
                if level[at / 64] != 0 {
                    break;
                }
                at /= 64;
            }
        }
        Some(pack)
    }

    /// The least free space of at least `from` that some pack has: walks up the levels to a word with a later bit, then
    /// down.
    fn at_least(&self, from: usize) -> Option<usize> {
        let mut from = from;
        for (up, level) in self.levels.iter().enumerate() {
            let word = level.get(from / 64)?;
            let later = word >> (from % 64) << (from % 64);
            if later != 0 {
                let mut at = from / 64 * 64 + later.trailing_zeros() as usize;
                for level in self.levels[..up].iter().rev() {
                    at = at * 64 + level[at].trailing_zeros() as usize;
                }
                return Some(at);
            }
            from = from / 64 + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Contiguous documents of these sizes.
    fn documents(sizes: &[u64]) -> Vec<Range<u64>> {
        let begin = |at: &mut u64, size: &u64| {
            let start = *at;
            *at += size;
            Some(start..*at)
        };
        sizes.iter().scan(0, begin).collect()
    }

    /// Straightforward best-fit-decreasing: checks every pack for every piece.
    fn naive(documents: &[Range<u64>], length: u64, most: usize) -> (Vec<Span>, Vec<Vec<Span>>) {
        let (mut single, mut pieces) = (Vec::new(), Vec::new());
        for Range { mut start, end } in documents.iter().cloned() {
            while end - start >= length {
                single.push(Span::new(start, length));
                start += length;
            }
            if end > start {
                pieces.push(Span::new(start, end - start));
            }
        }
        pieces.sort_by(|a, b| b.tokens.cmp(&a.tokens).then(a.start.cmp(&b.start)));
        let mut packs: Vec<Vec<Span>> = Vec::new();
        for piece in pieces {
            let room =
                |pack: &Vec<Span>| length - pack.iter().map(|p| u64::from(p.tokens)).sum::<u64>();
            let fits =
                packs.iter_mut().filter(|p| p.len() < most && room(p) >= u64::from(piece.tokens));
            // `min_by_key` returns the first of equal ones.
            match fits.min_by_key(|pack| room(pack)) {
                Some(pack) => pack.push(piece),
                None => packs.push(vec![piece]),
            }
        }
        packs.iter_mut().for_each(|pack| pack.sort_unstable());
        (single, packs)
    }

    proptest! {
        #[test]
        fn packs_are_those_of_best_fit_decreasing(
            sizes in prop::collection::vec(0u64..300, 0..120),
            length in 1u32..200,
            most in 1u32..6,
        ) {
            let documents = documents(&sizes);
            let packs = FittedPacks::of(&documents, length, most);
            let (single, several) = naive(&documents, u64::from(length), most as usize);
            let full = |pack: &&Vec<Span>| {
                pack.iter().map(|piece| piece.tokens).sum::<u32>() == length
            };
            prop_assert_eq!(&packs.contiguous, &single);
            let joined: Vec<_> = several.iter().filter(full).cloned().collect();
            prop_assert_eq!(&packs.joined, &joined);
            let padded: Vec<_> = several.iter().filter(|pack| !full(pack)).cloned().collect();
            prop_assert_eq!(&packs.padded, &padded);
            let cut = sizes.iter().filter(|size| **size > u64::from(length)).count() as u64;
            prop_assert_eq!((packs.documents, packs.cut), (sizes.len() as u64, cut));
        }

        #[test]
        fn the_least_room_that_is_enough_is_found(
            length in 1u32..20_000, puts in prop::collection::vec((0.0f64..1.0, 0.0f64..1.0), 1..60),
        ) {
            let mut rooms = FreeSpaceIndex::new(length);
            let mut plain: Vec<(u32, usize)> = Vec::new();
            let room = |share: f64| (share * f64::from(length)) as u32;
            for (number, (put, take)) in puts.into_iter().enumerate() {
                rooms.put(room(put), number);
                plain.push((room(put), number));
                if number % 3 > 0 {
                    let wanted = plain.iter().filter(|(has, _)| *has >= room(take)).min().copied();
                    prop_assert_eq!(rooms.take(room(take)), wanted.map(|(_, number)| number));
                    plain.retain(|one| Some(*one) != wanted);
                }
            }
        }

        #[test]
        fn each_length_has_its_share_of_the_documents(weights in prop::collection::btree_map(1u32..9, 1u64..9, 1..5)) {
            let all: u64 = weights.values().sum();
            let packing = Packing { lengths: weights.clone(), documents: 1 };
            let lengths = Lengths::new("web", &packing);
            let mut counts = vec![0u64; weights.len()];
            (0..20_000).for_each(|document| counts[lengths.of(document)] += 1);
            for (count, weight) in counts.iter().zip(weights.values()) {
                let share = *weight as f64 / all as f64;
                let spread = (20_000.0 * share * (1.0 - share)).sqrt();
                prop_assert!((*count as f64 - 20_000.0 * share).abs() <= 5.0 * spread, "{:?}", counts);
            }
        }
    }

    #[test]
    fn blocks_cost_less_than_a_fiftieth_of_the_packs() {
        // A size distribution like web text: many short documents and a long tail.
        let key = Key::from_seed(7);
        let size = |number: u64| {
            let share = draw(key, Purpose::Generate, number) as f64 / 2f64.powi(64);
            (60.0 / (1.0001 - share)) as u64 + 1
        };
        let sizes: Vec<u64> = (0..(BLOCK as u64 * 5 / 2)).map(size).collect();
        let documents = documents(&sizes);
        for length in [512, 4096] {
            let packs = |block: &[Range<u64>]| FittedPacks::of(block, length, 256).packs();
            let (whole, blocks) =
                (packs(&documents), documents.chunks(BLOCK).map(packs).sum::<usize>());
            assert!(blocks * 50 <= whole * 51, "{blocks} {whole}");
        }
    }
}
