//! Experts without capacity: tokens sorted by expert, one matmul per expert, gathered back.
//!
//! A token with several experts is as many rows, in ascending order of the experts; their outputs are added in that
//! order, the first copied. Below, N counts such rows.
//!
//! Unsorting is a gather, never an addition. The skip class comes last in the order and has no expert. An expert
//! without a token is not computed, and its gradient is exactly zero. Shards are parts of the inner width.

use std::ops::Range;

use kernels::Result;
use kernels::ops::linear_router::{repeated, summed};
use kernels::ops::{Dispatch, OpsTable, ParamGradient, Routes, UsedExperts};
use kernels::tree::Counter;
use tch::{Kind, Tensor};

use crate::model::layer::Pass;
use crate::model::param::{ParamDeclarations, ParamId};
use crate::model::sharding::{Sharding, share};
use crate::model::shards::Shards;
use crate::model::{SkipOutput, ZayaConfig};

/// Parameters of one layer's experts.
pub(super) struct Experts {
    /// `[E, 2 I, D]`: the gate's rows, then those of up.
    pub(super) gate_up: ParamId,
    /// `[E, D, I]`.
    pub(super) down: ParamId,
    skip: SkipOutput,
}

/// What the backward pass reads, sorted by expert except for `weight`; without skipped tokens if the host counts them.
#[derive(Debug)]
pub(super) struct Saved {
    order: Dispatch,
    weight: Tensor,
    /// The sorted input.
    sorted: Tensor,
    /// By shard: gate and up, and their product.
    inner: Vec<[Tensor; 2]>,
    out: Tensor,
}

/// Gradients of the experts.
pub(super) struct Grads {
    /// Of their input, in the order of experts; and of the skipped tokens, where these contribute anything.
    pub(super) input: Tensor,
    pub(super) passed: Option<Tensor>,
    /// The order of experts.
    pub(super) order: Dispatch,
    /// Of the routing weights, `[N, 1]`.
    pub(super) weight: Tensor,
    /// Of gate-up and down.
    pub(super) params: [ParamGradient; 2],
    /// Which experts had tokens: decides the sum over chunks.
    pub(super) used: UsedExperts,
}

/// A chunk in the forward pass of the experts.
struct ForwardChunk {
    order: Dispatch,
    /// The tokens in the order of experts, with skipped ones.
    sorted: Tensor,
    /// The tokens without skipped ones.
    rows: Tensor,
    inner: Vec<[Tensor; 2]>,
    sum: Counter<Tensor>,
}

/// A chunk in the backward pass.
struct BackwardChunk {
    order: Dispatch,
    rows: Tensor,
    inner: Vec<[Tensor; 2]>,
    /// Gradients of the output of experts and of skipped tokens, and of the routing weights.
    out: Tensor,
    weight: Tensor,
    params: Vec<[ParamGradient; 2]>,
    sum: Counter<Tensor>,
}

