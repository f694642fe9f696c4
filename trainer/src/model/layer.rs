//! What a layer is: an attention or a feed-forward, between the norm before it and the residual scaling after it.
//!
//! A new kind is one file with a type that implements [`Layer`], or [`ByToken`] where no token sees another, and a line in
//! [`super::zaya`].

use std::any::Any;

use contract::{Fault, Result};
use kernels::ops::Table;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::cut::{Chunks, Cut};
use super::fold::Folded;
use super::gradients::{ChunkGradients, Gradients};
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

/// What a layer comes to: `T` is a tensor, or one for each chunk.
pub(super) struct Forward<T, S> {
    /// `[n, D]`: what is added to the residual.
    pub(super) out: T,
    /// `[n, R]`: the router state for the layers after this one.
    pub(super) state: Option<T>,
    /// Tokens by router class, the skip last, i64; nothing where there is no router.
    pub(super) counts: Option<Tensor>,
    /// What its backward pass reads.
    pub(super) saved: S,
}

/// Gradients of what entered a layer.
pub(super) struct Backward<T> {
    /// Of the normed residual, in [`Pass::kind`].
    pub(super) x: T,
    /// Of the router state, if there was one.
    pub(super) state: Option<T>,
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

/// What every kind of layer tells about itself.
pub(super) trait LayerKind: Send + Sync + Sized + 'static {
    /// Declares its parameters, in canonical order. `layer` counts the model's layers.
    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, layer: usize) -> Self;

    /// Multiplications, each with its addition, of a forward pass.
    fn products(&self, config: &ZayaConfig, work: Work) -> f64;

    /// Bytes of what it saves for a token, its input and output included; `narrow` bytes in a number of [`Pass::kind`].
    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64;

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
    ) -> Result<Forward<Vec<Tensor>, Self::Saved>>;

    /// From the gradients of what [`Layer::forward`] made; those of the parameters go to `sink`.
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Self::Saved,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward<Vec<Tensor>>>;

    /// The largest logit of what [`Layer::forward`] kept, where there is attention.
    fn largest_logit(&self, _: &Pass<'_>, _: &Self::Saved) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// A layer in which no token sees another: chunks are computed each by itself.
pub(super) trait ByToken: LayerKind {
    /// What the backward pass of a chunk reads.
    type Saved: 'static;

    /// [`Layer::forward`] of one chunk.
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Tensor, Self::Saved>>;

    /// [`Layer::backward`] of one chunk.
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Self::Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<Backward<Tensor>>;
}

impl<L: ByToken> Layer for L {
    type Saved = Vec<Option<L::Saved>>;

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Vec<Tensor>, Self::Saved>> {
        let (mut outs, mut saved, mut states, mut counts) = (vec![], vec![], vec![], None);
        for (x, state) in x.iter().zip(by_chunk(state, x.len())) {
            let made = ByToken::forward(self, pass, x, state)?;
            outs.push(made.out);
            saved.push(Some(made.saved));
            states.push(made.state);
            counts = counted(counts, made.counts.as_ref())?;
        }
        Ok(Forward { out: outs, state: states.into_iter().collect(), counts, saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        mut saved: Self::Saved,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward<Vec<Tensor>>> {
        let mut states = by_chunk(state, grad.len());
        let mut found: Vec<_> = grad.iter().map(|_| None).collect();
        for chunk in pass.chunks.by_leaf() {
            let own = saved[chunk].take().ok_or_else(|| Fault::bug("a chunk comes back twice"))?;
            let (state, mut sink) = (states[chunk].take(), sink.of(chunk));
            let back = ByToken::backward(self, pass, own, &grad[chunk], state, &mut sink)?;
            found[chunk] = Some((back.x, back.state));
        }
        let (x, states): (Vec<_>, Vec<_>) = found.into_iter().flatten().unzip();
        Ok(Backward { x, state: states.into_iter().collect() })
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
    ) -> Result<Forward<Vec<Tensor>, Box<dyn Any>>>;

    /// See [`Layer::backward`].
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Box<dyn Any>,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward<Vec<Tensor>>>;

    /// See [`Layer::largest_logit`].
    fn largest_logit(&self, pass: &Pass<'_>, saved: &dyn Any) -> Result<Option<f64>>;

    /// See [`LayerKind::products`].
    fn products(&self, config: &ZayaConfig, work: Work) -> f64;

    /// See [`LayerKind::activation_bytes`].
    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64;

    /// See [`LayerKind::shared_bytes`].
    fn shared_bytes(&self, config: &ZayaConfig, narrow: u64, rows: SharedRows) -> [u64; 2];
}

impl<L: Layer> AnyLayer for L {
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Vec<Tensor>, Box<dyn Any>>> {
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
    ) -> Result<Backward<Vec<Tensor>>> {
        let saved = saved.downcast::<L::Saved>();
        let saved = saved.map_err(|_| Fault::bug("a layer was handed what another one kept"))?;
        Layer::backward(self, pass, *saved, grad, state, sink)
    }

    fn largest_logit(&self, pass: &Pass<'_>, saved: &dyn Any) -> Result<Option<f64>> {
        let saved = saved.downcast_ref::<L::Saved>();
        let saved = saved.ok_or_else(|| Fault::bug("a layer was handed what another one kept"))?;
        Layer::largest_logit(self, pass, saved)
    }

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
        LayerKind::products(self, config, work)
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64 {
        LayerKind::activation_bytes(self, config, narrow, cut)
    }

    fn shared_bytes(&self, config: &ZayaConfig, narrow: u64, rows: SharedRows) -> [u64; 2] {
        LayerKind::shared_bytes(self, config, narrow, rows)
    }
}

/// Makes a layer of a kind.
pub(super) type Make = fn(&mut Declare<'_>, &ZayaConfig, usize) -> Box<dyn AnyLayer>;

/// The [`Make`] of kind `L`.
pub(super) fn make<L: Layer>(
    params: &mut Declare<'_>,
    config: &ZayaConfig,
    layer: usize,
) -> Box<dyn AnyLayer> {
    Box::new(L::declare(params, config, layer))
}
