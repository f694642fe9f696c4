//! The matmuls of a micro-batch, each with its shape and how often it is computed, forward and backward.
//!
//! A test checks them: it computes a micro-batch with a table of operations that records every matmul.

use std::ops::Range;

use super::shapes::MatmulShape;
use crate::model::ZayaConfig;
use crate::timing::StepPart;

/// Matmuls of one shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulCount {
    /// The part of a step that they belong to.
    pub part: StepPart,
    /// The shape of their operands.
    pub shape: MatmulShape,
    /// How many a micro-batch computes.
    pub count: u64,
    /// Whether they stay f32 in every dtype of a run.
    pub wide: bool,
}

impl MatmulCount {
    /// Operations of all of them.
    pub fn operations(&self) -> f64 {
        self.count as f64 * self.shape.operations()
    }
}

/// How a micro-batch is computed.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatchShape<'a> {
    /// Tokens of a chunk.
    pub tokens: i64,
    /// Chunks, each computed separately.
    pub chunks: u64,
    /// Tokens of a chunk that are routed to each expert.
    pub routed: &'a [i64],
    /// Whether layers are recomputed in the backward pass.
    pub recompute: bool,
}

/// The tokens of each expert with even routing.
pub fn even(tokens: i64, experts: i64) -> Vec<i64> {
    (0..experts).map(|expert| tokens * (expert + 1) / experts - tokens * expert / experts).collect()
}

/// All matmuls of a micro-batch except those inside attention.
pub(crate) fn of_micro_batch(config: &ZayaConfig, by: MicroBatchShape<'_>) -> Vec<MatmulCount> {
    let layers = config.num_hidden_layers as u64 * by.chunks;
    let mut list = List { found: Vec::new(), count: layers, forward: 1 + u64::from(by.recompute) };
    attention(config, by.tokens, &mut list);
    router(config, by.tokens, &mut list);
    for rows in by.routed.iter().copied().filter(|rows| *rows > 0) {
        expert(config, rows, &mut list);
    }
    let mut list = List { count: by.chunks, forward: 1, ..list };
    let size = config.loss_chunk;
    for first in (0..by.tokens).step_by(size as usize) {
        head(config, first..by.tokens.min(first + size), &mut list);
    }
    merged(list.found)
}

/// Operations of attention over `pairs` of a query and a key that see each other, in all layers, forward; twice as many
/// backward.
pub(crate) fn of_attention(config: &ZayaConfig, pairs: u64) -> f64 {
    4.0 * config.query_size() as f64 * pairs as f64 * config.num_hidden_layers as f64
}

/// Operations of the five Newton-Schulz iterations on a matrix, as the CPU table computes them: half of each symmetric
/// matmul, and only the short side where the matrix is oblong.
pub(crate) fn of_newton_schulz(rows: i64, columns: i64) -> f64 {
    let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
    match long >= 2.0 * short {
        true => 3.0 * short * short * long + 17.0 * short.powi(3),
        false => 15.0 * short * short * long + 5.0 * short.powi(3),
    }
}

/// Merges equal matmuls into one entry.
fn merged(mut all: Vec<MatmulCount>) -> Vec<MatmulCount> {
    let key = |it: &MatmulCount| (it.part as usize, it.shape, it.wide);
    all.sort_by_key(key);
    all.dedup_by(|next, kept| {
        let same = key(next) == key(kept);
        kept.count += if same { next.count } else { 0 };
        same
    });
    all
}

struct List {
    found: Vec<MatmulCount>,
    /// How often the next entries are computed.
    count: u64,
    /// How often a forward pass is computed.
    forward: u64,
}

/// The parts of a layer's matmul, forward and backward.
#[derive(Clone, Copy)]
struct Place {
    forward: StepPart,
    backward: StepPart,
    wide: bool,
}

impl List {
    fn put(&mut self, part: StepPart, [rows, inner, columns]: [i64; 3], count: u64, wide: bool) {
        let shape = MatmulShape { rows, inner, columns };
        self.found.push(MatmulCount { part, shape, count, wide });
    }

    /// A linear map of `n` rows from `inputs` to `outputs` numbers, `times` times, and both of its gradients.
    fn linear(&mut self, place: Place, [n, inputs, outputs]: [i64; 3], times: u64) {
        let (forward, count) = (self.count * times * self.forward, self.count * times);
        self.put(place.forward, [n, inputs, outputs], forward, place.wide);
        self.put(place.backward, [n, outputs, inputs], count, place.wide);
        self.put(place.backward, [outputs, n, inputs], count, place.wide);
    }
}

fn attention(config: &ZayaConfig, n: i64, list: &mut List) {
    let place =
        Place { forward: StepPart::Attention, backward: StepPart::AttentionBack, wide: false };
    let (hidden, dim) = (config.hidden_size, config.head_dim);
    let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
    list.linear(place, [n, hidden, conv + key], 1);
    list.linear(place, [n, 2 * dim, dim], (conv / dim) as u64);
    list.linear(place, [n, query, hidden], 1);
}

fn router(config: &ZayaConfig, n: i64, list: &mut List) {
    let place = Place { forward: StepPart::Router, backward: StepPart::RouterBack, wide: false };
    let (hidden, state) = (config.hidden_size, config.router_hidden_size);
    list.linear(place, [n, hidden, state], 1);
    let place = Place { wide: true, ..place };
    list.linear(place, [n, state, state], 2);
    list.linear(place, [n, state, config.router_classes()], 1);
}

fn expert(config: &ZayaConfig, rows: i64, list: &mut List) {
    let place = Place { forward: StepPart::Experts, backward: StepPart::ExpertsBack, wide: false };
    let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
    list.linear(place, [rows, hidden, 2 * inner], 1);
    list.linear(place, [rows, inner, hidden], 1);
}

fn head(config: &ZayaConfig, tokens: Range<i64>, list: &mut List) {
    let place = Place { forward: StepPart::Head, backward: StepPart::Head, wide: false };
    list.linear(place, [tokens.end - tokens.start, config.hidden_size, config.vocab_size], 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model;
    use proptest::prelude::*;

    proptest! {
        /// Their sum is the model's FLOPs.
        #[test]
        fn they_are_the_models_operations(
            tokens in 1i64..300, pairs in 0u64..100_000, loss_chunk in 1i64..200, preset in 0usize..4,
        ) {
            let preset = ZayaConfig::preset(model::PRESETS[preset]).unwrap();
            let config = ZayaConfig { loss_chunk, ..preset };
            let routed = even(tokens, config.num_experts);
            prop_assert_eq!(routed.iter().sum::<i64>(), tokens);
            let by = MicroBatchShape { tokens, chunks: 1, routed: &routed, recompute: false };
            let all = of_micro_batch(&config, by);
            let found = all.iter().map(MatmulCount::operations).sum::<f64>() + 3.0 * of_attention(&config, pairs);
            let layers = vec![tokens as u64; config.num_hidden_layers as usize];
            prop_assert_eq!(found, model::flops(&config, tokens as u64, &layers, pairs));
            // A second forward pass of the layers is a third of their operations.
            let again = of_micro_batch(&config, MicroBatchShape { recompute: true, ..by });
            let sum = |all: &[MatmulCount]| all.iter().map(MatmulCount::operations).sum::<f64>();
            let more = sum(&again) - sum(&all);
            let head: f64 = all.iter().filter(|it| it.part == StepPart::Head).map(MatmulCount::operations).sum();
            let inside = sum(&all) - head;
            prop_assert!((3.0 * more - inside).abs() <= 1e-9 * inside);
        }
    }
}
