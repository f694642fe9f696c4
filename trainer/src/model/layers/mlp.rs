//! A plain gated feed-forward (SwiGLU), the same for every token: for a model without routers, or for some of its
//! layers. Shards are parts of the inner width, as in the experts.

use contract::{Fault, Result};
use kernels::layout::Parts as _;
use kernels::tree::Counter;
use tch::{Kind, Tensor};

use super::heads::{columns, rows};
use crate::model::ZayaConfig;
use crate::model::cut::joined;
use crate::model::gradients::{Gradients, emit};
use crate::model::layer::{
    self, Backward, BranchGrads, Forward, Layer, LayerPlace, Pass, Rows, taken,
};
use crate::model::param::{ParamDeclarations, ParamId};
use crate::model::sharding::{Sharding, share};
use crate::model::shards::Shards;
use crate::refusal::refused;
use crate::timing::{StepPart, part};

/// `down(silu(gate(x)) * up(x))`, as wide inside as an expert, or as several of them.
pub(in crate::model) struct Mlp {
    /// The inner width.
    inner: i64,
    gate: ParamId,
    up: ParamId,
    down: ParamId,
}

/// What the backward pass reads of a chunk.
pub(in crate::model) struct Saved {
    x: Tensor,
    /// By shard: gate, then up; and their product.
    inner: Vec<[Tensor; 2]>,
}

/// A chunk in the backward pass.
struct BackwardChunk<'a> {
    saved: Saved,
    grad: &'a Tensor,
    /// Gradients of gate, up and down, by shard.
    weights: [Vec<Tensor>; 3],
    /// The gradient of the input, summed over shards.
    sum: Counter<Tensor>,
}

impl Layer for Mlp {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, _: LayerPlace) -> Self {
        Mlp::inside(params, config, "mlp", config.moe_intermediate_size)
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward> {
        let _watch = part(StepPart::Experts);
        let (mut outs, mut saved) = (Vec::new(), Vec::new());
        for group in x.chunks(pass.together(x.len())) {
            for (out, saved_chunk) in self.compute(pass, group).map_err(refused)? {
                outs.push(out);
                saved.push(Some(saved_chunk));
            }
        }
        Ok(Forward { out: Rows::whole(outs), state, counts: None, saved: Box::new(saved) })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: layer::Saved,
        BranchGrads { rows: grad, .. }: &BranchGrads,
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward> {
        let _watch = part(StepPart::ExpertsBack);
        let mut saved: Vec<Option<Saved>> = taken(saved)?;
        let mut found: Vec<_> = grad.iter().map(|_| None).collect();
        let order: Vec<usize> = pass.chunks.by_leaf().collect();
        for group in order.chunks(pass.together(grad.len())) {
            let mut passing = Vec::new();
            for chunk in group {
                let twice = || Fault::bug("a chunk comes back twice");
                let saved_chunk = saved[*chunk].take().ok_or_else(twice)?;
                passing.push(BackwardChunk::new(saved_chunk, &grad[*chunk]));
            }
            let back = self.compute_back(pass, passing).map_err(refused)?;
            for (chunk, (x, [gate, up, down])) in group.iter().zip(back) {
                let mut sink = sink.of(*chunk);
                emit(&mut sink, self.down, down)?;
                emit(&mut sink, self.up, up)?;
                emit(&mut sink, self.gate, gate)?;
                found[*chunk] = Some(x);
            }
        }
        Ok(Backward { x: Rows::whole(found.into_iter().flatten().collect()), state })
    }
}

impl Mlp {
    /// Declares one of this name and inner width.
    pub(super) fn inside(
        params: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        name: &str,
        inner: i64,
    ) -> Mlp {
        let hidden = config.hidden_size;
        let (wide, narrow) = ([inner, hidden], [hidden, inner]);
        let mut scope = params.inside(name, name);
        let mut matrix = |name: &str, shape: [i64; 2], dim| {
            let id = scope.matrix(name, name, shape);
            scope.cut(id, Sharding::new(&shape, dim, 1, inner))
        };
        Mlp {
            inner,
            gate: matrix("gate_proj.weight", wide, 0),
            up: matrix("up_proj.weight", wide, 0),
            down: matrix("down_proj.weight", narrow, 1),
        }
    }

