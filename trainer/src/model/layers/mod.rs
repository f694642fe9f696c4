//! The layers of the model: attention and feed-forward, one file for each kind, with norms and the head.
//!
//! ```text
//! cca   compressed convolutional attention (cca_back: its backward pass; heads: its weights by shard)
//! gqa   grouped-query attention     softmax  what both compute of queries, keys and values
//! linear  linear attention
//! moe   a mixture of experts: router, experts
//! mlp   a plain feed-forward
//! norm  RMS norm, residual scaling        embedding  of tokens        head  loss without all logits
//! ```

pub(super) mod cca;
mod cca_back;
pub(super) mod embedding;
mod experts;
mod gqa;
pub(super) mod head;
mod heads;
mod linear;
mod mlp;
mod moe;
pub(super) mod norm;
mod router;
mod softmax;

use super::kinds::{Attention, FeedForward};
use super::layer::{LayerConstructor, make};

/// The constructor of a kind of attention.
pub(super) fn make_attention(kind: Attention) -> LayerConstructor {
    match kind {
        Attention::Cca => make::<cca::Cca>,
        Attention::Linear => make::<linear::Linear>,
        Attention::Gqa => make::<gqa::Gqa>,
    }
}

/// The constructor of a kind of feed-forward.
pub(super) fn make_feed_forward(kind: FeedForward) -> LayerConstructor {
    match kind {
        FeedForward::Moe => make::<moe::Moe>,
        FeedForward::Mlp => make::<mlp::Mlp>,
    }
}
