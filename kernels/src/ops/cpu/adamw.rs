//! The elementwise step of AdamW.

use tch::Tensor;

use super::{apart, read, simd, write};
use crate::Result;
use crate::ops::{AdamWStep, check};

pub(super) fn adamw(
    by: AdamWStep,
    weight: &mut Tensor,
    [first, second]: [&mut Tensor; 2],
    gradient: &Tensor,
) -> Result<()> {
    let call = check::adamw(weight, [&*first, &*second], gradient)?;
    apart(call, &[weight, first, second], &[gradient])?;
    pass(by, write(weight)?, write(first)?, write(second)?, read(gradient)?);
    Ok(())
}

simd! {
    fn pass(by: AdamWStep, weight: &mut [f32], first: &mut [f32], second: &mut [f32], gradient: &[f32]) {
        for (((w, m), v), g) in weight.iter_mut().zip(first).zip(second).zip(gradient) {
            let g = by.scale * *g;
            *m += by.first * (g - *m);
            *v += by.second * (g * g - *v);
            let step = *m / (v.sqrt() / by.root + by.eps);
            *w = by.keep * *w - by.rate * step;
        }
    }
}
