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
//! `A` and its products are symmetric: half of their blocks are computed. Where a matrix is at least twice as wide as
//! high the steps are taken on `A` alone. Both follow from the shape, never from what else is at hand.
//!
//! Each matrix is a work item of its own (an expert's too), never a batch of several: its new bits are then a function of
//! that matrix alone, whichever worker, and later whichever rank, owns it.

use kernels::ops::Ops;
use kernels::{Result, product};
use tch::Tensor;

/// Coefficients of the quintic iteration: they push singular values into about 0.7..1.2, fast rather than exact.
const QUINTIC: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);

/// Newton-Schulz steps.
const STEPS: usize = 5;

/// Rows of a symmetric product that are computed as one: smaller pieces run slower than what they save.
const BLOCK: i64 = 128;

/// What Muon does at one step, as plain numbers.
#[derive(Clone, Copy, Debug)]
pub struct Muon {
    /// The learning rate shared with AdamW.
    pub lr: f64,
    /// `1 - lr * decay`.
    pub keep: f64,
    /// Of the momentum.
    pub momentum: f64,
}

impl Muon {
    /// The numbers of a step.
    pub fn at(lr: f64, decay: f64, momentum: f64) -> Self {
        Muon { lr, keep: 1.0 - lr * decay, momentum }
    }

    /// Updates one matrix and its momentum in place.
    pub fn update(
        &self,
        ops: &dyn Ops,
        weight: &mut Tensor,
        momentum: &mut Tensor,
        (gradient, scale): (&Tensor, f64),
    ) -> Result<()> {
        let update = ops.nesterov(momentum, gradient, self.momentum as f32, scale as f32)?;
        let update = orthogonalized(&update)?;
        let longest = weight.size().into_iter().max().unwrap_or(1);
        let rate = self.lr * 0.2 * (longest as f64).sqrt();
        ops.descend(weight, &update, self.keep as f32, rate as f32)
    }
}

/// The nearly orthogonal matrix nearest to the direction of `matrix`.
pub fn orthogonalized(matrix: &Tensor) -> Result<Tensor> {
    let size = matrix.size();
    let tall = size[0] > size[1];
    let matrix = if tall { matrix.transpose(0, 1) } else { matrix.shallow_clone() };
    // In one layout before anything is summed: the norm's bits are the values', not their strides'.
    let matrix = matrix.contiguous();
    let x = &matrix / (matrix.norm() + 1e-7);
    let (rows, columns) = (size[0].min(size[1]), size[0].max(size[1]));
    let x = if columns >= 2 * rows { by_square(&x)? } else { by_matrix(x)? };
    Ok(if tall { x.transpose(0, 1).contiguous() } else { x })
}

/// Five steps on the matrix itself.
fn by_matrix(mut x: Tensor) -> Result<Tensor> {
    let rows = x.size()[0];
    let fresh = || x.new_empty([rows, rows], (x.kind(), x.device()));
    let (square, mut factor, mut next) = (fresh(), fresh(), x.empty_like());
    for _ in 0..STEPS {
        symmetric(&square, &x, &x.tr())?;
        symmetric(&factor, &square, &square)?;
        polynomial(&mut factor, &square);
        product::into(&next, &factor, &x)?;
        std::mem::swap(&mut x, &mut next);
    }
    Ok(x)
}

/// The same five steps where the matrix is at least twice as wide as high. `A = X X^T` and all polynomials of it
/// commute, so that a step takes `A` to `P A P`, and the wide matrix is met twice in all instead of twice a step.
fn by_square(x: &Tensor) -> Result<Tensor> {
    let rows = x.size()[0];
    let fresh = || x.new_empty([rows, rows], (x.kind(), x.device()));
    let (square, mut factor, spare) = (fresh(), fresh(), fresh());
    symmetric(&square, x, &x.tr())?;
    let mut all: Option<Tensor> = None;
    for step in 1..=STEPS {
        symmetric(&factor, &square, &square)?;
        polynomial(&mut factor, &square);
        let next = fresh();
        match &all {
            None => next.shallow_clone().copy_(&factor),
            Some(before) => symmetric(&next, before, &factor)?,
        }
        all = Some(next);
        if step < STEPS {
            symmetric(&spare, &square, &factor)?;
            symmetric(&square, &spare, &factor)?;
        }
    }
    all.map_or_else(|| Ok(x.copy()), |all| product::of(&all, x))
}

/// `a I + b A + c A^2` in the place of `A^2`.
fn polynomial(fourth: &mut Tensor, square: &Tensor) {
    let (a, b, c) = QUINTIC;
    let _ = fourth.g_mul_scalar_(c);
    let b = Tensor::from(b as f32).to_device(square.device()).to_kind(square.kind());
    let _ = fourth.addcmul_(square, &b);
    let _ = fourth.diagonal(0, 0, 1).g_add_scalar_(a);
}

