//! A plain gated feed-forward (SwiGLU), the same for every token: what a new kind of layer takes. No shipped model has one;
//! the tests put it in the place of the experts.

use contract::Result;
use tch::{Kind, Tensor};

use crate::model::ZayaConfig;
use crate::model::cut::Cut;
use crate::model::gradients::{ChunkGradients, emit};
use crate::model::layer::{Backward, ByToken, Forward, LayerKind, Pass, Work};
use crate::model::param::{Declare, ParamId};
use crate::refusal::refused;

/// `down(silu(gate(x)) * up(x))`, as wide inside as an expert.
pub(in crate::model) struct Mlp {
    gate: ParamId,
    up: ParamId,
    down: ParamId,
}

/// What the backward pass needs.
pub(in crate::model) struct Saved {
    x: Tensor,
    /// Gate, then up.
    both: Tensor,
    inner: Tensor,
}

impl LayerKind for Mlp {
    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, _: usize) -> Self {
        let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
        let mut own = params.inside("mlp", "mlp");
        let mut matrix = |name: &str, shape| own.matrix(name, name, shape);
        Mlp {
            gate: matrix("gate_proj.weight", [inner, hidden]),
            up: matrix("up_proj.weight", [inner, hidden]),
            down: matrix("down_proj.weight", [hidden, inner]),
        }
    }

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
        work.tokens * 3.0 * (config.hidden_size * config.moe_intermediate_size) as f64
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, _: Cut) -> u64 {
        // Input and output; gate, up, and their product.
        narrow * (2 * config.hidden_size + 3 * config.moe_intermediate_size) as u64
    }
}

impl ByToken for Mlp {
    type Saved = Saved;

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Tensor, Saved>> {
        let (out, saved) = self.compute(pass, x).map_err(refused)?;
        Ok(Forward { out, state, counts: Vec::new(), saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<Backward<Tensor>> {
        let (x, [gate, up, down]) = self.compute_back(pass, &saved, grad).map_err(refused)?;
        emit(sink, self.down, down)?;
        emit(sink, self.up, up)?;
        emit(sink, self.gate, gate)?;
        Ok(Backward { x, state })
    }
}

impl Mlp {
    fn compute(&self, pass: &Pass<'_>, x: &Tensor) -> kernels::Result<(Tensor, Saved)> {
        let (ops, w) = (pass.ops, pass.weights);
        let side = |weight: ParamId| ops.matmul(x, &w[weight].f_tr()?);
        let both = Tensor::f_cat(&[side(self.gate)?, side(self.up)?], 1)?;
        let inner = ops.swiglu(&both)?;
        let out = ops.matmul(&inner, &w[self.down].f_tr()?)?;
        Ok((out, Saved { x: x.shallow_clone(), both, inner }))
    }

    /// The gradients of the input, and of gate, up and down.
    fn compute_back(
        &self,
        pass: &Pass<'_>,
        saved: &Saved,
        grad: &Tensor,
    ) -> kernels::Result<(Tensor, [Tensor; 3])> {
        let (ops, w, Saved { x, both, inner }) = (pass.ops, pass.weights, saved);
        let grad = grad.f_to_kind(x.kind())?;
        let down = pass.gradient(&grad.f_tr()?, inner)?;
        let both = ops.swiglu_backward(both, &ops.matmul(&grad, &w[self.down])?)?;
        let width = inner.size()[1];
        let (gate, up) = (both.f_narrow(1, 0, width)?, both.f_narrow(1, width, width)?);
        let mut input = ops.matmul(&up, &w[self.up])?.f_to_kind(Kind::Float)?;
        ops.matmul_add(&mut input, &gate, &w[self.gate])?;
        let weights = [pass.gradient(&gate.f_tr()?, x)?, pass.gradient(&up.f_tr()?, x)?, down];
        Ok((input, weights))
    }
}
