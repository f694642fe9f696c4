//! Compressed convolutional attention: projections, two convolutions, q-k mean, value shift, norm, rotation, attention.
//!
//! Shapes: n tokens of a chunk, N of all local chunks, H query heads and K key heads of d, G = H + K, C = G d; in a
//! shard, those of its heads. Both convolutions see the token before: their left padding is applied once, before the
//! first, so that the second sees the first one's bias before a span begins. Queries, keys and values are one matmul.
//!
//! A chunk reads adjacent rows of other chunks, and earlier keys and values. Keys need the mean of the queries, so
//! values are sent first and travel while queries and keys are computed. Attention itself is in `softmax`, the backward
//! pass in `cca_back`.

use std::any::Any;

use kernels::Result;
use kernels::layout::Parts as _;
use kernels::ops::{ConvShift, QueryKey};
use tch::Tensor;

use super::heads::{CcaGrads, Heads, HeadsGrads, below, columns, rows, shards};
use super::softmax::{
    AttentionShape, SavedSoftmax, ShardedAttention, back_over_shards, largest_of, over_shards,
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

/// Compressed convolutional attention.
pub(in crate::model) struct Cca {
    pub(super) q_proj: ParamId,
    pub(super) k_proj: ParamId,
    pub(super) v_proj_current: ParamId,
    pub(super) v_proj_delayed: ParamId,
    pub(super) conv_depthwise: ParamId,
    pub(super) conv_depthwise_bias: ParamId,
    pub(super) conv_grouped: ParamId,
    pub(super) conv_grouped_bias: ParamId,
    pub(super) temp: ParamId,
    pub(super) o_proj: ParamId,
    /// How many keys a query sees; `None`: all earlier ones.
    window: Option<i64>,
}

/// What the backward pass reads of a shard.
pub(in crate::model) struct Saved {
    pub(super) heads: Heads,
    /// `[N, C + K d]`: projected queries, keys and values before convolutions and shift, chunk after chunk, followed by
    /// the rows of other ranks that these read.
    pub(super) projected: Tensor,
    pub(super) softmax: SavedSoftmax,
    pub(super) chunks: Vec<SavedChunk>,
}

/// What the backward pass reads of a chunk.
pub(in crate::model) struct SavedChunk {
    /// `[n, D]`: the normed residual.
    pub(super) x: Tensor,
    /// `[G, n, 2 d]`: the depthwise convolution of each channel, at the token before and at the token.
    pub(super) taps: Tensor,
    /// `[G, n, d]`: queries and keys before their norm.
    pub(super) raw: Tensor,
    /// `[G, n, 1]`: sqrt(d) over the length of each.
    pub(super) factor: Tensor,
}

impl Layer for Cca {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, place: LayerPlace) -> Self {
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
        let mut qkv = params.inside("self_attn.qkv_proj", "self_attn.qkv");
        let keys = config.num_key_value_heads;
        let q_proj = qkv.matrix("q_proj.weight", "linear_q.weight", [query, hidden]);
        qkv.cut(q_proj, Sharding::new(&[query, hidden], 0, 1, keys));
        let k_proj = qkv.matrix("k_proj.weight", "linear_k.weight", [key, hidden]);
        qkv.adjoining(k_proj);
        qkv.cut(k_proj, Sharding::new(&[key, hidden], 0, 1, keys));
        let half = [key / 2, hidden];
        let v_proj_current = qkv.matrix("v_proj_current.weight", "val_proj1.weight", half);
        qkv.adjoining(v_proj_current);
        qkv.cut(v_proj_current, Sharding::of_some(&half, keys, dim, 0));
        let v_proj_delayed = qkv.matrix("v_proj_delayed.weight", "val_proj2.weight", half);
        qkv.adjoining(v_proj_delayed);
        qkv.cut(v_proj_delayed, Sharding::of_some(&half, keys, dim, key / 2));
        let mut scope = params.inside("self_attn.qkv_proj", "self_attn.qkv.conv_qk");
        let conv_depthwise = scope.depthwise("conv_qk_depthwise.weight", "0.weight", [conv, 1, 2]);
        let conv_depthwise_bias = scope.vector("conv_qk_depthwise.bias", "0.bias", conv, 0.0);
        let conv_grouped = scope.convolution("conv_qk_grouped.weight", "1.weight", [conv, dim, 2]);
        let conv_grouped_bias = scope.vector("conv_qk_grouped.bias", "1.bias", conv, 0.0);
        let mut scope = params.inside("self_attn", "self_attn");
        // Hugging Face initializes it with 0, a placeholder for a checkpoint: keys would be 0 and attention uniform.
        let temp = scope.vector("qk_norm.temp", "qkv.temp", config.num_key_value_heads, 1.0);
        let o_proj = scope.matrix("o_proj.weight", "o_proj.weight", [hidden, query]);
        scope.cut(o_proj, Sharding::new(&[hidden, query], 1, 1, keys));
        Cca {
            q_proj,
            k_proj,
            v_proj_current,
            v_proj_delayed,
            conv_depthwise,
            conv_depthwise_bias,
            conv_grouped,
            conv_grouped_bias,
            temp,
            o_proj,
            window: place.window,
        }
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
        for (chunk, shards) in gradients.into_iter().enumerate() {
            let joined = HeadsGrads::joined(pass.config, pass.ops, shards).map_err(refused)?;
            self.emit(joined, &mut sink.of(chunk))?;
        }
        Ok(Backward { x: Rows::whole(x), state })
    }

    fn largest_logit(&self, pass: &Pass<'_>, saved: &dyn Any) -> contract::Result<Option<f64>> {
        largest_of(pass, seen::<Vec<Saved>>(saved)?.iter().map(|shard| &shard.softmax))
    }
}

