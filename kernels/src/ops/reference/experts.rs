//! The gated linear unit of an expert, and the return of its rows to token order.

use tch::{Kind, Tensor};

use super::to_f32;
use crate::Result;
use crate::ops::{ExpertRows, check, composed};

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

pub(super) fn gather(rows: ExpertRows) -> Result<Tensor> {
    check::gather(rows)?;
    let wide = to_f32(&composed::returned("gather", rows)?)?;
    Ok(wide.f_mul(rows.by_token)?.f_to_kind(rows.x.kind())?)
}

pub(super) fn gather_backward(rows: ExpertRows, grad: &Tensor) -> Result<[Tensor; 2]> {
    check::gather_backward(rows, grad)?;
    let grad = &to_f32(grad)?;
    let mut to_x = Tensor::f_zeros(rows.x.size(), (Kind::Float, rows.x.device()))?;
    let _ = to_x.f_index_copy_(0, &rows.by.places, &grad.f_mul(rows.by_token)?)?;
    let to_weight = to_f32(&composed::returned("gather_backward", rows)?)?.f_mul(grad)?;
    Ok([to_x.f_to_kind(rows.x.kind())?, to_weight.f_sum_dim_intlist(1, true, Kind::Float)?])
}
