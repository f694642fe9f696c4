//! RMS norm and residual scaling: forward, and backward written out.

use tch::{Kind, Tensor};

/// `x * rsqrt(mean(x^2) + eps) * weight`, statistics in f32.
pub(super) struct RmsNorm<'a> {
    pub(super) weight: &'a Tensor,
    pub(super) eps: f64,
}

/// What the backward pass needs of a norm: `x` scaled to unit mean square, and the factors that did it.
#[derive(Debug)]
pub(super) struct Normed {
    unit: Tensor,
    factor: Tensor,
}

impl RmsNorm<'_> {
    pub(super) fn forward(&self, x: &Tensor) -> (Tensor, Normed) {
        let factor = (x.square().mean_dim(-1, true, Kind::Float) + self.eps).rsqrt();
        let unit = x * &factor;
        (&unit * self.weight, Normed { unit, factor })
    }

    /// From the gradient of the output: that of the input, and that of the weight.
    pub(super) fn backward(&self, saved: Normed, grad: &Tensor) -> (Tensor, Tensor) {
        let Normed { unit, factor } = saved;
        let product = grad * &unit;
        let weight = product.sum_dim_intlist(0, false, Kind::Float);
        let along = product.mv(self.weight) / -(unit.size()[1] as f64);
        let mut input = grad * self.weight;
        let _ = input.addcmul_(&unit, &along.unsqueeze(1));
        (input * factor, weight)
    }
}

/// `(out + hidden_bias) * hidden_scale + (stream + residual_bias) * residual_scale`.
///
/// The papers write `a * x + b`; the code that trained ZAYA1 adds first.
pub(super) struct Residual<'a> {
    pub(super) hidden_scale: &'a Tensor,
    pub(super) hidden_bias: &'a Tensor,
    pub(super) residual_scale: &'a Tensor,
    pub(super) residual_bias: &'a Tensor,
}

/// Gradients of a residual addition.
pub(super) struct ResidualGrads {
    pub(super) out: Tensor,
    pub(super) stream: Tensor,
    /// Hidden scale, hidden bias, residual scale, residual bias.
    pub(super) params: [Tensor; 4],
}

impl Residual<'_> {
    pub(super) fn forward(&self, out: &Tensor, stream: &Tensor) -> Tensor {
        let mut sum = (out + self.hidden_bias) * self.hidden_scale;
        let shifted = stream + self.residual_bias;
        sum.addcmul_(&shifted, self.residual_scale)
    }

    pub(super) fn backward(&self, out: &Tensor, stream: &Tensor, grad: &Tensor) -> ResidualGrads {
        let columns = |x: Tensor| x.sum_dim_intlist(0, false, Kind::Float);
        let all = columns(grad.shallow_clone());
        let params = [
            columns(grad * out).addcmul(self.hidden_bias, &all),
            &all * self.hidden_scale,
            columns(grad * stream).addcmul(self.residual_bias, &all),
            &all * self.residual_scale,
        ];
        ResidualGrads { out: grad * self.hidden_scale, stream: grad * self.residual_scale, params }
    }
}
