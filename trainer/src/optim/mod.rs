//! The optimizers: Muon on matrices, AdamW on everything else, one update of the routers' balance for each step.
//!
//! Invariant: an update is a function of its own tensor, moments and gradient, and of the step's few numbers. So whoever
//! owns a tensor can update it, on whatever worker.

pub mod adamw;
pub mod balance;
pub mod muon;
pub mod norm;
pub(crate) mod together;

use contract::Result;
pub use curriculum::guard;
use curriculum::guard::Guard;
use curriculum::rate::Schedule;
use kernels::ops::NewtonSchulzForm;
use kernels::record::Record;
use tch::Tensor;

use crate::model::{ParamSpec, Role};
use crate::refusal::refused;
use crate::workers::Workers;
use adamw::AdamW;
use muon::Muon;
use norm::CHUNK;

/// Chunks of an elementwise piece: enough to be worth a worker's while, few enough to share a large embedding.
pub(crate) const CHUNKS: i64 = 8;

/// Which optimizer rules the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Muon on matrices, AdamW elsewhere.
    Muon,
    /// AdamW everywhere.
    AdamW,
}

/// The numbers of `[optimizer]` and `[schedule]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Who rules the matrices.
    pub kind: Kind,
    /// The learning rate by step.
    pub schedule: Schedule,
    /// AdamW's.
    pub betas: (f64, f64),
    /// AdamW's.
    pub eps: f64,
    /// Muon's.
    pub momentum: f64,
    /// Muon's.
    pub newton_schulz: NewtonSchulzForm,
    /// Decoupled, by the learning rate shared by both.
    pub weight_decay: f64,
    /// The largest gradient norm; 0 for no clipping.
    pub clip: f64,
    /// Which steps are skipped, and how the clip follows the norms.
    pub guard: Guard,
}

/// How one tensor is updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The whole tensor is one matrix.
    Muon,
    /// Each `[e]` of `[E, rows, columns]` is a matrix.
    MuonEach,
    /// Elementwise, with weight decay or without.
    AdamW {
        /// Whether it decays.
        decay: bool,
    },
}

impl Rule {
    /// The rule of a parameter.
    pub fn of(kind: Kind, parameter: &ParamSpec) -> Self {
        match (kind, parameter.role) {
            (Kind::Muon, Role::Matrix) => Rule::Muon,
            (Kind::Muon, Role::Experts) => Rule::MuonEach,
            (_, Role::Vector) => Rule::AdamW { decay: false },
            (Kind::AdamW, _) | (Kind::Muon, Role::Elementwise) => Rule::AdamW { decay: true },
        }
    }

    /// Whether this rule keeps a second moment.
    pub fn has_second_moment(self) -> bool {
        matches!(self, Rule::AdamW { .. })
    }
}

/// One piece of work: a matrix, or some chunks of a tensor.
pub(crate) struct Item {
    pub(crate) weight: Tensor,
    /// What the model reads of it, where that is rounded and this rank's to write: it begins at this element there.
    pub(crate) rounded: Option<(Tensor, i64)>,
    /// Its first moment, or momentum.
    pub(crate) first: Tensor,
    pub(crate) gradient: Tensor,
    pub(crate) how: How,
    pub(crate) sums: Sums,
}

/// Who moves it.
pub(crate) enum How {
    Muon,
    AdamW { second: Tensor, decay: bool },
}

/// How its checksums are made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    /// The number of its first element in its tensor.
    pub(crate) first: u64,
    /// Of weights, first and second moments.
    pub(crate) salts: [u64; 3],
}

impl Item {
    /// A part of it that begins at element `first`: what `cut` makes of each of its tensors.
    fn part(&self, first: i64, cut: impl Fn(&Tensor) -> Tensor) -> Item {
        let how = match &self.how {
            How::Muon => How::Muon,
            How::AdamW { second, decay } => How::AdamW { second: cut(second), decay: *decay },
        };
        let rounded = self.rounded.as_ref().map(|(to, at)| (to.shallow_clone(), at + first));
        let sums = Sums { first: self.sums.first + first as u64, ..self.sums };
        let [weight, moment, gradient] = [&self.weight, &self.first, &self.gradient].map(cut);
        Item { weight, rounded, first: moment, gradient, how, sums }
    }

    /// How many chunks it has.
    fn chunks(&self) -> usize {
        self.weight.numel().div_ceil(CHUNK as usize)
    }
}

/// What pieces of work came to, for the host to read.
pub(crate) struct Outcome {
    record: Record,
    /// Of each piece.
    chunks: Vec<usize>,
}

/// What one came to: the sum of squares of new weights minus old ones, and checksums of weights and moments, 0 where there are
/// none of those.
pub(crate) type Came = (f64, [u64; 3]);

impl Outcome {
    /// Reads it, if the host has not: piece by piece.
    pub(crate) fn read(self) -> Result<Vec<Came>> {
        let Outcome { mut record, chunks } = self;
        record.read().map_err(refused)?;
        let mut piece = |chunks: usize| -> kernels::Result<Came> {
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

/// The numbers of one step.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// How often the moments will have moved with it: the step, less those that were skipped.
    pub step: u64,
    /// Its learning rate.
    pub lr: f64,
    /// What the gradient is multiplied with first; 1 touches nothing.
    pub scale: f64,
}

/// Does the pieces of work on the workers; what they came to stands in their order.
pub(crate) fn run(
    settings: &Settings,
    items: Vec<Item>,
    at: At,
    workers: Workers,
) -> Result<Outcome> {
    let (At { step, lr, scale }, ops) = (at, workers.ops());
    let muon =
        Muon::at(lr, settings.weight_decay, settings.momentum).by_form(settings.newton_schulz);
    let adamw = |decay: bool| {
        AdamW::at(
            step,
            lr,
            if decay { settings.weight_decay } else { 0.0 },
            settings.betas,
            settings.eps,
        )
    };
    let rules = together::Rules { muon, plain: adamw(false), decayed: adamw(true), scale };
    let device = items.first().map_or(tch::Device::Cpu, |item| item.weight.device());
    let chunks = items.iter().map(Item::chunks).collect();
    let groups = match device {
        tch::Device::Cpu => items.into_iter().map(|item| vec![item]).collect(),
        _ => together::groups(items),
    };
    let found =
        workers.map(groups, |items| tch::no_grad(|| rules.apply(ops, items)).map_err(refused))?;
    let mut record = Record::default();
    found.iter().try_for_each(|words| record.put(words)).map_err(refused)?;
    Ok(Outcome { record, chunks })
}

/// The pieces of work of a piece that an owner has: its matrices, or all of it, which is some chunks.
pub(crate) fn split(rule: Rule, whole: Item, items: &mut Vec<Item>) {
    if rule != Rule::MuonEach {
        items.push(whole);
        return;
    }
    let count = whole.weight.size()[0];
    let matrix = whole.weight.numel() as i64 / count.max(1);
    items.extend((0..count).map(|one| whole.part(one * matrix, |all| all.select(0, one))));
}
