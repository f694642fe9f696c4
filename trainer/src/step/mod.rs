//! One step: a pure function of the state and the batch, computed on one rank or on many.
//!
//! ```text
//! 1 facts        step, labels, sequence digests                                            all to all, small
//! 2 micro_batch  micro-batches, computed by the workers; their gradients added by the tree while they are sent to the
//!                owners of their pieces: `mesh::sum`
//! 3 record       loss, labels and checksum of each micro-batch, router counts, checksum and chunk squares of each
//!                piece of G: read by the host in one go, then exchanged                    small
//! 4 decide       the same on every rank: skip, clip, learning rate
//! 5 apply        owners update their pieces and send the new weights, which the other ranks receive in the forward
//!                pass of the next step; checksums of each piece of the state, and requests to stop     small
//! ```
//!
//! A rank that is alone exchanges nothing: nothing is copied or sent. The host reads a device twice in a step, before
//! the decision and after the update. With several ranks it reads once more, because each reports how long it has
//! computed before it waits for the others.

mod apply;
mod decide;
mod facts;
mod frozen;
pub mod micro_batch;
mod norm;
mod readout;
mod rows;

use std::time::{Duration, Instant};

use contract::{Digest, Result};
use kernels::group::{Group, SentBytes};
use kernels::record::Record;
use loader::Batch;
use tch::Tensor;

use crate::costs;
use crate::ledger::{self, StepRecord};
use crate::mesh::axes::Axis;
use crate::mesh::context::{SharedMicroBatch, SharingExchange as Shares, SharingGroup};
use crate::mesh::share::WeightSharing;
use crate::mesh::slices::Slices;
use crate::mesh::sum::GradientSum;
use crate::mesh::team::PhaseMesh;
use crate::mesh::words::{WordReader, WordWriter};
use crate::mesh::{Degrees, GradReduce, ProcessMesh};
use crate::model::{self, ShardedWeights, ZayaConfig};
use crate::refusal::{lost, refused};
use crate::spec::RunSpec;
use crate::state::State;
use crate::state::ownership::Ownership;
use crate::workers::Workers;
use apply::StepEnd;
pub(crate) use apply::cast_weights;
pub use frozen::{FrozenModel, Weights};
use micro_batch::RankMicroBatches;
pub use micro_batch::{StagedBatch, micro_batch_alone};
use norm::Norms;
use readout::MicroBatchReport;
pub use readout::{Detail, MicroBatchSums};
pub use rows::rows;

/// The run, its ranks, and this rank's workers.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// The run.
    pub spec: &'a RunSpec,
    /// The ranks.
    pub team: &'a ProcessMesh<'a>,
    /// This rank's workers.
    pub workers: Workers,
}

/// The computed micro-batches of a step; on a rank that is alone the host has not read them yet.
pub struct ComputedMicroBatches {
    step: u64,
    head: facts::StepFacts,
    said: Vec<MicroBatchReport>,
    record: Record,
    /// The summed gradient: this rank's pieces, in their order.
    pub own: Vec<Tensor>,
    begun: SentBytes,
    shared: [u64; 2],
    waited: Duration,
}

/// The results of the micro-batches of a step, before anything is updated.
pub struct ReducedGradient {
    /// The step.
    pub step: u64,
    /// The digest of its batch.
    pub data: Digest,
    /// Labels in the step.
    pub label_count: u64,
    /// Pairs of a query and a key in the step.
    pub pairs: u64,
    /// Sum of token losses over the step.
    pub loss: f64,
    /// The summed gradient: this rank's pieces, in their order.
    pub own: Vec<Tensor>,
    /// The ledger's entries of each micro-batch.
    pub micro_batches: Vec<MicroBatchSums>,
    /// Tokens by layer and router class.
    pub router: Vec<Vec<u64>>,
    /// The norms of the summed gradient.
    norms: Norms,
    /// What this rank had sent before the step.
    begun: SentBytes,
    /// Bytes sent to the ranks that share micro-batches with it, and bytes of weight shards.
    shared: [u64; 2],
    /// How long this rank waited for other ranks' blocks after it had computed its micro-batches.
    waited: Duration,
}

impl ReducedGradient {
    /// The mean loss per label; NaN without labels.
    pub fn mean(&self) -> f64 {
        self.loss / self.label_count as f64
    }
}

