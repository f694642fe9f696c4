//! What a layer is: an attention or a feed-forward, between the norm before it and the residual scaling after it.
//!
//! A new kind is one file with a type that implements [`Layer`], and a line in [`super::zaya`].

use std::any::Any;

use contract::{Fault, Result};
use kernels::ops::Table;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::input::Prepared;
use super::layers::rotary::Rotary;
use super::param::{Declare, ParamId, Weights};
use crate::refusal::refused;

/// Where gradients go, each the moment it exists.
pub trait Sink {
    /// Takes the gradient of the loss over the label count with respect to parameter `id`: its shape, f32.
    ///
    /// Each parameter has exactly one in a micro-batch; in which order they come is not promised.
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()>;
}

/// All gradients of a micro-batch, for who wants them together.
#[derive(Debug, Default)]
pub struct Collected(Vec<Option<Tensor>>);

impl Collected {
    /// The gradients in canonical order.
    pub fn into_vec(self) -> Result<Vec<Tensor>> {
        let missing = || Fault::bug("a parameter has no gradient");
        self.0.into_iter().map(|gradient| gradient.ok_or_else(missing)).collect()
    }
}

impl Sink for Collected {
    fn gradient(&mut self, id: ParamId, gradient: Tensor) -> Result<()> {
        if self.0.len() <= id.index() {
            self.0.resize_with(id.index() + 1, || None);
        }
        match self.0[id.index()].replace(gradient) {
            None => Ok(()),
            Some(_) => Err(Fault::bug(format!("parameter {} has two gradients", id.index()))),
        }
    }
}

/// Hands a gradient to the sink in f32, in which everything goes on from here.
pub(super) fn emit(sink: &mut dyn Sink, id: ParamId, gradient: Tensor) -> Result<()> {
    sink.gradient(id, gradient.f_to_kind(Kind::Float).map_err(|error| refused(error.into()))?)
}

/// What a micro-batch is computed with.
pub(super) struct Pass<'a> {
    /// By which operations.
    pub(super) ops: Table,
    pub(super) config: &'a ZayaConfig,
    pub(super) input: &'a Prepared,
    pub(super) rotary: &'a Rotary,
    pub(super) weights: Weights<'a>,
    /// Balancing biases by layer of the model.
    pub(super) balance: &'a [Tensor],
    /// The kind of large products' operands.
    pub(super) kind: Kind,
}

/// What a layer comes to.
pub(super) struct Forward<S> {
    /// `[N, D]`: what is added to the residual.
    pub(super) out: Tensor,
    /// `[N, R]`: the router state for the layers after this one.
    pub(super) state: Option<Tensor>,
    /// Tokens by router class, the skip last; nothing where there is no router.
    pub(super) counts: Vec<u64>,
    /// What its backward pass reads.
    pub(super) saved: S,
}

/// Gradients of what entered a layer.
pub(super) struct Backward {
    /// Of the normed residual.
    pub(super) x: Tensor,
    /// Of the router state, if there was one.
    pub(super) state: Option<Tensor>,
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

/// An attention or a feed-forward.
///
/// Its gradients are written out rather than recorded: every addition has its place in the text, and what is kept between
/// the passes is what [`Layer::Saved`] names.
pub(super) trait Layer: Send + Sync + Sized + 'static {
    /// What the backward pass reads.
    type Saved: 'static;

    /// Declares its parameters, in canonical order. `layer` counts the model's layers.
    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, layer: usize) -> Self;

    /// From the normed residual, `[N, D]` in [`Pass::kind`], and the router state of the layers before. A layer without a
    /// router passes the state on.
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Self::Saved>>;

    /// From the gradients of what [`Layer::forward`] made; those of the parameters go to `sink`.
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Self::Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut dyn Sink,
    ) -> Result<Backward>;

    /// Multiplications, each with its addition, of a forward pass.
    fn products(&self, config: &ZayaConfig, work: Work) -> f64;

    /// Bytes of [`Layer::Saved`] for a token, its input and output included; `narrow` bytes in a number of [`Pass::kind`].
    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64) -> u64;
}

/// A layer of any kind: [`Layer`] without the type of what it keeps.
pub(super) trait AnyLayer: Send + Sync {
    /// See [`Layer::forward`].
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Box<dyn Any>>>;

    /// See [`Layer::backward`].
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Box<dyn Any>,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut dyn Sink,
    ) -> Result<Backward>;

    /// See [`Layer::products`].
    fn products(&self, config: &ZayaConfig, work: Work) -> f64;

    /// See [`Layer::activation_bytes`].
    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64) -> u64;
}

impl<L: Layer> AnyLayer for L {
    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Box<dyn Any>>> {
        let Forward { out, state, counts, saved } = Layer::forward(self, pass, x, state)?;
        Ok(Forward { out, state, counts, saved: Box::new(saved) })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Box<dyn Any>,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut dyn Sink,
    ) -> Result<Backward> {
        let saved = saved.downcast::<L::Saved>();
        let saved = saved.map_err(|_| Fault::bug("a layer was handed what another one kept"))?;
        Layer::backward(self, pass, *saved, grad, state, sink)
    }

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
        Layer::products(self, config, work)
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64) -> u64 {
        Layer::activation_bytes(self, config, narrow)
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
