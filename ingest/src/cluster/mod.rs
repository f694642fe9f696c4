//! A build cut into pure tasks that any machine may run, in any order, twice, or again after a kill.
//!
//! ```text
//! plan:    corpus -> WORK/plan-DIGEST/plan.json        tasks: a range of files of one source each
//! scan:    files -> WORK/parts/KEY.bin                of sources whose steps compare documents: what each step must know
//! decide:  these parts, in order -> which documents go    one process, in one total order
//! encode:  files, who goes -> WORK/parts/KEY.bin      documents, prepared and encoded
//! merge:   these parts, in order -> STORE                 through the one committer; in one process (`local`), as parts are made
//! ```
//!
//! Invariant: a part's key is the hash of all that its content depends on (`key`); so whatever an edit left as it
//! was is found again, and not made again.
//! Invariant: a task and a merge belong to the plan that they name; plans stand beside each other, and none touches what
//! belongs to another one.
//! Invariant: parts and results are created only where there is none. A second result of a task has the same digest as
//! the first; where it has not, both are kept and nothing is merged.

mod begun;
mod key;
mod known;
mod local;
mod merge;
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
pub(crate) use local::{Made, make};
pub use merge::merge;
pub use plan::Plan;
pub use prune::{Pruned, prune};
pub use scan::{decide, is_decided};
pub use stage::Stage;
pub use tally::tallies;
pub use task::{Ran, Runner};
