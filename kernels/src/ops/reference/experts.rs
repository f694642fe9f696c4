//! The gated linear unit of an expert, and the return of its rows to token order.

use tch::{Kind, Tensor};

use super::to_f32;
use crate::Result;
use crate::ops::{Dispatch, check, composed};

pub(super) fn swiglu(x: &Tensor) -> Result<Tensor> {
    check::swiglu(x)?;
    let (gate, up) = halves(&to_f32(x)?)?;
    Ok(gate.f_silu()?.f_mul(&up)?.f_to_kind(x.kind())?)
}

pub(super) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    check::swiglu_backward(x, grad)?;
    let ((gate, up), grad) = (halves(&to_f32(x)?)?, to_f32(grad)?);
    let to_gate = gate.f_silu_backward(&grad.f_mul(&up)?)?;
    let to_up = grad.f_mul(&gate.f_silu()?)?;
    Ok(Tensor::f_cat(&[to_gate, to_up], 1)?.f_to_kind(x.kind())?)
}

fn halves(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let size = x.size()[1] / 2;
    Ok((x.f_narrow(1, 0, size)?, x.f_narrow(1, size, size)?))
}

pub(super) fn gather(
    x: &Tensor,
    by: &Dispatch,
    passed: Option<&Tensor>,
    weight: &Tensor,
) -> Result<Tensor> {
    check::gather(x, by, passed, weight)?;
    let rows = to_f32(&composed::returned("gather", x, by, passed)?)?;
    Ok(rows.f_mul(weight)?.f_to_kind(x.kind())?)
}

pub(super) fn gather_backward(
    x: &Tensor,
    by: &Dispatch,
    passed: Option<&Tensor>,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<[Tensor; 2]> {
    check::gather_backward(x, by, passed, weight, grad)?;
    let grad = &to_f32(grad)?;
    let mut to_x = Tensor::f_zeros(x.size(), (Kind::Float, x.device()))?;
    let _ = to_x.f_index_copy_(0, &by.places, &grad.f_mul(weight)?)?;
    let to_weight = to_f32(&composed::returned("gather_backward", x, by, passed)?)?.f_mul(grad)?;
    Ok([to_x.f_to_kind(x.kind())?, to_weight.f_sum_dim_intlist(1, true, Kind::Float)?])
}
