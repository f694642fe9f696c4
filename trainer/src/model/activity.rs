//! Statistics of a layer's activations.

use contract::Result;
use tch::{Kind, Tensor};

use crate::refusal::refused;

/// Statistics of a layer's activations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerActivity {
    /// The sum of squares of the residual at its input, over all tokens.
    pub residual: f64,
    /// The same of its attention's output.
    pub attention: f64,
    /// The same of its feed-forward's output.
    pub feed_forward: f64,
    /// The largest logit of its attention, if that has logits.
    pub largest_logit: Option<f64>,
}

impl LayerActivity {
    /// The statistics of both inputs together.
    pub fn and(self, other: LayerActivity) -> LayerActivity {
        let logits = self.largest_logit.into_iter().chain(other.largest_logit);
        LayerActivity {
            residual: self.residual + other.residual,
            attention: self.attention + other.attention,
            feed_forward: self.feed_forward + other.feed_forward,
            largest_logit: logits.reduce(larger),
        }
    }
}

/// NaN counts as the largest.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The sum of squares over tensors, in f64.
pub(super) fn squares(tensors: &[Tensor]) -> Result<f64> {
    let squares = |tensor: &Tensor| {
        let squares = tensor.f_to_kind(Kind::Double)?.f_square()?;
        squares.f_sum(Kind::Double)?.f_double_value(&[])
    };
    let all = tensors.iter().map(|tensor| squares(tensor).map_err(refused));
    all.sum()
}
