//! What a micro-batch costs, from the configuration alone: operations, bytes that it holds, and bytes that ranks which
//! share it send each other.
//!
//! No formula of the model stands here: the model's own passes run over tensors without numbers ([`kernels::shapes`]),
//! and what they compute, hold and send is counted. Every sequence is one document, and experts have equally many
//! tokens. Kernels' own scratch memory is not counted, except for copies in f32.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};

use contract::Result;
use curriculum::Dtype;
use kernels::addend::Addend;
use kernels::ops::{DEVICE, SHAPES};
use kernels::shapes::{self, Work};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::ledger;
use crate::model::{
    self, ActivationCheckpointing, AxisComm, ChunkSum, Cut, GradientSink, GradientTerm,
    MicroBatchContext, MicroBatchOptions, ParamId, ParamSpec, PendingReceive, ShardedWeights,
    WeightShards, ZayaConfig,
};
use crate::refusal::refused;
use crate::timing::{self, StepPart};

/// How a micro-batch is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroBatchShape {
    /// Sequences, each one document.
    pub rows: u64,
    /// Tokens of a sequence.
    pub seq_len: u64,
    /// What is kept for the backward pass.
    pub keep: ActivationCheckpointing,
    /// Into how many parts it is cut, on all ranks that share it.
    pub cut: Cut,
    /// In which dtype it is computed.
    pub dtype: Dtype,
    /// Whether a device computes it.
    pub on_device: bool,
    /// A rank among those that share it.
    pub shared: RankPlace,
    /// The same rank among those that hold each other's weight shards.
    pub folded: RankPlace,
}

/// A rank's index among ranks that share something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// The number of ranks.
    pub degree: u64,
    /// Its index.
    pub place: u64,
}

impl RankPlace {
    /// A rank that shares nothing.
    pub const ALONE: RankPlace = RankPlace { degree: 1, place: 0 };
}

impl MicroBatchShape {
    /// A whole micro-batch on one rank's CPU, in bf16.
    pub fn whole(rows: u64, seq_len: u64) -> MicroBatchShape {
        MicroBatchShape {
            rows,
            seq_len,
            keep: ActivationCheckpointing::Everything,
            cut: Cut::WHOLE,
            dtype: Dtype::Bf16,
            on_device: false,
            shared: RankPlace::ALONE,
            folded: RankPlace::ALONE,
        }
    }
}

/// A matmul of `[rows, inner]` and `[inner, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct MatmulShape {
    /// Rows of the left operand and of the result.
    pub rows: i64,
    /// Columns of the left operand, rows of the right one.
    pub inner: i64,
    /// Columns of the right operand and of the result.
    pub columns: i64,
}

impl MatmulShape {
    /// Multiplications and additions.
    pub fn operations(self) -> f64 {
        2.0 * self.rows as f64 * self.inner as f64 * self.columns as f64
    }
}

/// Matmuls of one shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulCount {
    /// The part of a step that they belong to.
    pub part: StepPart,
    /// The shape of their operands.
    pub shape: MatmulShape,
    /// How many a micro-batch computes.
    pub count: u64,
    /// Whether their operands are f32.
    pub wide: bool,
    /// Whether their rows are those of an expert.
    pub routed: bool,
}

impl MatmulCount {
    /// Operations of all of them.
    pub fn operations(&self) -> f64 {
        self.count as f64 * self.shape.operations()
    }
}

/// The costs of a micro-batch on one rank.
#[derive(Clone, Debug, Default)]
pub struct MicroBatchCosts {
    /// All matmuls of both passes, except those inside attention.
    pub matmuls: Vec<MatmulCount>,
    /// Operations of softmax attention in all layers, forward; backward has twice as many.
    pub attention: f64,
    /// The same of linear attention's recurrence, however it is computed.
    pub recurrence: f64,
    /// Bytes that its passes hold at most, and from the backward pass of the first layer on, with the gradients that
    /// they are computing.
    pub activations: [u64; 2],
    /// Bytes of operands that it sends to the ranks that share the micro-batch.
    pub operands: u64,
    /// Bytes of weight shards that it sends.
    pub shards: u64,
}

/// Costs that were counted, with what they are the costs of.
type Kept = (ZayaConfig, MicroBatchShape, Arc<MicroBatchCosts>);

/// How many are kept: a plan asks for those of each phase many times.
const KEPT: usize = 64;

