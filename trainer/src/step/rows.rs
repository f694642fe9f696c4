//! The micro-batches of a batch: the model's input for each, and its name in a fault.

use std::ops::Range;

use loader::Batch;

use crate::model::MicroBatchInput;
use crate::spec::RunSpec;

/// The micro-batches of a batch.
pub(super) fn inputs(batch: &Batch) -> impl Iterator<Item = MicroBatchInput<'_>> {
    (0..batch.rows / batch.micro_batch).map(|micro_batch| input(batch, micro_batch))
}

/// The input of micro-batch `micro_batch` of a batch.
pub(super) fn input(batch: &Batch, micro_batch: u64) -> MicroBatchInput<'_> {
    rows(batch, micro_batch * batch.micro_batch..(micro_batch + 1) * batch.micro_batch)
}

/// Some rows of a batch, as a micro-batch.
pub fn rows(batch: &Batch, rows: Range<u64>) -> MicroBatchInput<'_> {
    let (first, width) = (rows.start as usize, batch.seq_len as usize);
    let rows = (rows.end - rows.start) as usize;
    let (columns, at) = (batch.columns(), first * width..(first + rows) * width);
    MicroBatchInput {
        tokens: &columns.tokens[at.clone()],
        labels: &columns.labels[at.clone()],
        positions: &columns.positions[at.clone()],
        mask: &columns.mask[at],
        boundaries: &batch.boundaries[first..first + rows],
        weights: batch.weights.get(first..first + rows).unwrap_or_default(),
        rows,
        seq_len: width,
    }
}

/// A micro-batch's name in a fault: numbered within the step, even if `batch` is only part of the step.
pub(super) fn place(spec: &RunSpec, batch: &Batch, micro_batch: u64) -> String {
    let begins = spec.plan.step(batch.step).map_or(batch.first_sample, |step| step.first_sample);
    let sample = batch
        .samples
        .get((micro_batch * batch.micro_batch) as usize)
        .map_or(begins, |row| row.sample);
    format!("step {}, micro-batch {}", batch.step, (sample - begins) / batch.micro_batch)
}
