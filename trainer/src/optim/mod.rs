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
use kernels::checksum;
use kernels::ops::{NewtonSchulzForm, Ops};
use kernels::record::Record;
use tch::Tensor;

use crate::model::{ParamSpec, Role};
use crate::refusal::refused;
use crate::timing::{Part, part};
use crate::workers::Workers;
use adamw::AdamW;
use muon::Muon;
use norm::CHUNK;

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
    weight: Tensor,
    /// Its first moment, or momentum.
    first: Tensor,
    gradient: Tensor,
    how: How,
    sums: Sums,
}

/// Who moves it.
enum How {
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
    /// Its weights and moments, flat, as they are summed up.
    fn parts(&self) -> Vec<(Tensor, u64)> {
        let second = match &self.how {
            How::Muon => None,
            How::AdamW { second, .. } => Some(second),
        };
        let all = [Some(&self.weight), Some(&self.first), second].into_iter().flatten();
        all.zip(self.sums.salts).map(|(part, salt)| (flat(part), salt)).collect()
    }

    /// How many chunks it has.
    fn chunks(&self) -> usize {
        self.weight.numel().div_ceil(CHUNK as usize)
    }
}

/// What pieces of work came to, for the host to read.
pub(crate) struct Outcome {
    record: Record,
    /// Of each piece, in groups that were computed together: its chunks, and its tensors.
    groups: Vec<Vec<[usize; 2]>>,
}

/// What one came to: the sum of squares of new weights minus old ones, and checksums of weights and moments, 0 where there are
/// none of those.
pub(crate) type Came = (f64, [u64; 3]);

impl Outcome {
    /// Reads it, if the host has not: piece by piece.
    pub(crate) fn read(self) -> Result<Vec<Came>> {
        let Outcome { mut record, groups } = self;
        record.read().map_err(refused)?;
        let mut found = Vec::new();
        for group in groups {
            let begins = found.len();
            for [chunks, _] in &group {
                let chunks = (0..*chunks).map(|_| record.float());
                let chunks = chunks.collect::<kernels::Result<Vec<_>>>().map_err(refused)?;
                found.push((norm::sum(&chunks), [0; 3]));
            }
            for ([_, parts], (_, sums)) in group.iter().zip(&mut found[begins..]) {
                for sum in &mut sums[..*parts] {
                    *sum = record.word().map_err(refused)?;
                }
            }
        }
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
    let groups = match device {
        tch::Device::Cpu => items.into_iter().map(|item| vec![item]).collect(),
        _ => together::groups(items),
    };
    let shape = |item: &Item| [item.chunks(), item.parts().len()];
    let shapes = groups.iter().map(|group| group.iter().map(shape).collect()).collect();
    let found = workers.map(groups, |items| {
        tch::no_grad(|| match device {
            tch::Device::Cpu => items.into_iter().map(|item| one(ops, rules, item)).collect(),
            _ => rules.apply(ops, items).map(|words| vec![words]).map_err(refused),
        })
    })?;
    let mut record = Record::default();
    let mut words = found.iter().flatten().flatten();
    words.try_for_each(|words| record.put(words)).map_err(refused)?;
    Ok(Outcome { record, groups: shapes })
}

/// Moves one by itself, in main memory, and says what it came to: squares of its chunks, f64, and checksums, i64.
fn one(ops: &dyn Ops, rules: together::Rules, mut item: Item) -> Result<[Tensor; 2]> {
    let scale = rules.scale;
    let parts = item.parts();
    let Item { weight, first, gradient, how, sums } = &mut item;
    let moved = Moving { ops, parts: &parts, first: sums.first };
    match how {
        How::Muon => {
            let _watch = part(Part::Muon);
            let longest = weight.size().into_iter().max().unwrap_or(1);
            let direction = rules.muon.direction(ops, first, (gradient, scale));
            let direction = direction.and_then(|one| Ok(one.f_contiguous()?)).map_err(refused)?;
            let direction = direction.view([-1]);
            moved.by(|chunk, weight| rules.muon.descend(ops, weight, &chunk(&direction), longest))
        }
        How::AdamW { second, decay } => {
            let _watch = part(Part::AdamW);
            let rule = if *decay { rules.decayed } else { rules.plain };
            moved.by(|chunk, weight| {
                let (mut first, mut second) = (chunk(first), chunk(second));
                let moments = [&mut first, &mut second];
                rule.update(ops, weight, moments, (&chunk(gradient), scale))
            })
        }
    }
}

/// Flat weights that move, and their moments.
struct Moving<'a> {
    ops: &'a dyn Ops,
    parts: &'a [(Tensor, u64)],
    /// The number of the first element.
    first: u64,
}

