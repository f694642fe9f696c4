//! Compressed convolutional attention: projections, two convolutions, q-k mean, value shift, norm, rotation, attention.
//!
//! Shapes: N tokens of the micro-batch in one row, H query heads and K key heads of d, G = H + K, C = G d.
//! Both convolutions see the token before: their left padding is applied once, in front of the first, so that the
//! second sees the first one's bias before a span begins.

use kernels::Result;
use kernels::ops::{self, Attended, DepthwiseConv, QueryKey};
use tch::{Kind, Tensor};

use crate::model::ZayaConfig;
use crate::model::layer::{Backward, Forward, Layer, Pass, Sink, Work, emit};
use crate::model::param::{Declare, ParamId};
use crate::refusal::refused;
use crate::timing::{Part, part};

/// Compressed convolutional attention.
pub(in crate::model) struct Cca {
    q_proj: ParamId,
    k_proj: ParamId,
    v_proj_current: ParamId,
    v_proj_delayed: ParamId,
    conv_depthwise: ParamId,
    conv_depthwise_bias: ParamId,
    conv_grouped: ParamId,
    conv_grouped_bias: ParamId,
    temp: ParamId,
    o_proj: ParamId,
}

/// What the backward pass needs.
pub(in crate::model) struct Saved {
    /// `[N, D]`: the normed residual.
    x: Tensor,
    /// `[C, D]`: query and key projections, one below the other.
    qk_proj: Tensor,
    /// `[N, C]`: projected queries and keys before the convolutions.
    projected: Tensor,
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
    attended: Attended,
}

