//! A mixture of experts as a feed-forward: a router, and the experts that it chooses.

use contract::{Fault, Result};
use kernels::ops::{RouterSaved, Routes};
use tch::Tensor;

use super::experts::{self, Experts};
use super::router::Router;
use crate::model::ZayaConfig;
use crate::model::cut::Cut;
use crate::model::gradients::{ChunkGradients, Gradients};
use crate::model::layer::{
    Backward, Forward, Layer, LayerKind, LayerPlace, LayerWork, Pass, by_chunk, counted,
};
use crate::model::param::ParamDeclarations;
use crate::refusal::refused;
use crate::timing::{StepPart, part};

/// The feed-forward of ZAYA1.
pub(in crate::model) struct Moe {
    router: Router,
    experts: Experts,
    /// The layer whose balancing biases the router adds.
    layer: usize,
}

/// What the backward pass reads.
pub(in crate::model) struct Saved {
    x: Tensor,
    router: RouterSaved,
    experts: experts::Saved,
}

impl LayerKind for Moe {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, place: LayerPlace) -> Self {
        let router = Router::declare(params, config, place.state);
        Moe { router, experts: Experts::declare(params, config), layer: place.layer }
    }

    fn classes(&self, config: &ZayaConfig) -> usize {
        config.router_classes() as usize
    }

    fn products(&self, config: &ZayaConfig, work: LayerWork) -> f64 {
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
        // State, its norm with a factor, both hidden layers before and after their activation, all probabilities.
        let router = 6 * size(config.router_hidden_size) + 1 + size(config.router_classes());
        // The chosen class and its probability, and the permutation of tokens and its inverse.
        narrow * products + 4 * router + 8 + 4 + 2 * 8
    }

    /// A shard of the experts at a time.
    fn weight_copies(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64 {
        let inner = (config.moe_intermediate_size * config.num_experts) as u64;
        narrow * 3 * config.hidden_size as u64 * inner / cut.shards
    }
}

impl Moe {
    /// The routes of a chunk, and what the backward pass reads of them.
    fn routed(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<&Tensor>,
    ) -> Result<(Routes, RouterSaved)> {
        let _watch = part(StepPart::Router);
        let (router, balance) = (self.router.bind(pass), &pass.balance[self.layer]);
        pass.ops.router(router, x, state, balance).map_err(refused)
    }

    /// From the gradients of a chunk's experts: gradients of its input.
    fn chunk_back(
        &self,
        pass: &Pass<'_>,
        x: Tensor,
        router: RouterSaved,
        experts: experts::Grads,
        state: Option<&Tensor>,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let [gate_up, down] = experts.params;
        sink.experts(self.experts.gate_up, gate_up, experts.used.shared())?;
        sink.experts(self.experts.down, down, experts.used)?;
        let mut router = {
            let _watch = part(StepPart::RouterBack);
            let (bound, weight) = (self.router.bind(pass), &experts.weight);
            pass.ops.router_backward(bound, &x, router, weight, state).map_err(refused)?
        };
        let (order, passed) = (&experts.order, experts.passed.as_ref());
        let x = pass.ops.unpermute(&experts.input, order, passed, &router.input);
        let (x, state) = (x.map_err(refused)?, router.before.take());
        self.router.emit(router, sink)?;
        Ok((x, state))
    }
}

impl Layer for Moe {
    /// By chunk.
    type Saved = Vec<Option<Saved>>;

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Self::Saved>> {
        let mut before = by_chunk(state, x.len()).into_iter();
        let (mut outs, mut states, mut saved, mut counts) = (vec![], vec![], vec![], None);
        for group in x.chunks(pass.together(x.len())) {
            let (mut routes, mut routers) = (Vec::new(), Vec::new());
            for (x, before) in group.iter().zip(before.by_ref()) {
                let (own, router) = self.routed(pass, x, before.as_ref())?;
                routes.push(own);
                routers.push(router);
            }
            let _watch = part(StepPart::Experts);
            let chunks: Vec<&Tensor> = group.iter().collect();
            let made = self.experts.forward(pass, &chunks, &routes).map_err(refused)?;
            let all = made.into_iter().zip(group.iter().zip(routes.into_iter().zip(routers)));
            for ((out, experts), (x, (routes, router))) in all {
                counts = counted(counts, Some(experts.counts()))?;
                outs.push(out);
                states.push(routes.state);
                saved.push(Some(Saved { x: x.shallow_clone(), router, experts }));
            }
        }
        Ok(Forward { out: outs, state: Some(states), counts, saved })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        mut saved: Self::Saved,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward> {
        let states = by_chunk(state, grad.len());
        let mut found: Vec<_> = grad.iter().map(|_| None).collect();
        let order: Vec<usize> = pass.chunks.by_leaf().collect();
        for group in order.chunks(pass.together(grad.len())) {
            let (mut own, mut experts, mut grads) = (Vec::new(), Vec::new(), Vec::new());
            for chunk in group {
                let twice = || Fault::bug("a chunk comes back twice");
                let kept = saved[*chunk].take().ok_or_else(twice)?;
                own.push((kept.x, kept.router));
                experts.push(kept.experts);
                grads.push(&grad[*chunk]);
            }
            let experts = {
                let _watch = part(StepPart::ExpertsBack);
                self.experts.backward(pass, experts, &grads).map_err(refused)?
            };
            for (chunk, ((x, router), experts)) in group.iter().zip(own.into_iter().zip(experts)) {
                let (state, mut sink) = (states[*chunk].as_ref(), sink.of(*chunk));
                found[*chunk] = Some(self.chunk_back(pass, x, router, experts, state, &mut sink)?);
            }
        }
        let (x, states): (Vec<_>, Vec<_>) = found.into_iter().flatten().unzip();
        Ok(Backward { x, state: states.into_iter().collect() })
    }
}
