//! Linear attention: a state of fixed size instead of keys and values, so that the cost is linear in the tokens.
//!
//! ```text
//! q, k, v, u = x W_q, x W_k, x W_v, x W_u        H query heads and K key heads of d, the same as in CCA layers
//! f(z) = elu(z) + 1                              Katharopoulos et al. 2020, equation 7
//! o_i  = sum over j <= i of g^(i-j) f(q_i).f(k_j) v_j / (eps + sum over j <= i of g^(i-j) f(q_i).f(k_j))
//! out  = (o * silu(u)) W_o                       an output gate, as in Sun et al. 2023, equation 8
//! ```
//!
//! `j` begins with the document of `i`. `g` is 1, or by key head 1 - 2^(-5-h) (Sun et al. 2023): the only dependence on
//! positions, because there is no rotary embedding. A column of ones appended to the values makes the denominator one
//! of them.
//!
//! Chunks pass on one state for each sequence (Sun et al. 2025, LASP-2, section 3): each computes M = K^T V alone, all
//! are gathered once, and each reader folds them in the order of chunks. Gradients of states are exchanged in the same
//! way. The public `lasp2.py` without a mask adds whole earlier blocks and nothing within a block: that is not causal
//! attention.

use kernels::ops::AttentionSpan;
use kernels::ops::linear_attention::{
    Features, Recurrence, RecurrentState, divided, gated, gated_back,
};
use kernels::{Error, Result};
use tch::{Kind, Tensor};

use crate::model::ZayaConfig;
use crate::model::gradients::{Gradients, emit};
use crate::model::layer::{
    self, Backward, BranchGrads, Forward, Layer, LayerPlace, Pass, Rows, taken,
};
use crate::model::param::{ParamDeclarations, ParamId};
use crate::refusal::refused;
use crate::timing::{StepPart, part};

/// Linear attention.
pub(in crate::model) struct Linear {
    q_proj: ParamId,
    k_proj: ParamId,
    v_proj: ParamId,
    gate_proj: ParamId,
    o_proj: ParamId,
}

/// What the backward pass reads of a chunk of n tokens.
pub(in crate::model) struct Saved {
    /// `[n, D]`: the normed residual.
    x: Tensor,
    projected: Projections,
    /// `[n, H d]`, f32: the heads' output, divided by the denominators.
    heads: Tensor,
    /// `[n, H, 1]`, f32.
    denominator: Tensor,
    /// The state at the start of each sequence's part.
    before: Vec<RecurrentState>,
}

/// `[n, H d]`, twice `[n, K d]`, `[n, H d]`: the outputs of the projections.
struct Projections {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
}

impl Layer for Linear {
    fn declare(params: &mut ParamDeclarations<'_>, config: &ZayaConfig, _: LayerPlace) -> Self {
        let (hidden, query, key) = (config.hidden_size, config.query_size(), config.key_size());
        let mut scope = params.inside("self_attn", "self_attn");
        let mut matrix = |name: &str, shape| scope.matrix(name, name, shape);
        Linear {
            q_proj: matrix("q_proj.weight", [query, hidden]),
            k_proj: matrix("k_proj.weight", [key, hidden]),
            v_proj: matrix("v_proj.weight", [key, hidden]),
            gate_proj: matrix("gate_proj.weight", [query, hidden]),
            o_proj: matrix("o_proj.weight", [hidden, query]),
        }
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        x: &[Tensor],
        state: Option<Vec<Tensor>>,
    ) -> contract::Result<Forward> {
        let _watch = part(StepPart::Attention);
        let (out, saved) = self.compute(pass, x).map_err(refused)?;
        Ok(Forward { out: Rows::whole(out), state, counts: None, saved: Box::new(saved) })
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        saved: layer::Saved,
        BranchGrads { rows: grad, .. }: &BranchGrads,
        state: Option<Vec<Tensor>>,
        sink: &mut Gradients<'_>,
    ) -> contract::Result<Backward> {
        let _watch = part(StepPart::AttentionBack);
        let back = self.compute_back(pass, taken(saved)?, grad).map_err(refused)?;
        let mut inputs = Vec::new();
        for (chunk, (input, gradients)) in back.into_iter().enumerate() {
            let mut sink = sink.of(chunk);
            for (id, gradient) in gradients {
                emit(&mut sink, id, gradient)?;
            }
            inputs.push(input);
        }
        Ok(Backward { x: Rows::whole(inputs), state })
    }
}

/// The gradients of parameters.
type ParamGrads = [(ParamId, Tensor); 5];

