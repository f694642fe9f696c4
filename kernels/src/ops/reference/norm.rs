//! RMS norm, and a residual addition with scales and biases.

use tch::{Kind, Tensor};

use super::{columns, to_f32};
use crate::Result;
use crate::ops::{ParamGradient, ResidualGrads, ResidualScaling, check};

pub(super) fn rms_norm(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    kind: Kind,
) -> Result<(Tensor, Tensor)> {
    check::rms_norm(x, weight)?;
    let mean = x.f_square()?.f_mean_dim(-1, true, Kind::Float)?;
    let factors = mean.f_add_scalar(eps)?.f_rsqrt()?;
    Ok((x.f_mul(&factors)?.f_mul(weight)?.f_to_kind(kind)?, factors))
}

pub(super) fn rms_norm_backward(
    x: &Tensor,
    factors: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, ParamGradient)> {
    let [_, width] = check::rms_norm_backward(x, factors, weight, grad)?;
    let (unit, grad) = (x.f_mul(factors)?, to_f32(grad)?);
    let product = grad.f_mul(&unit)?;
    let along = product.f_mv(weight)?.f_div_scalar(-(width as f64))?.f_unsqueeze(1)?;
    let input = grad.f_mul(weight)?.f_addcmul(&unit, &along)?.f_mul(factors)?;
    Ok((input, ParamGradient::Made(columns(&product)?)))
}

pub(super) fn residual(branch: &Tensor, residual: &Tensor, by: ResidualScaling) -> Result<Tensor> {
    check::residual(branch, residual, by)?;
    let branch = to_f32(branch)?.f_add(by.bias)?.f_mul(by.scale)?;
    Ok(branch.f_addcmul(&residual.f_add(by.residual_bias)?, by.residual_scale)?)
}

pub(super) fn residual_backward(
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    grad: &Tensor,
) -> Result<ResidualGrads> {
    check::residual_backward(branch, residual, by, grad)?;
    let (kind, branch) = (branch.kind(), to_f32(branch)?);
    let (of_branch, of_residual) =
        (columns(&grad.f_mul(&branch)?)?, columns(&grad.f_mul(residual)?)?);
    Ok(ResidualGrads {
        branch: grad.f_mul(by.scale)?.f_to_kind(kind)?,
        gates: None,
        residual: grad.f_mul(by.residual_scale)?,
        scaling: by.gradients(&columns(grad)?, &of_branch, &of_residual)?,
    })
}
