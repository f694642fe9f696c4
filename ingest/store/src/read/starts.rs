//! Where documents begin: a sparse index in memory, the rest read from the file by position.
//!
//! The whole file is read once, checked by its digest and thinned to every 512th start; a window then needs a page of
//! 512 starts, which is read again unless it is among those used last. So memory is a fraction of a byte per document,
//! and the units of a batch stay in memory even in a store of ten trillion tokens. Starts are counted in the shard.

use std::ops::Range;
use std::sync::Arc;

use super::column::ColumnFile;
use crate::ShardRecord;
use crate::folder::damaged;
use crate::rows::{WIDTH, pieces, words};
use contract::Result;
use contract::digest::Digest;

/// One start in this many is kept, unless the shard is small.
const STRIDE: u64 = 512;
/// Shards of at most this many documents keep all starts.
const SMALL: u64 = 4096;
/// Bytes that Arrow adds to the few starts of a small shard; for a large one, it adds less than the starts themselves.
const LIBRARY: u64 = 64 << 10;

/// The index of one shard's starts.
pub(super) struct StartIndex {
    stride: u64,
    rows: u64,
    samples: Vec<u64>,
}

impl StartIndex {
    /// Reads, checks and thins the file.
    pub(super) fn load(file: &ColumnFile, shard: &ShardRecord) -> Result<Self> {
        if shard.start_file.bytes > shard.documents * 2 * WIDTH + LIBRARY {
            return Err(damaged(file.location(), "document starts contradict the manifest")
                .found(format!("{} bytes", shard.start_file.bytes))
                .wanted(format!("those of {} starts", shard.documents)));
        }
        let bytes = file.read_all()?;
        let found = Digest::of_bytes(&bytes);
        if found != shard.start_file.digest {
            return Err(damaged(file.location(), "document starts do not match their digest")
                .found(found)
                .wanted(shard.start_file.digest));
        }
        let rows = shard.documents;
        let stride = if rows <= SMALL { 1 } else { STRIDE };
        let mut thinned = Thinned { stride, row: 0, last: 0, samples: Vec::new() };
        let ordered = pieces(0..rows).all(|(part, offset)| {
            let from = offset as usize;
            let piece = bytes.get(from..from + ((part.end - part.start) * WIDTH) as usize);
            piece.is_some_and(|piece| thinned.add(piece))
        });
        let end = shard.tokens;
        let begins = thinned.samples.first() == Some(&0);
        if !ordered || !begins || thinned.last >= end {
            return Err(damaged(file.location(), "document starts contradict the manifest")
                .found(format!("starts up to token {}", thinned.last))
                .wanted(format!("{rows} starts below token {end}, in order")));
        }
        Ok(StartIndex { stride, rows, samples: thinned.samples })
    }

    /// Its memory in bytes.
    pub(super) fn weight(&self) -> u64 {
        ((self.samples.len() + 16) as u64) * WIDTH
    }

    /// Rows that include every start in `tokens`, and few others.
    pub(super) fn rows_near(&self, tokens: &Range<u64>) -> Range<u64> {
        let below = |token: u64| self.samples.partition_point(|start| *start < token) as u64;
        let first = below(tokens.start).saturating_sub(1) * self.stride;
        first..(below(tokens.end) * self.stride).clamp(first, self.rows)
    }

    /// Calls `each` with the starts of `rows`, in order; `page` returns those that are not in memory.
    pub(super) fn visit(
        &self,
        rows: Range<u64>,
        page: impl Fn(Range<u64>) -> Result<Arc<[u64]>>,
        mut each: impl FnMut(&[u64]),
    ) -> Result<()> {
        if self.stride == 1 {
            each(&self.samples[rows.start as usize..rows.end as usize]);
            return Ok(());
        }
        for first in rows.clone().step_by(self.stride as usize) {
            each(&page(first..rows.end.min(first + self.stride))?);
        }
        Ok(())
    }
}

/// Reads the starts of `rows`.
pub(super) fn read_rows(file: &ColumnFile, rows: Range<u64>) -> Result<Arc<[u64]>> {
    let mut starts = Vec::with_capacity((rows.end - rows.start) as usize);
    for (part, offset) in pieces(rows) {
        let mut bytes = vec![0; ((part.end - part.start) * WIDTH) as usize];
        file.read(&mut bytes, offset)?;
        starts.extend(words(&bytes));
    }
    Ok(starts.into())
}

/// The samples so far.
struct Thinned {
    stride: u64,
    row: u64,
    last: u64,
    samples: Vec<u64>,
}

impl Thinned {
    /// Adds the samples of one run; false if its starts are not ascending.
    fn add(&mut self, bytes: &[u8]) -> bool {
        let mut ordered = true;
        for start in words(bytes) {
            ordered &= start >= self.last;
            self.last = start;
            if self.row.is_multiple_of(self.stride) {
                self.samples.push(start);
            }
            self.row += 1;
        }
        ordered
    }
}
