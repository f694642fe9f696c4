//! The elementwise parts of Muon before and after an orthogonalization, one pass over memory each.

use tch::Tensor;

use super::{apart, empty, read, simd, write};
use crate::Result;
use crate::ops::check;

pub(super) fn nesterov(
    momentum: &mut Tensor,
    gradient: &Tensor,
    by: f32,
    scale: f32,
) -> Result<Tensor> {
    let call = check::nesterov(momentum, gradient)?;
    apart(call, &[momentum], &[gradient])?;
    let mut out = empty(&gradient.size())?;
    direction(by, scale, write(momentum)?, read(gradient)?, write(&mut out)?);
    Ok(out)
}

simd! {
    fn direction(by: f32, scale: f32, momentum: &mut [f32], gradient: &[f32], out: &mut [f32]) {
        for ((m, g), out) in momentum.iter_mut().zip(gradient).zip(out) {
            let g = scale * *g;
            *m = by * *m + g;
            *out = g + by * *m;
        }
    }
}

pub(super) fn descend(weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()> {
    let call = check::descend(weight, direction)?;
    apart(call, &[weight], &[direction])?;
    step(keep, rate, write(weight)?, read(direction)?);
    Ok(())
}

simd! {
    fn step(keep: f32, rate: f32, weight: &mut [f32], direction: &[f32]) {
        for (w, d) in weight.iter_mut().zip(direction) {
            *w = keep * *w - rate * *d;
        }
    }
}