/// A product that is symmetric, into `out`: what stands below the diagonal blocks is copied, not computed.
///
/// The cut into blocks is a function of the size alone, and so are the bits.
fn symmetric(out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
    let rows = out.size()[0];
    if rows <= BLOCK {
        return product::into(out, left, right);
    }
    let (top, bottom) = (rows / 2, rows - rows / 2);
    let (above, below) = (left.narrow(0, 0, top), left.narrow(0, top, bottom));
    let (before, after) = (right.narrow(1, 0, top), right.narrow(1, top, bottom));
    symmetric(&out.narrow(0, 0, top).narrow(1, 0, top), &above, &before)?;
    symmetric(&out.narrow(0, top, bottom).narrow(1, top, bottom), &below, &after)?;
    let corner = out.narrow(0, 0, top).narrow(1, top, bottom);
    product::into(&corner, &above, &after)?;
    out.narrow(0, top, bottom).narrow(1, 0, top).copy_(&corner.tr());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::ops::CPU;
    use proptest::prelude::*;
    use tch::Kind;

    fn orthogonalized(matrix: &Tensor) -> Tensor {
        super::orthogonalized(matrix).unwrap()
    }

    fn random(rows: i64, columns: i64, seed: i64) -> Tensor {
        crate::model::random(&[rows, columns], seed as u64)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// In exact arithmetic the iteration acts on singular values alone, by the scalar polynomial.
        #[test]
        fn it_is_the_polynomial_on_singular_values(rows in 1i64..24, columns in 1i64..24, seed in 0i64..1000) {
            let matrix = random(rows, columns, seed).to_kind(Kind::Double);
            let (u, s, v) = matrix.svd(true, true);
            let mut sigma = &s / (matrix.norm() + 1e-7);
            for _ in 0..STEPS {
                let square = sigma.square();
                sigma = &sigma * (QUINTIC.0 + QUINTIC.1 * &square + QUINTIC.2 * square.square());
            }
            let wanted = u.matmul(&sigma.diag(0)).matmul(&v.transpose(0, 1));
            let found = orthogonalized(&matrix.to_kind(Kind::Float)).to_kind(Kind::Double);
            let error = (&found - &wanted).norm().double_value(&[]) / wanted.norm().double_value(&[]);
            prop_assert!(error < 2e-3, "relative error {error}");
        }

        /// Blocks and the way over the square change rounding, not the result: as in f64, on sizes with several blocks.
        #[test]
        fn blocks_and_squares_are_the_plain_iteration(rows in 100i64..300, wide in 1i64..5, seed in 0i64..1000, flat: bool) {
            let matrix = random(rows, rows * wide / 2 + 1, seed);
            if flat {
                // Half of the directions all but vanish.
                let _ = matrix.narrow(0, 0, rows / 2).g_mul_scalar_(1e-5);
            }
            let mut wanted = matrix.to_kind(Kind::Double);
            let tall = wanted.size()[0] > wanted.size()[1];
            wanted = if tall { wanted.tr() } else { wanted };
            wanted = &wanted / (wanted.norm() + 1e-7);
            for _ in 0..STEPS {
                let square = wanted.mm(&wanted.tr());
                let factor = &square * QUINTIC.1 + square.mm(&square) * QUINTIC.2;
                wanted = &wanted * QUINTIC.0 + factor.mm(&wanted);
            }
            wanted = if tall { wanted.tr() } else { wanted };
            let found = orthogonalized(&matrix).to_kind(Kind::Double);
            let error = (&found - &wanted).norm().double_value(&[]) / wanted.norm().double_value(&[]);
            prop_assert!(error < 1e-3, "relative error {error}");
        }

        /// Bits are a function of the matrix alone: not of its place in a larger tensor, nor of what was computed before.
        #[test]
        fn a_matrix_has_its_bits_wherever_it_stands(rows in 1i64..200, columns in 1i64..200, seed in 0i64..1000) {
            let alone = random(rows, columns, seed);
            let among = Tensor::stack(&[&random(rows, columns, seed + 1), &alone], 0);
            let found = orthogonalized(&among.get(1));
            prop_assert_eq!(&found, &orthogonalized(&alone));
            prop_assert_eq!(&found, &orthogonalized(&alone.tr().contiguous().tr()));
        }

        #[test]
        fn a_step_is_its_formula(rows in 1i64..12, columns in 1i64..12, seed in 0i64..1000) {
            let (mut weight, mut momentum) = (random(rows, columns, seed), random(rows, columns, seed + 1));
            let gradient = random(rows, columns, seed + 2);
            let wanted_momentum = &momentum * 0.95 + &gradient;
            let direction = orthogonalized(&(&gradient + &wanted_momentum * 0.95));
            let size = 0.02 * 0.2 * (rows.max(columns) as f64).sqrt();
            let wanted = &weight * (1.0 - 0.02 * 0.1) - direction * size;
            Muon::at(0.02, 0.1, 0.95)
                .update(CPU, &mut weight, &mut momentum, (&gradient, 1.0))
                .unwrap();
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
            // The smallest singular value of a square random matrix may be too small for five steps; the bulk is not.
            let inside = values.iter().filter(|value| (0.6..1.3).contains(*value)).count();
            assert!(inside * 10 >= values.len() * 9, "{rows} x {columns}: {values:?}");
            assert!(values.iter().all(|value| *value < 1.3), "{rows} x {columns}: {values:?}");
        }
    }

    #[test]
    fn a_gradient_of_zeros_moves_nothing() {
        let (mut weight, mut momentum) =
            (random(4, 6, 1), Tensor::zeros([4, 6], tch::kind::FLOAT_CPU));
        let before = weight.copy();
        let gradient = Tensor::zeros([4, 6], tch::kind::FLOAT_CPU);
        Muon::at(0.02, 0.0, 0.95)
            .update(CPU, &mut weight, &mut momentum, (&gradient, 1.0))
            .unwrap();
        assert_eq!(weight, before);
    }
}
