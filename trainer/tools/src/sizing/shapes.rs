//! Shapes of matmuls: what a bench measures, and which rules of thumb they follow.
//!
//! The rules are those that the ZAYA1 paper (arXiv 2511.17127, section III) found on MI300X: dimensions that are
//! multiples of 64, and enough operations in a matmul to reach the peak.

pub use trainer::costs::matmuls::MatmulShape;
use trainer::model::ZayaConfig;

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
    let (hidden, state, dim) = (config.hidden_size, config.router_hidden_size, config.head_dim);
    let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
    let (inner, classes) = (config.moe_intermediate_size, config.router_classes());
    let routed = (tokens / config.num_experts).max(1);
    let one = |name, [rows, inner, columns]: [i64; 3]| {
        let shape = MatmulShape { rows, inner, columns };
        ModelMatmul { name, shape, together: MatmulBatching::One, wide: false }
    };
    let wide = |name, sizes| ModelMatmul { wide: true, ..one(name, sizes) };
    let heads = MatmulBatching::Heads(conv / dim);
    let expert =
        |name, sizes| ModelMatmul { together: MatmulBatching::Experts, ..one(name, sizes) };
    let all = [
        one("queries, keys and values", [tokens, hidden, conv + key]),
        ModelMatmul { together: heads, ..one("convolution of heads", [tokens, 2 * dim, dim]) },
        one("attention's way out", [tokens, query, hidden]),
        one("router, down", [tokens, hidden, state]),
        wide("router, inside", [tokens, state, state]),
        wide("router, out", [tokens, state, classes]),
        expert("expert, gate and up", [routed, hidden, 2 * inner]),
        expert("expert, down", [routed, inner, hidden]),
        one("head", [tokens.min(config.loss_chunk), hidden, config.vocab_size]),
    ];
    all.into_iter().filter(|product| product.shape.operations() > 0.0).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use trainer::costs::matmuls::{MicroBatchShape, even, of_micro_batch};

    /// The shapes that are measured and repeated are those of a step, forward and both backward.
    #[test]
    fn products_of_a_model_are_those_of_its_steps() {
        for name in ["zaya1-nano", "zaya1-20m", "zaya1-1b", "zaya1-8b"] {
            let config = ZayaConfig::preset(name).unwrap();
            let tokens = config.num_experts * 16;
            let routed = even(tokens, config.num_experts);
            let by = MicroBatchShape { tokens, chunks: 1, routed: &routed, recompute: false };
            let step = of_micro_batch(&config, by);
            let step: BTreeSet<_> = step.iter().map(|one| (one.shape, one.wide)).collect();
            let ways = |one: &ModelMatmul| {
                let MatmulShape { rows, inner, columns } = one.shape;
                let shape = |[rows, inner, columns]: [i64; 3]| MatmulShape { rows, inner, columns };
                let ways = [[rows, inner, columns], [rows, columns, inner], [columns, rows, inner]];
                ways.map(|way| (shape(way), one.wide))
            };
            let asked: BTreeSet<_> = of_model(&config, tokens).iter().flat_map(ways).collect();
            assert_eq!(asked, step, "{name}");
        }
    }
}
