//! The optimizers: Muon for matrices, AdamW for everything else, and one update of the routers' biases in each step.
//!
//! Invariant: an update is a function of its tensor, moments and gradient, and of the step's scalars. So any rank that
//! owns a tensor can update it, on any worker.

pub mod adamw;
pub mod balance;
pub mod muon;
pub mod norm;
pub(crate) mod together;

use contract::Result;
pub use curriculum::guard;
use curriculum::guard::SpikePolicy;
use curriculum::rate::Schedule;
use curriculum::{OptimizerSpec, ParamGroup};
use kernels::ops::NewtonSchulzIterate;
use kernels::record::Record;
use tch::Tensor;

use crate::model::{ParamSpec, Role};
use crate::refusal::refused;
use crate::workers::Workers;
use norm::CHUNK;

/// Chunks of an elementwise work item: enough to be worth scheduling, few enough to spread a large embedding.
pub(crate) const CHUNKS: i64 = 8;

/// Which optimizer updates the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixOptimizer {
    /// Muon on matrices, AdamW elsewhere.
    Muon,
    /// AdamW everywhere.
    AdamW,
}

/// The values of `[optimizer]` and `[schedule]`.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerSettings {
    /// The optimizer of the matrices.
    pub kind: MatrixOptimizer,
    /// The learning rate by step.
    pub schedule: Schedule,
    /// AdamW's.
    pub betas: (f64, f64),
    /// AdamW's.
    pub eps: f64,
    /// Muon's.
    pub momentum: f64,
    /// Muon's.
    pub newton_schulz: NewtonSchulzIterate,
    /// The largest gradient norm; 0 for no clipping.
    pub clip: f64,
    /// Which steps are skipped, and how the clip threshold follows the norms.
    pub guard: SpikePolicy,
}

/// How one tensor is updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerRule {
    /// The whole tensor is one matrix.
    Muon,
    /// Each `[e]` of `[E, rows, columns]` is a matrix.
    MuonEach,
    /// Elementwise, with weight decay or without.
    AdamW {
        /// Whether weight decay applies.
        decay: bool,
    },
}

impl OptimizerRule {
    /// The rule of a parameter.
    pub fn of(kind: MatrixOptimizer, parameter: &ParamSpec) -> Self {
        match (kind, parameter.role) {
            (MatrixOptimizer::Muon, Role::Matrix) => OptimizerRule::Muon,
            (MatrixOptimizer::Muon, Role::Experts) => OptimizerRule::MuonEach,
            (_, Role::Vector) => OptimizerRule::AdamW { decay: false },
            (MatrixOptimizer::AdamW, _) | (MatrixOptimizer::Muon, Role::Elementwise) => {
                OptimizerRule::AdamW { decay: true }
            }
        }
    }

    /// Whether this rule keeps a second moment.
    pub fn has_second_moment(self) -> bool {
        matches!(self, OptimizerRule::AdamW { .. })
    }
}

/// A parameter's own numbers: those of the optimizer, or of its group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamScales {
    /// Multiplies the learning rate.
    pub lr: f64,
    /// Decoupled weight decay, scaled by the learning rate of both optimizers.
    pub weight_decay: f64,
}

impl ParamScales {
    /// Those of a parameter that is updated by `rule`.
    pub fn of(optimizer: &OptimizerSpec, group: Option<&ParamGroup>, rule: OptimizerRule) -> Self {
        let usual = match rule {
            OptimizerRule::AdamW { decay: false } => 0.0,
            _ => optimizer.weight_decay,
        };
        ParamScales {
            lr: group.map_or(1.0, |group| group.lr_scale),
            weight_decay: group.and_then(|group| group.weight_decay).unwrap_or(usual),
        }
    }
}

/// A work item: a matrix, or some chunks of a tensor.
pub(crate) struct UpdateItem {
    pub(crate) weight: Tensor,
    /// The rounded tensor that the model reads, if this rank writes it, and the item's first element in it.
    pub(crate) rounded: Option<(Tensor, i64)>,
    /// Its first moment, or momentum.
    pub(crate) first: Tensor,
    pub(crate) gradient: Tensor,
    pub(crate) how: UpdateKind,
    pub(crate) scales: ParamScales,
    pub(crate) sums: ChecksumInputs,
}

/// How an item is updated.
pub(crate) enum UpdateKind {
    Muon,
    AdamW { second: Tensor },
}

