//! RMS norm and residual scaling: forward, and backward written out.

use contract::Result;
use kernels::ops::{Ops, Scaling};
use tch::Tensor;

use super::ZayaConfig;
use super::layer::{Sink, emit};
use super::param::{Declare, ParamId, Weights};
use crate::refusal::refused;

/// `x * rsqrt(mean(x^2) + eps) * weight`, statistics in f32. `P` is a parameter's name, or its weight.
pub(super) struct RmsNorm<P> {
    pub(super) weight: P,
    pub(super) eps: f64,
}

impl RmsNorm<ParamId> {
    /// Over the whole width of the residual.
    pub(super) fn declare(
        params: &mut Declare<'_>,
        config: &ZayaConfig,
        name: &str,
        zyphra: &str,
    ) -> Self {
        let weight = params.vector(name, zyphra, config.hidden_size, 1.0);
        RmsNorm { weight, eps: config.rms_norm_eps }
    }

    pub(super) fn bind<'a>(&self, weights: Weights<'a>) -> RmsNorm<&'a Tensor> {
        RmsNorm { weight: weights.of(self.weight), eps: self.eps }
    }
}

/// What the backward pass needs of a norm: what it was given, and the factor of each row.
#[derive(Debug)]
pub(super) struct Normed {
    x: Tensor,
    factor: Tensor,
}

impl RmsNorm<&Tensor> {
    pub(super) fn forward(&self, ops: &dyn Ops, x: &Tensor) -> Result<(Tensor, Normed)> {
        let (out, factor) = ops.rms_norm(x, self.weight, self.eps).map_err(refused)?;
        Ok((out, Normed { x: x.shallow_clone(), factor }))
    }

    /// From the gradient of the output: that of the input, and that of the weight.
    pub(super) fn backward(
        &self,
        ops: &dyn Ops,
        saved: Normed,
        grad: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        ops.rms_norm_backward(&saved.x, &saved.factor, self.weight, grad).map_err(refused)
    }
}

/// `(out + hidden_bias) * hidden_scale + (stream + residual_bias) * residual_scale`.
///
/// The papers write `a * x + b`; the code that trained ZAYA1 adds first.
pub(super) struct Residual {
    pub(super) hidden_scale: ParamId,
    pub(super) hidden_bias: ParamId,
    pub(super) residual_scale: ParamId,
    pub(super) residual_bias: ParamId,
}

impl Residual {
    pub(super) fn declare(params: &mut Declare<'_>, config: &ZayaConfig) -> Self {
        let mut vector =
            |name: &str, value: f32| params.vector(name, name, config.hidden_size, value);
        Residual {
            hidden_scale: vector("hidden_states_scale", 1.0),
            hidden_bias: vector("hidden_states_bias", 0.0),
            residual_scale: vector("residual_scale", 1.0),
            residual_bias: vector("residual_bias", 0.0),
        }
    }

    /// The vectors as [`Ops::residual`] takes them.
    pub(super) fn scaling<'a>(&self, weights: Weights<'a>) -> Scaling<'a> {
        Scaling {
            scale: weights.of(self.hidden_scale),
            bias: weights.of(self.hidden_bias),
            residual_scale: weights.of(self.residual_scale),
            residual_bias: weights.of(self.residual_bias),
        }
    }

    /// Hands the gradients of [`Residual::scaling`] on.
    pub(super) fn emit(&self, grads: [Tensor; 4], sink: &mut dyn Sink) -> Result<()> {
        let ids = [self.hidden_scale, self.hidden_bias, self.residual_scale, self.residual_bias];
        ids.into_iter().zip(grads).try_for_each(|(id, gradient)| emit(sink, id, gradient))
    }
}
