//! Muon: a matrix's momentum, made nearly orthogonal by five Newton-Schulz steps.
//!
//! ```text
//! m <- mu * m + g                                    (not an average)
//! u  = g + mu * m                                    (Nesterov)
//! X  = u / (||u|| + 1e-7), transposed if it is tall
//! X <- P X  with  P = a I + b A + c A A, A = X X^T    five times, (a, b, c) = (3.4445, -4.7750, 2.0315)
//! w <- (1 - lr * decay) * w                          decay by the base rate, shared with AdamW
//! w <- w - lr * 0.2 * sqrt(max(rows, columns)) * X   the size of an AdamW update
//! ```
//!
//! For a matrix at least twice as long one way as the other only `A` is iterated, unless the curriculum sets
//! `newton_schulz = "direct"`: the results differ only in rounding. `"bf16"` iterates every matrix itself, in bf16.
//!
//! Each matrix is a separate work item (an expert's too): its new bits depend on that matrix alone, whichever worker or
//! rank updates it. The table of operations also takes stacks of matrices, under the same rule; its CPU kernels gain
//! nothing from them.

use kernels::ops::{NewtonSchulz, NewtonSchulzIterate};

/// The quintic iteration: it brings singular values to about 0.7..1.2, which is fast rather than exact.
pub const QUINTIC: NewtonSchulz = NewtonSchulz {
    coefficients: [3.4445, -4.7750, 2.0315],
    steps: 5,
    eps: 1e-7,
    form: NewtonSchulzIterate::Gram,
};

/// The scalars of a Muon step.
#[derive(Clone, Copy, Debug)]
pub struct MuonScalars {
    /// The learning rate shared with AdamW.
    pub lr: f64,
    /// `1 - lr * decay`.
    pub keep: f64,
    /// The decay of the momentum.
    pub momentum: f64,
    /// The Newton-Schulz iteration.
    pub newton_schulz: NewtonSchulz,
}

impl MuonScalars {
    /// The scalars of a step.
    pub fn at(lr: f64, decay: f64, momentum: f64) -> Self {
        MuonScalars { lr, keep: 1.0 - lr * decay, momentum, newton_schulz: QUINTIC }
    }

    /// The same with this form of the iteration.
    #[must_use]
    pub(crate) fn by_form(self, form: NewtonSchulzIterate) -> Self {
        MuonScalars { newton_schulz: NewtonSchulz { form, ..self.newton_schulz }, ..self }
    }

