//! Grouped-query attention: projections, an optional norm of each query and key head, rotation, softmax attention.
//!
//! Names are those of `llama` and `qwen3` in transformers. A shard is a group of key heads with their query heads, as
//! in `cca`; the norms have one weight for all heads, so their gradients are summed over shards.

use std::any::Any;

use kernels::Result;
use kernels::layout::Parts as _;
use kernels::ops::rotary::{rotated, rotated_back};
use kernels::ops::{OpsTable, ParamGradient};
use kernels::tree::Counter;
use tch::{Kind, Tensor};

use super::heads::{below, columns, rows, shards};
use super::softmax::{
    AttentionShape, SavedSoftmax, ShardedAttention, SoftmaxGrads, back_over_shards, largest_of,
    over_shards,
};
use crate::model::ZayaConfig;
use crate::model::cut::{Chunk, joined};
use crate::model::gradients::{ChunkGradients, Gradients, emit};
use crate::model::layer::{
    self, Backward, BranchGrads, Forward, Layer, LayerPlace, Pass, Rows, seen, taken,
};
use crate::model::param::{ParamDeclarations, ParamId};
use crate::model::sharding::{Sharding, share};
use crate::refusal::refused;
use crate::timing::{StepPart, part};

/// Grouped-query attention.
pub(in crate::model) struct Gqa {
    q_proj: ParamId,
    k_proj: ParamId,
    v_proj: ParamId,
    o_proj: ParamId,
    /// Of queries and keys, `[d]` each.
    norms: Option<[ParamId; 2]>,
    /// How many keys a query sees; `None`: all earlier ones.
    window: Option<i64>,
}

/// The weights of a shard.
struct ShardWeights {
    /// `[(H' + 2 K') d, D]`: projections of queries, keys and values, one below the other.
    proj: Tensor,
    /// `[D, H' d]`.
    o_proj: Tensor,
    /// `[H', K', d]`.
    shape: [i64; 3],
}

/// What the backward pass reads of a shard.
pub(in crate::model) struct Saved {
    weights: ShardWeights,
    softmax: SavedSoftmax,
    chunks: Vec<SavedChunk>,
}

/// What the backward pass reads of a chunk of n tokens.
struct SavedChunk {
    /// `[n, D]`: the normed residual.
    x: Tensor,
    normed: Option<SavedNorms>,
}

/// What the backward pass of both norms reads.
struct SavedNorms {
    /// `[n, (H' + K') d]`: queries and keys before their norms, in [`Pass::kind`].
    projected: Tensor,
    /// `[n H', 1]` and `[n K', 1]`, f32.
    factors: [Tensor; 2],
}

/// Gradients of a shard's weights, of one chunk.
pub(in crate::model) struct ShardGrads {
    proj: Tensor,
    norms: Option<[ParamGradient; 2]>,
    o_proj: Tensor,
    shape: [i64; 3],
}

impl Layer for Gqa {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, place: LayerPlace) -> Self {
        let (hidden, query, key) = (config.hidden_size, config.query_size(), config.key_size());
        let heads = config.num_key_value_heads;
        let mut scope = params.inside("self_attn", "self_attn");
        let mut matrix = |name: &str, shape: [i64; 2], dim| {
            let id = scope.matrix(name, name, shape);
            scope.cut(id, Sharding::new(&shape, dim, 1, heads))
        };
        let q_proj = matrix("q_proj.weight", [query, hidden], 0);
        let k_proj = matrix("k_proj.weight", [key, hidden], 0);
        let v_proj = matrix("v_proj.weight", [key, hidden], 0);
        let o_proj = matrix("o_proj.weight", [hidden, query], 1);
        [k_proj, v_proj].into_iter().for_each(|id| scope.adjoining(id));
        let mut norm = |name: &str| scope.vector(name, name, config.head_dim, 1.0);
        let norms = config.qk_norm.then(|| [norm("q_norm.weight"), norm("k_norm.weight")]);
        Gqa { q_proj, k_proj, v_proj, o_proj, norms, window: place.window }
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> contract::Result<Forward> {
        let _watch = part(StepPart::Attention);
        let (out, saved) = over_shards(self, pass, x).map_err(refused)?;
        Ok(Forward { out: Rows::whole(out), state, counts: None, saved: Box::new(saved) })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: layer::Saved,
        BranchGrads { rows: grad, .. }: &BranchGrads,
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> contract::Result<Backward> {
        let _watch = part(StepPart::AttentionBack);
        let saved: Vec<Saved> = taken(saved)?;
        let (x, gradients) = back_over_shards(self, pass, saved, grad).map_err(refused)?;
        for (chunk, gradients) in gradients.into_iter().enumerate() {
            self.emit(pass.ops, gradients, &mut sink.of(chunk))?;
        }
        Ok(Backward { x: Rows::whole(x), state })
    }

    fn largest_logit(&self, pass: &Pass<'_>, saved: &dyn Any) -> contract::Result<Option<f64>> {
        largest_of(pass, seen::<Vec<Saved>>(saved)?.iter().map(|shard| &shard.softmax))
    }
}

impl ShardedAttention<4> for Gqa {
    type Saved = Saved;
    type Grads = ShardGrads;

