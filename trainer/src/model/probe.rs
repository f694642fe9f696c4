//! A forward pass that reports statistics of activations: to explain a step, never in training.

use contract::Result;
use tch::Tensor;

use super::activity::LayerActivity;
use super::input::MicroBatchInput;
use super::{MicroBatchOptions, ZayaConfig, over};

/// Statistics of each layer's activations for `input`, first to last: forward only.
pub fn probe(
    options: MicroBatchOptions,
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &MicroBatchInput,
) -> Result<Vec<LayerActivity>> {
    over(options, config, params, balance, input, |model, pass| model.probe(pass))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{init, init_balance};

    /// One document, recomputed by definition: no logit exceeds the largest; the first residual is the embedding.
    #[test]
    fn a_temperature_scales_the_largest_logit_and_bounds_it() {
        let preset = ZayaConfig::preset("zaya1-nano").unwrap();
        let config = ZayaConfig { vocab_size: 31, num_hidden_layers: 2, ..preset };
        let (mut params, balance) = (init(&config, 1).unwrap(), init_balance(&config));
        let tokens: Vec<i32> = (0..40).map(|place| place * 37 % 31).collect();
        let positions: Vec<i32> = (0..40).map(|place| place % 20).collect();
        let boundaries = [vec![0, 7], vec![0]];
        let input = MicroBatchInput {
            tokens: &tokens,
            labels: &tokens,
            positions: &positions,
            mask: &[1; 40],
            boundaries: &boundaries,
            weights: &[],
            rows: 2,
            seq_len: 20,
        };
        let options = MicroBatchOptions::default();
        let first = probe(options, &config, &params, &balance, &input).unwrap();
        assert_eq!(first.len(), 2);
        let specs = crate::model::parameters(&config);
        let hot = specs.iter().position(|spec| spec.name.ends_with("qk_norm.temp")).unwrap();
        let bound = (config.head_dim as f64).sqrt();
        let logit = first[0].largest_logit.unwrap();
        // A token sees itself, and its query and key share the q-k mean, so the largest logit is not small.
        assert!(logit > 0.1 * bound && logit <= 1.0001 * bound, "{logit} of {bound}");
        params[hot] = &params[hot] * 3.0;
        let then = probe(options, &config, &params, &balance, &input).unwrap();
        assert!((then[0].largest_logit.unwrap() - 3.0 * logit).abs() < 1e-3 * logit);
        assert_eq!(then[0].residual, first[0].residual, "what enters is from the embedding alone");
        assert!(then[0].attention != first[0].attention && then[1].residual != first[1].residual);
        assert!(first.iter().all(|one| one.residual > 0.0 && one.feed_forward > 0.0));
    }
}
