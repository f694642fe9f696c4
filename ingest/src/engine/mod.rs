//! A build cut into pure tasks that any machine may run, in any order, twice, or again after a kill.
//!
//! ```text
//! plan:   corpus -> WORK/plan.json                 tasks: a range of files of one source each
//! task i: files  -> WORK/part-00000i.bin           its documents, encoded; created only where there is none
//! merge:  parts, in order -> STORE                 through the committer of a local build: the same bytes
//! ```
//!
//! Invariant: a part is a function of its files' content, the tokenizer and `corpus.toml`. So a second result of a
//! task has the same digest as the first; where it has not, both are kept and nothing is merged.

mod part;
pub mod plan;
pub mod slurm;
pub mod task;
#[cfg(test)]
mod tests;

pub use plan::{Plan, plan};
pub use task::{merge, run};
