//! Compressed convolutional attention: projections, two convolutions, q-k mean, value shift, norm, rotation, attention.
//!
//! Shapes: N tokens of the leaf in one row, H query heads and K key heads of d, G = H + K, C = G d.
//! Both convolutions see the token before: their left padding is applied once, in front of the first, so that the
//! second sees the first one's bias before a span begins.

use contract::Result;
use kernels::fused;
use tch::{Kind, Tensor};

use super::input::Prepared;
use super::layer::{Backward, Forward, Layer, Pass, Sink, Work, emit};
use super::param::{Declare, ParamId, Weights};
use super::rotary::Rotary;
use super::{ZayaConfig, product, sdpa};
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
    ) -> Result<Forward<Self::Saved>> {
        let _watch = part(Part::Attention);
        let (out, saved) = self.bind(pass.weights).forward(&pass.context, x);
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
    ) -> Result<Backward> {
        let _watch = part(Part::AttentionBack);
        let (input, params) = self.bind(pass.weights).backward(&pass.context, &x, saved, grad);
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
    core: sdpa::Saved,
    /// `[N, H d]`: heads' outputs.
    heads: Tensor,
}

/// What attention is computed with, besides its parameters.
pub(super) struct Context<'a> {
    pub(super) config: &'a ZayaConfig,
    pub(super) input: &'a Prepared,
    pub(super) rotary: &'a Rotary,
}

impl Attention<&Tensor> {
    /// From the normed stream `u`, `[N, D]`.
    pub(super) fn forward(&self, context: &Context, u: &Tensor) -> (Tensor, Saved) {
        let config = context.config;
        let wz = Tensor::cat(&[self.wq, self.wk], 0);
        let z = product::of(u, &wz.tr());
        let wide = product::wide(z.shallow_clone());
        let taps = match fused::fits(&wide) {
            true => fused::taps(&wide, self.depthwise(context)).to_kind(z.kind()),
            false => self.first_convolution(context, &z),
        };
        let kernel = self.kernel(config);
        let mut raw = product::wide(product::of(&taps, &kernel.transpose(1, 2)));
        let (qk, factor) = match fused::fits(&wide) && fused::fits(&raw) {
            true => fused::mix(&wide, &mut raw, self.heads(context)),
            false => self.mix(context, &wide, &mut raw),
        };
        let qk = qk.to_kind(u.kind());
        let value = self.values(context, u);
        let (heads, core) = sdpa::forward(config, &context.input.spans, qk, value);
        let out = product::of(&heads, &self.wo.tr());
        (out, Saved { wz, z, taps, kernel, raw, factor, core, heads })
    }

    /// From the gradient of the output: that of `u`, and those of the parameters in canonical order.
    pub(super) fn backward(
        &self,
        context: &Context,
        u: &Tensor,
        saved: Saved,
        grad: &Tensor,
    ) -> (Tensor, Vec<Tensor>) {
        let (config, kind) = (context.config, u.kind());
        let grad = &grad.to_kind(kind);
        let Saved { wz, z, taps, kernel, raw, factor, core, heads } = saved;
        let wo = product::of(&grad.tr(), &heads);
        let (qk, value) =
            sdpa::backward(config, &context.input.spans, core, &product::of(grad, self.wo));
        let (raw_grad, [temp, b1]) = match fused::fits(&raw) && fused::fits(&qk) {
            true => fused::mix_backward(&raw, &factor, self.heads(context), qk),
            false => self.mix_backward(context, (&raw, &factor), qk),
        };
        let (both, w1) = second_backward(config, &taps, &kernel, &raw_grad.to_kind(kind));
        let (both, z) = (product::wide(both), product::wide(z));
        let (mut z_grad, [before, now, b0]) = match fused::fits(&z) && fused::fits(&both) {
            true => fused::taps_backward(&z, self.depthwise(context), &both),
            false => self.first_backward(context, &z, &both),
        };
        let w0 = Tensor::stack(&[before, now], 1).unsqueeze(1);
        match fused::fits(&raw_grad) && fused::fits(&z_grad) {
            true => fused::means_backward(&raw_grad, shape(config), &mut z_grad),
            false => add_mean_grads(config, &raw_grad, &mut z_grad),
        }
        let (value, half) = (self.values_backward(context, value), config.key_size() / 2);
        let w_value = product::of(&value.tr(), u);
        let z_grad = z_grad.to_kind(kind);
        let mut input = product::wide(product::of(&z_grad, &wz));
        product::add(&mut input, &value.narrow(1, 0, half), self.v_current);
        product::add(&mut input, &value.narrow(1, half, half), self.v_delayed);
        let wz = product::of(&z_grad.tr(), u);
        let params = vec![
            wz.narrow(0, 0, config.query_size()),
            wz.narrow(0, config.query_size(), config.key_size()),
            w_value.narrow(0, 0, half),
            w_value.narrow(0, half, half),
            w0,
            b0,
            w1,
            b1,
            temp,
            wo,
        ];
        (input, params.into_iter().map(product::wide).collect())
    }

