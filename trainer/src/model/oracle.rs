//! The model written as its equations and differentiated by libtorch: the reference for the hand-written passes.
//!
//! Deliberately slow and simple, and in f64, so that any difference is the rounding of the passes. It shares with them
//! only the micro-batch's spans, and the names and sizes of parameters.

use std::collections::BTreeMap;

use kernels::ops::AttentionSpan;
use tch::{Kind, Tensor};

use super::input::DeviceMicroBatch;
use super::{ParamSpec, SkipOutput, ZayaConfig};

/// Token losses, their z-losses, and the gradient of the sum of both over `label_count` for every parameter of `specs`.
pub(super) fn forward_backward(
    config: &ZayaConfig,
    specs: &[ParamSpec],
    params: &[Tensor],
    balance: &[Tensor],
    input: &DeviceMicroBatch,
    label_count: u64,
) -> ([Tensor; 2], Vec<Tensor>) {
    let watched = |param: &Tensor| param.to_kind(Kind::Double).set_requires_grad(true);
    let params: Vec<Tensor> = params.iter().map(watched).collect();
    let named = specs.iter().map(|spec| spec.name.as_str()).zip(&params).collect();
    let forward = Forward { config, input, params: named };
    let hidden = forward.body(balance);
    let own = forward.params.get("lm_head.weight").copied();
    let head = own.unwrap_or_else(|| forward.p("embed_tokens.weight"));
    let logits = hidden.linear(head, None::<&Tensor>);
    let log_sum = logits.exp().sum_dim_intlist(1, false, Kind::Double).log();
    let label = logits.gather(1, &input.labels.unsqueeze(1), false).squeeze_dim(1);
    let losses = (&log_sum - label) * &input.mask;
    let z_losses = config.z_loss * log_sum.square() * &input.mask;
    let loss = (&losses + &z_losses).sum(Kind::Double) / label_count as f64;
    (
        [losses, z_losses].map(|all| all.detach()),
        Tensor::run_backward(&[loss], &params, false, false),
    )
}

struct Forward<'a> {
    config: &'a ZayaConfig,
    input: &'a DeviceMicroBatch,
    params: BTreeMap<&'a str, &'a Tensor>,
}

/// The parameters whose names have a prefix.
struct Below<'a>(&'a Forward<'a>, String);

impl<'a> Below<'a> {
    fn p(&self, name: &str) -> &'a Tensor {
        self.0.p(&format!("{}.{name}", self.1))
    }

    fn has(&self, name: &str) -> bool {
        self.0.params.contains_key(format!("model.{}.{name}", self.1).as_str())
    }

    fn linear(&self, x: &Tensor, name: &str) -> Tensor {
        let bias = format!("{name}.bias");
        let bias = self.has(&bias).then(|| self.p(&bias));
        x.linear(self.p(&format!("{name}.weight")), bias)
    }

    fn norm(&self, x: &Tensor, name: &str) -> Tensor {
        rms_norm(x, self.p(&format!("{name}.weight")), self.0.config.rms_norm_eps)
    }

    fn gated(&self, x: &Tensor, name: &str) -> Tensor {
        let side = |side: &str| self.linear(x, &format!("{name}.{side}_proj"));
        self.linear(&(side("gate").silu() * side("up")), &format!("{name}.down_proj"))
    }

    /// The sum of `count` experts without weights, which are parts of the matrices' inner width.
    fn shared(&self, x: &Tensor, count: i64) -> Tensor {
        let parts = |side: &str, dim| {
            self.p(&format!("mlp.shared_experts.{side}_proj.weight")).chunk(count, dim)
        };
        let (gate, up, down) = (parts("gate", 0), parts("up", 0), parts("down", 1));
        let experts = gate.iter().zip(up.iter().zip(&down)).map(|(gate, (up, down))| {
            let product = x.linear(gate, None::<&Tensor>).silu() * x.linear(up, None::<&Tensor>);
            product.linear(down, None::<&Tensor>)
        });
        experts.reduce(|sum, expert| sum + expert).unwrap()
    }

    /// The sum of a sublayer's output and the residual, scaled or not.
    fn residual(&self, out: &Tensor, residual: &Tensor, name: &str) -> Tensor {
        if !self.has(&format!("{name}.residual_scale")) {
            return out + residual;
        }
        let p = |part: &str| self.p(&format!("{name}.{part}"));
        (out + p("hidden_states_bias")) * p("hidden_states_scale")
            + (residual + p("residual_bias")) * p("residual_scale")
    }
}

