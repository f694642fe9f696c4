//! Rotary embedding of the first dimensions of each head, paired by halves.

use tch::{Kind, Tensor};

use super::ZayaConfig;

/// Angles of every token: `[tokens, half]`.
#[derive(Debug)]
pub(super) struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Angles in f32, as Hugging Face computes them.
    pub(super) fn new(config: &ZayaConfig, positions: &Tensor) -> Rotary {
        let dim = config.rotary_dim();
        let options = (Kind::Float, positions.device());
        let exponent = Tensor::arange_start_step(0, dim, 2, options) / dim as f64;
        let frequency = Tensor::pow_scalar(config.rope_theta, &exponent).reciprocal();
        let angle = positions.to_kind(Kind::Float).unsqueeze(1) * frequency;
        Rotary { cos: angle.cos(), sin: angle.sin() }
    }

    /// Cosines and sines, `[tokens, half]`.
    pub(super) fn angles(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }
}