    /// The factor of an update direction, for a matrix whose longer side is `longest`.
    pub(super) fn rate(&self, longest: i64) -> f64 {
        self.lr * 0.2 * (longest as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::ops::CPU;
    use proptest::prelude::*;
    use tch::{Kind, Tensor};

    fn orthogonalized(matrix: &Tensor) -> Tensor {
        CPU.newton_schulz(matrix, QUINTIC).unwrap()
    }

    fn random(rows: i64, columns: i64, seed: i64) -> Tensor {
        crate::model::random(&[rows, columns], seed as u64)
    }

    /// The update direction of a matrix with this momentum.
    fn direction(muon: MuonScalars, momentum: &mut Tensor, gradient: &Tensor) -> Tensor {
        let direction = CPU.nesterov(momentum, gradient, muon.momentum as f32, 1.0).unwrap();
        CPU.newton_schulz(&direction, muon.newton_schulz).unwrap()
    }

    fn descend(muon: MuonScalars, weight: &mut Tensor, direction: &Tensor, longest: i64) {
        CPU.descend(weight, direction, muon.keep as f32, muon.rate(longest) as f32).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// In exact arithmetic the iteration only applies the scalar polynomial to the singular values.
        #[test]
        fn it_is_the_polynomial_on_singular_values(rows in 1i64..24, columns in 1i64..24, seed in 0i64..1000) {
            let matrix = random(rows, columns, seed).to_kind(Kind::Double);
            let (u, s, v) = matrix.svd(true, true);
            let mut sigma = &s / (matrix.norm() + 1e-7);
            for _ in 0..QUINTIC.steps {
                let square = sigma.square();
                let [a, b, c] = QUINTIC.coefficients.map(f64::from);
                sigma = &sigma * (a + b * &square + c * square.square());
            }
            let wanted = u.matmul(&sigma.diag(0)).matmul(&v.transpose(0, 1));
            let found = orthogonalized(&matrix.to_kind(Kind::Float)).to_kind(Kind::Double);
            let error = (&found - &wanted).norm().double_value(&[]) / wanted.norm().double_value(&[]);
            prop_assert!(error < 2e-3, "relative error {error}");
        }

        #[test]
        fn a_step_is_its_formula(rows in 1i64..12, columns in 1i64..12, seed in 0i64..1000) {
            let (mut weight, mut momentum) = (random(rows, columns, seed), random(rows, columns, seed + 1));
            let gradient = random(rows, columns, seed + 2);
            let wanted_momentum = &momentum * 0.95 + &gradient;
            let turned = orthogonalized(&(&gradient + &wanted_momentum * 0.95));
            let size = 0.02 * 0.2 * (rows.max(columns) as f64).sqrt();
            let wanted = &weight * (1.0 - 0.02 * 0.1) - turned * size;
            let muon = MuonScalars::at(0.02, 0.1, 0.95);
            let direction = direction(muon, &mut momentum, &gradient);
            descend(muon, &mut weight, &direction, rows.max(columns));
            prop_assert!((&momentum - wanted_momentum).abs().max().double_value(&[]) < 1e-6);
            prop_assert!((&weight - wanted).abs().max().double_value(&[]) < 1e-5);
        }
    }

    #[test]
    fn well_conditioned_matrices_come_out_nearly_orthogonal() {
        for (rows, columns) in [(16, 16), (64, 32), (17, 256)] {
            let found = orthogonalized(&random(rows, columns, 3));
            let (_, s, _) = found.svd(true, false);
            let values: Vec<f64> = Vec::try_from(s.to_kind(Kind::Double)).unwrap();
            // The smallest singular value of a square random matrix may be too small for five steps; most are not.
            let inside = values.iter().filter(|value| (0.6..1.3).contains(*value)).count();
            assert!(inside * 10 >= values.len() * 9, "{rows} x {columns}: {values:?}");
            assert!(values.iter().all(|value| *value < 1.3), "{rows} x {columns}: {values:?}");
        }
    }

    /// The forms differ only in rounding, and only where a matrix is twice as long one way as the other.
    #[test]
    fn a_form_is_the_one_that_is_asked_for() {
        let by = |rows, columns, form| {
            let muon = MuonScalars::at(0.02, 0.1, 0.95).by_form(form);
            direction(muon, &mut random(rows, columns, 1), &random(rows, columns, 2))
        };
        for (rows, columns, differ) in [(20, 40, true), (90, 30, true), (20, 39, false)] {
            let [gram, direct] = [NewtonSchulzIterate::Gram, NewtonSchulzIterate::Direct]
                .map(|form| by(rows, columns, form));
            assert_eq!(gram != direct, differ, "{rows} x {columns}");
            assert!((gram - direct).abs().max().double_value(&[]) < 1e-4, "{rows} x {columns}");
        }
    }

    #[test]
    fn a_gradient_of_zeros_moves_nothing() {
        let (mut weight, mut momentum) =
            (random(4, 6, 1), Tensor::zeros([4, 6], tch::kind::FLOAT_CPU));
        let before = weight.copy();
        let gradient = Tensor::zeros([4, 6], tch::kind::FLOAT_CPU);
        let muon = MuonScalars::at(0.02, 0.0, 0.95);
        let direction = direction(muon, &mut momentum, &gradient);
        descend(muon, &mut weight, &direction, 6);
        assert_eq!(weight, before);
    }
}
