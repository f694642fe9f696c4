//! The ZAYA1 model, top to bottom. Unlike `modeling_zaya.py` of transformers, the backward pass is written by hand,
//! layer by layer, so that nothing depends on the order in which autograd walks a graph.
//!
//! ```text
//! residual = (embedding[token] + bias) * scale
//! for each layer, first its attention, then its feed-forward:
//!     residual = scaled sum of layer(norm(residual)) and residual
//! loss     = cross-entropy of norm(residual) times the embedding, or a head of its own
//! ```
//!
//! A plain residual has no scales: it is the sum.
//!
//! With [`ActivationCheckpointing::LayerInputs`] a layer's activations are recomputed from its input for the backward
//! pass: the same calls, so the same bits.
//!
//! A micro-batch runs through the layers by chunk ([`super::cut`]): every tensor here is a list with one entry per
//! chunk, a single one where nothing is cut.

use std::any::Any;

use contract::{Fault, Result};
use kernels::ops::CrossEntropy;
use tch::{Device, Kind, Tensor};

use super::activity::{LayerActivity, squares};
use super::cut::{Chunks, joined};
use super::flow::{Hidden, HiddenGrad};
use super::gradients::{GradientSink, GradientTerm, Gradients};
use super::input::DeviceMicroBatch;
use super::kinds::{BalanceKind, ResidualKind, RouterKind};
use super::layer::{AnyLayer, Backward, LayerConstructor, LayerPlace, LayerWork, Pass};
use super::layers::embedding::Embedding;
use super::layers::norm::{NormOutputGrads, Residual, RmsNorm, SavedNorm};
use super::layers::{head, make_attention, make_feed_forward};
use super::line::SharedRows;
use super::param::{ParamDeclarations, ParamId, ParamSpec, Weights, initial};
use super::{
    ActivationCheckpointing, MicroBatchContext, MicroBatchOptions, SkipOutput, ZayaConfig,
};
use crate::refusal::refused;
use crate::timing::{StepPart, part};

/// Every parameter in canonical order.
pub fn parameters(config: &ZayaConfig) -> Vec<ParamSpec> {
    Zaya::new(config).params
}

/// Classes by which each layer counts its tokens: its experts, and last those without one; 0 without a router.
pub(crate) fn router_classes(config: &ZayaConfig) -> Vec<usize> {
    Zaya::new(config).layers.iter().map(|layer| layer.classes(config)).collect()
}

/// Balancing biases of each layer: one for each class of its router; 0 without a router, and where nothing balances it.
pub(crate) fn balance_sizes(config: &ZayaConfig) -> Vec<usize> {
    let biases = match config.balance {
        BalanceKind::Bias => config.router_classes() as usize,
        BalanceKind::None => 0,
    };
    let layer = |classes: usize| if classes > 0 { biases } else { 0 };
    router_classes(config).into_iter().map(layer).collect()
}

/// The initial balancing biases, one tensor per layer: 0, and -1 for the skip class; empty where there are none.
pub fn init_balance(config: &ZayaConfig) -> Vec<Tensor> {
    let skip = i64::from(config.skip != SkipOutput::None);
    let biases = |classes: usize| {
        let biases = Tensor::zeros([classes as i64], tch::kind::FLOAT_CPU);
        if classes > 0 {
            let _ = biases.narrow(0, classes as i64 - skip, skip).fill_(-1.0);
        }
        biases
    };
    balance_sizes(config).into_iter().map(biases).collect()
}

/// The initial weights, in f32, on CPU.
pub fn init(config: &ZayaConfig, seed: u64) -> kernels::Result<Vec<Tensor>> {
    let whole = |spec: &ParamSpec| {
        Ok(initial(spec, seed, 0..spec.elements())?.f_reshape(spec.shape.as_slice())?)
    };
    parameters(config).iter().map(whole).collect()
}

/// A scale of 1 and a bias of 0.
fn neutral(config: &ZayaConfig, device: Device) -> kernels::Result<[Tensor; 2]> {
    let options = (Kind::Float, device);
    let size = [config.hidden_size];
    Ok([Tensor::f_ones(size, options)?, Tensor::f_zeros(size, options)?])
}

/// The model: its parameters as declared, and the layers that read them.
pub(super) struct Zaya {
    params: Vec<ParamSpec>,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    /// `[V, D]`: the embedding, or a matrix of its own.
    head: ParamId,
}

