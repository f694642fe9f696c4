//! The model as its equations read, differentiated by libtorch: the oracle of the passes written out beside it.
//!
//! Slow and plain on purpose, and in f64, so that what differs is the rounding of the passes. Shares with them only the
//! leaf's spans, the order of parameters and their sizes.

use tch::{Device, Kind, Tensor};

use super::input::{Prepared, Span};
use super::params::{HEAD_PARAMS, LAYER_PARAMS};
use super::{Skip, ZayaConfig};

/// Token losses, and the gradient of their sum over `divisor` for every parameter.
pub(super) fn leaf(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &Prepared,
    divisor: u64,
) -> (Tensor, Vec<Tensor>) {
    let watched = |param: &Tensor| param.to_kind(Kind::Double).set_requires_grad(true);
    let params: Vec<Tensor> = params.iter().map(watched).collect();
    let mut forward = Forward { config, input, counts: Vec::new() };
    let embedded = params[0].index_select(0, &input.tokens);
    let hidden = forward.body(&params, balance, &embedded);
    let log = hidden.linear(&params[0], None::<&Tensor>).log_softmax(-1, Kind::Double);
    let losses = -log.gather(1, &input.labels.unsqueeze(1), false).squeeze_dim(1) * &input.mask;
    let loss = losses.sum(Kind::Double) / divisor as f64;
    (losses.detach(), Tensor::run_backward(&[loss], &params, false, false))
}

struct Forward<'a> {
    config: &'a ZayaConfig,
    input: &'a Prepared,
    counts: Vec<Vec<u64>>,
}

impl Forward<'_> {
    fn body(&mut self, params: &[Tensor], balance: &[Tensor], embedded: &Tensor) -> Tensor {
        let mut stream = (embedded + &params[2]) * &params[1];
        let mut states: Option<Tensor> = None;
        let rotary = Rotary::new(self.config, &self.input.positions);
        let mut next = params[HEAD_PARAMS..].iter();
        for (layer, balance) in balance.iter().enumerate() {
            let count = LAYER_PARAMS - usize::from(layer == 0);
            let mut own: Vec<&Tensor> = next.by_ref().take(count).collect();
            if layer == 0 {
                own.insert(18, &params[0]); // No router state comes from before: a place holder, never read.
            }
            let [norm, wq, wk, va, vb, w0, b0, w1, b1, temp, wo, hs, hb, rs, rb, rest @ ..] =
                &own[..]
            else {
                unreachable!("a layer has {LAYER_PARAMS} parameters")
            };
            let u = rms_norm(&stream, norm, self.config.rms_norm_eps);
            let (query, key) = self.mixed(
                &u.linear(wq, None::<&Tensor>),
                &u.linear(wk, None::<&Tensor>),
                w0,
                b0,
                w1,
                b1,
            );
            let (query, key) = self.normed(query, key, temp, &rotary);
            let value = self.values(&u, va, vb);
            let out = self.attend(&query, &key, &value).linear(wo, None::<&Tensor>);
            stream = residual(&out, &stream, hs, hb, rs, rb);
            let [norm, wd, bd, gamma, rnorm, w1, b1, w2, b2, w3, gate_up, down, hs, hb, rs, rb] =
                rest
            else {
                unreachable!("a layer has {LAYER_PARAMS} parameters")
            };
            let v = rms_norm(&stream, norm, self.config.rms_norm_eps);
            let mut state = v.linear(wd, Some(*bd));
            if let Some(before) = &states {
                state += before * *gamma;
            }
            let n = rms_norm(&state, rnorm, self.config.rms_norm_eps);
            let h = n.linear(w1, Some(*b1)).gelu("none").linear(w2, Some(*b2)).gelu("none");
            let probs = h.linear(w3, None::<&Tensor>).softmax(-1, Kind::Double);
            states = Some(state);
            let out = self.experts(&v, &probs, balance, gate_up, down);
            stream = residual(&out, &stream, hs, hb, rs, rb);
        }
        rms_norm(&stream, next.next().unwrap_or(&params[1]), self.config.rms_norm_eps)
    }

    /// Convolutions and q-k mean.
    fn mixed(
        &self,
        q: &Tensor,
        k: &Tensor,
        w0: &Tensor,
        b0: &Tensor,
        w1: &Tensor,
        b1: &Tensor,
    ) -> (Tensor, Tensor) {
        let config = self.config;
        let (heads, keys, dim, group) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.group(),
        );
        let z = Tensor::cat(&[q, k], 1);
        let taps = w0.squeeze_dim(1);
        let before = shifted(
            &z,
            &z.new_zeros([1, z.size()[1]], (Kind::Double, z.device())),
            &self.input.spans,
        );
        let c0 = before * taps.select(1, 0) + &z * taps.select(1, 1) + b0;
        let before = shifted(&c0, &b0.unsqueeze(0), &self.input.spans);
        let by_head = |x: &Tensor| x.view([-1, heads + keys, dim]).transpose(0, 1);
        let kernel = w1.view([heads + keys, dim, dim, 2]);
        let c1 = by_head(&before).matmul(&kernel.select(3, 0).transpose(1, 2))
            + by_head(&c0).matmul(&kernel.select(3, 1).transpose(1, 2));
        let c1 = c1.transpose(0, 1) + b1.view([heads + keys, dim]);
        let (q, k) = (q.view([-1, keys, group, dim]), k.view([-1, keys, 1, dim]));
        let mean_q = (q + k) * 0.5;
        let mean_k = mean_q.mean_dim(2, false, Kind::Double);
        let query = c1.narrow(1, 0, heads) + mean_q.reshape([-1, heads, dim]);
        (query, c1.narrow(1, heads, keys) + mean_k)
    }

    fn normed(
        &self,
        query: Tensor,
        key: Tensor,
        temp: &Tensor,
        rotary: &Rotary,
    ) -> (Tensor, Tensor) {
        let scale = (self.config.head_dim as f64).sqrt();
        let unit = |x: &Tensor| {
            let norm = x.square().sum_dim_intlist(-1, true, Kind::Double).sqrt();
            x * (scale / norm.clamp_min(f64::from(f32::EPSILON)))
        };
        let key = unit(&key) * temp.unsqueeze(-1);
        (rotary.turn(&unit(&query)), rotary.turn(&key))
    }

    fn values(&self, u: &Tensor, current: &Tensor, delayed: &Tensor) -> Tensor {
        let delayed = u.linear(delayed, None::<&Tensor>);
        let nothing = delayed.new_zeros([1, delayed.size()[1]], (Kind::Double, delayed.device()));
        let delayed = shifted(&delayed, &nothing, &self.input.spans);
        Tensor::cat(&[u.linear(current, None::<&Tensor>), delayed], 1).view([
            -1,
            self.config.num_key_value_heads,
            self.config.head_dim,
        ])
    }

    fn attend(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> Tensor {
        let group = self.config.group();
        let parts: Vec<Tensor> = self
            .input
            .spans
            .iter()
            .map(|span| {
                let part = |x: &Tensor| x.narrow(0, span.start, span.len).transpose(0, 1);
                let wide = |x: &Tensor| part(x).repeat_interleave_self_int(group, 0, None);
                let scores = part(query).matmul(&wide(key).transpose(1, 2))
                    / (self.config.head_dim as f64).sqrt();
                let later =
                    Tensor::ones([span.len, span.len], (Kind::Bool, query.device())).triu(1);
                let scores =
                    scores.masked_fill(&later, f64::NEG_INFINITY).softmax(-1, Kind::Double);
                scores.matmul(&wide(value)).transpose(0, 1).reshape([span.len, -1])
            })
            .collect();
        Tensor::cat(&parts, 0)
    }

    fn experts(
        &mut self,
        v: &Tensor,
        probs: &Tensor,
        balance: &Tensor,
        gate_up: &Tensor,
        down: &Tensor,
    ) -> Tensor {
        let classes = self.config.router_classes();
        let choice = (probs.detach() + balance).argmax(-1, false);
        let weight = probs.gather(1, &choice.unsqueeze(1), false);
        let order = choice.argsort_stable(true, 0, false);
        let inverse = order.argsort_stable(true, 0, false);
        let counts = choice.bincount(None::<&Tensor>, classes);
        let counts: Vec<i64> = Vec::try_from(counts.to_device(Device::Cpu)).unwrap_or_default();
        let sorted = v.index_select(0, &order).split_with_sizes(&counts, 0);
        let (gate_up, down) = (gate_up.unbind(0), down.unbind(0));
        let mut parts: Vec<Tensor> = sorted
            .iter()
            .zip(gate_up.iter().zip(&down))
            .map(|(rows, (gate_up, down))| {
                let both = rows.linear(gate_up, None::<&Tensor>).chunk(2, 1);
                (both[0].silu() * &both[1]).linear(down, None::<&Tensor>)
            })
            .collect();
        let skipped = &sorted[counts.len() - 1];
        parts.push(match self.config.skip {
            Skip::Zero => skipped.zeros_like(),
            Skip::Identity => skipped.shallow_clone(),
        });
        self.counts.push(counts.into_iter().map(|count| count as u64).collect());
        Tensor::cat(&parts, 0).index_select(0, &inverse) * weight
    }
}

