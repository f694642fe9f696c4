//! The batch of a step, or a rank's part.

use std::ops::Range;
use std::sync::Arc;

use contract::{Digest, Hasher, Result};
use mixer::{DataPlan, SampleSpec, StepSpec};
use store::Split;

use crate::assemble::{Row, Scratch};
use crate::memory::{AnyBatchMemory, BatchMemory, Columns, ColumnsMut};
use crate::{RankSlice, Stores};

/// Rows of `seq_len` tokens, row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The step, from 1; 0 for validation.
    pub step: u64,
    /// The global sample number of the first row here.
    pub first_sample: u64,
    /// Rows in a micro-batch. A rank's rows are whole micro-batches, not always consecutive ones.
    pub micro_batch: u64,
    /// Rows here.
    pub rows: u64,
    /// Tokens in a row, padding included.
    pub seq_len: u32,
    /// `rows * seq_len` of each column.
    memory: AnyBatchMemory,
    /// For each row: where documents begin, or the part of one in this row. The first is 0; padding has its own.
    pub boundaries: Vec<Vec<u32>>,
    /// For each row: its sample.
    pub samples: Vec<SampleSpec>,
    /// For each row: the digest of its tokens, positions, boundaries and mask.
    pub sequences: Vec<Digest>,
    /// Labels with mask 1, over all rows here.
    pub label_count: u64,
    /// For each row: what the losses of its labels are multiplied by in the gradient; empty if each is 1.
    pub weights: Vec<f32>,
}

impl Batch {
    /// The digest of the rows here, in order. For [`RankSlice::WHOLE`] this is the step's digest; ranks combine theirs,
    /// in the order of micro-batches, by [`step_digest`].
    pub fn digest(&self) -> Digest {
        step_digest([self.sequences.as_slice()])
    }

    /// The columns, row after row.
    pub fn columns(&self) -> Columns<'_> {
        self.memory.columns()
    }

    /// The same, writable; an error if a device still reads them and waiting fails. Digests are not updated.
    pub fn columns_mut(&mut self) -> Result<ColumnsMut<'_>> {
        self.memory.columns_mut()
    }

    /// The memory of the columns if its type is `M`, the type that the caller passed in.
    pub fn memory_mut<M: BatchMemory>(&mut self) -> Option<&mut M> {
        self.memory.as_mut()
    }

    /// The part of `column` that belongs to `row`: `row(batch.columns().tokens, 3)`.
    pub fn row<'a, T>(&self, column: &'a [T], row: u64) -> &'a [T] {
        let width = self.seq_len as usize;
        &column[row as usize * width..(row as usize + 1) * width]
    }

    /// Hides a range of a row, as an amendment that bans its document does; returns how many labels it had.
    pub fn hide(&mut self, row: u64, place: Range<u32>) -> Result<u64> {
        self.without_labels(row, |row| row.blank(&place))
    }

    /// Masks the labels of a range of a row; the text stays visible to other tokens. Returns how many labels it had.
    pub fn unlabel(&mut self, row: u64, place: Range<u32>) -> Result<u64> {
        self.without_labels(row, |row| row.mask[place.start as usize..place.end as usize].fill(0))
    }

    fn without_labels(&mut self, row: u64, take: impl FnOnce(&mut Row<'_>)) -> Result<u64> {
        let (width, number) = (self.seq_len as usize, row as usize);
        let mut columns = self.memory.columns_mut()?;
        let mut row = Row::of(&mut columns, number * width..(number + 1) * width);
        let count = |row: &Row<'_>| row.mask.iter().map(|&label| u64::from(label)).sum::<u64>();
        let before = count(&row);
        take(&mut row);
        let hidden = before - count(&row);
        let weight = self.samples[number].loss_weight();
        self.sequences[number] = row.digest(&self.boundaries[number], weight);
        self.label_count -= hidden;
        Ok(hidden)
    }

    /// One sample of the training split.
    pub(crate) fn of_sample(plan: &DataPlan, stores: &Stores, sample: SampleSpec) -> Result<Self> {
        let (first_sample, seq_len) = (sample.sample, sample.seq_len);
        let step = plan.step_of(first_sample)?;
        let (split, samples) = (Split::Train, vec![sample]);
        let head = BatchHeader { step, first_sample, micro_batch: 1, seq_len, split, samples };
        let memory = stores.memory(head.tokens());
        Batch::assemble(head, stores, memory, |sample| plan.sources()[sample.source].name.as_str())
    }

    /// Fills `memory` with the batch described by `head`.
    pub(crate) fn assemble<'a>(
        head: BatchHeader,
        stores: &Stores,
        memory: Box<dyn BatchMemory>,
        name: impl Fn(&SampleSpec) -> &'a str,
    ) -> Result<Self> {
        let mut memory = AnyBatchMemory::new(memory, head.tokens())?;
        let BatchHeader { step, first_sample, micro_batch, seq_len, split, samples } = head;
        let width = seq_len as usize;
        let mut columns = memory.columns_mut()?;
        let mut boundaries = Vec::with_capacity(samples.len());
        let mut sequences = Vec::with_capacity(samples.len());
        let (held, mut scratch) = (stores.held_tokens(), Scratch::default());
        for (number, sample) in samples.iter().enumerate() {
            let mut row = Row::of(&mut columns, number * width..(number + 1) * width);
            let stream = stores.stream(name(sample), split)?;
            let found = row.fill(stream, sample, held, &mut scratch)?;
            sequences.push(row.digest(&found, sample.loss_weight()));
            boundaries.push(found);
        }
        let label_count = columns.mask.iter().map(|&label| u64::from(label)).sum();
        let mut weights: Vec<f32> = samples.iter().map(SampleSpec::loss_weight).collect();
        if weights.iter().all(|weight| *weight == 1.0) {
            weights.clear();
        }
        let rows = samples.len() as u64;
        Ok(Batch {
            step,
            first_sample,
            micro_batch,
            rows,
            seq_len,
            memory,
            boundaries,
            samples,
            sequences,
            label_count,
            weights,
        })
    }
}

