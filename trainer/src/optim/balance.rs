//! The router's balancing biases: integer counts over the global batch, one AdamW step for each training step.
//!
//! An expert's error is its share of the tokens that were routed to experts, minus 1/E; used as a gradient, it lowers
//! the bias of overused experts. The skip class comes last, keeps its bias of -1 and is not updated. Shares are
//! computed from integers, so they depend neither on the order of micro-batches nor on the number of ranks.

use super::adamw::power;

/// Betas and eps of this AdamW. ZAYA1's are not published; these are the values of its AMD port, as is the default
/// learning rate.
const BETAS: (f64, f64) = (0.9, 0.999);
const EPS: f64 = 1e-8;

/// The learning rate if the curriculum gives none.
pub(crate) const LR: f64 = 1e-3;

/// Biases and moments of one layer's router: one of each per expert, the skip class (if any) last in `bias`. Empty (the
/// default) for a layer without a router.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterBalance {
    /// Added to the router's probabilities only for the choice of experts.
    pub bias: Vec<f32>,
    /// First moment, for the experts.
    pub first: Vec<f32>,
    /// Second moment, for the experts.
    pub second: Vec<f32>,
}

impl RouterBalance {
    /// The initial state: no preference, and a skip class that cannot be chosen.
    pub fn new(experts: usize, skip: bool) -> Self {
        let mut bias = vec![0.0; experts];
        bias.extend(skip.then_some(-1.0));
        RouterBalance { bias, first: vec![0.0; experts], second: vec![0.0; experts] }
    }

    /// Whether there is no router to balance.
    pub fn is_empty(&self) -> bool {
        self.bias.is_empty()
    }

    /// Updates the biases by the counts of step `step` (from 1).
    pub fn update(&mut self, step: u64, counts: &[u64], lr: f64) {
        if self.is_empty() {
            return;
        }
        let experts = self.first.len();
        let total: u64 = counts[..experts].iter().sum();
        let correction = (1.0 - power(BETAS.0, step), 1.0 - power(BETAS.1, step));
        for (expert, &count) in counts[..experts].iter().enumerate() {
            // A step whose tokens were all skipped has no information about the experts.
            let share =
                if total == 0 { 0.0 } else { count as f64 / total as f64 - 1.0 / experts as f64 };
            let first = BETAS.0 * f64::from(self.first[expert]) + (1.0 - BETAS.0) * share;
            let second = BETAS.1 * f64::from(self.second[expert]) + (1.0 - BETAS.1) * share * share;
            let change = lr * (first / correction.0) / ((second / correction.1).sqrt() + EPS);
            (self.first[expert], self.second[expert]) = (first as f32, second as f32);
            self.bias[expert] = (f64::from(self.bias[expert]) - change) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::{Tensor, kind};

    #[test]
    fn what_is_used_too_much_is_lowered_and_the_skip_class_stays() {
        let mut balance = RouterBalance::new(4, true);
        for step in 1..=50 {
            balance.update(step, &[70, 10, 10, 10, 1000], LR);
        }
        assert!(balance.bias[0] < -0.02 && balance.bias[1..4].iter().all(|bias| *bias > 0.02));
        assert_eq!(balance.bias[4], -1.0);
        let before = balance.bias.clone();
        RouterBalance { ..balance.clone() }.update(51, &[0, 0, 0, 0, 9], LR);
        assert_eq!(before, balance.bias);
    }

    #[test]
    fn where_there_is_no_router_nothing_moves() {
        let mut balance = RouterBalance::default();
        balance.update(1, &[], LR);
        assert!(balance.is_empty() && balance == RouterBalance::default());
        assert!(!RouterBalance::new(1, true).is_empty());
    }

    proptest! {
        /// The same as torch's AdamW without decay, fed with shares.
        #[test]
        fn it_is_adamw(steps in prop::collection::vec(prop::collection::vec(1u64..1000, 5), 1..8)) {
            let mut balance = RouterBalance::new(5, false);
            let mut weight = Tensor::zeros([5], kind::FLOAT_CPU);
            let (mut first, mut second) = (weight.zeros_like(), weight.zeros_like());
            for (index, counts) in steps.iter().enumerate() {
                let step = index as u64 + 1;
                balance.update(step, counts, 0.01);
                let total: u64 = counts.iter().sum();
                let error: Vec<f32> = counts.iter().map(|count| (*count as f64 / total as f64 - 0.2) as f32).collect();
                let by = super::super::adamw::AdamWScalars::at(step, 0.01, 0.0, BETAS, EPS).rounded(1.0);
                let moments = [&mut first, &mut second];
                kernels::ops::CPU.adamw(by, &mut weight, moments, &Tensor::from_slice(&error)).unwrap();
            }
            let wanted: Vec<f32> = Vec::try_from(&weight).unwrap();
            for (found, wanted) in balance.bias.iter().zip(wanted) {
                prop_assert!((found - wanted).abs() < 1e-4, "{found} {wanted}");
            }
        }
    }
}
