//! Newton-Schulz iterations with symmetric matmuls.

use tch::Tensor;

use super::panels::{Panels, product, symmetric};
use super::{empty, read, sum_of_squares, write};
use crate::Result;
use crate::ops::{NewtonSchulz, NewtonSchulzIterate, check};

/// One matrix of the stack at a time: batching gains nothing on a CPU.
pub(super) fn newton_schulz(stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let [rows, columns] = check::newton_schulz(stack)?;
    let mut out = empty(&stack.size())?;
    let size = (rows * columns) as usize;
    if size > 0 {
        let matrices = read(stack)?.chunks_exact(size).zip(write(&mut out)?.chunks_exact_mut(size));
        matrices.for_each(|(matrix, out)| one(matrix, rows as usize, by, out));
    }
    Ok(out)
}

fn one(matrix: &[f32], rows: usize, by: NewtonSchulz, out: &mut [f32]) {
    let length = sum_of_squares(matrix).sqrt() as f32 + by.eps;
    let unit: Vec<f32> = matrix.iter().map(|value| value / length).collect();
    let x = Panels::of(&unit, rows);
    let columns = matrix.len() / rows;
    let short = rows.min(columns);
    let x = if rows > columns { x.turned() } else { x };
    let x = if by.by_gram([rows, columns].map(|size| size as i64)) {
        by_square(x, short, by)
    } else if by.form == NewtonSchulzIterate::Bf16 {
        rounded(x, short, by)
    } else {
        by_matrix(x, short, by)
    };
    let x = if rows > columns { x.turned() } else { x };
    x.unpack(out);
}

/// Iterates the matrix itself, of `rows` rows.
fn by_matrix(mut x: Panels, rows: usize, by: NewtonSchulz) -> Panels {
    let [mut square, mut factor] = [(); 2].map(|()| Panels::zeros(rows, rows));
    let mut next = x.alike();
    for _ in 0..by.steps {
        let side = x.turned();
        symmetric(&side, &side, &mut square);
        symmetric(&square, &square, &mut factor);
        square.polynomial(by.coefficients, &mut factor);
        product(&factor, &x, &mut next);
        std::mem::swap(&mut x, &mut next);
    }
    x
}

/// The same steps in bf16.
fn rounded(mut x: Panels, rows: usize, by: NewtonSchulz) -> Panels {
    let [mut square, mut factor] = [(); 2].map(|()| Panels::zeros(rows, rows));
    let (mut next, [a, b, c]) = (x.alike(), by.coefficients);
    x.round();
    for _ in 0..by.steps {
        let side = x.turned();
        symmetric(&side, &side, &mut square);
        square.round();
        symmetric(&square, &square, &mut factor);
        square.polynomial([0.0, b, c], &mut factor);
        factor.round();
        product(&factor, &x, &mut next);
        x.add_to(a, &mut next);
        next.round();
        std::mem::swap(&mut x, &mut next);
    }
    x
}

/// The same steps on `A = X X^T` only: the wide matrix is multiplied twice in total instead of twice per step.
fn by_square(x: Panels, rows: usize, by: NewtonSchulz) -> Panels {
    let [mut square, mut factor, mut all, mut spare] = [(); 4].map(|()| Panels::zeros(rows, rows));
    let side = x.turned();
    symmetric(&side, &side, &mut square);
    for step in 1..=by.steps {
        symmetric(&square, &square, &mut factor);
        square.polynomial(by.coefficients, &mut factor);
        if step < by.steps {
            symmetric(&square, &factor, &mut spare);
            symmetric(&spare, &factor, &mut square);
        }
        if step == 1 {
            std::mem::swap(&mut all, &mut factor);
            continue;
        }
        symmetric(&all, &factor, &mut spare);
        std::mem::swap(&mut all, &mut spare);
    }
    if by.steps == 0 {
        return x;
    }
    let mut out = x.alike();
    product(&all, &x, &mut out);
    out
}
