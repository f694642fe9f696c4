//! A build cut into pure tasks that any machine may run, in any order, twice, or again after a kill.
//!
//! ```text
//! plan:    corpus -> WORK/plan-DIGEST/plan.json        tasks: a range of files of one source each
//! scan:    files -> WORK/parts/KEY.bin                if steps compare documents: what each step must know
//! decide:  these parts, in order -> removed documents one process, in one total order
//! encode:  files, decision -> WORK/parts/KEY/         documents, prepared and encoded: a finished piece of the store
//! merge:   these parts, in order -> STORE             renames or links, and a manifest
//! ```
//!
//! Invariant: a part's key is the hash of all that its content depends on (`key`), so whatever an edit does not affect
//! is reused.
//! Invariant: a task and a merge belong to the plan that they name; plans are independent, and none touches the files
//! of another one.
//! Invariant: parts and results are created, never replaced. A second result of a task must have the same digest as the
//! first; otherwise both are kept and nothing is merged.

mod begun;
mod key;
mod known;
mod local;
mod merge;
mod output;
mod part;
pub mod plan;
mod prune;
mod result;
mod scan;
pub mod slurm;
mod stage;
mod tally;
pub mod task;
#[cfg(test)]
mod tests;

pub use begun::{plan, plan_build};
pub(crate) use local::{Made, MadeFile, make};
pub use merge::merge;
pub(crate) use merge::reclaim;
pub use plan::Plan;
pub use prune::{Pruned, prune};
pub use scan::{decide, is_decided};
pub use stage::Stage;
pub use tally::tallies;
pub(crate) use task::GoOn;
pub use task::{Ran, Runner};
