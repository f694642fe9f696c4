//! The ranks of a run: which computes which micro-batches, which share a machine, and how gradients reach their owners.
//!
//! - [`axes`] are the degrees of the mesh and its lines; [`team`] assigns micro-batches and chooses node leaders.
//! - `share` sends new weights to all ranks; `slices` splits the gradient of a micro-batch between ranks that share its
//!   chunks; `buckets` says what is sent together.
//! - `copies` says which rank keeps replicas of which rank's state, in case that rank is lost.
//! - `words` encodes the small messages between ranks.
//!
//! A gradient passes six stops, from the layer that computes it to the owner of its numbers:
//!
//! ```text
//! model::gradients   adds the chunks of a micro-batch
//! sink, or context   computes the checksum; context, where ranks share the micro-batch, also takes this rank's slice
//! sum                is the sum of a step, made by the next two
//! gradients          adds this rank's micro-batches, by the tree
//! gather             with several ranks: sends blocks to node leaders and owners, who finish the tree
//! step               `ReducedGradient`: the pieces of this rank, with their norm
//! ```
//!
//! Invariant: collectives only move bytes. Every addition is done by one rank, in the order of the tree, so that
//! results do not depend on the number of ranks.

pub mod axes;
pub mod behind;
pub(crate) mod buckets;
pub(crate) mod context;
pub mod copies;
pub(crate) mod gather;
pub(crate) mod gradients;
pub mod share;
pub(crate) mod sink;
pub mod slices;
pub(crate) mod sum;
pub mod team;
pub mod words;

pub use axes::{Degrees, Mesh};
pub use team::{GradReduce, ProcessMesh};
