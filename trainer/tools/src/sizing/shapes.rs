//! Shapes of matmuls: what a bench measures, and which rules of thumb they follow.
//!
//! The rules are those that the ZAYA1 paper (arXiv 2511.17127, section III) found on MI300X: dimensions that are
//! multiples of 64, and enough operations in a matmul to reach the peak.

use std::collections::BTreeSet;

pub use trainer::costs::MatmulShape;
use trainer::model::{Attention, FeedForward, RouterKind, ZayaConfig};

/// Dimensions should be multiples of this.
pub const ALIGNMENT: i64 = 64;

/// Whether all dimensions are multiples of [`ALIGNMENT`].
pub fn is_aligned(shape: MatmulShape) -> bool {
    [shape.rows, shape.inner, shape.columns].iter().all(|size| size % ALIGNMENT == 0)
}

/// Rows times widths, as the paper sweeps them: a square weight of each width, and the same with unaligned dimensions.
pub fn sweep(rows: &[i64], widths: &[i64]) -> Vec<(String, MatmulShape)> {
    let mut found = Vec::new();
    for width in widths {
        for rows in rows {
            let shape = MatmulShape { rows: *rows, inner: *width, columns: *width };
            found.push((format!("width {width}"), shape));
        }
    }
    // One less in each dimension: the cost of breaking the rule.
    let last = rows.last().copied().unwrap_or(ALIGNMENT);
    for width in widths {
        let shape = MatmulShape { rows: last, inner: width - 1, columns: width - 1 };
        found.push(("width less 1".to_owned(), shape));
    }
    found
}

/// A forward matmul of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelMatmul {
    /// Its name in the model.
    pub name: &'static str,
    /// Its shape; that of one where several are batched.
    pub shape: MatmulShape,
    /// Which matmuls one call computes.
    pub together: MatmulBatching,
    /// Whether its operands stay f32 in every dtype of a run.
    pub wide: bool,
}

/// Which matmuls one call computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulBatching {
    /// A single one.
    One,
    /// A batch over this many heads, side by side in memory.
    Heads(i64),
    /// Those of all experts, each with its own number of rows.
    Experts,
}

/// The forward matmuls of a model over a micro-batch of `tokens`, one of each shape: the paper's Table III for this
/// trainer. Experts have the rows of even routing.
pub fn of_model(config: &ZayaConfig, tokens: i64) -> Vec<ModelMatmul> {
    let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size);
    let mut all = Vec::new();
    for (attention, feed_forward) in config.kinds().collect::<BTreeSet<_>>() {
        of_attention(config, attention, tokens, &mut all);
        match feed_forward {
            FeedForward::Mlp => gated(config, inner, tokens, &mut all),
            FeedForward::Moe => {
                of_router(config, tokens, &mut all);
                let routed = tokens * config.num_experts_per_tok / config.num_experts;
                let together = MatmulBatching::Experts;
                let expert = |name, sizes| ModelMatmul { together, ..one(name, sizes) };
                all.push(expert("expert, gate and up", [routed.max(1), hidden, 2 * inner]));
                all.push(expert("expert, down", [routed.max(1), inner, hidden]));
                gated(config, config.num_shared_experts * inner, tokens, &mut all);
            }
        }
    }
    all.push(one("head", [tokens.min(config.loss_chunk), hidden, config.vocab_size]));
    all.retain(|product| product.shape.operations() > 0.0);
    // Layers of different kinds have some in common.
    let mut seen = BTreeSet::new();
    all.retain(|product| seen.insert((product.name, product.shape)));
    all
}

fn one(name: &'static str, [rows, inner, columns]: [i64; 3]) -> ModelMatmul {
    let shape = MatmulShape { rows, inner, columns };
    ModelMatmul { name, shape, together: MatmulBatching::One, wide: false }
}

