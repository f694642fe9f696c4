//! The head and its loss, without ever holding all logits.
//!
//! Logits exist for `loss_chunk` tokens at a time. Their gradient is `softmax - one_hot`, so nothing is saved for a
//! backward pass: each such chunk adds its term to the gradient of the embedding, in order, and is freed.

use kernels::ops::CrossEntropy;
use tch::Tensor;

use crate::model::ZayaConfig;
use crate::model::cut::Chunk;
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
    match (on_device, narrow) {
        (false, _) => (8 + narrow) * logits,
        (true, 4) => narrow * logits,
        (true, _) => narrow * (logits + vocabulary * width),
    }
}
