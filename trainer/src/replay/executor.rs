//! Computes the micro-batches of a replay: on this machine, or on a substitute.
//!
//! The verdict compares an executor's results with the ledger, and with its own second results, which tell a changed
//! kernel from a failing machine. So tests substitute a failing executor; the program always computes on this machine.

use contract::Result;
use loader::Batch;

use crate::mesh::share::WeightSharing;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{self, ComputedMicroBatches, Detail, MicroBatchSums, StepContext, micro_batch};
use crate::workers::Workers;

/// Computes micro-batches, without judging the results.
pub trait Executor {
    /// Computes all micro-batches of the step after `state`; `batch` is this rank's part.
    fn compute(
        &self,
        cx: StepContext<'_>,
        state: &State,
        batch: &Batch,
        detail: Detail,
    ) -> Result<ComputedMicroBatches> {
        let micro_batches = micro_batch::stage(cx.spec, batch, state.weights[0].device())?;
        step::compute(cx, state, batch, &micro_batches, detail, &WeightSharing::new(cx.team))
    }

    /// Computes one micro-batch of that step.
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

/// Computes on this machine.
pub struct ThisMachine;

impl Executor for ThisMachine {}
