//! The ranks of a run: which computes which micro-batches, which share a machine, and how gradients reach their owners.
//!
//! - [`axes`] are the degrees of the mesh and its lines; [`team`] assigns micro-batches and chooses node leaders.
//! - `sink` takes each gradient from the layer that computes it, `gradients` adds it up; `sum` is the sum of a step's
//!   gradients, local or, with many ranks, reduced by `gather` in `buckets`; `share` sends new weights to all ranks.
//! - `context` is for ranks that share the chunks of each micro-batch; `slices` splits its gradient between them.
//! - `copies` says which rank keeps replicas of which rank's state, in case that rank is lost.
//! - `words` encodes the small messages between ranks.
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
