//! AdamW: elementwise, so any fixed split of a tensor gives the same bits.
//!
//! ```text
//! w <- (1 - lr * decay) * w
//! m <- m + (1 - beta1) * (g - m)
//! v <- v + (1 - beta2) * (g * g - v)
//! w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```

use kernels::ops;

/// The scalars of an AdamW step.
#[derive(Clone, Copy, Debug)]
pub struct AdamWScalars {
    /// `1 - lr * decay`.
    pub keep: f64,
    /// Of the first moment.
    pub beta1: f64,
    /// Of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// `lr / (1 - beta1^t)`.
    pub rate: f64,
    /// `sqrt(1 - beta2^t)`.
    pub root: f64,
}

impl AdamWScalars {
    /// The scalars of step `step` (from 1).
    pub fn at(step: u64, lr: f64, decay: f64, betas: (f64, f64), eps: f64) -> Self {
        let (beta1, beta2) = betas;
        let rate = lr / (1.0 - power(beta1, step));
        let root = (1.0 - power(beta2, step)).sqrt();
        AdamWScalars { keep: 1.0 - lr * decay, beta1, beta2, eps, rate, root }
    }

    /// The same scalars, rounded to the precision of the elements; gradients are multiplied by `scale` first, and 1
    /// leaves them unchanged.
    pub(super) fn rounded(&self, scale: f64) -> ops::AdamWStep {
        ops::AdamWStep {
            keep: self.keep as f32,
            first: (1.0 - self.beta1) as f32,
            second: (1.0 - self.beta2) as f32,
            root: self.root as f32,
            eps: self.eps as f32,
            rate: self.rate as f32,
            scale: scale as f32,
        }
    }
}

/// `base` to the power `exponent`, by squaring.
pub(super) fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut square, mut result) = (base, 1.0);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::Tensor;

    /// AdamW as torch documents it, one element, in f64.
    fn reference(
        weight: f64,
        gradients: &[f64],
        lr: f64,
        decay: f64,
        betas: (f64, f64),
        eps: f64,
    ) -> f64 {
        let (mut w, mut m, mut v) = (weight, 0.0, 0.0);
        for (index, g) in gradients.iter().enumerate() {
            let t = index as i32 + 1;
            w -= lr * decay * w;
            m = betas.0 * m + (1.0 - betas.0) * g;
            v = betas.1 * v + (1.0 - betas.1) * g * g;
            let (m_hat, v_hat) = (m / (1.0 - betas.0.powi(t)), v / (1.0 - betas.1.powi(t)));
            w -= lr * m_hat / (v_hat.sqrt() + eps);
        }
        w
    }

    proptest! {
        #[test]
        fn powers_are_powers(base in 0.5..1.0f64, exponent in 0u64..2000) {
            let wanted = base.powf(exponent as f64);
            prop_assert!((power(base, exponent) - wanted).abs() <= 1e-12 * wanted + 1e-300);
        }

        #[test]
        fn it_is_torch_s_formula(
            weights in prop::collection::vec(-3.0..3.0f32, 1..70),
            seed in any::<u64>(),
            lr in 1e-5..1e-1f64,
            decay in 0.0..0.5f64,
            betas in (0.5..0.99f64, 0.5..0.9999f64),
        ) {
            let steps = 5;
            let at = |step: usize, index: usize| {
                let key = contract::Key::from_seed(seed).nth(step as u64);
                let bits = contract::draw(key, contract::Purpose::Generate, index as u64);
                (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            };
            let mut weight = Tensor::from_slice(&weights);
            let (mut first, mut second) = (weight.zeros_like(), weight.zeros_like());
            let [mut slow, mut slow_first, mut slow_second] = [&weight, &first, &second].map(Tensor::copy);
            for step in 0..steps {
                let gradient: Vec<f32> = (0..weights.len()).map(|index| 2.0 * at(step, index)).collect();
                let (gradient, rule) = (
                    Tensor::from_slice(&gradient),
                    AdamWScalars::at(step as u64 + 1, lr, decay, betas, 1e-8),
                );
                let moments = [&mut first, &mut second];
                ops::CPU.adamw(rule.rounded(0.5), &mut weight, moments, &gradient).unwrap();
                let moments = [&mut slow_first, &mut slow_second];
                ops::REFERENCE.adamw(rule.rounded(0.5), &mut slow, moments, &gradient).unwrap();
            }
            let difference = (&weight - slow).abs().max().double_value(&[]);
            prop_assert!(difference < 6e-6 + 2e-4 * lr, "{difference} from the reference");
            let found: Vec<f32> = Vec::try_from(&weight).unwrap();
            for (index, (&start, &found)) in weights.iter().zip(&found).enumerate() {
                let gradients: Vec<f64> = (0..steps).map(|step| f64::from(at(step, index))).collect();
                let wanted = reference(f64::from(start), &gradients, lr, decay, betas, 1e-8);
                prop_assert!((f64::from(found) - wanted).abs() < 3e-6 + 2e-4 * lr, "{found} {wanted}");
            }
        }
    }
}
