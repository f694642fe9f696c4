//! Weights, moved: the ZAYA1 model, its optimizers, the ledger, checkpoints and replay.
//!
//! - [`spec`] is what is trained (hashed), [`exec`] how fast (no hash). [`run`] is the loop, [`folder`] what it leaves.
//! - [`step`] is one step: [`model`] computes micro-batches on [`workers`], the fixed tree adds them, [`optim`] moves the
//!   [`state`]; on one rank or on many, with the same bits.
//! - [`audit`] says which micro-batches are computed twice.
//! - [`launch`] starts ranks and finds their place, [`mesh`] says who does what.
//! - [`replay`] computes past steps again, [`explain`] says what was odd about one; [`compare`] finds where two runs part.
//! - [`change`] is what a counterfactual imagines and [`fork`] makes true, [`chart`] its picture.
//! - [`plan`] tells what a run will need before any of it is allocated, [`sizing`] how fast it will be and on what.
//! - [`hf`] is Hugging Face's `zaya`, in and out; [`mod@export`] hands a run's state to it.
//! - [`ledger`] holds what was computed, [`events`] where and when, [`checkpoint`] the state itself; [`metrics`] draws
//!   curves, [`validate`] takes the loss on held-out text, [`progress`] speaks to whoever waits.
//! - [`report`] shows a run to people: a table, odd steps with their reason, a page.
//!
//! Invariant: step N is a function of the run and N. Workers, threads, prefetch, checkpoints, kills and dates are not
//! among its arguments.

#![forbid(unsafe_code)]

pub mod audit;
pub mod bench;
pub mod change;
pub mod chart;
pub mod checkpoint;
pub mod compare;
pub mod events;
pub mod exec;
pub mod explain;
pub mod export;
pub mod folder;
pub mod fork;
pub mod hf;
pub mod launch;
pub mod ledger;
pub mod memory;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod optim;
pub mod plan;
pub mod progress;
pub mod refusal;
pub mod replay;
pub mod report;
pub mod run;
mod shown;
pub mod sizing;
pub mod spec;
pub mod state;
pub mod step;
pub mod timing;
pub mod trace;
mod usual;
pub mod validate;
mod waiting;
pub mod workers;

pub use exec::ExecOptions;
pub use run::{Outcome, World, fit_workers, idle_ranks, refuse_unshared, train};
pub use spec::RunSpec;
