//! Places of a line of processes that share the chunks of a micro-batch: who has which, and rows of others beside one's own.
//!
//! ```text
//! order of the tree   0  C-1 | 1  C-2 | 2  C-3 | ...        a place has as many neighbours in it as any other
//! place               0      | 1      | 2      | ...        so the first chunks, of few keys, are dealt with the last ones
//! ```
//!
//! Everything that one place sends another follows from the cut and from where documents begin, which all of them know: no
//! lengths travel.

use std::collections::BTreeMap;
use std::ops::Range;

use kernels::Result;
use kernels::device;
use tch::{Kind, Tensor};

use super::causal_pairs;

/// The other places of a line, as one of them reaches them. All call it in one order: that of the computation.
pub trait Line: Sync {
    /// Which one this is, from 0.
    fn place(&self) -> u64;

    /// How many there are.
    fn degree(&self) -> u64;

    /// Begins to hand each other place the numbers in its place of `give`, flat, of `kind` and on the device, and to take from
    /// each as many as `take` says. What is this place's own is passed over.
    fn begin(
        &self,
        what: &'static str,
        give: &[Tensor],
        take: &[i64],
        kind: Kind,
    ) -> Result<Box<dyn Coming + '_>>;
}

/// What other places have begun to hand over.
pub trait Coming {
    /// By place, flat, once it is here; of this place nothing.
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>>;
}

/// Which place of a line has which chunks of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dealt {
    /// Chunks of the micro-batch.
    pub chunks: u64,
    /// Places, which divide them.
    pub degree: u64,
    /// This one.
    pub place: u64,
}

impl Dealt {
    /// One place that has all.
    pub(super) fn alone(chunks: u64) -> Dealt {
        Dealt { chunks, degree: 1, place: 0 }
    }

    /// Where chunk number `chunk` stands in the order of the tree: 0, C-1, 1, C-2, ...
    pub fn leaf(self, chunk: u64) -> u64 {
        if 2 * chunk < self.chunks { 2 * chunk } else { 2 * (self.chunks - chunk) - 1 }
    }

    /// Which chunk stands there.
    pub fn chunk(self, leaf: u64) -> u64 {
        if leaf.is_multiple_of(2) { leaf / 2 } else { self.chunks - 1 - leaf / 2 }
    }

    /// What `place` has, in the order of the tree.
    pub fn leaves(self, place: u64) -> Range<u64> {
        let each = self.chunks / self.degree;
        place * each..(place + 1) * each
    }

    /// Who has a chunk.
    pub(crate) fn place_of(self, chunk: u64) -> u64 {
        self.leaf(chunk) / (self.chunks / self.degree)
    }

    /// The chunks of this place, in the order of the sequence.
    pub fn own(self) -> Vec<u64> {
        let mut own: Vec<u64> = self.leaves(self.place).map(|leaf| self.chunk(leaf)).collect();
        own.sort_unstable();
        own
    }

    /// Pairs of a query and a key that each place computes of a document as long as all chunks, of `width` tokens each.
    pub fn pairs(self, width: u64) -> Vec<u64> {
        let of = |chunk: u64| width * width * chunk + width * (width + 1) / 2;
        let place = |place| Dealt { place, ..self }.own().into_iter().map(of).sum();
        (0..self.degree).map(place).collect()
    }

    /// The same of a row of `length` tokens with documents that begin at `starts`.
    pub(crate) fn pairs_of(self, starts: &[u32], length: u32) -> Vec<u64> {
        let width = length / self.chunks as u32;
        let before = |end: u32| {
            let starts: Vec<u32> = starts.iter().copied().filter(|start| *start < end).collect();
            causal_pairs(&starts, end)
        };
        let of = |chunk: u64| {
            let first = chunk as u32 * width;
            before(first + width) - before(first)
        };
        let place = |place| Dealt { place, ..self }.own().into_iter().map(of).sum();
        (0..self.degree).map(place).collect()
    }

    /// Of `chunks`, consecutive ones, the runs that `place` has, counted from the first of them.
    pub(super) fn runs(self, chunks: Range<u64>, place: u64) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for chunk in chunks.clone().filter(|chunk| self.place_of(*chunk) == place) {
            let at = chunk - chunks.start;
            match runs.last_mut().filter(|run| run.end == at) {
                Some(run) => run.end += 1,
                None => runs.push(at..at + 1),
            }
        }
        runs
    }
}

/// Consecutive rows of a chunk, as all places number them: in the order of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rows {
    pub(super) chunk: u64,
    pub(super) first: i64,
    pub(super) len: i64,
}

/// Rows that all places of a line together send for one micro-batch, in each layer and direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SharedRows {
    /// Beside chunks.
    pub(super) beside: u64,
    /// Of earlier keys.
    pub(super) earlier: u64,
    /// Blocks of gradients of keys.
    pub(super) sums: u64,
    /// States of linear attention, one for each chunk and sequence.
    pub(super) states: u64,
}

/// This place's rows, and below them those of other places that it reads.
pub(super) struct Table {
    /// By place: which of our rows it reads.
    give: Vec<Tensor>,
    /// By place: how many we read of it.
    take: Vec<i64>,
    /// Where rows of others come to lie, by their first one.
    at: BTreeMap<i64, i64>,
    /// Rows of a chunk.
    size: i64,
    own: Vec<u64>,
}