/// The results of a step.
pub struct StepResult {
    /// The ledger's record, the same on every rank.
    pub record: StepRecord,
    /// Ranks that computed it.
    pub ranks: u32,
    /// Its model FLOPs, forward and backward, on all ranks together.
    pub model_flops: f64,
    /// What any rank was requested to do after the step.
    pub asked: Requests,
    /// What all ranks together have sent, up to the last small exchange.
    pub sent: SentBytes,
    /// Bytes included in `sent` that ranks which share micro-batches sent each other for them.
    pub shared: u64,
    /// Bytes of weight shards included in `sent`.
    pub folded: u64,
    /// The longest that a rank waited for gradient blocks after it had computed its micro-batches.
    pub waited: Duration,
}

/// Requests to ranks between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// To stop.
    pub stop: bool,
    /// To write a checkpoint, and to continue.
    pub keep: bool,
    /// To admit a restarted rank.
    pub join: bool,
}

impl Requests {
    /// The request as a word that ranks exchange.
    fn word(self) -> u64 {
        u64::from(self.stop) | u64::from(self.join) << 1 | u64::from(self.keep) << 2
    }

    /// Combines the requests to this rank and another one.
    fn or(self, word: u64) -> Requests {
        let has = |bit: u64| word & bit != 0;
        Requests { stop: self.stop | has(1), join: self.join | has(2), keep: self.keep | has(4) }
    }
}

/// Computes one step and updates the state: `batch` and `staged` are this rank's part. `asked` is called at the end for
/// requests to this rank. `sharing` has the weights of the step before that are still on their way, and then those of
/// this one: whatever reads the weights of other ranks before the next step finishes it first.
pub fn advance(
    cx: StepContext<'_>,
    state: &mut State,
    batch: &Batch,
    staged: &StagedBatch,
    sharing: &WeightSharing<'_>,
    asked: impl Fn() -> Requests,
) -> Result<StepResult> {
    cx.team.group.reached(&format!("step {}", batch.step));
    cast_weights(cx, state, batch.step, sharing)?;
    let computed = compute(cx, state, batch, staged, Detail::Sums, sharing)?;
    let mut gradient = computed.read(cx, &state.owners)?;
    let stepped = complete(cx, state, &mut gradient, sharing, asked);
    stepped.map_err(|fault| fault.or_at(|| format!("step {}", batch.step)))
}

/// Computes the micro-batches of a step and adds up their gradients. The state does not change.
pub fn compute(
    cx: StepContext<'_>,
    state: &State,
    batch: &Batch,
    staged: &StagedBatch,
    detail: Detail,
    sharing: &WeightSharing<'_>,
) -> Result<ComputedMicroBatches> {
    let StepContext { spec, team, workers } = cx;
    let begun = sharing.sent();
    let cut = spec.model_at(batch.step)?.cut;
    let lines = team.lines(cut)?;
    let head = facts::head(cx, &lines, batch)?;
    let count = state.weights.len();
    let slices = Slices::new(lines.mesh, state.owners.pieces(), count);
    let pieces = slices.pieces(state.owners.pieces(), place(&lines));
    let layers = ledger::layers(&spec.names());
    let layers: Vec<_> = layers.into_iter().map(|layer| layer.parameters).collect();
    let sum = GradientSum::begin(&lines, &pieces, count, &layers, head.micro_batches)?;
    let along = [SharingGroup::sharing(&lines)?, SharingGroup::folded(&lines)?];
    let [context, shards] = along.each_ref().map(|along| along.as_ref().map(SharingGroup::begin));
    let (context, shards) = (context.transpose()?, shards.transpose()?);
    let folded = shards.as_ref().map(|line| ShardedWeights { fold: &state.fold, line });
    let shared = along[0].as_ref().zip(context.as_ref()).map(|(along, context)| SharedMicroBatch {
        line: context,
        dealt: along.dealt(cut.chunks),
        slices: &slices,
        folded,
    });
    let reached = |number: u64| {
        team.group.reached(&format!("step {}, micro-batch {number}", batch.step));
        // Stops if the other ranks have given up the step.
        team.group.check().map_err(lost)
    };
    let numbers = &lines.micro_batches(head.micro_batches)?;
    let all = RankMicroBatches {
        spec,
        batch,
        staged,
        numbers,
        // Without labels every gradient is 0, whatever the divisor.
        label_count: head.label_count.max(1),
        detail,
        workers,
        rank: team.group.launched_as(),
        shared,
        arrival: sharing,
    };
    let (start, before) = (Instant::now(), sharing.waited());
    let said = all.each(state, &sum, reached, || sum.leaf())?;
    // A rank without micro-batches has not received them yet.
    sharing.finish()?;
    let (mut record, alone) = (Record::default(), team.group.world() == 1);
    if !alone {
        said.iter().try_for_each(|said| said.put(&mut record))?;
        record.read().map_err(refused)?;
    }
    let taken = start.elapsed() - (sharing.waited() - before);
    team.group.computed(batch.step, taken.checked_div(all.in_turn()));
    sum.computed()?;
    let [shared, folded] = [context, shards].map(|line| line.map_or(Ok(0), Shares::finish));
    let (shared, start) = ([shared?, folded?], Instant::now());
    let own = sum.finish(&state.owners)?;
    let waited = start.elapsed();
    if alone {
        // All checksums are known only now; on several ranks, once their blocks have been sent.
        said.iter().try_for_each(|said| said.put(&mut record))?;
    }
    Ok(ComputedMicroBatches { step: batch.step, head, said, record, own, begun, shared, waited })
}

