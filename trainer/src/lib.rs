//! Weights, moved: the ZAYA1 model, its optimizers, the ledger, checkpoints and replay.
//!
//! - [`spec`] is what is trained (hashed), [`exec`] how fast (no hash). [`run`] is the loop, [`folder`] what it leaves.
//! - [`step`] is one step: [`model`] computes leaves on [`lanes`], the fixed tree adds them, [`optim`] moves the
//!   [`state`].
//! - [`replay`] computes past steps again and explains them; [`compare`] finds where two runs part.
//! - [`ledger`] holds what was computed, [`events`] where and when, [`checkpoint`] the state itself.
//!
//! Invariant: step N is a function of the run and N. Lanes, threads, prefetch, checkpoints, kills and dates are not
//! among its arguments.

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod compare;
pub mod events;
pub mod exec;
pub mod folder;
pub mod lanes;
pub mod ledger;
pub mod model;
pub mod optim;
pub mod replay;
pub mod report;
pub mod run;
pub mod spec;
pub mod state;
pub mod step;

pub use exec::ExecOptions;
pub use run::{Outcome, train};
pub use spec::RunSpec;
