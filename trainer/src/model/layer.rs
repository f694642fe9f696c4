//! The interface of sublayers: attention or feed-forward, between the norm before it and the residual scaling after it.
//!
//! A new kind is one file with a type that implements [`LayerKind`] and [`Layer`], a line in [`super::kinds`], and a
//! line in [`super::layers`] that constructs it.

use std::any::Any;

use contract::{Fault, Result};
use kernels::ops::OpsTable;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::cut::{Chunks, Cut};
use super::fold::ShardedWeights;
use super::gradients::Gradients;
use super::line::SharedRows;
use super::param::{ParamDeclarations, Weights};
use crate::refusal::refused;

/// The context of a pass over a micro-batch.
pub(super) struct Pass<'a> {
    /// The kernels to use.
    pub(super) ops: OpsTable,
    pub(super) config: &'a ZayaConfig,
    pub(super) chunks: &'a Chunks<'a>,
    /// The number of shards of the weights.
    pub(super) shards: i64,
    /// The weights; where [`Pass::folded`] shards them, flat buffers of this rank's shards.
    pub(super) weights: Weights<'a>,
    /// Which rank holds which shards.
    pub(super) folded: Option<ShardedWeights<'a>>,
    /// Balancing biases by layer.
    pub(super) balance: &'a [Tensor],
    /// `[D]` each: a scale of 1 and a bias of 0, where the residual is plain.
    pub(super) neutral: Option<[Tensor; 2]>,
    /// The dtype of the operands of large matmuls.
    pub(super) kind: Kind,
}

impl Pass<'_> {
    /// How many of `chunks` chunks go through a layer's shards together: one, unless shards are received from other
    /// ranks; then all, so that each shard is received once.
    pub(super) fn together(&self, chunks: usize) -> usize {
        if self.folded.is_some() { chunks } else { 1 }
    }

    /// The scale and the bias of a plain residual.
    pub(super) fn neutral(&self) -> Result<[&Tensor; 2]> {
        let missing = || Fault::bug("a pass over a plain residual has no scale of 1");
        self.neutral.as_ref().map(<[Tensor; 2]>::each_ref).ok_or_else(missing)
    }

    /// A matmul whose result is a weight's gradient; with several chunks it is one term of a sum.
    pub(super) fn gradient(&self, left: &Tensor, right: &Tensor) -> kernels::Result<Tensor> {
        match self.chunks.count() {
            1 => self.ops.matmul(left, right),
            _ => self.ops.matmul_part(left, right),
        }
    }

    /// A matmul over a sharded dimension; with several shards it is one term of a sum.
    pub(super) fn of_shard(&self, left: &Tensor, right: &Tensor) -> kernels::Result<Tensor> {
        match self.shards {
            1 => self.ops.matmul(left, right),
            _ => self.ops.matmul_part(left, right),
        }
    }
}

/// A sublayer's forward results, by chunk.
pub(super) struct Forward<S> {
    /// `[n, D]`: what is added to the residual.
    pub(super) out: Vec<Tensor>,
    /// `[n, R]`: the router state for the layers after this one.
    pub(super) state: Option<Vec<Tensor>>,
    /// Tokens by expert, and last those without one, i64; `None` without a router.
    pub(super) counts: Option<Tensor>,
    /// What its backward pass reads.
    pub(super) saved: S,
}

/// Gradients of a sublayer's inputs, by chunk.
pub(super) struct Backward {
    /// Of the normed residual, in [`Pass::kind`].
    pub(super) x: Vec<Tensor>,
    /// Of the router state, if there was one.
    pub(super) state: Option<Vec<Tensor>>,
}

/// The work of a pass, to count its operations.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerWork {
    /// Tokens.
    pub(super) tokens: f64,
    /// (query, key) pairs that see each other.
    pub(super) pairs: f64,
    /// Tokens that were routed to an expert of this layer.
    pub(super) routed: f64,
}

/// A layer's place in the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerPlace {
    /// Its index among the model's layers.
    pub(super) layer: usize,
    /// Whether an earlier layer has a router, whose state this layer receives.
    pub(super) state: bool,
}

/// What every kind of layer declares.
pub(super) trait LayerKind: Send + Sync + Sized + 'static {
    /// Declares its parameters, in canonical order.
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, place: LayerPlace) -> Self;

    /// Classes by which it counts its tokens: its experts, and last those without one. 0 without a router: then there
    /// are no balancing biases, and nothing is counted. Only a feed-forward may have one.
    fn classes(&self, _: &ZayaConfig) -> usize {
        0
    }

    /// Multiply-adds of a forward pass.
    fn products(&self, config: &ZayaConfig, work: LayerWork) -> f64;

    /// Bytes that it saves for a token, input and output included; a number of [`Pass::kind`] has `narrow` bytes.
    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64;

    /// Bytes of weights copied for a micro-batch where they are cut into several shards; 0 if they are read in place.
    fn weight_copies(&self, _: &ZayaConfig, _: u64, _: Cut) -> u64 {
        0
    }

    /// Bytes that the ranks of a line send each other, in a forward pass and in a backward pass; 0 where no token
    /// attends to another.
    fn shared_bytes(&self, _: &ZayaConfig, _: u64, _: SharedRows) -> [u64; 2] {
        [0; 2]
    }
}

