//! The matmuls of a micro-batch, each with its shape and how often it is computed, forward and backward.
//!
//! A test checks them: it computes a micro-batch with a table of operations that records every matmul.

use serde::Serialize;

use crate::model::{Attention, FeedForward, RouterKind, ZayaConfig};
use crate::timing::StepPart;

/// A matmul of `[rows, inner]` and `[inner, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct MatmulShape {
    /// Rows of the left operand and of the result.
    pub rows: i64,
    /// Columns of the left operand, rows of the right one.
    pub inner: i64,
    /// Columns of the right operand and of the result.
    pub columns: i64,
}

impl MatmulShape {
    /// Multiplications and additions.
    pub fn operations(self) -> f64 {
        2.0 * self.rows as f64 * self.inner as f64 * self.columns as f64
    }
}

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
pub fn of_micro_batch(config: &ZayaConfig, by: MicroBatchShape<'_>) -> Vec<MatmulCount> {
    let mut list = List { found: Vec::new(), count: 0, forward: 1 + u64::from(by.recompute) };
    for kind in [Attention::Cca, Attention::Gqa, Attention::Linear] {
        list.count = by.chunks * config.kinds().filter(|(one, _)| *one == kind).count() as u64;
        attention(config, kind, by.tokens, &mut list);
    }
    list.count = by.chunks * with(config, FeedForward::Mlp);
    gated(config, by.tokens, config.moe_intermediate_size, &mut list);
    list.count = by.chunks * with(config, FeedForward::Moe);
    router(config, by.tokens, &mut list);
    for rows in by.routed.iter().copied().filter(|rows| *rows > 0) {
        expert(config, rows, &mut list);
    }
    let shared = config.num_shared_experts * config.moe_intermediate_size;
    if shared > 0 {
        gated(config, by.tokens, shared, &mut list);
    }
    let mut list = List { count: by.chunks, forward: 1, ..list };
    let size = config.loss_chunk;
    head(config, size, by.tokens / size, &mut list);
    head(config, by.tokens % size, 1, &mut list);
    merged(list.found)
}

/// Those of one expert over `rows` of its tokens in one layer.
#[cfg(test)]
pub(crate) fn of_expert(config: &ZayaConfig, rows: i64) -> Vec<MatmulCount> {
    let mut list = List { found: Vec::new(), count: 1, forward: 1 };
    expert(config, rows, &mut list);
    list.found
}

/// How many layers have this feed-forward.
fn with(config: &ZayaConfig, kind: FeedForward) -> u64 {
    config.kinds().filter(|(_, one)| *one == kind).count() as u64
}

/// Operations of attention over `pairs` of a query and a key that see each other, in all layers together, and of linear
/// attention's recurrence over `tokens`, however it is computed, forward; twice as many backward.
pub fn of_attention(config: &ZayaConfig, tokens: u64, pairs: u64) -> f64 {
    let (query, key) = (config.query_size() as f64, config.key_size() as f64);
    let state = 2.0 * (query + key) * (config.head_dim + 1) as f64 * tokens as f64;
    let linear = config.kinds().filter(|(kind, _)| *kind == Attention::Linear).count();
    4.0 * query * pairs as f64 + linear as f64 * state
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
        // Of an expert without tokens, or a kind that no layer has.
        if rows == 0 || inner == 0 || count == 0 {
            return;
        }
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

fn attention(config: &ZayaConfig, kind: Attention, n: i64, list: &mut List) {
    let place =
        Place { forward: StepPart::Attention, backward: StepPart::AttentionBack, wide: false };
    let (hidden, dim) = (config.hidden_size, config.head_dim);
    let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
    match kind {
        Attention::Cca => {
            list.linear(place, [n, hidden, conv + key], 1);
            list.linear(place, [n, 2 * dim, dim], (conv / dim) as u64);
        }
        Attention::Gqa => list.linear(place, [n, hidden, query + 2 * key], 1),
        Attention::Linear => {
            list.linear(place, [n, hidden, query], 2);
            list.linear(place, [n, hidden, key], 2);
        }
    }
    list.linear(place, [n, query, hidden], 1);
}

fn router(config: &ZayaConfig, n: i64, list: &mut List) {
    let place = Place { forward: StepPart::Router, backward: StepPart::RouterBack, wide: false };
    let wide = Place { wide: true, ..place };
    let (hidden, state) = (config.hidden_size, config.router_hidden_size);
    match config.router {
        RouterKind::Mlp => {
            list.linear(place, [n, hidden, state], 1);
            list.linear(wide, [n, state, state], 2);
            list.linear(wide, [n, state, config.router_classes()], 1);
        }
        RouterKind::Linear => list.linear(wide, [n, hidden, config.router_classes()], 1),
    }
}

/// The part of a feed-forward's matmuls.
const FEED_FORWARD: Place =
    Place { forward: StepPart::Experts, backward: StepPart::ExpertsBack, wide: false };

/// An expert, whose gate and up are one matrix.
fn expert(config: &ZayaConfig, rows: i64, list: &mut List) {
    let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
    list.linear(FEED_FORWARD, [rows, hidden, 2 * inner], 1);
    list.linear(FEED_FORWARD, [rows, inner, hidden], 1);
}

/// A gated unit for every token.
fn gated(config: &ZayaConfig, n: i64, inner: i64, list: &mut List) {
    list.linear(FEED_FORWARD, [n, config.hidden_size, inner], 2);
    list.linear(FEED_FORWARD, [n, inner, config.hidden_size], 1);
}

fn head(config: &ZayaConfig, tokens: i64, times: i64, list: &mut List) {
    let place = Place { forward: StepPart::Head, backward: StepPart::Head, wide: false };
    list.linear(place, [tokens, config.hidden_size, config.vocab_size], times as u64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model;
    use proptest::prelude::*;

    proptest! {
        /// A second forward pass of the layers is a third of their operations.
        #[test]
        fn recomputation_is_a_third_of_the_layers(tokens in 1i64..300, loss_chunk in 1i64..200, preset in 0usize..4) {
            let preset = ZayaConfig::preset(model::PRESETS[preset]).unwrap();
            let config = ZayaConfig { loss_chunk, ..preset };
            let routed = even(tokens, config.num_experts);
            prop_assert_eq!(routed.iter().sum::<i64>(), tokens);
            let by = MicroBatchShape { tokens, chunks: 1, routed: &routed, recompute: false };
            let all = of_micro_batch(&config, by);
            let again = of_micro_batch(&config, MicroBatchShape { recompute: true, ..by });
            let sum = |all: &[MatmulCount]| all.iter().map(MatmulCount::operations).sum::<f64>();
            let more = sum(&again) - sum(&all);
            let head: f64 = all.iter().filter(|it| it.part == StepPart::Head).map(MatmulCount::operations).sum();
            let inside = sum(&all) - head;
            prop_assert!((3.0 * more - inside).abs() <= 1e-9 * inside);
        }
    }
}
