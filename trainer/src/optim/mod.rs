//! The optimizers: Muon on matrices, AdamW on everything else, one update of the routers' balance for each step.
//!
//! Invariant: an update is a function of its own tensor, moments and gradient, and of the step's few numbers. So whoever
//! owns a tensor can update it, on whatever worker.

pub mod adamw;
pub mod balance;
pub mod guard;
pub mod muon;
pub mod norm;
pub mod schedule;
mod together;

use contract::Result;
use kernels::ops::Ops;
use tch::Tensor;

use crate::model::{ParamSpec, Role};
use crate::refusal::refused;
use crate::timing::{Part, part};
use crate::workers::Workers;
use adamw::AdamW;
use guard::Guard;
use muon::Muon;
use norm::CHUNK;
use schedule::Schedule;

/// Chunks of an elementwise work item: enough to be worth a worker's while, few enough to share a large embedding.
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
pub(crate) enum Item {
    Matrix { weight: Tensor, momentum: Tensor, gradient: Tensor },
    Flat { weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, decay: bool },
}

impl Item {
    fn weight(&self) -> &Tensor {
        match self {
            Item::Matrix { weight, .. } | Item::Flat { weight, .. } => weight,
        }
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

/// Does the pieces of work on the workers, and returns for each the sum of squares of new weights minus old ones.
pub(crate) fn run(
    settings: &Settings,
    items: Vec<Item>,
    at: At,
    workers: Workers,
) -> Result<Vec<f64>> {
    let (At { step, lr, scale }, ops) = (at, workers.ops());
    let muon = Muon::at(lr, settings.weight_decay, settings.momentum);
    let adamw = |decay: bool| {
        AdamW::at(
            step,
            lr,
            if decay { settings.weight_decay } else { 0.0 },
            settings.betas,
            settings.eps,
        )
    };
    let (plain, decayed) = (adamw(false), adamw(true));
    if items.first().is_some_and(|item| item.weight().device() != tch::Device::Cpu) {
        let rules = together::Rules { muon, plain, decayed, scale };
        return workers
            .map(together::groups(items), |items| {
                tch::no_grad(|| rules.apply(ops, items)).map_err(refused)
            })
            .map(|moved| moved.into_iter().flatten().collect());
    }
    let work = |item| match item {
        Item::Matrix { weight, mut momentum, gradient } => {
            let _watch = part(Part::Muon);
            let longest = weight.size().into_iter().max().unwrap_or(1);
            let direction = muon.direction(ops, &mut momentum, (&gradient, scale));
            let direction = direction.map_err(refused)?.contiguous().view([-1]);
            moved(ops, &weight.view([-1]), |chunk, weight| {
                muon.descend(ops, weight, &chunk(&direction), longest)
            })
        }
        Item::Flat { weight, first, second, gradient, decay } => {
            let _watch = part(Part::AdamW);
            let rule = if decay { decayed } else { plain };
            moved(ops, &weight, |chunk, weight| {
                let (mut first, mut second) = (chunk(&first), chunk(&second));
                let moments = [&mut first, &mut second];
                rule.update(ops, weight, moments, (&chunk(&gradient), scale))
            })
        }
    };
    workers.map(items, |item| tch::no_grad(|| work(item)))
}

/// Moves flat weights chunk by chunk, and returns the sum of squares of new ones minus old ones. `update` is handed each
/// chunk, and what cuts the same chunk out of tensors beside the weights.
///
/// The old weights of one chunk at a time are kept, in the same memory: so they are still in the cache when they are compared.
fn moved(
    ops: &dyn Ops,
    weights: &Tensor,
    mut update: impl FnMut(&dyn Fn(&Tensor) -> Tensor, &mut Tensor) -> kernels::Result<()>,
) -> Result<f64> {
    let (count, mut squares) = (weights.size()[0], Vec::new());
    let memory = weights.narrow(0, 0, CHUNK.min(count)).empty_like();
    for start in (0..count).step_by(CHUNK as usize) {
        let length = CHUNK.min(count - start);
        let chunk = |tensor: &Tensor| tensor.narrow(0, start, length);
        let (mut new, mut old) = (chunk(weights), memory.narrow(0, 0, length));
        {
            let _watch = part(Part::Moved);
            old.copy_(&new);
        }
        update(&chunk, &mut new).map_err(refused)?;
        let _watch = part(Part::Moved);
        let difference = old.f_sub_(&new).map_err(|error| refused(error.into()))?;
        squares.push(ops.squares(&difference).map_err(refused)?);
    }
    Ok(norm::sum(&squares))
}

/// The pieces of work of a tensor, or of a part of one that an owner has: whole matrices, or whole chunks.
pub(crate) fn split(
    rule: Rule,
    weight: &Tensor,
    (first, second): (&Tensor, Option<&Tensor>),
    gradient: &Tensor,
    items: &mut Vec<Item>,
) {
    match (rule, second) {
        (Rule::AdamW { decay }, Some(second)) => {
            let flat = |tensor: &Tensor| tensor.view([-1]);
            let length = weight.numel() as i64;
            for start in (0..length).step_by((CHUNK * CHUNKS) as usize) {
                let piece = |tensor: &Tensor| {
                    flat(tensor).narrow(0, start, (CHUNK * CHUNKS).min(length - start))
                };
                let gradient =
                    gradient.reshape([-1]).narrow(0, start, (CHUNK * CHUNKS).min(length - start));
                let (weight, first, second) = (piece(weight), piece(first), piece(second));
                items.push(Item::Flat { weight, first, second, gradient, decay });
            }
        }
        (Rule::MuonEach, _) => (0..weight.size()[0]).for_each(|expert| {
            let matrix = |tensor: &Tensor| tensor.select(0, expert);
            let (weight, momentum, gradient) = (matrix(weight), matrix(first), matrix(gradient));
            items.push(Item::Matrix { weight, momentum, gradient });
        }),
        (Rule::Muon | Rule::AdamW { .. }, _) => {
            let (weight, momentum) = (weight.shallow_clone(), first.shallow_clone());
            items.push(Item::Matrix { weight, momentum, gradient: gradient.shallow_clone() });
        }
    }
}
