//! A linear layer over the vocabulary and its cross-entropy, the same in every table: the logits of a few tokens at a
//! time are computed and turned into their gradient; none are kept.
//!
//! Each shard of the vocabulary has its own matmuls. The row's largest logit is found across all shards, each shard
//! sums its exponentials relative to it, and the sums are added in a tree: so it does not matter which rank computes a
//! shard.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{CrossEntropy, CrossEntropyGrads, Ops, check};
use crate::Result;
use crate::layout::Parts as _;
use crate::tree::{Counter, no_part};

pub(super) fn cross_entropy<O: Ops + ?Sized>(ops: &O, by: CrossEntropy) -> Result<Tensor> {
    let [tokens, size] = check::cross_entropy(by)?;
    // The loss is without z-loss, so its coefficient would only cost time.
    let by = CrossEntropy { z_loss: 0.0, ..by };
    let losses = by.hidden.f_new_empty([tokens], (Kind::Float, by.hidden.device()))?;
    for start in (0..tokens).step_by(by.chunk as usize) {
        let part = |x: &Tensor| x.part(0, start, by.chunk.min(tokens - start));
        let (rows, labels, mask) = (part(by.hidden)?, part(by.labels)?, part(by.mask)?);
        let found = match by.shards {
            1 => own(&logs(ops, by, &rows)?.0, &labels, &mask)?,
            _ => Logits::of(ops, by, &rows, size)?.losses(&labels, &mask)?,
        };
        part(&losses)?.f_copy_(&found)?;
    }
    Ok(losses)
}

pub(super) fn cross_entropy_backward<O: Ops + ?Sized>(
    ops: &O,
    by: CrossEntropy,
    divisor: f64,
) -> Result<CrossEntropyGrads> {
    let [tokens, size] = check::cross_entropy(by)?;
    let float = (Kind::Float, by.hidden.device());
    let mut weights = by.weights.f_new_zeros(by.weights.size(), float)?;
    let hidden = by.hidden.f_empty_like()?;
    let losses = by.hidden.f_new_empty([tokens], float)?;
    let z_losses = z_space(by, tokens)?;
    for start in (0..tokens).step_by(by.chunk as usize) {
        let part = |x: &Tensor| x.part(0, start, by.chunk.min(tokens - start));
        let (rows, labels, mask) = (part(by.hidden)?, part(by.labels)?, part(by.mask)?);
        let keep_z = |log_sum: &Tensor| match &z_losses {
            Some(z_losses) => z_into(&part(z_losses)?, by, log_sum, &mask),
            None => Ok(()),
        };
        // The mask and the divisor scale the narrow operand: rows of D numbers, not of V.
        let scale = mask.f_unsqueeze(1)?.f_div_scalar(divisor)?;
        let scaled = rows.f_mul(&scale)?.f_to_kind(rows.kind())?;
        let mut to_hidden = part(&hidden)?;
        if by.shards > 1 {
            let logits = Logits::of(ops, by, &rows, size)?;
            part(&losses)?.f_copy_(&logits.losses(&labels, &mask)?)?;
            keep_z(&logits.log_sum)?;
            let sum = logits.backward(ops, by, &labels, &scaled, &weights)?;
            to_hidden.f_copy_(&sum.f_mul(&scale)?)?;
        } else {
            let (log, log_sum) = logs(ops, by, &rows)?;
            part(&losses)?.f_copy_(&own(&log, &labels, &mask)?)?;
            let mut slope = log;
            let _ = slope.f_exp_()?;
            if let Some(log_sum) = &log_sum {
                keep_z(log_sum)?;
                scale_by_z(&mut slope, by, log_sum)?;
            }
            let slope = less_one(slope, &labels)?.f_to_kind(rows.kind())?;
            ops.matmul_into(&to_hidden, &slope, by.weights)?;
            add_weights(ops, by, &mut weights, &slope, &scaled)?;
            let _ = to_hidden.f_mul_(&scale)?;
        }
    }
    Ok(CrossEntropyGrads { losses, z_losses, hidden, weights })
}

/// Adds the gradient of the weights from `rows` tokens.
fn add_weights<O: Ops + ?Sized>(
    ops: &O,
    by: CrossEntropy,
    weights: &mut Tensor,
    slope: &Tensor,
    rows: &Tensor,
) -> Result<()> {
    match by.part {
        true => drop(weights.f_add_(&ops.matmul_part(&slope.f_tr()?, rows)?)?),
        false => ops.matmul_add(weights, &slope.f_tr()?, rows)?,
    }
    Ok(())
}

/// Memory for the z-loss of each token, if it has a coefficient.
pub(super) fn z_space(by: CrossEntropy, tokens: i64) -> Result<Option<Tensor>> {
    let space = || by.hidden.f_new_empty([tokens], (Kind::Float, by.hidden.device()));
    Ok((by.z_loss > 0.0).then(space).transpose()?)
}

/// Writes the z-loss of each label of a chunk, `[n]`, from `log_sum`, `[n]` or `[n, 1]`.
pub(super) fn z_into(
    out: &Tensor,
    by: CrossEntropy,
    log_sum: &Tensor,
    mask: &Tensor,
) -> Result<()> {
    let terms = log_sum.f_view([-1])?.f_square()?.f_mul_scalar(by.z_loss)?;
    out.shallow_clone().f_copy_(&labelled(&terms, mask)?)?;
    Ok(())
}

/// Multiplies probabilities by `1 + 2 z_loss log(Z)`: with z-loss, the part of the gradient that all logits have.
fn scale_by_z(probabilities: &mut Tensor, by: CrossEntropy, log_sum: &Tensor) -> Result<()> {
    let factor = log_sum.f_mul_scalar(2.0 * by.z_loss)?.f_add_scalar(1.0)?;
    let _ = probabilities.f_mul_(&factor)?;
    Ok(())
}