/// A layer: attention, then feed-forward.
struct DecoderLayer {
    attention: Sublayer,
    feed_forward: Sublayer,
}

/// A sublayer: computes what is added to the residual from the normed residual.
struct Sublayer {
    norm: RmsNorm,
    layer: Box<dyn AnyLayer>,
    scale: Residual,
}

/// What is saved of a layer until its backward pass.
enum SavedLayer {
    All(Box<[Saved; 2]>),
    Inputs(Hidden),
}

/// What a sublayer saves for its backward pass, by chunk except for `layer`.
struct Saved {
    /// The residual at its input.
    residual: Vec<Tensor>,
    normed: Vec<SavedNorm>,
    layer: Box<dyn Any>,
    out: Vec<Tensor>,
}

/// The final normed residual, and everything saved before it, by chunk except for the layers.
struct Forward {
    embedded: Vec<Tensor>,
    layers: Vec<SavedLayer>,
    normed: Vec<SavedNorm>,
    hidden: Vec<Tensor>,
    counts: Vec<Option<Tensor>>,
}

/// The head's losses and gradients.
struct HeadGrads {
    /// `[N]`, in the order of the micro-batch.
    losses: Tensor,
    /// Gradient of the final normed residual, by chunk.
    hidden: Vec<Tensor>,
    /// Gradient of the embedding as the head, if there is one chunk; otherwise the head's gradient is in the sink
    /// already.
    weights: Option<Tensor>,
}

/// The results of a micro-batch besides its gradients.
pub(super) struct MicroBatchResult {
    /// `[N]`: nats, 0 where there is no label.
    pub(super) losses: Tensor,
    /// By layer and router class.
    pub(super) counts: Vec<Option<Tensor>>,
}

impl Zaya {
    /// The model that the configuration describes.
    pub(super) fn new(config: &ZayaConfig) -> Zaya {
        let mut params = Vec::new();
        let mut root = ParamDeclarations::new(config, &mut params);
        let embedding = Embedding::declare(&mut root, config);
        let mut layers: Vec<DecoderLayer> = Vec::new();
        // Each list repeats where it ends.
        let kinds = config.layers.iter().cycle().zip(config.feed_forward.iter().cycle());
        let kinds = kinds.take(config.num_hidden_layers as usize);
        for (layer, (attention, feed_forward)) in kinds.enumerate() {
            let state = layers.iter().any(|before| before.classes(config) > 0);
            let makes = [make_attention(*attention), make_feed_forward(*feed_forward)];
            let place = LayerPlace { layer, state };
            layers.push(DecoderLayer::declare(&mut root, config, place, makes));
        }
        let norm = RmsNorm::declare(&mut root, config, "norm.weight", "final_norm.weight");
        let head = match config.tie_word_embeddings {
            true => embedding.tokens,
            false => root.head([config.vocab_size, config.hidden_size]),
        };
        Zaya { params, embedding, layers, norm, head }
    }

