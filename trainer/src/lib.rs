//! Weights, moved: the ZAYA1 model, its optimizers, the ledger, checkpoints and replay.

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod lanes;
pub mod ledger;
pub mod model;
pub mod optim;
pub mod state;