impl Linear {
    fn compute(&self, pass: &Pass<'_>, x: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Saved>)> {
        let by = recurrence(pass)?;
        let projected = x.iter().map(|x| self.project(pass, x)).collect::<Result<Vec<_>>>()?;
        let features = projected.iter().map(|of_chunk| of_chunk.features(pass.config));
        let features = features.collect::<Result<Vec<_>>>()?;
        let left = |at: usize, span| by.after(&features[at], span, &None);
        let states = CarriedStates::gather(pass, Side::Before, left)?;
        let (mut outs, mut saved) = (Vec::new(), Vec::new());
        let parts = pass.chunks.iter().zip(x).zip(projected).enumerate();
        for (at, ((chunk, x), projected)) in parts {
            let before = states.of(pass, &by, at)?;
            let mut read = Vec::new();
            for span in &chunk.spans {
                let state = if span.before > 0 { &before[states.row(*span)] } else { &None };
                read.extend(by.read(&features[at], *span, state)?);
            }
            let (heads, denominator) = divided(&Tensor::f_cat(&read, 2)?)?;
            let gated = gated(&heads, &projected.gate, pass.kind)?;
            outs.push(pass.ops.matmul(&gated, &pass.weights[self.o_proj].f_tr()?)?);
            let x = x.shallow_clone();
            saved.push(Saved { x, projected, heads, denominator, before });
        }
        Ok((outs, saved))
    }

    fn project(&self, pass: &Pass<'_>, x: &Tensor) -> Result<Projections> {
        let by = |weight: ParamId| pass.ops.matmul(x, &pass.weights[weight].f_tr()?);
        Ok(Projections {
            query: by(self.q_proj)?,
            key: by(self.k_proj)?,
            value: by(self.v_proj)?,
            gate: by(self.gate_proj)?,
        })
    }

    /// From the gradient of the output, by chunk: that of the normed residual, and those of the parameters.
    fn compute_back(
        &self,
        pass: &Pass<'_>,
        saved: Vec<Saved>,
        grad: &[Tensor],
    ) -> Result<Vec<(Tensor, ParamGrads)>> {
        let by = recurrence(pass)?;
        let (mut features, mut reads, mut gates) = (Vec::new(), Vec::new(), Vec::new());
        for (saved_chunk, grad) in saved.iter().zip(grad) {
            let (read, gate, weight) = self.gate_back(pass, saved_chunk, grad)?;
            features.push(saved_chunk.projected.features(pass.config)?);
            reads.push(read);
            gates.push((gate, weight));
        }
        let left = |at: usize, span| by.before(&features[at], &reads[at], span, &None);
        let states = CarriedStates::gather(pass, Side::After, left)?;
        let mut found = Vec::new();
        let parts = pass.chunks.iter().zip(saved).zip(gates).enumerate();
        for (at, ((chunk, saved_chunk), (gate, out))) in parts {
            let (after, mut blocks) = (states.of(pass, &by, at)?, Vec::new());
            for span in &chunk.spans {
                let row = states.row(*span);
                let earlier = if span.before > 0 { &saved_chunk.before[row] } else { &None };
                let later = if states.is_last(*span) { &after[row] } else { &None };
                blocks.extend(by.back(&features[at], &reads[at], *span, earlier, later)?);
            }
            let [query, key, value] = features[at].back(&blocks, pass.kind)?;
            let weights = [
                (self.q_proj, query),
                (self.k_proj, key),
                (self.v_proj, value),
                (self.gate_proj, gate),
            ];
            let (input, [query, key, value, gate]) = inputs(pass, &saved_chunk.x, weights)?;
            found.push((input, [query, key, value, gate, (self.o_proj, out)]));
        }
        Ok(found)
    }

    /// Gradients of the heads' output with denominator, `[K, J, n, d + 1]`, of the gate's projection, and of `o_proj`.
    fn gate_back(
        &self,
        pass: &Pass<'_>,
        saved: &Saved,
        grad: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let Saved { heads, denominator, projected, .. } = saved;
        let out = pass.gradient(&grad.f_tr()?, &gated(heads, &projected.gate, pass.kind)?)?;
        let grad = pass.ops.matmul(grad, &pass.weights[self.o_proj])?.f_to_kind(Kind::Float)?;
        let (keys, of) = (pass.config.num_key_value_heads, [heads, denominator, &projected.gate]);
        let (read, gate) = gated_back(&grad, of, keys, pass.kind)?;
        Ok((read, gate, out))
    }
}

