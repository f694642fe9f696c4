//! The state of a run as one rank holds it: every weight, and the moments of the pieces that it owns. A rank that is alone
//! owns them all.
//!
//! [`ownership`] says who owns what, [`digest`] what the ledger knows of a state.

pub mod digest;
pub mod ownership;

use contract::Result;
use kernels::checksum;
use tch::{Device, Kind, Tensor};

use crate::model::{self, ParamSpec};
use crate::optim::balance::Balance;
use crate::optim::guard::Windows;
use crate::optim::{self, At, Settings, norm};
use crate::spec::RunSpec;
use crate::timing;
use crate::workers::Workers;
pub use digest::StateSums;
pub(crate) use digest::{Part, salt};
use ownership::{Ownership, Piece};

/// What one step hands to the next, and nothing else.
pub struct State {
    /// The step; 0 before the first.
    pub step: u64,
    /// Weights, f32, in canonical order: the same on every rank.
    pub weights: Vec<Tensor>,
    /// The routers' balancing biases, by layer: the same on every rank.
    pub balance: Vec<Balance>,
    /// The losses and norms that decide what is skipped and clipped, the same on every rank; `None` where the curriculum asks
    /// for neither.
    pub windows: Option<Windows>,
    /// Who owns what.
    pub owners: Ownership,
    /// Moments of this rank's pieces, in their order.
    pub moments: Vec<Moments>,
}

/// The moments of one piece, in its shape.
pub struct Moments {
    /// First moments (AdamW) or momenta (Muon).
    pub first: Tensor,
    /// Second moments; none where Muon rules.
    pub second: Option<Tensor>,
}

impl Moments {
    /// Those of `piece`, each made by `make`.
    pub fn of(piece: &Piece, mut make: impl FnMut() -> Tensor) -> Self {
        let first = make();
        Moments { first, second: piece.rule.has_second_moment().then(make) }
    }

    fn copy(&self) -> Self {
        let second = self.second.as_ref().map(Tensor::copy);
        Moments { first: self.first.copy(), second }
    }
}

/// Checksums of a piece: of its weights, first moments and second moments, 0 where there are none of those.
pub type PieceSums = [u64; 3];

impl State {
    /// The state before the first step: drawn weights, or those of the start.
    pub fn begin(
        spec: &RunSpec,
        device: Device,
        owners: Ownership,
        workers: Workers,
    ) -> Result<Self> {
        let mut balance = spec.balance();
        let weights = match &spec.start {
            None => drawn(spec, workers)?,
            Some(start) => {
                let (weights, biases) = start.read()?;
                balance.iter_mut().zip(biases).for_each(|(layer, bias)| layer.bias = bias);
                weights
            }
        };
        let weights = weights.into_iter().map(|tensor| tensor.to_device(device)).collect();
        let zeros = |piece: &Piece| Tensor::zeros(&piece.shape, (Kind::Float, device));
        let moments = owners.own().map(|piece| Moments::of(piece, || zeros(piece))).collect();
        let windows = spec.settings.guard.windows();
        Ok(State { step: 0, weights, balance, windows, owners, moments })
    }

    /// A copy that shares no memory with this one.
    pub fn copy(&self) -> State {
        let State { step, weights, balance, windows, owners, moments } = self;
        State {
            step: *step,
            weights: weights.iter().map(Tensor::copy).collect(),
            balance: balance.clone(),
            windows: windows.clone(),
            owners: owners.clone(),
            moments: moments.iter().map(Moments::copy).collect(),
        }
    }

    /// This rank's pieces with their part of the weights, as an alias, and their moments.
    pub fn own(&self) -> impl Iterator<Item = (&Piece, Tensor, &Moments)> {
        let own = self.owners.own().zip(&self.moments);
        own.map(|(piece, moments)| (piece, piece.of(&self.weights[piece.tensor]), moments))
    }

