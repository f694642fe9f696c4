//! The training loop: opens or resumes a run, and steps until the end, a signal or a fault. One rank is a special case
//! of many.
//!
//! - [`world`] is the ranks, kernels and device of a run; `agree` compares the ranks before training.
//! - `open` takes the run's folder and finds the step to resume from, `restore` reads the state; `record` writes the
//!   results, on rank 0; `keep` writes checkpoints, on every rank.
//! - `recover` lets the remaining ranks meet again after a loss: they reopen the run and continue, from memory if
//!   `replicas` has copies of what the lost ranks owned. A restarted rank joins in the same way, between two steps.

pub(crate) mod agree;
pub(crate) mod keep;
mod open;
mod record;
mod recover;
mod replicas;
pub(crate) mod restore;
pub mod world;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use contract::{Digest, Result};
use kernels::device::Stager;
use kernels::runtime;
use loader::{Batch, BatchMemory, OpenedCurriculum, PrefetchSource, Prefetcher, RankSlice};

use crate::exec::ExecOptions;
use crate::folder::RunFolder;
use crate::mesh::axes::Axis;
use crate::mesh::share::WeightSharing;
use crate::mesh::{Mesh, ProcessMesh, team};
use crate::model::{BatchBuffer, CheckedMicroBatch};
use crate::reaction::ReactingSpec;
use crate::refusal::{caught, lost};
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{self, Requests, StagedBatch, StepContext};
pub use agree::{fit_workers, idle_ranks, refuse_unshared};
use open::{OpenedRun, Resume};
use record::Recorder;
use recover::Recovery;
use replicas::Replicas;
pub use world::World;

/// How a run ended, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOutcome {
    /// The last step computed.
    pub step: u64,
    /// The last step of the curriculum.
    pub steps: u64,
    /// The state digest after it; `None` before the first step.
    pub state: Option<Digest>,
}

/// Trains the run `opened` from the state of its folder to its last step, as one of the ranks of `world`.
pub fn train(
    opened: &OpenedCurriculum,
    exec: &ExecOptions,
    world: &mut World,
) -> Result<RunOutcome> {
    let (mut recovery, mut replicas) = (recover::joined(world)?, Replicas::new(exec.replicate));
    loop {
        // A panic becomes a fault: the other ranks are notified, and the process reports it when it ends.
        let ended = caught(|| run(opened, exec, world, &mut replicas, recovery.take()));
        recovery = Some(match ended {
            Ok(LoopEnd::Done(outcome)) => {
                std::mem::take(&mut world.locks).release();
                return Ok(outcome);
            }
            Ok(LoopEnd::Joined) => recover::admit(world, exec)?,
            Err(fault) => recover::recover(world, exec, fault)?,
        });
    }
}

/// Why the training loop ended.
enum LoopEnd {
    /// The run is complete, or was asked to stop.
    Done(RunOutcome),
    /// A restarted rank waits to join.
    Joined,
}

fn run(
    opened: &OpenedCurriculum,
    exec: &ExecOptions,
    world: &mut World,
    replicas: &mut Replicas,
    recovery: Option<Recovery>,
) -> Result<LoopEnd> {
    runtime::enter_thread().map_err(lost)?;
    let spec = Arc::new(RunSpec::of_run(opened, &exec.out)?);
    let chosen = agree::join(&spec, exec, world, recovery.is_some())?;
    let team = ProcessMesh::new(&world.comm, exec.degrees, exec.grad_reduce, exec.flat)?;
    let after = Resume { recovery, replicas };
    let begun = open::open(&spec, opened, exec, world, &team, &chosen, after)?;
    let OpenedRun { mut state, mut digest, mut recorder, mut keeper, from_memory } = begun;
    replicas.keep(&team, &state)?;
    if let Some(digest) =
        digest.filter(|_| from_memory && checkpoint_is_due(&spec, exec, state.step))
    {
        // The ranks may have been lost while writing it.
        keeper.keep(&state, digest, &mut recorder)?;
    }
    let ledger = RunFolder::new(&exec.out).ledger();
    let mut reacting = ReactingSpec::together(Arc::clone(&spec), &ledger, state.step, &world.comm)?;
    let (plan, stores, options) = (reacting.feed(), spec.data.clone(), exec.prefetch);
    let context = StepContext { spec: reacting.spec(), team: &team, workers: exec.workers };
    let steps = state.step + 1..catch_up(context, exec, &state, &mut recorder)? + 1;
    let ahead = PrefetchSource { plan, stores, steps, options };
    let stager = Stager::new(world.device).map_err(lost)?;
    let (memory, check, send) = (memory(&stager), checking(&spec), sending(stager));
    let mut batches = Prefetcher::by_step(ahead, slices(&spec, &team), memory, check, send)?;
    let sharing = WeightSharing::new(&team);
    while let Some(batch) = recorder.wait(|| batches.next()) {
        let (batch, micro_batches) = batch?;
        let context = StepContext { spec: reacting.spec(), team: &team, workers: exec.workers };
        let asked = || requests(exec, world);
        let stepped = step::advance(context, &mut state, &batch, &micro_batches, &sharing, asked);
        let stepped = stepped.map_err(|fault| keeper.failed(fault, &state, &mut recorder))?;
        replicas.keep(&team, &state)?;
        world.locks.check()?;
        recorder.record(&stepped)?;
        recorder.record_unauthenticated(world)?;
        digest = Some(stepped.record.state_digest);
        keeper.remember(&state, &stepped.record, &mut recorder)?;
        // Before the checkpoint: a run that resumes from it would not validate this step again.
        let Requests { mut stop, join, keep } = stepped.asked;
        if exec.validation.is_due(state.step, last_step(&spec, exec)) {
            sharing.finish()?;
            // A requested stop does not wait for validation.
            stop = stop || !recorder.validate(context, exec, &state)?;
        }
        if stop || join || keep || checkpoint_is_due(&spec, exec, state.step) {
            keeper.keep(&state, stepped.record.state_digest, &mut recorder)?;
        }
        reacting.learn(&stepped.record)?;
        if join && !stop && state.step < last_step(&spec, exec) {
            sharing.finish()?;
            keeper.finish(&mut recorder)?;
            return Ok(LoopEnd::Joined);
        }
        if stop {
            break;
        }
    }
    sharing.finish()?;
    keeper.finish(&mut recorder)?;
    recorder.finish(state.step)?;
    // No rank may finish before rank 0 has written everything.
    world.comm.barrier("the end").map_err(lost)?;
    Ok(LoopEnd::Done(RunOutcome { step: state.step, steps: spec.plan.steps(), state: digest }))
}

