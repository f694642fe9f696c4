//! A mixture of experts as a feed-forward: a router, and the experts that it chooses.

use contract::Result;
use tch::Tensor;

use super::experts::{self, Experts};
use super::layer::{Backward, Forward, Layer, Pass, Sink, Work, emit};
use super::param::{Declare, ParamId};
use super::router::{self, Router};
use super::{ZayaConfig, product};
use crate::timing::{Part, part};

/// The feed-forward of ZAYA1.
pub(super) struct Moe {
    router: Router<ParamId>,
    experts: Experts<ParamId>,
    /// Whose balancing biases the router adds.
    layer: usize,
}

/// What the backward pass needs.
pub(super) struct Saved {
    x: Tensor,
    router: router::Saved,
    experts: experts::Saved,
}

impl Layer for Moe {
    type Saved = Saved;

    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, layer: usize) -> Self {
        let router = Router::declare(params, config, layer);
        Moe { router, experts: Experts::declare(params, config), layer }
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Saved>> {
        let (routes, router) = {
            let _watch = part(Part::Router);
            let router = self.router.bind(pass.weights);
            router.forward(x, state, &pass.balance[self.layer])
        };
        let _watch = part(Part::Experts);
        let (out, counts, experts) = self.experts.bind(pass.weights).forward(x, &routes);
        let saved = Saved { x: x.shallow_clone(), router, experts };
        Ok(Forward { out, state: Some(routes.state), counts, saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut dyn Sink,
    ) -> Result<Backward> {
        let experts = {
            let _watch = part(Part::ExpertsBack);
            self.experts.bind(pass.weights).backward(saved.experts, grad)
        };
        let [gate_up, down] = experts.params;
        emit(sink, self.experts.gate_up, gate_up)?;
        emit(sink, self.experts.down, down)?;
        let router = {
            let _watch = part(Part::RouterBack);
            let router = self.router.bind(pass.weights);
            router.backward(saved.router, &saved.x, &experts.weight, state)
        };
        self.router.ids().zip(router.params).try_for_each(|(id, grad)| emit(sink, id, grad))?;
        Ok(Backward { x: product::wide(experts.input) + router.input, state: router.before })
    }

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
        let f = |size: i64| size as f64;
        let (width, state) = (f(config.hidden_size), f(config.router_hidden_size));
        let router = width * state + 2.0 * state * state + state * f(config.router_classes());
        let expert = 3.0 * width * f(config.moe_intermediate_size);
        work.tokens * router + work.routed * expert
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64) -> u64 {
        let size = |size: i64| size as u64;
        // Input and output, and the same in the order of experts; gate, up, and their product.
        let products = 4 * size(config.hidden_size) + 3 * size(config.moe_intermediate_size);
        // State, its norm with a factor, and both hidden layers before and after their activation; all probabilities.
        let router = 6 * size(config.router_hidden_size) + 1 + size(config.router_classes());
        // The chosen class and its probability, and the order of tokens there and back.
        narrow * products + 4 * router + 8 + 4 + 2 * 8
    }
}
