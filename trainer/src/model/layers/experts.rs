//! Top-1 experts without capacity: tokens sorted by expert, one matrix product per expert, gathered back.
//!
//! Un-sorting is a gather, never an addition. The skip class comes last in the order and has no expert. An expert
//! without a token is not computed, and its gradient is exactly zero. Shards are parts of the inner width.

use std::ops::Range;

use kernels::Result;
use kernels::ops::{Dispatch, Routes};
use kernels::tree::Counter;
use tch::{Kind, Tensor};

use super::heads::share;
use crate::model::layer::Pass;
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
    /// By shard: gate and up, and their product.
    inner: Vec<[Tensor; 2]>,
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
    /// Which experts had tokens.
    pub(super) used: Vec<bool>,
}

impl Experts<&Tensor> {
    /// From the normed residual and its routes.
    pub(super) fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        routes: &Routes,
    ) -> Result<(Tensor, Saved)> {
        let ([experts, _, hidden], ops) = (sizes(self.gate_up), pass.ops);
        let order = ops.dispatch(&routes.choice, experts + 1)?;
        let sorted = ops.permute(x, &order)?;
        let rows = sorted.f_narrow(0, 0, order.routed)?;
        let empty = |rows, width, kind| Tensor::f_empty([rows, width], (kind, x.device()));
        let (mut inner, mut sum) = (Vec::new(), Counter::new());
        for shard in 0..pass.shards {
            let [gate_up, down] = self.shard(pass.shards, shard)?;
            let both = empty(order.routed, sizes(&gate_up)[1], x.kind())?;
            ops.grouped_matmul(&rows, &gate_up, &order, &both)?;
            let product = ops.swiglu(&both)?;
            let out = empty(order.routed + order.skipped, hidden, part_kind(pass, x))?;
            let [operand, down] = [part(pass, &product)?, part(pass, &down)?];
            ops.grouped_matmul(&operand, &down, &order, &out)?;
            inner.push([both, product]);
            sum.push(out);
        }
        let out = total(sum, x)?;
        self.pass_by(&order, &sorted, &out)?;
        let weight = routes.weight.shallow_clone();
        let mixed = ops.gather(&out, &order.places, &weight)?.f_to_kind(x.kind())?;
        Ok((mixed, Saved { order, weight, rows, inner, out }))
    }

    /// From the gradient of what [`Experts::forward`] made, f32.
    pub(super) fn backward(&self, pass: &Pass<'_>, saved: Saved, grad: &Tensor) -> Result<Grads> {
        let (ops, Saved { order, weight, rows, inner, out }) = (pass.ops, saved);
        let [out, weight] = ops.gather_backward(&out, &order.places, &weight, grad)?;
        let out = out.f_to_kind(rows.kind())?;
        let (mut params, mut sum) = (Vec::new(), Counter::new());
        let empty =
            |like: &Tensor| Tensor::f_empty(like.size(), (part_kind(pass, &rows), rows.device()));
        let weights = |grad: &Tensor, rows: &Tensor| match pass.chunks.count() {
            1 => ops.grouped_matmul_weights(grad, rows, &order),
            _ => ops.grouped_matmul_weights(&wide(grad)?, &wide(rows)?, &order),
        };
        for (shard, [both, product]) in (0..).zip(inner) {
            let [gate_up, down] = self.shard(pass.shards, shard)?;
            let inner_grad = product.f_empty_like()?;
            ops.grouped_matmul_input(&out, &down, &order, &inner_grad)?;
            let down = weights(&out, &product)?;
            let both = ops.swiglu_backward(&both, &inner_grad)?;
            let input = empty(&out)?;
            ops.grouped_matmul_input(&part(pass, &both)?, &part(pass, &gate_up)?, &order, &input)?;
            params.push([weights(&both, &rows)?, down]);
            sum.push(input);
        }
        let input = total(sum, &rows)?;
        self.pass_by(&order, &out, &input)?;
        let mut used = vec![false; sizes(self.gate_up)[0] as usize];
        order.used().for_each(|expert| used[expert as usize] = true);
        let input = ops.unpermute(&input, &order)?;
        Ok(Grads { input, weight, params: joined(&params)?, used })
    }

    /// Gate-up and down as a shard reads them: a part of the inner width, in memory of its own.
    fn shard(&self, shards: i64, shard: i64) -> Result<[Tensor; 2]> {
        if shards == 1 {
            return Ok([self.gate_up.shallow_clone(), self.down.shallow_clone()]);
        }
        let inner = sizes(self.gate_up)[1] / 2;
        let Range { start, end } = share(inner, shards, shard);
        let side = |first| self.gate_up.f_narrow(1, first + start, end - start);
        let down = self.down.f_narrow(2, start, end - start)?.f_contiguous()?;
        Ok([Tensor::f_cat(&[side(0)?, side(inner)?], 1)?, down])
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
    pub(super) fn counts(&self) -> &[i64] {
        &self.order.counts
    }
}

/// The kind of what a shard comes to: several are parts of a sum.
fn part_kind(pass: &Pass<'_>, x: &Tensor) -> Kind {
    if pass.shards == 1 { x.kind() } else { Kind::Float }
}

/// An operand of a product over what is cut into shards.
fn part(pass: &Pass<'_>, x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(part_kind(pass, x))?)
}

fn wide(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(Kind::Float)?)
}

/// The sum over shards, in the kind of `x`.
fn total(sum: Counter<Tensor>, x: &Tensor) -> Result<Tensor> {
    Ok(sum.finish().unwrap_or_default().f_to_kind(x.kind())?)
}

/// Gate-up and down from those of each shard: all gates, then all others; and columns side by side.
fn joined(shards: &[[Tensor; 2]]) -> Result<[Tensor; 2]> {
    if let [[gate_up, down]] = shards {
        return Ok([gate_up.shallow_clone(), down.shallow_clone()]);
    }
    let side = |which: i64| {
        shards.iter().map(move |[gate_up, _]| {
            let inner = gate_up.size()[1] / 2;
            gate_up.f_narrow(1, which * inner, inner)
        })
    };
    let sides = side(0).chain(side(1)).collect::<std::result::Result<Vec<_>, _>>()?;
    let down: Vec<_> = shards.iter().map(|[_, down]| down).collect();
    Ok([Tensor::f_cat(&sides, 1)?, Tensor::f_cat(&down, 2)?])
}

fn sizes(gate_up: &Tensor) -> [i64; 3] {
    let size = gate_up.size();
    [size[0], size[1], size[2]]
}
