//! A mixture of experts as a feed-forward: a router, the experts that it chooses, and shared experts, which every token
//! has.
//!
//! ```text
//! y = sum over the chosen experts of weight * expert(x), then + shared(x)
//! ```
//!
//! The shared experts are DeepSeekMoE's (arXiv 2401.06066, equation 4): the sum of `num_shared_experts` experts without
//! weights or gates, which is one feed-forward as wide as all of them.

use std::rc::Rc;

use contract::{Fault, Result};
use kernels::ops::Routes;
use kernels::ops::linear_router::summed;
use tch::{Kind, Tensor};

use super::experts::{self, Experts, returns_late};
use super::mlp::Mlp;
use super::router::{Router, SavedRouter};
use crate::model::ZayaConfig;
use crate::model::gradients::{ChunkGradients, Gradients};
use crate::model::layer::{
    self, Backward, BranchGrads, Forward, Layer, LayerPlace, Pass, RoutedRows, Rows, by_chunk,
    counted, taken,
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
struct Saved {
    chunks: Vec<Option<SavedChunk>>,
    shared: Option<layer::Saved>,
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
    ) -> Result<(Rows, Option<Tensor>)> {
        let [gate_up, down] = experts.params;
        sink.experts(self.experts.gate_up, gate_up, experts.used.shared())?;
        sink.experts(self.experts.down, down, experts.used)?;
        let (input, before) = {
            let _watch = part(StepPart::RouterBack);
            self.router.backward(pass, &x, router, &experts.weight, state, sink)?
        };
        let experts::Grads { input: own, order, passed, .. } = experts;
        let rows = |by_token| RoutedRows { x: own, order, passed, by_token };
        let by = pass.config.top_k();
        let x = match by.count {
            1 if returns_late(pass.config) => Ok(Rows::Routed(Rc::new(rows(input)))),
            1 => pass.ops.unpermute(rows(input).operands()).map(Rows::Whole),
            _ => {
                let size = [x.size()[0] * by.count, 1];
                let ones = Tensor::f_ones(size, (Kind::Float, x.device()));
                let rows = ones
                    .map_err(kernels::Error::from)
                    .and_then(|ones| pass.ops.gather(rows(ones).operands()));
                rows.and_then(|rows| Ok(Rows::Whole(summed(&rows, by)?.f_add(&input)?)))
            }
        };
        Ok((x.map_err(refused)?, before))
    }
}

impl Layer for Moe {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, place: LayerPlace) -> Self {
        let router = Router::declare(params, config, place.state);
        let experts = Experts::declare(params, config);
        let width = config.num_shared_experts * config.moe_intermediate_size;
        let shared = (width > 0).then(|| Mlp::inside(params, config, "mlp.shared_experts", width));
        Moe { router, experts, shared, layer: place.layer }
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> Result<Forward> {
        let mut before = by_chunk(state, x.len()).into_iter();
        let (mut out, mut states, mut chunks, mut counts) = (vec![], vec![], vec![], None);
        for group in x.chunks(pass.together(x.len())) {
            let (mut routes, mut routers) = (Vec::new(), Vec::new());
            for (x, before) in group.iter().zip(before.by_ref()) {
                let (own, router) = self.routed(pass, x, before.as_ref())?;
                routes.push(own);
                routers.push(router);
            }
            let _watch = part(StepPart::Experts);
            let inputs: Vec<&Tensor> = group.iter().collect();
            let made = self.experts.forward(pass, &inputs, &routes).map_err(refused)?;
            let all = made.into_iter().zip(group.iter().zip(routes.into_iter().zip(routers)));
            for ((of_chunk, experts), (x, (routes, router))) in all {
                counts = counted(counts, Some(experts.counts()))?;
                out.push(of_chunk);
                states.extend(routes.state);
                chunks.push(Some(SavedChunk { x: x.shallow_clone(), router, experts }));
            }
        }
        let mut shared = None;
        if let Some(layer) = &self.shared {
            let made = layer.forward(pass, x, None)?;
            out = sums(pass, out, &made.out)?;
            shared = Some(made.saved);
        }
        let state = (!states.is_empty()).then_some(states);
        Ok(Forward { out, state, counts, saved: Box::new(Saved { chunks, shared }) })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: layer::Saved,
        grad: &BranchGrads,
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> Result<Backward> {
        let Saved { mut chunks, shared } = taken(saved)?;
        let shared = match (&self.shared, shared) {
            (Some(layer), Some(saved)) => Some(layer.backward(pass, saved, grad, None, sink)?.x),
            _ => None,
        };
        let states = by_chunk(state, grad.rows.len());
        let mut found: Vec<_> = grad.rows.iter().map(|_| None).collect();
        let order: Vec<usize> = pass.chunks.by_leaf().collect();
        for group in order.chunks(pass.together(grad.rows.len())) {
            let (mut own, mut experts, mut grads) = (Vec::new(), Vec::new(), Vec::new());
            for chunk in group {
                let twice = || Fault::bug("a chunk comes back twice");
                let kept = chunks[*chunk].take().ok_or_else(twice)?;
                own.push((kept.x, kept.router));
                experts.push(kept.experts);
                grads.push((&grad.rows[*chunk], grad.gates.get(*chunk)));
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
        let x = if let Some(shared) = shared { sums(pass, x, &shared)? } else { x };
        Ok(Backward { x, state: states.into_iter().collect() })
    }
}

/// Sums by chunk of rows in the order of tokens.
fn sums(pass: &Pass<'_>, left: Vec<Rows>, right: &[Rows]) -> Result<Vec<Rows>> {
    let sum = |(left, right): (Rows, &Rows)| {
        let [left, right] = [&left, right].map(|rows| rows.gathered(pass.ops));
        Ok(Rows::Whole(left?.f_add(&right?)?))
    };
    left.into_iter().zip(right).map(sum).collect::<kernels::Result<_>>().map_err(refused)
}
