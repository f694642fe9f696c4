//! Newton-Schulz compared to the iteration in f64, alone and in stacks.

use proptest::prelude::*;
use tch::{Kind, Tensor};

use super::super::*;
use super::{EMULATED, random};

/// Coefficients of the quintic iteration that Muon uses.
const QUINTIC: NewtonSchulz = NewtonSchulz {
    coefficients: [3.4445, -4.7750, 2.0315],
    steps: 5,
    eps: 1e-7,
    form: NewtonSchulzIterate::Gram,
};

/// The literal iteration in f64.
fn iterated(matrix: &Tensor, steps: usize) -> Tensor {
    let tall = matrix.size()[0] > matrix.size()[1];
    let x = matrix.to_kind(Kind::Double);
    let mut x = if tall { x.tr() } else { x };
    x = &x / (x.norm() + 1e-7);
    for _ in 0..steps {
        let [a, b, c] = QUINTIC.coefficients.map(f64::from);
        let square = x.mm(&x.tr());
        let factor = &square * b + square.mm(&square) * c;
        x = &x * a + factor.mm(&x);
    }
    if tall { x.tr() } else { x }
}

/// Both forms in f32.
const FORMS: [NewtonSchulz; 2] =
    [QUINTIC, NewtonSchulz { form: NewtonSchulzIterate::Direct, ..QUINTIC }];

/// The form in bf16.
const NARROW: NewtonSchulz = NewtonSchulz { form: NewtonSchulzIterate::Bf16, ..QUINTIC };

/// The distance to [`iterated`], relative to its length.
fn error(table: OpsTable, matrix: &Tensor, by: NewtonSchulz) -> f64 {
    let wanted = iterated(matrix, QUINTIC.steps);
    let found = table.newton_schulz(matrix, by).unwrap().to_kind(Kind::Double);
    (found - &wanted).norm().double_value(&[]) / wanted.norm().double_value(&[])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Tiles, symmetry and iterating the square change rounding, not the result, even if half of the directions almost
    /// vanish. Stated error: 1e-3 of the result's length.
    #[test]
    fn iterations_are_those_of_f64(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..90), (90i64..300, 90i64..700)],
        turned: bool,
        flat: bool,
        seed in 0u64..1000,
    ) {
        let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
        let matrix = random(&[rows, columns], seed);
        if flat {
            let _ = matrix.narrow(0, 0, rows / 2).g_mul_scalar_(1e-5);
        }
        for (table, by) in [CPU, REFERENCE, EMULATED].into_iter().flat_map(|table| FORMS.map(|by| (table, by))) {
            let error = error(table, &matrix, by);
            prop_assert!(error < 1e-3, "{} {:?}: {error}", table.name(), by.form);
        }
    }

    /// Rounded to bf16 after every matmul: the difference to f64 is of the order of this rounding. All tables round at
    /// the same places, so they are closer to each other.
    #[test]
    fn iterations_in_bf16_are_near_those_of_f64(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..90), (90i64..200, 90i64..300)],
        turned: bool,
        seed in 0u64..1000,
    ) {
        let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
        let matrix = random(&[rows, columns], seed);
        let wanted = CPU.newton_schulz(&matrix, NARROW).unwrap();
        prop_assert_eq!(wanted.to_kind(Kind::BFloat16).to_kind(Kind::Float), wanted.copy(), "it is bf16");
        for table in [CPU, REFERENCE, EMULATED] {
            let error = error(table, &matrix, NARROW);
            prop_assert!(error < 0.06, "{}: {error}", table.name());
            let found = table.newton_schulz(&matrix, NARROW).unwrap();
            let far = (found - &wanted).norm() / wanted.norm();
            prop_assert!(far.double_value(&[]) < 0.02, "{} from the CPU's: {far:?}", table.name());
        }
    }

    /// A device computes half of the tiles of a symmetric result, in the CPU's order, so its own matmuls have the CPU's
    /// bits; likewise for a transposed matrix.
    #[test]
    fn small_ones_have_the_bits_of_the_cpu(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..90), (60i64..150, 60i64..300)],
        turned: bool,
        steps in 0usize..6,
        seed in 0u64..1000,
    ) {
        let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
        let matrix = random(&[rows, columns], seed);
        for by in FORMS.map(|by| NewtonSchulz { steps, ..by }) {
            let wanted = CPU.newton_schulz(&matrix, by).unwrap();
            prop_assert_eq!(EMULATED.newton_schulz(&matrix, by).unwrap(), wanted, "{:?}", by.form);
        }
    }

    /// The bits of a matrix do not depend on the rest of its stack.
    #[test]
    fn a_matrix_has_its_bits_in_any_stack(
        (rows, columns) in prop_oneof![(1i64..40, 1i64..40), (60i64..90, 60i64..200)],
        count in 1i64..5,
        seed in 0u64..1000,
    ) {
        let stack = random(&[count, rows, columns], seed);
        // The emulator is slow with large matrices: it computes one in four.
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

/// The same for stacks that a library multiplies, at any position and with any other matrices: over more than one
/// stack, tall, square and wide.
#[test]
fn a_large_matrix_has_its_bits_in_any_stack() {
    let shapes = [[367, 367], [900, 150], [150, 900]];
    let matrices: Vec<Tensor> =
        (0..15).map(|seed| random(&shapes[seed % 3], seed as u64)).collect();
    for by in FORMS.into_iter().chain([NARROW]) {
        let together = EMULATED.all_newton_schulz(&matrices, by).unwrap();
        let some = EMULATED.all_newton_schulz(&matrices[3..9], by).unwrap();
        let turned: Vec<Tensor> = matrices[8..].iter().rev().map(Tensor::shallow_clone).collect();
        let turned = EMULATED.all_newton_schulz(&turned, by).unwrap();
        assert!(some == together[3..9] && turned.iter().rev().eq(&together[8..]), "{by:?}");
        let stack = Tensor::stack(&[&matrices[1], &matrices[4]], 0);
        let stack = EMULATED.newton_schulz(&stack, by).unwrap();
        assert!((stack.get(0), stack.get(1)) == (together[1].copy(), together[4].copy()), "{by:?}");
        for index in [0, 1, 14] {
            let alone = EMULATED.newton_schulz(&matrices[index], by).unwrap();
            assert_eq!(alone, together[index], "{index} {by:?}");
        }
    }
}

/// Large enough for symmetric results in blocks, in both orientations.
#[test]
fn a_matrix_in_blocks_is_that_of_f64() {
    for (shape, by) in [([1024, 1030], FORMS[1]), ([2100, 1024], FORMS[0])] {
        let (matrix, by) = (random(&shape, 7), NewtonSchulz { steps: 2, ..by });
        let (wanted, found) =
            (iterated(&matrix, by.steps), EMULATED.newton_schulz(&matrix, by).unwrap());
        let far = (found.to_kind(Kind::Double) - &wanted).norm() / wanted.norm();
        assert!(far.double_value(&[]) < 1e-4, "{far:?}");
    }
}
