//! Newton-Schulz: small matrices all together, by our own matmuls; larger ones in stacks of one shape, by the
//! library's.
//!
//! In bf16 all use the library, which has the matrix units.
//!
//! The shape of a matrix alone decides its method and its stack size. An element of our matmuls is one chain of fused
//! multiply-adds; the library is always called with a whole stack, padded with zeros. So the bits of a matrix do not
//! depend on the matrices that it is computed with.

mod large;
mod small;

use tch::Tensor;

use super::{Argument, Queue};
use crate::Result;
use crate::device::pieces::TensorRange;
use crate::ops::{NewtonSchulz, NewtonSchulzIterate, check};

/// Elements of the largest small matrix; above this the library's matmuls are worth their launches.
const SMALL: i64 = 1 << 17;

pub(super) fn newton_schulz(queue: &Queue, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let [rows, columns] = check::newton_schulz(stack)?;
    let matrices = stack.f_view([-1, rows, columns])?;
    let matrices: Vec<Tensor> = (0..matrices.size()[0])
        .map(|index| matrices.f_get(index))
        .collect::<std::result::Result<_, _>>()?;
    match (stack.dim(), all(queue, &matrices, by)?) {
        (2, mut made) => made.pop().ok_or_else(|| super::unreached("newton_schulz")),
        (_, made) => Ok(Tensor::f_stack(&made, 0)?),
    }
}

/// Iterates many matrices.
pub(super) fn all(queue: &Queue, matrices: &[Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
    matrices.iter().try_for_each(|matrix| check::newton_schulz(matrix).map(drop))?;
    let is_small = |matrix: &&Tensor| is_small(matrix.numel() as i64, by);
    let (some, others): (Vec<&Tensor>, Vec<&Tensor>) = matrices.iter().partition(is_small);
    let mut some = small::all(queue, &some, by)?.into_iter();
    let mut others = large::all(queue, &others, by)?.into_iter();
    let turned = matrices.iter().map(|matrix| {
        let made = if is_small(&matrix) { some.next() } else { others.next() };
        made.ok_or_else(|| super::unreached("newton_schulz"))
    });
    turned.collect()
}

/// Maximum memory of [`all`] in bytes, including results, for matrices of these shapes.
pub(in crate::ops) fn bytes(shapes: &[[i64; 2]], by: NewtonSchulz) -> u64 {
    let is_small = |[rows, columns]: &[i64; 2]| is_small(rows * columns, by);
    let (some, others): (Vec<_>, Vec<_>) = shapes.iter().copied().partition(is_small);
    let [at_work, left] = small::bytes(&some, by);
    at_work.max(left + large::bytes(&others, by))
}

/// Whether matrices of so many elements use our own matmuls. We have none in bf16.
fn is_small(elements: i64, by: NewtonSchulz) -> bool {
    by.form != NewtonSchulzIterate::Bf16 && (1..=SMALL).contains(&elements)
}

/// A tensor paired with another of its size.
fn piece<'a>(tensor: &'a Tensor, other: &'a Tensor, first: u64) -> TensorRange<'a> {
    TensorRange { tensor, other: Some(other), first, salt: 0 }
}
