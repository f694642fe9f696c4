//! A digest of results of this machine's mathematics library. libtorch computes with it, but none of our tables has its
//! release; another release, or a library that is preloaded, changes bits silently.
//!
//! Probes the C library's functions directly, libtorch's operators that use them, in full vectors and remainders, over
//! one set of inputs; and matmuls, whose kernels the libraries choose by properties of the processor.

#![expect(unsafe_code, reason = "calls the C library's functions, as libtorch does")]

use tch::{Kind, TchError, Tensor};

use crate::{checksum, product};

unsafe extern "C" {
    safe fn expf(x: f32) -> f32;
    safe fn exp2f(x: f32) -> f32;
    safe fn expm1f(x: f32) -> f32;
    safe fn logf(x: f32) -> f32;
    safe fn log2f(x: f32) -> f32;
    safe fn log1pf(x: f32) -> f32;
    safe fn powf(x: f32, y: f32) -> f32;
    safe fn sinf(x: f32) -> f32;
    safe fn cosf(x: f32) -> f32;
    safe fn tanhf(x: f32) -> f32;
    safe fn erff(x: f32) -> f32;
    safe fn exp(x: f64) -> f64;
    safe fn expm1(x: f64) -> f64;
    safe fn log(x: f64) -> f64;
    safe fn log1p(x: f64) -> f64;
    safe fn pow(x: f64, y: f64) -> f64;
    safe fn sin(x: f64) -> f64;
    safe fn cos(x: f64) -> f64;
    safe fn tanh(x: f64) -> f64;
    safe fn erf(x: f64) -> f64;
}

/// Numbers in a set: not a multiple of a vector, so that every operator has a remainder.
const COUNT: i64 = 2053;

/// The digest of all results, in hexadecimal digits.
pub(crate) fn digest() -> crate::Result<String> {
    let (small, large) = inputs();
    let mut sum = 0u64;
    let mut number = 0u64;
    let mut take = |answers: &Tensor| -> crate::Result<()> {
        number += 1;
        sum = sum.wrapping_add(checksum::tensor(answers, number)?);
        Ok(())
    };
    let singles: [extern "C" fn(f32) -> f32; 10] =
        [expf, exp2f, expm1f, sinf, cosf, tanhf, erff, logf, log2f, log1pf];
    for (index, function) in singles.into_iter().enumerate() {
        // Functions that need positive numbers get those.
        let inputs = if index < 7 { &small } else { &large };
        let answers: Vec<f32> = inputs.iter().map(|x| function(*x as f32)).collect();
        take(&Tensor::f_from_slice(&answers)?)?;
    }
    let doubles: [extern "C" fn(f64) -> f64; 8] = [exp, expm1, sin, cos, tanh, erf, log, log1p];
    for (index, function) in doubles.into_iter().enumerate() {
        let inputs = if index < 6 { &small } else { &large };
        let answers: Vec<f64> = inputs.iter().map(|x| function(*x)).collect();
        take(&Tensor::f_from_slice(&answers)?)?;
    }
    let both = || large.iter().zip(&small);
    let powers: Vec<f32> = both().map(|(x, y)| powf(*x as f32, *y as f32 / 32.0)).collect();
    take(&Tensor::f_from_slice(&powers)?)?;
    let powers: Vec<f64> = both().map(|(x, y)| pow(*x, *y / 32.0)).collect();
    take(&Tensor::f_from_slice(&powers)?)?;
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        let of = |values: &[f64]| Tensor::f_from_slice(values)?.f_to_kind(kind);
        operators(&of(&small)?, &of(&large)?, kind)?.iter().try_for_each(&mut take)?;
    }
    products()?.iter().try_for_each(&mut take)?;
    Ok(format!("{sum:016x}"))
}

/// Matmuls like the model's, with enough elements to reveal another order of additions.
fn products() -> crate::Result<Vec<Tensor>> {
    const ROWS: i64 = 96;
    const INNER: i64 = 509;
    let numbers = drawn().map(|number| number as f32 - 0.5);
    let numbers: Vec<f32> = numbers.take((2 * ROWS * INNER) as usize).collect();
    let [left, right] = [0, 1].map(|half| -> crate::Result<Tensor> {
        let numbers = numbers.chunks(numbers.len() / 2).nth(half).unwrap_or_default();
        Ok(Tensor::f_from_slice(numbers)?.f_reshape([ROWS, INNER])?)
    });
    let (left, right) = (left?, right?);
    let narrow = |x: &Tensor| x.f_to_kind(Kind::BFloat16);
    let (small_left, small_right) = (narrow(&left)?, narrow(&right)?);
    Ok(vec![
        product::of(&left, &right.f_tr()?)?,
        product::of(&left.f_tr()?, &right)?,
        product::of(&small_left, &small_right.f_tr()?)?,
        product::of(&small_left.f_tr()?, &small_right)?,
    ])
}

/// Results of libtorch's operators for numbers around zero, and for positive ones.
fn operators(small: &Tensor, large: &Tensor, kind: Kind) -> Result<Vec<Tensor>, TchError> {
    let rows = small.f_narrow(0, 0, 13 * 157)?.f_reshape([13, 157])?;
    Ok(vec![
        small.f_exp()?,
        small.f_sin()?,
        small.f_cos()?,
        small.f_tanh()?,
        small.f_erf()?,
        small.f_sigmoid()?,
        small.f_silu()?,
        small.f_gelu("none")?,
        large.f_log()?,
        large.f_rsqrt()?,
        Tensor::f_pow_scalar(10_000.0, &small.f_div_scalar(90.0)?)?,
        rows.f_softmax(-1, kind)?,
        rows.f_log_softmax(-1, kind)?,
        rows.f_logsumexp([-1], false)?,
    ])
}

/// Numbers from -90 to 90, and positive ones of many magnitudes: from additions, multiplications and divisions only.
fn inputs() -> (Vec<f64>, Vec<f64>) {
    let mut drawn = drawn();
    let small = drawn.by_ref().take(COUNT as usize).map(|number| (number - 0.5) * 180.0).collect();
    let large = |(index, number): (i64, f64)| number * (1u64 << (index % 40)) as f64 + 1e-6;
    (small, (0..COUNT).zip(drawn).map(large).collect())
}

/// Pseudorandom numbers from 0 to 1.
fn drawn() -> impl Iterator<Item = f64> {
    let mut word = 1u64;
    std::iter::repeat_with(move || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (word >> 11) as f64 / (1u64 << 53) as f64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_the_same_each_time_and_a_last_place_shows() {
        assert_eq!(digest().unwrap(), digest().unwrap());
        let (small, _) = inputs();
        let answers: Vec<f32> = small.iter().map(|x| expf(*x as f32)).collect();
        let mut other = answers.clone();
        other[1234] = f32::from_bits(other[1234].to_bits() ^ 1);
        let sum = |values: &[f32]| checksum::tensor(&Tensor::from_slice(values), 1).unwrap();
        assert_ne!(sum(&answers), sum(&other));
        // Compared to the standard library, which calls the same functions.
        assert!(small.iter().zip(&answers).all(|(x, y)| (*x as f32).exp() == *y));
    }
}