    /// In the order in which [`Gqa::shard`] takes them.
    fn held(&self) -> [ParamId; 4] {
        [self.q_proj, self.k_proj, self.v_proj, self.o_proj]
    }

    fn shard_forward(
        &self,
        pass: &Pass<'_>,
        number: i64,
        came: Option<[Tensor; 4]>,
        x: &[Tensor],
    ) -> Result<(Vec<Tensor>, Saved)> {
        let mut weights = self.shard(pass, number, came)?;
        let ShardWeights { proj, o_proj, shape: [queries, keys, width] } = &weights;
        let heads = (queries + keys) * width;
        let (mut projected, mut values) = (Vec::new(), Vec::new());
        for x in x {
            let all = pass.ops.matmul(x, &proj.f_tr()?)?;
            values.push(all.part(1, heads, keys * width)?);
            projected.push(all.part(1, 0, heads)?);
        }
        // Values are sent while queries and keys are computed.
        let value = joined(&values, 0)?.f_contiguous()?;
        drop(values);
        let values = pass.chunks.earlier(self.window, &value, 0)?;
        let (mut qk, mut chunks) = (Vec::new(), Vec::new());
        for ((chunk, x), projected) in pass.chunks.iter().zip(x).zip(projected) {
            let (rotated, normed) = self.query_key(pass, chunk, projected, weights.shape)?;
            qk.push(rotated);
            chunks.push(SavedChunk { x: x.shallow_clone(), normed });
        }
        let by = [&value, o_proj];
        let shape = AttentionShape { heads: weights.shape, window: self.window };
        let (outs, softmax) = SavedSoftmax::forward(pass, qk, by, values, shape)?;
        if pass.folded.is_some() {
            (weights.proj, weights.o_proj) = (Tensor::new(), Tensor::new());
        }
        Ok((outs, Saved { weights, softmax, chunks }))
    }

    fn shard_backward(
        &self,
        pass: &Pass<'_>,
        number: i64,
        came: Option<[Tensor; 4]>,
        saved: Saved,
        grad: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<ShardGrads>)> {
        let Saved { weights, mut softmax, chunks } = saved;
        let weights = match came {
            Some(came) => self.shard(pass, number, Some(came))?,
            None => weights,
        };
        let ShardWeights { proj, o_proj, shape } = weights;
        let SoftmaxGrads { qk, value, o_proj } = softmax.backward(pass, grad, &o_proj)?;
        let (mut inputs, mut gradients, mut first) = (Vec::new(), Vec::new(), 0);
        let parts = pass.chunks.iter().zip(chunks).zip(qk.into_iter().zip(o_proj));
        for ((chunk, SavedChunk { x, normed }), (qk, o_proj)) in parts {
            let tokens = x.size()[0];
            let heads =
                rotated_back(&qk.stacked()?, chunk.angles(self.window))?.f_transpose(0, 1)?;
            let heads = heads.f_reshape([tokens, -1])?;
            let (heads, norms) = match normed {
                None => (heads, None),
                Some(saved) => self.norms_back(pass, &saved, &heads, shape)?,
            };
            let value = value.part(0, first, tokens)?;
            first += tokens;
            let projected = Tensor::f_cat(&[heads.f_to_kind(pass.kind)?, value], 1)?;
            inputs.push(pass.of_shard(&projected, &proj)?);
            let proj = pass.gradient(&projected.f_tr()?, &x)?;
            gradients.push(ShardGrads { proj, norms, o_proj, shape });
        }
        Ok((inputs, gradients))
    }
}

impl Gqa {
    /// The weights of shard `number`; `came` has those received from another rank, where weights are sharded.
    fn shard(
        &self,
        pass: &Pass<'_>,
        number: i64,
        came: Option<[Tensor; 4]>,
    ) -> Result<ShardWeights> {
        let (w, config) = (pass.weights, pass.config);
        let (dim, group) = (config.head_dim, config.group());
        let heads = share(config.num_key_value_heads, shards(pass), number);
        let query = heads.start * group * dim..heads.end * group * dim;
        let key = heads.start * dim..heads.end * dim;
        let [q_proj, k_proj, v_proj, o_proj] = match came {
            Some(came) => came,
            None => [
                rows(&w[self.q_proj], std::slice::from_ref(&query))?,
                rows(&w[self.k_proj], std::slice::from_ref(&key))?,
                rows(&w[self.v_proj], &[key])?,
                columns(&w[self.o_proj], query)?,
            ],
        };
        let proj = below(&[q_proj, k_proj, v_proj])?;
        let keys = heads.end - heads.start;
        Ok(ShardWeights { proj, o_proj, shape: [keys * group, keys, dim] })
    }

