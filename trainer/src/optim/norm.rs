//! The global gradient norm: sums of squares of fixed chunks, added by the fixed tree over chunks, then over tensors.
//!
//! A chunk's sum is a function of its 65,536 elements; chunks are added by the tree over chunk numbers, tensors by the
//! tree over tensor numbers. So any assignment of chunks to ranks gives a norm with the same bits.

use contract::Result;
use kernels::ops::Ops;
use kernels::tree;
use tch::Tensor;

use crate::refusal::{refused, values};

/// Elements of a chunk: the unit of the gradient norm and of elementwise work.
pub const CHUNK: i64 = kernels::ops::CHUNK;

/// The sum of squares of a tensor, in f64.
pub fn squares(ops: &dyn Ops, tensor: &Tensor) -> Result<f64> {
    let squares = ops.chunk_squares(&[tensor.reshape([-1])], CHUNK).map_err(refused)?;
    Ok(sum(&values(&squares)?))
}

/// Adds the chunks of a tensor by the tree.
pub fn sum(chunks: &[f64]) -> f64 {
    tree::total(chunks.iter().copied())
}

/// The norm, from the sums of squares of all tensors in canonical order.
pub fn norm(squares: &[f64]) -> f64 {
    sum(squares).sqrt()
}

/// The factor of the gradient that makes its norm at most `clip`: exactly 1, which changes nothing, if it is already.
pub fn scale(norm: f64, clip: f64) -> f64 {
    if clip > 0.0 && norm > clip { clip / norm } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::{Device, Kind};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn norms_are_norms(length in 1i64..200_000, size in 1e-6..1e6f64) {
            let tensor = (Tensor::arange(length, (Kind::Float, Device::Cpu)) * 0.7).sin() * size;
            let values: Vec<f32> = Vec::try_from(&tensor).unwrap();
            let wanted: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
            let found = squares(kernels::ops::CPU, &tensor).unwrap();
            prop_assert!((found - wanted).abs() <= 1e-9 * wanted);
            let both = norm(&[found, found]);
            prop_assert!((both - (2.0 * wanted).sqrt()).abs() <= 1e-9 * both);
        }
    }

    #[test]
    fn clipping_touches_only_what_is_too_long() {
        assert_eq!(scale(0.5, 1.0), 1.0);
        assert_eq!(scale(4.0, 1.0), 0.25);
        assert_eq!(scale(4.0, 0.0), 1.0, "0 is no clipping");
    }
}
