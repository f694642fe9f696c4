//! The router: a small network over a state that runs through the layers, its choice, and its only gradient.
//!
//! The state of a layer is its projection plus a learned decay of the previous state (exponential depth averaging),
//! passed on before its norm. The choice adds the balancing biases to the probabilities, not to the logits. They do not
//! affect the weight of the chosen expert, which is its plain probability.

use contract::Result;
use kernels::ops::{RouterGrads, RouterWeights};

use crate::model::ZayaConfig;
use crate::model::gradients::{ChunkGradients, emit};
use crate::model::layer::Pass;
use crate::model::param::{ParamDeclarations, ParamId};

/// Parameters of one router.
pub(super) struct Router {
    pub(super) down: ParamId,
    pub(super) down_bias: ParamId,
    /// Absent in the first router, which has no previous state.
    pub(super) decay: Option<ParamId>,
    pub(super) norm: ParamId,
    pub(super) fc1: ParamId,
    pub(super) fc1_bias: ParamId,
    pub(super) fc2: ParamId,
    pub(super) fc2_bias: ParamId,
    pub(super) out: ParamId,
    /// The norm's epsilon.
    pub(super) eps: f64,
}

impl Router {
    pub(super) fn declare(
        params: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        state: bool,
    ) -> Self {
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
        Router {
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
    pub(super) fn bind<'a>(&self, pass: &Pass<'a>) -> RouterWeights<'a> {
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
    pub(super) fn emit(&self, grads: RouterGrads, sink: &mut ChunkGradients<'_, '_>) -> Result<()> {
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
