//! Matrices that are large enough for the library's matmuls: stacks of one shape. For a large symmetric result the
//! library computes three of its four blocks.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::{Argument, Queue, piece};
use crate::Result;
use crate::device::pieces;
use crate::ops::{NewtonSchulz, NewtonSchulzIterate};

/// Maximum number of elements of a stack, unless one matrix has more: a matmul of this size is worth a launch.
const ELEMENTS: i64 = 1 << 26;

/// Maximum number of matrices of a stack. Tests fill several stacks.
const MOST: i64 = if cfg!(test) { 4 } else { 32 };

/// Minimum number of rows for computing a symmetric result in blocks: only then saving a quarter of the operations
/// outweighs two more matmuls and a copy of a block.
const HALVED: i64 = 1024;

/// Number of matrices in a stack of this shape, regardless of how many there are to fill it: a library may choose its
/// kernels by the size of a stack, too.
fn places([rows, columns]: [i64; 2]) -> i64 {
    (ELEMENTS / (rows * columns).max(1)).clamp(1, MOST)
}

/// Iterates all matrices; returns them in their order.
pub(super) fn all(queue: &Queue, matrices: &[&Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
    let mut made: Vec<Option<Tensor>> = matrices.iter().map(|_| None).collect();
    for first in 0..matrices.len() {
        if made[first].is_some() {
            continue;
        }
        let shape = matrices[first].size();
        let alike: Vec<usize> =
            (first..matrices.len()).filter(|index| matrices[*index].size() == shape).collect();
        let shape = [shape[0], shape[1]];
        for members in alike.chunks(places(shape) as usize) {
            let given: Vec<&Tensor> = members.iter().map(|index| matrices[*index]).collect();
            let turned = iterated(queue, stacked(queue, &given, shape)?, by)?;
            for (place, index) in (0i64..).zip(members) {
                made[*index] = Some(turned.f_get(place)?);
            }
        }
    }
    made.into_iter()
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| super::super::unreached("newton_schulz"))
}

/// Memory of [`all`] in bytes for matrices of these shapes: finished stacks, and the temporaries of the largest one.
pub(super) fn bytes(shapes: &[[i64; 2]], by: NewtonSchulz) -> u64 {
    let mut alike = BTreeMap::<[i64; 2], i64>::new();
    shapes.iter().for_each(|shape| *alike.entry(*shape).or_default() += 1);
    let done = alike.iter().map(|(shape, count)| {
        let stacks = (count + places(*shape) - 1) / places(*shape);
        stacks * places(*shape) * shape[0] * shape[1]
    });
    let beside = alike.keys().map(|shape| {
        // `A`, `A A` and a product of them, and the accumulated product if only squares are iterated; in bf16 two of
        // half the size, and the matrix before and after a step.
        let squares = match by.form {
            NewtonSchulzIterate::Bf16 => 1,
            _ if by.by_gram(*shape) => 4,
            _ => 2,
        };
        let [rows, columns] = *shape;
        places(*shape) * (rows * columns + squares * rows.min(columns).pow(2))
    });
    4 * (done.sum::<i64>() + beside.max().unwrap_or(0)) as u64
}

/// A whole stack: the given matrices followed by zeros.
fn stacked(queue: &Queue, given: &[&Tensor], [rows, columns]: [i64; 2]) -> Result<Tensor> {
    let (count, filled) = (places([rows, columns]), given.len() as i64);
    let stack = queue.room(&[count, rows, columns], Kind::Float)?;
    if filled < count {
        let _ = stack.f_narrow(0, filled, count - filled)?.f_zero_()?;
    }
    let parts = (0..filled).map(|place| stack.f_get(place));
    let parts = parts.collect::<std::result::Result<Vec<_>, _>>()?;
    let pairs: Vec<_> = given.iter().zip(&parts).map(|(one, part)| piece(one, part, 0)).collect();
    pieces::copy(queue, &pairs)?;
    Ok(stack)
}

