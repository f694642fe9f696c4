//! Top-1 experts without capacity: tokens sorted by expert, one matrix product per expert, gathered back.
//!
//! Un-sorting is a gather, never an addition. The skip class comes last in the order and has no expert. An expert
//! without a token is not computed, and its gradient is exactly zero.

use kernels::Result;
use kernels::ops::{Dispatch, Ops, Routes};
use tch::Tensor;

use crate::model::param::{Declare, ParamId, Weights};
use crate::model::{Skip, ZayaConfig};

/// Parameters of one layer's experts: `P` is a parameter's name, or its weight.
pub(super) struct Experts<P> {
    /// `[E, 2 I, D]`: the gate's rows, then the other side's.
    pub(super) gate_up: P,
    /// `[E, D, I]`.
    pub(super) down: P,
    pub(super) skip: Skip,
}

impl Experts<ParamId> {
    pub(super) fn declare(params: &mut Declare<'_>, config: &ZayaConfig) -> Self {
        let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
        let count = config.num_experts;
        let mut own = params.inside("mlp.experts", "zaya_block.experts.local_experts.*");
        Experts {
            gate_up: own.experts("gate_up_proj", "linear_fc1.weight", [count, 2 * inner, hidden]),
            down: own.experts("down_proj", "linear_fc2.weight", [count, hidden, inner]),
            skip: config.skip,
        }
    }

    pub(super) fn bind<'a>(&self, weights: Weights<'a>) -> Experts<&'a Tensor> {
        let (gate_up, down) = (weights.of(self.gate_up), weights.of(self.down));
        Experts { gate_up, down, skip: self.skip }
    }
}

/// What the backward pass needs; all but the weight by place, tokens of experts only.
#[derive(Debug)]
pub(super) struct Saved {
    order: Dispatch,
    weight: Tensor,
    rows: Tensor,
    gate_up: Tensor,
    inner: Tensor,
    out: Tensor,
}

/// Gradients of the experts.
pub(super) struct Grads {
    /// Of their input.
    pub(super) input: Tensor,
    /// Of the routing weights, `[N, 1]`.
    pub(super) weight: Tensor,
    /// Of gate-up and down.
    pub(super) params: [Tensor; 2],
}

impl Experts<&Tensor> {
    /// From the normed residual and its routes.
    pub(super) fn forward(
        &self,
        ops: &dyn Ops,
        x: &Tensor,
        routes: &Routes,
    ) -> Result<(Tensor, Saved)> {
        let [experts, width, hidden] = sizes(self.gate_up);
        let order = ops.dispatch(&routes.choice, experts + 1)?;
        let sorted = ops.permute(x, &order)?;
        let rows = sorted.f_narrow(0, 0, order.routed)?;
        let fresh = |rows, width| Tensor::f_empty([rows, width], (x.kind(), x.device()));
        let gate_up = fresh(order.routed, width)?;
        ops.grouped_matmul(&rows, self.gate_up, &order, &gate_up)?;
        let inner = ops.swiglu(&gate_up)?;
        let out = fresh(order.routed + order.skipped, hidden)?;
        ops.grouped_matmul(&inner, self.down, &order, &out)?;
        self.pass_by(&order, &sorted, &out)?;
        let weight = routes.weight.shallow_clone();
        let mixed = ops.gather(&out, &order.places, &weight)?.f_to_kind(x.kind())?;
        Ok((mixed, Saved { order, weight, rows, gate_up, inner, out }))
    }

    /// From the gradient of what [`Experts::forward`] made, f32.
    pub(super) fn backward(&self, ops: &dyn Ops, saved: Saved, grad: &Tensor) -> Result<Grads> {
        let Saved { order, weight, rows, gate_up, inner, out } = saved;
        let [out, weight] = ops.gather_backward(&out, &order.places, &weight, grad)?;
        let out = out.f_to_kind(rows.kind())?;
        let inner_grad = inner.f_empty_like()?;
        ops.grouped_matmul_input(&out, self.down, &order, &inner_grad)?;
        let down = ops.grouped_matmul_weights(&out, &inner, &order)?;
        let both = ops.swiglu_backward(&gate_up, &inner_grad)?;
        let input = out.f_empty_like()?;
        ops.grouped_matmul_input(&both, self.gate_up, &order, &input)?;
        let gate_up = ops.grouped_matmul_weights(&both, &rows, &order)?;
        self.pass_by(&order, &out, &input)?;
        Ok(Grads { input: ops.unpermute(&input, &order)?, weight, params: [gate_up, down] })
    }

    /// The rows without an expert, from `from` to `into`; so do their gradients.
    fn pass_by(&self, order: &Dispatch, from: &Tensor, into: &Tensor) -> Result<()> {
        let rest = |x: &Tensor| x.f_narrow(0, order.routed, order.skipped);
        match self.skip {
            Skip::Zero => drop(rest(into)?.f_zero_()?),
            Skip::Identity => rest(into)?.f_copy_(&rest(from)?)?,
        }
        Ok(())
    }
}

impl Saved {
    /// Tokens of each class, the skip last.
    pub(super) fn counts(&self) -> &Tensor {
        &self.order.counts
    }
}

fn sizes(gate_up: &Tensor) -> [i64; 3] {
    let size = gate_up.size();
    [size[0], size[1], size[2]]
}
