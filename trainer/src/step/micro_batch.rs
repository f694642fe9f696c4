//! The micro-batches of a step: each computed by one worker with one math thread, a function of weights and rows.

use std::sync::Mutex;

use contract::{Fault, Result};
use kernels::device::Stager;
use loader::Batch;

use super::frozen::{FrozenModel, Weights};
use super::readout::{Detail, MicroBatchReport, MicroBatchSums};
use super::rows::{input, inputs, place};
use crate::audit::{self, AuditFraction};
use crate::mesh::context::{SharedMicroBatch, SharedSink};
use crate::mesh::sink::MicroBatchSink;
use crate::mesh::sum::GradientSum;
use crate::model::{
    self, AxisComm, BatchBuffer, CheckedMicroBatch, GradientSink, MicroBatchContext,
    StagedMicroBatch, WeightArrival,
};
use crate::refusal::lost;
use crate::spec::{PhaseModel, RunSpec};
use crate::state::State;
use crate::workers::Workers;

/// The micro-batches of one step that are being copied to the device; each is taken once.
///
/// The prefetcher's last stage makes them, so that on a GPU the copy overlaps with the step before.
pub struct StagedBatch(Vec<Mutex<Option<StagedMicroBatch>>>);

impl StagedBatch {
    /// Checks every micro-batch of `batch`, which is in a [`BatchBuffer`]: called by a prefetcher's readers.
    pub fn check(spec: &RunSpec, batch: &Batch) -> Result<Vec<CheckedMicroBatch>> {
        let config = &spec.model_at(batch.step)?.config;
        inputs(batch).map(|one| one.check_in_place(config)).collect()
    }

    /// Starts to copy the checked micro-batches of `batch`.
    pub fn send(
        micro_batches: Vec<CheckedMicroBatch>,
        batch: &mut Batch,
        stager: &Stager,
    ) -> Result<StagedBatch> {
        let buffer = batch.memory_mut::<BatchBuffer>();
        let buffer = buffer.ok_or_else(|| Fault::bug("a batch that does not lie in a buffer"))?;
        Ok(StagedBatch::of(buffer.send(micro_batches, stager)?))
    }

    /// Checks every micro-batch of a batch in any memory, and starts to copy it.
    pub fn stage(spec: &RunSpec, batch: &Batch, stager: &Stager) -> Result<StagedBatch> {
        let config = &spec.model_at(batch.step)?.config;
        let micro_batches = inputs(batch).map(|one| one.check(config)).collect::<Result<_>>()?;
        let mut buffer = BatchBuffer::copy_of(batch.columns(), stager.buffers())?;
        Ok(StagedBatch::of(buffer.send(micro_batches, stager)?))
    }

    fn of(staged: Vec<StagedMicroBatch>) -> StagedBatch {
        StagedBatch(staged.into_iter().map(Some).map(Mutex::new).collect())
    }

    fn take(&self, micro_batch: u64) -> Result<StagedMicroBatch> {
        let slot = self.0.get(micro_batch as usize).and_then(|slot| slot.lock().ok()?.take());
        slot.ok_or_else(|| {
            Fault::bug(format!("micro-batch {micro_batch} was not staged, or taken twice"))
        })
    }
}

/// Starts to copy the micro-batches of `batch` to `device`.
pub fn stage(spec: &RunSpec, batch: &Batch, device: tch::Device) -> Result<StagedBatch> {
    StagedBatch::stage(spec, batch, &*Stager::kept(device).map_err(lost)?)
}

/// The micro-batches of one step that this rank computes.
pub(crate) struct RankMicroBatches<'a> {
    pub(crate) spec: &'a RunSpec,
    pub(crate) batch: &'a Batch,
    pub(crate) staged: &'a StagedBatch,
    /// Their numbers in the step.
    pub(crate) numbers: &'a [u64],
    /// Labels in the whole step, of all ranks.
    pub(crate) label_count: u64,
    pub(crate) detail: Detail,
    pub(crate) workers: Workers,
    /// This rank's number at launch.
    pub(crate) rank: u32,
    /// How it shares them with other ranks, if it does.
    pub(crate) shared: Option<SharedMicroBatch<'a>>,
    /// The weights of other ranks that are still on their way.
    pub(crate) arrival: &'a dyn WeightArrival,
}

