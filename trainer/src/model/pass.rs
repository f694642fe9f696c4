//! Forward and backward through the whole model, layer by layer.
//!
//! The backward pass is written out rather than recorded: every addition has its place in this text, nothing depends
//! on the order in which a graph is walked, and what is kept between the passes is what the `Saved` types name. With
//! [`Keep::LayerInputs`] it is made a second time from what entered the layer: the same calls, so the same bits.

use tch::{Kind, Tensor};

use super::attention::{self, Context};
use super::input::Prepared;
use super::layers::{self, Layer, Outer};
use super::norm::Normed;
use super::rotary::Rotary;
use super::router::{self, Routes};
use super::{Keep, LeafOutput, ZayaConfig, experts, head, product};
use crate::timing::{Part, part};

/// What is kept of one layer until its backward pass.
enum Kept {
    All(Box<Saved>),
    /// The stream and the router state that entered.
    Inputs(Tensor, Option<Tensor>),
}

/// What one layer needs for its backward pass.
struct Saved {
    /// The stream that entered.
    stream: Tensor,
    attention_normed: Normed,
    /// The normed stream.
    u: Tensor,
    attention: attention::Saved,
    attention_out: Tensor,
    /// The stream after attention.
    middle: Tensor,
    mlp_normed: Normed,
    v: Tensor,
    router: router::Saved,
    experts: experts::Saved,
    mlp_out: Tensor,
}

/// The final normed stream, and all that led there.
struct Forward {
    embedded: Tensor,
    layers: Vec<Kept>,
    normed: Normed,
    hidden: Tensor,
    counts: Vec<Vec<u64>>,
}

/// One leaf; see [`super::leaf`].
pub(super) fn leaf(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &Prepared,
    (divisor, keep): (u64, Keep),
) -> LeafOutput {
    let _guard = tch::no_grad_guard();
    let _watch = part(Part::Stream);
    let (outer, layers) = layers::split(config, params);
    let rotary = Rotary::new(config, &input.positions);
    let context = Context { config, input, rotary: &rotary };
    let forward = forward(&context, &outer, &layers, balance, keep);
    let head =
        timed(Part::Head, || head::run(config, outer.embedding, &forward.hidden, input, divisor));
    let counts = forward.counts.clone();
    let grads =
        backward(&context, &outer, &layers, balance, forward, (head.hidden, head.embedding));
    LeafOutput {
        loss: head.losses.sum(Kind::Double).double_value(&[]),
        labels: input.label_count,
        grads,
        token_losses: head.losses,
        counts,
    }
}

/// The sum of token losses; see [`super::losses`].
pub(super) fn losses(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &Prepared,
) -> f64 {
    let _guard = tch::no_grad_guard();
    let (outer, layers) = layers::split(config, params);
    let rotary = Rotary::new(config, &input.positions);
    let context = Context { config, input, rotary: &rotary };
    let hidden = forward(&context, &outer, &layers, balance, Keep::LayerInputs).hidden;
    head::losses(config, outer.embedding, &hidden, input).sum(Kind::Double).double_value(&[])
}

/// Logits of every token; see [`super::logits`].
pub(super) fn logits(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &Prepared,
) -> Tensor {
    let _guard = tch::no_grad_guard();
    let (outer, layers) = layers::split(config, params);
    let rotary = Rotary::new(config, &input.positions);
    let context = Context { config, input, rotary: &rotary };
    let hidden = forward(&context, &outer, &layers, balance, Keep::LayerInputs).hidden;
    product::wide(product::of(&hidden, &outer.embedding.tr()))
}

fn forward(
    context: &Context,
    outer: &Outer,
    layers: &[Layer],
    balance: &[Tensor],
    keep: Keep,
) -> Forward {
    let embedded = outer.embedding.index_select(0, &context.input.tokens) + outer.input_bias;
    let mut stream = &embedded * outer.input_scale;
    let (mut saved, mut counts, mut state) = (Vec::new(), Vec::new(), None);
    for (layer, balance) in layers.iter().zip(balance) {
        let inputs = (keep == Keep::LayerInputs).then(|| {
            Kept::Inputs(stream.shallow_clone(), state.as_ref().map(Tensor::shallow_clone))
        });
        let (after, own, routes, own_counts) = layer.forward(context, stream, state, balance);
        (stream, state) = (after, Some(routes.state));
        saved.push(inputs.unwrap_or_else(|| Kept::All(Box::new(own))));
        counts.push(own_counts);
    }
    let (hidden, normed) = outer.norm.forward(&stream);
    let hidden = hidden.to_kind(outer.embedding.kind());
    Forward { embedded, layers: saved, normed, hidden, counts }
}

