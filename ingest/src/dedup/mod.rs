//! Steps that compare a document with others, or with evaluation sets: exact and near duplicates, decontamination,
//! repeated substrings.
//!
//! If a corpus has one of them, the dedup scan reads it once before the build and decides which documents go, and
//! which bytes of others.
//!
//! Invariant: which documents go is a function of the corpus and its inputs alone; workers, kills and the order in
//! which threads finish cannot matter. Of documents that are alike the first in the order of the store stays.

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
