//! What a layer is: an attention or a feed-forward, between the norm before it and the residual scaling after it.
//!
//! A new kind is one file with a type that implements [`LayerKind`] and [`Layer`], a line in [`super::kinds`], and the one by
//! which [`super::layers`] makes it.

use std::any::Any;

use contract::{Fault, Result};
use kernels::ops::Table;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::cut::{Chunks, Cut};
use super::fold::Folded;
use super::gradients::Gradients;
use super::line::SharedRows;
use super::param::{Declare, Weights};
use crate::refusal::refused;

/// What a micro-batch is computed with.
pub(super) struct Pass<'a> {
    /// By which operations.
    pub(super) ops: Table,
    pub(super) config: &'a ZayaConfig,
    pub(super) chunks: &'a Chunks<'a>,
    /// Into how many shards weights are cut.
    pub(super) shards: i64,
    /// Where they are held in shards, in [`Pass::folded`], a row of what is held here.
    pub(super) weights: Weights<'a>,
    /// Who holds which shards.
    pub(super) folded: Option<Folded<'a>>,
    /// Balancing biases by layer of the model.
    pub(super) balance: &'a [Tensor],
    /// The kind of large products' operands.
    pub(super) kind: Kind,
}

impl Pass<'_> {
    /// Chunks of so many that go through a layer's shards together: each by itself, but where shards of weights come from
    /// others, so that each comes once.
    pub(super) fn together(&self, chunks: usize) -> usize {
        if self.folded.is_some() { chunks } else { 1 }
    }

    /// A product that is the gradient of a weight: where there are chunks it is a part of a sum.
    pub(super) fn gradient(&self, left: &Tensor, right: &Tensor) -> kernels::Result<Tensor> {
        match self.chunks.count() {
            1 => self.ops.matmul(left, right),
            _ => self.ops.matmul_part(left, right),
        }
    }

    /// A product over what is cut into shards: where there are several it is a part of a sum.
    pub(super) fn of_shard(&self, left: &Tensor, right: &Tensor) -> kernels::Result<Tensor> {
        match self.shards {
            1 => self.ops.matmul(left, right),
            _ => self.ops.matmul_part(left, right),
        }
    }
}

/// What a layer comes to, by chunk.
pub(super) struct Forward<S> {
    /// `[n, D]`: what is added to the residual.
    pub(super) out: Vec<Tensor>,
    /// `[n, R]`: the router state for the layers after this one.
    pub(super) state: Option<Vec<Tensor>>,
    /// Tokens by router class, the skip last, i64; nothing where there is no router.
    pub(super) counts: Option<Tensor>,
    /// What its backward pass reads.
    pub(super) saved: S,
}

/// Gradients of what entered a layer, by chunk.
pub(super) struct Backward {
    /// Of the normed residual, in [`Pass::kind`].
    pub(super) x: Vec<Tensor>,
    /// Of the router state, if there was one.
    pub(super) state: Option<Vec<Tensor>>,
}

/// How much there is to compute, for a count of operations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Tokens.
    pub(super) tokens: f64,
    /// (query, key) pairs that see each other.
    pub(super) pairs: f64,
    /// Tokens that went to an expert of this layer.
    pub(super) routed: f64,
}

/// Where a layer stands in the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Its number among the model's layers.
    pub(super) layer: usize,
    /// Whether a router stands in a layer before it, whose state comes to it.
    pub(super) state: bool,
}

/// What every kind of layer tells about itself.
pub(super) trait LayerKind: Send + Sync + Sized + 'static {
    /// Declares its parameters, in canonical order.
    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, place: Place) -> Self;

    /// Classes to which its router sends tokens, the skip last; 0 where there is no router: then there are no balancing biases,
    /// and nothing is counted. Only a feed-forward may have one.
    fn classes(&self, _: &ZayaConfig) -> usize {
        0
    }

    /// Multiplications, each with its addition, of a forward pass.
    fn products(&self, config: &ZayaConfig, work: Work) -> f64;

    /// Bytes of what it saves for a token, its input and output included; `narrow` bytes in a number of [`Pass::kind`].
    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64;

    /// Bytes of weights that it copies for a micro-batch where they are cut into several shards; nothing where it reads them
    /// as they are.
    fn weight_copies(&self, _: &ZayaConfig, _: u64, _: Cut) -> u64 {
        0
    }

    /// Bytes that the places of a line send each other, in a forward pass and in a backward pass; nothing where no token sees
    /// another.
    fn shared_bytes(&self, _: &ZayaConfig, _: u64, _: SharedRows) -> [u64; 2] {
        [0; 2]
    }
}

/// An attention or a feed-forward.
///
/// Its gradients are written out rather than recorded: every addition has its place in the text, and what is kept between
/// the passes is what [`Layer::Saved`] names.
pub(super) trait Layer: LayerKind {
    /// What the backward pass reads.
    type Saved: 'static;

    /// From the normed residual of each chunk, `[n, D]` in [`Pass::kind`], and the router states of the layers before. A layer
    /// without a router passes the states on.
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Self::Saved>>;

    /// From the gradients of what [`Layer::forward`] made; those of the parameters go to `sink`.
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Self::Saved,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward>;

    /// The largest logit of what [`Layer::forward`] kept, where there is attention.
    fn largest_logit(&self, _: &Pass<'_>, _: &Self::Saved) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// What chunks counted so far, and one more: integers, so any order gives the same sum.
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

/// A layer of any kind: [`Layer`] without the type of what it keeps.
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
    fn products(&self, config: &ZayaConfig, work: Work) -> f64;

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

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
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

/// Makes a layer of a kind.
pub(super) type Make = fn(&mut Declare<'_>, &ZayaConfig, Place) -> Box<dyn AnyLayer>;

/// The [`Make`] of kind `L`.
pub(super) fn make<L: Layer>(
    params: &mut Declare<'_>,
    config: &ZayaConfig,
    place: Place,
) -> Box<dyn AnyLayer> {
    Box::new(L::declare(params, config, place))
}
