//! Shapes of products: what a bench measures, and which rules of thumb they keep.
//!
//! The rules are those that the ZAYA1 paper (arXiv 2511.17127, section III) found on MI300X: dimensions that are multiples of
//! 64, and enough operations in a product to reach the peak.

use serde::Serialize;

use crate::model::ZayaConfig;

/// What dimensions should be multiples of.
pub const ALIGNMENT: i64 = 64;

/// A product of `[rows, inner]` and `[inner, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Shape {
    /// Rows of the left operand and of the outcome.
    pub rows: i64,
    /// Columns of the left operand, rows of the right one.
    pub inner: i64,
    /// Columns of the right operand and of the outcome.
    pub columns: i64,
}

impl Shape {
    /// Additions and multiplications.
    pub fn operations(self) -> f64 {
        2.0 * self.rows as f64 * self.inner as f64 * self.columns as f64
    }

    /// Whether all dimensions are multiples of [`ALIGNMENT`].
    pub fn is_aligned(self) -> bool {
        [self.rows, self.inner, self.columns].iter().all(|size| size % ALIGNMENT == 0)
    }
}

/// Rows times widths, as the paper sweeps them: a square weight of each width, and the same with dimensions that keep no rule.
pub fn sweep(rows: &[i64], widths: &[i64]) -> Vec<(String, Shape)> {
    let mut found = Vec::new();
    for width in widths {
        for rows in rows {
            let shape = Shape { rows: *rows, inner: *width, columns: *width };
            found.push((format!("width {width}"), shape));
        }
    }
    // One less in each direction: what a forgotten rule costs.
    let last = rows.last().copied().unwrap_or(ALIGNMENT);
    for width in widths {
        let shape = Shape { rows: last, inner: width - 1, columns: width - 1 };
        found.push(("width less 1".to_owned(), shape));
    }
    found
}

/// The forward products of a model over a micro-batch of `tokens`, one of each shape: the paper's Table III. Experts have the
/// rows that even routing leaves them.
pub fn of_model(config: &ZayaConfig, tokens: i64) -> Vec<(String, Shape)> {
    let (hidden, state) = (config.hidden_size, config.router_hidden_size);
    let (query, key, inner) =
        (config.query_size(), config.key_size(), config.moe_intermediate_size);
    let routed = (tokens / config.num_experts).max(1);
    let all = [
        ("queries and keys", tokens, hidden, query + key),
        ("values, each half", tokens, hidden, key / 2),
        ("attention's way out", tokens, query, hidden),
        ("router, down", tokens, hidden, state),
        ("router, inside", tokens, state, state),
        ("expert, gate and up", routed, hidden, 2 * inner),
        ("expert, down", routed, inner, hidden),
        ("head", tokens.min(config.loss_chunk), hidden, config.vocab_size),
    ];
    let named = |(name, rows, inner, columns): (&str, i64, i64, i64)| {
        (name.to_owned(), Shape { rows, inner, columns })
    };
    all.into_iter().map(named).filter(|(_, shape)| shape.operations() > 0.0).collect()
}
