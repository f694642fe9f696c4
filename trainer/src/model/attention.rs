//! Compressed convolutional attention: projections, two convolutions, q-k mean, value shift, norm, rotation, attention.
//!
//! Shapes: N tokens of the leaf in one row, H query heads and K key heads of d, G = H + K, C = G d.
//! Both convolutions see the token before: their left padding is applied once, in front of the first, so that the
//! second sees the first one's bias before a span begins.

use kernels::Result;
use kernels::ops::{self, Attended, DepthwiseConv, Ops, QueryKey};
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::input::Prepared;
use super::layer::{Backward, Forward, Layer, Pass, Sink, Work, emit};
use super::param::{Declare, ParamId, Weights};
use super::rotary::Rotary;
use crate::refusal::refused;
use crate::timing::{Part, part};

/// Parameters of one layer's attention: `P` is a parameter's name, or its weight.
pub(super) struct Attention<P> {
    pub(super) wq: P,
    pub(super) wk: P,
    pub(super) v_current: P,
    pub(super) v_delayed: P,
    pub(super) w0: P,
    pub(super) b0: P,
    pub(super) w1: P,
    pub(super) b1: P,
    pub(super) temp: P,
    pub(super) wo: P,
}

impl Attention<ParamId> {
    fn bind<'a>(&self, weights: Weights<'a>) -> Attention<&'a Tensor> {
        let of = |id| weights.of(id);
        Attention {
            wq: of(self.wq),
            wk: of(self.wk),
            v_current: of(self.v_current),
            v_delayed: of(self.v_delayed),
            w0: of(self.w0),
            b0: of(self.b0),
            w1: of(self.w1),
            b1: of(self.b1),
            temp: of(self.temp),
            wo: of(self.wo),
        }
    }
}

