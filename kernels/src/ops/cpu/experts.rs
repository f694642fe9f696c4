//! The gated linear unit of an expert, and its rows on their way back to where they came from.

use tch::{Kind, Tensor};

use super::norm::dot;
use super::{empty, integers, read, simd, to_f32, write};
use crate::Result;
use crate::ops::check;

/// f32 in one pass; bf16 by libtorch's operators, which round after each.
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

/// e^x to about two units in the last place, in plain additions and multiplications, so that it is the same function on
/// every processor: 2^n times a polynomial on half an octave around zero (coefficients of Cephes' expf).
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Added to a number below 2^22, leaves its nearest integer in the last bits of the sum.
    const INTEGER: f32 = 12_582_912.0;
    /// log(2) in two parts; the first has few bits, so that its products are exact.
    const LOG_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const POLYNOMIAL: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let x = x.clamp(-87.0, 88.0);
    let sum = x * std::f32::consts::LOG2_E + INTEGER;
    let octave = sum - INTEGER;
    let rest = x - octave * LOG_2[0] - octave * LOG_2[1];
    let value = POLYNOMIAL.into_iter().fold(0.0, |value, coefficient| value * rest + coefficient);
    let exponent = sum.to_bits().wrapping_sub(INTEGER.to_bits()).wrapping_add(127) << 23;
    (value * rest * rest + rest + 1.0) * f32::from_bits(exponent)
}

pub(super) fn gather(x: &Tensor, places: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let [_, tokens, width] = check::gather(x, places, weight)?;
    let mut out = empty(&[tokens, width])?;
    let (x, places) = (to_f32(x)?, integers(places)?);
    gather_rows(read(&x)?, places, read(weight)?, width as usize, write(&mut out)?);
    Ok(out)
}

simd! {
    fn gather_rows(x: &[f32], places: &[i64], weight: &[f32], width: usize, out: &mut [f32]) {
        for ((out, place), weight) in out.chunks_exact_mut(width).zip(places).zip(weight) {
            for (out, x) in out.iter_mut().zip(&x[*place as usize * width..][..width]) {
                *out = *x * *weight;
            }
        }
    }
}

pub(super) fn gather_backward(
    x: &Tensor,
    places: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<[Tensor; 2]> {
    let [rows, tokens, width] = check::gather_backward(x, places, weight, grad)?;
    let (x, places) = (to_f32(x)?, integers(places)?);
    let (mut out, mut weight_grad) = (empty(&[rows, width])?, empty(&[tokens, 1])?);
    let width = width as usize;
    let mut used = vec![false; rows as usize];
    places.iter().for_each(|place| used[*place as usize] = true);
    let values = write(&mut out)?;
    for (row, _) in used.iter().enumerate().filter(|(_, used)| !**used) {
        values[row * width..][..width].fill(0.0);
    }
    let saved = (read(&x)?, places, read(weight)?);
    scatter_rows(saved, read(grad)?, width, values, write(&mut weight_grad)?);
    Ok([out, weight_grad])
}

simd! {
    fn scatter_rows(
        saved: (&[f32], &[i64], &[f32]),
        grad: &[f32],
        width: usize,
        out: &mut [f32],
        weight_grad: &mut [f32],
    ) {
        let (x, places, weight) = saved;
        let tokens = grad.chunks_exact(width).zip(places).zip(weight).zip(weight_grad);
        for (((grad, place), weight), weight_grad) in tokens {
            let row = *place as usize * width..(*place as usize + 1) * width;
            *weight_grad = dot(grad, &x[row.clone()], |a, b| a * b);
            for (out, grad) in out[row].iter_mut().zip(grad) {
                *out = *grad * *weight;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn exp_is_exp(x in -86.0..86.0f32) {
            let wanted = f64::from(x).exp();
            prop_assert!((f64::from(exp(x)) - wanted).abs() <= 2.5e-7 * wanted, "{} {wanted}", exp(x));
        }
    }

    #[test]
    fn ends_are_finite() {
        for x in [f32::NEG_INFINITY, -1e30, -87.5, 0.0, 88.5, 1e30, f32::INFINITY] {
            assert!(exp(x).is_finite(), "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }
}
