//! AdamW: elementwise, so any cut of a tensor gives the same bits as long as the cuts are fixed.
//!
//! ```text
//! w <- (1 - lr * decay) * w
//! m <- m + (1 - beta1) * (g - m)
//! v <- v + (1 - beta2) * (g * g - v)
//! w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```

use kernels::fused;
use tch::Tensor;

use super::scaled;
use super::schedule::power;

/// What AdamW does at one step, as plain numbers.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
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

impl AdamW {
    /// The numbers of step `step` (from 1).
    pub fn at(step: u64, lr: f64, decay: f64, betas: (f64, f64), eps: f64) -> Self {
        let (beta1, beta2) = betas;
        let rate = lr / (1.0 - power(beta1, step));
        let root = (1.0 - power(beta2, step)).sqrt();
        AdamW { keep: 1.0 - lr * decay, beta1, beta2, eps, rate, root }
    }

    /// Updates one flat piece of a tensor and of its moments in place; `scale` is what its gradient is multiplied with
    /// first, and 1 touches nothing.
    pub fn update(
        &self,
        weight: &mut Tensor,
        first: &mut Tensor,
        second: &mut Tensor,
        (gradient, scale): (&Tensor, f64),
    ) {
        if [&*weight, &*first, &*second, gradient].into_iter().all(fused::fits) {
            fused::adamw(self.rates(scale), weight, first, second, gradient);
        } else {
            self.by_operators(weight, first, second, (gradient, scale));
        }
    }

    fn rates(&self, scale: f64) -> fused::Rates {
        fused::Rates {
            keep: self.keep as f32,
            first: (1.0 - self.beta1) as f32,
            second: (1.0 - self.beta2) as f32,
            root: self.root as f32,
            eps: self.eps as f32,
            rate: self.rate as f32,
            scale: scale as f32,
        }
    }

    /// The same where memory cannot be read in place.
    fn by_operators(
        &self,
        weight: &mut Tensor,
        first: &mut Tensor,
        second: &mut Tensor,
        (gradient, scale): (&Tensor, f64),
    ) {
        if self.keep != 1.0 {
            let _ = weight.g_mul_scalar_(self.keep);
        }
        let gradient = scaled(gradient.shallow_clone(), scale);
        let _ = first.lerp_(&gradient, 1.0 - self.beta1);
        let _ = second.lerp_(&gradient.square(), 1.0 - self.beta2);
        let mut denominator = second.sqrt();
        let _ = denominator.g_div_scalar_(self.root);
        let _ = denominator.g_add_scalar_(self.eps);
        let mut change = first.g_div(&denominator);
        let _ = change.g_mul_scalar_(self.rate);
        let _ = weight.g_sub_(&change);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
                    AdamW::at(step as u64 + 1, lr, decay, betas, 1e-8),
                );
                rule.update(&mut weight, &mut first, &mut second, (&gradient, 0.5));
                rule.by_operators(&mut slow, &mut slow_first, &mut slow_second, (&gradient, 0.5));
            }
            let difference = (&weight - slow).abs().max().double_value(&[]);
            prop_assert!(difference < 6e-6 + 2e-4 * lr, "{difference} from the operators");
            let found: Vec<f32> = Vec::try_from(&weight).unwrap();
            for (index, (&start, &found)) in weights.iter().zip(&found).enumerate() {
                let gradients: Vec<f64> = (0..steps).map(|step| f64::from(at(step, index))).collect();
                let wanted = reference(f64::from(start), &gradients, lr, decay, betas, 1e-8);
                prop_assert!((f64::from(found) - wanted).abs() < 3e-6 + 2e-4 * lr, "{found} {wanted}");
            }
        }
    }
}
