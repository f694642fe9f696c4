//! Experts without capacity: tokens sorted by expert, one matmul per expert, gathered back.
//!
//! A token with several experts is as many rows, in ascending order of the experts; their outputs are added in that
//! order, the first copied. Below, N counts such rows.
//!
//! Unsorting is a gather, never an addition. The skip class comes last in the order and has no expert. An expert
//! without a token is not computed, and its gradient is exactly zero. Shards are parts of the inner width.

use std::ops::Range;
use std::rc::Rc;

use kernels::Result;
use kernels::layout::Parts as _;
use kernels::ops::linear_router::{repeated, summed};
use kernels::ops::{Dispatch, ExpertInput, OpsTable, ParamGradient, Routes, UsedExperts};
use kernels::tree::Counter;
use tch::{Kind, Tensor};

use crate::model::layer::{Pass, RoutedRows, Rows};
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
    /// The output.
    rows: Rc<RoutedRows>,
    input: ExpertInput,
    /// By shard: gate and up, and their product.
    inner: Vec<[Tensor; 2]>,
}

/// Gradients of the experts.
pub(super) struct Grads {
    /// Of their input, in the order of experts; and of the skipped tokens, where these contribute anything.
    pub(super) input: Tensor,
    pub(super) passed: Option<Tensor>,
    /// The order of experts.
    pub(super) order: Rc<Dispatch>,
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
    rows: ExpertInput,
    /// In the order of experts, with skipped ones, where these contribute anything.
    passed: Option<Tensor>,
    inner: Vec<[Tensor; 2]>,
    sum: Counter<Tensor>,
}

/// A chunk in the backward pass.
struct BackwardChunk {
    order: Rc<Dispatch>,
    rows: ExpertInput,
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
    ) -> Result<Vec<(Rows, Saved)>> {
        let new = |(x, routes): (&&Tensor, _)| ForwardChunk::new(pass, x, routes, self.passes());
        let passing = x.iter().zip(routes).map(new);
        let mut passing = passing.collect::<Result<Vec<_>>>()?;
        let mut shards = Shards::new(pass, [self.gate_up, self.down], pass.shards)?;
        for number in 0..pass.shards {
            let shard = self.shard(pass, number, shards.next()?)?;
            passing.iter_mut().try_for_each(|chunk| chunk.shard(pass, &shard))?;
        }
        let found = passing.into_iter().zip(x.iter().zip(routes)).map(|(chunk, (x, routes))| {
            let ForwardChunk { order, rows: input, passed, inner, sum } = chunk;
            let x = total(sum, x)?;
            let (order, by_token) = (Rc::new(order), routes.weight.shallow_clone());
            let rows = Rc::new(RoutedRows { x, order, passed, by_token });
            let out = match returns_late(pass.config) {
                true => Rows::Routed(Rc::clone(&rows)),
                false => {
                    Rows::Whole(summed(&pass.ops.gather(rows.operands())?, pass.config.top_k())?)
                }
            };
            Ok((out, Saved { rows, input, inner }))
        });
        found.collect()
    }

    /// From the gradients of [`Experts::forward`]'s output for some chunks, and of its gates if it is routed.
    pub(super) fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Vec<Saved>,
        grad: &[(&Tensor, Option<&Tensor>)],
    ) -> Result<Vec<Grads>> {
        let passing =
            saved.into_iter().zip(grad).map(|(own, grad)| self.gathered(pass, own, *grad));
        let mut passing = passing.collect::<Result<Vec<_>>>()?;
        let mut shards = Shards::new(pass, [self.gate_up, self.down], pass.shards)?;
        for number in 0..pass.shards {
            let shard = self.shard(pass, number, shards.next()?)?;
            passing.iter_mut().try_for_each(|chunk| chunk.shard(pass, &shard, number as usize))?;
        }
        let found = passing.into_iter().map(|chunk| {
            let BackwardChunk { order, out, weight, params, sum, .. } = chunk;
            let (input, passed) = (total(sum, &out)?, self.passes().then(|| out.shallow_clone()));
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
        let side = |first| gate_up.part(1, first + start, end - start);
        let down = down.part(2, start, end - start)?.f_contiguous()?;
        Ok([Tensor::f_cat(&[side(0)?, side(inner)?], 1)?, down])
    }

    /// Whether skipped tokens contribute anything.
    fn passes(&self) -> bool {
        self.skip == SkipOutput::Identity
    }

    fn gathered(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: (&Tensor, Option<&Tensor>),
    ) -> Result<BackwardChunk> {
        let Saved { rows, input, inner } = saved;
        let [out, weight] = match grad {
            (grad, Some(gates)) => [grad, gates].map(Tensor::shallow_clone),
            (grad, None) => {
                let grad = repeated(grad, pass.config.top_k())?;
                pass.ops.gather_backward(rows.operands(), &grad)?
            }
        };
        let order = Rc::clone(&rows.order);
        let (params, sum) = (Vec::new(), Counter::new());
        Ok(BackwardChunk { order, rows: input, inner, out, weight, params, sum })
    }
}

impl ForwardChunk {
    fn new(pass: &Pass<'_>, x: &Tensor, routes: &Routes, passes: bool) -> Result<ForwardChunk> {
        let order = pass.ops.dispatch_routes(routes, pass.config.num_experts + 1)?;
        let x = repeated(x, pass.config.top_k())?;
        let (rows, passed) = if passes {
            let sorted = pass.ops.permute(&x, &order)?;
            (ExpertInput::Sorted(sorted.part(0, 0, order.computed)?), Some(sorted))
        } else {
            (pass.ops.expert_input(&x, &order)?, None)
        };
        Ok(ForwardChunk { order, rows, passed, inner: Vec::new(), sum: Counter::new() })
    }

    fn shard(&mut self, pass: &Pass<'_>, [gate_up, down]: &[Tensor; 2]) -> Result<()> {
        let ForwardChunk { order, rows, inner, sum, .. } = self;
        let ops = pass.ops;
        let [both, product] = ops.grouped_swiglu(rows, gate_up, order)?;
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
        let weights = |grad: &Tensor, rows: &ExpertInput| match pass.chunks.count() {
            1 => ops.grouped_matmul_weights(grad, rows, order),
            _ => ops.grouped_matmul_weights(&wide(grad)?, &rows.wide()?, order),
        };
        let both = ops.grouped_swiglu_backward(out, down, &both, order)?;
        let down = weights(out, &ExpertInput::Sorted(product))?;
        let [operand, gate_up] = [part(pass, &both)?, part(pass, gate_up)?];
        sum.push(ops.grouped_matmul_input(&operand, &gate_up, order)?)?;
        params.push([weights(&both, rows)?, down]);
        Ok(())
    }
}

impl Saved {
    /// Tokens of each expert, and last those without one.
    pub(super) fn counts(&self) -> &Tensor {
        &self.rows.order.counts
    }
}

/// Whether experts' rows return to their tokens only where they are read: each token has one, and nothing is added.
pub(super) fn returns_late(config: &ZayaConfig) -> bool {
    config.top_k().count + config.num_shared_experts == 1
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
            let inner = both[0].extent(1) / 2;
            both[0].part(1, which * inner, inner)
        })
    };
    let sides = side(0).chain(side(1)).collect::<std::result::Result<Vec<_>, _>>()?;
    let down: Vec<_> = shards.iter().map(|both| &both[1]).collect();
    Ok([Tensor::f_cat(&sides, 1)?.into(), Tensor::f_cat(&down, 2)?.into()])
}
