//! A mixture of experts as a feed-forward: a router, the experts that it chooses, and shared experts, which every token
//! has.
//!
//! ```text
//! y = sum over the chosen experts of weight * expert(x), then + shared(x)
//! ```
//!
//! The shared experts are DeepSeekMoE's (arXiv 2401.06066, equation 4): the sum of `num_shared_experts` experts without
//! weights or gates, which is one feed-forward as wide as all of them.

use contract::{Fault, Result};
use kernels::ops::Routes;
use kernels::ops::linear_router::summed;
use tch::{Kind, Tensor};

use super::experts::{self, Experts};
use super::mlp::{self, Mlp};
use super::router::{Router, SavedRouter};
use crate::model::ZayaConfig;
use crate::model::cut::Cut;
use crate::model::gradients::{ChunkGradients, Gradients};
use crate::model::layer::{
    Backward, Forward, Layer, LayerKind, LayerPlace, LayerWork, Pass, by_chunk, counted,
};
use crate::model::param::ParamDeclarations;
use crate::refusal::refused;
use crate::timing::{StepPart, part};

/// The feed-forward of ZAYA1, and of the baselines with experts.
pub(in crate::model) struct Moe {
    router: Router,
    experts: Experts,
    shared: Option<Mlp>,
    /// The layer whose balancing biases the router adds.
    layer: usize,
}

/// What the backward pass reads of a chunk.
struct SavedChunk {
    x: Tensor,
    router: SavedRouter,
    experts: experts::Saved,
}

/// What the backward pass reads, by chunk.
pub(in crate::model) struct Saved {
    chunks: Vec<Option<SavedChunk>>,
    shared: Option<Vec<Option<mlp::Saved>>>,
}

impl LayerKind for Moe {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, place: LayerPlace) -> Self {
        let router = Router::declare(params, config, place.state);
        let experts = Experts::declare(params, config);
        let width = config.num_shared_experts * config.moe_intermediate_size;
        let shared = (width > 0).then(|| Mlp::inside(params, config, "mlp.shared_experts", width));
        Moe { router, experts, shared, layer: place.layer }
    }

    /// Its experts, and last the tokens without one, even where no router skips.
    fn classes(&self, config: &ZayaConfig) -> usize {
        config.num_experts as usize + 1
    }

    fn products(&self, config: &ZayaConfig, work: LayerWork) -> f64 {
        let expert = 3.0 * (config.hidden_size * config.moe_intermediate_size) as f64;
        let shared = self.shared.as_ref().map_or(0.0, |shared| shared.products(config, work));
        work.tokens * Router::products(config) + work.routed * expert + shared
    }

    fn activation_bytes(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64 {
        let (width, inner) = (config.hidden_size as u64, config.moe_intermediate_size as u64);
        // For each of a token's experts: its input and output in the order of experts; gate, up, and their product; the
        // class and its weight, and the permutation of tokens and its inverse.
        let routed = narrow * (2 * width + 3 * inner) + 8 + 4 + 2 * 8;
        let shared = self.shared.as_ref();
        let shared = shared.map_or(0, |shared| shared.activation_bytes(config, narrow, cut));
        let classes = config.num_experts_per_tok as u64;
        // The backward pass holds the gradients of the experts' inputs and outputs together; of one expert for each
        // token they are within the part of all saved tensors that the model counts for gradients.
        let repeated = (classes - 1) * 2 * narrow * width;
        // Input and output, and what the router saves.
        narrow * 2 * width + 4 * Router::saved(config) + classes * routed + repeated + shared
    }

    /// A shard of the experts at a time.
    fn weight_copies(&self, config: &ZayaConfig, narrow: u64, cut: Cut) -> u64 {
        let inner = (config.moe_intermediate_size * config.num_experts) as u64;
        let shared = self.shared.as_ref();
        let shared = shared.map_or(0, |shared| shared.weight_copies(config, narrow, cut));
        narrow * 3 * config.hidden_size as u64 * inner / cut.shards + shared
    }
}

impl Moe {
    /// The routes of a chunk, and what the backward pass reads of them.
    fn routed(
        &self,
        pass: &Pass<'_>,
        x: &Tensor,
        state: Option<&Tensor>,
    ) -> Result<(Routes, SavedRouter)> {
        let _watch = part(StepPart::Router);
        let balance = &pass.balance[self.layer];
        self.router.forward(pass, x, state, (balance.numel() > 0).then_some(balance))
    }

    /// From the gradients of a chunk's experts: gradients of its input.
    fn chunk_back(
        &self,
        pass: &Pass<'_>,
        x: Tensor,
        router: SavedRouter,
        experts: experts::Grads,
        state: Option<&Tensor>,
        sink: &mut ChunkGradients<'_, '_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let [gate_up, down] = experts.params;
        sink.experts(self.experts.gate_up, gate_up, experts.used.shared())?;
        sink.experts(self.experts.down, down, experts.used)?;
        let (input, before) = {
            let _watch = part(StepPart::RouterBack);
            self.router.backward(pass, &x, router, &experts.weight, state, sink)?
        };
        let (order, passed) = (&experts.order, experts.passed.as_ref());
        let by = pass.config.top_k();
        let x = match by.count {
            1 => pass.ops.unpermute(&experts.input, order, passed, &input),
            _ => {
                let size = [x.size()[0] * by.count, 1];
                let ones = Tensor::f_ones(size, (Kind::Float, x.device()));
                let rows = ones
                    .map_err(kernels::Error::from)
                    .and_then(|ones| pass.ops.gather(&experts.input, order, passed, &ones));
                rows.and_then(|rows| Ok(summed(&rows, by)?.f_add(&input)?))
            }
        };
        Ok((x.map_err(refused)?, before))
    }
}

impl Layer for Moe {
    type Saved = Saved;

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Saved>> {
        let mut routed = self.forward_routed(pass, x, state)?;
        if let Some(shared) = &self.shared {
            let made = shared.forward(pass, x, None)?;
            routed.out = sums(routed.out, &made.out)?;
            routed.saved.shared = Some(made.saved);
        }
        Ok(routed)
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        grad: &[Tensor],
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward> {
        let Saved { chunks, shared } = saved;
        let shared = match (&self.shared, shared) {
            (Some(layer), Some(saved)) => Some(layer.backward(pass, saved, grad, None, sink)?.x),
            _ => None,
        };
        let Backward { x, state } = self.backward_routed(pass, chunks, grad, state, sink)?;
        let x = if let Some(shared) = shared { sums(x, &shared)? } else { x };
        Ok(Backward { x, state })
    }
}

/// Sums by chunk.
fn sums(left: Vec<Tensor>, right: &[Tensor]) -> Result<Vec<Tensor>> {
    let sum = |(left, right): (Tensor, &Tensor)| left.f_add(right).map_err(refused);
    left.into_iter().zip(right).map(sum).collect()
}

impl Moe {
    /// Without the shared experts.
    fn forward_routed(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward<Saved>> {
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
                states.extend(routes.state);
                saved.push(Some(SavedChunk { x: x.shallow_clone(), router, experts }));
            }
        }
        let state = (!states.is_empty()).then_some(states);
        Ok(Forward { out: outs, state, counts, saved: Saved { chunks: saved, shared: None } })
    }

    /// The same in the backward pass.
    fn backward_routed(
        &self,
        pass: &Pass<'_>,
        mut saved: Vec<Option<SavedChunk>>,
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
