//! What a micro-batch costs, from the configuration alone: operations, and bytes that it holds.
//!
//! The model has no such numbers: its formulas are all here and in `matmuls`. Tests hold them against what runs:
//! operations against recorded matmuls (`counted`), bytes against libtorch's allocator (`tests/memory.rs`). What ranks
//! send each other is in `tools::plan`.

#[cfg(test)]
mod counted;
pub mod matmuls;

use std::collections::BTreeSet;

use curriculum::Dtype;

use self::matmuls::{MatmulCount, MicroBatchShape};
use crate::model::{
    ActivationCheckpointing, Assignment, Attention, ChunkGrid, Cut, FeedForward, LogitsDtype,
    MicroBatchOptions, RouterKind, ZayaConfig,
};

/// Model FLOPs of forward and backward over `tokens`, which layer by layer are sent to experts `routed` times, with
/// `pairs` of a query and a key that see each other in all layers: projections, the grouped convolution, attention to
/// what each document's mask and window leave, the router, the experts, and the head. Norms, activations, the optimizer
/// and recomputation are not counted.
pub fn flops(config: &ZayaConfig, tokens: u64, routed: &[u64], pairs: u64) -> f64 {
    let by = MicroBatchShape { tokens: tokens as i64, chunks: 1, routed: &[], recompute: false };
    let all = matmuls::of_micro_batch(config, by);
    let with_experts =
        config.kinds().zip(routed).filter(|((_, kind), _)| *kind == FeedForward::Moe);
    let routed: u64 = with_experts.map(|(_, routed)| routed).sum();
    let expert = 3 * config.hidden_size * config.moe_intermediate_size;
    all.iter().map(MatmulCount::operations).sum::<f64>()
        + 6.0 * routed as f64 * expert as f64
        + 3.0 * matmuls::of_attention(config, tokens, pairs)
}

/// Model FLOPs of a step, forward and backward, from tokens by layer and router class (the skip last) and `pairs`.
pub(crate) fn step_flops(config: &ZayaConfig, tokens: u64, router: &[Vec<u64>], pairs: u64) -> f64 {
    // A layer without a router has no counts.
    let experts = |counts: &Vec<u64>| counts.iter().rev().skip(1).sum::<u64>();
    flops(config, tokens, &router.iter().map(experts).collect::<Vec<_>>(), pairs)
}

/// Bytes of a number that a model in `dtype` multiplies.
fn narrow(dtype: Dtype) -> u64 {
    if dtype == Dtype::Bf16 { 2 } else { 4 }
}

/// Sizes of a configuration, each of one token.
#[derive(Clone, Copy)]
struct Sizes {
    hidden: u64,
    query: u64,
    key: u64,
    conv: u64,
    heads: u64,
    keys: u64,
    inner: u64,
}

impl Sizes {
    fn of(config: &ZayaConfig) -> Self {
        let size = |size: i64| size as u64;
        Sizes {
            hidden: size(config.hidden_size),
            query: size(config.query_size()),
            key: size(config.key_size()),
            conv: size(config.conv_size()),
            heads: size(config.num_attention_heads),
            keys: size(config.num_key_value_heads),
            inner: size(config.moe_intermediate_size),
        }
    }
}

/// Bytes that an attention saves for a token, input and output included.
fn attention_bytes(config: &ZayaConfig, kind: Attention, narrow: u64, cut: Cut) -> u64 {
    let Sizes { hidden, query, key, conv, heads, keys, .. } = Sizes::of(config);
    // The keys of all chunks in one tensor, which later chunks read.
    let gathered = if cut.chunks > 1 { key } else { 0 };
    match kind {
        // Projected, depthwise convolution, normed; values before and after their shift; the heads. Before the norm,
        // its factors, and two numbers of each query's softmax.
        Attention::Cca => {
            narrow * (2 * hidden + 4 * conv + 2 * key + query + gathered)
                + 4 * (conv + heads + keys + 2 * heads)
        }
        // Queries and keys, values, the heads. With norms: projections before them, whose tensor also has the values,
        // and their factors. Two numbers of each query's softmax.
        Attention::Gqa => {
            let (before, factors) =
                if config.qk_norm { (query + 2 * key, heads + keys) } else { (0, 0) };
            narrow * (2 * hidden + (query + key) + key + query + gathered + before)
                + 4 * (factors + 2 * heads)
        }
        // The projections; the heads' output, and its denominators.
        Attention::Linear => narrow * (2 * hidden + 2 * query + 2 * key) + 4 * (query + heads),
    }
}