impl Layer for Cca {
    type Saved = Saved;

    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, _: usize) -> Self {
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
        let mut qkv = params.inside("self_attn.qkv_proj", "self_attn.qkv");
        let q_proj = qkv.matrix("q_proj.weight", "linear_q.weight", [query, hidden]);
        let k_proj = qkv.matrix("k_proj.weight", "linear_k.weight", [key, hidden]);
        let half = [key / 2, hidden];
        let v_proj_current = qkv.matrix("v_proj_current.weight", "val_proj1.weight", half);
        let v_proj_delayed = qkv.matrix("v_proj_delayed.weight", "val_proj2.weight", half);
        let mut own = params.inside("self_attn.qkv_proj", "self_attn.qkv.conv_qk");
        let conv_depthwise = own.depthwise("conv_qk_depthwise.weight", "0.weight", [conv, 1, 2]);
        let conv_depthwise_bias = own.vector("conv_qk_depthwise.bias", "0.bias", conv, 0.0);
        let conv_grouped = own.convolution("conv_qk_grouped.weight", "1.weight", [conv, dim, 2]);
        let conv_grouped_bias = own.vector("conv_qk_grouped.bias", "1.bias", conv, 0.0);
        let mut own = params.inside("self_attn", "self_attn");
        // Hugging Face starts at 0, a placeholder for a checkpoint: keys would be 0 and attention uniform.
        let temp = own.vector("qk_norm.temp", "qkv.temp", config.num_key_value_heads, 1.0);
        let o_proj = own.matrix("o_proj.weight", "o_proj.weight", [hidden, query]);
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
        }
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> contract::Result<Forward<Saved>> {
        let _watch = part(Part::Attention);
        let (out, saved) = self.compute(pass, x).map_err(refused)?;
        Ok(Forward { out, state, counts: Vec::new(), saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut dyn Sink,
    ) -> contract::Result<Backward> {
        let _watch = part(Part::AttentionBack);
        let (x, gradients) = self.compute_back(pass, saved, grad).map_err(refused)?;
        for (id, gradient) in gradients {
            emit(sink, id, gradient)?;
        }
        Ok(Backward { x, state })
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

impl Cca {
    /// What attention makes of the normed residual.
    fn compute(&self, pass: &Pass<'_>, x: &Tensor) -> Result<(Tensor, Saved)> {
        let (ops, w, input) = (pass.ops, pass.weights, pass.input);
        let qk_proj = Tensor::f_cat(&[&w[self.q_proj], &w[self.k_proj]], 0)?;
        let projected = ops.matmul(x, &qk_proj.f_tr()?)?;
        let taps = ops.depthwise_conv(&projected, self.depthwise(pass))?;
        let kernel = self.kernel(pass)?;
        let raw = ops.matmul(&taps, &kernel.f_transpose(1, 2)?)?;
        let mut raw = raw.f_to_kind(Kind::Float)?;
        let (qk, factor) = ops.query_key(&projected, &mut raw, self.query_key(pass))?;
        let qk = qk.f_to_kind(x.kind())?;
        let current = ops.matmul(x, &w[self.v_proj_current].f_tr()?)?;
        let delayed = ops.matmul(x, &w[self.v_proj_delayed].f_tr()?)?;
        let value = ops.value_shift(&current, &delayed, &input.starts)?;
        let attended = ops.attention(over_documents(pass, &qk, &value))?;
        let out = ops.matmul(&attended.heads, &w[self.o_proj].f_tr()?)?;
        let x = x.shallow_clone();
        Ok((out, Saved { x, qk_proj, projected, taps, kernel, raw, factor, qk, value, attended }))
    }

    /// From the gradient of the output: that of the normed residual, and those of the parameters.
    fn compute_back(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &Tensor,
    ) -> Result<(Tensor, [(ParamId, Tensor); 10])> {
        let (ops, w, config) = (pass.ops, pass.weights, pass.config);
        let Saved { x, qk_proj, projected, taps, kernel, raw, factor, qk, value, attended } = saved;
        let kind = x.kind();
        let grad = &grad.f_to_kind(kind)?;
        let o_proj = ops.matmul(&grad.f_tr()?, &attended.heads)?;
        let heads = ops.matmul(grad, &w[self.o_proj])?;
        let by = over_documents(pass, &qk, &value);
        let [qk, value] = ops.attention_backward(by, attended.saved, &heads)?;
        let mixed = ops.query_key_backward(&raw, &factor, self.query_key(pass), qk)?;
        let (taps, conv_grouped) =
            grouped_backward(pass, &taps, &kernel, &mixed.raw.f_to_kind(kind)?)?;
        let mut conv = ops.depthwise_conv_backward(&projected, self.depthwise(pass), &taps)?;
        ops.means_backward(&mixed.raw, shape(config), &mut conv.input)?;
        let value = ops.value_shift_backward(value, &pass.input.starts)?;
        let (query, key) = (config.query_size(), config.key_size());
        let half = key / 2;
        let v_proj = ops.matmul(&value.f_tr()?, &x)?;
        let projected = conv.input.f_to_kind(kind)?;
        let mut input = ops.matmul(&projected, &qk_proj)?.f_to_kind(Kind::Float)?;
        ops.matmul_add(&mut input, &value.f_narrow(1, 0, half)?, &w[self.v_proj_current])?;
        ops.matmul_add(&mut input, &value.f_narrow(1, half, half)?, &w[self.v_proj_delayed])?;
        let qk_proj = ops.matmul(&projected.f_tr()?, &x)?;
        let gradients = [
            (self.q_proj, qk_proj.f_narrow(0, 0, query)?),
            (self.k_proj, qk_proj.f_narrow(0, query, key)?),
            (self.v_proj_current, v_proj.f_narrow(0, 0, half)?),
            (self.v_proj_delayed, v_proj.f_narrow(0, half, half)?),
            (self.conv_depthwise, conv.weights),
            (self.conv_depthwise_bias, conv.bias),
            (self.conv_grouped, conv_grouped),
            (self.conv_grouped_bias, mixed.bias),
            (self.temp, mixed.temperature),
            (self.o_proj, o_proj),
        ];
        Ok((input, gradients))
    }

    fn depthwise<'a>(&self, pass: &Pass<'a>) -> DepthwiseConv<'a> {
        let ([queries, keys, width], starts) = (shape(pass.config), &pass.input.starts);
        let weights = pass.weights.of(self.conv_depthwise);
        let bias = pass.weights.of(self.conv_depthwise_bias);
        DepthwiseConv { weights, bias, starts, heads: [queries + keys, width] }
    }

    fn query_key<'a>(&self, pass: &Pass<'a>) -> QueryKey<'a> {
        let bias = pass.weights.of(self.conv_grouped_bias);
        let temperature = pass.weights.of(self.temp);
        QueryKey { bias, temperature, angles: pass.rotary.angles(), shape: shape(pass.config) }
    }

    /// The second convolution, `[C, d, 2]` as stored, to `[G, d, 2 d]`.
    fn kernel(&self, pass: &Pass<'_>) -> Result<Tensor> {
        let dim = pass.config.head_dim;
        let by_tap = pass.weights[self.conv_grouped].f_view([-1, dim, dim, 2])?;
        Ok(by_tap.f_permute([0, 1, 3, 2])?.f_reshape([-1, dim, 2 * dim])?)
    }
}

/// Query heads, key heads, and their dimensions.
fn shape(config: &ZayaConfig) -> [i64; 3] {
    [config.num_attention_heads, config.num_key_value_heads, config.head_dim]
}

/// Attention inside each document of the input.
fn over_documents<'a>(pass: &Pass<'a>, qk: &'a Tensor, value: &'a Tensor) -> ops::Attention<'a> {
    ops::Attention { qk, value, spans: &pass.input.spans, shape: shape(pass.config) }
}

/// From the gradient of the second convolution: of both taps, `[G, N, 2 d]`, and of the kernel as stored.
fn grouped_backward(
    pass: &Pass<'_>,
    taps: &Tensor,
    kernel: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (ops, dim) = (pass.ops, pass.config.head_dim);
    let weight = ops.matmul(&grad.f_transpose(1, 2)?, taps)?;
    let weight = weight.f_view([-1, dim, 2, dim])?.f_permute([0, 1, 3, 2])?;
    Ok((ops.matmul(grad, kernel)?, weight.f_reshape([-1, dim, 2])?))
}