/// The description of a batch to fill.
pub(crate) struct BatchHeader {
    pub(crate) step: u64,
    pub(crate) first_sample: u64,
    pub(crate) micro_batch: u64,
    pub(crate) seq_len: u32,
    pub(crate) split: Split,
    /// All with `seq_len` tokens.
    pub(crate) samples: Vec<SampleSpec>,
}

impl BatchHeader {
    /// Tokens of all its rows.
    pub(crate) fn tokens(&self) -> usize {
        self.samples.len() * self.seq_len as usize
    }
}

/// The rows of `slice` in step `step`.
pub fn batch(plan: &DataPlan, stores: &Stores, step: u64, slice: RankSlice) -> Result<Batch> {
    batch_in(plan, stores, step, slice, |tokens| Ok(stores.memory(tokens)))
}

/// The same, in memory that `memory` allocates for a number of tokens.
pub fn batch_in(
    plan: &DataPlan,
    stores: &Stores,
    step: u64,
    slice: RankSlice,
    memory: impl FnOnce(usize) -> Result<Box<dyn BatchMemory>>,
) -> Result<Batch> {
    rows_in(plan, stores, step, slice.rows(&plan.step(step)?), memory)
}

/// Rows `rows` of step `step`, numbered from 0: for inspection.
pub fn rows(
    plan: &DataPlan,
    stores: &Stores,
    step: u64,
    rows: impl IntoIterator<Item = u64>,
) -> Result<Batch> {
    rows_in(plan, stores, step, rows, |tokens| Ok(stores.memory(tokens)))
}

/// The summary of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSummary {
    /// The step, counted from 1.
    pub step: u64,
    /// Its data digest.
    pub digest: Digest,
    /// Its sequences, in order.
    pub rows: Vec<RowLabels>,
}

