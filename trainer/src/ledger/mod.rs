//! The ledger: what a run computed, as a function of the run alone, with one chained line per step.
//!
//! Invariant: it contains no rank, device, time or path; those are in `events.jsonl`, which is not chained.

mod difference;
mod file;
mod follow;
mod index;
mod layers;
mod record;
mod seen;

pub use contract::{Packed, SourceSums};
pub use difference::{StepDifference, StepStage};
pub use file::Ledger;
pub use follow::Follower;
pub use layers::{LayerParameters, layers};
pub use record::{LedgerHead, StepFields, StepRecord};
pub use seen::StepSummaryFields;

/// The version of the lines. 3: sums by source, norms by layer. 4: labels and micro-batches are called so. 5: a
/// processor's instructions in the kernel table. 7: weights of mixes that react.
pub const FORMAT: u32 = 7;

/// The hint if a run has lost its ledger or checkpoints.
pub(crate) const RESTORE: &str = "restore ledger.jsonl and the checkpoints from a copy; or train with --restart: every step is \
                                  computed again from the first, and held against the ledger where there is one";
