//! Replay: recomputes a past step, and compares each quantity with the ledger.
//!
//! `way` computes the state before a step, `kept` stores it for later questions; `verdict` states the result;
//! `together` coordinates several ranks. What a replay is asked about (the documents behind a loss, what was wrong in
//! the run, counterfactuals) is in `tools::replay`.
//!
//! One rank is a special case of many, as in training. Invariant: a replay writes nothing that a run reads and takes
//! none of its locks, so a run may be replayed while it continues.

mod executor;
mod kept;
pub mod spent;
mod together;
mod verdict;
mod way;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::{Class, Fault, Result};
use kernels::runtime::KernelTable;
use loader::{Batch, OpenedCurriculum, RankSlice, recorded};
use mixer::Curriculum;
use serde::Serialize;
use store::Location;
use tch::Device;

use crate::folder::{RunFolder, compare_content, compare_curriculum, head, table_difference};
use crate::ledger::{Ledger, StepDifference, StepRecord, StepStage};
use crate::mesh::share::{self, WeightSharing};
use crate::mesh::{Degrees, GradReduce, ProcessMesh};
use crate::model::WeightShards;
use crate::reaction::ReactingSpec;
use crate::run::World;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{self, Detail, MicroBatchSums, ReducedGradient, Requests, StepContext};
use crate::workers::Workers;
pub use executor::{Executor, ThisMachine};
pub use kept::SavedStateLimits;
use kept::SavedStates;
use spent::{Stopwatch, TimesByPart};
pub use together::meet;
pub use verdict::Verdict;

/// One replayed step, or micro-batch of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Replayed {
    /// The step.
    pub step: u64,
    /// The micro-batch, if only one was computed.
    pub micro_batch: Option<u64>,
    /// The result.
    pub verdict: Verdict,
    /// The first quantity that differs; the ledger is on the left.
    pub difference: Option<StepDifference>,
    /// What to look at next.
    pub advice: String,
    /// Why the step could not be completed, if it diverged.
    pub diverged: Option<String>,
    /// The mean loss of a label.
    pub loss: f64,
    /// The record, if the step could be completed.
    pub record: Option<StepRecord>,
}

/// A replayed step or micro-batch with its text.
pub struct ReplayedBatch {
    /// The result.
    pub replayed: Replayed,
    /// This rank's part of the step's batch.
    pub batch: Batch,
    /// The loss of each token of the step, or of the micro-batch; empty without [`Detail::Tokens`].
    pub token_losses: Vec<f32>,
}

/// How several ranks replay together; no value here changes results.
#[derive(Clone, Debug, Default)]
pub struct ReplayParallelism {
    /// How they distribute micro-batches.
    pub grad_reduce: GradReduce,
    /// Whether they communicate as if all were on one machine.
    pub flat: bool,
    /// How many may share a micro-batch.
    pub degrees: Degrees,
    /// The request as flags, which must be the same on all ranks.
    pub asked: Vec<String>,
}

/// A run opened for replay, by one rank or as one of several.
pub struct Replayer {
    spec: RunSpec,
    folder: RunFolder,
    /// Where its stores are now, if they were moved.
    stores: Vec<Location>,
    ledger: Ledger,
    /// The last step that all ranks see in the ledger.
    recorded: u64,
    world: Arc<World>,
    together: ReplayParallelism,
    workers: Workers,
    executor: Box<dyn Executor>,
    kept: SavedStates,
    times: RefCell<TimesByPart>,
    /// How this machine's kernel table differs from the ledger's.
    pub kernels: Option<String>,
    /// Checkpoints that were skipped and states that were not kept, with the reason.
    pub warnings: Vec<String>,
}

impl Replayer {
    /// Opens the run in `root` for replay by one rank, without modifying it.
    pub fn open(
        root: &Path,
        table: &KernelTable,
        device: Device,
        workers: Workers,
    ) -> Result<Self> {
        let world = Arc::new(World::alone(device, table.clone()));
        Replayer::open_with(root, &[], &world, workers, ReplayParallelism::default())
    }