/// How its checksums are computed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChecksumInputs {
    /// The index of its first element in its tensor.
    pub(crate) first: u64,
    /// The salts of weights, first and second moments.
    pub(crate) salts: [u64; 3],
}

impl UpdateItem {
    /// The part that begins at element `first`; `cut` cuts each of its tensors.
    fn part(&self, first: i64, cut: impl Fn(&Tensor) -> Tensor) -> UpdateItem {
        let how = match &self.how {
            UpdateKind::Muon => UpdateKind::Muon,
            UpdateKind::AdamW { second } => UpdateKind::AdamW { second: cut(second) },
        };
        let rounded = self.rounded.as_ref().map(|(to, at)| (to.shallow_clone(), at + first));
        let sums = ChecksumInputs { first: self.sums.first + first as u64, ..self.sums };
        let [weight, moment, gradient] = [&self.weight, &self.first, &self.gradient].map(cut);
        UpdateItem { weight, rounded, first: moment, gradient, how, scales: self.scales, sums }
    }

    /// The number of its chunks.
    fn chunks(&self) -> usize {
        self.weight.numel().div_ceil(CHUNK as usize)
    }
}

/// The results of work items, for the host to read.
pub(crate) struct UpdateResults {
    record: Record,
    /// Chunks of each item.
    chunks: Vec<usize>,
}

/// The result of one item: the sum of squares of new weights minus old ones, and checksums of weights and moments, 0
/// for moments that do not exist.
pub(crate) type UpdateSums = (f64, [u64; 3]);

impl UpdateResults {
    /// Reads the results, item by item; the host waits for the device unless it has read them already.
    pub(crate) fn read(self) -> Result<Vec<UpdateSums>> {
        let UpdateResults { mut record, chunks } = self;
        record.read().map_err(refused)?;
        let mut piece = |chunks: usize| -> kernels::Result<UpdateSums> {
            let (mut squares, mut sums) = (Vec::with_capacity(chunks), [0u64; 3]);
            for _ in 0..chunks {
                squares.push(record.float()?);
                for sum in &mut sums {
                    *sum = sum.wrapping_add(record.word()?);
                }
            }
            Ok((norm::sum(&squares), sums))
        };
        let found = chunks.into_iter().map(&mut piece).collect::<kernels::Result<_>>();
        let found = found.map_err(refused)?;
        record.end().map_err(refused)?;
        Ok(found)
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepScalars {
    /// How many times the moments have been updated after this step: the step, minus skipped steps.
    pub step: u64,
    /// Its learning rate.
    pub lr: f64,
    /// The gradient is multiplied by this first; 1 leaves it unchanged.
    pub scale: f64,
}

/// Runs the items on the workers; results are in the order of the items. `done` hears in that order how many are done,
/// or queued on their device.
pub(crate) fn run(
    settings: &OptimizerSettings,
    items: Vec<UpdateItem>,
    at: StepScalars,
    workers: Workers,
    mut done: impl FnMut(usize) -> Result<()> + Send,
) -> Result<UpdateResults> {
    let (rules, ops) = (together::StepRules { settings, at }, workers.ops());
    let device = items.first().map_or(tch::Device::Cpu, |item| item.weight.device());
    let chunks = items.iter().map(UpdateItem::chunks).collect();
    let groups: Vec<_> = match device {
        tch::Device::Cpu => items.into_iter().map(|item| vec![item]).collect(),
        _ => together::groups(items),
    };
    let (mut record, mut count) = (Record::default(), 0);
    let apply = |items: Vec<UpdateItem>| {
        let count = items.len();
        let words = tch::no_grad(|| rules.apply(ops, items)).map_err(refused)?;
        Ok((words, count))
    };
    workers.map_each(groups, apply, |(words, more)| {
        record.put(&words).map_err(refused)?;
        count += more;
        done(count)
    })?;
    Ok(UpdateResults { record, chunks })
}

/// Splits an owner's piece into work items: its matrices, or the whole piece, which is some chunks.
pub(crate) fn split(rule: OptimizerRule, whole: UpdateItem, items: &mut Vec<UpdateItem>) {
    if rule != OptimizerRule::MuonEach {
        items.push(whole);
        return;
    }
    let count = whole.weight.size()[0];
    let matrix = whole.weight.numel() as i64 / count.max(1);
    items.extend((0..count).map(|one| whole.part(one * matrix, |all| all.select(0, one))));
}