impl ComputedMicroBatches {
    /// Reads the results, with checksums and squares of the sum, and exchanges them with all ranks.
    pub fn read(self, cx: StepContext<'_>, owners: &Ownership) -> Result<ReducedGradient> {
        let ComputedMicroBatches { step, head, said, mut record, own, begun, shared, waited } =
            self;
        let mut measured = norm::measure(cx, owners, &own)?;
        measured.put(&mut record);
        record.read().map_err(refused)?;
        let (mut message, mut kept, mut router) = (WordWriter::default(), Vec::new(), Vec::new());
        for said in said {
            let (sums, counts) = said.take(&mut record)?;
            kept.push(sums);
            facts::add_counts(&mut router, counts);
        }
        facts::write_losses(&mut message, &kept, &router);
        measured.write(&mut record, &mut message)?;
        record.end().map_err(refused)?;
        let gathered = cx.team.all_gather("the gathering of losses", &message)?;
        let (mut gathered, lines) =
            (gathered.readers(), cx.team.lines(cx.spec.model_at(step)?.cut)?);
        let losses = facts::losses(&lines, head.micro_batches, kept, &mut gathered)?;
        let norms = norm::norms(cx, owners, &mut gathered)?;
        gathered.into_iter().try_for_each(WordReader::end)?;
        let facts::StepLosses { loss, micro_batches, router } = losses;
        let facts::StepFacts { label_count, pairs, data, .. } = head;
        Ok(ReducedGradient {
            step,
            data,
            label_count,
            pairs,
            loss,
            own,
            micro_batches,
            router,
            norms,
            begun,
            shared,
            waited,
        })
    }
}

/// This rank's position among those that share a micro-batch.
fn place(lines: &PhaseMesh<'_>) -> u32 {
    lines.mesh.place(Axis::Sharing, lines.team.group.rank())
}

/// Decides on a step from its gradient, updates the state, and makes the record.
pub fn complete(
    cx: StepContext<'_>,
    state: &mut State,
    gradient: &mut ReducedGradient,
    sharing: &WeightSharing<'_>,
    asked: impl Fn() -> Requests,
) -> Result<StepResult> {
    let decided = decide::decide(cx.spec, &mut state.windows, gradient)?;
    let moved = apply::apply(cx, state, gradient, &decided, sharing)?;
    let (now, begun) = (sharing.sent(), gradient.begun);
    let between_nodes = now.between_nodes - begun.between_nodes;
    let sent = SentBytes { all: now.all - begun.all, between_nodes };
    let end = StepEnd { asked: asked(), sent, shared: gradient.shared, waited: gradient.waited };
    let (settled, StepEnd { asked, sent, shared, waited }) = apply::settle(cx, state, end, moved)?;
    let record = apply::record(cx.spec, gradient, &decided, settled)?;
    let ranks = cx.team.group.world();
    let [shared, folded] = shared;
    let step = cx.spec.plan.step(gradient.step)?;
    let tokens = step.batch * u64::from(step.seq_len);
    let config = &cx.spec.model_at(gradient.step)?.config;
    let model_flops = costs::step_flops(config, tokens, &gradient.router, gradient.pairs)?;
    Ok(StepResult { record, ranks, model_flops, asked, sent, shared, folded, waited })
}

/// Calls `work` with a team of this process as its only rank.
pub fn alone<T>(
    spec: &RunSpec,
    workers: Workers,
    work: impl FnOnce(StepContext<'_>) -> Result<T>,
) -> Result<T> {
    let group = Group::alone();
    let team = ProcessMesh::new(&group, Degrees::ALONE, GradReduce::default(), false)?;
    work(StepContext { spec, team: &team, workers })
}

/// The number of a configuration's trainable parameters.
pub fn parameter_count(config: &ZayaConfig) -> u64 {
    model::parameters(config).iter().map(model::ParamSpec::elements).sum()
}
