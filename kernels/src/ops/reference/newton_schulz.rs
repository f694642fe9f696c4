//! Newton-Schulz iterations as they are written down.

use tch::Tensor;

use crate::Result;
use crate::ops::{NewtonSchulz, check};

/// Each matrix by itself: a library's batch may have other bits than its members.
pub(super) fn newton_schulz(stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let [rows, columns] = check::newton_schulz(stack)?;
    let out = stack.f_empty_like()?;
    let (from, into) = (stack.f_view([-1, rows, columns])?, out.f_view([-1, rows, columns])?);
    for matrix in 0..from.size()[0] {
        into.f_get(matrix)?.f_copy_(&one(&from.f_get(matrix)?, by)?)?;
    }
    Ok(out)
}

fn one(matrix: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let [rows, columns] = [matrix.size()[0], matrix.size()[1]];
    let tall = rows > columns;
    let matrix = if tall { matrix.f_transpose(0, 1)? } else { matrix.shallow_clone() };
    let [a, b, c] = by.coefficients.map(f64::from);
    let length = matrix.f_norm()?.f_add_scalar(f64::from(by.eps))?;
    let mut x = matrix.f_contiguous()?.f_div(&length)?;
    for _ in 0..by.steps {
        let square = x.f_mm(&x.f_transpose(0, 1)?)?;
        let factor = square.f_mul_scalar(b)?.f_add(&square.f_mm(&square)?.f_mul_scalar(c)?)?;
        x = x.f_mul_scalar(a)?.f_add(&factor.f_mm(&x)?)?;
    }
    Ok(if tall { x.f_transpose(0, 1)? } else { x })
}