impl Forward<'_> {
    fn p(&self, name: &str) -> &Tensor {
        self.params[format!("model.{name}").as_str()]
    }

    fn body(&self, balance: &[Tensor]) -> Tensor {
        let embedded = self.p("embed_tokens.weight").index_select(0, &self.input.tokens);
        let scaled = self.params.contains_key("model.input_hidden_states_bias");
        let mut residual = match scaled {
            true => {
                (embedded + self.p("input_hidden_states_bias"))
                    * self.p("input_hidden_states_scale")
            }
            false => embedded,
        };
        let mut state: Option<Tensor> = None;
        let rotary =
            [false, true].map(|slides| Rotary::new(self.config, slides, &self.input.positions));
        for (layer, (balance, window)) in balance.iter().zip(self.config.windows()).enumerate() {
            let rotary = &rotary[usize::from(window.is_some())];
            let at = Below(self, format!("layers.{layer}"));
            let out = self.attention(&at, &at.norm(&residual, "input_layernorm"), rotary, window);
            residual = at.residual(&out, &residual, "post_attention_residual_scale");
            let v = at.norm(&residual, "post_attention_layernorm");
            let out = match at.has("mlp.gate_proj.weight") {
                true => at.gated(&v, "mlp"),
                false => {
                    let routed = self.mixture(&at, &v, &mut state, balance);
                    match self.config.num_shared_experts {
                        0 => routed,
                        count => routed + at.shared(&v, count),
                    }
                }
            };
            residual = at.residual(&out, &residual, "post_mlp_residual_scale");
        }
        rms_norm(&residual, self.p("norm.weight"), self.config.rms_norm_eps)
    }

    fn attention(
        &self,
        at: &Below<'_>,
        u: &Tensor,
        rotary: &Rotary,
        window: Option<i64>,
    ) -> Tensor {
        if at.has("self_attn.gate_proj.weight") {
            return self.linear(at, u);
        }
        if at.has("self_attn.q_proj.weight") {
            return self.grouped(at, u, rotary, window);
        }
        let project = |name: &str| at.linear(u, &format!("self_attn.qkv_proj.{name}"));
        let (query, key) = self.mixed(at, &project("q_proj"), &project("k_proj"));
        let (query, key) = self.normed(query, key, at.p("self_attn.qk_norm.temp"), rotary);
        let value = self.values(&project("v_proj_current"), &project("v_proj_delayed"));
        at.linear(&self.attend(&query, &key, &value, window), "self_attn.o_proj")
    }

    /// Grouped-query attention.
    fn grouped(&self, at: &Below<'_>, u: &Tensor, rotary: &Rotary, window: Option<i64>) -> Tensor {
        let heads = |name: &str| {
            let made = at.linear(u, &format!("self_attn.{name}_proj"));
            made.view([u.size()[0], -1, self.config.head_dim])
        };
        let normed = |name: &str| match at.has(&format!("self_attn.{name}_norm.weight")) {
            true => at.norm(&heads(name), &format!("self_attn.{name}_norm")),
            false => heads(name),
        };
        let (query, key) = (rotary.turn(&normed("q")), rotary.turn(&normed("k")));
        at.linear(&self.attend(&query, &key, &heads("v"), window), "self_attn.o_proj")
    }

    /// Linear attention over all pairs of a document.
    fn linear(&self, at: &Below<'_>, u: &Tensor) -> Tensor {
        let config = self.config;
        let (keys, group, dim) = (config.num_key_value_heads, config.group(), config.head_dim);
        let rates: Vec<f64> = (0..keys as u32).map(|head| config.linear_decay.rate(head)).collect();
        let rates = Tensor::from_slice(&rates).view([keys, 1, 1]);
        let project =
            |name: &str| at.linear(u, &format!("self_attn.{name}")).view([-1, keys, 1, dim]);
        let positive = |x: &Tensor| (x.elu() + 1.0).permute([1, 2, 0, 3]);
        let query = at.linear(u, "self_attn.q_proj").view([-1, keys, group, dim]);
        let (query, key) = (positive(&query), positive(&project("k_proj")));
        let value = project("v_proj").permute([1, 2, 0, 3]);
        let parts: Vec<Tensor> = self
            .input
            .spans
            .iter()
            .map(|span| {
                let part = |x: &Tensor| x.narrow(2, span.start, span.len);
                let place = Tensor::arange(span.len, (Kind::Double, u.device()));
                let apart = place.unsqueeze(1) - place.unsqueeze(0);
                let left = rates.pow(&apart.clamp_min(0.0)).tril(0).unsqueeze(1);
                let scores = part(&query).matmul(&part(&key).transpose(2, 3)) * left;
                let sum = scores.sum_dim_intlist(-1, true, Kind::Double) + 1e-6;
                let read = scores.matmul(&part(&value)) / sum;
                read.permute([2, 0, 1, 3]).reshape([span.len, -1])
            })
            .collect();
        let gate = at.linear(u, "self_attn.gate_proj").silu();
        at.linear(&(Tensor::cat(&parts, 0) * gate), "self_attn.o_proj")
    }

    /// Router and experts; `state` is the previous layer's router state, and becomes this layer's.
    fn mixture(
        &self,
        at: &Below<'_>,
        v: &Tensor,
        state: &mut Option<Tensor>,
        balance: &Tensor,
    ) -> Tensor {
        let experts = [at.p("mlp.experts.gate_up_proj"), at.p("mlp.experts.down_proj")];
        if at.has("mlp.gate.weight") {
            let probs = at.linear(v, "mlp.gate").softmax(-1, Kind::Double);
            return self.experts(v, &probs, balance, experts);
        }
        let mut own = at.linear(v, "mlp.gate.down_proj");
        if let Some(before) = &state {
            own += before * at.p("mlp.gate.router_states_scale");
        }
        let n = at.norm(&own, "mlp.gate.router_mlp.norm");
        *state = Some(own);
        let h = at.linear(&n, "mlp.gate.router_mlp.fc1").gelu("none");
        let h = at.linear(&h, "mlp.gate.router_mlp.fc2").gelu("none");
        let probs = at.linear(&h, "mlp.gate.router_mlp.out_proj").softmax(-1, Kind::Double);
        self.experts(v, &probs, balance, experts)
    }

    /// Convolutions and q-k mean.
    fn mixed(&self, at: &Below<'_>, q: &Tensor, k: &Tensor) -> (Tensor, Tensor) {
        let config = self.config;
        let p = |name: &str| at.p(&format!("self_attn.qkv_proj.{name}"));
        let (w0, b0) = (p("conv_qk_depthwise.weight"), p("conv_qk_depthwise.bias"));
        let (w1, b1) = (p("conv_qk_grouped.weight"), p("conv_qk_grouped.bias"));
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

    fn values(&self, current: &Tensor, delayed: &Tensor) -> Tensor {
        let nothing = delayed.new_zeros([1, delayed.size()[1]], (Kind::Double, delayed.device()));
        let delayed = shifted(delayed, &nothing, &self.input.spans);
        Tensor::cat(&[current, &delayed], 1).view([
            -1,
            self.config.num_key_value_heads,
            self.config.head_dim,
        ])
    }

    /// Softmax attention, where a query sees its own key and fewer than `window` before it.
    fn attend(&self, query: &Tensor, key: &Tensor, value: &Tensor, window: Option<i64>) -> Tensor {
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
                let place = Tensor::arange(span.len, (Kind::Int64, query.device()));
                let ago = place.unsqueeze(1) - place;
                let hidden = ago.lt(0).logical_or(&ago.ge(window.unwrap_or(i64::MAX)));
                let scores =
                    scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double);
                scores.matmul(&wide(value)).transpose(0, 1).reshape([span.len, -1])
            })
            .collect();
        Tensor::cat(&parts, 0)
    }

    /// Every expert computes every token; a token's weight is 0 for those that it did not choose.
    fn experts(
        &self,
        v: &Tensor,
        probs: &Tensor,
        balance: &Tensor,
        [gate_up, down]: [&Tensor; 2],
    ) -> Tensor {
        let config = self.config;
        let scores = if balance.numel() > 0 { probs.detach() + balance } else { probs.detach() };
        let (_, choice) = scores.topk(config.num_experts_per_tok, -1, true, false);
        let chosen = probs.zeros_like().scatter_value(1, &choice, 1.0);
        let mut weights = probs * chosen;
        if config.norm_topk_prob {
            weights = &weights / weights.sum_dim_intlist(1, true, Kind::Double);
        }
        let weight = |class: i64| weights.narrow(1, class, 1);
        let mut sum = match config.skip {
            SkipOutput::Identity => v * weight(config.num_experts),
            SkipOutput::Zero | SkipOutput::None => v.zeros_like(),
        };
        for expert in 0..config.num_experts {
            let both = v.linear(&gate_up.get(expert), None::<&Tensor>).chunk(2, 1);
            let out = (both[0].silu() * &both[1]).linear(&down.get(expert), None::<&Tensor>);
            sum += out * weight(expert);
        }
        sum
    }
}

/// Row t of the result is row t - 1 of `x`, or `first` where a span starts.
fn shifted(x: &Tensor, first: &Tensor, spans: &[AttentionSpan]) -> Tensor {
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

struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    fn new(config: &ZayaConfig, slides: bool, positions: &Tensor) -> Rotary {
        let dim = config.rotary_dim();
        let exponent =
            Tensor::arange_start_step(0, dim, 2, (Kind::Double, positions.device())) / dim as f64;
        let theta = match slides && config.sliding_rope_theta > 0.0 {
            true => config.sliding_rope_theta,
            false => config.rope_theta,
        };
        let frequency = Tensor::pow_scalar(theta, &exponent).reciprocal();
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
