//! Tools around a run: nothing here trains, and no bit of a run depends on it.
//!
//! - [`report`] shows a run to people: a table, odd steps with their causes, a page. [`replay`] answers what a replayed
//!   step is asked about, [`explain`] explains it, [`compare`] finds where two runs diverge. [`chart`] plots curves.
//! - [`change`] is a counterfactual, which [`replay`] simulates and [`fork`] trains: a run that shares the first steps
//!   of another one. [`mod@export`] writes the weights of a run for
//!   `transformers`.
//! - [`plan`] predicts what a run will need before it allocates; [`sizing`] estimates how fast it will be and on which
//!   machines, from measurements.
//! - [`mod@bench`] times the parts of a step, [`collectives`] the exchanges between ranks; [`trace`] sums up a trace by
//!   libtorch's profiler.

#![forbid(unsafe_code)]

pub mod bench;
pub mod change;
pub mod chart;
pub mod collectives;
pub mod compare;
pub mod explain;
pub mod export;
pub mod fork;
pub mod plan;
pub mod replay;
pub mod report;
pub mod sizing;
pub mod trace;