/// Row t of the answer is row t - 1 of `x`, or `first` where a span starts.
fn shifted(x: &Tensor, first: &Tensor, spans: &[Span]) -> Tensor {
    let mut parts = Vec::new();
    for span in spans {
        parts.push(first.shallow_clone());
        parts.push(x.narrow(0, span.start, span.len - 1));
    }
    Tensor::cat(&parts, 0)
}

fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    x * (x.square().mean_dim(-1, true, Kind::Double) + eps).rsqrt() * weight
}

fn residual(
    out: &Tensor,
    stream: &Tensor,
    hs: &Tensor,
    hb: &Tensor,
    rs: &Tensor,
    rb: &Tensor,
) -> Tensor {
    (out + hb) * hs + (stream + rb) * rs
}

struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    fn new(config: &ZayaConfig, positions: &Tensor) -> Rotary {
        let dim = config.rotary_dim();
        let exponent =
            Tensor::arange_start_step(0, dim, 2, (Kind::Double, positions.device())) / dim as f64;
        let frequency = Tensor::pow_scalar(config.rope_theta, &exponent).reciprocal();
        let angle = positions.to_kind(Kind::Double).unsqueeze(1) * frequency;
        Rotary { cos: angle.cos().unsqueeze(1), sin: angle.sin().unsqueeze(1) }
    }

    fn turn(&self, x: &Tensor) -> Tensor {
        let half = self.cos.size()[2];
        let parts = x.split_with_sizes([half, half, x.size()[2] - 2 * half], 2);
        let (a, b) = (&parts[0], &parts[1]);
        Tensor::cat(
            &[
                a * &self.cos - b * &self.sin,
                b * &self.cos + a * &self.sin,
                parts[2].shallow_clone(),
            ],
            2,
        )
    }
}