    fn depthwise<'a>(&'a self, context: &'a Context) -> fused::Depthwise<'a> {
        let ([queries, keys, width], starts) = (shape(context.config), context.input.starts.rows());
        fused::Depthwise { weights: self.w0, bias: self.b0, starts, heads: [queries + keys, width] }
    }

    fn heads<'a>(&'a self, context: &'a Context) -> fused::Heads<'a> {
        let (angles, shape) = (context.rotary.angles(), shape(context.config));
        fused::Heads { bias: self.b1, temperature: self.temp, angles, shape }
    }

    /// `c0_t = w0[0] z_{t-1} + w0[1] z_t + b0`, with zeros before a span; both taps of the second convolution.
    fn first_convolution(&self, context: &Context, z: &Tensor) -> Tensor {
        let (starts, n, config) = (&context.input.starts, z.size()[0], context.config);
        let taps = self.w0.squeeze_dim(1);
        let mut before = z.empty_like();
        starts.delay(z, None, &mut before);
        let mut c0 = self.b0.addcmul(z, &taps.select(1, 1));
        let _ = c0.addcmul_(&before, &taps.select(1, 0));
        let heads = config.num_attention_heads + config.num_key_value_heads;
        let shape = [n, heads, 2, config.head_dim];
        let both = Tensor::empty(shape, (z.kind(), z.device()));
        let by_head = c0.view([n, heads, config.head_dim]);
        let first = self.b0.view([heads, config.head_dim]);
        starts.delay(&by_head, Some(&first), &mut both.select(2, 0));
        both.select(2, 1).copy_(&by_head);
        both.view([n, heads, 2 * config.head_dim]).transpose(0, 1).contiguous()
    }

    /// `[C, d, 2]` as stored to `[G, d, 2 d]`.
    fn kernel(&self, config: &ZayaConfig) -> Tensor {
        let dim = config.head_dim;
        self.w1.view([-1, dim, dim, 2]).permute([0, 1, 3, 2]).reshape([-1, dim, 2 * dim])
    }

    /// Bias, means, norm, temperature and rotation of `raw`: queries and keys, and the factors of the norm.
    fn mix(&self, context: &Context, z: &Tensor, raw: &mut Tensor) -> (Tensor, Tensor) {
        *raw += self.b1.view([-1, 1, context.config.head_dim]);
        add_means(context.config, z, raw);
        let factor = factor(context.config, raw);
        let mut qk = &*raw * (&factor * self.scales(context.config));
        context.rotary.turn(&mut qk);
        (qk, factor)
    }

    /// From the gradient of queries and keys: that of `raw`; those of the temperature, and of the bias added to `raw`.
    fn mix_backward(
        &self,
        context: &Context,
        (raw, factor): (&Tensor, &Tensor),
        mut grad: Tensor,
    ) -> (Tensor, [Tensor; 2]) {
        context.rotary.turn_back(&mut grad);
        let (raw_grad, temp) = self.norm_backward(context.config, raw, factor, grad);
        let bias = raw_grad.sum_dim_intlist(1, false, Kind::Float).reshape([-1]);
        (raw_grad, [temp, bias])
    }

    /// `[G, 1, 1]`: 1 for query heads, the temperature for key heads.
    fn scales(&self, config: &ZayaConfig) -> Tensor {
        let ones =
            self.temp.new_ones([config.num_attention_heads], (Kind::Float, self.temp.device()));
        Tensor::cat(&[&ones, self.temp], 0).view([-1, 1, 1])
    }

    /// Half of the value channels from the token, half from the one before it.
    fn values(&self, context: &Context, u: &Tensor) -> Tensor {
        let half = context.config.key_size() / 2;
        let value = Tensor::empty([u.size()[0], 2 * half], (u.kind(), u.device()));
        value.narrow(1, 0, half).copy_(&product::of(u, &self.v_current.tr()));
        let delayed = product::of(u, &self.v_delayed.tr());
        context.input.starts.delay(&delayed, None, &mut value.narrow(1, half, half));
        value
    }

    /// The delayed half moves back to the token it came from; what came from before a span goes nowhere.
    fn values_backward(&self, context: &Context, grad: Tensor) -> Tensor {
        let (n, half, starts) =
            (grad.size()[0], context.config.key_size() / 2, &context.input.starts);
        let mut shifted = grad.narrow(1, half, half).copy();
        starts.clear(&mut shifted);
        let delayed = grad.narrow(1, half, half);
        let (later, _) = starts.pairs(&shifted, &shifted);
        delayed.narrow(0, 0, n - 1).copy_(&later);
        let _ = delayed.narrow(0, n - 1, 1).zero_();
        grad
    }