impl RankMicroBatches<'_> {
    /// Computes each with the weights and biases of `state`. `begun` is called before each is computed, `sum` gets each
    /// gradient as soon as a layer has it, `computed` is called after each, in order. Results stay on the device.
    pub(super) fn each(
        &self,
        state: &State,
        sum: &GradientSum<'_>,
        begun: impl Fn(u64) -> Result<()> + Sync,
        mut computed: impl FnMut() -> Result<()> + Send,
    ) -> Result<Vec<MicroBatchReport>> {
        let RankMicroBatches { spec, batch, staged, numbers, workers, .. } = *self;
        let model = FrozenModel::at(spec, batch.step, state, workers)?;
        let work = |micro_batch: u64| {
            let number = numbers[micro_batch as usize];
            begun(number)?;
            let compute = |weights: Weights<'_>| {
                let staged = staged.take(micro_batch)?;
                let picks =
                    |audit: AuditFraction| audit.picks(spec.curriculum.seed, batch.step, number);
                let audited = workers.audit().is_some_and(picks);
                let said = self.once(micro_batch, weights, staged, Some((sum, audited)))?;
                if audited {
                    self.again(micro_batch, weights, &said)?;
                }
                Ok(said)
            };
            model.read(compute, || place(spec, batch, micro_batch))
        };
        let mut all = Vec::new();
        self.computing().fold(batch.rows / batch.micro_batch, work, |_, said| {
            all.push(said);
            computed()
        })?;
        Ok(all)
    }

    /// The workers that compute them. The exchanges of ranks that share a micro-batch have one order.
    fn computing(&self) -> Workers {
        if self.shared.is_some() { self.workers.one() } else { self.workers }
    }

    /// How many of them a worker computes one after another, at most.
    pub(super) fn in_turn(&self) -> u32 {
        self.numbers.len().div_ceil(self.computing().count()) as u32
    }

    /// Computes a micro-batch and adds its gradients to `sum`, if given; the flag asks for its checksum at once.
    fn once(
        &self,
        micro_batch: u64,
        Weights { weights, biases }: Weights<'_>,
        staged: StagedMicroBatch,
        sum: Option<(&GradientSum<'_>, bool)>,
    ) -> Result<MicroBatchReport> {
        let RankMicroBatches { spec, batch, numbers, label_count, detail, workers, shared, .. } =
            *self;
        let PhaseModel { config, cut, .. } = spec.model_at(batch.step)?;
        let (options, number) = (workers.options().cut(*cut), numbers[micro_batch as usize]);
        let how = MicroBatchContext {
            line: shared.map(|shared| shared.line as &dyn AxisComm),
            folded: shared.and_then(|shared| shared.folded),
            arrival: Some(self.arrival),
            ..options.into()
        };
        let compute = |staged, sink: &mut dyn GradientSink| {
            model::micro_batch(config, weights, biases, staged, label_count, how, sink)
        };
        let (into, at_once) =
            (sum.map(|(sum, _)| (sum, number)), sum.is_some_and(|(_, flag)| flag));
        let (losses, checksum) = match shared {
            Some(shared) => {
                let mut sink = SharedSink::new(shared, into);
                (compute(staged, &mut sink)?, sink.finish()?)
            }
            None => {
                let mut sink = MicroBatchSink::new(into, at_once);
                (compute(staged, &mut sink)?, sink.finish()?)
            }
        };
        MicroBatchReport::of(losses, checksum, &input(batch, micro_batch), detail)
    }

    /// Computes a micro-batch a second time, and fails if the result differs.
    fn again(
        &self,
        micro_batch: u64,
        weights: Weights<'_>,
        first: &MicroBatchReport,
    ) -> Result<()> {
        let config = &self.spec.model_at(self.batch.step)?.config;
        let stager = Stager::kept(weights.weights[0].device()).map_err(lost)?;
        let staged = input(self.batch, micro_batch).stage(config, &stager)?;
        let second = self.once(micro_batch, weights, staged, None)?;
        let outcome = |said: &MicroBatchReport| {
            let MicroBatchSums { loss, gradient, .. } = said.alone()?.0;
            Ok(audit::AuditedResult { loss, gradient })
        };
        audit::compare(outcome(first)?, outcome(&second)?, self.rank, self.shared.is_some())
    }
}

/// Computes one micro-batch by itself, with the loss of each token.
pub fn micro_batch_alone(
    spec: &RunSpec,
    state: &State,
    batch: &Batch,
    micro_batch: u64,
    workers: Workers,
) -> Result<MicroBatchSums> {
    let model = FrozenModel::at(spec, batch.step, state, workers)?;
    let input = input(batch, micro_batch);
    let stager = Stager::kept(model.device()).map_err(lost)?;
    let (config, how) = (model.config(), model.options());
    let (staged, label_count) = (input.stage(config, &stager)?, batch.label_count.max(1));
    let compute = |staged, Weights { weights, biases }: Weights<'_>| {
        let mut sink = MicroBatchSink::new(None, true);
        let losses =
            model::micro_batch(config, weights, biases, staged, label_count, how, &mut sink)?;
        Ok(MicroBatchReport::of(losses, sink.finish()?, &input, Detail::Tokens)?.alone()?.0)
    };
    // On a separate worker, as in the run.
    let mut found = workers.map(vec![staged], |staged| {
        model.read(|weights| compute(staged, weights), || place(spec, batch, micro_batch))
    })?;
    found.pop().ok_or_else(|| Fault::bug("a micro-batch had no outcome"))
}