    /// Opens it as one of the ranks of `world`, which have met; `stores` replace the locations of the curriculum's
    /// stores, if given. All ranks see the same folder.
    pub fn open_with(
        root: &Path,
        stores: &[Location],
        world: &Arc<World>,
        workers: Workers,
        together: ReplayParallelism,
    ) -> Result<Self> {
        let folder = RunFolder::new(root);
        let ledger = folder.read_ledger()?;
        let mut spec = RunSpec::of_folder(root, stores, &ledger.head().stores)?;
        let now = head(&spec, &world.runtime)?;
        compare_content(ledger.head(), &now, &folder.ledger())?;
        compare_curriculum(&ledger, &spec, &folder.ledger())?;
        let kernels = table_difference(&ledger.head().kernel_table, &now.kernel_table);
        let kernels = kernels.map(|(key, before, after)| {
            format!("the kernel table differs: {key} was {before}, here it is {after}")
        });
        let recorded = together::agree(&spec, &ledger, world, &together)?;
        spec.plan = recorded::extended(&spec.plan, &folder.ledger(), recorded)?;
        let kept =
            SavedStates::new(&folder, &world.runtime, SavedStateLimits { states: 0, bytes: 0 });
        Ok(Replayer {
            spec,
            folder,
            stores: stores.to_vec(),
            ledger,
            recorded,
            world: Arc::clone(world),
            together,
            workers,
            executor: Box::new(ThisMachine),
            kept,
            times: RefCell::default(),
            kernels,
            warnings: Vec::new(),
        })
    }

    /// Replaces the executor of its micro-batches.
    pub fn computed_by(self, executor: Box<dyn Executor>) -> Self {
        Replayer { executor, ..self }
    }

    /// Keeps states before requested steps in the run's folder, as `keep` says.
    pub fn keeping(self, keep: SavedStateLimits) -> Self {
        Replayer { kept: SavedStates::new(&self.folder, &self.world.runtime, keep), ..self }
    }

    /// The specification of the run.
    pub fn spec(&self) -> &RunSpec {
        &self.spec
    }

    /// The run's ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The run's folder.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// Where its stores are now, if they were moved.
    pub fn stores(&self) -> &[Location] {
        &self.stores
    }

    /// The ranks of the replay.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The workers of this rank.
    pub fn workers(&self) -> Workers {
        self.workers
    }

    /// The number of steps in the ledger.
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Times by part so far.
    pub fn times(&self) -> TimesByPart {
        self.times.borrow().clone()
    }

    /// Runs `work`, and adds its time to `part`.
    pub fn timed<T>(&self, part: &'static str, work: impl FnOnce() -> T) -> T {
        let watch = Stopwatch::start();
        let outcome = work();
        self.times.borrow_mut().add(part, watch.read());
        outcome
    }

    /// Counts tokens of a forward pass, or also of a backward pass.
    pub fn passed(&self, tokens: u64, backward: bool) {
        let mut times = self.times.borrow_mut();
        times.forward_tokens += tokens;
        times.backward_tokens += if backward { tokens } else { 0 };
    }

    /// Computes the step after `state`, a copy of `before`, as the run did; compares it, and updates the state. Calls
    /// `look` with the gradient before the update.
    pub fn step(
        &self,
        before: &State,
        state: &mut State,
        detail: Detail,
        look: impl FnOnce(&ReducedGradient),
    ) -> Result<ReplayedBatch> {
        let batch = self.timed("batch", || self.part(&self.spec, state.step + 1))?;
        let (step, watch) = (batch.step, Stopwatch::start());
        let (gradient, outcome) = self.compute_and_look(&self.spec, state, &batch, detail, look)?;
        self.times.borrow_mut().add("step", watch.read());
        self.passed(tokens(&batch), true);
        let (record, diverged) = match outcome {
            Ok(record) => (Some(record), None),
            Err(fault) => (None, Some(fault.to_string())),
        };
        let difference = self.difference(step, record.as_ref())?;
        let verdict = match &difference {
            _ if step > self.recorded => Verdict::NotRecorded,
            Some(found) => self.again(Some(before), &batch, record.as_ref(), found)?,
            None => Verdict::SameBits,
        };
        let token_losses = match detail {
            Detail::Sums => Vec::new(),
            Detail::Tokens => self.token_losses(&gradient)?,
        };
        let (found, loss) = (self.found(step, verdict, difference), gradient.mean());
        let replayed = Replayed { diverged, loss, record, ..found };
        Ok(ReplayedBatch { replayed, batch, token_losses })
    }