impl Layer for Attention<ParamId> {
    /// The normed residual, and what attention made of it.
    type Saved = (Tensor, Saved);

    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, _: usize) -> Self {
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
        let mut qkv = params.inside("self_attn.qkv_proj", "self_attn.qkv");
        let wq = qkv.matrix("q_proj.weight", "linear_q.weight", [query, hidden]);
        let wk = qkv.matrix("k_proj.weight", "linear_k.weight", [key, hidden]);
        let half = [key / 2, hidden];
        let v_current = qkv.matrix("v_proj_current.weight", "val_proj1.weight", half);
        let v_delayed = qkv.matrix("v_proj_delayed.weight", "val_proj2.weight", half);
        let w0 = qkv.depthwise("conv_qk_depthwise.weight", "conv_qk.0.weight", [conv, 1, 2]);
        let b0 = qkv.vector("conv_qk_depthwise.bias", "conv_qk.0.bias", conv, 0.0);
        let w1 = qkv.convolution("conv_qk_grouped.weight", "conv_qk.1.weight", [conv, dim, 2]);
        let b1 = qkv.vector("conv_qk_grouped.bias", "conv_qk.1.bias", conv, 0.0);
        let mut own = params.inside("self_attn", "self_attn");
        // Hugging Face starts at 0, a placeholder for a checkpoint: keys would be 0 and attention uniform.
        let temp = own.vector("qk_norm.temp", "qkv.temp", config.num_key_value_heads, 1.0);
        let wo = own.matrix("o_proj.weight", "o_proj.weight", [hidden, query]);
        Attention { wq, wk, v_current, v_delayed, w0, b0, w1, b1, temp, wo }
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> contract::Result<Forward<Self::Saved>> {
        let _watch = part(Part::Attention);
        let (out, saved) = self.bind(pass.weights).forward(&pass.context, x).map_err(refused)?;
        let saved = (x.shallow_clone(), saved);
        Ok(Forward { out, state, counts: Vec::new(), saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        (x, saved): Self::Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut dyn Sink,
    ) -> contract::Result<Backward> {
        let _watch = part(Part::AttentionBack);
        let found = self.bind(pass.weights).backward(&pass.context, &x, saved, grad);
        let (input, params) = found.map_err(refused)?;
        let Attention { wq, wk, v_current, v_delayed, w0, b0, w1, b1, temp, wo } = *self;
        let ids = [wq, wk, v_current, v_delayed, w0, b0, w1, b1, temp, wo];
        ids.into_iter().zip(params).try_for_each(|(id, grad)| emit(sink, id, grad))?;
        Ok(Backward { x: input, state })
    }

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
        let f = |size: i64| size as f64;
        let (width, query, key) =
            (f(config.hidden_size), f(config.query_size()), f(config.key_size()));
        // Queries, keys, both halves of the values, and the way out.
        let projections = width * (query + key + key + query);
        let convolution = f(config.conv_size()) * f(config.head_dim) * 2.0;
        // Scores and values.
        work.tokens * (projections + convolution) + 2.0 * query * work.pairs
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64) -> u64 {
        let size = |size: i64| size as u64;
        let (query, key, conv) =
            (size(config.query_size()), size(config.key_size()), size(config.conv_size()));
        let (heads, keys) = (size(config.num_attention_heads), size(config.num_key_value_heads));
        // Input and output; projected, both taps, normed; the values, what each span made of them, and that in one row.
        let products = 2 * size(config.hidden_size) + 4 * conv + key + 2 * query;
        // Before the norm, its factors, and the logs of the softmax' denominators.
        narrow * products + 4 * (conv + heads + keys + heads)
    }
}

/// What the backward pass needs.
#[derive(Debug)]
pub(super) struct Saved {
    /// `[C, D]`: query and key projections, one below the other.
    wz: Tensor,
    /// `[N, C]`: projected queries and keys before the convolutions.
    z: Tensor,
    /// `[G, N, 2 d]`: first convolution, at the token before and at the token.
    taps: Tensor,
    /// `[G, d, 2 d]`: second convolution, as one matrix per head over both taps.
    kernel: Tensor,
    /// `[G, N, d]`: queries and keys before their norm.
    raw: Tensor,
    /// `[G, N, 1]`: sqrt(d) over the length of each.
    factor: Tensor,
    /// `[G, N, d]`: queries and keys.
    qk: Tensor,
    /// `[N, K d]`.
    value: Tensor,
    core: Attended,
}

/// What attention is computed with, besides its parameters.
pub(super) struct Context<'a> {
    pub(super) ops: &'a dyn Ops,
    pub(super) config: &'a ZayaConfig,
    pub(super) input: &'a Prepared,
    pub(super) rotary: &'a Rotary,
}

impl Attention<&Tensor> {
    /// From the normed residual `u`, `[N, D]`.
    fn forward(&self, context: &Context, u: &Tensor) -> Result<(Tensor, Saved)> {
        let (ops, input) = (context.ops, context.input);
        let wz = Tensor::f_cat(&[self.wq, self.wk], 0)?;
        let z = ops.matmul(u, &wz.f_tr()?)?;
        let taps = ops.depthwise_conv(&z, self.depthwise(context))?;
        let kernel = self.kernel(context.config)?;
        let raw = ops.matmul(&taps, &kernel.f_transpose(1, 2)?)?;
        let mut raw = raw.f_to_kind(Kind::Float)?;
        let (qk, factor) = ops.query_key(&z, &mut raw, self.heads(context))?;
        let qk = qk.f_to_kind(u.kind())?;
        let current = ops.matmul(u, &self.v_current.f_tr()?)?;
        let delayed = ops.matmul(u, &self.v_delayed.f_tr()?)?;
        let value = ops.value_shift(&current, &delayed, &input.starts)?;
        let core = ops.attention(attended(context, &qk, &value))?;
        let out = ops.matmul(&core.heads, &self.wo.f_tr()?)?;
        Ok((out, Saved { wz, z, taps, kernel, raw, factor, qk, value, core }))
    }

