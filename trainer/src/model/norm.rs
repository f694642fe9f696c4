//! RMS norm and residual scaling: forward, and backward written out.

use contract::Result;
use kernels::fused;
use tch::{Kind, Tensor};

use super::layer::{Sink, emit};
use super::param::{Declare, ParamId, Weights};
use super::{ZayaConfig, product};

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
    pub(super) fn forward(&self, x: &Tensor) -> (Tensor, Normed) {
        let (out, factor) = match fused::fits(x) {
            true => fused::rms_norm(x, self.weight, self.eps),
            false => self.by_operators(x),
        };
        (out, Normed { x: x.shallow_clone(), factor })
    }

    fn by_operators(&self, x: &Tensor) -> (Tensor, Tensor) {
        let factor = (x.square().mean_dim(-1, true, Kind::Float) + self.eps).rsqrt();
        (x * &factor * self.weight, factor)
    }

    /// From the gradient of the output: that of the input, and that of the weight.
    pub(super) fn backward(&self, saved: Normed, grad: &Tensor) -> (Tensor, Tensor) {
        let Normed { x, factor } = saved;
        match fused::fits(&x) && fused::fits(grad) {
            true => fused::rms_norm_backward(&x, &factor, self.weight, grad),
            false => self.backward_by_operators(&x, &factor, grad),
        }
    }

    fn backward_by_operators(
        &self,
        x: &Tensor,
        factor: &Tensor,
        grad: &Tensor,
    ) -> (Tensor, Tensor) {
        let unit = x * factor;
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
pub(super) struct Residual<P> {
    pub(super) hidden_scale: P,
    pub(super) hidden_bias: P,
    pub(super) residual_scale: P,
    pub(super) residual_bias: P,
}

impl Residual<ParamId> {
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

    pub(super) fn bind<'a>(&self, weights: Weights<'a>) -> Residual<&'a Tensor> {
        Residual {
            hidden_scale: weights.of(self.hidden_scale),
            hidden_bias: weights.of(self.hidden_bias),
            residual_scale: weights.of(self.residual_scale),
            residual_bias: weights.of(self.residual_bias),
        }
    }

    /// Hands [`ResidualGrads::params`] on.
    pub(super) fn emit(&self, params: [Tensor; 4], sink: &mut dyn Sink) -> Result<()> {
        let ids = [self.hidden_scale, self.hidden_bias, self.residual_scale, self.residual_bias];
        ids.into_iter().zip(params).try_for_each(|(id, gradient)| emit(sink, id, gradient))
    }
}

/// Gradients of a residual addition.
pub(super) struct ResidualGrads {
    pub(super) out: Tensor,
    pub(super) stream: Tensor,
    /// Hidden scale, hidden bias, residual scale, residual bias.
    pub(super) params: [Tensor; 4],
}

impl Residual<&Tensor> {
    pub(super) fn forward(&self, out: &Tensor, stream: &Tensor) -> Tensor {
        let out = &product::wide(out.shallow_clone());
        match fused::fits(out) && fused::fits(stream) {
            true => fused::residual(out, stream, self.vectors()),
            false => self.by_operators(out, stream),
        }
    }

    fn by_operators(&self, out: &Tensor, stream: &Tensor) -> Tensor {
        let mut sum = (out + self.hidden_bias) * self.hidden_scale;
        let shifted = stream + self.residual_bias;
        sum.addcmul_(&shifted, self.residual_scale)
    }

    fn vectors(&self) -> fused::Scaled<'_> {
        fused::Scaled {
            scale: self.hidden_scale,
            bias: self.hidden_bias,
            stream_scale: self.residual_scale,
            stream_bias: self.residual_bias,
        }
    }

    pub(super) fn backward(&self, out: &Tensor, stream: &Tensor, grad: &Tensor) -> ResidualGrads {
        let out = &product::wide(out.shallow_clone());
        let fits = [out, stream, grad].into_iter().all(fused::fits);
        let (to_out, to_stream, [all, of_out, of_stream]) = match fits {
            true => {
                let scales = (self.hidden_scale, self.residual_scale);
                fused::residual_backward(out, stream, scales, grad)
            }
            false => self.backward_by_operators(out, stream, grad),
        };
        let params = [
            of_out.addcmul(self.hidden_bias, &all),
            &all * self.hidden_scale,
            of_stream.addcmul(self.residual_bias, &all),
            &all * self.residual_scale,
        ];
        ResidualGrads { out: to_out, stream: to_stream, params }
    }

    fn backward_by_operators(
        &self,
        out: &Tensor,
        stream: &Tensor,
        grad: &Tensor,
    ) -> (Tensor, Tensor, [Tensor; 3]) {
        let columns = |x: Tensor| x.sum_dim_intlist(0, false, Kind::Float);
        let sums = [columns(grad.shallow_clone()), columns(grad * out), columns(grad * stream)];
        (grad * self.hidden_scale, grad * self.residual_scale, sums)
    }
}

#[cfg(test)]
mod tests {
    use super::super::random;
    use super::*;
    use proptest::prelude::*;

    fn close(found: &Tensor, wanted: &Tensor) -> bool {
        let size = wanted.abs().max().double_value(&[]);
        found.size() == wanted.size()
            && (found - wanted).abs().max().double_value(&[]) <= 2e-6 * size.max(1.0)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// One pass over memory computes what the operators compute.
        #[test]
        fn passes_are_the_operators(rows in 1i64..80, width in 1i64..70, seed in 0u64..1000) {
            let [x, out, grad] = [0, 1, 2].map(|index| random(&[rows, width], seed + index));
            let [a, b, c, d] = [3, 4, 5, 6].map(|index| random(&[width], seed + index));
            let norm = RmsNorm { weight: &a, eps: 1e-5 };
            let (found, saved) = norm.forward(&x);
            let (wanted, factor) = norm.by_operators(&x);
            prop_assert!(close(&found, &wanted) && close(&saved.factor, &factor));
            let (found, found_weight) = norm.backward(saved, &grad);
            let (wanted, wanted_weight) = norm.backward_by_operators(&x, &factor, &grad);
            prop_assert!(close(&found, &wanted) && close(&found_weight, &wanted_weight));

            let residual = Residual { hidden_scale: &a, hidden_bias: &b, residual_scale: &c, residual_bias: &d };
            prop_assert!(close(&residual.forward(&out, &x), &residual.by_operators(&out, &x)));
            let found = residual.backward(&out, &x, &grad);
            let (to_out, to_stream, [all, ..]) = residual.backward_by_operators(&out, &x, &grad);
            prop_assert!(close(&found.out, &to_out) && close(&found.stream, &to_stream));
            prop_assert!(close(&found.params[1], &(all * &a)));
        }
    }
}
