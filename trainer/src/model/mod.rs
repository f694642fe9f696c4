//! The ZAYA1 model: one leaf of sequences in, its losses and gradients out.
//!
//! ```text
//! config     every number that decides the computation     params     names, shapes, roles, initial values
//! input      tokens of a leaf, its documents               pass       forward, loss, backward: read this first
//! norm       RMS norm, residual scaling                    attention  convolutions, q-k mean, value shift (shift,
//! router     depth averaging, choice                                  rotary and sdpa are its parts)
//! experts    sorted, one product each                      head       loss without all logits
//! product    in the kind of the weights, sums in f32
//! fixtures/  parity with Hugging Face, and its traps
//! ```
//!
//! Invariant: [`leaf`] is a pure function of the weights, the balancing biases, the leaf and the kernel table.

mod attention;
mod config;
mod experts;
pub mod flops;
mod head;
mod input;
mod layers;
mod norm;
mod normal;
mod params;
mod pass;
mod product;
mod rotary;
mod router;
mod sdpa;
mod shift;

#[cfg(test)]
mod agreement;
#[cfg(test)]
pub(crate) mod parity;
#[cfg(test)]
mod reference;

pub use config::{PRESETS, Skip, ZayaConfig};
pub use input::{LeafInput, StagedLeaf};
pub use params::{
    EMBEDDING, Init, ParamSpec, Role, balance_name, init, init_balance, parameters, rounded,
};

use contract::{Fault, Result};
use tch::Tensor;

/// What a leaf keeps between its forward and its backward pass. Decides memory and time, never bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// Every activation that the backward pass reads.
    #[default]
    Everything,
    /// What enters each layer; its activations are computed again, layer by layer, on the way back.
    LayerInputs,
}

/// What a leaf answers with.
#[derive(Debug)]
pub struct LeafOutput {
    /// Sum of the token losses, in nats.
    pub loss: f64,
    /// Tokens that had a label.
    pub labels: u64,
    /// Gradient of `loss / divisor` for every parameter, in canonical order, f32. What was not used has exact zeros.
    pub grads: Vec<Tensor>,
    /// Loss of every token, `[rows * seq_len]`, f32; 0 where there is no label.
    pub token_losses: Tensor,
    /// Tokens by layer and router class; the skip is the last class.
    pub counts: Vec<Vec<u64>>,
}

/// Computes one leaf: forward, loss and backward of `sum of token losses / divisor`.
///
/// `params` in the order of [`parameters`], f32 or as [`rounded`] left them, `balance` one tensor of biases per layer.
/// Nothing is written to either, so several threads may compute leaves of the same weights at once, each with its own
/// aliases ([`kernels::share`]).
pub fn leaf(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &LeafInput,
    divisor: u64,
) -> Result<LeafOutput> {
    let input = input.prepare(config, params[0].device())?;
    compute(config, params, balance, &input, (divisor, Keep::Everything))
}

/// Computes a leaf that a prefetcher staged, keeping what `keep` says; otherwise as [`leaf`].
pub fn staged_leaf(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    staged: StagedLeaf,
    (divisor, keep): (u64, Keep),
) -> Result<LeafOutput> {
    compute(config, params, balance, &staged.arrive()?, (divisor, keep))
}

fn compute(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &input::Prepared,
    how: (u64, Keep),
) -> Result<LeafOutput> {
    kernels::runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
    Ok(pass::leaf(config, params, balance, input, how))
}

/// The sum of the token losses of some sequences, in nats: forward only.
pub fn losses(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &LeafInput,
) -> Result<f64> {
    kernels::runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
    let input = input.prepare(config, params[0].device())?;
    Ok(pass::losses(config, params, balance, &input))
}

/// Logits of every token, `[rows * seq_len, vocab_size]`: for tests and short texts, a leaf never holds them all.
pub fn logits(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &LeafInput,
) -> Result<Tensor> {
    kernels::runtime::enter_thread().map_err(|error| Fault::machine(error.to_string()))?;
    let input = input.prepare(config, params[0].device())?;
    Ok(pass::logits(config, params, balance, &input))
}

/// Numbers between -1 and 1 that depend on nothing but `seed`.
#[cfg(test)]
pub(crate) fn random(shape: &[i64], seed: u64) -> Tensor {
    let key = contract::Key::from_seed(seed);
    let draw = |index| contract::draw(key, contract::Purpose::Generate, index);
    let count: i64 = shape.iter().product();
    let values =
        (0..count as u64).map(|index| (draw(index) >> 40) as f32 / (1u64 << 23) as f32 - 1.0);
    Tensor::from_slice(&values.collect::<Vec<_>>()).reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_answers_for_every_parameter() {
        let config = ZayaConfig { vocab_size: 97, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        let (params, balance) = (init(&config, 1), init_balance(&config));
        let tokens: Vec<i32> = (0..64).map(|i| i * 37 % 97).collect();
        let labels: Vec<i32> = (1..65).map(|i| i * 37 % 97).collect();
        let positions: Vec<i32> = (0..64).map(|i| i % 32).collect();
        let input = LeafInput {
            tokens: &tokens,
            labels: &labels,
            positions: &positions,
            mask: &[1; 64],
            boundaries: &[vec![0], vec![0]],
            rows: 2,
            seq_len: 32,
        };
        let out = leaf(&config, &params, &balance, &input, 64).unwrap();
        assert!((out.loss / 64.0 - (97f64).ln()).abs() < 0.3, "{}", out.loss / 64.0);
        for (spec, grad) in parameters(&config).iter().zip(&out.grads) {
            assert_eq!(grad.size(), spec.shape, "{}", spec.name);
            assert!(grad.isfinite().all().int64_value(&[]) == 1, "{}", spec.name);
        }
        let again = leaf(&config, &params, &balance, &input, 64).unwrap();
        assert_eq!(out.grads, again.grads);
    }
}
