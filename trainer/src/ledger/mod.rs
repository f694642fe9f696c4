//! The ledger: what a run computed, as a function of the run alone, one chained line for each step.
//!
//! Invariant: no rank, device, time or path enters it; those go to `events.jsonl`, which is not chained.

mod difference;
mod file;
mod follow;
mod index;
mod layers;
mod record;
mod seen;

pub use contract::{Packed, SourceSums};
pub use difference::{Difference, Stage};
pub use file::Ledger;
pub use follow::Follower;
pub use layers::{LayerParameters, layers};
pub use record::{Checked, Head, StepRecord};
pub use seen::Seen;

/// The version of the lines. 3: sums by source, norms by layer. 4: labels and micro-batches are called so. 5: a
/// processor's instructions in the kernel table.
pub const FORMAT: u32 = 6;

/// What to do where a run has lost what it goes on by.
pub(crate) const RESTORE: &str = "restore ledger.jsonl and the checkpoints from a copy; or train with --restart: every step is \
                                  computed again from the first, and held against the ledger where there is one";
