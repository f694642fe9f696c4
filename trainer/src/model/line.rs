//! Ranks of a line that share the chunks of a micro-batch: which has which chunks, and rows received from others.
//!
//! ```text
//! order of the tree   0  C-1 | 1  C-2 | 2  C-3 | ...        each rank has the same number of consecutive chunks in it
//! rank                0      | 1      | 2      | ...        so early chunks, with few keys, are paired with late ones
//! ```
//!
//! Everything that one rank sends another follows from the cut and the document boundaries, which all ranks know, so
//! lengths are never sent.

use std::collections::BTreeMap;
use std::ops::Range;

use kernels::Result;
use kernels::device;
use tch::{Kind, Tensor};

use super::{ZayaConfig, attended_pairs};

/// The other ranks of a line. All ranks call it in the same order: that of the computation.
pub trait AxisComm: Sync {
    /// This rank's index, from 0.
    fn place(&self) -> u64;

    /// The number of ranks.
    fn degree(&self) -> u64;

    /// Begins to send each other rank its entry of `give`, flat, of `kind` and on the device, and to receive `take`
    /// numbers from each. Entries of this rank are ignored.
    fn begin(
        &self,
        what: &'static str,
        give: &[Tensor],
        take: &[i64],
        kind: Kind,
    ) -> Result<Box<dyn PendingReceive + '_>>;
}

/// Data that other ranks have begun to send.
pub trait PendingReceive {
    /// Waits for it; returns it flat, by rank, empty for this rank.
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>>;
}

/// Which rank of a line has which chunks of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Chunks of the micro-batch.
    pub chunks: u64,
    /// Ranks of the line; divides the chunks.
    pub degree: u64,
    /// This rank's index on the line.
    pub place: u64,
}

impl Assignment {
    /// One rank that has all chunks.
    pub(super) fn alone(chunks: u64) -> Assignment {
        Assignment { chunks, degree: 1, place: 0 }
    }

    /// The index of chunk `chunk` in the order of the tree: 0, C-1, 1, C-2, ...
    pub fn leaf(self, chunk: u64) -> u64 {
        if 2 * chunk < self.chunks { 2 * chunk } else { 2 * (self.chunks - chunk) - 1 }
    }

    /// The chunk at an index of that order.
    pub fn chunk(self, leaf: u64) -> u64 {
        if leaf.is_multiple_of(2) { leaf / 2 } else { self.chunks - 1 - leaf / 2 }
    }

    /// The chunks of `place`, as indices in the order of the tree.
    pub fn leaves(self, place: u64) -> Range<u64> {
        let each = self.chunks / self.degree;
        place * each..(place + 1) * each
    }

    /// The rank that has a chunk.
    pub(crate) fn place_of(self, chunk: u64) -> u64 {
        self.leaf(chunk) / (self.chunks / self.degree)
    }

    /// The chunks of this rank, in the order of the sequence.
    pub fn own(self) -> Vec<u64> {
        let mut chunks: Vec<u64> = self.leaves(self.place).map(|leaf| self.chunk(leaf)).collect();
        chunks.sort_unstable();
        chunks
    }

    /// Pairs of a query and a key that each rank computes in all layers for a row of `length` tokens with documents
    /// that begin at `starts`.
    pub fn pairs(self, config: &ZayaConfig, starts: &[u32], length: u32) -> Vec<u64> {
        let width = length / self.chunks as u32;
        let before = |end: u32| {
            let starts: Vec<u32> = starts.iter().copied().filter(|start| *start < end).collect();
            attended_pairs(config, &starts, end)
        };
        let of = |chunk: u64| {
            let first = chunk as u32 * width;
            before(first + width) - before(first)
        };
        let place = |place| Assignment { place, ..self }.own().into_iter().map(of).sum();
        (0..self.degree).map(place).collect()
    }

    /// The runs of the consecutive `chunks` that `place` has, relative to the first of them.
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

/// Consecutive rows of a chunk, numbered the same on all ranks: in the order of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rows {
    pub(super) chunk: u64,
    pub(super) first: i64,
    pub(super) len: i64,
}

/// This rank's rows, followed by the rows of other ranks that it reads.
pub(super) struct Table {
    /// By rank: which of our rows it reads.
    give: Vec<Tensor>,
    /// By rank: how many of its rows we read.
    take: Vec<i64>,
    /// The table index of each run of received rows, by its first row.
    at: BTreeMap<i64, i64>,
    /// Rows of a chunk.
    size: i64,
    /// The chunks of this rank.
    chunks: Vec<u64>,
}

