//! Bytes that a micro-batch reads and writes outside of matmuls: norms, residuals, activations, the head's softmax.
//!
//! Counted for each operation as its inputs and outputs in the table of operations, each operand once. Caches are not
//! modelled, so small micro-batches are faster than this estimate. The head's softmax, whose `exp` costs a CPU more
//! than its bytes, has a separate rate, which also applies to gated units.

use trainer::model::{Attention, FeedForward, RouterKind, ZayaConfig};
use trainer::timing::StepPart;

/// Equivalent bytes of a row of the router's few classes, forward and backward: libtorch computes softmax, argmax and
/// gather row by row (0.24 and 0.07 microseconds on one Xeon with 9 classes, at 12 GB per second).
const CLASSES: [f64; 2] = [2900.0, 850.0];

/// Bytes of a token in one layer's part, forward and backward.
type Passes = [f64; 2];

/// Bytes of each part in a micro-batch of `tokens`; operands of large matmuls have `narrow` bytes.
pub(crate) fn of_micro_batch(
    config: &ZayaConfig,
    tokens: i64,
    narrow: u64,
) -> Vec<(StepPart, f64)> {
    let f = |size: i64| size as f64;
    let w = narrow as f64;
    // Conversion to and from the dtype of matmuls, where that is not f32.
    let cast = if narrow == 4 { 0.0 } else { 4.0 + w };
    let hidden = f(config.hidden_size);
    let layers = f(config.num_hidden_layers);
    // The norm before a sublayer and the residual after it: x and its norm; the branch, the residual, and their sum.
    let half = hidden * (8.0 + cast + w + 8.0);
    // Backward: gradient, branch and residual, and both gradients; x, the gradient, and that of x; their sum. The
    // gradient at the norm is converted to f32, and the branch's gradient is rounded.
    let half_back = hidden * (16.0 + w + 12.0 + 12.0 + 2.0 * cast);
    let embedding = hidden * (w + 8.0 + 16.0);
    // The weights' gradients are zeroed, written by matmuls of few rows, which do little else, and converted to f32.
    let weights =
        3.0 * hidden * f(config.moe_intermediate_size) * f(config.num_experts) * (2.0 * w + cast);
    // Logits as inputs and outputs of matmuls; the softmax in between is counted separately.
    let head = f(config.vocab_size) * cast;
    let head_weights = 4.0 * f(config.vocab_size) * hidden;
    let tokens = f(tokens);
    let mut all = vec![
        (StepPart::Stream, tokens * (embedding + (2.0 * layers + 1.0) * (half + half_back))),
        (StepPart::Head, tokens * head + head_weights),
    ];
    for (kind, feed_forward) in config.kinds() {
        let [forward, back] = attention(config, kind, w, cast);
        all.extend([
            (StepPart::Attention, tokens * forward),
            (StepPart::AttentionBack, tokens * back),
        ]);
        if feed_forward == FeedForward::Mlp {
            continue;
        }
        let [router, router_back] = match config.router {
            // Biases, averaging, norm and both activations over the router's state.
            RouterKind::Mlp => [48.0, 72.0].map(|bytes| bytes * f(config.router_hidden_size)),
            RouterKind::Linear => [0.0; 2],
        };
        // Permutation to the order of a token's experts and back.
        let moved = f(config.num_experts_per_tok) * hidden;
        // The way back of a norm that brought rows back to their tokens does so again.
        let late = config.num_experts_per_tok + config.num_shared_experts == 1;
        let again = if late { w + 4.0 + cast } else { 0.0 };
        all.extend([
            (StepPart::Router, tokens * (router + CLASSES[0])),
            (StepPart::RouterBack, tokens * (router_back + CLASSES[1])),
            (StepPart::Experts, tokens * moved * (3.0 * w + 4.0 + cast)),
            (
                StepPart::ExpertsBack,
                tokens * moved * (8.0 + 4.0 * w + 2.0 * cast + again) + weights,
            ),
        ]);
    }
    all
}

/// An attention's passes outside of its matmuls and of the attention itself, whose operands have `w` bytes and cost
/// `cast` to convert.
fn attention(config: &ZayaConfig, kind: Attention, w: f64, cast: f64) -> Passes {
    let (query, key) = (config.query_size() as f64, config.key_size() as f64);
    let conv = query + key;
    match kind {
        // Halves of the values joined, the first convolution, queries and keys with their means and rotation.
        Attention::Cca => [
            2.0 * w * key + 3.0 * w * conv + conv * (2.0 * cast + 8.0 + w),
            conv * (12.0 + 2.0 * cast + 3.0 * w + 4.0 + 12.0) + 4.0 * w * key,
        ],
        // Queries and keys with their rotation, and norms if there are any; gradients of all three.
        Attention::Gqa => {
            let norms = if config.qk_norm { conv * (8.0 + cast) } else { 0.0 };
            [
                conv * (cast + 2.0 * w) + norms,
                conv * (4.0 + 2.0 * w + cast) + 2.0 * norms + 2.0 * w * key,
            ]
        }
        // Features of queries and keys, and values, in f32; the heads divided and gated. Backward: the same again, and
        // the gradients of all four.
        Attention::Linear => [
            (conv + key) * (w + 8.0) + query * (12.0 + 2.0 * w + cast),
            2.0 * (conv + key) * (w + 8.0) + query * (28.0 + 4.0 * w + 2.0 * cast),
        ],
    }
}

/// Bytes of the softmax over the vocabulary and of its gradient: each reads and writes a row.
pub(crate) fn of_softmax(config: &ZayaConfig, tokens: i64) -> f64 {
    16.0 * tokens as f64 * config.vocab_size as f64
}

/// Equivalent softmax bytes of a layer's gated units, forward and backward: one exponential each, in every dtype.
pub(crate) fn of_gated_units(config: &ZayaConfig, kind: FeedForward, tokens: i64) -> Passes {
    let units = match kind {
        FeedForward::Mlp => 1,
        FeedForward::Moe => config.num_experts_per_tok + config.num_shared_experts,
    };
    let count = (tokens * units * config.moe_intermediate_size) as f64;
    [16.0, 20.0].map(|bytes| bytes * count)
}

/// Fixed costs of a layer's parts beyond matmuls and bytes, in units of the smallest memory pass: measured by `ztrain
/// bench step` on one Xeon with 16 tokens in a micro-batch of a model 64 wide, minus the planned time of matmuls and
/// bytes. The head's is per micro-batch, not per layer.
pub(crate) const CALLS: [(StepPart, f64); 8] = [
    (StepPart::Stream, 46.0),
    (StepPart::Attention, 86.0),
    (StepPart::AttentionBack, 147.0),
    (StepPart::Router, 11.0),
    (StepPart::RouterBack, 12.0),
    (StepPart::Experts, 46.0),
    (StepPart::ExpertsBack, 37.0),
    (StepPart::Head, 124.0),
];
