//! RMS norm and residual scaling: forward, and hand-written backward.

use contract::Result;
use kernels::ops::{NormBack, ResidualScaling};
use tch::Tensor;

use crate::model::ZayaConfig;
use crate::model::gradients::{ChunkGradients, emit};
use crate::model::kinds::ResidualKind;
use crate::model::layer::{Pass, Rows};
use crate::model::param::{ParamDeclarations, ParamId};
use crate::refusal::refused;

/// `x * rsqrt(mean(x^2) + eps) * weight`, statistics in f32.
pub(in crate::model) struct RmsNorm {
    weight: ParamId,
    eps: f64,
}

/// What the backward pass of a norm reads: its input, and the factor of each row.
pub(in crate::model) struct SavedNorm {
    x: Tensor,
    factor: Tensor,
}

/// The gradients that arrive at a norm, and at the branch that bypasses it.
pub(in crate::model) struct NormOutputGrads {
    /// What the norm saved.
    pub(in crate::model) normed: SavedNorm,
    /// The gradient of its output.
    pub(in crate::model) grad: Rows,
    /// The gradient of its input from the branch that bypasses the norm, f32.
    pub(in crate::model) beside: Option<Tensor>,
}

impl RmsNorm {
    /// Over the whole width of the residual.
    pub(in crate::model) fn declare(
        params: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        name: &str,
        zyphra: &str,
    ) -> Self {
        let weight = params.vector(name, zyphra, config.hidden_size, 1.0);
        RmsNorm { weight, eps: config.rms_norm_eps }
    }

    /// Waits for its weight, and for all that are declared before it.
    pub(in crate::model) fn wait(&self, pass: &Pass<'_>) -> Result<()> {
        pass.wait(self.weight.index() + 1)
    }

    /// `x` normed, in [`Pass::kind`].
    pub(in crate::model) fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
    ) -> Result<(Tensor, SavedNorm)> {
        let normed = pass.ops.rms_norm(x, &pass.weights[self.weight], self.eps, pass.kind);
        let (out, factor) = normed.map_err(refused)?;
        Ok((out, SavedNorm { x: x.shallow_clone(), factor }))
    }

    /// The same for each chunk.
    pub(in crate::model) fn each(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<SavedNorm>)> {
        x.iter().map(|x| self.forward(pass, x)).collect()
    }

    /// Returns the gradient of the input.
    pub(in crate::model) fn backward(
        &self,
        pass: &Pass<'_>,
        returned: NormOutputGrads,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<Tensor> {
        let NormBack { x, factors, weight, beside } = self.back(pass, &returned);
        let grad = &returned.grad.unpermuted(pass.ops).map_err(refused)?;
        let found = match beside {
            None => pass.ops.rms_norm_backward(x, factors, weight, grad),
            Some(beside) => pass.ops.rms_norm_backward_beside(x, factors, weight, grad, beside),
        };
        let (input, weight) = found.map_err(refused)?;
        emit(sink, self.weight, weight)?;
        Ok(input)
    }

    fn back<'a>(&self, pass: &Pass<'a>, returned: &'a NormOutputGrads) -> NormBack<'a> {
        let NormOutputGrads { normed: SavedNorm { x, factor }, beside, .. } = returned;
        let weight = pass.weights.of(self.weight);
        NormBack { x, factors: factor, weight, beside: beside.as_ref() }
    }
}

/// `(out + hidden_bias) * hidden_scale + (residual + residual_bias) * residual_scale`.
///
/// The papers write `a * x + b`; the code that trained ZAYA1 adds first. A plain residual has no parameters: it is
/// computed in the same way with scales of 1 and biases of 0, which change no bit of the sum.
pub(in crate::model) struct Residual(Option<[ParamId; 4]>);

impl Residual {
    pub(in crate::model) fn declare(
        params: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
    ) -> Self {
        let mut vector =
            |name: &str, value: f32| params.vector(name, name, config.hidden_size, value);
        Residual((config.residual == ResidualKind::Scaled).then(|| {
            [
                vector("hidden_states_scale", 1.0),
                vector("hidden_states_bias", 0.0),
                vector("residual_scale", 1.0),
                vector("residual_bias", 0.0),
            ]
        }))
    }

    /// The scaled sum, and its norm in [`Pass::kind`].
    pub(in crate::model) fn forward_norm(
        &self,
        pass: &Pass<'_>,
        out: &Rows,
        residual: &Tensor,
        norm: &RmsNorm,
    ) -> Result<(Tensor, (Tensor, SavedNorm))> {
        let (weight, by) = (&pass.weights[norm.weight], self.scaling(pass)?);
        let (ops, eps) = (pass.ops, norm.eps);
        let made = match out {
            Rows::Whole(out) => ops.residual_norm(out, residual, by, weight, eps),
            Rows::Routed(rows) => {
                ops.residual_norm_gathered(rows.operands(), residual, by, weight, eps)
            }
        };
        let [sum, normed, factor] = made.map_err(refused)?;
        let x = sum.shallow_clone();
        Ok((sum, (normed, SavedNorm { x, factor })))
    }

    /// From the gradients at the norm of the sum: the gradients of `out`, in its dtype, of its gates, if it has any,
    /// and of `residual`.
    pub(in crate::model) fn backward_norm(
        &self,
        pass: &Pass<'_>,
        out: &Rows,
        residual: &Tensor,
        norm: &RmsNorm,
        returned: NormOutputGrads,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<(Tensor, Option<Tensor>, Tensor)> {
        let (ops, by, back) = (pass.ops, self.scaling(pass)?, norm.back(pass, &returned));
        let found = match (out, &returned.grad) {
            (Rows::Whole(out), Rows::Routed(grad)) => {
                let grad = grad.operands();
                ops.residual_norm_unpermuted_backward(out, residual, by, back, grad)
            }
            (Rows::Whole(out), Rows::Whole(grad)) => {
                ops.residual_norm_backward(out, residual, by, back, grad)
            }
            (Rows::Routed(out), grad) => grad.unpermuted(ops).and_then(|grad| {
                ops.residual_norm_gathered_backward(out.operands(), residual, by, back, &grad)
            }),
        };
        let (found, weight) = found.map_err(refused)?;
        emit(sink, norm.weight, weight)?;
        for (id, gradient) in self.0.into_iter().flatten().zip(found.scaling) {
            emit(sink, id, gradient)?;
        }
        Ok((found.branch, found.gates, found.residual))
    }

    fn scaling<'a>(&self, pass: &'a Pass<'_>) -> Result<ResidualScaling<'a>> {
        let [scale, bias, residual_scale, residual_bias] = match self.0 {
            Some(ids) => ids.map(|id| pass.weights.of(id)),
            None => {
                let [scale, bias] = pass.neutral()?;
                [scale, bias, scale, bias]
            }
        };
        Ok(ResidualScaling { scale, bias, residual_scale, residual_bias })
    }
}