    /// Back through `raw * factor * scale`, where `factor = sqrt(d) / |raw|`.
    fn norm_backward(
        &self,
        config: &ZayaConfig,
        raw: &Tensor,
        factor: &Tensor,
        grad: Tensor,
    ) -> (Tensor, Tensor) {
        let scales = self.scales(config);
        let dot = (&grad * raw).sum_dim_intlist(-1, true, Kind::Float);
        let keys = |x: &Tensor| x.narrow(0, config.num_attention_heads, config.num_key_value_heads);
        let temp =
            (keys(factor) * keys(&dot)).sum_dim_intlist([1, 2].as_slice(), false, Kind::Float);
        let dim = config.head_dim as f64;
        let along = factor.pow_tensor_scalar(3) * &scales * dot / -dim;
        // Where the length was clamped, the factor is a constant.
        let clamped = factor.ge(0.999 * dim.sqrt() / f64::from(f32::EPSILON));
        let along = along.masked_fill(&clamped, 0.0);
        let mut out = grad * (factor * scales);
        let _ = out.addcmul_(raw, &along);
        (out, temp)
    }

    /// From the gradient of both taps, `[G, N, 2 d]`: that of `z`; those of the weights of the token before, of those of
    /// the token, and of the bias.
    fn first_backward(
        &self,
        context: &Context,
        z: &Tensor,
        both: &Tensor,
    ) -> (Tensor, [Tensor; 3]) {
        let (n, dim, starts) = (z.size()[0], context.config.head_dim, &context.input.starts);
        let columns = |x: &Tensor| x.sum_dim_intlist(0, false, Kind::Float);
        let both = both.view([-1, n, 2, dim]).permute([1, 0, 2, 3]);
        let mut before = both.select(2, 0);
        let seen_early = columns(&starts.of(&before)).reshape([-1]);
        starts.clear(&mut before);
        let c0 = both.select(2, 1).contiguous();
        let (later, mut into) = starts.pairs(&before, &c0);
        into += later;
        let mut c0 = c0.view([n, -1]);
        let taps = self.w0.squeeze_dim(1);
        let bias = columns(&c0) + seen_early;
        let now = columns(&(&c0 * z));
        let input = &c0 * taps.select(1, 1);
        starts.clear(&mut c0);
        let (later, earlier) = starts.pairs(&c0, z);
        let before = columns(&(&later * earlier));
        let (_, mut into) = starts.pairs(&c0, &input);
        let _ = into.addcmul_(&later, &taps.select(1, 0));
        (input.contiguous(), [before, now, bias])
    }
}

/// Query heads, key heads, and their dimensions.
fn shape(config: &ZayaConfig) -> [usize; 3] {
    [config.num_attention_heads, config.num_key_value_heads, config.head_dim].map(|x| x as usize)
}

/// From the gradient of the second convolution: of both taps, `[G, N, 2 d]`, and of the kernel as stored.
fn second_backward(
    config: &ZayaConfig,
    taps: &Tensor,
    kernel: &Tensor,
    grad: &Tensor,
) -> (Tensor, Tensor) {
    let dim = config.head_dim;
    let weight = product::of(&grad.transpose(1, 2), taps);
    let weight = weight.view([-1, dim, 2, dim]).permute([0, 1, 3, 2]).reshape([-1, dim, 2]);
    (product::of(grad, kernel), weight)
}

/// Adds to every query the mean of itself and its key before the convolutions, to every key the mean of its group's.
fn add_means(config: &ZayaConfig, z: &Tensor, raw: &mut Tensor) {
    let (q, k) = heads_of(config, z);
    let mean = (q + k) * 0.5;
    let (mut query, mut key) = split(config, raw);
    key += mean.mean_dim(1, true, Kind::Float);
    query += mean;
}

fn add_mean_grads(config: &ZayaConfig, raw: &Tensor, z: &mut Tensor) {
    let (query, key) = split(config, raw);
    let mean = (query + key / config.group() as f64) * 0.5;
    let (mut q, mut k) = heads_of(config, z);
    k += mean.sum_dim_intlist(1, true, Kind::Float);
    q += mean;
}

/// `[N, C]` as queries `[K, H / K, N, d]` and keys `[K, 1, N, d]`.
fn heads_of(config: &ZayaConfig, z: &Tensor) -> (Tensor, Tensor) {
    let by_head = z.view([z.size()[0], -1, config.head_dim]).transpose(0, 1);
    split(config, &by_head)
}

