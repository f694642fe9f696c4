//! A plain gated feed-forward (SwiGLU), the same for every token: what a new kind of layer takes. No shipped model has one;
//! the tests put it in the place of the experts.

use contract::Result;
use kernels::tree::Counter;
use tch::{Kind, Tensor};

use super::heads::{columns, together};
use crate::model::ZayaConfig;
use crate::model::cut::Cut;
use crate::model::gradients::{ChunkGradients, emit};
use crate::model::layer::{Backward, ByToken, Forward, LayerKind, Pass, Work};
use crate::model::param::{Declare, ParamId};
use crate::model::sharding::share;
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
    /// By shard: gate, then up; and their product.
    inner: Vec<[Tensor; 2]>,
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
        Ok(Forward { out, state, counts: None, saved })
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
        let (ops, mut inner, mut sum) = (pass.ops, Vec::new(), Counter::new());
        for shard in 0..pass.shards {
            let [gate, up, down] = self.shard(pass, shard)?;
            let side = |weight: &Tensor| ops.matmul(x, &weight.f_tr()?);
            let both = Tensor::f_cat(&[side(&gate)?, side(&up)?], 1)?;
            let product = ops.swiglu(&both)?;
            sum.push(pass.of_shard(&product, &down.f_tr()?)?)?;
            inner.push([both, product]);
        }
        let out = sum.total()?.f_to_kind(x.kind())?;
        Ok((out, Saved { x: x.shallow_clone(), inner }))
    }

    /// The gradients of the input, and of gate, up and down.
    fn compute_back(
        &self,
        pass: &Pass<'_>,
        saved: &Saved,
        grad: &Tensor,
    ) -> kernels::Result<(Tensor, [Tensor; 3])> {
        let (ops, Saved { x, inner }) = (pass.ops, saved);
        let (mut sum, mut weights) = (Counter::new(), [const { Vec::new() }; 3]);
        for (shard, [both, product]) in (0..).zip(inner) {
            let own = self.shard(pass, shard)?;
            let both = ops.swiglu_backward(both, &ops.matmul(grad, &own[2])?)?;
            let width = product.size()[1];
            let (gate, up) = (both.f_narrow(1, 0, width)?, both.f_narrow(1, width, width)?);
            let input = pass.of_shard(&up, &own[1])?.f_to_kind(Kind::Float)?;
            sum.push(input.f_add(&pass.of_shard(&gate, &own[0])?)?)?;
            weights[0].push(pass.gradient(&gate.f_tr()?, x)?);
            weights[1].push(pass.gradient(&up.f_tr()?, x)?);
            weights[2].push(pass.gradient(&grad.f_tr()?, product)?);
        }
        let [gate, up, down] = &weights;
        let weights = [together(gate, 0)?, together(up, 0)?, together(down, 1)?];
        let input = sum.total()?.f_to_kind(x.kind())?;
        Ok((input, weights))
    }

    /// Gate, up and down as a shard of the inner width reads them.
    fn shard(&self, pass: &Pass<'_>, shard: i64) -> kernels::Result<[Tensor; 3]> {
        let w = pass.weights;
        let own = share(w[self.gate].size()[0], pass.shards, shard);
        let rows = |weight: ParamId| w[weight].f_narrow(0, own.start, own.end - own.start);
        Ok([rows(self.gate)?, rows(self.up)?, columns(&w[self.down], own.clone())?])
    }
}