    /// Queries and keys of a chunk, `[G, n, d]`, and what the backward pass reads of them.
    fn query_key(
        &self,
        pass: &Pass<'_>,
        chunk: &Chunk,
        projected: Tensor,
        shape: [i64; 3],
    ) -> Result<(Tensor, Option<SavedNorms>)> {
        let [queries, keys, width] = shape;
        let (wide, normed) = match self.norms {
            None => (projected.f_to_kind(Kind::Float)?, None),
            Some(norms) => {
                let (mut outs, mut factors) = (Vec::new(), Vec::new());
                for (id, x) in norms.into_iter().zip(by_head(&projected, shape)?) {
                    let (weight, eps) = (&pass.weights[id], pass.config.rms_norm_eps);
                    let (out, factor) = pass.ops.rms_norm(&x, weight, eps, Kind::Float)?;
                    outs.push(out.f_view([projected.size()[0], -1])?);
                    factors.push(factor);
                }
                let (out, factors) = (Tensor::f_cat(&outs, 1)?, pair(factors)?);
                (out, Some(SavedNorms { projected, factors }))
            }
        };
        let heads = wide.f_view([-1, queries + keys, width])?.f_transpose(0, 1)?;
        let turned = rotated(&heads, chunk.angles(self.window))?.f_to_kind(pass.kind)?;
        Ok((turned.f_contiguous()?, normed))
    }

    /// Backward through both norms, from the gradient of their outputs, `[n, G d]`.
    fn norms_back(
        &self,
        pass: &Pass<'_>,
        saved: &SavedNorms,
        grad: &Tensor,
        shape: [i64; 3],
    ) -> Result<(Tensor, Option<[ParamGradient; 2]>)> {
        let (before, grads) = (by_head(&saved.projected, shape)?, by_head(grad, shape)?);
        let (mut inputs, mut weights) = (Vec::new(), Vec::new());
        let sides = before.iter().zip(&grads).zip(&saved.factors);
        for (id, ((x, grad), factors)) in self.norms.into_iter().flatten().zip(sides) {
            let weight = &pass.weights[id];
            let (input, weight) = pass.ops.rms_norm_backward(x, factors, weight, grad)?;
            inputs.push(input.f_view([saved.projected.size()[0], -1])?);
            weights.push(weight);
        }
        Ok((Tensor::f_cat(&inputs, 1)?, Some(pair(weights)?)))
    }

    /// Joins the gradients of a chunk's shards, and passes them on.
    fn emit(
        &self,
        ops: OpsTable,
        shards: Vec<ShardGrads>,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> contract::Result<()> {
        for (which, id) in [self.q_proj, self.k_proj, self.v_proj].into_iter().enumerate() {
            let parts = shards.iter().map(|shard| shard.rows(which)).collect::<Result<Vec<_>>>();
            emit(sink, id, parts.and_then(|parts| joined(&parts, 0)).map_err(refused)?)?;
        }
        let outs: Vec<Tensor> = shards.iter().map(|shard| shard.o_proj.shallow_clone()).collect();
        emit(sink, self.o_proj, joined(&outs, 1).map_err(refused)?)?;
        let norms = shards.into_iter().filter_map(|shard| shard.norms).collect();
        let norms = over_heads(ops, norms).map_err(refused)?;
        let norms = self.norms.into_iter().flatten().zip(norms.into_iter().flatten());
        norms.into_iter().try_for_each(|(id, gradient)| emit(sink, id, gradient))
    }
}

impl ShardGrads {
    /// The rows of the projections of queries, keys or values.
    fn rows(&self, which: usize) -> Result<Tensor> {
        let [queries, keys, width] = self.shape;
        let rows = [queries, keys, keys].map(|heads| heads * width);
        self.proj.part(0, rows[..which].iter().sum(), rows[which])
    }
}

/// Queries and keys of `[n, G d]` as rows of one head each, f32: `[n H, d]` and `[n K, d]`.
fn by_head(x: &Tensor, [queries, keys, width]: [i64; 3]) -> Result<[Tensor; 2]> {
    let side = |first: i64, heads: i64| -> Result<Tensor> {
        let side = x.part(1, first * width, heads * width)?.f_to_kind(Kind::Float)?;
        Ok(side.f_reshape([-1, width])?.f_contiguous()?)
    };
    Ok([side(0, queries)?, side(queries, keys)?])
}

/// The gradients of both norms: a tree over shards.
fn over_heads(
    ops: OpsTable,
    shards: Vec<[ParamGradient; 2]>,
) -> Result<Option<[ParamGradient; 2]>> {
    if shards.len() < 2 {
        return Ok(shards.into_iter().next());
    }
    let mut sum = Counter::new();
    for shard in shards {
        sum.push(ops.finish(shard.into())?)?;
    }
    let sum: Vec<Tensor> = sum.total()?;
    Ok(Some(pair(sum)?.map(ParamGradient::Made)))
}

/// What there is of queries and of keys.
fn pair<T>(both: Vec<T>) -> Result<[T; 2]> {
    let wrong = |_| kernels::Error::Foreign {
        call: "norm queries and keys",
        reason: "there are not two of them".to_owned(),
    };
    both.try_into().map_err(wrong)
}
