//! The interface of sublayers: attention or feed-forward, between the norm before it and the residual scaling after it.
//!
//! A new kind is one file with a type that implements [`Layer`], a line in [`super::kinds`], a line in
//! [`super::layers`] that constructs it, and what it costs in [`crate::costs`].

use std::any::Any;
use std::rc::Rc;

use contract::{Fault, Result};
use kernels::ops::{Dispatch, ExpertRows, OpsTable};
use tch::{Device, Kind, Tensor};

use super::cut::Chunks;
use super::fold::ShardedWeights;
use super::gradients::Gradients;
use super::input::DeviceMicroBatch;
use super::kinds::ResidualKind;
use super::param::{ParamDeclarations, Weights};
use super::{MicroBatchContext, MicroBatchOptions, WeightArrival, ZayaConfig};
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
    /// Weights that are still on their way.
    pub(super) arrival: Option<&'a dyn WeightArrival>,
    /// Balancing biases by layer.
    pub(super) balance: &'a [Tensor],
    /// `[D]` each: a scale of 1 and a bias of 0, where the residual is plain.
    pub(super) neutral: Option<[Tensor; 2]>,
    /// The dtype of the operands of large matmuls.
    pub(super) kind: Kind,
}

impl Pass<'_> {
    /// Runs `work` as a pass over `input` with these weights, in canonical order, and balancing biases.
    pub(super) fn over<T>(
        MicroBatchContext { options, line, folded, arrival }: MicroBatchContext<'_>,
        config: &ZayaConfig,
        weights: &[Tensor],
        balance: &[Tensor],
        input: &DeviceMicroBatch,
        work: impl FnOnce(&Pass<'_>) -> Result<T>,
    ) -> Result<T> {
        let _guard = kernels::layout::WithoutGradients::begin().map_err(refused)?;
        let MicroBatchOptions { ops, cut, .. } = options;
        let chunks = &Chunks::new(config, input, cut.chunks, line)?;
        // The embedding, which is declared first.
        let (kind, device) = (weights[0].kind(), weights[0].device());
        let (weights, shards) = (Weights(weights), cut.shards as i64);
        let neutral = match config.residual {
            ResidualKind::Scaled => None,
            ResidualKind::Plain => Some(neutral(config, device).map_err(refused)?),
        };
        work(&Pass {
            ops,
            config,
            chunks,
            shards,
            weights,
            folded,
            arrival,
            balance,
            neutral,
            kind,
        })
    }

    /// Waits until the first `weights` weights have arrived: before they are read for the first time.
    pub(super) fn wait(&self, weights: usize) -> Result<()> {
        self.arrival.map_or(Ok(()), |arrival| arrival.wait(weights))
    }

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

/// A scale of 1 and a bias of 0, `[D]` each.
fn neutral(config: &ZayaConfig, device: Device) -> kernels::Result<[Tensor; 2]> {
    let options = (Kind::Float, device);
    let size = [config.hidden_size];
    Ok([Tensor::f_ones(size, options)?, Tensor::f_zeros(size, options)?])
}

/// Rows of a chunk between a layer and the norm next to it: `[n, D]`, in [`Pass::kind`].
pub(super) enum Rows {
    /// In the order of tokens.
    Whole(Tensor),
    /// In the order of experts. What reads them brings them back, so that they are not written once more.
    Routed(Rc<RoutedRows>),
}

/// Rows in the order of experts.
#[derive(Debug)]
pub(super) struct RoutedRows {
    pub(super) x: Tensor,
    pub(super) order: Rc<Dispatch>,
    /// Those of skipped tokens, where these contribute anything.
    pub(super) passed: Option<Tensor>,
    /// Of a layer's output: the factor of each row, `[n, 1]`, f32. Of a gradient: what is added to it, `[n, D]`.
    pub(super) by_token: Tensor,
}

impl RoutedRows {
    /// The operands of an operation.
    pub(super) fn operands(&self) -> ExpertRows<'_> {
        let RoutedRows { x, order, passed, by_token } = self;
        ExpertRows { x, by: order, passed: passed.as_ref(), by_token }
    }
}

