//! The head and its loss, without ever holding all logits.
//!
//! Logits exist for `loss_chunk` tokens at a time. Their gradient is `softmax - one_hot`, so nothing is saved for a
//! backward pass: each such chunk adds its term to the gradient of the embedding, in order, and is freed.

use kernels::ops::{CrossEntropy, OpsTable};
use tch::{Kind, Tensor};

use crate::model::ZayaConfig;
use crate::model::cut::Chunk;
use crate::model::kinds::LogitsDtype;
use crate::model::layer::Pass;

/// The head over the final normed residual `hidden` of a chunk, as
/// [`Ops::cross_entropy`](kernels::ops::Ops::cross_entropy) takes it.
pub(in crate::model) fn of<'a>(
    pass: &Pass<'a>,
    chunk: &'a Chunk,
    embedding: &'a Tensor,
    hidden: &'a Tensor,
) -> CrossEntropy<'a> {
    let (labels, mask) = (&chunk.labels, &chunk.mask);
    let (weights, chunk, shards) = (embedding, pass.config.loss_chunk, pass.shards);
    let part = pass.chunks.count() > 1;
    CrossEntropy { hidden, weights, labels, mask, chunk, shards, part }
}

/// The head's matrix and its inputs by chunk in the dtype in which they are multiplied.
pub(in crate::model) fn widened(
    pass: &Pass<'_>,
    table: &Tensor,
    hidden: &[Tensor],
) -> kernels::Result<(Tensor, Vec<Tensor>)> {
    let kind = match pass.config.logits_dtype {
        LogitsDtype::Model => table.kind(),
        LogitsDtype::F32 => Kind::Float,
    };
    let hidden = hidden.iter().map(|hidden| Ok(hidden.f_to_kind(kind)?));
    Ok((table.f_to_kind(kind)?, hidden.collect::<kernels::Result<_>>()?))
}

/// 0 where the label is the most probable token, the lowest of equal ones, `[n]`, else 1. Only the logits of tokens
/// with a label are computed: a sequence that is scored has few.
pub(in crate::model) fn misses(ops: OpsTable, head: &CrossEntropy<'_>) -> kernels::Result<Tensor> {
    let mut misses = head.mask.f_zeros_like()?;
    let weights = head.weights.f_tr()?;
    let size = weights.size()[1];
    let ids = Tensor::f_arange(size, (Kind::Int64, weights.device()))?;
    let none = Tensor::f_full([1], size, (Kind::Int64, weights.device()))?;
    for places in head.mask.f_nonzero()?.f_view([-1])?.f_split(head.chunk, 0)? {
        let logits = ops.matmul(&head.hidden.f_index_select(0, &places)?, &weights)?;
        let most = logits.f_eq_tensor(&logits.f_amax([1i64], true)?)?;
        let first = ids.f_where_self(&most, &none)?.f_amin([1i64], false)?;
        let missed = first.f_ne_tensor(&head.labels.f_index_select(0, &places)?)?;
        let _ = misses.f_index_copy_(0, &places, &missed.f_to_kind(misses.kind())?)?;
    }
    Ok(misses)
}

/// Multiply-adds of a forward pass.
pub(in crate::model) fn products(config: &ZayaConfig, tokens: f64) -> f64 {
    tokens * config.hidden_size as f64 * config.vocab_size as f64
}

/// Bytes of the logits that exist at a time, their logarithms, and their gradient as an operand of matmuls. A device
/// computes the gradient in place of the logits; in bf16 it adds the weights' gradient from a separate matrix.
pub(in crate::model) fn activation_bytes(
    config: &ZayaConfig,
    tokens: u64,
    narrow: u64,
    on_device: bool,
) -> u64 {
    let (vocabulary, width) = (config.vocab_size as u64, config.hidden_size as u64);
    let logits = tokens.min(config.loss_chunk as u64) * vocabulary;
    // Both factors, and the gradient of the inputs.
    let (narrow, widened) = match (config.logits_dtype, narrow) {
        (LogitsDtype::F32, 2) => (4, 4 * (vocabulary + 2 * tokens) * width),
        _ => (narrow, 0),
    };
    let logits = match (on_device, narrow) {
        (false, _) => (8 + narrow) * logits,
        (true, 4) => narrow * logits,
        (true, _) => narrow * (logits + vocabulary * width),
    };
    logits + widened
}
