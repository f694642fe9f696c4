//! Steps that compare a document with others, or with evaluation sets: exact and near duplicates, decontamination,
//! repeated substrings.
//!
//! If a corpus has such a step, the dedup scan reads it once before the build, and decides which documents, and which
//! bytes of others, are removed.
//!
//! Invariant: the decision depends only on the corpus and its inputs, not on workers, kills or the order in which
//! threads finish. Of documents that are alike, the first in the order of the store is kept.

pub(crate) mod decontaminate;
pub(crate) mod exact;
mod matches;
pub(crate) mod minhash;
pub(crate) mod normal;
mod observe;
pub(crate) mod repeats;
mod scan;
mod tools;

pub(crate) use matches::FILE as MATCHES;
pub(crate) use observe::{Mark, Observed, contaminated};
pub(crate) use scan::{Gathered, Scan, Seen, read_through};
pub(crate) use tools::Tools;