impl Rows {
    /// Those of all chunks.
    pub(super) fn whole(all: Vec<Tensor>) -> Vec<Rows> {
        all.into_iter().map(Rows::Whole).collect()
    }

    /// A layer's output in the order of tokens.
    pub(super) fn gathered(&self, ops: OpsTable) -> kernels::Result<Tensor> {
        match self {
            Rows::Whole(rows) => Ok(rows.shallow_clone()),
            Rows::Routed(rows) => ops.gather(rows.operands()),
        }
    }

    /// A gradient in the order of tokens.
    pub(super) fn unpermuted(&self, ops: OpsTable) -> kernels::Result<Tensor> {
        match self {
            Rows::Whole(rows) => Ok(rows.shallow_clone()),
            Rows::Routed(rows) => ops.unpermute(rows.operands()),
        }
    }
}

/// Gradients of a layer's output, by chunk.
pub(super) struct BranchGrads {
    /// Of its rows, in their order.
    pub(super) rows: Vec<Tensor>,
    /// Of the factors of rows of experts, `[n, 1]`; nothing if there are none.
    pub(super) gates: Vec<Tensor>,
}

/// A sublayer's forward results, by chunk.
pub(super) struct Forward {
    /// What is added to the residual.
    pub(super) out: Vec<Rows>,
    /// `[n, R]`: the router state for the layers after this one.
    pub(super) state: Option<Vec<Tensor>>,
    /// Tokens by expert, and last those without one, i64; `None` without a router.
    pub(super) counts: Option<Tensor>,
    /// What its backward pass reads.
    pub(super) saved: Saved,
}

/// What a layer saves between its passes: a type of its own.
pub(super) type Saved = Box<dyn Any>;

/// What a layer saved as `S`.
pub(super) fn taken<S: 'static>(saved: Saved) -> Result<S> {
    saved.downcast().map(|saved| *saved).map_err(|_| foreign())
}

/// A view of what a layer saved as `S`.
pub(super) fn seen<S: 'static>(saved: &dyn Any) -> Result<&S> {
    saved.downcast_ref().ok_or_else(foreign)
}

fn foreign() -> Fault {
    Fault::bug("a layer was handed what another one kept")
}

/// Gradients of a sublayer's inputs, by chunk.
pub(super) struct Backward {
    /// Of the normed residual.
    pub(super) x: Vec<Rows>,
    /// Of the router state, if there was one.
    pub(super) state: Option<Vec<Tensor>>,
}

/// A layer's place in the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerPlace {
    /// Its index among the model's layers.
    pub(super) layer: usize,
    /// Whether an earlier layer has a router, whose state this layer receives.
    pub(super) state: bool,
    /// How many keys a query of its attention sees; `None`: all earlier ones.
    pub(super) window: Option<i64>,
}

/// An attention or a feed-forward.
///
/// Its gradients are written by hand, without autograd: the source fixes the order of every addition, and exactly what
/// [`Layer::forward`] saves is kept between the passes.
pub(super) trait Layer: Send + Sync {
    /// Declares its parameters, in canonical order.
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, place: LayerPlace) -> Self
    where
        Self: Sized;

    /// `x` is the normed residual of each chunk, `[n, D]` in [`Pass::kind`]; `state` are the router states of earlier
    /// layers, which a layer without a router passes on.
    fn forward(&self, pass: &Pass<'_>, x: &[Tensor], state: Option<Vec<Tensor>>)
    -> Result<Forward>;

    /// Takes the gradients of [`Layer::forward`]'s results; gradients of the parameters are passed to `sink`.
    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &BranchGrads,
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward>;

    /// The largest logit, from what [`Layer::forward`] saved, where there is attention.
    fn largest_logit(&self, _: &Pass<'_>, _: &dyn Any) -> Result<Option<f64>> {
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
