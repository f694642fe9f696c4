//! The shared vocabulary of `zdata` and `ztrain`.
//!
//! It holds only what two crates must agree on: how a digest is taken, how random numbers are sampled, how an order is
//! permuted, what a store's bytes are, and how an error is shown to users.
//!
//! ```text
//! contract <- settings <- ingest, mixer <- loader <- trainer -> kernels
//! ```
//!
//! Invariant: this crate depends on no other member of the workspace, starts no thread and reads no clock.
//! Invariant: nothing here depends on the machine's word size, byte order or iteration order.

#![forbid(unsafe_code)]

pub mod chain;
pub mod digest;
pub mod draw;
pub mod fault;
pub mod framed;
pub mod guard;
pub mod json;
pub mod packed;
pub mod permute;
pub mod ratio;
pub mod shell;
mod shown;
pub mod sums;
pub mod terminal;
pub mod words;

pub use digest::{Digest, Digestible, Hasher, Identity};
pub use draw::{Key, Purpose, draw};
pub use fault::{Class, Fault, Result, Symptom};
pub use framed::{Field, Framed};
pub use packed::Packed;
pub use permute::Permutation;
pub use ratio::Ratio;
pub use sums::{SourceSums, StepSums, read_number};
pub use words::counted;

/// Tokens in a unit unless `corpus.toml` says otherwise; every `seq_len` divides it.
pub const UNIT_TOKENS: u64 = 131_072;

/// The most tokens in a unit.
pub const UNIT_TOKENS_MAX: u64 = 1 << 40;
