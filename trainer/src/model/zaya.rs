//! The ZAYA1 model, top to bottom: `ZayaModel` of `modeling_zaya.py` in transformers, with its backward pass. That is
//! written by hand, layer by layer, so that nothing depends on the order in which autograd walks a graph.
//!
//! ```text
//! residual = (embedding[token] + bias) * scale
//! for each layer, first self_attn, then mlp:
//!     residual = scaled sum of layer(norm(residual)) and residual
//! loss     = cross-entropy of norm(residual) times the embedding, or a head of its own
//! ```
//!
//! A plain residual has no scales: it is the sum. With [`ActivationCheckpointing::LayerInputs`] a layer's activations
//! are recomputed from its input for the backward pass: the same calls, so the same bits.
//!
//! A micro-batch runs through the layers by chunk ([`super::cut`]): every tensor here is a list with one entry per
//! chunk, a single one where nothing is cut. Shapes: `N` tokens, `n` of a chunk, `D` width, `V` vocabulary.

use contract::{Fault, Result};
use tch::Tensor;

use super::activity::{LayerActivity, squares};
use super::gradients::{GradientSink, Gradients};
use super::kinds::{Attention, FeedForward};
use super::layer::{LayerPlace, Pass, Rows};
use super::layers::embedding::Embedding;
use super::layers::head::{Head, HeadGrads};
use super::layers::norm::{NormOutputGrads, RmsNorm, SavedNorm};
use super::layers::{attention, feed_forward};
use super::param::{ParamDeclarations, ParamSpec};
use super::sublayer::{Hidden, HiddenGrad, Names, Saved, Sublayer};
use super::{ActivationCheckpointing, ZayaConfig};
use crate::timing::{StepPart, part};

/// The model: its parameters as declared, and the layers that read them.
pub(super) struct Zaya {
    pub(super) params: Vec<ParamSpec>,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    head: Head,
}

/// A layer: attention, then feed-forward, each behind its norm (`input_layernorm`, `post_attention_layernorm`).
struct DecoderLayer {
    self_attn: Sublayer,
    mlp: Sublayer,
}

/// What is saved of a layer until its backward pass.
enum SavedLayer {
    All(Box<[Saved; 2]>),
    Inputs(Hidden),
}

/// The final normed residual, and everything saved before it, by chunk except for the layers.
struct Forward {
    embedded: Vec<Tensor>,
    layers: Vec<SavedLayer>,
    normed: Vec<SavedNorm>,
    hidden: Vec<Tensor>,
    counts: Vec<Option<Tensor>>,
}

/// The results of a micro-batch besides its gradients.
pub(super) struct MicroBatchResult {
    /// `[N]`: nats, 0 where there is no label.
    pub(super) losses: Tensor,
    /// Likewise, z-loss, if it has a coefficient.
    pub(super) z_losses: Option<Tensor>,
    /// By layer and router class.
    pub(super) counts: Vec<Option<Tensor>>,
}

impl Zaya {
    /// The model that the configuration describes.
    pub(super) fn new(config: &ZayaConfig) -> Zaya {
        let mut params = Vec::new();
        let mut root = ParamDeclarations::new(config, &mut params);
        let embedding = Embedding::declare(&mut root, config);
        // Whether a layer before has a router, whose state the next router receives.
        let mut state = false;
        let layer = |(layer, (kinds, window)): (usize, ((Attention, FeedForward), _))| {
            let place = LayerPlace { layer, state, window };
            state |= kinds.1 == FeedForward::Moe;
            DecoderLayer::declare(&mut root, config, place, kinds)
        };
        let layers = config.kinds().zip(config.windows()).enumerate().map(layer).collect();
        let norm = RmsNorm::declare(&mut root, config, "norm.weight", "final_norm.weight");
        let head = Head::declare(&mut root, config, &embedding);
        Zaya { params, embedding, layers, norm, head }
    }

