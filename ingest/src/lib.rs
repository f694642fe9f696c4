//! Raw documents to an immutable, checksummed, tokenized store.
//!
//! ```text
//! corpus.toml -> files -> slabs (1 reader) -> documents, steps, tokens (n workers) -> shards (1 committer, in order)
//! ```
//!
//! Invariant: the bytes of a store are a function of the inputs' content, the tokenizer's bytes and `corpus.toml`. The
//! number of workers, kills and the location of files have no influence.
//! Invariant: memory is bounded by the slabs in flight, whatever the number of documents.

#![forbid(unsafe_code)]

mod assembly;
pub mod build;
pub mod cache_dir;
pub mod check;
pub mod cluster;
pub mod corpus;
#[cfg(test)]
mod crashes;
mod dedup;
mod disk;
pub mod dropped;
mod filters;
pub mod init;
pub mod inspect;
pub mod interop;
mod made;
pub mod moved;
mod parallel;
mod prepared;
pub mod progress;
pub mod recipe;
pub mod sample;
pub mod source;
mod spans;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod tokenize;
pub mod train;
pub mod verify;
mod versions;
mod walk;

pub use build::{Outcome, build};
pub use corpus::Corpus;
pub use parallel::WORKERS_MAX;