    /// Gathers all weights of `state` on every rank, in the format of the next step, so that one rank can compute
    /// alone.
    pub fn hold_whole(&self, state: &mut State) -> Result<()> {
        let (dtype, team) = (self.spec.dtype_at(state.step + 1), self.team()?);
        match state.cast_weights(
            &self.spec.parameters,
            dtype,
            WeightShards::default(),
            self.workers,
        )? {
            true => share::weights(&team, state),
            false => Ok(()),
        }
    }

    /// Computes one micro-batch of the step after `state`, and compares it. One rank does it alone, with all weights.
    pub fn micro_batch(&self, state: &State, micro_batch: u64) -> Result<ReplayedBatch> {
        let step = state.step + 1;
        self.check_micro_batch(step, micro_batch)?;
        let batch = self.timed("batch", || self.batch(step))?;
        let sums = self.timed("step", || self.micro_batch_sums(state, &batch, micro_batch))?;
        self.passed(batch.micro_batch * u64::from(batch.seq_len), true);
        let difference = match step > self.recorded {
            true => None,
            false => micro_batch_difference(&self.ledger.record(step)?, micro_batch, &sums),
        };
        let verdict = match &difference {
            _ if step > self.recorded => Verdict::NotRecorded,
            None => Verdict::SameBits,
            Some(found) => {
                let again = self.micro_batch_sums(state, &batch, micro_batch)?;
                let same =
                    again.gradient == sums.gradient && again.loss.to_bits() == sums.loss.to_bits();
                Verdict::of(same, found, self.kernels.as_deref())
            }
        };
        let loss = sums.loss / sums.labels as f64;
        let found = self.found(step, verdict, difference);
        let replayed = Replayed { micro_batch: Some(micro_batch), loss, ..found };
        Ok(ReplayedBatch { replayed, batch, token_losses: sums.token_losses })
    }

    /// The results of one micro-batch of `batch`, at the state before it.
    pub fn micro_batch_sums(
        &self,
        state: &State,
        batch: &Batch,
        micro_batch: u64,
    ) -> Result<MicroBatchSums> {
        self.executor.micro_batch(&self.spec, state, batch, micro_batch, self.workers)
    }

    /// The result of a step, without its loss.
    fn found(&self, step: u64, verdict: Verdict, difference: Option<StepDifference>) -> Replayed {
        Replayed {
            step,
            micro_batch: None,
            verdict,
            advice: verdict.advice_on(difference.as_ref(), self.kernels.as_deref()),
            difference,
            diverged: None,
            loss: 0.0,
            record: None,
        }
    }

    /// Refuses a micro-batch that a step does not have, before the state for it is computed.
    pub fn check_micro_batch(&self, step: u64, micro_batch: u64) -> Result<()> {
        let step = self.spec.plan.step(step)?;
        let micro_batches = step.batch / step.micro_batch;
        if micro_batch < micro_batches {
            Ok(())
        } else {
            Err(no_micro_batch(step.step, micro_batch, micro_batches))
        }
    }

    /// The specification of `curriculum`, which differs from the run's from step `first` on, after the steps before.
    pub fn changed(&self, curriculum: &Curriculum, first: u64) -> Result<ReactingSpec> {
        let (text, ledger) = (curriculum.canonical(), self.folder.ledger());
        let opened = OpenedCurriculum::open_text(self.folder.curriculum(), text)?;
        ReactingSpec::recorded(Arc::new(RunSpec::new(&opened)?), &ledger, first - 1)
    }

    /// The complete batch of a step.
    pub fn batch(&self, step: u64) -> Result<Batch> {
        loader::batch(&self.spec.plan, &self.spec.data, step, RankSlice::WHOLE)
    }

    /// This rank's part of the batch of a step of `spec`.
    pub fn part(&self, spec: &RunSpec, step: u64) -> Result<Batch> {
        let slice = self.team()?.lines(spec.model_at(step)?.cut)?.slice()?;
        loader::batch(&spec.plan, &spec.data, step, slice)
    }

