//! The micro-batches of a step: each computed by one worker with one math thread, a pure function of the weights and of its
//! rows.

use std::sync::Mutex;

use contract::{Fault, Result};
use kernels::device::Stager;
use loader::Batch;

use super::frozen::{FrozenModel, Weights};
use super::readout::{Detail, LeafSums, Said};
use super::rows::{input, inputs, place};
use crate::audit;
use crate::mesh::context::{Shared, SharedSink};
use crate::mesh::sink::Checksum;
use crate::mesh::sum::Sum;
use crate::model::{self, CheckedLeaf, Computing, LeafBuffer, Sink, StagedLeaf};
use crate::refusal::refused;
use crate::spec::{PhaseModel, RunSpec};
use crate::state::State;
use crate::workers::Workers;

/// The leaves of one step on their way to the device; each is taken once.
///
/// The prefetcher's last stage makes them, so that on a GPU the copy runs beside the step before.
pub struct Leaves(Vec<Mutex<Option<StagedLeaf>>>);

impl Leaves {
    /// Checks every leaf of `batch`, which lies in a [`LeafBuffer`]: what a prefetcher's readers do.
    pub fn check(spec: &RunSpec, batch: &Batch) -> Result<Vec<CheckedLeaf>> {
        let config = &spec.model_at(batch.step)?.config;
        inputs(batch).map(|leaf| leaf.check_in_place(config)).collect()
    }

    /// Starts moving the leaves of `batch`, which were checked.
    pub fn send(leaves: Vec<CheckedLeaf>, batch: &mut Batch, stager: &Stager) -> Result<Leaves> {
        let buffer = batch.memory_mut::<LeafBuffer>();
        let buffer = buffer.ok_or_else(|| Fault::bug("a batch that does not lie in a buffer"))?;
        Ok(Leaves::of(buffer.send(leaves, stager)?))
    }

    /// Checks every leaf of a batch that lies anywhere, and starts moving a copy.
    pub fn stage(spec: &RunSpec, batch: &Batch, stager: &Stager) -> Result<Leaves> {
        let config = &spec.model_at(batch.step)?.config;
        let leaves = inputs(batch).map(|leaf| leaf.check(config)).collect::<Result<_>>()?;
        let mut buffer = LeafBuffer::copy_of(batch.columns(), stager.buffers())?;
        Ok(Leaves::of(buffer.send(leaves, stager)?))
    }

    fn of(staged: Vec<StagedLeaf>) -> Leaves {
        Leaves(staged.into_iter().map(Some).map(Mutex::new).collect())
    }

    fn take(&self, leaf: u64) -> Result<StagedLeaf> {
        let slot = self.0.get(leaf as usize).and_then(|slot| slot.lock().ok()?.take());
        slot.ok_or_else(|| Fault::bug(format!("micro-batch {leaf} was not staged, or taken twice")))
    }
}

/// The leaves of `batch`, on their way to `device`.
pub(crate) fn stage(spec: &RunSpec, batch: &Batch, device: tch::Device) -> Result<Leaves> {
    let stager = Stager::new(device).map_err(|error| Fault::machine(error.to_string()))?;
    Leaves::stage(spec, batch, &stager)
}

/// Micro-batches of one step, to be computed here.
pub(crate) struct MicroBatches<'a> {
    pub(crate) spec: &'a RunSpec,
    pub(crate) batch: &'a Batch,
    pub(crate) leaves: &'a Leaves,
    /// Their numbers in the step.
    pub(crate) numbers: &'a [u64],
    /// Labels in the whole step, of all ranks.
    pub(crate) divisor: u64,
    pub(crate) detail: Detail,
    pub(crate) workers: Workers,
    /// This rank, as it was launched.
    pub(crate) rank: u32,
    /// With whom it shares them, if with anybody.
    pub(crate) shared: Option<Shared<'a>>,
}

