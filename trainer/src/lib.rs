//! Training: the ZAYA1 model, its optimizers, the ledger, checkpoints and replay.
//!
//! - [`spec`] is what is trained (hashed), [`exec`] how fast (not hashed). [`run`] is the loop, [`folder`] its folder.
//! - [`step`] is one step: [`model`] computes micro-batches on [`workers`], a fixed tree adds them, [`optim`] updates
//!   the [`state`]; on one rank or on many, with the same bits.
//! - [`audit`] decides which micro-batches are computed twice.
//! - [`launch`] starts ranks and finds their places, [`mesh`] distributes the work over them.
//! - [`replay`] recomputes past steps.
//! - [`costs`] has the operations and bytes of a micro-batch, [`memory`] the bytes of each rank.
//! - [`hf`] imports and exports Hugging Face's `zaya`.
//! - [`ledger`] records what was computed, [`events`] where and when, [`checkpoint`] the state; [`metrics`] writes
//!   curves, [`validate`] computes the validation loss, [`evaluate`] scores tasks, [`progress`] prints a line for each
//!   step.
//!
//! What does not train is in the crate `tools`: reports, explanations, forks, exports, estimates, benchmarks.
//!
//! Invariant: step N is a function of the run and N. It does not depend on workers, threads, prefetching, checkpoints,
//! kills or dates.

#![forbid(unsafe_code)]

pub mod audit;
pub mod checkpoint;
pub mod costs;
pub mod evaluate;
pub mod events;
pub mod exec;
pub mod folder;
pub mod hf;
pub mod launch;
pub mod ledger;
pub mod memory;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod optim;
mod passes;
pub mod progress;
pub mod reaction;
pub mod refusal;
pub mod replay;
pub mod run;
mod shown;
pub mod spec;
pub mod state;
pub mod step;
pub mod timing;
pub mod validate;
pub mod waiting;
pub mod workers;

pub use exec::ExecOptions;
pub use run::{RunOutcome, World, fit_workers, idle_ranks, refuse_unshared, train};
pub use spec::RunSpec;
