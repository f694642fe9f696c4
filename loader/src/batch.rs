//! A step's batch, or a rank's part of it.

use std::ops::Range;

use contract::{Digest, Hasher, Result};
use mixer::{Plan, SampleSpec, StepSpec};
use store::Split;

use crate::assemble::{Row, Scratch};
use crate::column::Column;
use crate::{RankSlice, Stores};

/// Rows of `seq_len` tokens, row after row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The step, from 1; 0 for validation.
    pub step: u64,
    /// The global sample number of the first row here.
    pub first_sample: u64,
    /// Rows in a micro-batch; a rank's rows are whole micro-batches, not always neighbours.
    pub micro_batch: u64,
    /// Rows here.
    pub rows: u64,
    /// Tokens in a row, padding included.
    pub seq_len: u32,
    /// `rows * seq_len` token ids; 0 in padding.
    pub tokens: Column<i32>,
    /// The token that follows each one in its document, be it in this row or past its end; 0 where there is none.
    pub labels: Column<i32>,
    /// Positions, from 0 at every boundary.
    pub positions: Column<i32>,
    /// 1 where the label counts, 0 at a document's last token and in padding.
    pub mask: Column<u8>,
    /// Per row: where a document, or what is in view of it, begins. The first is 0; padding has its own.
    pub boundaries: Vec<Vec<u32>>,
    /// Per row: what it is.
    pub samples: Vec<SampleSpec>,
    /// Per row: the digest of its tokens, positions, boundaries and mask.
    pub sequences: Vec<Digest>,
    /// Labels that count, over all rows here.
    pub label_count: u64,
}

impl Batch {
    /// The digest of the rows here, in order. For [`RankSlice::WHOLE`] this is the step's digest; ranks join theirs,
    /// in the order of micro-batches, with [`step_digest`].
    pub fn digest(&self) -> Digest {
        step_digest([self.sequences.as_slice()])
    }

    /// The rows' part of `column`: `row(&batch.tokens, 3)`.
    pub fn row<'a, T>(&self, column: &'a [T], row: u64) -> &'a [T] {
        let width = self.seq_len as usize;
        &column[row as usize * width..(row as usize + 1) * width]
    }

    /// Hides a run of text of a row, as an amendment that bans its document does; returns how many labels it had.
    pub fn hide(&mut self, row: u64, place: Range<u32>) -> u64 {
        let (width, number) = (self.seq_len as usize, row as usize);
        let at = number * width..(number + 1) * width;
        let mut row = Row {
            tokens: &mut self.tokens[at.clone()],
            labels: &mut self.labels[at.clone()],
            positions: &mut self.positions[at.clone()],
            mask: &mut self.mask[at],
        };
        let count = |row: &Row<'_>| row.mask.iter().map(|&label| u64::from(label)).sum::<u64>();
        let before = count(&row);
        row.blank(&place);
        let hidden = before - count(&row);
        self.sequences[number] = row.digest(&self.boundaries[number]);
        self.label_count -= hidden;
        hidden
    }

    /// Fills a batch with `samples`, which all have `seq_len` tokens.
    pub(crate) fn assemble<'a>(
        head: Head,
        samples: Vec<SampleSpec>,
        split: Split,
        stores: &Stores,
        name: impl Fn(&SampleSpec) -> &'a str,
    ) -> Result<Self> {
        let width = head.seq_len as usize;
        let size = samples.len() * width;
        let (words, bytes) = stores.pools();
        let (mut tokens, mut labels) = (words.take(size), words.take(size));
        let (mut positions, mut mask) = (words.take(size), bytes.take(size));
        let mut boundaries = Vec::with_capacity(samples.len());
        let mut sequences = Vec::with_capacity(samples.len());
        let mut scratch = Scratch::default();
        for (number, sample) in samples.iter().enumerate() {
            let at = number * width..(number + 1) * width;
            let mut row = Row {
                tokens: &mut tokens[at.clone()],
                labels: &mut labels[at.clone()],
                positions: &mut positions[at.clone()],
                mask: &mut mask[at],
            };
            let found = row.fill(stores.stream(name(sample), split)?, sample, &mut scratch)?;
            sequences.push(row.digest(&found));
            boundaries.push(found);
        }
        let label_count = mask.iter().map(|&label| u64::from(label)).sum();
        let Head { step, first_sample, micro_batch, seq_len } = head;
        let rows = samples.len() as u64;
        Ok(Batch {
            step,
            first_sample,
            micro_batch,
            rows,
            seq_len,
            tokens,
            labels,
            positions,
            mask,
            boundaries,
            samples,
            sequences,
            label_count,
        })
    }
}

/// What a batch is, before it is filled.
pub(crate) struct Head {
    pub(crate) step: u64,
    pub(crate) first_sample: u64,
    pub(crate) micro_batch: u64,
    pub(crate) seq_len: u32,
}

/// The part of step `step` that is `slice`'s.
pub fn batch(plan: &Plan, stores: &Stores, step: u64, slice: RankSlice) -> Result<Batch> {
    rows(plan, stores, step, slice.rows(&plan.step(step)?))
}

/// Rows `rows` of step `step`, counted from 0: to look at a few.
pub fn rows(
    plan: &Plan,
    stores: &Stores,
    step: u64,
    rows: impl IntoIterator<Item = u64>,
) -> Result<Batch> {
    let spec = plan.step(step)?;
    let samples = rows.into_iter().map(|row| plan.sample(spec.first_sample + row));
    let samples = samples.collect::<Result<Vec<_>>>()?;
    let first_sample = samples.first().map_or(spec.first_sample, |sample| sample.sample);
    let StepSpec { micro_batch, seq_len, .. } = spec;
    let head = Head { step, first_sample, micro_batch, seq_len };
    let name = |sample: &SampleSpec| plan.sources()[sample.source].name.as_str();
    Batch::assemble(head, samples, Split::Train, stores, name)
}

/// A step's digest from the digests of its sequences, in order, in whatever parts the ranks hold them.
pub fn step_digest<'a>(parts: impl IntoIterator<Item = &'a [Digest]> + Clone) -> Digest {
    let count = parts.clone().into_iter().map(|part| part.len() as u64).sum();
    let mut hasher = Hasher::new();
    hasher.tag("step.v1").u64(count);
    for digest in parts.into_iter().flatten() {
        hasher.digest(*digest);
    }
    hasher.finish()
}