/// The labels of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLabels {
    /// The index of its source in the plan.
    pub source: usize,
    /// Its labels.
    pub labels: u64,
}

/// Rows of a step that are read together to be summarized.
pub(crate) struct Piece {
    plan: Arc<DataPlan>,
    step: u64,
    rows: Range<u64>,
    is_last: bool,
}

/// What a piece comes to.
pub(crate) struct PieceSummary {
    step: u64,
    is_last: bool,
    sequences: Vec<Digest>,
    rows: Vec<RowLabels>,
}

impl Piece {
    /// The pieces of a step, in order: each of at most `held` tokens (at least one row), however large the step is.
    pub(crate) fn all(
        plan: Arc<DataPlan>,
        step: u64,
        held: u64,
    ) -> Result<impl Iterator<Item = Piece>> {
        let StepSpec { batch, seq_len, .. } = plan.step(step)?;
        let rows = (held / u64::from(seq_len)).max(1);
        let count = batch.div_ceil(rows).max(1);
        Ok((0..count).map(move |number| {
            let rows = number * rows..batch.min((number + 1).saturating_mul(rows));
            Piece { plan: Arc::clone(&plan), step, rows, is_last: number + 1 == count }
        }))
    }

    /// Summarizes it, in memory that `memory` allocates for a number of tokens.
    pub(crate) fn summary(
        self,
        stores: &Stores,
        memory: impl FnOnce(usize) -> Result<Box<dyn BatchMemory>>,
    ) -> Result<PieceSummary> {
        let Piece { plan, step, rows, is_last } = self;
        let batch = rows_in(&plan, stores, step, rows, memory)?;
        let mask = batch.columns().mask;
        let rows = (0..).zip(&batch.samples).map(|(row, sample)| {
            let labels = batch.row(mask, row).iter().map(|label| u64::from(*label)).sum();
            RowLabels { source: sample.source, labels }
        });
        let rows = rows.collect();
        Ok(PieceSummary { step, is_last, sequences: batch.sequences, rows })
    }
}

impl PieceSummary {
    /// Adds the next piece of a step to those before it; the summary of the step with the last one.
    pub(crate) fn join(open: &mut Option<PieceSummary>, next: PieceSummary) -> Option<StepSummary> {
        let all = match open {
            None => open.insert(next),
            Some(all) => {
                all.is_last = next.is_last;
                all.sequences.extend(next.sequences);
                all.rows.extend(next.rows);
                all
            }
        };
        if !all.is_last {
            return None;
        }
        let PieceSummary { step, sequences, rows, is_last: _ } = open.take()?;
        Some(StepSummary { step, digest: step_digest([sequences.as_slice()]), rows })
    }
}

fn rows_in(
    plan: &DataPlan,
    stores: &Stores,
    step: u64,
    rows: impl IntoIterator<Item = u64>,
    memory: impl FnOnce(usize) -> Result<Box<dyn BatchMemory>>,
) -> Result<Batch> {
    let spec = plan.step(step)?;
    let samples = rows.into_iter().map(|row| plan.sample(spec.first_sample + row));
    let samples = samples.collect::<Result<Vec<_>>>()?;
    let first_sample = samples.first().map_or(spec.first_sample, |sample| sample.sample);
    let StepSpec { micro_batch, seq_len, .. } = spec;
    let head =
        BatchHeader { step, first_sample, micro_batch, seq_len, split: Split::Train, samples };
    let memory = memory(head.tokens())?;
    Batch::assemble(head, stores, memory, |sample| plan.sources()[sample.source].name.as_str())
}

/// A step's digest from the digests of its sequences, in order, however ranks share them.
pub fn step_digest<'a>(parts: impl IntoIterator<Item = &'a [Digest]> + Clone) -> Digest {
    let count = parts.clone().into_iter().map(|part| part.len() as u64).sum();
    let mut hasher = Hasher::new();
    hasher.tag("step.v1").u64(count);
    for digest in parts.into_iter().flatten() {
        hasher.digest(*digest);
    }
    hasher.finish()
}