/// `[G, N, d]` as queries `[K, H / K, N, d]` and keys `[K, 1, N, d]`.
pub(super) fn split(config: &ZayaConfig, heads: &Tensor) -> (Tensor, Tensor) {
    let (keys, group) = (config.num_key_value_heads, config.group());
    let query = heads.narrow(0, 0, keys * group).unflatten(0, [keys, group]);
    (query, heads.narrow(0, keys * group, keys).unsqueeze(1))
}

fn factor(config: &ZayaConfig, raw: &Tensor) -> Tensor {
    let length = raw.square().sum_dim_intlist(-1, true, Kind::Float).sqrt();
    length.clamp_min(f64::from(f32::EPSILON)).reciprocal() * (config.head_dim as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::{LeafInput, random};
    use super::*;
    use proptest::prelude::*;
    use tch::Device;

    fn difference(found: &Tensor, wanted: &Tensor) -> f64 {
        assert_eq!(found.size(), wanted.size());
        let size = wanted.abs().max().double_value(&[]).max(1.0);
        (found - wanted).abs().max().double_value(&[]) / size
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// One pass over memory computes what the operators compute, wherever documents begin.
        #[test]
        fn passes_are_the_operators(
            cuts in prop::collection::btree_set(1u32..24, 0..8),
            rows in 1usize..4,
            group in 1i64..4,
            seed in 0u64..1000,
        ) {
            let (keys, dim, tokens) = (2, 8, rows * 24);
            let config = ZayaConfig {
                num_attention_heads: keys * group,
                num_key_value_heads: keys,
                head_dim: dim,
                vocab_size: 97,
                ..ZayaConfig::preset("zaya1-nano").unwrap()
            };
            let starts: Vec<u32> = std::iter::once(0).chain(cuts).collect();
            let ids = vec![1i32; tokens];
            let positions: Vec<i32> = (0..tokens as i32).map(|place| place % 24).collect();
            let input = LeafInput {
                tokens: &ids,
                labels: &ids,
                positions: &positions,
                mask: &vec![1; tokens],
                boundaries: &vec![starts; rows],
                rows,
                seq_len: 24,
            };
            let input = input.prepare(&config, Device::Cpu).unwrap();
            let rotary = Rotary::new(&config, &input.positions);
            let context = Context { config: &config, input: &input, rotary: &rotary };
            let heads = keys * (group + 1);
            let (n, channels) = (tokens as i64, heads * dim);
            let unused = Tensor::new();
            let vectors = [random(&[channels, 1, 2], seed), random(&[channels], seed + 1), random(&[channels], seed + 2)];
            let temp = random(&[keys], seed + 3);
            let attention = Attention {
                w0: &vectors[0], b0: &vectors[1], b1: &vectors[2], temp: &temp,
                wq: &unused, wk: &unused, v_current: &unused, v_delayed: &unused, w1: &unused, wo: &unused,
            };

            let z = random(&[n, channels], seed + 4);
            let depthwise = attention.depthwise(&context);
            let found = fused::taps(&z, depthwise);
            prop_assert!(difference(&found, &attention.first_convolution(&context, &z)) < 1e-6);
            let both = random(&[heads, n, 2 * dim], seed + 5);
            let (found, sums) = fused::taps_backward(&z, depthwise, &both);
            let (wanted, wanted_sums) = attention.first_backward(&context, &z, &both.copy());
            prop_assert!(difference(&found, &wanted) < 1e-6);
            for (found, wanted) in sums.iter().zip(&wanted_sums) {
                prop_assert!(difference(found, wanted) < 2e-6);
            }

            let raw = random(&[heads, n, dim], seed + 6);
            let (mut fast, mut slow) = (raw.copy(), raw.copy());
            let (found, factor) = fused::mix(&z, &mut fast, attention.heads(&context));
            let (wanted, wanted_factor) = attention.mix(&context, &z, &mut slow);
            prop_assert!(difference(&fast, &slow) < 1e-6);
            prop_assert!(difference(&factor, &wanted_factor) < 2e-6 && difference(&found, &wanted) < 4e-6);
            let grad = random(&[heads, n, dim], seed + 7);
            let (found, sums) = fused::mix_backward(&slow, &wanted_factor, attention.heads(&context), grad.copy());
            let (wanted, wanted_sums) = attention.mix_backward(&context, (&slow, &wanted_factor), grad);
            prop_assert!(difference(&found, &wanted) < 4e-6);
            for (found, wanted) in sums.iter().zip(&wanted_sums) {
                prop_assert!(difference(found, wanted) < 4e-6);
            }
            let (mut fast, mut slow) = (z.copy(), z.copy());
            fused::means_backward(&wanted, shape(&config), &mut fast);
            add_mean_grads(&config, &wanted, &mut slow);
            prop_assert!(difference(&fast, &slow) < 1e-6);
        }
    }
}