    /// Forward, loss and backward of the sum of weighted token losses, with z-loss, over `label_count`.
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
        let HeadGrads { losses, z_losses, hidden, weights } =
            self.head.backward(pass, &forward.hidden, label_count, &mut sink)?;
        self.backward(pass, forward, hidden, weights, &mut sink)?;
        Ok(MicroBatchResult { losses, z_losses, counts })
    }

    /// The loss of every token, `[N]`: forward only.
    pub(super) fn losses(&self, pass: &Pass<'_>) -> Result<Tensor> {
        let hidden = self.forward(pass, ActivationCheckpointing::LayerInputs)?.hidden;
        self.head.losses(pass, &hidden)
    }

    /// The loss of every token, and 1 where another token is more probable than its label, `[N]` each: forward only.
    pub(super) fn scores(&self, pass: &Pass<'_>) -> Result<[Tensor; 2]> {
        let hidden = self.forward(pass, ActivationCheckpointing::LayerInputs)?.hidden;
        Ok([self.head.losses(pass, &hidden)?, self.head.misses(pass, &hidden)?])
    }

    /// Logits of every token in the order of chunks, `[N, V]`.
    pub(super) fn logits(&self, pass: &Pass<'_>) -> Result<Tensor> {
        let hidden = self.forward(pass, ActivationCheckpointing::LayerInputs)?.hidden;
        self.head.logits(pass, &hidden)
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
        // A layer reads the weights declared before the next layer, and the norm of that.
        let mut norms = self.layers.iter().map(|layer| &layer.self_attn.norm).chain([&self.norm]);
        norms.next().map_or(Ok(()), |first| first.wait(pass))?;
        let (embedded, residual) = self.embedding.forward(pass)?;
        let mut flow = Hidden { residual, state: None, normed: None };
        let (mut layers, mut counts) = (Vec::new(), Vec::new());
        for (layer, next) in self.layers.iter().zip(norms) {
            next.wait(pass)?;
            let inputs = (keep == ActivationCheckpointing::LayerInputs).then(|| flow.share());
            let (after, saved, router_counts) = layer.forward(pass, flow, Some(next))?;
            flow = after;
            counts.push(router_counts);
            layers.push(match inputs {
                None => SavedLayer::All(Box::new(saved)),
                Some(inputs) => SavedLayer::Inputs(inputs),
            });
        }
        // The head, and everything before the backward pass sends gradients.
        pass.wait(usize::MAX)?;
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
        let residual = last
            .map(|(normed, grad)| NormOutputGrads { normed, grad: Rows::Whole(grad), beside: None })
            .collect();
        let (mut grad, mut behind) = (HiddenGrad { residual, state: None }, &self.norm);
        for (layer, kept) in self.layers.iter().zip(kept).rev() {
            let saved = match kept {
                SavedLayer::All(saved) => *saved,
                SavedLayer::Inputs(inputs) => layer.forward(pass, inputs, None)?.1,
            };
            grad = layer.backward(pass, saved, grad, behind, sink)?;
            sink.settle_many(pass.ops)?;
            behind = &layer.self_attn.norm;
        }
        let residual = grad.through(pass, behind, sink)?;
        self.embedding.backward(pass, &embedded, &residual, head, sink)?;
        sink.settle(pass.ops)
    }
}

impl DecoderLayer {
    fn declare(
        root: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        place: LayerPlace,
        kinds: (Attention, FeedForward),
    ) -> DecoderLayer {
        let [first, second] = [
            ("input_layernorm.weight", "post_attention_residual_scale"),
            ("post_attention_layernorm.weight", "post_mlp_residual_scale"),
        ];
        let names = |number, (norm, scale)| Names { norm, scale, number };
        let self_attn = Sublayer::declare(root, config, place, names(0, first), |params| {
            attention(kinds.0, params, config, place)
        });
        let mlp = Sublayer::declare(root, config, place, names(1, second), |params| {
            feed_forward(kinds.1, params, config, place)
        });
        DecoderLayer { self_attn, mlp }
    }

    fn probe(&self, pass: &Pass<'_>, [attention, mlp]: &[Saved; 2]) -> Result<LayerActivity> {
        Ok(LayerActivity {
            residual: squares(&attention.residual)?,
            attention: squares(&attention.out(pass)?)?,
            feed_forward: squares(&mlp.out(pass)?)?,
            largest_logit: self.self_attn.layer.largest_logit(pass, &*attention.layer)?,
        })
    }

    /// Returns its output, what its backward pass reads, and its router's token counts by class. Without a `next` norm
    /// its output has no residual.
    fn forward(
        &self,
        pass: &Pass<'_>,
        hidden: Hidden,
        next: Option<&RmsNorm>,
    ) -> Result<(Hidden, [Saved; 2], Option<Tensor>)> {
        let (hidden, attention, _) = self.self_attn.forward(pass, hidden, Some(&self.mlp.norm))?;
        let (hidden, mlp, counts) = self.mlp.forward(pass, hidden, next)?;
        Ok((hidden, [attention, mlp], counts))
    }

    /// Takes the gradients of its output, and the norm that they reach; returns those of its input.
    fn backward(
        &self,
        pass: &Pass<'_>,
        [attention, mlp]: [Saved; 2],
        grad: HiddenGrad,
        behind: &RmsNorm,
        sink: &mut Gradients<'_>,
    ) -> Result<HiddenGrad> {
        let grad = self.mlp.backward(pass, mlp, grad, behind, sink)?;
        self.self_attn.backward(pass, attention, grad, &self.mlp.norm, sink)
    }
}