impl Cca {
    /// The heads of shard `shard`; `came` has the projections received from another rank, where weights are sharded.
    fn heads(&self, pass: &Pass<'_>, shard: i64, came: Option<[Tensor; 5]>) -> Result<Heads> {
        let (w, config) = (pass.weights, pass.config);
        let (keys, dim, group) = (config.num_key_value_heads, config.head_dim, config.group());
        let heads = share(keys, shards(pass), shard);
        let query = heads.start * group * dim..heads.end * group * dim;
        let key = heads.start * dim..heads.end * dim;
        let channels =
            [query.clone(), config.query_size() + key.start..config.query_size() + key.end];
        let channels = |weight: &Tensor| rows(weight, &channels);
        let half = config.key_size() / 2;
        let current = key.start.min(half)..key.end.min(half);
        let delayed = key.start.max(half) - half..key.end.max(half) - half;
        let [q_proj, k_proj, current, delayed, o_proj] = match came {
            Some(came) => came,
            None => [
                rows(&w[self.q_proj], std::slice::from_ref(&query))?,
                rows(&w[self.k_proj], &[key])?,
                rows(&w[self.v_proj_current], &[current])?,
                rows(&w[self.v_proj_delayed], &[delayed])?,
                columns(&w[self.o_proj], query)?,
            ],
        };
        let values = [current.extent(0), delayed.extent(0)];
        Ok(Heads {
            proj: below(&[q_proj, k_proj, current, delayed])?,
            values,
            depthwise: channels(&w[self.conv_depthwise])?,
            depthwise_bias: channels(&w[self.conv_depthwise_bias])?,
            kernel: channels(&w[self.conv_grouped])?.f_view([-1, dim, 2 * dim])?,
            grouped_bias: channels(&w[self.conv_grouped_bias])?,
            temp: rows(&w[self.temp], std::slice::from_ref(&heads))?,
            o_proj,
            window: self.window,
            shape: [(heads.end - heads.start) * group, heads.end - heads.start, dim],
        })
    }

    /// Passes the gradients on.
    fn emit(&self, grads: CcaGrads, sink: &mut ChunkGradients<'_, '_>) -> contract::Result<()> {
        let [q_proj, k_proj, current, delayed, _] = self.held();
        for (id, gradient) in [q_proj, k_proj, current, delayed].into_iter().zip(grads.projections)
        {
            emit(sink, id, gradient)?;
        }
        let vectors =
            [self.conv_depthwise, self.conv_depthwise_bias, self.conv_grouped_bias, self.temp];
        for (id, sum) in vectors.into_iter().zip(grads.vectors) {
            emit(sink, id, sum)?;
        }
        emit(sink, self.conv_grouped, grads.grouped)?;
        emit(sink, self.o_proj, grads.o_proj)
    }
}

