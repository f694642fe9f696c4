//! Matmuls into existing memory, compared to their formula in f64.

use super::*;

/// A matrix within larger memory, row-major or column-major.
fn laid(shape: [i64; 2], turned: bool, kind: Kind, seed: u64) -> Tensor {
    let [rows, columns] = shape;
    let values = random(&[rows + 1, columns + 2], seed).to_kind(kind);
    let values = if turned { values.tr().contiguous().tr() } else { values };
    values.narrow(0, 1, rows).narrow(1, 1, columns)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn products_go_into_any_layout(
        (rows, inner, columns) in (1i64..20, 1i64..40, 1i64..20),
        turned: [bool; 3],
        kind in float(),
        wide: bool,
        batched: bool,
        seed in 0u64..1000,
    ) {
        let (left, right) = (laid([rows, inner], turned[0], kind, seed), laid([inner, columns], turned[1], kind, seed + 1));
        let exact = left.to_kind(Kind::Double).mm(&right.to_kind(Kind::Double));
        let out_kind = if wide { Kind::Float } else { kind };
        for table in [CPU, REFERENCE, EMULATED] {
            let out = laid([rows, columns], turned[2], out_kind, seed + 2);
            match batched {
                true => table.matmul_into(&out.unsqueeze(0), &left.unsqueeze(0), &right.unsqueeze(0)).unwrap(),
                false => table.matmul_into(&out, &left, &right).unwrap(),
            }
            // A matmul in bf16 is rounded to bf16 even if `out` is f32.
            let within = if kind == Kind::Float { 1e-5 } else { 2f64.powi(-8) };
            prop_assert!(difference(&out.to_kind(Kind::Double), &exact) < within, "{}", table.name());

            let mut sum = laid([rows, columns], turned[2], Kind::Float, seed + 2);
            let before = sum.to_kind(Kind::Double);
            table.matmul_add(&mut sum, &left, &right).unwrap();
            // Relative to the matmul: it was rounded before the sum, in which the two may cancel.
            let added = sum.to_kind(Kind::Double) - before;
            prop_assert!(difference(&added, &exact) < within, "{}", table.name());
        }
    }
}
