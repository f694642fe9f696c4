//! The head and its loss, without ever holding all logits.
//!
//! Logits exist for `loss_chunk` tokens at a time. Their gradient is written down, `softmax - one_hot`, so nothing is
//! kept for a backward pass: each chunk adds its part to the gradient of the embedding, in order, and leaves.

use tch::{Kind, Tensor};

use super::input::Prepared;
use super::{ZayaConfig, product};

/// Losses, and gradients of their sum over the divisor.
pub(super) struct Head {
    /// `[N]`: nats, 0 where there is no label.
    pub(super) losses: Tensor,
    /// `[N, D]`.
    pub(super) hidden: Tensor,
    /// `[V, D]`: the head's part of the embedding's gradient.
    pub(super) embedding: Tensor,
}

/// Loss and backward of the head for the final normed stream `hidden`.
pub(super) fn run(
    config: &ZayaConfig,
    embedding: &Tensor,
    hidden: &Tensor,
    input: &Prepared,
    divisor: u64,
) -> Head {
    let n = hidden.size()[0];
    let float = (Kind::Float, hidden.device());
    let mut grad = embedding.new_zeros(embedding.size(), float);
    let hidden_grad = hidden.new_empty(hidden.size(), float);
    let losses = hidden.new_empty([n], (Kind::Float, hidden.device()));
    let mut start = 0;
    while start < n {
        let count = config.loss_chunk.min(n - start);
        let part = |x: &Tensor| x.narrow(0, start, count);
        let (rows, mask) = (part(hidden), part(&input.mask).unsqueeze(1));
        let labels = part(&input.labels).unsqueeze(1);
        let mut log = product::of(&rows, &embedding.tr()).log_softmax(-1, Kind::Float);
        part(&losses).copy_(&own(&log, &labels, &mask));
        let mut slope = log.exp_();
        let _ = slope.scatter_add_(1, &labels, &mask.ones_like().neg());
        // The mask and the divisor scale the narrow side: rows of D numbers, not of V.
        let scale = mask / divisor as f64;
        let slope = slope.to_kind(rows.kind());
        product::into(&part(&hidden_grad), &slope, embedding);
        let _ = part(&hidden_grad).g_mul_(&scale);
        let rows = (&rows * &scale).to_kind(rows.kind());
        product::add(&mut grad, &slope.tr(), &rows);
        start += count;
    }
    Head { losses, hidden: hidden_grad, embedding: grad }
}

/// The losses alone, `[N]`, chunk by chunk as in [`run`].
pub(super) fn losses(
    config: &ZayaConfig,
    embedding: &Tensor,
    hidden: &Tensor,
    input: &Prepared,
) -> Tensor {
    let n = hidden.size()[0];
    let losses = hidden.new_empty([n], (Kind::Float, hidden.device()));
    for start in (0..n).step_by(config.loss_chunk as usize) {
        let part = |x: &Tensor| x.narrow(0, start, config.loss_chunk.min(n - start));
        let log = product::of(&part(hidden), &embedding.tr()).log_softmax(-1, Kind::Float);
        let (labels, mask) = (part(&input.labels).unsqueeze(1), part(&input.mask).unsqueeze(1));
        part(&losses).copy_(&own(&log, &labels, &mask));
    }
    losses
}

/// Multiplications of a forward pass, each with its addition.
pub(super) fn products(config: &ZayaConfig, tokens: f64) -> f64 {
    tokens * config.hidden_size as f64 * config.vocab_size as f64
}

/// Bytes of the logits that exist at a time, their logarithms and their gradient as a product sees it.
pub(super) fn activation_bytes(config: &ZayaConfig, tokens: u64, narrow: u64) -> u64 {
    (8 + narrow) * tokens.min(config.loss_chunk as u64) * config.vocab_size as u64
}

/// The loss of each label of a chunk.
fn own(log: &Tensor, labels: &Tensor, mask: &Tensor) -> Tensor {
    // where, not a product: a masked token's loss is 0 even if its logits are not finite.
    log.gather(1, labels, false).neg().where_self(&mask.gt(0.0), mask).squeeze_dim(1)
}