/// An attention or a feed-forward.
///
/// Its gradients are written by hand, without autograd: the source fixes the order of every addition, and exactly
/// [`Layer::Saved`] is kept between the passes.
pub(super) trait Layer: LayerKind {
    /// What the backward pass reads.
    type Saved: 'static;

    /// `x` is the normed residual of each chunk, `[n, D]` in [`Pass::kind`]; `state` are the router states of earlier
    /// layers, which a layer without a router passes on.
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Self::Saved>>;

    /// Takes the gradients of [`Layer::forward`]'s results; gradients of the parameters are passed to `sink`.
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Self::Saved,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward>;

    /// The largest logit, from what [`Layer::forward`] saved, where there is attention.
    fn largest_logit(&self, _: &Pass<'_>, _: &Self::Saved) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// Adds a chunk's counts: integers, so any order gives the same sum.
pub(super) fn counted(sum: Option<Tensor>, own: Option<&Tensor>) -> Result<Option<Tensor>> {
    let Some(own) = own else { return Ok(sum) };
    let sum = match sum {
        Some(sum) => sum.f_add(own).map_err(refused)?,
        None => own.shallow_clone(),
    };
    Ok(Some(sum))
}

/// The state of each chunk, if there are states.
pub(super) fn by_chunk(state: Option<Vec<Tensor>>, chunks: usize) -> Vec<Option<Tensor>> {
    match state {
        Some(states) => states.into_iter().map(Some).collect(),
        None => (0..chunks).map(|_| None).collect(),
    }
}

/// A layer of any kind: [`Layer`] without the type of what it saves.
pub(super) trait AnyLayer: Send + Sync {
    /// See [`Layer::forward`].
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Box<dyn Any>>>;

    /// See [`Layer::backward`].
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Box<dyn Any>,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward>;

    /// See [`Layer::largest_logit`].
    fn largest_logit(&self, pass: &Pass<'_>, saved: &dyn Any) -> Result<Option<f64>>;

    /// See [`LayerKind::classes`].
    fn classes(&self, config: &ZayaConfig) -> usize;

    /// See [`LayerKind::products`].
    fn products(&self, config: &ZayaConfig, work: LayerWork) -> f64;

    /// See [`LayerKind::activation_bytes`].
    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64;

    /// See [`LayerKind::weight_copies`].
    fn weight_copies(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64;

    /// See [`LayerKind::shared_bytes`].
    fn shared_bytes(&self, config: &ZayaConfig, narrow: u64, rows: SharedRows) -> [u64; 2];
}

impl<L: Layer> AnyLayer for L {
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Box<dyn Any>>> {
        let Forward { out, state, counts, saved } = Layer::forward(self, pass, x, state)?;
        Ok(Forward { out, state, counts, saved: Box::new(saved) })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Box<dyn Any>,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward> {
        let saved = saved.downcast::<L::Saved>();
        let saved = saved.map_err(|_| Fault::bug("a layer was handed what another one kept"))?;
        Layer::backward(self, pass, *saved, grad, state, sink)
    }

    fn largest_logit(&self, pass: &Pass<'_>, saved: &dyn Any) -> Result<Option<f64>> {
        let saved = saved.downcast_ref::<L::Saved>();
        let saved = saved.ok_or_else(|| Fault::bug("a layer was handed what another one kept"))?;
        Layer::largest_logit(self, pass, saved)
    }

    fn classes(&self, config: &ZayaConfig) -> usize {
        LayerKind::classes(self, config)
    }

    fn products(&self, config: &ZayaConfig, work: LayerWork) -> f64 {
        LayerKind::products(self, config, work)
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64 {
        LayerKind::activation_bytes(self, config, narrow, cut)
    }

    fn weight_copies(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64 {
        LayerKind::weight_copies(self, config, narrow, cut)
    }

    fn shared_bytes(&self, config: &ZayaConfig, narrow: u64, rows: SharedRows) -> [u64; 2] {
        LayerKind::shared_bytes(self, config, narrow, rows)
    }
}

/// Constructs a layer of a kind.
pub(super) type LayerConstructor =
    fn(&mut ParamDeclarations<'_>, &ZayaConfig, LayerPlace) -> Box<dyn AnyLayer>;

/// The [`LayerConstructor`] of kind `L`.
pub(super) fn make<L: Layer>(
    params: &mut ParamDeclarations<'_>,
    config: &ZayaConfig,
    place: LayerPlace,
) -> Box<dyn AnyLayer> {
    Box::new(L::declare(params, config, place))
}
