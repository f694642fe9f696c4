//! Bytes that a micro-batch reads and writes outside of products: norms, residuals, activations, the softmax of the head.
//!
//! Counted operation by operation as the table of operations takes and answers with them, each operand once. What a cache holds
//! is not known here, so that small micro-batches are faster than this says. The softmax of the head, whose `exp` costs a CPU
//! more than its bytes, has a rate of its own, by which gated units go, too.

use crate::model::ZayaConfig;
use crate::timing::Part;

/// In place of how many bytes a row of the router's few classes counts, forward and backward: libtorch goes through softmax,
/// choice and picks row by row (0.24 and 0.07 microseconds on one Xeon with 9 classes, where 12 GB pass in a second).
const CLASSES: [f64; 2] = [2900.0, 850.0];

/// Bytes of each part in a micro-batch of `tokens`; large products' operands have `narrow` bytes.
pub(crate) fn of_micro_batch(config: &ZayaConfig, tokens: i64, narrow: u64) -> Vec<(Part, f64)> {
    let f = |size: i64| size as f64;
    let w = narrow as f64;
    // To and from the kind of products, where it is not f32.
    let cast = if narrow == 4 { 0.0 } else { 4.0 + w };
    let (hidden, inner, state) =
        (f(config.hidden_size), f(config.moe_intermediate_size), f(config.router_hidden_size));
    let (key, conv) = (f(config.key_size()), f(config.conv_size()));
    let layers = f(config.num_hidden_layers);
    // The norm before a half and the residual after it: x and the normed; the branch, the residual, and their sum.
    let half = hidden * (8.0 + cast + w + 8.0);
    // Back: gradient, branch and residual, and both gradients; x and the gradient, and that of x; their sum. What comes back to
    // the norm is made f32, and what goes on to the branch is rounded.
    let half_back = hidden * (16.0 + w + 12.0 + 12.0 + 2.0 * cast);
    let embedding = hidden * (w + 8.0 + 16.0);
    // Halves of the values side by side, the first convolution, queries and keys with their means and their turn.
    let attention = 2.0 * w * key + 3.0 * w * conv + conv * (2.0 * cast + 8.0 + w);
    let attention_back = conv * (12.0 + 2.0 * cast + 3.0 * w + 4.0 + 12.0) + 4.0 * w * key;
    // Biases, averaging, norm and both activations over the router's state.
    let (router, router_back) = (48.0 * state + CLASSES[0], 72.0 * state + CLASSES[1]);
    // There and back in the order of experts.
    let experts = hidden * (2.0 * w + w + 4.0 + cast);
    let experts_back = hidden * (8.0 + w + 2.0 * cast + 3.0 * w);
    // The weights' gradients begin as zeros, are written by products of few rows, which do little else, and are made f32.
    let weights = 3.0 * hidden * inner * f(config.num_experts) * (2.0 * w + cast);
    // Logits as products take and give them; the softmax between is counted by itself.
    let head = f(config.vocab_size) * cast;
    let head_weights = 4.0 * f(config.vocab_size) * hidden;
    let tokens = f(tokens);
    vec![
        (Part::Stream, tokens * (embedding + (2.0 * layers + 1.0) * (half + half_back))),
        (Part::Attention, tokens * layers * attention),
        (Part::AttentionBack, tokens * layers * attention_back),
        (Part::Router, tokens * layers * router),
        (Part::RouterBack, tokens * layers * router_back),
        (Part::Experts, tokens * layers * experts),
        (Part::ExpertsBack, layers * (tokens * experts_back + weights)),
        (Part::Head, tokens * head + head_weights),
    ]
}

/// Bytes that the softmax over the vocabulary and its slope read and write: a row is read and written by each of the two.
pub(crate) fn of_softmax(config: &ZayaConfig, tokens: i64) -> f64 {
    16.0 * tokens as f64 * config.vocab_size as f64
}

/// What the gated units of a layer's experts count forward and backward in bytes of a softmax: an exponential each, as there,
/// whatever the format.
pub(crate) fn of_gated_units(config: &ZayaConfig, tokens: i64) -> [f64; 2] {
    [16.0, 20.0].map(|bytes| bytes * tokens as f64 * config.moe_intermediate_size as f64)
}

/// What a layer's parts take beside products and bytes, whatever their size, in calls of the smallest pass over memory: found by
/// `ztrain bench step` on one Xeon with 16 tokens in a micro-batch of a model 64 wide, less what products and bytes are planned
/// to take there. The head's is for a micro-batch, not a layer.
pub(crate) const CALLS: [(Part, f64); 8] = [
    (Part::Stream, 46.0),
    (Part::Attention, 86.0),
    (Part::AttentionBack, 147.0),
    (Part::Router, 11.0),
    (Part::RouterBack, 12.0),
    (Part::Experts, 46.0),
    (Part::ExpertsBack, 37.0),
    (Part::Head, 124.0),
];
