//! The layers of the model: attention and feed-forward, one kind a file, and what stands around them.
//!
//! ```text
//! cca   compressed convolutional attention (cca_back: its way back; heads: its weights by shard)
//! linear  linear attention
//! moe   a mixture of experts: router, experts
//! mlp   a plain feed-forward, in tests
//! norm  RMS norm, residual scaling        head  loss without all logits
//! ```

pub(super) mod cca;
mod cca_back;
mod experts;
pub(super) mod head;
pub(super) mod heads;
pub(super) mod linear;
#[cfg(test)]
pub(super) mod mlp;
pub(super) mod moe;
pub(super) mod norm;
mod router;