/// Bytes that a feed-forward saves for a token, input and output included.
fn feed_forward_bytes(config: &ZayaConfig, kind: FeedForward, narrow: u64) -> u64 {
    let Sizes { hidden, inner, .. } = Sizes::of(config);
    // Gate, up, and their product.
    let gated = |inner: u64| narrow * (2 * hidden + 3 * inner);
    if kind == FeedForward::Mlp {
        return gated(inner);
    }
    // For each of a token's experts: its input and output in the order of experts; gate, up, and their product; the
    // class and its weight, and the permutation of tokens and its inverse.
    let routed = gated(inner) + 8 + 4 + 2 * 8;
    let shared = config.num_shared_experts as u64 * inner;
    let shared = if shared > 0 { gated(shared) } else { 0 };
    let classes = config.num_experts_per_tok as u64;
    // The backward pass holds the gradients of the experts' inputs and outputs together; of one expert for each token
    // they are within the part of all saved tensors that is counted for gradients.
    let repeated = (classes - 1) * 2 * narrow * hidden;
    let probabilities = config.router_classes() as u64;
    let router = match config.router {
        // State, its norm with a factor, both hidden layers before and after their activation, all probabilities.
        RouterKind::Mlp => 6 * config.router_hidden_size as u64 + 1 + probabilities,
        RouterKind::Linear => probabilities,
    };
    narrow * 2 * hidden + 4 * router + classes * routed + repeated + shared
}

/// Bytes of a layer's weights that are copied for a micro-batch where they are cut into several shards.
fn weight_copies(
    config: &ZayaConfig,
    attention: Attention,
    feed_forward: FeedForward,
    narrow: u64,
    cut: Cut,
) -> u64 {
    if cut.shards <= 1 {
        return 0;
    }
    let Sizes { hidden, query, key, conv, inner, .. } = Sizes::of(config);
    // All of them: shards are saved for the backward pass.
    let attention = match attention {
        Attention::Cca => {
            conv * hidden + 2 * conv * config.head_dim as u64 + hidden * (key + query)
        }
        Attention::Gqa => hidden * 2 * (query + key),
        // Read in place.
        Attention::Linear => 0,
    };
    // A shard at a time.
    let gated = |inner: u64| narrow * 3 * hidden * inner / cut.shards;
    let feed_forward = match feed_forward {
        FeedForward::Mlp => gated(inner),
        FeedForward::Moe => {
            gated(inner * config.num_experts as u64)
                + gated(inner * config.num_shared_experts as u64)
        }
    };
    narrow * attention + feed_forward
}

/// Bytes of the logits that exist at a time, their logarithms, and their gradient as an operand of matmuls. A device
/// computes the gradient in place of the logits; in bf16 it adds the weights' gradient from a separate matrix.
fn head_bytes(config: &ZayaConfig, tokens: u64, narrow: u64, on_device: bool) -> u64 {
    let (vocabulary, width) = (config.vocab_size as u64, config.hidden_size as u64);
    let logits = tokens.min(config.loss_chunk as u64) * vocabulary;
    // Both factors, and the gradient of the inputs.
    let (narrow, widened) = match (config.logits_dtype, narrow) {
        (LogitsDtype::F32, 2) => (4, 4 * (vocabulary + 2 * tokens) * width),
        _ => (narrow, 0),
    };
    let logits = match (on_device, narrow) {
        (false, _) => (8 + narrow) * logits,
        (true, 4) => narrow * logits,
        (true, _) => narrow * (logits + vocabulary * width),
    };
    logits + widened
}