/// The iteration of each matrix of a stack, without a transposition: `X P` if it has more rows than columns.
fn iterated(queue: &Queue, stack: Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let (rows, columns) = (stack.size()[1], stack.size()[2]);
    let tall = rows > columns;
    let length = stack.f_norm_scalaropt_dim(2, [1, 2].as_slice(), true)?;
    let mut x = stack.f_div(&length.f_add_scalar(f64::from(by.eps))?)?;
    drop(stack);
    if by.form == NewtonSchulzIterate::Bf16 {
        return rounded(&x, by);
    }
    let square_of = |x: &Tensor| match tall {
        true => symmetric(queue, &x.f_transpose(1, 2)?, x),
        false => symmetric(queue, x, &x.f_transpose(1, 2)?),
    };
    let times = |factor: &Tensor, x: &Tensor| match tall {
        true => x.f_bmm(factor),
        false => factor.f_bmm(x),
    };
    if !by.by_gram([rows, columns]) {
        for _ in 0..by.steps {
            x = times(&polynomial(queue, &square_of(&x)?, by)?, &x)?;
        }
        return Ok(x);
    }
    let (mut square, mut all) = (square_of(&x)?, None::<Tensor>);
    for step in 1..=by.steps {
        let factor = polynomial(queue, &square, by)?;
        if step < by.steps {
            // All are polynomials of one symmetric matrix, so their products are symmetric, too.
            square = symmetric(queue, &symmetric(queue, &square, &factor)?, &factor)?;
        }
        all = Some(match all {
            None => factor,
            Some(all) => symmetric(queue, &all, &factor)?,
        });
    }
    Ok(all.map_or_else(|| Ok(x.shallow_clone()), |all| times(&all, &x))?)
}

/// The iteration in bf16 for each matrix of a stack. A library rounds an addition to a matmul once, with the sum.
fn rounded(x: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let (tall, [a, b, c]) = (x.size()[1] > x.size()[2], by.coefficients.map(f64::from));
    let mut x = x.f_to_kind(Kind::BFloat16)?;
    for _ in 0..by.steps {
        let turned = x.f_transpose(1, 2)?;
        let square = if tall { turned.f_bmm(&x)? } else { x.f_bmm(&turned)? };
        let factor = square.f_baddbmm(&square, &square, b, c)?;
        x = match tall {
            true => x.f_baddbmm(&x, &factor, a, 1.0)?,
            false => x.f_baddbmm(&factor, &x, a, 1.0)?,
        };
    }
    Ok(x.f_to_kind(Kind::Float)?)
}

/// `left right` for each matrix of two stacks, where the result is known to be symmetric.
fn symmetric(queue: &Queue, left: &Tensor, right: &Tensor) -> Result<Tensor> {
    let size = left.size()[1];
    match size >= HALVED && size % 2 == 0 {
        true => blocks_of(queue, left, right),
        false => Ok(left.f_bmm(right)?),
    }
}

/// The same by its lower blocks; the upper block is mirrored. Requires an even number of rows.
fn blocks_of(queue: &Queue, left: &Tensor, right: &Tensor) -> Result<Tensor> {
    let (count, size) = (left.size()[0], left.size()[1]);
    let (half, out) = (size / 2, queue.room(&[count, size, size], Kind::Float)?);
    let block = |row, column| out.f_narrow(1, row, half)?.f_narrow(2, column, half);
    for [row, column] in [[0, 0], [half, 0], [half, half]] {
        let (rows, columns) = (left.f_narrow(1, row, half)?, right.f_narrow(2, column, half)?);
        let _ = rows.f_bmm_out(&block(row, column)?, &columns)?;
    }
    block(0, half)?.f_copy_(&block(half, 0)?.f_transpose(1, 2)?)?;
    Ok(out)
}

/// `a I + b A + c A A` for each of a stack of squares.
fn polynomial(queue: &Queue, square: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let (fourth, size) = (symmetric(queue, square, square)?, square.size());
    let [a, b, c] = by.coefficients.map(Argument::from);
    let arguments = [square.into(), (&fourth).into(), size[1].into(), size[0].into(), a, b, c];
    let blocks = super::super::blocks(size[0] * size[1], size[2])?;
    queue.launch(c"newton_schulz_polynomial", blocks, &arguments)?;
    Ok(fourth)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated;
    use crate::ops::tests::random;
    use proptest::prelude::*;
    use tch::Device;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// The whole matmul and the one in blocks agree within rounding, for normal and transposed operands; the
        /// mirrored block has the same bits as its source.
        #[test]
        fn symmetric_products_are_made_of_blocks(
            (count, half, inner) in (1i64..4, 1i64..20, 1i64..40),
            turned: bool,
            seed in 0u64..1000,
        ) {
            let queue = emulated::queue(Device::Cpu).unwrap();
            let x = match turned {
                true => random(&[count, inner, 2 * half], seed).transpose(1, 2),
                false => random(&[count, 2 * half, inner], seed),
            };
            let found = blocks_of(&queue, &x, &x.transpose(1, 2)).unwrap();
            let block = |row, column| found.narrow(1, row, half).narrow(2, column, half);
            prop_assert_eq!(block(0, half), block(half, 0).transpose(1, 2));
            let wide = x.to_kind(Kind::Double);
            let wanted = wide.bmm(&wide.transpose(1, 2));
            let far = (found.to_kind(Kind::Double) - wanted).abs().max().double_value(&[]);
            prop_assert!(far < 1e-5, "{far}");
        }
    }
}
