//! Matrices for which the library's products are worth their launches: stacks of one shape.

use tch::{Kind, Tensor};

use super::{Argument, Queue, piece};
use crate::Result;
use crate::device::pieces;
use crate::ops::NewtonSchulz;

/// Elements that a stack has at most, unless one matrix has more: a product of so many is worth a launch.
const ELEMENTS: i64 = 1 << 22;

/// Matrices that a stack has at most.
const MOST: i64 = 16;

/// Of how many matrices of this shape a stack is, however many there are to fill it: a library chooses among its kernels by the
/// size of a stack, too.
fn places([rows, columns]: [i64; 2]) -> i64 {
    (ELEMENTS / (rows * columns).max(1)).clamp(1, MOST)
}

/// Each of them, in their order.
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

/// A whole stack that begins with the given ones, and has zeros behind them.
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

/// The iteration of each matrix of a stack, as it lies: `X P` where they are higher than wide.
fn iterated(queue: &Queue, stack: Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let (rows, columns) = (stack.size()[1], stack.size()[2]);
    let tall = rows > columns;
    let length = stack.f_norm_scalaropt_dim(2, [1, 2].as_slice(), true)?;
    let mut x = stack.f_div(&length.f_add_scalar(f64::from(by.eps))?)?;
    drop(stack);
    let square_of = |x: &Tensor| match (tall, x.f_transpose(1, 2)?) {
        (true, turned) => turned.f_bmm(x),
        (false, turned) => x.f_bmm(&turned),
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
            square = square.f_bmm(&factor)?.f_bmm(&factor)?;
        }
        all = Some(match all {
            None => factor,
            Some(all) => all.f_bmm(&factor)?,
        });
    }
    Ok(all.map_or_else(|| Ok(x.shallow_clone()), |all| times(&all, &x))?)
}

/// `a I + b A + c A A` of each of a stack of squares.
fn polynomial(queue: &Queue, square: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let (fourth, size) = (square.f_bmm(square)?, square.size());
    let [a, b, c] = by.coefficients.map(Argument::from);
    let arguments = [square.into(), (&fourth).into(), size[1].into(), size[0].into(), a, b, c];
    let blocks = super::super::blocks(size[0] * size[1], size[2])?;
    queue.launch(c"newton_schulz_polynomial", blocks, &arguments)?;
    Ok(fourth)
}