impl Table {
    /// Of the rows that `reads` says each place reads, every run once and in an order that all places come to; chunks have
    /// `size` rows.
    pub(super) fn new(
        dealt: Dealt,
        size: i64,
        reads: impl Fn(u64) -> Vec<Rows>,
        on: tch::Device,
    ) -> Result<Table> {
        let own = dealt.own();
        let mut table = Table { give: vec![], take: vec![], at: BTreeMap::new(), size, own };
        let mine = reads(dealt.place);
        let mut end = table.own.len() as i64 * size;
        for place in 0..dealt.degree {
            let from = |rows: &&Rows, place| dealt.place_of(rows.chunk) == place;
            let other = place != dealt.place;
            let theirs = if other { reads(place) } else { Vec::new() };
            let given = theirs.iter().filter(|rows| from(rows, dealt.place));
            let given = given.flat_map(|rows| {
                let first = table.here(rows.chunk, rows.first);
                first..first + rows.len
            });
            let given = device::integers(on, &given.collect::<Vec<_>>())?;
            let begin = end;
            for rows in mine.iter().filter(|rows| other && from(rows, place)) {
                table.at.insert(rows.first, end);
                end += rows.len;
            }
            table.give.push(given);
            table.take.push(end - begin);
        }
        Ok(table)
    }

    /// Where a row lies: of our own, or the first of a run of another place's.
    pub(super) fn row(&self, chunk: u64, row: i64) -> i64 {
        match self.at.get(&row) {
            Some(at) => *at,
            None => self.here(chunk, row),
        }
    }

    fn here(&self, chunk: u64, row: i64) -> i64 {
        let at = self.own.partition_point(|own| *own < chunk) as i64;
        at * self.size + row - chunk as i64 * self.size
    }

    /// Begins to bring together what `own` are this place's rows of, along `dim`.
    pub(super) fn fetch<'a>(
        &self,
        line: Option<&'a dyn Line>,
        own: &Tensor,
        dim: i64,
    ) -> Result<Fetched<'a>> {
        let (own, mut shape) = (own.shallow_clone(), own.size());
        let mut parts = Vec::new();
        let Some(line) = line else { return Ok(Fetched { own, dim, parts, coming: None }) };
        let row = own.numel() as i64 / shape[dim as usize].max(1);
        let give = self.give.iter().map(|rows| own.f_index_select(dim, rows)?.f_reshape([-1]));
        let give = give.collect::<std::result::Result<Vec<_>, _>>()?;
        let take: Vec<i64> = self.take.iter().map(|rows| rows * row).collect();
        for rows in &self.take {
            shape[dim as usize] = *rows;
            parts.push(shape.clone());
        }
        let coming = line.begin("rows beside a chunk", &give, &take, own.kind())?;
        Ok(Fetched { own, dim, parts, coming: Some(coming) })
    }
}

/// A table under way.
pub(super) struct Fetched<'a> {
    own: Tensor,
    dim: i64,
    /// The shape of what comes from each place.
    parts: Vec<Vec<i64>>,
    coming: Option<Box<dyn Coming + 'a>>,
}

impl Fetched<'_> {
    /// The table, once all of it is here. Rows without numbers count: a shard may have none of one half of the values.
    pub(super) fn wait(self) -> Result<Tensor> {
        let Some(coming) = self.coming else { return Ok(self.own) };
        let mut all = vec![self.own];
        for (part, shape) in coming.wait()?.into_iter().zip(&self.parts) {
            if shape[self.dim as usize] > 0 {
                all.push(part.f_view(shape.as_slice())?);
            }
        }
        Ok(Tensor::f_cat(&all, self.dim)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn places_have_equal_parts_that_stand_together_in_the_tree(each in 1u64..9, degree in 1u64..6) {
            let all = |place| Dealt { chunks: each * degree, degree, place };
            let mut seen = Vec::new();
            for place in 0..degree {
                let dealt = all(place);
                let own = dealt.own();
                prop_assert_eq!(own.len() as u64, each);
                for chunk in &own {
                    prop_assert_eq!(dealt.place_of(*chunk), place);
                    prop_assert_eq!(dealt.chunk(dealt.leaf(*chunk)), *chunk);
                    prop_assert!(dealt.leaves(place).contains(&dealt.leaf(*chunk)));
                }
                // Under zig-zag all have as many pairs of a query and a key.
                let (pairs, length) = (dealt.pairs(3), 3 * each * degree);
                prop_assert_eq!(&dealt.pairs_of(&[0], length as u32), &pairs);
                // Pairs of several documents are those of each, wherever chunks begin.
                let starts: Vec<u32> = (0..length as u32).filter(|at| at % 5 == 0).collect();
                let all = dealt.pairs_of(&starts, length as u32).iter().sum::<u64>();
                prop_assert_eq!(all, causal_pairs(&starts, length as u32));
                prop_assert_eq!(pairs.iter().sum::<u64>(), length * (length + 1) / 2);
                prop_assert!(each % 2 > 0 || pairs.iter().all(|own| *own == pairs[0]));
                let runs = dealt.runs(1..each * degree, place);
                let run: Vec<u64> = runs.into_iter().flatten().map(|chunk| chunk + 1).collect();
                prop_assert_eq!(run, own.iter().copied().filter(|own| *own > 0).collect::<Vec<_>>());
                seen.extend(own);
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..each * degree).collect::<Vec<_>>());
        }
    }
}
