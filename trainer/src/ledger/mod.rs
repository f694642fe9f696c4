//! The ledger: what a run computed, as a function of the run alone, one chained line for each step.
//!
//! Invariant: no rank, device, time or path enters it; those go to `events.jsonl`, which is not chained.

mod file;
mod index;
mod record;

pub use file::Ledger;
pub use record::{Difference, Head, Packed, Stage, StepRecord};

/// The version of the lines.
pub const FORMAT: u32 = 2;
