//! The router: a small network over a state that runs through the layers, or one matrix; its choice, and its only
//! gradient.
//!
//! The state of a layer is its projection plus a learned decay of the previous state (exponential depth averaging),
//! passed on before its norm. The choice adds the balancing biases to the probabilities, not to the logits. They do not
//! affect the weight of the chosen expert, which is its plain probability.
//!
//! One matrix may choose several experts (`num_experts_per_tok`), as in Mixtral (arXiv 2401.04088, section 2.1) and
//! Qwen3's mixtures: their weights are their probabilities, or these divided by their sum (`norm_topk_prob`).

use contract::{Fault, Result};
use kernels::ops::linear_router::{
    LinearRouterGrads, LinearRouterSaved, linear_router, linear_router_backward,
};
use kernels::ops::{RouterGrads, RouterSaved, RouterWeights, Routes};
use tch::Tensor;

use crate::model::ZayaConfig;
use crate::model::gradients::{ChunkGradients, emit};
use crate::model::kinds::RouterKind;
use crate::model::layer::Pass;
use crate::model::param::{ParamDeclarations, ParamId};
use crate::refusal::refused;

/// Parameters of one router.
pub(super) enum Router {
    Mlp(RouterNetwork),
    /// `[C, D]`.
    Linear(ParamId),
}

/// What the backward pass of a router reads.
pub(super) enum SavedRouter {
    Mlp(RouterSaved),
    Linear(LinearRouterSaved),
}

/// A router with a state.
pub(super) struct RouterNetwork {
    down: ParamId,
    down_bias: ParamId,
    /// Absent in the first router, which has no previous state.
    decay: Option<ParamId>,
    norm: ParamId,
    fc1: ParamId,
    fc1_bias: ParamId,
    fc2: ParamId,
    fc2_bias: ParamId,
    out: ParamId,
    /// The norm's epsilon.
    eps: f64,
}

impl Router {
    pub(super) fn declare(
        params: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        state: bool,
    ) -> Self {
        match config.router {
            RouterKind::Mlp => Router::Mlp(RouterNetwork::declare(params, config, state)),
            RouterKind::Linear => {
                let shape = [config.router_classes(), config.hidden_size];
                let mut scope = params.inside("mlp", "zaya_block");
                Router::Linear(scope.small_matrix("gate.weight", "router.weight", shape))
            }
        }
    }

    /// The routes of a chunk, and what the backward pass reads of them.
    pub(super) fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<&Tensor>,
        balance: Option<&Tensor>,
    ) -> Result<(Routes, SavedRouter)> {
        match self {
            Router::Mlp(router) => {
                let missing = || Fault::bug("a router with a state has no balancing biases");
                let balance = balance.ok_or_else(missing)?;
                let made = pass.ops.router(router.bind(pass), x, state, balance);
                made.map(|(routes, saved)| (routes, SavedRouter::Mlp(saved)))
            }
            Router::Linear(weights) => {
                let (weights, by) = (&pass.weights[*weights], pass.config.top_k());
                let made = linear_router(pass.ops, weights, x, balance, by);
                made.map(|(routes, saved)| (routes, SavedRouter::Linear(saved)))
            }
        }
        .map_err(refused)
    }

    /// From the gradients of the weights of the choices and of the state: those of the input and of the state before.
    pub(super) fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        saved: SavedRouter,
        weight: &Tensor,
        state: Option<&Tensor>,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        match (self, saved) {
            (Router::Mlp(router), SavedRouter::Mlp(saved)) => {
                let found = pass.ops.router_backward(router.bind(pass), x, saved, weight, state);
                let mut found = found.map_err(refused)?;
                let (input, before) = (found.input.shallow_clone(), found.before.take());
                router.emit(found, sink)?;
                Ok((input, before))
            }
            (Router::Linear(id), SavedRouter::Linear(saved)) => {
                let (weights, by) = (&pass.weights[*id], pass.config.top_k());
                let found = linear_router_backward(pass.ops, weights, x, saved, weight, by);
                let LinearRouterGrads { input, weights } = found.map_err(refused)?;
                emit(sink, *id, weights)?;
                Ok((input, None))
            }
            _ => Err(Fault::bug("a router was handed what another one kept")),
        }
    }
}

impl RouterNetwork {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, state: bool) -> Self {
        let (hidden, size) = (config.hidden_size, config.router_hidden_size);
        let square = [size, size];
        let mut gate = params.inside("mlp.gate", "zaya_block.router");
        let down = gate.matrix("down_proj.weight", "down_proj.weight", [size, hidden]);
        let down_bias = gate.vector("down_proj.bias", "down_proj.bias", size, 0.0);
        let decay = "router_states_scale";
        let decay = state.then(|| gate.vector(decay, decay, size, 1.0));
        let norm = gate.vector("router_mlp.norm.weight", "rmsnorm_eda.weight", size, 1.0);
        let mut mlp = params.inside("mlp.gate.router_mlp", "zaya_block.router.router_mlp");
        let classes = [config.router_classes(), size];
        RouterNetwork {
            down,
            down_bias,
            decay,
            norm,
            fc1: mlp.small_matrix("fc1.weight", "0.weight", square),
            fc1_bias: mlp.vector("fc1.bias", "0.bias", size, 0.0),
            fc2: mlp.small_matrix("fc2.weight", "2.weight", square),
            fc2_bias: mlp.vector("fc2.bias", "2.bias", size, 0.0),
            out: mlp.small_matrix("out_proj.weight", "4.weight", classes),
            eps: config.rms_norm_eps,
        }
    }

    /// The weights as [`Ops::router`](kernels::ops::Ops::router) takes them.
    fn bind<'a>(&self, pass: &Pass<'a>) -> RouterWeights<'a> {
        let of = |id| pass.weights.of(id);
        RouterWeights {
            down: of(self.down),
            down_bias: of(self.down_bias),
            decay: self.decay.map(of),
            norm: of(self.norm),
            fc1: of(self.fc1),
            fc1_bias: of(self.fc1_bias),
            fc2: of(self.fc2),
            fc2_bias: of(self.fc2_bias),
            out: of(self.out),
            eps: self.eps,
            part: pass.chunks.count() > 1,
        }
    }

    /// Passes the gradients on, in canonical order.
    fn emit(&self, grads: RouterGrads, sink: &mut ChunkGradients<'_, '_>) -> Result<()> {
        emit(sink, self.down, grads.down)?;
        emit(sink, self.down_bias, grads.down_bias)?;
        if let (Some(id), Some(decay)) = (self.decay, grads.decay) {
            emit(sink, id, decay)?;
        }
        emit(sink, self.norm, grads.norm)?;
        emit(sink, self.fc1, grads.fc1)?;
        emit(sink, self.fc1_bias, grads.fc1_bias)?;
        emit(sink, self.fc2, grads.fc2)?;
        emit(sink, self.fc2_bias, grads.fc2_bias)?;
        emit(sink, self.out, grads.out)
    }
}
