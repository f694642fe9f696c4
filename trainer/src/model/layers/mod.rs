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

use super::ZayaConfig;
use super::kinds::{Attention, FeedForward};
use super::layer::{Layer, LayerPlace};
use super::param::ParamDeclarations;

/// An attention of this kind.
pub(super) fn attention(
    kind: Attention,
    params: &mut ParamDeclarations<'_>,
    config: &ZayaConfig,
    place: LayerPlace,
) -> Box<dyn Layer> {
    match kind {
        Attention::Cca => Box::new(cca::Cca::declare(params, config, place)),
        Attention::Linear => Box::new(linear::Linear::declare(params, config, place)),
        Attention::Gqa => Box::new(gqa::Gqa::declare(params, config, place)),
    }
}

/// A feed-forward of this kind.
pub(super) fn feed_forward(
    kind: FeedForward,
    params: &mut ParamDeclarations<'_>,
    config: &ZayaConfig,
    place: LayerPlace,
) -> Box<dyn Layer> {
    match kind {
        FeedForward::Moe => Box::new(moe::Moe::declare(params, config, place)),
        FeedForward::Mlp => Box::new(mlp::Mlp::declare(params, config, place)),
    }
}
