//! The ranks of a run: who computes which micro-batches, who shares a machine, and how gradients reach their owners.
//!
//! - [`axes`] are the degrees of the mesh and its lines; [`team`] says who computes which micro-batches and who speaks with whom.
//! - `sink` takes each gradient from the layer that has it, `gradients` adds it up; `sum` is the sum of a step's gradients,
//!   of these alone or by `gather` with those of many ranks, in `buckets`; `share` gives new weights to all.
//! - `context` is for ranks that share the chunks of each micro-batch; `slices` says which numbers of its gradient each adds up.
//! - `copies` says who keeps copies of what each rank owns, against its loss.
//! - `words` are the small things that ranks tell each other. [`mod@bench`] times the exchanges.
//!
//! Invariant: collectives only move bytes. Every addition happens on one rank, in the order of the tree, so that the
//! number of ranks is no argument of any bit.

pub mod axes;
pub(crate) mod behind;
pub mod bench;
pub(crate) mod buckets;
pub(crate) mod context;
pub(crate) mod copies;
pub(crate) mod gather;
pub(crate) mod gradients;
pub(crate) mod share;
pub(crate) mod sink;
pub(crate) mod slices;
pub(crate) mod sum;
pub mod team;
pub(crate) mod words;

pub use axes::{Degrees, Mesh};
pub use team::{GradReduce, Team};
