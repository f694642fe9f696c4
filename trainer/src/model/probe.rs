//! What a forward pass shows of its insides: for who explains a step, never in training.

use contract::Result;
use tch::{Kind, Tensor};

use super::input::LeafInput;
use super::zaya::Zaya;
use super::{LeafOptions, ZayaConfig, enter};
use crate::refusal::refused;

/// What goes through a layer of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerActivity {
    /// The sum of squares of the residual that enters it, over all tokens.
    pub residual: f64,
    /// Of what its attention adds.
    pub attention: f64,
    /// Of what its feed-forward adds.
    pub feed_forward: f64,
    /// The largest logit of its attention, if it has such.
    pub largest_logit: Option<f64>,
}

impl LayerActivity {
    /// Of both inputs together.
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

/// What is not a number is largest.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// What goes through each layer, first to last, when it computes `input`: forward only.
pub fn probe(
    options: LeafOptions,
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &LeafInput,
) -> Result<Vec<LayerActivity>> {
    enter()?;
    let (model, input) = (Zaya::new(config), input.prepare(config, params[0].device())?);
    model.with((options.into(), config), (params, balance), &input, |pass| model.probe(pass))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{init, init_balance};

    /// One document, computed once more from the definitions: no logit lies above the largest, and the first residual is the
    /// embedding's.
    #[test]
    fn a_temperature_scales_the_largest_logit_and_bounds_it() {
        let preset = ZayaConfig::preset("zaya1-nano").unwrap();
        let config = ZayaConfig { vocab_size: 31, num_hidden_layers: 2, ..preset };
        let (mut params, balance) = (init(&config, 1).unwrap(), init_balance(&config));
        let tokens: Vec<i32> = (0..40).map(|place| place * 37 % 31).collect();
        let positions: Vec<i32> = (0..40).map(|place| place % 20).collect();
        let boundaries = [vec![0, 7], vec![0]];
        let input = LeafInput {
            tokens: &tokens,
            labels: &tokens,
            positions: &positions,
            mask: &[1; 40],
            boundaries: &boundaries,
            rows: 2,
            seq_len: 20,
        };
        let options = LeafOptions::default();
        let first = probe(options, &config, &params, &balance, &input).unwrap();
        assert_eq!(first.len(), 2);
        let specs = crate::model::parameters(&config);
        let hot = specs.iter().position(|spec| spec.name.ends_with("qk_norm.temp")).unwrap();
        let bound = (config.head_dim as f64).sqrt();
        let logit = first[0].largest_logit.unwrap();
        // A token sees itself, and its query and key share what the mean gives them: the largest is no small one.
        assert!(logit > 0.1 * bound && logit <= 1.0001 * bound, "{logit} of {bound}");
        params[hot] = &params[hot] * 3.0;
        let then = probe(options, &config, &params, &balance, &input).unwrap();
        assert!((then[0].largest_logit.unwrap() - 3.0 * logit).abs() < 1e-3 * logit);
        assert_eq!(then[0].residual, first[0].residual, "what enters is from the embedding alone");
        assert!(then[0].attention != first[0].attention && then[1].residual != first[1].residual);
        assert!(first.iter().all(|one| one.residual > 0.0 && one.feed_forward > 0.0));
    }
}