    /// From the gradient of the output: that of `u`, and those of the parameters in canonical order.
    fn backward(
        &self,
        context: &Context,
        u: &Tensor,
        saved: Saved,
        grad: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let (ops, config, kind) = (context.ops, context.config, u.kind());
        let grad = &grad.f_to_kind(kind)?;
        let Saved { wz, z, taps, kernel, raw, factor, qk, value, core } = saved;
        let wo = ops.matmul(&grad.f_tr()?, &core.heads)?;
        let grad = ops.matmul(grad, self.wo)?;
        let by = attended(context, &qk, &value);
        let [qk, value] = ops.attention_backward(by, core.saved, &grad)?;
        let mixed = ops.query_key_backward(&raw, &factor, self.heads(context), qk)?;
        let (both, w1) = second_backward(context, &taps, &kernel, &mixed.raw.f_to_kind(kind)?)?;
        let mut conv = ops.depthwise_conv_backward(&z, self.depthwise(context), &both)?;
        ops.means_backward(&mixed.raw, shape(config), &mut conv.input)?;
        let value = ops.value_shift_backward(value, &context.input.starts)?;
        let half = config.key_size() / 2;
        let w_value = ops.matmul(&value.f_tr()?, u)?;
        let z_grad = conv.input.f_to_kind(kind)?;
        let mut input = ops.matmul(&z_grad, &wz)?.f_to_kind(Kind::Float)?;
        ops.matmul_add(&mut input, &value.f_narrow(1, 0, half)?, self.v_current)?;
        ops.matmul_add(&mut input, &value.f_narrow(1, half, half)?, self.v_delayed)?;
        let wz = ops.matmul(&z_grad.f_tr()?, u)?;
        let params = vec![
            wz.f_narrow(0, 0, config.query_size())?,
            wz.f_narrow(0, config.query_size(), config.key_size())?,
            w_value.f_narrow(0, 0, half)?,
            w_value.f_narrow(0, half, half)?,
            conv.weights,
            conv.bias,
            w1,
            mixed.bias,
            mixed.temperature,
            wo,
        ];
        Ok((input, params))
    }

    fn depthwise<'a>(&'a self, context: &'a Context) -> DepthwiseConv<'a> {
        let ([queries, keys, width], starts) = (shape(context.config), &context.input.starts);
        DepthwiseConv { weights: self.w0, bias: self.b0, starts, heads: [queries + keys, width] }
    }

    fn heads<'a>(&'a self, context: &'a Context) -> QueryKey<'a> {
        let (angles, shape) = (context.rotary.angles(), shape(context.config));
        QueryKey { bias: self.b1, temperature: self.temp, angles, shape }
    }

    /// `[C, d, 2]` as stored to `[G, d, 2 d]`.
    fn kernel(&self, config: &ZayaConfig) -> Result<Tensor> {
        let dim = config.head_dim;
        let by_tap = self.w1.f_view([-1, dim, dim, 2])?.f_permute([0, 1, 3, 2])?;
        Ok(by_tap.f_reshape([-1, dim, 2 * dim])?)
    }
}

/// Query heads, key heads, and their dimensions.
fn shape(config: &ZayaConfig) -> [i64; 3] {
    [config.num_attention_heads, config.num_key_value_heads, config.head_dim]
}

/// Attention over the documents of the input.
fn attended<'a>(context: &Context<'a>, qk: &'a Tensor, value: &'a Tensor) -> ops::Attention<'a> {
    ops::Attention { qk, value, spans: &context.input.spans, shape: shape(context.config) }
}

/// From the gradient of the second convolution: of both taps, `[G, N, 2 d]`, and of the kernel as stored.
fn second_backward(
    context: &Context,
    taps: &Tensor,
    kernel: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (ops, dim) = (context.ops, context.config.head_dim);
    let weight = ops.matmul(&grad.f_transpose(1, 2)?, taps)?;
    let weight = weight.f_view([-1, dim, 2, dim])?.f_permute([0, 1, 3, 2])?;
    Ok((ops.matmul(grad, kernel)?, weight.f_reshape([-1, dim, 2])?))
}
