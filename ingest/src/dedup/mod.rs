//! Steps that compare a document with others, or with evaluation sets: exact and near duplicates, decontamination,
//! repeated substrings.
//!
//! If a corpus has such a step, the dedup scan reads it once before the build, and decides which documents, and which
//! bytes of others, are removed.
//!
//! Invariant: the decision depends only on the corpus and its inputs, not on workers, kills or the order in which
//! threads finish. Of documents that are alike, the first in the order of the store is kept.
//!
//! Memory does not grow with the number of documents: what is known of them is on disk, in the order of the store or
//! sorted there.

mod components;
pub(crate) mod decontaminate;
pub(crate) mod exact;
mod matches;
pub(crate) mod minhash;
pub(crate) mod normal;
mod observe;
pub(crate) mod repeats;
mod scan;
mod sorter;
mod tools;

pub(crate) use matches::FILE as MATCHES;
pub(crate) use observe::{Mark, Observed, contaminated};
pub(crate) use scan::{Gathered, Scan, Seen, disk_bytes, memory_bytes, read_through};
pub(crate) use tools::Tools;

/// A document: its source and file (`source << 32 | file`), and its address in the file. In this order they are in the
/// store.
type Doc = [u64; 2];
