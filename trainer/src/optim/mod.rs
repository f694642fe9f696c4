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
///
/// The old weights are copied piece by piece, or chunk by chunk, just before they move: nothing else is held, and what is
/// copied is still in the cache when it is compared.
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
    let work = |item| match item {
        Item::Matrix { mut weight, mut momentum, gradient } => {
            let _watch = part(Part::Muon);
            let old = weight.copy();
            muon.update(ops, &mut weight, &mut momentum, (&gradient, scale)).map_err(refused)?;
            Ok(norm::sum(&moved(ops, old, &weight)?))
        }
        Item::Flat { weight, first, second, gradient, decay } => {
            let _watch = part(Part::AdamW);
            let rule = if decay { decayed } else { plain };
            let starts = (0..weight.size()[0]).step_by(CHUNK as usize);
            let chunks = starts.map(|start| {
                let length = CHUNK.min(weight.size()[0] - start);
                let chunk = |tensor: &Tensor| tensor.narrow(0, start, length);
                let (mut weight, mut first, mut second) =
                    (chunk(&weight), chunk(&first), chunk(&second));
                let (gradient, moments) = (chunk(&gradient), [&mut first, &mut second]);
                let old = weight.copy();
                rule.update(ops, &mut weight, moments, (&gradient, scale)).map_err(refused)?;
                moved(ops, old, &weight)
            });
            Ok(norm::sum(&chunks.collect::<Result<Vec<_>>>()?.concat()))
        }
    };
    workers.map(items, |item| tch::no_grad(|| work(item)))
}

/// The sums of squares of what lies between old and new weights, by chunk.
fn moved(ops: &dyn Ops, mut old: Tensor, new: &Tensor) -> Result<Vec<f64>> {
    let difference = old.f_sub_(new).map_err(|error| refused(error.into()))?;
    norm::chunks(ops, &difference)
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
