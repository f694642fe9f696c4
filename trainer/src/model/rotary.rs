//! Rotary embedding of the first dimensions of each head, paired by halves.

use kernels::Result;
use tch::{Kind, Tensor};

/// Angles of every token: `[tokens, half]`.
#[derive(Debug)]
pub(super) struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Computes angles of `dim` rotated dimensions in f32, as Hugging Face does; `theta` is the base of their
    /// frequencies.
    pub(super) fn new(dim: i64, theta: f64, positions: &Tensor) -> Result<Rotary> {
        let options = (Kind::Float, positions.device());
        let exponent = Tensor::f_arange_start_step(0, dim, 2, options)?.f_div_scalar(dim as f64)?;
        let frequency = Tensor::f_pow_scalar(theta, &exponent)?.f_reciprocal()?;
        let angle = positions.f_to_kind(Kind::Float)?.f_unsqueeze(1)?.f_mul(&frequency)?;
        Ok(Rotary { cos: angle.f_cos()?, sin: angle.f_sin()? })
    }

    /// Cosines and sines, `[tokens, half]`.
    pub(super) fn angles(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }
}