fn of_attention(config: &ZayaConfig, kind: Attention, tokens: i64, all: &mut Vec<ModelMatmul>) {
    let (hidden, dim) = (config.hidden_size, config.head_dim);
    let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
    let joined = one("queries, keys and values", [tokens, hidden, conv + key]);
    match kind {
        Attention::Cca => {
            let together = MatmulBatching::Heads(conv / dim);
            let heads = one("convolution of heads", [tokens, 2 * dim, dim]);
            all.extend([joined, ModelMatmul { together, ..heads }]);
        }
        Attention::Gqa => all.push(joined),
        Attention::Linear => all.extend([
            one("queries, or their gates", [tokens, hidden, query]),
            one("keys, or values", [tokens, hidden, key]),
        ]),
    }
    all.push(one("attention's way out", [tokens, query, hidden]));
}

fn of_router(config: &ZayaConfig, tokens: i64, all: &mut Vec<ModelMatmul>) {
    let (hidden, state, classes) =
        (config.hidden_size, config.router_hidden_size, config.router_classes());
    let wide = |name, sizes| ModelMatmul { wide: true, ..one(name, sizes) };
    match config.router {
        RouterKind::Mlp => all.extend([
            one("router, down", [tokens, hidden, state]),
            wide("router, inside", [tokens, state, state]),
            wide("router, out", [tokens, state, classes]),
        ]),
        RouterKind::Linear => all.push(wide("router", [tokens, hidden, classes])),
    }
}

/// A gated unit for every token.
fn gated(config: &ZayaConfig, inner: i64, tokens: i64, all: &mut Vec<ModelMatmul>) {
    let hidden = config.hidden_size;
    all.push(one("gate, or up", [tokens, hidden, inner]));
    all.push(one("down", [tokens, inner, hidden]));
}

/// Operations of the five Newton-Schulz iterations on a matrix, as the CPU table computes them: half of each symmetric
/// matmul, and only the short side where the matrix is oblong.
pub fn of_newton_schulz(rows: i64, columns: i64) -> f64 {
    let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
    match long >= 2.0 * short {
        true => 3.0 * short * short * long + 17.0 * short.powi(3),
        false => 15.0 * short * short * long + 5.0 * short.powi(3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainer::costs::{MicroBatchShape, of_micro_batch};

    /// The shapes that are measured and repeated are those of a step, forward and both backward.
    #[test]
    fn products_of_a_model_are_those_of_its_steps() {
        let preset = |name: &str| ZayaConfig::preset(name).unwrap();
        let presets = ["zaya1-nano", "zaya1-20m", "zaya1-1b", "zaya1-8b"].map(preset);
        let layers = vec![Attention::Gqa, Attention::Linear, Attention::Cca];
        let feed_forward = vec![FeedForward::Moe, FeedForward::Mlp];
        let nano = || preset("zaya1-nano");
        let mixed = ZayaConfig { layers, feed_forward, num_hidden_layers: 6, ..nano() };
        let (router, num_shared_experts) = (RouterKind::Linear, 2);
        let shared = ZayaConfig { router, num_shared_experts, num_experts_per_tok: 2, ..nano() };
        for config in presets.into_iter().chain([mixed, shared]) {
            let tokens = config.num_experts * 16;
            let by = MicroBatchShape::whole(1, tokens as u64);
            let step = of_micro_batch(&config, by).unwrap();
            let step: BTreeSet<_> = step.matmuls.iter().map(|one| (one.shape, one.wide)).collect();
            let ways = |one: &ModelMatmul| {
                let MatmulShape { rows, inner, columns } = one.shape;
                let shape = |[rows, inner, columns]: [i64; 3]| MatmulShape { rows, inner, columns };
                let ways = [[rows, inner, columns], [rows, columns, inner], [columns, rows, inner]];
                ways.map(|way| (shape(way), one.wide))
            };
            let asked: BTreeSet<_> = of_model(&config, tokens).iter().flat_map(ways).collect();
            assert_eq!(asked, step, "{config:?}");
        }
    }
}