/// Counts the costs of a micro-batch.
///
/// # Errors
/// If the shape does not fit the model, for instance a sequence that is not cut into equal chunks.
pub fn of_micro_batch(config: &ZayaConfig, by: MicroBatchShape) -> Result<Arc<MicroBatchCosts>> {
    static FOUND: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
    let kept = || FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    let same = |(of, shape, _): &&Kept| *shape == by && of == config;
    if let Some((.., costs)) = kept().iter().find(same) {
        return Ok(Arc::clone(costs));
    }
    let costs = Arc::new(count(config, by)?);
    let mut kept = kept();
    if kept.len() == KEPT {
        kept.remove(0);
    }
    kept.push((config.clone(), by, Arc::clone(&costs)));
    Ok(costs)
}

fn count(config: &ZayaConfig, by: MicroBatchShape) -> Result<MicroBatchCosts> {
    let device = shapes::device(by.on_device).map_err(refused)?;
    let specs = model::parameters(config);
    let RankPlace { degree, place } = by.folded;
    let fold = WeightShards::new(degree as u32, place as u32, &specs, by.cut.shards);
    let weight = |(at, spec): (usize, &ParamSpec)| {
        fold.room(spec, at, spec.kind(by.dtype), device).map_err(refused)
    };
    let weights = specs.iter().enumerate().map(weight).collect::<Result<Vec<_>>>()?;
    let balance = model::balance_sizes(config);
    let balance = balance.iter().map(|size| empty(*size as i64, Kind::Float, device));
    let balance = balance.collect::<kernels::Result<Vec<_>>>().map_err(refused)?;
    let [line, shards] = [by.shared, by.folded].map(CountedLine::new);
    let ops = if by.on_device { DEVICE } else { SHAPES };
    let how = MicroBatchContext {
        options: MicroBatchOptions { ops, keep: by.keep, cut: by.cut },
        line: (by.shared.degree > 1).then_some(&line as &dyn AxisComm),
        folded: (degree > 1).then_some(ShardedWeights { fold: &fold, line: &shards }),
        arrival: None,
    };
    let mut sink = Watermarks::new(&specs);
    let (note, noted) = mpsc::channel();
    let see = move |work| {
        // The other end is alive until all is noted.
        let _ = note.send((timing::current(), work));
    };
    let passes =
        || model::over_shapes(config, &weights, &balance, [by.rows, by.seq_len], how, &mut sink);
    shapes::watched(see, passes)?;
    let activations = sink.activations();
    let (operands, shards) = (line.sent.into_inner(), shards.sent.into_inner());
    let mut costs = MicroBatchCosts { activations, operands, shards, ..MicroBatchCosts::default() };
    for (part, work) in noted {
        match work {
            Work::Attention(operations) => costs.attention += operations,
            Work::Recurrence(operations) => costs.recurrence += operations,
            Work::Matmul { count, shape: [rows, inner, columns], wide, routed } => {
                let (shape, count) = (MatmulShape { rows, inner, columns }, count as u64);
                costs.matmuls.push(MatmulCount { part, shape, count, wide, routed });
            }
        }
    }
    costs.matmuls = merged(costs.matmuls);
    Ok(costs)
}

fn empty(size: i64, kind: Kind, device: Device) -> kernels::Result<Tensor> {
    Ok(Tensor::f_empty([size], (kind, device))?)
}

/// Merges equal matmuls into one entry.
fn merged(mut all: Vec<MatmulCount>) -> Vec<MatmulCount> {
    let key = |it: &MatmulCount| (it.part as usize, it.shape, it.wide, it.routed);
    all.sort_by_key(key);
    all.dedup_by(|next, kept| {
        let same = key(next) == key(kept);
        kept.count += if same { next.count } else { 0 };
        same
    });
    all
}

/// The most bytes that are live before each gradient; the gradients themselves are dropped.
struct Watermarks {
    /// Live bytes before the passes.
    before: u64,
    /// Parameters of layer 1 other than its first norm, whose gradient comes with those of layer 0.
    second: std::ops::Range<usize>,
    /// The most up to the last gradient of these, and since then.
    most: [u64; 2],
}

impl Watermarks {
    fn new(specs: &[ParamSpec]) -> Watermarks {
        let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
        let second = ledger::layers(&names).into_iter().find(|layer| layer.name == "layer 1");
        let second = second.map_or(0..0, |layer| layer.parameters);
        shapes::anew();
        Watermarks { before: shapes::live(), second: second.start + 1..second.end, most: [0; 2] }
    }

