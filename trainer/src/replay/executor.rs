//! Who computes the micro-batches of a replay: this machine, or whoever stands in its place.
//!
//! The verdict compares what an executor answers with the ledger, and with its own second answer. That second answer
//! is what tells a changed kernel from a failing machine, so it has to be possible to put a failing one in: the tests do.
//! The program always computes on this machine.

use contract::Result;
use loader::Batch;

use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{self, Computed, Context, Detail, MicroBatchSums, micro_batch};
use crate::workers::Workers;

/// Computes micro-batches, and nothing that decides whether they are right.
pub trait Executor {
    /// What the micro-batches of the step after `state` come to, of which `batch` is this rank's part.
    fn compute(
        &self,
        cx: Context<'_>,
        state: &State,
        batch: &Batch,
        detail: Detail,
    ) -> Result<Computed> {
        let micro_batches = micro_batch::stage(cx.spec, batch, state.weights[0].device())?;
        step::compute(cx, state, batch, &micro_batches, detail)
    }

    /// One micro-batch of it.
    fn micro_batch(
        &self,
        spec: &RunSpec,
        state: &State,
        batch: &Batch,
        micro_batch: u64,
        workers: Workers,
    ) -> Result<MicroBatchSums> {
        step::micro_batch_alone(spec, state, batch, micro_batch, workers)
    }
}

/// The machine that this process runs on.
pub struct ThisMachine;

impl Executor for ThisMachine {}