    /// Runs a pass over `input` with these weights, in canonical order, and balancing biases.
    pub(super) fn with<T>(
        &self,
        MicroBatchContext { options, line, folded }: MicroBatchContext<'_>,
        config: &ZayaConfig,
        weights: &[Tensor],
        balance: &[Tensor],
        input: &DeviceMicroBatch,
        work: impl FnOnce(&Pass<'_>) -> Result<T>,
    ) -> Result<T> {
        let _guard = tch::no_grad_guard();
        let MicroBatchOptions { ops, cut, .. } = options;
        let chunks = &Chunks::new(config, input, cut.chunks, line)?;
        let (weights, shards) = (Weights(weights), cut.shards as i64);
        let table = &weights[self.embedding.tokens];
        let neutral = match config.residual {
            ResidualKind::Scaled => None,
            ResidualKind::Plain => Some(neutral(config, table.device()).map_err(refused)?),
        };
        let kind = table.kind();
        work(&Pass { ops, config, chunks, shards, weights, folded, balance, neutral, kind })
    }

    /// Forward, loss and backward of the sum of weighted token losses over `label_count`.
    pub(super) fn train(
        &self,
        pass: &Pass<'_>,
        label_count: u64,
        keep: ActivationCheckpointing,
        sink: &mut dyn GradientSink,
    ) -> Result<MicroBatchResult> {
        let _watch = part(StepPart::Stream);
        let mut forward = self.forward(pass, keep)?;
        let counts = std::mem::take(&mut forward.counts);
        let mut sink = Gradients::new(sink, pass.chunks.shared());
        let HeadGrads { losses, hidden, weights } = {
            let _watch = part(StepPart::Head);
            self.head(pass, &forward.hidden, label_count, &mut sink)?
        };
        self.backward(pass, forward, hidden, weights, &mut sink)?;
        Ok(MicroBatchResult { losses, counts })
    }

    /// Losses, and gradients of their weighted sum over `label_count`.
    fn head(
        &self,
        pass: &Pass<'_>,
        hidden: &[Tensor],
        label_count: u64,
        sink: &mut Gradients<'_>,
    ) -> Result<HeadGrads> {
        let (table, hidden) =
            head::widened(pass, &pass.weights[self.head], hidden).map_err(refused)?;
        let mut weights = None;
        let tied = self.head == self.embedding.tokens;
        let term = if tied { GradientTerm::First } else { GradientTerm::Only };
        let mut found: Vec<_> = hidden.iter().map(|_| None).collect();
        for chunk in pass.chunks.by_leaf() {
            let head = head::of(pass, pass.chunks.of(chunk), &table, &hidden[chunk]);
            let back =
                pass.ops.cross_entropy_backward(head, label_count as f64).map_err(refused)?;
            match pass.chunks.count() {
                1 if tied => weights = Some(back.weights),
                _ => sink.of(chunk).term(self.head, term, back.weights.into())?,
            }
            let hidden = back.hidden.f_to_kind(pass.kind).map_err(refused)?;
            found[chunk] = Some((back.losses, hidden));
        }
        let (losses, hidden): (Vec<_>, Vec<_>) = found.into_iter().flatten().unzip();
        let losses = pass.chunks.in_sequence(&losses).map_err(refused)?;
        Ok(HeadGrads { losses, hidden, weights })
    }

    /// The loss of every token, `[N]`: forward only.
    pub(super) fn losses(&self, pass: &Pass<'_>) -> Result<Tensor> {
        let hidden = self.forward(pass, ActivationCheckpointing::LayerInputs)?.hidden;
        self.by_token(pass, &hidden, |head| pass.ops.cross_entropy(head))
    }

    /// The loss of every token, and 1 where another token is more probable than its label, `[N]` each: forward only.
    pub(super) fn scores(&self, pass: &Pass<'_>) -> Result<[Tensor; 2]> {
        let hidden = self.forward(pass, ActivationCheckpointing::LayerInputs)?.hidden;
        let losses = self.by_token(pass, &hidden, |head| pass.ops.cross_entropy(head))?;
        Ok([losses, self.by_token(pass, &hidden, |head| head::misses(pass.ops, &head))?])
    }

    /// A number of every token from the head, `[N]`, in the order of the micro-batch.
    fn by_token(
        &self,
        pass: &Pass<'_>,
        hidden: &[Tensor],
        compute: impl Fn(CrossEntropy<'_>) -> kernels::Result<Tensor>,
    ) -> Result<Tensor> {
        let (table, hidden) =
            head::widened(pass, &pass.weights[self.head], hidden).map_err(refused)?;
        let chunks = pass.chunks.iter().zip(&hidden);
        let numbers = chunks.map(|(chunk, hidden)| compute(head::of(pass, chunk, &table, hidden)));
        let numbers = numbers.collect::<kernels::Result<Vec<_>>>();
        numbers.and_then(|numbers| pass.chunks.in_sequence(&numbers)).map_err(refused)
    }

    /// Logits of every token in the order of chunks, `[N, V]`.
    pub(super) fn logits(&self, pass: &Pass<'_>) -> Result<Tensor> {
        let hidden = self.forward(pass, ActivationCheckpointing::LayerInputs)?.hidden;
        let (table, hidden) =
            head::widened(pass, &pass.weights[self.head], &hidden).map_err(refused)?;
        let logits = |hidden| {
            let logits = pass.ops.matmul(hidden, &table.f_tr()?)?;
            Ok(logits.f_to_kind(Kind::Float)?)
        };
        let logits = hidden.iter().map(logits).collect::<kernels::Result<Vec<_>>>();
        logits.and_then(|logits| joined(&logits, 0)).map_err(refused)
    }

    /// Statistics of each layer's activations: forward only.
    pub(super) fn probe(&self, pass: &Pass<'_>) -> Result<Vec<LayerActivity>> {
        let kept = self.forward(pass, ActivationCheckpointing::Everything)?.layers;
        let layer = |(layer, kept): (&DecoderLayer, SavedLayer)| match kept {
            SavedLayer::All(saved) => layer.probe(pass, &saved),
            SavedLayer::Inputs(_) => {
                Err(Fault::bug("a layer saved less for its backward pass than was asked"))
            }
        };
        self.layers.iter().zip(kept).map(layer).collect()
    }

    fn forward(&self, pass: &Pass<'_>, keep: ActivationCheckpointing) -> Result<Forward> {
        let (embedded, residual) = self.embedding.forward(pass)?;
        let mut flow = Hidden { residual, state: None, normed: None };
        let (mut layers, mut counts) = (Vec::new(), Vec::new());
        let next = self.layers.iter().skip(1).map(|layer| &layer.attention.norm);
        for (layer, next) in self.layers.iter().zip(next.chain([&self.norm])) {
            let inputs = (keep == ActivationCheckpointing::LayerInputs).then(|| flow.share());
            let (after, saved, router_counts) = layer.forward(pass, flow, Some(next))?;
            flow = after;
            counts.push(router_counts);
            layers.push(match inputs {
                None => SavedLayer::All(Box::new(saved)),
                Some(inputs) => SavedLayer::Inputs(inputs),
            });
        }
        let (hidden, normed) = flow.normed(pass, &self.norm)?;
        Ok(Forward { embedded, layers, normed, hidden, counts })
    }

    /// Takes the gradients of the final normed residual, and of the embedding as the head.
    fn backward(
        &self,
        pass: &Pass<'_>,
        forward: Forward,
        hidden: Vec<Tensor>,
        head: Option<Tensor>,
        sink: &mut Gradients<'_>,
    ) -> Result<()> {
        let Forward { embedded, layers: kept, normed, hidden: left, .. } = forward;
        drop(left);
        let last = normed.into_iter().zip(hidden);
        let residual =
            last.map(|(normed, grad)| NormOutputGrads { normed, grad, beside: None }).collect();
        let (mut grad, mut behind) = (HiddenGrad { residual, state: None }, &self.norm);
        for (layer, kept) in self.layers.iter().zip(kept).rev() {
            let saved = match kept {
                SavedLayer::All(saved) => *saved,
                SavedLayer::Inputs(inputs) => layer.forward(pass, inputs, None)?.1,
            };
            grad = layer.backward(pass, saved, grad, behind, sink)?;
            sink.settle(pass.ops)?;
            behind = &layer.attention.norm;
        }
        let residual = grad.through(pass, behind, sink)?;
        self.embedding.backward(pass, &embedded, &residual, head, sink)?;
        sink.settle(pass.ops)
    }

    /// FLOPs of forward and backward over `tokens`, of which each layer routes `routed` to experts, with `pairs` of a
    /// query and a key that see each other.
    pub(super) fn flops(
        &self,
        config: &ZayaConfig,
        tokens: u64,
        routed: &[u64],
        pairs: u64,
    ) -> f64 {
        let work = |routed: u64| LayerWork {
            tokens: tokens as f64,
            pairs: pairs as f64,
            routed: routed as f64,
        };
        let layers = self.layers.iter().zip(routed).map(|(layer, routed)| {
            layer.halves().map(|half| half.layer.products(config, work(*routed))).sum::<f64>()
        });
        // A matmul of m x k and k x n is 2 m k n; the backward pass is twice the forward pass.
        3.0 * 2.0 * (layers.sum::<f64>() + head::products(config, tokens as f64))
    }

    /// Bytes that the ranks of a line send each other for a micro-batch with these shared rows, without gradients of
    /// weights and losses.
    pub(super) fn shared_bytes(
        &self,
        config: &ZayaConfig,
        narrow: u64,
        keep: ActivationCheckpointing,
        rows: SharedRows,
    ) -> u64 {
        let layer = |layer: &DecoderLayer| {
            let halves = layer.halves().map(|half| half.layer.shared_bytes(config, narrow, rows));
            let passes = halves.map(|[forward, back]| match keep {
                ActivationCheckpointing::Everything => forward + back,
                // Recomputation gathers them again.
                ActivationCheckpointing::LayerInputs => 2 * forward + back,
            });
            passes.sum::<u64>()
        };
        self.layers.iter().map(layer).sum()
    }

    /// Bytes that a micro-batch of `tokens` holds at the head, with its logits, and at most when only one layer's
    /// activations remain; a number of [`Pass::kind`] has `narrow` bytes.
    pub(super) fn activation_bytes(
        &self,
        config: &ZayaConfig,
        tokens: u64,
        narrow: u64,
        attending: u64,
        on_device: bool,
        MicroBatchOptions { keep, cut, .. }: MicroBatchOptions,
    ) -> [u64; 2] {
        let routed = self.layers.iter().any(|layer| layer.classes(config) > 0);
        let state = match config.router {
            RouterKind::Mlp if routed => config.router_hidden_size as u64,
            _ => 0,
        };
        let width = config.hidden_size as u64;
        // The residual at each sublayer's input, f32, and the factors of its norm.
        let size = |half: &Sublayer| {
            tokens * (half.layer.activation_bytes(config, narrow, cut) + 4 * width + 4)
        };
        let halves = |layer: &DecoderLayer| [&layer.attention, &layer.feed_forward].map(size);
        let copies = |layer: &DecoderLayer| -> u64 {
            let copied = layer.halves().map(|half| half.layer.weight_copies(config, narrow, cut));
            if cut.shards > 1 { copied.sum() } else { 0 }
        };
        let head = head::activation_bytes(config, tokens / cut.chunks, narrow, on_device);
        // At the head: the embedded tokens, and the residual before and after the final norm with their gradients.
        // Later: the embedded tokens, and gradients of the residual on both sides of a sublayer.
        let [ends, beside] = [5, 3].map(|rows| rows * 4 * tokens * width);
        // A backward pass adds gradients of about a third of what was saved: the feed-forward's for one chunk at a
        // time. When attention's backward pass begins, the feed-forward's saved tensors have been freed.
        let back = |layer: &DecoderLayer| -> u64 {
            let [attention, rest] = halves(layer);
            let rest = attention + rest + rest / (3 * cut.chunks);
            rest.max(attention + attention / 3 + attending) + beside + copies(layer)
        };
        let last = self.layers.iter().map(back).max().unwrap_or(0);
        match keep {
            ActivationCheckpointing::Everything => {
                let kept =
                    |layer: &DecoderLayer| halves(layer).into_iter().sum::<u64>() + copies(layer);
                let kept = self.layers.iter().map(kept).sum::<u64>();
                [kept + ends + head.max(attending), last]
            }
            ActivationCheckpointing::LayerInputs => {
                let inputs = tokens * 4 * (width + state);
                let layers = (1..).zip(&self.layers);
                let at = layers.map(|(number, layer)| number * inputs + back(layer));
                let most = self.layers.len() as u64 * inputs + ends + head;
                [at.fold(most, u64::max), last]
            }
        }
    }
}

impl DecoderLayer {
    fn declare(
        root: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        place: LayerPlace,
        [attention, feed_forward]: [LayerConstructor; 2],
    ) -> DecoderLayer {
        let mut half = |number: usize, (norm, scale): (&str, &str), make: LayerConstructor| {
            // Zyphra counts sublayers and scales the residual at their inputs; we scale it at the previous output.
            let (name, hf_number) = (format!("layers.{}", place.layer), 2 * place.layer + number);
            let next = match hf_number + 1 < 2 * config.num_hidden_layers as usize {
                true => format!("layers.{}.res_scale", hf_number + 1),
                false => "res_scale".to_owned(),
            };
            let mut scope = root.inside(&name, &format!("layers.{hf_number}"));
            let norm = RmsNorm::declare(&mut scope, config, norm, "input_norm.weight");
            let layer = make(&mut scope, config, place);
            let mut scope = root.inside(&format!("{name}.{scale}"), &next);
            Sublayer { norm, layer, scale: Residual::declare(&mut scope, config) }
        };
        let [first, second] = [
            ("input_layernorm.weight", "post_attention_residual_scale"),
            ("post_attention_layernorm.weight", "post_mlp_residual_scale"),
        ];
        DecoderLayer {
            attention: half(0, first, attention),
            feed_forward: half(1, second, feed_forward),
        }
    }

    /// Classes of its router; 0 if it has no router.
    fn classes(&self, config: &ZayaConfig) -> usize {
        self.feed_forward.layer.classes(config)
    }

    fn probe(
        &self,
        pass: &Pass<'_>,
        [attention, feed_forward]: &[Saved; 2],
    ) -> Result<LayerActivity> {
        Ok(LayerActivity {
            residual: squares(&attention.residual)?,
            attention: squares(&attention.out)?,
            feed_forward: squares(&feed_forward.out)?,
            largest_logit: self.attention.layer.largest_logit(pass, &*attention.layer)?,
        })
    }

    fn halves(&self) -> impl Iterator<Item = &Sublayer> {
        [&self.attention, &self.feed_forward].into_iter()
    }

    /// Returns its output, what its backward pass reads, and its router's token counts by class. Also computes the next
    /// norm of its output, if that is wanted.
    fn forward(
        &self,
        pass: &Pass<'_>,
        flow: Hidden,
        next: Option<&RmsNorm>,
    ) -> Result<(Hidden, [Saved; 2], Option<Tensor>)> {
        let next_norm = Some(&self.feed_forward.norm);
        let (flow, attention, _) = self.attention.forward(pass, flow, next_norm)?;
        let (flow, feed_forward, counts) = self.feed_forward.forward(pass, flow, next)?;
        Ok((flow, [attention, feed_forward], counts))
    }

    /// Takes the gradients of its output, and the norm that they reach; returns those of its input.
    fn backward(
        &self,
        pass: &Pass<'_>,
        [attention, feed_forward]: [Saved; 2],
        grad: HiddenGrad,
        behind: &RmsNorm,
        sink: &mut Gradients<'_>,
    ) -> Result<HiddenGrad> {
        let grad = self.feed_forward.backward(pass, feed_forward, grad, behind, sink)?;
        self.attention.backward(pass, attention, grad, &self.feed_forward.norm, sink)
    }
}

impl Sublayer {
    fn forward(
        &self,
        pass: &Pass<'_>,
        mut flow: Hidden,
        next: Option<&RmsNorm>,
    ) -> Result<(Hidden, Saved, Option<Tensor>)> {
        // The residual is f32; the operands of a layer's matmuls have the dtype of their weights.
        let (x, normed) = flow.normed(pass, &self.norm)?;
        let Hidden { residual, state, .. } = flow;
        let made = self.layer.forward(pass, &x, state)?;
        let sides = made.out.iter().zip(&residual);
        let (after, next) = match next {
            None => {
                let after = sides.map(|(out, residual)| self.scale.forward(pass, out, residual));
                (after.collect::<Result<_>>()?, None)
            }
            Some(next) => {
                let after =
                    sides.map(|(out, residual)| self.scale.forward_norm(pass, out, residual, next));
                let (after, normed) = after.collect::<Result<Vec<_>>>()?.into_iter().unzip();
                (after, Some(normed))
            }
        };
        let saved = Saved { residual, normed, layer: made.saved, out: made.out };
        Ok((Hidden { residual: after, state: made.state, normed: next }, saved, made.counts))
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: HiddenGrad,
        behind: &RmsNorm,
        sink: &mut Gradients<'_>,
    ) -> Result<HiddenGrad> {
        let Saved { residual, normed, layer, out } = saved;
        let (mut outs, mut besides) = (Vec::new(), Vec::new());
        let sides = out.iter().zip(&residual);
        for (chunk, ((out, residual), returned)) in sides.zip(grad.residual).enumerate() {
            let (scale, sink) = (&self.scale, &mut sink.of(chunk));
            let (out, beside) = scale.backward_norm(pass, out, residual, behind, returned, sink)?;
            outs.push(out);
            besides.push(beside);
        }
        drop((out, residual));
        let Backward { x, state } = self.layer.backward(pass, layer, &outs, grad.state, sink)?;
        let residual = normed.into_iter().zip(x).zip(besides);
        let residual = residual.map(|((normed, grad), beside)| NormOutputGrads {
            normed,
            grad,
            beside: Some(beside),
        });
        Ok(HiddenGrad { residual: residual.collect(), state })
    }
}
