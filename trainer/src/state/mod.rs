//! The state of a run: what one step hands to the next, and nothing else.

pub mod ownership;

use contract::{Digest, Hasher, Result};
use kernels::checksum;
use tch::Tensor;

use crate::optim::balance::Balance;
use crate::optim::guard::Windows;
use crate::timing;
use crate::workers::Workers;

/// The state after a step.
pub struct State {
    /// The step; 0 before the first.
    pub step: u64,
    /// Weights, f32, in canonical order.
    pub weights: Vec<Tensor>,
    /// First moments (AdamW) or momenta (Muon), as large as the weights.
    pub first: Vec<Tensor>,
    /// Second moments; none where Muon rules.
    pub second: Vec<Option<Tensor>>,
    /// The routers' balancing biases, by layer.
    pub balance: Vec<Balance>,
    /// The losses and norms that decide what is skipped and clipped; `None` where the curriculum asks for neither.
    pub windows: Option<Windows>,
}

/// Checksums over a whole state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSums {
    /// One for each weight tensor.
    pub weights: Vec<u64>,
    /// Over everything.
    pub digest: Digest,
}

/// What of a state a checksum belongs to; part of its salt, so that two tensors never stand for each other.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Weight = 1,
    First = 2,
    Second = 3,
    Gradient = 4,
    LeafGradient = 5,
}

/// The salt of tensor `index`.
pub(crate) fn salt(part: Part, index: usize) -> u64 {
    ((part as u64) << 32) | index as u64
}

impl State {
    /// Every tensor of the state with its part, in the order in which the digest takes them.
    fn tensors(&self) -> impl Iterator<Item = (Part, usize, &Tensor)> {
        let named = |part: Part| move |(index, tensor)| (part, index, tensor);
        let second = self.second.iter().enumerate();
        let second =
            second.filter_map(|(index, tensor)| Some((Part::Second, index, tensor.as_ref()?)));
        let weights = self.weights.iter().enumerate().map(named(Part::Weight));
        weights.chain(self.first.iter().enumerate().map(named(Part::First))).chain(second)
    }

    /// A copy that shares no memory with this one.
    pub fn copy(&self) -> State {
        let State { step, weights, first, second, balance, windows } = self;
        let copies = |tensors: &[Tensor]| tensors.iter().map(Tensor::copy).collect();
        let second = second.iter().map(|tensor| tensor.as_ref().map(Tensor::copy)).collect();
        let (weights, first) = (copies(weights), copies(first));
        let (balance, windows) = (balance.clone(), windows.clone());
        State { step: *step, weights, first, second, balance, windows }
    }

    /// Checksums of everything, computed on the workers.
    pub fn sums(&self, workers: Workers) -> Result<StateSums> {
        let items: Vec<_> = self
            .tensors()
            .map(|(part, index, tensor)| (salt(part, index), tensor.shallow_clone()))
            .collect();
        let sums = workers.map(items, |(salt, tensor)| {
            let _watch = timing::part(timing::Part::StateSums);
            Ok(checksum::tensor(&tensor, salt))
        })?;
        // No `..`: whatever is added to the state enters its digest.
        let State { step, weights, first: _, second, balance, windows } = self;
        let has_second: Vec<bool> = second.iter().map(Option::is_some).collect();
        let digest = digest(*step, &has_second, &sums, (balance, windows.as_ref()));
        Ok(StateSums { weights: sums[..weights.len()].to_vec(), digest })
    }
}

/// The digest of a state after `step`, from the checksums of its tensors: all weights, then all first moments, then the
/// second moments of those that have one.
pub(crate) fn digest(
    step: u64,
    has_second: &[bool],
    sums: &[u64],
    (balance, windows): (&[Balance], Option<&Windows>),
) -> Digest {
    let count = has_second.len() as u64;
    let mut hasher = Hasher::new();
    hasher.tag("state.v1").u64(step).u64(count).u64(count);
    has_second.iter().for_each(|has| {
        hasher.u64(u64::from(*has));
    });
    sums.iter().for_each(|sum| {
        hasher.u64(*sum);
    });
    for Balance { bias, first, second } in balance {
        for values in [bias, first, second] {
            hasher.u32s(&values.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
        }
    }
    // Nothing for nothing: a run without windows has the digests that it had before there were any.
    if let Some(Windows { skipped, losses, norms }) = windows {
        hasher.tag("windows.v1").u64(*skipped);
        for window in [losses, norms] {
            hasher.u64(window.0.len() as u64);
            window.0.iter().for_each(|bits| {
                hasher.u64(*bits);
            });
        }
    }
    hasher.finish()
}