/// What this rank was requested to do since it was last asked.
fn requests(exec: &ExecOptions, world: &World) -> Requests {
    let (stop, join) = (exec.stopped(), world.is_awaited());
    Requests { stop, join, keep: exec.keep.swap(false, Ordering::Relaxed) }
}

/// Validates after the step of `state`, if that was due and was broken off. Returns the last step to compute: none
/// follows if the run is asked to stop meanwhile.
fn catch_up(
    context: StepContext<'_>,
    exec: &ExecOptions,
    state: &State,
    recorder: &mut Recorder<'_>,
) -> Result<u64> {
    let last = last_step(context.spec, exec);
    let is_due = state.step > 0 && exec.validation.is_due(state.step, last);
    let is_owed = is_due && recorder.owes(context.team.group, exec, state.step)?;
    Ok(if is_owed && !recorder.validate(context, exec, state)? { state.step } else { last })
}

/// The step after which this process stops.
fn last_step(spec: &RunSpec, exec: &ExecOptions) -> u64 {
    let last = spec.plan.steps();
    exec.stop_after.map_or(last, |stop| last.min(stop))
}

/// Whether the state after `step` has to be saved.
fn checkpoint_is_due(spec: &RunSpec, exec: &ExecOptions, step: u64) -> bool {
    step == last_step(spec, exec) || step.is_multiple_of(exec.checkpoint_every.max(1))
}

/// This rank's part of each step; which ranks share micro-batches may depend on the phase.
fn slices(
    spec: &Arc<RunSpec>,
    team: &ProcessMesh<'_>,
) -> impl Fn(u64) -> Result<RankSlice> + Send + Sync + 'static {
    let (spec, grad_reduce, limits) = (Arc::clone(spec), team.grad_reduce, team.degrees);
    let (rank, world) = (team.group.rank(), team.group.world());
    move |step| {
        let mesh = Mesh::of(world, limits, spec.model_at(step)?.cut);
        team::slice(grad_reduce, mesh.place(Axis::Dp, rank), mesh.dp)
    }
}

/// The allocator for batches: buffers of the device's ring.
fn memory(
    stager: &Stager,
) -> impl Fn(usize) -> Result<Box<dyn BatchMemory>> + Send + Sync + use<> + 'static {
    let buffers = stager.buffers().clone();
    move |tokens| Ok(Box::new(BatchBuffer::take(&buffers, tokens)?))
}

/// The check of each batch.
fn checking(
    spec: &Arc<RunSpec>,
) -> impl Fn(Batch) -> Result<(Batch, Vec<CheckedMicroBatch>)> + Send + Sync + use<> + 'static {
    let spec = Arc::clone(spec);
    move |batch| {
        let micro_batches = StagedBatch::check(&spec, &batch)?;
        Ok((batch, micro_batches))
    }
}

/// The prefetcher's last stage: copies each batch to the device while the step before is computed.
fn sending(
    stager: Stager,
) -> impl FnMut((Batch, Vec<CheckedMicroBatch>)) -> Result<(Batch, StagedBatch)> + Send + 'static {
    move |(mut batch, micro_batches)| {
        let micro_batches = StagedBatch::send(micro_batches, &mut batch, &stager)?;
        Ok((batch, micro_batches))
    }
}