    /// The outputs of some chunks. All of them use a shard before the next one.
    fn compute(&self, pass: &Pass<'_>, x: &[Tensor]) -> kernels::Result<Vec<(Tensor, Saved)>> {
        let begun = |x: &Tensor| Saved { x: x.shallow_clone(), inner: Vec::new() };
        let mut passing: Vec<(Saved, Counter<Tensor>)> =
            x.iter().map(|x| (begun(x), Counter::new())).collect();
        let mut shards = Shards::new(pass, self.weights(), pass.shards)?;
        for number in 0..pass.shards {
            let [gate, up, down] = self.shard(pass, number, shards.next()?)?;
            for (Saved { x, inner }, sum) in &mut passing {
                let side = |weight: &Tensor| pass.ops.matmul(x, &weight.swapped(0, 1)?);
                let both = Tensor::f_cat(&[side(&gate)?, side(&up)?], 1)?;
                let product = pass.ops.swiglu(&both)?;
                sum.push(pass.of_shard(&product, &down.swapped(0, 1)?)?)?;
                inner.push([both, product]);
            }
        }
        let whole = passing.into_iter().map(|(saved, sum)| {
            let out = sum.total()?.f_to_kind(saved.x.kind())?;
            Ok((out, saved))
        });
        whole.collect()
    }

    /// By chunk: the gradients of the input, and of gate, up and down.
    fn compute_back(
        &self,
        pass: &Pass<'_>,
        mut passing: Vec<BackwardChunk<'_>>,
    ) -> kernels::Result<Vec<(Tensor, [Tensor; 3])>> {
        let mut shards = Shards::new(pass, self.weights(), pass.shards)?;
        for number in 0..pass.shards {
            let shard = self.shard(pass, number, shards.next()?)?;
            passing.iter_mut().try_for_each(|chunk| chunk.shard(pass, &shard, number as usize))?;
        }
        let whole = passing.into_iter().map(|BackwardChunk { saved, weights, sum, .. }| {
            let [gate, up, down] = &weights;
            let weights = [joined(gate, 0)?, joined(up, 0)?, joined(down, 1)?];
            Ok((sum.total()?.f_to_kind(saved.x.kind())?, weights))
        });
        whole.collect()
    }

    fn weights(&self) -> [ParamId; 3] {
        [self.gate, self.up, self.down]
    }

    /// A shard of gate, up and down: as received from another rank, or a copy from whole weights.
    fn shard(
        &self,
        pass: &Pass<'_>,
        shard: i64,
        came: Option<[Tensor; 3]>,
    ) -> kernels::Result<[Tensor; 3]> {
        if let Some(came) = came {
            return Ok(came);
        }
        let range = share(self.inner, pass.shards, shard);
        let side = |weight: ParamId| rows(&pass.weights[weight], std::slice::from_ref(&range));
        let [gate, up] = [side(self.gate)?, side(self.up)?];
        Ok([gate, up, columns(&pass.weights[self.down], range)?])
    }
}

impl<'a> BackwardChunk<'a> {
    fn new(saved: Saved, grad: &'a Tensor) -> BackwardChunk<'a> {
        BackwardChunk { saved, grad, weights: [const { Vec::new() }; 3], sum: Counter::new() }
    }

    /// Backward through shard `number` of gate, up and down.
    fn shard(
        &mut self,
        pass: &Pass<'_>,
        [gate, up, down]: &[Tensor; 3],
        number: usize,
    ) -> kernels::Result<()> {
        let BackwardChunk { saved: Saved { x, inner }, grad, weights, sum } = self;
        let [both, product] = &inner[number];
        let both = pass.ops.swiglu_backward(both, &pass.ops.matmul(grad, down)?)?;
        let width = product.size()[1];
        let [own_gate, own_up] = [both.part(1, 0, width)?, both.part(1, width, width)?];
        let input = pass.of_shard(&own_up, up)?.f_to_kind(Kind::Float)?;
        sum.push(input.f_add(&pass.of_shard(&own_gate, gate)?)?)?;
        weights[0].push(pass.gradient(&own_gate.swapped(0, 1)?, x)?);
        weights[1].push(pass.gradient(&own_up.swapped(0, 1)?, x)?);
        weights[2].push(pass.gradient(&grad.swapped(0, 1)?, product)?);
        Ok(())
    }
}