/// Bytes that a micro-batch of `tokens` holds between its passes: at the head, with its logits, and at most when only
/// one layer's activations remain. Attention needs `attending` more while a layer computes it.
pub(crate) fn activation_bytes(
    config: &ZayaConfig,
    tokens: u64,
    attending: u64,
    MicroBatchOptions { keep, cut, .. }: MicroBatchOptions,
    dtype: Dtype,
    on_device: bool,
) -> [u64; 2] {
    let (narrow, width) = (narrow(dtype), config.hidden_size as u64);
    // The residual at each sublayer's input, f32, and the factors of its norm.
    let stream = 4 * width + 4;
    let [ends, beside] = [5, 3].map(|rows| rows * 4 * tokens * width);
    let layers: Vec<[u64; 2]> = config
        .kinds()
        .map(|(first, second)| {
            let attention = tokens * (attention_bytes(config, first, narrow, cut) + stream);
            let rest = tokens * (feed_forward_bytes(config, second, narrow) + stream);
            let copies = weight_copies(config, first, second, narrow, cut);
            // A backward pass adds gradients of about a third of what was saved: the feed-forward's for one chunk at a
            // time. When attention's backward pass begins, the feed-forward's saved tensors have been freed. Gradients
            // of the residual are on both sides of a sublayer, and the embedded tokens stay.
            let both = attention + rest;
            let back = (both + rest / (3 * cut.chunks)).max(attention + attention / 3 + attending);
            [both + copies, back + beside + copies]
        })
        .collect();
    let head = head_bytes(config, tokens / cut.chunks, narrow, on_device);
    let last = layers.iter().map(|[_, back]| *back).max().unwrap_or(0);
    match keep {
        // At the head: the embedded tokens, and the residual before and after the final norm with their gradients.
        ActivationCheckpointing::Everything => {
            let kept: u64 = layers.iter().map(|[kept, _]| kept).sum();
            [kept + ends + head.max(attending), last]
        }
        ActivationCheckpointing::LayerInputs => {
            let routed = config.kinds().any(|(_, kind)| kind == FeedForward::Moe);
            let state = match config.router {
                RouterKind::Mlp if routed => config.router_hidden_size as u64,
                _ => 0,
            };
            let inputs = tokens * 4 * (width + state);
            let at = (1..).zip(&layers).map(|(number, [_, back])| number * inputs + back);
            let most = layers.len() as u64 * inputs + ends + head;
            [at.fold(most, u64::max), last]
        }
    }
}

/// The most bytes of one layer's keys and values that a rank has of a shared micro-batch whose sequences are one
/// document each, and of their gradients in f32.
pub(crate) fn gathered_bytes(
    config: &ZayaConfig,
    grid: ChunkGrid,
    dealt: Assignment,
    dtype: Dtype,
) -> u64 {
    let windows: BTreeSet<_> = config.windows().collect();
    let keys = windows.into_iter().map(|window| grid.gathered(dealt, window));
    2 * (narrow(dtype) + 4) * config.key_size() as u64 * keys.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ParamSpec, parameters};

    /// Six operations for each token and active weight, plus attention: the rule of thumb, for matrices only.
    #[test]
    fn it_is_six_for_each_active_weight_and_token() {
        let config = ZayaConfig::preset("zaya1-8b").unwrap();
        let experts = config.num_experts as u64;
        let active: u64 = parameters(&config)
            .iter()
            .filter(|spec| spec.shape.len() > 1 && !spec.name.contains("depthwise"))
            .map(|spec| {
                if spec.name.contains(".experts.") {
                    spec.elements() / experts
                } else {
                    spec.elements()
                }
            })
            .sum();
        let tokens = 1000;
        let routed = vec![tokens; config.num_hidden_layers as usize];
        let found = flops(&config, tokens, &routed, 0);
        assert_eq!(found, 6.0 * active as f64 * tokens as f64);
        let with = flops(&config, tokens, &routed, 10);
        // Scores and values: 2 x 2 x query width for a pair, three times.
        assert_eq!(with - found, (12 * config.query_size() as u64 * 10) as f64);
    }

    /// Three matmuls of an expert's width instead of a router and one expert: 6 operations per weight and token.
    #[test]
    fn a_plain_feed_forward_costs_what_an_expert_does() {
        let config =
            ZayaConfig { num_hidden_layers: 2, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        let feed_forward = vec![FeedForward::Moe, FeedForward::Mlp];
        let plain = ZayaConfig { feed_forward, ..config.clone() };
        let specs = parameters(&plain);
        let router = specs.iter().filter(|spec| spec.name.contains("layers.0.mlp.gate."));
        let router: u64 = router.filter(|spec| spec.shape.len() > 1).map(ParamSpec::elements).sum();
        let operations = |config: &ZayaConfig| flops(config, 1, &[1, 1], 0);
        assert!(router > 0);
        assert_eq!(operations(&config) - operations(&plain), 6.0 * router as f64);
    }

    /// 6 operations per weight of a matmul and token, and 12 per (query, key) pair and number of a query.
    #[test]
    fn a_baseline_costs_its_weights_and_pairs() {
        let config = ZayaConfig {
            layers: vec![Attention::Gqa],
            feed_forward: vec![FeedForward::Mlp],
            qk_norm: true,
            num_hidden_layers: 2,
            ..ZayaConfig::preset("zaya1-nano").unwrap()
        };
        let specs = parameters(&config);
        let weights: u64 =
            specs.iter().filter(|spec| spec.shape.len() > 1).map(ParamSpec::elements).sum();
        let pairs = 12.0 * (7 * config.query_size()) as f64;
        assert_eq!(flops(&config, 5, &[0, 0], 7), 6.0 * 5.0 * weights as f64 + pairs);
    }
}
