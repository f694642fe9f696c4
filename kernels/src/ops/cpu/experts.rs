//! The gated linear unit of an expert, and the return of its rows to token order.

use tch::{Kind, Tensor};

use super::exponential::exp;
use super::norm::dot;
use super::{empty, integers, read, simd, to_f32, write};
use crate::Result;
use crate::ops::{ExpertRows, check};

/// f32 in one pass; bf16 by libtorch's operators, which round after each step.
pub(super) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let [rows, width] = check::swiglu(x)?;
    if x.kind() != Kind::Float {
        let (gate, up) = halves(x)?;
        return Ok(gate.f_silu()?.f_mul(&up)?);
    }
    let mut out = empty(&[rows, width])?;
    gate(read(x)?, width as usize, write(&mut out)?);
    Ok(out)
}

simd! {
    fn gate(x: &[f32], width: usize, out: &mut [f32]) {
        for (x, out) in x.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
            let (gate, up) = x.split_at(width);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = *gate * sigmoid(*gate) * *up;
            }
        }
    }
}

/// As [`swiglu`].
pub(super) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let [rows, width] = check::swiglu_backward(x, grad)?;
    if x.kind() != Kind::Float {
        return swiglu_backward_bf16(x, grad);
    }
    let mut out = empty(&[rows, 2 * width])?;
    gate_back(read(x)?, read(grad)?, width as usize, write(&mut out)?);
    Ok(out)
}

simd! {
    fn gate_back(x: &[f32], grad: &[f32], width: usize, out: &mut [f32]) {
        let rows = x.chunks_exact(2 * width).zip(grad.chunks_exact(width)).zip(out.chunks_exact_mut(2 * width));
        for ((x, grad), out) in rows {
            let ((gate, up), (to_gate, to_up)) = (x.split_at(width), out.split_at_mut(width));
            for place in 0..width {
                let (gate, grad) = (gate[place], grad[place]);
                let open = sigmoid(gate);
                to_gate[place] = grad * up[place] * (open * (1.0 + gate * (1.0 - open)));
                to_up[place] = grad * (gate * open);
            }
        }
    }
}

fn swiglu_backward_bf16(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let both = x.f_empty_like()?;
    let ((gate, up), (to_gate, to_up)) = (halves(x)?, halves(&both)?);
    let _ = gate.f_silu_backward_grad_input(&to_gate, &grad.f_mul(&up)?)?;
    let _ = grad.f_mul_out(&to_up, &gate.f_silu()?)?;
    Ok(both)
}

fn halves(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let size = x.size()[1] / 2;
    Ok((x.f_narrow(1, 0, size)?, x.f_narrow(1, size, size)?))
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Rows in f32: those of experts, followed by those of tokens that bypassed them.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: &'a [f32],
    /// Rows of tokens that bypassed the experts, or a single row of zeros for all of them.
    passed: &'a [f32],
    /// Distance between two of those rows; 0 for the single row.
    stride: usize,
    computed: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    #[inline(always)]
    fn at(self, place: usize) -> &'a [f32] {
        match place.checked_sub(self.computed) {
            None => &self.x[place * self.width..][..self.width],
            Some(place) => &self.passed[place * self.stride..][..self.width],
        }
    }
}

/// The rows of `x` and of `passed` that have a value, in f32.
fn returned(ExpertRows { x, by, passed, .. }: ExpertRows) -> Result<[Tensor; 2]> {
    let passed = match passed {
        Some(passed) => to_f32(&passed.f_narrow(0, by.computed, by.rows - by.computed)?)?,
        None => Tensor::f_zeros([1, x.size()[1]], (Kind::Float, x.device()))?,
    };
    Ok([to_f32(&x.f_narrow(0, 0, by.computed)?)?, passed])
}

fn found<'a>([x, rest]: &'a [Tensor; 2], of: ExpertRows) -> Result<Rows<'a>> {
    let (width, computed) = (x.size()[1] as usize, of.by.computed as usize);
    let stride = if of.passed.is_some() { width } else { 0 };
    Ok(Rows { x: read(x)?, passed: read(rest)?, stride, computed, width })
}

pub(super) fn gather(rows: ExpertRows) -> Result<Tensor> {
    let mut out = empty(&check::gather(rows)?)?;
    let (both, places) = (returned(rows)?, integers(&rows.by.places)?);
    gather_rows(found(&both, rows)?, places, read(rows.by_token)?, write(&mut out)?);
    Ok(out.f_to_kind(rows.x.kind())?)
}

simd! {
    fn gather_rows(rows: Rows<'_>, places: &[i64], weight: &[f32], out: &mut [f32]) {
        for ((out, place), weight) in out.chunks_exact_mut(rows.width).zip(places).zip(weight) {
            for (out, x) in out.iter_mut().zip(rows.at(*place as usize)) {
                *out = *x * *weight;
            }
        }
    }
}

pub(super) fn gather_backward(rows: ExpertRows, grad: &Tensor) -> Result<[Tensor; 2]> {
    let [tokens, width] = check::gather_backward(rows, grad)?;
    let (both, places) = (returned(rows)?, integers(&rows.by.places)?);
    let (mut out, mut weight_grad) = (empty(&[rows.by.rows, width])?, empty(&[tokens, 1])?);
    let [_, filled] = rows.by.listed("gather_backward")?;
    let values = write(&mut out)?;
    for row in integers(filled)? {
        values[*row as usize * width as usize..][..width as usize].fill(0.0);
    }
    let (saved, grad) = ((found(&both, rows)?, places, read(rows.by_token)?), to_f32(grad)?);
    scatter_rows(saved, read(&grad)?, values, write(&mut weight_grad)?);
    Ok([out.f_to_kind(rows.x.kind())?, weight_grad])
}

simd! {
    fn scatter_rows(
        saved: (Rows<'_>, &[i64], &[f32]),
        grad: &[f32],
        out: &mut [f32],
        weight_grad: &mut [f32],
    ) {
        let (rows, places, weight) = saved;
        let width = rows.width;
        let tokens = grad.chunks_exact(width).zip(places).zip(weight).zip(weight_grad);
        for (((grad, place), weight), weight_grad) in tokens {
            let place = *place as usize;
            *weight_grad = dot(grad, rows.at(place), |a, b| a * b);
            for (out, grad) in out[place * width..][..width].iter_mut().zip(grad) {
                *out = *grad * *weight;
            }
        }
    }
}
