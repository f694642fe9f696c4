//! A mixture of experts as a feed-forward: a router, and the experts that it chooses.

use contract::Result;
use kernels::ops::RouterSaved;
use tch::{Kind, Tensor};

use super::experts::{self, Experts};
use super::router::Router;
use crate::model::ZayaConfig;
use crate::model::cut::Cut;
use crate::model::gradients::ChunkGradients;
use crate::model::layer::{Backward, ByToken, Forward, LayerKind, Pass, Work};
use crate::model::param::{Declare, ParamId};
use crate::refusal::refused;
use crate::timing::{Part, part};

/// The feed-forward of ZAYA1.
pub(in crate::model) struct Moe {
    router: Router,
    experts: Experts<ParamId>,
    /// Whose balancing biases the router adds.
    layer: usize,
}

/// What the backward pass needs.
pub(in crate::model) struct Saved {
    x: Tensor,
    router: RouterSaved,
    experts: experts::Saved,
}

impl LayerKind for Moe {
    fn declare(params: &mut Declare<'_>, config: &ZayaConfig, layer: usize) -> Self {
        let router = Router::declare(params, config, layer);
        Moe { router, experts: Experts::declare(params, config), layer }
    }

    fn products(&self, config: &ZayaConfig, work: Work) -> f64 {
        let f = |size: i64| size as f64;
        let (width, state) = (f(config.hidden_size), f(config.router_hidden_size));
        let router = width * state + 2.0 * state * state + state * f(config.router_classes());
        let expert = 3.0 * width * f(config.moe_intermediate_size);
        work.tokens * router + work.routed * expert
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, _: Cut) -> u64 {
        let size = |size: i64| size as u64;
        // Input and output, and the same in the order of experts; gate, up, and their product.
        let products = 4 * size(config.hidden_size) + 3 * size(config.moe_intermediate_size);
        // State, its norm with a factor, and both hidden layers before and after their activation; all probabilities.
        let router = 6 * size(config.router_hidden_size) + 1 + size(config.router_classes());
        // The chosen class and its probability, and the order of tokens there and back.
        narrow * products + 4 * router + 8 + 4 + 2 * 8
    }
}

impl ByToken for Moe {
    type Saved = Saved;

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<Tensor>,
    ) -> Result<Forward<Tensor, Saved>> {
        let ops = pass.ops;
        let (routes, router) = {
            let _watch = part(Part::Router);
            let (router, balance) = (self.router.bind(pass), &pass.balance[self.layer]);
            ops.router(router, x, state.as_ref(), balance).map_err(refused)?
        };
        let _watch = part(Part::Experts);
        let experts = self.experts.bind(pass.weights);
        let (out, experts) = experts.forward(pass, x, &routes).map_err(refused)?;
        let counts = experts.counts().iter().map(|count| *count as u64).collect();
        let saved = Saved { x: x.shallow_clone(), router, experts };
        Ok(Forward { out, state: Some(routes.state), counts, saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &Tensor,
        state: Option<Tensor>,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<Backward<Tensor>> {
        let ops = pass.ops;
        let experts = {
            let _watch = part(Part::ExpertsBack);
            let experts = self.experts.bind(pass.weights);
            experts.backward(pass, saved.experts, grad).map_err(refused)?
        };
        let [gate_up, down] = experts.params;
        sink.experts(self.experts.gate_up, gate_up, &experts.used)?;
        sink.experts(self.experts.down, down, &experts.used)?;
        let mut router = {
            let _watch = part(Part::RouterBack);
            let (router, weight) = (self.router.bind(pass), &experts.weight);
            let found = ops.router_backward(router, &saved.x, saved.router, weight, state.as_ref());
            found.map_err(refused)?
        };
        let x = experts.input.f_to_kind(Kind::Float).and_then(|x| x.f_add(&router.input));
        let (x, state) = (x.map_err(|error| refused(error.into()))?, router.before.take());
        self.router.emit(router, sink)?;
        Ok(Backward { x, state })
    }
}