    fn see(&mut self, id: ParamId) {
        let [first, last] = &mut self.most;
        *last = shapes::peak().max(*last);
        shapes::anew();
        if self.second.contains(&id.index()) {
            *first = (*first).max(std::mem::take(last));
        }
    }

    fn activations(&self) -> [u64; 2] {
        let [first, last] = [self.most[0], self.most[1].max(shapes::peak())];
        [first.max(last), last].map(|most| most.saturating_sub(self.before))
    }
}

impl GradientSink for Watermarks {
    fn gradient(&mut self, id: ParamId, _: Addend) -> Result<()> {
        self.see(id);
        Ok(())
    }

    fn part(&mut self, id: ParamId, _: GradientTerm, _: Vec<ChunkSum>) -> Result<()> {
        self.see(id);
        Ok(())
    }
}

/// Ranks that receive nothing: what would be sent to them is counted.
struct CountedLine {
    at: RankPlace,
    sent: AtomicU64,
}

impl CountedLine {
    fn new(at: RankPlace) -> CountedLine {
        CountedLine { at, sent: AtomicU64::new(0) }
    }
}

impl AxisComm for CountedLine {
    fn place(&self) -> u64 {
        self.at.place
    }

    fn degree(&self) -> u64 {
        self.at.degree
    }

    fn begin(
        &self,
        _: &'static str,
        give: &[Tensor],
        take: &[i64],
        kind: Kind,
    ) -> kernels::Result<Box<dyn PendingReceive + '_>> {
        let others = (0..).zip(give).filter(|(rank, _)| *rank != self.at.place);
        let sent: usize = others.map(|(_, tensor)| tensor.numel()).sum();
        self.sent.fetch_add((sent * kind.elt_size_in_bytes()) as u64, Ordering::Relaxed);
        let device = give.first().map_or(Device::Cpu, Tensor::device);
        let received = (0..).zip(take).map(|(rank, count)| {
            empty(if rank == self.at.place { 0 } else { *count }, kind, device)
        });
        Ok(Box::new(Received(received.collect::<kernels::Result<_>>()?)))
    }
}

struct Received(Vec<Tensor>);

impl PendingReceive for Received {
    fn wait(self: Box<Self>) -> kernels::Result<Vec<Tensor>> {
        Ok(self.0)
    }
}

/// Model FLOPs of forward and backward over `tokens`, which layer by layer are sent to experts `routed` times, with
/// `pairs` of a query and a key that see each other in all layers: projections, the grouped convolution, attention to
/// what each document's mask and window leave, the router, the experts, and the head. Norms, activations, the optimizer
/// and recomputation are not counted.
pub fn flops(config: &ZayaConfig, tokens: u64, routed: &[u64], pairs: u64) -> Result<f64> {
    let each = config.num_experts as u64;
    let costs = of_micro_batch(config, MicroBatchShape::whole(1, each))?;
    let sum = |routed: bool| -> f64 {
        let some = costs.matmuls.iter().filter(|one| one.routed == routed);
        some.map(MatmulCount::operations).sum()
    };
    let of = |kinds: &(model::Attention, model::FeedForward)| kinds.1 == model::FeedForward::Moe;
    let with_experts = config.kinds().zip(routed).filter(|(kinds, _)| of(kinds));
    let (layers, rows) =
        with_experts.fold((0, 0), |(layers, all), (_, rows)| (layers + 1, all + rows));
    let counted = layers * each * config.num_experts_per_tok as u64;
    let expert = if counted > 0 { sum(true) / counted as f64 } else { 0.0 };
    let seen = model::attended_pairs(config, &[0], each as u32);
    let pair = if seen > 0 { costs.attention / seen as f64 } else { 0.0 };
    let token = (sum(false) + 3.0 * costs.recurrence) / each as f64;
    Ok(tokens as f64 * token + rows as f64 * expert + 3.0 * pairs as f64 * pair)
}

/// Model FLOPs of a step, forward and backward, from tokens by layer and router class (the skip last) and `pairs`.
pub(crate) fn step_flops(
    config: &ZayaConfig,
    tokens: u64,
    router: &[Vec<u64>],
    pairs: u64,
) -> Result<f64> {
    // A layer without a router has no counts.
    let experts = |counts: &Vec<u64>| counts.iter().rev().skip(1).sum::<u64>();
    flops(config, tokens, &router.iter().map(experts).collect::<Vec<_>>(), pairs)
}

#[cfg(test)]
mod tests;
