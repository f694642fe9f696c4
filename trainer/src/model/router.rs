//! The router: a small network over a state that runs through the layers, its choice, and its only gradient.
//!
//! The state of a layer is its projection plus a learned decay of the state before (exponential depth averaging), kept
//! before its norm. The choice adds the balancing biases to the probabilities, not to the logits, and does not touch
//! the weight of the chosen expert, which is its plain probability.

use tch::{Kind, Tensor};

use super::norm::{Normed, RmsNorm};
use super::product;

/// Parameters of one router, in canonical order.
pub(super) struct Router<'a> {
    pub(super) down: &'a Tensor,
    pub(super) down_bias: &'a Tensor,
    /// Absent in the first layer, which has no state before it.
    pub(super) decay: Option<&'a Tensor>,
    pub(super) norm: RmsNorm<'a>,
    pub(super) fc1: &'a Tensor,
    pub(super) fc1_bias: &'a Tensor,
    pub(super) fc2: &'a Tensor,
    pub(super) fc2_bias: &'a Tensor,
    pub(super) out: &'a Tensor,
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

impl Router<'_> {
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