    fn team(&self) -> Result<ProcessMesh<'_>> {
        let ReplayParallelism { grad_reduce, flat, degrees, .. } = self.together;
        ProcessMesh::new(&self.world.comm, degrees, grad_reduce, flat)
    }

    /// Computes the step after `state` by `spec`: its gradient, and its record unless it diverges.
    pub fn compute(
        &self,
        spec: &RunSpec,
        state: &mut State,
        batch: &Batch,
        detail: Detail,
    ) -> Result<(ReducedGradient, Result<StepRecord>)> {
        self.compute_and_look(spec, state, batch, detail, |_| ())
    }

    /// The same; calls `look` with the gradient before the update.
    fn compute_and_look(
        &self,
        spec: &RunSpec,
        state: &mut State,
        batch: &Batch,
        detail: Detail,
        look: impl FnOnce(&ReducedGradient),
    ) -> Result<(ReducedGradient, Result<StepRecord>)> {
        let team = self.team()?;
        let cx = StepContext { spec, team: &team, workers: self.workers };
        let sharing = WeightSharing::new(&team);
        step::cast_weights(cx, state, batch.step, &sharing)?;
        let computed = self.executor.compute(cx, state, batch, detail)?;
        let mut gradient = computed.read(cx, &state.owners)?;
        look(&gradient);
        match step::complete(cx, state, &mut gradient, &sharing, Requests::default) {
            Err(fault) if fault.class() != Class::Diverged => Err(fault),
            outcome => {
                sharing.finish()?;
                Ok((gradient, outcome.map(|stepped| stepped.record)))
            }
        }
    }

    /// The gradient of a batch at a state, without an update.
    pub fn gradient(&self, state: &State, batch: &Batch) -> Result<ReducedGradient> {
        let team = self.team()?;
        let cx = StepContext { spec: &self.spec, team: &team, workers: self.workers };
        self.executor.compute(cx, state, batch, Detail::Sums)?.read(cx, &state.owners)
    }

    /// Recomputes a step that differs, to see whether the difference repeats.
    fn again(
        &self,
        before: Option<&State>,
        batch: &Batch,
        first: Option<&StepRecord>,
        difference: &StepDifference,
    ) -> Result<Verdict> {
        // If the state itself was not reproduced, the step need not be computed.
        let Some(before) = before else { return Ok(Verdict::NotRepeatable) };
        let mut before = before.copy()?;
        let (_, outcome) = self.compute(&self.spec, &mut before, batch, Detail::Sums)?;
        let parameters = &self.ledger.head().parameters;
        let same = match (first, outcome) {
            (Some(first), Ok(second)) => first.difference(&second, parameters).is_none(),
            (None, Err(_)) => true,
            _ => false,
        };
        Ok(Verdict::of(same, difference, self.kernels.as_deref()))
    }

    fn difference(&self, step: u64, record: Option<&StepRecord>) -> Result<Option<StepDifference>> {
        if step > self.recorded {
            return Ok(None);
        }
        let written = self.ledger.record(step)?;
        Ok(match record {
            Some(record) => written.difference(record, &self.ledger.head().parameters),
            None => Some(StepDifference {
                quantity: "outcome".to_owned(),
                stage: StepStage::Forward,
                left: format!("a loss of {}", written.loss),
                right: "it diverged".to_owned(),
            }),
        })
    }

    /// The run's folder.
    pub fn root(&self) -> PathBuf {
        self.folder.root().to_owned()
    }
}

/// The number of tokens in a batch.
pub fn tokens(batch: &Batch) -> u64 {
    batch.rows * u64::from(batch.seq_len)
}

/// The difference between a micro-batch and the ledger.
fn micro_batch_difference(
    written: &StepRecord,
    micro_batch: u64,
    sums: &MicroBatchSums,
) -> Option<StepDifference> {
    let index = micro_batch as usize;
    let differs = |stage: StepStage, quantity: &str, left: Option<u64>, right: u64| {
        let left = left.map_or_else(|| "none".to_owned(), |left| format!("{left:016x}"));
        let right = format!("{right:016x}");
        (left != right).then(|| StepDifference {
            quantity: format!("{quantity} of micro-batch {micro_batch}"),
            stage,
            left,
            right,
        })
    };
    let (loss, gradient) =
        (written.micro_batch_losses.0.get(index), written.micro_batch_grad_checksums.0.get(index));
    differs(StepStage::Data, "labels", written.micro_batch_labels.get(index).copied(), sums.labels)
        .or_else(|| differs(StepStage::Forward, "loss", loss.copied(), sums.loss.to_bits()))
        .or_else(|| differs(StepStage::Backward, "gradient", gradient.copied(), sums.gradient))
}

fn no_micro_batch(step: u64, micro_batch: u64, micro_batches: u64) -> Fault {
    Fault::usage(format!("step {step} has no micro-batch {micro_batch}"))
        .at("--micro-batch")
        .wanted(format!("0 to {}", micro_batches - 1))
}