impl Experts {
    pub(super) fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig) -> Self {
        let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
        let count = config.num_experts;
        let mut own = params.inside("mlp.experts", "zaya_block.experts.local_experts.*");
        let [wide, narrow] = [[count, 2 * inner, hidden], [count, hidden, inner]];
        let gate_up = own.experts("gate_up_proj", "linear_fc1.weight", wide);
        let down = own.experts("down_proj", "linear_fc2.weight", narrow);
        Experts {
            gate_up: own.cut(gate_up, Sharding::new(&wide, 1, 2, inner)),
            down: own.cut(down, Sharding::new(&narrow, 2, 1, inner)),
            skip: config.skip,
        }
    }

    /// From the normed residual of some chunks and its routes. All of these chunks use a shard before the next one.
    pub(super) fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[&Tensor],
        routes: &[Routes],
    ) -> Result<Vec<(Tensor, Saved)>> {
        let passing = x.iter().zip(routes).map(|(x, routes)| ForwardChunk::new(pass, x, routes));
        let mut passing = passing.collect::<Result<Vec<_>>>()?;
        let mut shards = Shards::new(pass, [self.gate_up, self.down], pass.shards)?;
        for number in 0..pass.shards {
            let shard = self.shard(pass, number, shards.next()?)?;
            passing.iter_mut().try_for_each(|chunk| chunk.shard(pass, &shard))?;
        }
        let found = passing.into_iter().zip(x.iter().zip(routes)).map(|(chunk, (x, routes))| {
            let ForwardChunk { order, sorted, rows, inner, sum } = chunk;
            let out = total(sum, x)?;
            drop(rows);
            let (weight, passed) = (routes.weight.shallow_clone(), self.passed(&sorted));
            let mixed = pass.ops.gather(&out, &order, passed, &weight)?;
            let mixed = summed(&mixed, pass.config.top_k())?;
            Ok((mixed, Saved { order, weight, sorted, inner, out }))
        });
        found.collect()
    }

    /// From the gradients of [`Experts::forward`]'s output for some chunks.
    pub(super) fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Vec<Saved>,
        grad: &[&Tensor],
    ) -> Result<Vec<Grads>> {
        let passing = saved.into_iter().zip(grad).map(|(own, grad)| self.gathered(pass, own, grad));
        let mut passing = passing.collect::<Result<Vec<_>>>()?;
        let mut shards = Shards::new(pass, [self.gate_up, self.down], pass.shards)?;
        for number in 0..pass.shards {
            let shard = self.shard(pass, number, shards.next()?)?;
            passing.iter_mut().try_for_each(|chunk| chunk.shard(pass, &shard, number as usize))?;
        }
        let found = passing.into_iter().map(|chunk| {
            let BackwardChunk { order, rows, out, weight, params, sum, .. } = chunk;
            let (input, passed) =
                (total(sum, &rows)?, self.passed(&out).map(Tensor::shallow_clone));
            let used = order.used()?;
            Ok(Grads { input, passed, order, weight, params: joined(pass.ops, params)?, used })
        });
        found.collect()
    }

    /// A shard of gate-up and down: as received from another rank, or a copy from whole weights.
    fn shard(&self, pass: &Pass<'_>, shard: i64, came: Option<[Tensor; 2]>) -> Result<[Tensor; 2]> {
        let (gate_up, down) = (&pass.weights[self.gate_up], &pass.weights[self.down]);
        match (came, pass.shards) {
            (Some(came), _) => return Ok(came),
            (None, 1) => return Ok([gate_up.shallow_clone(), down.shallow_clone()]),
            _ => {}
        }
        let inner = pass.config.moe_intermediate_size;
        let Range { start, end } = share(inner, pass.shards, shard);
        let side = |first| gate_up.f_narrow(1, first + start, end - start);
        let down = down.f_narrow(2, start, end - start)?.f_contiguous()?;
        Ok([Tensor::f_cat(&[side(0)?, side(inner)?], 1)?, down])
    }

    /// The rows that skipped tokens contribute, or their gradients; `None` stands for zeros.
    fn passed<'a>(&self, rows: &'a Tensor) -> Option<&'a Tensor> {
        match self.skip {
            SkipOutput::Zero | SkipOutput::None => None,
            SkipOutput::Identity => Some(rows),
        }
    }

    fn gathered(&self, pass: &Pass<'_>, saved: Saved, grad: &Tensor) -> Result<BackwardChunk> {
        let Saved { order, weight, sorted, inner, out } = saved;
        let passed = self.passed(&sorted);
        let grad = repeated(grad, pass.config.top_k())?;
        let [out, weight] = pass.ops.gather_backward(&out, &order, passed, &weight, &grad)?;
        let rows = sorted.f_narrow(0, 0, order.computed)?;
        let (params, sum) = (Vec::new(), Counter::new());
        Ok(BackwardChunk { order, rows, inner, out, weight, params, sum })
    }
}

