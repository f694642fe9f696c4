//! Raw documents to an immutable, checksummed, tokenized store.
//!
//! ```text
//! corpus.toml -> parts (ranges of files) -> documents, steps, tokens, shards (each worker a part) -> links, a manifest
//! ```
//!
//! Invariant: the bytes of a store are a function of the inputs' content, the tokenizer's bytes and `corpus.toml`. The
//! number of workers, kills and the location of files have no influence.
//! Invariant: memory is bounded by the slabs in flight and the open shards, whatever the number of documents.

#![forbid(unsafe_code)]

mod assembly;
pub mod build;
pub mod cache_dir;
pub mod check;
pub mod cluster;
pub mod corpus;
#[cfg(test)]
mod crashes;
mod cuts;
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
mod run_parts;
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
