//! Newton-Schulz iterations, literally.

use tch::{Kind, Tensor};

use crate::Result;
use crate::ops::{NewtonSchulz, NewtonSchulzIterate, check};

/// One matrix at a time: a library's batch may have other bits than single matrices.
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
    let factor = |square: &Tensor| -> Result<Tensor> {
        Ok(square.f_mul_scalar(b)?.f_add(&square.f_mm(square)?.f_mul_scalar(c)?)?)
    };
    if by.by_gram([rows, columns]) {
        x = by_square(x, by.steps, |square| {
            let factor = factor(square)?;
            let _ = factor.f_diagonal(0, 0, 1)?.f_add_scalar_(a)?;
            Ok(factor)
        })?;
    } else if by.form == NewtonSchulzIterate::Bf16 {
        let rounded = |x: Tensor| x.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Float);
        x = rounded(x)?;
        for _ in 0..by.steps {
            let square = rounded(x.f_mm(&x.f_transpose(0, 1)?)?)?;
            let factor = rounded(factor(&square)?)?;
            x = rounded(x.f_mul_scalar(a)?.f_add(&factor.f_mm(&x)?)?)?;
        }
    } else {
        for _ in 0..by.steps {
            let factor = factor(&x.f_mm(&x.f_transpose(0, 1)?)?)?;
            x = x.f_mul_scalar(a)?.f_add(&factor.f_mm(&x)?)?;
        }
    }
    Ok(if tall { x.f_transpose(0, 1)? } else { x })
}

/// Applies `A <- P A P` for all steps, then multiplies `X` by the product of all `P`.
fn by_square(
    x: Tensor,
    steps: usize,
    polynomial: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let (mut square, mut all) = (x.f_mm(&x.f_transpose(0, 1)?)?, None::<Tensor>);
    for _ in 0..steps {
        let factor = polynomial(&square)?;
        square = square.f_mm(&factor)?.f_mm(&factor)?;
        all = Some(match all {
            None => factor,
            Some(all) => all.f_mm(&factor)?,
        });
    }
    Ok(match all {
        None => x,
        Some(all) => all.f_mm(&x)?,
    })
}
