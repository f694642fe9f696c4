//! Rotary embedding of the first dimensions of each head, paired by halves.

use tch::{Kind, Tensor};

use super::ZayaConfig;

/// Angles of every token: `[tokens, half]`.
#[derive(Debug)]
pub(super) struct Rotary {
    cos: Tensor,
    sin: Tensor,
    minus_sin: Tensor,
    half: i64,
}

impl Rotary {
    /// Angles in f32, as Hugging Face computes them.
    pub(super) fn new(config: &ZayaConfig, positions: &Tensor) -> Rotary {
        let dim = config.rotary_dim();
        let options = (Kind::Float, positions.device());
        let exponent = Tensor::arange_start_step(0, dim, 2, options) / dim as f64;
        let frequency = Tensor::pow_scalar(config.rope_theta, &exponent).reciprocal();
        let angle = positions.to_kind(Kind::Float).unsqueeze(1) * frequency;
        let (cos, sin) = (angle.cos(), angle.sin());
        Rotary { minus_sin: -&sin, cos, sin, half: dim / 2 }
    }

    /// Cosines and sines, `[tokens, half]`.
    pub(super) fn angles(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }

    /// Turns every head of `x`, `[heads, tokens, dim]`, in place.
    pub(super) fn turn(&self, x: &mut Tensor) {
        self.rotate(x, &self.sin, &self.minus_sin);
    }

    /// Turns back: the transpose of [`Rotary::turn`], which is its gradient too.
    pub(super) fn turn_back(&self, x: &mut Tensor) {
        self.rotate(x, &self.minus_sin, &self.sin);
    }

    fn rotate(&self, x: &mut Tensor, sin: &Tensor, minus_sin: &Tensor) {
        let (mut a, mut b) = (x.narrow(2, 0, self.half), x.narrow(2, self.half, self.half));
        let mut turned = &a * &self.cos;
        let _ = turned.addcmul_(&b, minus_sin);
        let into_b = &a * sin;
        b *= &self.cos;
        b += into_b;
        a.copy_(&turned);
    }
}
