//! The router: a small network over a state that runs through the layers, its choice, and its only gradient.
//!
//! The state of a layer is its projection plus a learned decay of the state before (exponential depth averaging), kept
//! before its norm. The choice adds the balancing biases to the probabilities, not to the logits, and does not touch
//! the weight of the chosen expert, which is its plain probability.

use tch::{Kind, Tensor};

use super::norm::{Normed, RmsNorm};
use super::param::{Declare, ParamId, Weights};
use super::{ZayaConfig, product};

/// Parameters of one router: `P` is a parameter's name, or its weight.
pub(super) struct Router<P> {
    pub(super) down: P,
    pub(super) down_bias: P,
    /// Absent in the first layer, which has no state before it.
    pub(super) decay: Option<P>,
    pub(super) norm: RmsNorm<P>,
    pub(super) fc1: P,
    pub(super) fc1_bias: P,
    pub(super) fc2: P,
    pub(super) fc2_bias: P,
    pub(super) out: P,
}

impl Router<ParamId> {
    pub(super) fn declare(params: &mut Declare<'_>, config: &ZayaConfig, layer: usize) -> Self {
        let (hidden, size) = (config.hidden_size, config.router_hidden_size);
        let square = [size, size];
        let mut gate = params.inside("mlp.gate", "zaya_block.router");
        let down = gate.matrix("down_proj.weight", "down_proj.weight", [size, hidden]);
        let down_bias = gate.vector("down_proj.bias", "down_proj.bias", size, 0.0);
        let decay = "router_states_scale";
        let decay = (layer > 0).then(|| gate.vector(decay, decay, size, 1.0));
        let norm = gate.vector("router_mlp.norm.weight", "rmsnorm_eda.weight", size, 1.0);
        let mut mlp = params.inside("mlp.gate.router_mlp", "zaya_block.router.router_mlp");
        let classes = [config.router_classes(), size];
        Router {
            down,
            down_bias,
            decay,
            norm: RmsNorm { weight: norm, eps: config.rms_norm_eps },
            fc1: mlp.small_matrix("fc1.weight", "0.weight", square),
            fc1_bias: mlp.vector("fc1.bias", "0.bias", size, 0.0),
            fc2: mlp.small_matrix("fc2.weight", "2.weight", square),
            fc2_bias: mlp.vector("fc2.bias", "2.bias", size, 0.0),
            out: mlp.small_matrix("out_proj.weight", "4.weight", classes),
        }
    }

    pub(super) fn bind<'a>(&self, weights: Weights<'a>) -> Router<&'a Tensor> {
        let of = |id| weights.of(id);
        Router {
            down: of(self.down),
            down_bias: of(self.down_bias),
            decay: self.decay.map(of),
            norm: self.norm.bind(weights),
            fc1: of(self.fc1),
            fc1_bias: of(self.fc1_bias),
            fc2: of(self.fc2),
            fc2_bias: of(self.fc2_bias),
            out: of(self.out),
        }
    }

    /// In canonical order.
    pub(super) fn ids(&self) -> impl Iterator<Item = ParamId> {
        let first = [Some(self.down), Some(self.down_bias), self.decay, Some(self.norm.weight)];
        let rest = [self.fc1, self.fc1_bias, self.fc2, self.fc2_bias, self.out];
        first.into_iter().flatten().chain(rest)
    }
}

/// Where every token goes, and with what weight.
pub(super) struct Routes {
    /// `[N]`, i64: the class chosen; ties go to the lowest.
    pub(super) choice: Tensor,
    /// `[N, 1]`: its probability.
    pub(super) weight: Tensor,
    /// `[N, R]`: the state, for the next layer.
    pub(super) state: Tensor,
}

/// What the backward pass needs.
#[derive(Debug)]
pub(super) struct Saved {
    before: Option<Tensor>,
    normed: Normed,
    n: Tensor,
    a1: Tensor,
    h1: Tensor,
    a2: Tensor,
    h2: Tensor,
    probabilities: Tensor,
    choice: Tensor,
}

/// Gradients of a router.
pub(super) struct Grads {
    /// Of its input.
    pub(super) input: Tensor,
    /// Of the state before, if there was one.
    pub(super) before: Option<Tensor>,
    /// Of the parameters, in canonical order.
    pub(super) params: Vec<Tensor>,
}

impl Router<&Tensor> {
    pub(super) fn forward(
        &self,
        v: &Tensor,
        before: Option<Tensor>,
        balance: &Tensor,
    ) -> (Routes, Saved) {
        let mut state = product::affine(v, self.down, self.down_bias);
        if let (Some(decay), Some(before)) = (self.decay, &before) {
            let _ = state.addcmul_(before, decay);
        }
        let (n, normed) = self.norm.forward(&state);
        let a1 = n.linear(self.fc1, Some(self.fc1_bias));
        let h1 = a1.gelu("none");
        let a2 = h1.linear(self.fc2, Some(self.fc2_bias));
        let h2 = a2.gelu("none");
        let probabilities = h2.matmul(&self.out.tr()).softmax(-1, Kind::Float);
        // argmax answers with the first of equals on every device.
        let choice = (&probabilities + balance).argmax(-1, false);
        let weight = probabilities.gather(1, &choice.unsqueeze(1), false);
        let routes = Routes { choice: choice.shallow_clone(), weight, state };
        (routes, Saved { before, normed, n, a1, h1, a2, h2, probabilities, choice })
    }

    /// From the gradient of the weights, `[N, 1]`, and of the state as the next layer used it.
    pub(super) fn backward(
        &self,
        saved: Saved,
        v: &Tensor,
        weight: &Tensor,
        state: Option<Tensor>,
    ) -> Grads {
        let Saved { before, normed, n, a1, h1, a2, h2, probabilities, choice } = saved;
        let columns = |x: &Tensor| x.sum_dim_intlist(0, false, Kind::Float);
        let choice = choice.unsqueeze(1);
        // Softmax backward of a gradient that stands in one class: p_j * ([j = c] - p_c) ... times p_c's gradient.
        let scaled = weight * probabilities.gather(1, &choice, false);
        let mut logits = probabilities * -&scaled;
        let _ = logits.scatter_add_(1, &choice, &scaled);
        let out = logits.tr().matmul(&h2);
        let a2 = a2.gelu_backward(&logits.matmul(self.out), "none");
        let fc2 = a2.tr().matmul(&h1);
        let a1 = a1.gelu_backward(&a2.matmul(self.fc2), "none");
        let fc1 = a1.tr().matmul(&n);
        let (mut own, norm) = self.norm.backward(normed, &a1.matmul(self.fc1));
        if let Some(state) = state {
            own += state;
        }
        let narrow = own.to_kind(v.kind());
        let mut params = vec![product::wide(narrow.tr().matmul(v)), columns(&own)];
        let mut before_grad = None;
        if let (Some(decay), Some(before)) = (self.decay, before) {
            params.push(columns(&(&own * before)));
            before_grad = Some(&own * decay);
        }
        params.extend([norm, fc1, columns(&a1), fc2, columns(&a2), out]);
        Grads { input: narrow.matmul(self.down), before: before_grad, params }
    }
}
