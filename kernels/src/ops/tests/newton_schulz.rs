//! Newton-Schulz against the iteration in f64, alone and in stacks.

use proptest::prelude::*;
use tch::{Kind, Tensor};

use super::super::*;
use super::{EMULATED, random};

/// Coefficients of the quintic iteration that Muon uses.
const QUINTIC: NewtonSchulz =
    NewtonSchulz { coefficients: [3.4445, -4.7750, 2.0315], steps: 5, eps: 1e-7 };

/// The iteration as it is written down, in f64.
fn iterated(matrix: &Tensor) -> Tensor {
    let tall = matrix.size()[0] > matrix.size()[1];
    let x = matrix.to_kind(Kind::Double);
    let mut x = if tall { x.tr() } else { x };
    x = &x / (x.norm() + 1e-7);
    for _ in 0..QUINTIC.steps {
        let [a, b, c] = QUINTIC.coefficients.map(f64::from);
        let square = x.mm(&x.tr());
        let factor = &square * b + square.mm(&square) * c;
        x = &x * a + factor.mm(&x);
    }
    if tall { x.tr() } else { x }
}

/// The distance to [`iterated`], over its length.
fn error(table: Table, matrix: &Tensor) -> f64 {
    let wanted = iterated(matrix);
    let found = table.newton_schulz(matrix, QUINTIC).unwrap().to_kind(Kind::Double);
    (found - &wanted).norm().double_value(&[]) / wanted.norm().double_value(&[])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Tiles, symmetry and the way over the square change rounding, not the result, also where half of the directions all but
    /// vanish. Stated error: 1e-3 of the result's length.
    #[test]
    fn iterations_are_those_of_f64(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..40), (90i64..300, 90i64..700)],
        turned: bool,
        flat: bool,
        seed in 0u64..1000,
    ) {
        let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
        let matrix = random(&[rows, columns], seed);
        if flat {
            let _ = matrix.narrow(0, 0, rows / 2).g_mul_scalar_(1e-5);
        }
        for table in [CPU, REFERENCE, EMULATED] {
            let error = error(table, &matrix);
            prop_assert!(error < 1e-3, "{}: {error}", table.name());
        }
    }

    /// Bits are a function of the matrix alone, whatever it is stacked with.
    #[test]
    fn a_matrix_has_its_bits_in_any_stack(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..40), (60i64..90, 60i64..200)],
        count in 1i64..5,
        seed in 0u64..1000,
    ) {
        let stack = random(&[count, rows, columns], seed);
        // What is large takes the emulator long: it computes one in four.
        let emulated = (rows * columns < 40 * 40 || seed % 4 == 0).then_some(EMULATED);
        for table in [CPU, REFERENCE].into_iter().chain(emulated) {
            let together = table.newton_schulz(&stack, QUINTIC).unwrap();
            let mut others: Vec<Tensor> = (0..count).map(|matrix| stack.get(matrix)).collect();
            others.insert(0, random(&[columns + 3, 5], seed));
            let found = table.all_newton_schulz(&others, QUINTIC).unwrap();
            let found = Tensor::stack(&found[1..], 0);
            prop_assert_eq!(&found, &together, "{}", table.name());
            for matrix in 0..count {
                let alone = table.newton_schulz(&stack.get(matrix), QUINTIC).unwrap();
                prop_assert_eq!(alone, together.get(matrix), "{}", table.name());
            }
        }
    }
}
