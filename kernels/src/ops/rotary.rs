//! Rotary embedding in libtorch's operators, the same in every table.

use tch::Tensor;

use crate::Result;

/// The first dimensions of each head of `x`, `[G, N, d]`, paired by halves and rotated by each token's angles: cosines
/// and sines, `[N, half]`.
///
/// # Errors
/// If the shapes do not fit.
pub fn rotated(x: &Tensor, [cos, sin]: [&Tensor; 2]) -> Result<Tensor> {
    let (half, width) = (cos.size()[1], x.size()[2]);
    let (a, b) = (x.f_narrow(2, 0, half)?, x.f_narrow(2, half, half)?);
    let turned_a = a.f_mul(cos)?.f_sub(&b.f_mul(sin)?)?;
    let turned_b = b.f_mul(cos)?.f_add(&a.f_mul(sin)?)?;
    let rest = x.f_narrow(2, 2 * half, width - 2 * half)?;
    Ok(Tensor::f_cat(&[turned_a, turned_b, rest], 2)?)
}

/// Backward of [`rotated`]: the inverse rotation.
///
/// # Errors
/// If the shapes do not fit.
pub fn rotated_back(grad: &Tensor, [cos, sin]: [&Tensor; 2]) -> Result<Tensor> {
    rotated(grad, [cos, &sin.f_neg()?])
}