impl MicroBatches<'_> {
    /// Computes every one with the weights and balances of `state`; `begun` hears of each before it is computed, `sum`
    /// gets each gradient when a layer has it, `computed` hears of each in leaf order. What they say is for others to read.
    pub(super) fn each(
        &self,
        state: &State,
        sum: &Sum<'_>,
        begun: impl Fn(u64) -> Result<()> + Sync,
        mut computed: impl FnMut() -> Result<()> + Send,
    ) -> Result<Vec<Said>> {
        let MicroBatches { spec, batch, leaves, numbers, workers, shared, .. } = *self;
        let model = FrozenModel::at(spec, batch.step, state, workers)?;
        let work = |leaf: u64| {
            let number = numbers[leaf as usize];
            begun(number)?;
            let compute = |weights: Weights<'_>| {
                let staged = leaves.take(leaf)?;
                let said = self.once(leaf, weights, staged, Some(sum))?;
                let audit = workers.audit();
                if audit.is_some_and(|audit| audit.picks(spec.curriculum.seed, batch.step, number))
                {
                    self.again(leaf, weights, &said)?;
                }
                Ok(said)
            };
            model.read(compute, || place(spec, batch, leaf))
        };
        // What ranks that share a micro-batch exchange has one order.
        let workers = if shared.is_some() { workers.one() } else { workers };
        let mut all = Vec::new();
        workers.fold(batch.rows / batch.micro_batch, work, |_, said| {
            all.push(said);
            computed()
        })?;
        Ok(all)
    }

    /// Computes a leaf, whose gradients go to `sum` if to anybody.
    fn once(
        &self,
        leaf: u64,
        Weights { weights, biases }: Weights<'_>,
        staged: StagedLeaf,
        sum: Option<&Sum<'_>>,
    ) -> Result<Said> {
        let MicroBatches { spec, batch, numbers, divisor, detail, workers, shared, .. } = *self;
        let PhaseModel { config, cut, .. } = spec.model_at(batch.step)?;
        let (options, number) = (workers.options().cut(*cut), numbers[leaf as usize]);
        let compute = |staged, how: Computing<'_>, sink: &mut dyn Sink| {
            model::micro_batch(config, weights, biases, staged, divisor, how, sink)
        };
        let (losses, checksum) = match (shared, sum) {
            (Some(shared), _) => {
                let into = sum.map(|sum| (sum, number));
                let mut sink = SharedSink::new(shared, into);
                let how = Computing { options, line: Some(shared.line), folded: shared.folded };
                (compute(staged, how, &mut sink)?, sink.finish()?)
            }
            (None, Some(sum)) => {
                let mut sink = sum.sink(number);
                (compute(staged, options.into(), &mut sink)?, sink.checksum()?)
            }
            (None, None) => {
                let mut sink = Checksum::default();
                (compute(staged, options.into(), &mut sink)?, sink.total())
            }
        };
        Said::of(losses, checksum, &input(batch, leaf), detail)
    }

    /// Computes a leaf a second time, and refuses to go on where it comes out otherwise.
    fn again(&self, leaf: u64, weights: Weights<'_>, first: &Said) -> Result<()> {
        let config = &self.spec.model_at(self.batch.step)?.config;
        let stager = Stager::new(weights.weights[0].device()).map_err(refused)?;
        let staged = input(self.batch, leaf).stage(config, &stager)?;
        let second = self.once(leaf, weights, staged, None)?;
        let outcome = |said: &Said| {
            let LeafSums { loss, gradient, .. } = said.alone()?.0;
            Ok(audit::Outcome { loss, gradient })
        };
        audit::compare(outcome(first)?, outcome(&second)?, self.rank)
    }
}

/// Computes one leaf by itself, with the loss of each token.
pub fn leaf(
    spec: &RunSpec,
    state: &State,
    batch: &Batch,
    leaf: u64,
    workers: Workers,
) -> Result<LeafSums> {
    let model = FrozenModel::at(spec, batch.step, state, workers)?;
    let input = input(batch, leaf);
    let stager = Stager::new(model.device());
    let stager = stager.map_err(|error| Fault::machine(error.to_string()))?;
    let (config, how) = (model.config(), model.options());
    let (staged, divisor) = (input.stage(config, &stager)?, batch.label_count.max(1));
    let compute = |staged, Weights { weights, biases }: Weights<'_>| {
        let mut sink = Checksum::default();
        let losses = model::micro_batch(config, weights, biases, staged, divisor, how, &mut sink)?;
        Ok(Said::of(losses, sink.total(), &input, Detail::Tokens)?.alone()?.0)
    };
    // On a worker of its own, as in the run.
    let mut found = workers.map(vec![staged], |staged| {
        model.read(|weights| compute(staged, weights), || place(spec, batch, leaf))
    })?;
    found.pop().ok_or_else(|| Fault::bug("a micro-batch had no outcome"))
}
