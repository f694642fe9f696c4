//! Compressed convolutional attention: projections, two convolutions, q-k mean, value shift, norm, rotation, attention.
//!
//! Shapes: N tokens of the leaf in one row, H query heads and K key heads of d, G = H + K, C = G d.
//! Both convolutions see the token before: their left padding is applied once, in front of the first, so that the
//! second sees the first one's bias before a span begins.

use tch::{Kind, Tensor};

use super::input::Prepared;
use super::rotary::Rotary;
use super::{ZayaConfig, product, sdpa};

/// Parameters of one layer's attention, in canonical order.
pub(super) struct Attention<'a> {
    pub(super) wq: &'a Tensor,
    pub(super) wk: &'a Tensor,
    pub(super) v_current: &'a Tensor,
    pub(super) v_delayed: &'a Tensor,
    pub(super) w0: &'a Tensor,
    pub(super) b0: &'a Tensor,
    pub(super) w1: &'a Tensor,
    pub(super) b1: &'a Tensor,
    pub(super) temp: &'a Tensor,
    pub(super) wo: &'a Tensor,
}

/// What the backward pass needs.
#[derive(Debug)]
pub(super) struct Saved {
    /// `[C, D]`: query and key projections, one below the other.
    wz: Tensor,
    /// `[N, C]`: projected queries and keys before the convolutions.
    z: Tensor,
    /// `[N, G, 2, d]`: first convolution, at the token before and at the token.
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

impl Attention<'_> {
    /// From the normed stream `u`, `[N, D]`.
    pub(super) fn forward(&self, context: &Context, u: &Tensor) -> (Tensor, Saved) {
        let config = context.config;
        let wz = Tensor::cat(&[self.wq, self.wk], 0);
        let z = u.matmul(&wz.tr());
        let taps = self.first_convolution(context, &z);
        let kernel = self.kernel(config);
        let mut raw = self.second_convolution(config, &taps, &kernel);
        add_means(config, &z, &mut raw);
        let factor = factor(config, &raw);
        let mut qk = &raw * (&factor * self.scales(config));
        context.rotary.turn(&mut qk);
        let qk = qk.to_kind(u.kind());
        let value = self.values(context, u);
        let (heads, core) = sdpa::forward(config, &context.input.spans, qk, value);
        let out = heads.matmul(&self.wo.tr());
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
        let wo = grad.tr().matmul(&heads);
        let (mut qk, value) =
            sdpa::backward(config, &context.input.spans, core, &grad.matmul(self.wo));
        context.rotary.turn_back(&mut qk);
        let (raw_grad, temp) = self.norm_backward(config, &raw, &factor, qk);
        let (c0, w1, b0_from_starts) =
            second_backward(context, &taps, &kernel, &raw_grad.to_kind(kind));
        let b1 = raw_grad.sum_dim_intlist(1, false, Kind::Float).reshape([-1]);
        let (mut z_grad, w0, b0) = self.first_backward(context, &z, c0);
        add_mean_grads(config, &raw_grad, &mut z_grad);
        let (value, half) = (self.values_backward(context, value), config.key_size() / 2);
        let w_value = value.tr().matmul(u);
        let z_grad = z_grad.to_kind(kind);
        let mut input = product::wide(z_grad.matmul(&wz));
        product::add(&mut input, &value.narrow(1, 0, half), self.v_current);
        product::add(&mut input, &value.narrow(1, half, half), self.v_delayed);
        let wz = z_grad.tr().matmul(u);
        let params = vec![
            wz.narrow(0, 0, config.query_size()),
            wz.narrow(0, config.query_size(), config.key_size()),
            w_value.narrow(0, 0, half),
            w_value.narrow(0, half, half),
            w0,
            b0 + b0_from_starts,
            w1,
            b1,
            temp,
            wo,
        ];
        (input, params.into_iter().map(product::wide).collect())
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
        both
    }

    /// `[C, d, 2]` as stored to `[G, d, 2 d]`.
    fn kernel(&self, config: &ZayaConfig) -> Tensor {
        let dim = config.head_dim;
        self.w1.view([-1, dim, dim, 2]).permute([0, 1, 3, 2]).reshape([-1, dim, 2 * dim])
    }

    fn second_convolution(&self, config: &ZayaConfig, taps: &Tensor, kernel: &Tensor) -> Tensor {
        let (n, dim) = (taps.size()[0], config.head_dim);
        let rows = taps.view([n, -1, 2 * dim]).transpose(0, 1);
        product::affine_batch(&self.b1.view([-1, 1, dim]), &rows, kernel)
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
        value.narrow(1, 0, half).copy_(&u.matmul(&self.v_current.tr()));
        let delayed = u.matmul(&self.v_delayed.tr());
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

    fn first_backward(
        &self,
        context: &Context,
        z: &Tensor,
        c0: Tensor,
    ) -> (Tensor, Tensor, Tensor) {
        let (starts, mut c0) = (&context.input.starts, c0);
        let columns = |x: Tensor| x.sum_dim_intlist(0, false, Kind::Float);
        let taps = self.w0.squeeze_dim(1);
        let bias = columns(c0.shallow_clone());
        let now = columns(&c0 * z);
        let mut input = &c0 * taps.select(1, 1);
        starts.clear(&mut c0);
        let (later, earlier) = starts.pairs(&c0, z);
        let before = columns(&later * earlier);
        let (_, mut into) = starts.pairs(&c0, &input);
        let _ = into.addcmul_(&later, &taps.select(1, 0));
        input = input.contiguous();
        (input, Tensor::stack(&[before, now], 1).unsqueeze(1), bias)
    }
}

/// From the gradient of the second convolution: of the first, `[N, C]`; of the kernel as stored; and of the first
/// convolution's bias, as far as the second saw it before a span began.
fn second_backward(
    context: &Context,
    taps: &Tensor,
    kernel: &Tensor,
    grad: &Tensor,
) -> (Tensor, Tensor, Tensor) {
    let (n, dim, starts) = (taps.size()[0], context.config.head_dim, &context.input.starts);
    let rows = taps.view([n, -1, 2 * dim]).transpose(0, 1);
    let weight = grad.transpose(1, 2).matmul(&rows);
    let weight = weight.view([-1, dim, 2, dim]).permute([0, 1, 3, 2]).reshape([-1, dim, 2]);
    let both = grad.matmul(kernel).view([-1, n, 2, dim]).permute([1, 0, 2, 3]);
    let mut before = both.select(2, 0);
    let bias = starts.of(&before).sum_dim_intlist(0, false, Kind::Float).reshape([-1]);
    starts.clear(&mut before);
    let c0 = product::wide(both.select(2, 1)).contiguous();
    let (later, mut into) = starts.pairs(&before, &c0);
    into += later;
    (c0.view([n, -1]), weight, bias)
}

/// Adds to every query the mean of itself and its key before the convolutions, to every key the mean of its group's.
fn add_means(config: &ZayaConfig, z: &Tensor, raw: &mut Tensor) {
    let (q, k) = heads_of(config, &product::wide(z.shallow_clone()));
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