fn backward(
    context: &Context,
    outer: &Outer,
    layers: &[Layer],
    balance: &[Tensor],
    forward: Forward,
    (hidden, mut embedding): (Tensor, Tensor),
) -> Vec<Tensor> {
    let Forward { embedded, layers: saved, normed, .. } = forward;
    let (mut stream, norm) = outer.norm.backward(normed, &hidden);
    let (mut by_layer, mut state) = (Vec::new(), None);
    for ((layer, balance), kept) in layers.iter().zip(balance).zip(saved).rev() {
        let saved = match kept {
            Kept::All(saved) => *saved,
            Kept::Inputs(stream, state) => layer.forward(context, stream, state, balance).1,
        };
        let (before, state_before, params) = layer.backward(context, saved, stream, state);
        (stream, state) = (before, state_before);
        by_layer.push(params);
    }
    let columns = |x: &Tensor| x.sum_dim_intlist(0, false, Kind::Float);
    let scale = columns(&(&stream * embedded));
    let bias = columns(&stream) * outer.input_scale;
    // The head's part came first; the input's part is added to it, token by token in order.
    let _ = embedding.index_add_(0, &context.input.tokens, &(stream * outer.input_scale));
    let mut grads = vec![embedding, scale, bias];
    grads.extend(by_layer.into_iter().rev().flatten());
    grads.push(norm);
    grads
}

/// `work`, on the watch of `one` part.
fn timed<T>(one: Part, work: impl FnOnce() -> T) -> T {
    let _watch = part(one);
    work()
}

impl Layer<'_> {
    fn forward(
        &self,
        context: &Context,
        stream: Tensor,
        state: Option<Tensor>,
        balance: &Tensor,
    ) -> (Tensor, Saved, Routes, Vec<u64>) {
        // The stream is f32; what the products of a layer see has the kind of their weights.
        let (u, attention_normed) = self.attention_norm.forward(&stream);
        let u = u.to_kind(self.attention.wq.kind());
        let (attention_out, attention) =
            timed(Part::Attention, || self.attention.forward(context, &u));
        let middle = self.attention_residual.forward(&attention_out, &stream);
        let (v, mlp_normed) = self.mlp_norm.forward(&middle);
        let v = v.to_kind(self.experts.gate_up.kind());
        let (routes, router) = timed(Part::Router, || self.router.forward(&v, state, balance));
        let (mlp_out, counts, experts) = timed(Part::Experts, || self.experts.forward(&v, &routes));
        let after = self.mlp_residual.forward(&mlp_out, &middle);
        let saved = Saved {
            stream,
            attention_normed,
            u,
            attention,
            attention_out,
            middle,
            mlp_normed,
            v,
            router,
            experts,
            mlp_out,
        };
        (after, saved, routes, counts)
    }

    /// Gradients of the stream and of the router state that entered, and of the parameters in canonical order.
    fn backward(
        &self,
        context: &Context,
        saved: Saved,
        grad: Tensor,
        state: Option<Tensor>,
    ) -> (Tensor, Option<Tensor>, Vec<Tensor>) {
        let mlp = self.mlp_residual.backward(&saved.mlp_out, &saved.middle, &grad);
        let experts = timed(Part::ExpertsBack, || self.experts.backward(saved.experts, &mlp.out));
        let router = timed(Part::RouterBack, || {
            self.router.backward(saved.router, &saved.v, &experts.weight, state)
        });
        let inputs = product::wide(experts.input) + router.input;
        let (inner, mlp_norm) = self.mlp_norm.backward(saved.mlp_normed, &inputs);
        let middle = mlp.stream + inner;
        let attended =
            self.attention_residual.backward(&saved.attention_out, &saved.stream, &middle);
        let (u, attention) = timed(Part::AttentionBack, || {
            self.attention.backward(context, &saved.u, saved.attention, &attended.out)
        });
        let (inner, attention_norm) = self.attention_norm.backward(saved.attention_normed, &u);
        let mut params = vec![attention_norm];
        params.extend(attention);
        params.extend(attended.params);
        params.push(mlp_norm);
        params.extend(router.params);
        params.extend(experts.params);
        params.extend(mlp.params);
        (attended.stream + inner, router.before, params)
    }
}