impl Moving<'_> {
    /// Moves weights chunk by chunk: squares of new ones minus old ones by chunk, and checksums of weights and moments. `update`
    /// is handed each chunk, and what cuts the same chunk out of tensors beside the weights.
    ///
    /// The old weights of one chunk at a time are kept, in the same memory: so they, and all that moved, are still in the cache
    /// when they are compared and summed up.
    fn by(
        &self,
        mut update: impl FnMut(&dyn Fn(&Tensor) -> Tensor, &mut Tensor) -> kernels::Result<()>,
    ) -> Result<[Tensor; 2]> {
        let weights = &self.parts[0].0;
        let (count, mut squares) = (weights.size()[0], Vec::new());
        let mut sums = vec![0u64; self.parts.len()];
        let memory =
            weights.f_narrow(0, 0, CHUNK.min(count)).and_then(|chunk| chunk.f_empty_like());
        let memory = memory.map_err(refused)?;
        for start in (0..count).step_by(CHUNK as usize) {
            let length = CHUNK.min(count - start);
            let chunk = |tensor: &Tensor| tensor.narrow(0, start, length);
            let (mut new, mut old) = (chunk(weights), memory.narrow(0, 0, length));
            {
                let _watch = part(Part::Moved);
                old.f_copy_(&new).map_err(refused)?;
            }
            update(&chunk, &mut new).map_err(refused)?;
            {
                let _watch = part(Part::Moved);
                let difference = old.f_sub_(&new).map_err(refused)?;
                squares.push(self.ops.squares(&difference).map_err(refused)?);
            }
            let _watch = part(Part::StateSums);
            for (sum, (moved, salt)) in sums.iter_mut().zip(self.parts) {
                let own = checksum::slice(&chunk(moved), self.first + start as u64, *salt);
                *sum = sum.wrapping_add(own.map_err(refused)?);
            }
        }
        let sums: Vec<i64> = sums.into_iter().map(u64::cast_signed).collect();
        let squares = Tensor::f_from_slice(&squares).map_err(refused)?;
        Ok([squares, Tensor::f_from_slice(&sums).map_err(refused)?])
    }
}

/// A contiguous tensor as one row: itself, where it is one.
fn flat(tensor: &Tensor) -> Tensor {
    match tensor.dim() {
        1 => tensor.shallow_clone(),
        _ => tensor.reshape([-1]),
    }
}

/// The pieces of work of a tensor, or of a part of one that an owner has: whole matrices, or whole chunks. `sums` is that of the
/// whole part.
pub(crate) fn split(
    rule: Rule,
    weight: &Tensor,
    (first, second): (&Tensor, Option<&Tensor>),
    (gradient, sums): (&Tensor, Sums),
    items: &mut Vec<Item>,
) {
    let from = |elements: i64| Sums { first: sums.first + elements as u64, ..sums };
    match (rule, second) {
        (Rule::AdamW { decay }, Some(second)) => {
            let (length, most) = (weight.numel() as i64, CHUNK * CHUNKS);
            let gradient = flat(gradient);
            let [weight, first, second] = [weight, first, second].map(flat);
            for start in (0..length).step_by(most as usize) {
                // A model has thousands of pieces that are one item each, and every view takes the host a microsecond.
                let piece = |tensor: &Tensor| match length <= most {
                    true => tensor.shallow_clone(),
                    false => tensor.narrow(0, start, most.min(length - start)),
                };
                let how = How::AdamW { second: piece(&second), decay };
                let [weight, first, gradient] = [&weight, &first, &gradient].map(piece);
                items.push(Item { weight, first, gradient, how, sums: from(start) });
            }
        }
        (Rule::MuonEach, _) => (0..weight.size()[0]).for_each(|expert| {
            let matrix = |tensor: &Tensor| tensor.select(0, expert);
            let (weight, first, gradient) = (matrix(weight), matrix(first), matrix(gradient));
            let sums = from(expert * weight.numel() as i64);
            items.push(Item { weight, first, gradient, how: How::Muon, sums });
        }),
        (Rule::Muon | Rule::AdamW { .. }, _) => {
            let [weight, first, gradient] = [weight, first, gradient].map(Tensor::shallow_clone);
            items.push(Item { weight, first, gradient, how: How::Muon, sums });
        }
    }
}