/// Subtracts one from the number of each label.
fn less_one(mut slope: Tensor, labels: &Tensor) -> Result<Tensor> {
    let labels = labels.f_unsqueeze(1)?;
    let ones = slope.f_new_ones(labels.size(), (Kind::Float, slope.device()))?;
    let _ = slope.f_scatter_add_(1, &labels, &ones.f_neg()?)?;
    Ok(slope)
}

/// The logarithm of each probability, `[n, V]`, and for z-loss that of the sum of exponentials, `[n, 1]`: f32.
fn logs<O: Ops + ?Sized>(
    ops: &O,
    by: CrossEntropy,
    rows: &Tensor,
) -> Result<(Tensor, Option<Tensor>)> {
    let logits = ops.matmul(rows, &by.weights.f_tr()?)?;
    let log = logits.f_log_softmax(-1, Kind::Float)?;
    if by.z_loss == 0.0 {
        return Ok((log, None));
    }
    // Of the most probable token: there the subtraction cancels least.
    let largest = |x: &Tensor| x.f_amax([1].as_slice(), true)?.f_to_kind(Kind::Float);
    let log_sum = largest(&logits)?.f_sub(&largest(&log)?)?;
    Ok((log, Some(log_sum)))
}

/// The loss of each label of a chunk.
fn own(log: &Tensor, labels: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let losses = log.f_gather(1, &labels.f_unsqueeze(1)?, false)?.f_neg()?.f_squeeze_dim(1)?;
    labelled(&losses, mask)
}

/// A select, not a multiplication: a masked token's loss is 0 even if its logits are not finite.
fn labelled(losses: &Tensor, mask: &Tensor) -> Result<Tensor> {
    Ok(losses.f_where_self(&mask.f_gt(0.0)?, mask)?)
}

/// Logits of some tokens, shard by shard of the vocabulary.
struct Logits {
    /// The vocabulary range of each shard, and its logits, `[n, v]`, f32.
    shards: Vec<(Range<i64>, Tensor)>,
    /// `[n, 1]`: the logarithm of the sum of all exponentials.
    log_sum: Tensor,
}

impl Logits {
    fn of<O: Ops + ?Sized>(ops: &O, by: CrossEntropy, rows: &Tensor, size: i64) -> Result<Logits> {
        let (mut shards, mut largest): (Vec<_>, Option<Tensor>) = (Vec::new(), None);
        for shard in 0..by.shards {
            let range = size * shard / by.shards..size * (shard + 1) / by.shards;
            let weights = by.weights.part(0, range.start, range.end - range.start)?;
            let logits = ops.matmul(rows, &weights.f_tr()?)?.f_to_kind(Kind::Float)?;
            let own = logits.f_amax([1].as_slice(), true)?;
            largest = Some(match largest {
                None => own,
                Some(largest) => largest.f_maximum(&own)?,
            });
            shards.push((range, logits));
        }
        let largest = largest.ok_or_else(no_part)?;
        let mut sum = Counter::new();
        for (_, logits) in &shards {
            let exponentials = logits.f_sub(&largest)?.f_exp()?;
            sum.push(exponentials.f_sum_dim_intlist(1, true, Kind::Float)?)?;
        }
        let log_sum = largest.f_add(&sum.total()?.f_log()?)?;
        Ok(Logits { shards, log_sum })
    }

    /// The loss of each label, whose logit is taken from the shard that has it.
    fn losses(&self, labels: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let labels = labels.f_unsqueeze(1)?;
        let mut label = self.log_sum.f_zeros_like()?;
        for (range, logits) in &self.shards {
            let (here, place) = within(&labels, range)?;
            label = logits.f_gather(1, &place, false)?.f_where_self(&here, &label)?;
        }
        labelled(&self.log_sum.f_sub(&label)?.f_squeeze_dim(1)?, mask)
    }

    /// The gradient of `rows` before their scaling; adds the gradients of the weights. `rows` are the hidden numbers,
    /// scaled by mask and divisor.
    fn backward<O: Ops + ?Sized>(
        &self,
        ops: &O,
        by: CrossEntropy,
        labels: &Tensor,
        rows: &Tensor,
        weights: &Tensor,
    ) -> Result<Tensor> {
        let (labels, mut sum) = (labels.f_unsqueeze(1)?, Counter::new());
        for (range, logits) in &self.shards {
            let mut slope = logits.f_sub(&self.log_sum)?.f_exp()?;
            if by.z_loss > 0.0 {
                scale_by_z(&mut slope, by, &self.log_sum)?;
            }
            let (here, place) = within(&labels, range)?;
            let one = here.f_to_kind(Kind::Float)?.f_neg()?;
            let _ = slope.f_scatter_add_(1, &place, &one)?;
            let slope = slope.f_to_kind(rows.kind())?;
            let part = |x: &Tensor| x.part(0, range.start, range.end - range.start);
            sum.push(ops.matmul_part(&slope, &part(by.weights)?)?)?;
            add_weights(ops, by, &mut part(weights)?, &slope, rows)?;
        }
        sum.total()
    }
}

/// Which labels are in a shard, and their index there; index 0 for the others.
fn within(labels: &Tensor, range: &Range<i64>) -> Result<(Tensor, Tensor)> {
    let here = labels.f_ge(range.start)?.f_bitwise_and_tensor(&labels.f_lt(range.end)?)?;
    let place = labels.f_sub_scalar(range.start)?.f_masked_fill(&here.f_bitwise_not()?, 0)?;
    Ok((here, place))
}