impl Projections {
    /// As the recurrence reads them.
    fn features(&self, config: &ZayaConfig) -> Result<Features> {
        let shape = [config.num_key_value_heads, config.group(), config.head_dim];
        Features::of([&self.query, &self.key, &self.value], shape)
    }
}

/// The side from which a chunk receives states.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    /// States of earlier tokens.
    Before,
    /// Gradients of states, from later tokens.
    After,
}

/// The state that each chunk alone contributes to documents that continue beyond it.
struct CarriedStates {
    side: Side,
    /// By chunk and sequence; `None` where there is one chunk.
    all: Option<Tensor>,
    /// Tokens of a sequence in a chunk.
    width: i64,
}

impl CarriedStates {
    /// Gathers them; `left` computes the state of a span of a local chunk.
    fn gather(
        pass: &Pass<'_>,
        side: Side,
        left: impl Fn(usize, AttentionSpan) -> Result<RecurrentState>,
    ) -> Result<CarriedStates> {
        let (width, config) = (pass.chunks.width(), pass.config);
        let mut carried = CarriedStates { side, all: None, width };
        if pass.chunks.count() == 1 {
            return Ok(carried);
        }
        let mut states_here = Vec::new();
        for (at, chunk) in pass.chunks.iter().enumerate() {
            let ends = chunk.spans.iter().filter(|span| match side {
                Side::Before => carried.is_last(**span),
                Side::After => span.start % width == 0,
            });
            let states = ends.filter_map(|span| left(at, *span).transpose());
            states_here.push(Tensor::f_stack(&states.collect::<Result<Vec<_>>>()?, 0)?);
        }
        let (keys, dim) = (config.num_key_value_heads, config.head_dim);
        let flat = Tensor::f_stack(&states_here, 0)?.f_view([states_here.len() as i64, -1])?;
        let all = pass.chunks.of_all("states of chunks", &flat)?;
        carried.all = Some(all.f_view([all.size()[0], -1, keys, dim, dim + 1])?);
        Ok(carried)
    }

    /// The state that enters each sequence of the `at`-th local chunk: folds its document's chunks, farthest first.
    fn of(&self, pass: &Pass<'_>, by: &Recurrence, at: usize) -> Result<Vec<RecurrentState>> {
        let crossing = pass.chunks.crossing(at);
        let Some(all) = &self.all else { return Ok(crossing.into_iter().map(|_| None).collect()) };
        let chunk = pass.chunks.number(at) as i64;
        let states = (0i64..).zip(crossing).map(|(row, [before, after])| {
            let (tokens, step) = match self.side {
                Side::Before => (before, -1),
                Side::After => (after, 1),
            };
            let reached = (tokens + self.width - 1) / self.width;
            let mut state = None;
            for far in (1..=reached).rev() {
                let next = all.f_select(0, chunk + step * far)?.f_select(0, row)?;
                let len = self.width.min(tokens - (far - 1) * self.width);
                state = Some(by.join(&next, &state, len)?);
            }
            Ok(state)
        });
        states.collect()
    }

    fn row(&self, span: AttentionSpan) -> usize {
        (span.start / self.width) as usize
    }

    /// Whether a span ends at the end of its sequence's part of the chunk.
    fn is_last(&self, span: AttentionSpan) -> bool {
        (span.start + span.len) % self.width == 0
    }
}

fn recurrence(pass: &Pass<'_>) -> Result<Recurrence> {
    let (config, device) = (pass.config, pass.chunks.of(0).tokens.device());
    let heads = 0..config.num_key_value_heads as u32;
    let rates = heads.map(|head| config.linear_decay.rate(head)).collect();
    Recurrence::new(pass.ops, rates, device)
}

/// From the gradients of the projections' outputs: that of `x`, f32, and those of the projections.
fn inputs(
    pass: &Pass<'_>,
    x: &Tensor,
    projected: [(ParamId, Tensor); 4],
) -> Result<(Tensor, [(ParamId, Tensor); 4])> {
    let part =
        |(weight, grad): &(ParamId, Tensor)| pass.ops.matmul_part(grad, &pass.weights[*weight]);
    let [first, rest @ ..] = &projected;
    let sum =
        rest.iter().try_fold(part(first)?, |sum, one| Ok::<_, Error>(sum.f_add(&part(one)?)?))?;
    let gradient =
        |(id, grad): &(ParamId, Tensor)| Result::<_>::Ok((*id, pass.gradient(&grad.f_tr()?, x)?));
    let [a, b, c, d] = projected.each_ref().map(gradient);
    let sum = sum.f_to_kind(pass.kind)?;
    Ok((sum, [a?, b?, c?, d?]))
}
