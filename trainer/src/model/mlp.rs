//! A plain gated feed-forward (SwiGLU), the same for every token: what a new kind of layer takes. No shipped model has one;
//! the tests put it in the place of the experts.

use contract::Result;
use tch::Tensor;

use super::layer::{Backward, Forward, Layer, Pass, Sink, Work, emit};
use super::param::{Declare, ParamId};
use super::{ZayaConfig, product};

/// `down(silu(gate(x)) * up(x))`, as wide inside as an expert.
pub(super) struct Mlp {
    gate: ParamId,
    up: ParamId,
    down: ParamId,
}

/// What the backward pass needs.
pub(super) struct Saved {
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    inner: Tensor,
}

impl Layer for Mlp {
    type Saved = Saved;

    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, _: usize) -> Self {
        let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
        let mut own = params.inside("mlp", "mlp");
        let mut matrix = |name: &str, shape| own.matrix(name, name, shape);
        Mlp {
            gate: matrix("gate_proj.weight", [inner, hidden]),
            up: matrix("up_proj.weight", [inner, hidden]),
            down: matrix("down_proj.weight", [hidden, inner]),
        }
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Saved>> {
        let w = pass.weights;
        let (gate, up) = (product::of(x, &w[self.gate].tr()), product::of(x, &w[self.up].tr()));
        let inner = gate.silu() * &up;
        let out = product::of(&inner, &w[self.down].tr());
        let saved = Saved { x: x.shallow_clone(), gate, up, inner };
        Ok(Forward { out, state, counts: Vec::new(), saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut dyn Sink,
    ) -> Result<Backward> {
        let (w, Saved { x, gate, up, inner }) = (pass.weights, saved);
        let grad = grad.to_kind(x.kind());
        emit(sink, self.down, product::of(&grad.tr(), &inner))?;
        let inner = product::of(&grad, &w[self.down]);
        let up_grad = &inner * gate.silu();
        let gate_grad = gate.silu_backward(&(inner * up));
        emit(sink, self.up, product::of(&up_grad.tr(), &x))?;
        emit(sink, self.gate, product::of(&gate_grad.tr(), &x))?;
        let mut x = product::wide(product::of(&up_grad, &w[self.up]));
        product::add(&mut x, &gate_grad, &w[self.gate]);
        Ok(Backward { x, state })
    }

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
        work.tokens * 3.0 * (config.hidden_size * config.moe_intermediate_size) as f64
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64) -> u64 {
        // Input and output; gate, up, and their product.
        narrow * (2 * config.hidden_size + 3 * config.moe_intermediate_size) as u64
    }
}