impl ShardedAttention<5> for Cca {
    type Saved = Saved;
    type Grads = HeadsGrads;

    /// In the order in which [`Cca::heads`] takes them.
    fn held(&self) -> [ParamId; 5] {
        [self.q_proj, self.k_proj, self.v_proj_current, self.v_proj_delayed, self.o_proj]
    }

    fn shard_forward(
        &self,
        pass: &Pass<'_>,
        number: i64,
        came: Option<[Tensor; 5]>,
        x: &[Tensor],
    ) -> Result<(Vec<Tensor>, Saved)> {
        let (out, mut saved) = self.heads(pass, number, came)?.forward(pass, x)?;
        if pass.folded.is_some() {
            saved.heads.reshard();
        }
        Ok((out, saved))
    }

    fn shard_backward(
        &self,
        pass: &Pass<'_>,
        number: i64,
        came: Option<[Tensor; 5]>,
        mut saved: Saved,
        grad: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<HeadsGrads>)> {
        if came.is_some() {
            saved.heads = self.heads(pass, number, came)?;
        }
        saved.backward(pass, grad)
    }
}

impl Heads {
    fn forward(self, pass: &Pass<'_>, x: &[Tensor]) -> Result<(Vec<Tensor>, Saved)> {
        let (ops, all) = (pass.ops, pass.chunks);
        let projected = x.iter().map(|x| ops.matmul(x, &self.proj.swapped(0, 1)?));
        let projected = joined(&projected.collect::<Result<Vec<_>>>()?, 0)?;
        let projected = all.beside(&projected, 0)?.wait()?;
        let (mut taps, mut values) = (Vec::new(), Vec::new());
        for chunk in all.iter() {
            let around = chunk.around(&projected, 0)?;
            let [conv, value] = ops.conv_shift(&around, self.convolution(chunk))?;
            taps.push(chunk.own(&conv, 1)?);
            values.push(chunk.own(&value, 0)?);
        }
        // Values are sent while queries and keys are computed.
        let value = joined(&values, 0)?;
        drop(values);
        let values = all.earlier(self.window, &value, 0)?;
        let (mut chunks, mut first) = (Vec::new(), 0);
        for ((chunk, x), taps) in all.iter().zip(x).zip(taps) {
            let part = projected.part(0, first, x.extent(0))?;
            first += x.extent(0);
            chunks.push(self.query_key(pass, chunk, x, &part, taps)?);
        }
        let (qk, chunks): (Vec<_>, Vec<_>) = chunks.into_iter().unzip();
        let by = [&value, &self.o_proj];
        let shape = AttentionShape { heads: self.shape, window: self.window };
        let (outs, softmax) = SavedSoftmax::forward(pass, qk, by, values, shape)?;
        Ok((outs, Saved { heads: self, projected, softmax, chunks }))
    }

    /// Queries and keys of a chunk, from its rows of the projections, and what the backward pass reads of them.
    fn query_key(
        &self,
        pass: &Pass<'_>,
        chunk: &Chunk,
        x: &Tensor,
        projected: &Tensor,
        taps: Tensor,
    ) -> Result<(Tensor, SavedChunk)> {
        let raw = pass.ops.matmul(&taps, &self.kernel.swapped(1, 2)?)?;
        let made = pass.ops.query_key(projected, raw, self.turned(chunk))?;
        let (x, raw, factor) = (x.shallow_clone(), made.raw, made.factors);
        Ok((made.out, SavedChunk { x, taps, raw, factor }))
    }

    pub(super) fn convolution<'a>(&'a self, chunk: &'a Chunk) -> ConvShift<'a> {
        let ([queries, keys, width], starts) = (self.shape, chunk.starts());
        let (weights, bias) = (&self.depthwise, &self.depthwise_bias);
        let (counted, values) = (chunk.counted(), self.values);
        ConvShift { weights, bias, starts, counted, heads: [queries + keys, width], values }
    }

    pub(super) fn turned<'a>(&'a self, chunk: &'a Chunk) -> QueryKey<'a> {
        let (bias, temperature) = (&self.grouped_bias, &self.temp);
        QueryKey { bias, temperature, angles: chunk.angles(self.window), shape: self.shape }
    }
}