impl Table {
    /// For the rows that each rank `reads`: every run once, in the same order on all ranks. Chunks have `size` rows.
    pub(super) fn new(
        dealt: Assignment,
        size: i64,
        reads: impl Fn(u64) -> Vec<Rows>,
        on: tch::Device,
    ) -> Result<Table> {
        let chunks = dealt.own();
        let mut table = Table { give: vec![], take: vec![], at: BTreeMap::new(), size, chunks };
        let needed = reads(dealt.place);
        let mut end = table.chunks.len() as i64 * size;
        for place in 0..dealt.degree {
            let from = |rows: &&Rows, place| dealt.place_of(rows.chunk) == place;
            let other = place != dealt.place;
            let needed_there = if other { reads(place) } else { Vec::new() };
            let given = needed_there.iter().filter(|rows| from(rows, dealt.place));
            let given = given.flat_map(|rows| {
                let first = table.here(rows.chunk, rows.first);
                first..first + rows.len
            });
            let given = device::integers(on, &given.collect::<Vec<_>>())?;
            let begin = end;
            for rows in needed.iter().filter(|rows| other && from(rows, place)) {
                table.at.insert(rows.first, end);
                end += rows.len;
            }
            table.give.push(given);
            table.take.push(end - begin);
        }
        Ok(table)
    }

    /// The table index of a local row, or of the first row of a received run.
    pub(super) fn row(&self, chunk: u64, row: i64) -> i64 {
        match self.at.get(&row) {
            Some(at) => *at,
            None => self.here(chunk, row),
        }
    }

    fn here(&self, chunk: u64, row: i64) -> i64 {
        let at = self.chunks.partition_point(|held| *held < chunk) as i64;
        at * self.size + row - chunk as i64 * self.size
    }

    /// Begins to fetch the table, along `dim`; `tensor` has this rank's rows.
    pub(super) fn fetch<'a>(
        &self,
        line: Option<&'a dyn AxisComm>,
        tensor: &Tensor,
        dim: i64,
    ) -> Result<PendingTable<'a>> {
        let (tensor, mut shape) = (tensor.shallow_clone(), tensor.size());
        let mut parts = Vec::new();
        let Some(line) = line else { return Ok(PendingTable { tensor, dim, parts, coming: None }) };
        let row = tensor.numel() as i64 / shape[dim as usize].max(1);
        let give = self.give.iter().map(|rows| tensor.f_index_select(dim, rows)?.f_reshape([-1]));
        let give = give.collect::<std::result::Result<Vec<_>, _>>()?;
        let take: Vec<i64> = self.take.iter().map(|rows| rows * row).collect();
        for rows in &self.take {
            shape[dim as usize] = *rows;
            parts.push(shape.clone());
        }
        let coming = line.begin("rows next to a chunk", &give, &take, tensor.kind())?;
        Ok(PendingTable { tensor, dim, parts, coming: Some(coming) })
    }
}

/// A table that is being fetched.
pub(super) struct PendingTable<'a> {
    tensor: Tensor,
    dim: i64,
    /// The shape of the rows from each rank.
    parts: Vec<Vec<i64>>,
    coming: Option<Box<dyn PendingReceive + 'a>>,
}

impl PendingTable<'_> {
    /// Waits for the table. Empty rows are allowed: a shard may have nothing in one half of the values.
    pub(super) fn wait(self) -> Result<Tensor> {
        let Some(coming) = self.coming else { return Ok(self.tensor) };
        let mut all = vec![self.tensor];
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
            let all = |place| Assignment { chunks: each * degree, degree, place };
            let mut seen = Vec::new();
            for place in 0..degree {
                let dealt = all(place);
                let chunks = dealt.own();
                prop_assert_eq!(chunks.len() as u64, each);
                for chunk in &chunks {
                    prop_assert_eq!(dealt.place_of(*chunk), place);
                    prop_assert_eq!(dealt.chunk(dealt.leaf(*chunk)), *chunk);
                    prop_assert!(dealt.leaves(place).contains(&dealt.leaf(*chunk)));
                }
                // With zig-zag assignment all ranks have equally many pairs.
                let (config, length) = (ZayaConfig::preset("zaya1-nano").unwrap(), 3 * each * degree);
                let pairs = dealt.pairs(&config, &[0], length as u32);
                // Three queries of a chunk see all keys of earlier chunks, and six of their own, in each of six layers.
                let own = chunks.iter().map(|chunk| 9 * chunk + 6).sum::<u64>();
                prop_assert_eq!(pairs[place as usize], 6 * own);
                // The pairs of several documents add up, wherever chunks begin.
                let starts: Vec<u32> = (0..length as u32).filter(|at| at % 5 == 0).collect();
                let all = dealt.pairs(&config, &starts, length as u32).iter().sum::<u64>();
                prop_assert_eq!(all, attended_pairs(&config, &starts, length as u32));
                prop_assert_eq!(pairs.iter().sum::<u64>(), 6 * length * (length + 1) / 2);
                prop_assert!(each % 2 > 0 || pairs.iter().all(|chunks| *chunks == pairs[0]));
                let runs = dealt.runs(1..each * degree, place);
                let run: Vec<u64> = runs.into_iter().flatten().map(|chunk| chunk + 1).collect();
                prop_assert_eq!(run, chunks.iter().copied().filter(|chunks| *chunks > 0).collect::<Vec<_>>());
                seen.extend(chunks);
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..each * degree).collect::<Vec<_>>());
        }
    }
}