impl ForwardChunk {
    fn new(pass: &Pass<'_>, x: &Tensor, routes: &Routes) -> Result<ForwardChunk> {
        let order = pass.ops.dispatch(&routes.choice, pass.config.num_experts + 1)?;
        let sorted = pass.ops.permute(&repeated(x, pass.config.top_k())?, &order)?;
        let rows = sorted.f_narrow(0, 0, order.computed)?;
        Ok(ForwardChunk { order, sorted, rows, inner: Vec::new(), sum: Counter::new() })
    }

    fn shard(&mut self, pass: &Pass<'_>, [gate_up, down]: &[Tensor; 2]) -> Result<()> {
        let ForwardChunk { order, rows, inner, sum, .. } = self;
        let ops = pass.ops;
        let both = ops.grouped_matmul(rows, gate_up, order)?.f_narrow(0, 0, order.computed)?;
        let product = ops.swiglu(&both)?;
        let [operand, down] = [part(pass, &product)?, part(pass, down)?];
        sum.push(ops.grouped_matmul(&operand, &down, order)?)?;
        inner.push([both, product]);
        Ok(())
    }
}

impl BackwardChunk {
    fn shard(
        &mut self,
        pass: &Pass<'_>,
        [gate_up, down]: &[Tensor; 2],
        number: usize,
    ) -> Result<()> {
        let BackwardChunk { order, rows, inner, out, params, sum, .. } = self;
        let [both, product] = std::mem::take(&mut inner[number]);
        let ops = pass.ops;
        let weights = |grad: &Tensor, rows: &Tensor| match pass.chunks.count() {
            1 => ops.grouped_matmul_weights(grad, rows, order),
            _ => ops.grouped_matmul_weights(&wide(grad)?, &wide(rows)?, order),
        };
        let inner_grad = ops.grouped_matmul_input(out, down, order)?;
        let inner_grad = inner_grad.f_narrow(0, 0, order.computed)?;
        let down = weights(out, &product)?;
        let both = ops.swiglu_backward(&both, &inner_grad)?;
        let [operand, gate_up] = [part(pass, &both)?, part(pass, gate_up)?];
        sum.push(ops.grouped_matmul_input(&operand, &gate_up, order)?)?;
        params.push([weights(&both, rows)?, down]);
        Ok(())
    }
}

impl Saved {
    /// Tokens of each expert, and last those without one.
    pub(super) fn counts(&self) -> &Tensor {
        &self.order.counts
    }
}

/// The dtype of a shard's result: f32 where several are added.
fn part_kind(pass: &Pass<'_>, x: &Tensor) -> Kind {
    if pass.shards == 1 { x.kind() } else { Kind::Float }
}

/// An operand of a matmul over a sharded dimension.
fn part(pass: &Pass<'_>, x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(part_kind(pass, x))?)
}

fn wide(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(Kind::Float)?)
}

/// The sum over shards, in the dtype of `x`.
fn total(sum: Counter<Tensor>, x: &Tensor) -> Result<Tensor> {
    Ok(sum.total()?.f_to_kind(x.kind())?)
}

/// Gate-up and down from those of each shard: all gate rows, then all up rows; and columns side by side.
fn joined(ops: OpsTable, mut shards: Vec<[ParamGradient; 2]>) -> Result<[ParamGradient; 2]> {
    if shards.len() == 1 {
        return Ok(shards.remove(0));
    }
    let shards = shards.into_iter().map(|both| ops.finish(both.into()));
    let shards = shards.collect::<Result<Vec<_>>>()?;
    let side = |which: i64| {
        shards.iter().map(move |both| {
            let inner = both[0].size()[1] / 2;
            both[0].f_narrow(1, which * inner, inner)
        })
    };
    let sides = side(0).chain(side(1)).collect::<std::result::Result<Vec<_>, _>>()?;
    let down: Vec<_> = shards.iter().map(|both| &both[1]).collect();
    Ok([Tensor::f_cat(&sides, 1)?.into(), Tensor::f_cat(&down, 2)?.into()])
}
