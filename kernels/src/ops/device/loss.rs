//! Cross-entropy over a vocabulary, or over shards of the vocabulary, each with its own matmuls.
//!
//! The logits of a chunk of tokens are one matrix for all shards. The largest logit is that of the whole row;
//! exponentials are summed within shards and then in the tree over shards; the gradients of logits need only the
//! logarithm of the sum.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::layout::Parts as _;
use crate::ops::{CrossEntropy, CrossEntropyGrads, Ops, check, cross_entropy as composed};
use crate::tree::Counter;

/// A chunk of tokens.
struct Chunk<'a> {
    queue: &'a Queue,
    ops: &'a dyn Ops,
    by: CrossEntropy<'a>,
    rows: Tensor,
    labels: Tensor,
    mask: Tensor,
    /// In the kind of the rows: first the logits, then their gradients.
    logits: Tensor,
    log_sum: Tensor,
}

/// The range of the vocabulary of each shard.
fn shards(by: CrossEntropy) -> impl Iterator<Item = Range<i64>> {
    let size = by.weights.extent(0);
    (0..by.shards).map(move |shard| size * shard / by.shards..size * (shard + 1) / by.shards)
}

fn narrow(x: &Tensor, dimension: i64, range: &Range<i64>) -> Result<Tensor> {
    x.part(dimension, range.start, range.end - range.start)
}

impl<'a> Chunk<'a> {
    /// For the tokens from `start` on; writes their losses to `losses`.
    fn of(
        queue: &'a Queue,
        ops: &'a dyn Ops,
        by: CrossEntropy<'a>,
        start: i64,
        losses: &Tensor,
    ) -> Result<Chunk<'a>> {
        let count = by.chunk.min(by.hidden.extent(0) - start);
        let part = |x: &Tensor| x.part(0, start, count);
        let (rows, labels, mask) = (part(by.hidden)?, part(by.labels)?, part(by.mask)?);
        let logits = queue.room(&[count, by.weights.extent(0)], rows.kind())?;
        for shard in shards(by) {
            let weights = narrow(by.weights, 0, &shard)?;
            ops.matmul_into(&narrow(&logits, 1, &shard)?, &rows, &weights.swapped(0, 1)?)?;
        }
        let log_sum = queue.room(&[count], Kind::Float)?;
        let kernel = by_kind(&logits, [c"cross_entropy_f32", c"cross_entropy_bf16"]);
        let losses = part(losses)?;
        let memory = [&logits, &labels, &mask, &log_sum, &losses].map(Argument::from);
        let size = [logits.extent(1).into(), by.shards.into()];
        queue.launch(kernel, count, &[&memory[..], &size].concat())?;
        Ok(Chunk { queue, ops, by, rows, labels, mask, logits, log_sum })
    }

    /// Replaces the logits by their gradients.
    fn slopes(&self) -> Result<()> {
        let Chunk { by, labels, logits, log_sum, .. } = self;
        let kernel = by_kind(logits, [c"cross_entropy_slope_f32", c"cross_entropy_slope_bf16"]);
        let memory = [logits, labels, log_sum].map(Argument::from);
        let numbers = [(by.z_loss as f32).into(), logits.extent(1).into()];
        self.queue.launch(kernel, labels.extent(0), &[&memory[..], &numbers].concat())
    }

    /// The gradient of the rows from those of the logits, to be scaled. Parts of several shards are added and scaled
    /// before rounding.
    fn to_rows(&self, out: &Tensor, divisor: f64) -> Result<()> {
        if self.by.shards == 1 {
            return self.ops.matmul_into(out, &self.logits, self.by.weights);
        }
        let mut sum = Counter::new();
        for shard in shards(self.by) {
            let slopes = narrow(&self.logits, 1, &shard)?;
            sum.push(self.ops.matmul_part(&slopes, &narrow(self.by.weights, 0, &shard)?)?)?;
        }
        let sum = sum.finish()?.ok_or_else(|| super::unreached("cross_entropy_backward"))?;
        scaled(self.queue, [&sum, &self.mask, out], divisor)
    }

    /// Adds the gradient of the weights from `rows`, which are scaled by mask and divisor.
    fn add_weights(&self, weights: &Tensor, rows: &Tensor) -> Result<()> {
        for shard in shards(self.by) {
            let (mut weights, slopes) =
                (narrow(weights, 0, &shard)?, narrow(&self.logits, 1, &shard)?);
            match self.by.part {
                true => drop(weights.f_add_(&self.ops.matmul_part(&slopes.swapped(0, 1)?, rows)?)?),
                false => self.ops.matmul_add(&mut weights, &slopes.swapped(0, 1)?, rows)?,
            }
        }
        Ok(())
    }
}

/// `out = x mask / divisor`, row by row; `out` may be `x`.
fn scaled(queue: &Queue, [x, mask, out]: [&Tensor; 3], divisor: f64) -> Result<()> {
    let kernel = match x.kind() == out.kind() {
        true => by_kind(x, [c"scale_rows_f32", c"scale_rows_bf16"]),
        false => c"scale_rows_narrow",
    };
    let memory = [x, mask, out].map(Argument::from);
    let sizes = [(divisor as f32).into(), x.extent(1).into()];
    queue.launch(kernel, x.extent(0), &[&memory[..], &sizes].concat())
}

pub(super) fn cross_entropy(queue: &Queue, ops: &dyn Ops, by: CrossEntropy) -> Result<Tensor> {
    let [tokens, _] = check::cross_entropy(by)?;
    let losses = queue.room(&[tokens], Kind::Float)?;
    for start in (0..tokens).step_by(by.chunk as usize) {
        Chunk::of(queue, ops, by, start, &losses)?;
    }
    Ok(losses)
}

/// The same, and gradients of the sum of losses over `divisor`.
pub(super) fn cross_entropy_backward(
    queue: &Queue,
    ops: &dyn Ops,
    by: CrossEntropy,
    divisor: f64,
) -> Result<CrossEntropyGrads> {
    let [tokens, _] = check::cross_entropy(by)?;
    let float = (Kind::Float, queue.device());
    let weights = by.weights.f_new_zeros(by.weights.size(), float)?;
    // The mask and the divisor scale the narrow operand: rows of D numbers, not of V. The scaled rows are where the
    // gradient of the rows replaces them, chunk by chunk.
    let hidden = by.hidden.f_empty_like()?;
    scaled(queue, [by.hidden, by.mask, &hidden], divisor)?;
    let losses = queue.room(&[tokens], Kind::Float)?;
    let z_losses = composed::z_space(by, tokens)?;
    for start in (0..tokens).step_by(by.chunk as usize) {
        let chunk = Chunk::of(queue, ops, by, start, &losses)?;
        chunk.slopes()?;
        let part = |x: &Tensor| x.part(0, start, chunk.rows.extent(0));
        if let Some(z_losses) = &z_losses {
            composed::z_into(&part(z_losses)?, by, &chunk.log_sum, &chunk.mask)?;
        }
        let own = part(&hidden)?;
        chunk.add_weights(&weights, &own)?;
        chunk.to_rows(&own, divisor)?;
    }
    if by.shards == 1 {
        scaled(queue, [&hidden, by.mask, &hidden], divisor)?;
    }
    Ok(CrossEntropyGrads { losses, z_losses, hidden, weights })
}
