//! Checksums and the digest of a state, as the ledger records them.

use contract::{Digest, Hasher};

use crate::optim::balance::RouterBalance;
use crate::optim::guard::Windows;

/// Checksums over a whole state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSums {
    /// One for each weight tensor.
    pub weights: Vec<u64>,
    /// Over everything.
    pub digest: Digest,
}

/// The part of a state that a checksum covers: in its salt, so that tensors cannot be exchanged for each other.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Weight = 1,
    First = 2,
    Second = 3,
    Gradient = 4,
    MicroBatchGradient = 5,
}

/// The salt of tensor `index`.
pub(crate) fn salt(part: Part, index: usize) -> u64 {
    ((part as u64) << 32) | index as u64
}

/// The digest of a state after `step`, from the checksums of its tensors: all weights, then all first moments, then the
/// existing second moments.
pub(super) fn digest(
    step: u64,
    has_second: &[bool],
    sums: &[u64],
    balance: &[RouterBalance],
    windows: Option<&Windows>,
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
    for RouterBalance { bias, first, second } in balance {
        for values in [bias, first, second] {
            hasher.u32s(&values.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
        }
    }
    // A run without windows keeps the digests that it had before windows existed.
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