    /// Moves this rank's pieces by their gradients, which come in the order of its pieces, and returns for each the sum of
    /// squares of new weights minus old ones. What `step` counts is left to the caller.
    pub fn update(
        &mut self,
        settings: &Settings,
        gradients: &[Tensor],
        at: At,
        workers: Workers,
    ) -> Result<Vec<f64>> {
        let (mut items, mut ends) = (Vec::new(), Vec::new());
        for ((piece, weight, Moments { first, second }), gradient) in self.own().zip(gradients) {
            optim::split(piece.rule, &weight, (first, second.as_ref()), gradient, &mut items);
            ends.push(items.len());
        }
        let moved = optim::run(settings, items, at, workers)?;
        let starts = [0].into_iter().chain(ends.iter().copied());
        Ok(starts.zip(&ends).map(|(start, end)| norm::sum(&moved[start..*end])).collect())
    }

    /// Checksums of this rank's pieces, in their order, computed on the workers.
    pub fn own_sums(&self, workers: Workers) -> Result<Vec<PieceSums>> {
        let items = self.own().map(|(piece, weight, Moments { first, second })| {
            let second = second.as_ref().map(Tensor::shallow_clone);
            (piece.clone(), weight, first.shallow_clone(), second)
        });
        workers.map(items.collect(), |(piece, weight, first, second)| {
            let (at, index) = (piece.first as u64, piece.tensor);
            let _watch = timing::part(timing::Part::StateSums);
            let sum = |tensor: &Tensor, part| checksum::slice(tensor, at, salt(part, index));
            let second = second.map_or(0, |second| sum(&second, Part::Second));
            Ok([sum(&weight, Part::Weight), sum(&first, Part::First), second])
        })
    }

    /// The checksums of the whole state, from those of all pieces in canonical order.
    pub fn sums_of(&self, pieces: &[PieceSums]) -> StateSums {
        // No `..`: whatever is added to the state enters its digest.
        let State { step, weights, balance, windows, owners, moments: _ } = self;
        let mut sums = [(); 3].map(|()| vec![0u64; weights.len()]);
        let mut has_second = vec![false; weights.len()];
        for (piece, of_piece) in owners.pieces().iter().zip(pieces) {
            has_second[piece.tensor] = piece.rule.has_second_moment();
            for (sums, sum) in sums.iter_mut().zip(of_piece) {
                sums[piece.tensor] = sums[piece.tensor].wrapping_add(*sum);
            }
        }
        let [weights, first, second] = sums;
        let second = second.iter().zip(&has_second).filter(|(_, has)| **has).map(|(sum, _)| *sum);
        let all: Vec<u64> = weights.iter().chain(&first).copied().chain(second).collect();
        let digest = digest::digest(*step, &has_second, &all, balance, windows.as_ref());
        StateSums { weights, digest }
    }

    /// The same of a state of which this rank owns everything.
    pub fn sums(&self, workers: Workers) -> Result<StateSums> {
        Ok(self.sums_of(&self.own_sums(workers)?))
    }
}

/// Elements that a worker draws at a time.
const DRAWN: usize = 1 << 20;

/// Weights before the first step, drawn on the workers: each number has an address.
fn drawn(spec: &RunSpec, workers: Workers) -> Result<Vec<Tensor>> {
    let empty = |parameter: &ParamSpec| {
        Tensor::empty(parameter.shape.as_slice(), (Kind::Float, Device::Cpu))
    };
    let weights: Vec<Tensor> = spec.parameters.iter().map(empty).collect();
    let mut parts = Vec::new();
    for (parameter, weight) in spec.parameters.iter().zip(&weights) {
        let (flat, count) = (weight.view([-1]), parameter.elements());
        for first in (0..count).step_by(DRAWN) {
            let part = first..count.min(first + DRAWN as u64);
            let into = flat.narrow(0, first as i64, (part.end - first) as i64);
            parts.push((parameter, part, into));
        }
    }
    workers.map(parts, |(parameter, part, mut into)| {
        let values = model::initial(parameter, spec.curriculum.seed, part);
        tch::no_grad(|| into.copy_(&values));
        Ok(())
    })?;
    Ok(weights)
}
