//! The head and its loss, without ever holding all logits.
//!
//! Logits exist for `loss_chunk` tokens at a time. Their gradient is written down, `softmax - one_hot`, so nothing is
//! kept for a backward pass: each chunk adds its part to the gradient of the embedding, in order, and leaves.

use kernels::ops::CrossEntropy;
use tch::Tensor;

use super::ZayaConfig;
use super::attention::Context;

/// The head over the final normed residual `hidden`, as [`Ops::cross_entropy`](kernels::ops::Ops::cross_entropy) takes it.
pub(super) fn of<'a>(
    context: &Context<'a>,
    embedding: &'a Tensor,
    hidden: &'a Tensor,
) -> CrossEntropy<'a> {
    let (labels, mask) = (&context.input.labels, &context.input.mask);
    CrossEntropy { hidden, weights: embedding, labels, mask, chunk: context.config.loss_chunk }
}

/// Multiplications of a forward pass, each with its addition.
pub(super) fn products(config: &ZayaConfig, tokens: f64) -> f64 {
    tokens * config.hidden_size as f64 * config.vocab_size as f64
}

/// Bytes of the logits that exist at a time, their logarithms and their gradient as a product sees it.
pub(super) fn activation_bytes(config: &ZayaConfig, tokens: u64, narrow: u64) -> u64 {
    (8 + narrow) * tokens.min(config.loss_chunk as u64) * config.vocab_size as u64
}
