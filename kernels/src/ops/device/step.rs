//! The optimizer: elementwise passes by a table of tensors.

use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::{Argument, Queue};
use crate::Result;
use crate::device::pieces::{self, Piece};
use crate::ops::call::Call;
use crate::ops::{AdamW, Moved, check};

/// Elements of a block.
const EACH: i64 = 1024;

/// A tensor to be moved, as a row of the table (`Move` in `optimizer.h`).
struct Move<'a> {
    weight: Option<&'a Tensor>,
    first: Option<&'a Tensor>,
    second: Option<&'a Tensor>,
    gradient: &'a Tensor,
    keep: f32,
    rate: f32,
}

/// The table of these, on the device, and its blocks.
fn table(queue: &Queue, moves: &[Move]) -> Result<(Tensor, i64)> {
    let (mut rows, mut blocks) = (Vec::with_capacity(7 * moves.len()), 0);
    for one in moves.iter().filter(|one| one.gradient.numel() > 0) {
        let address = |tensor: &Tensor| tensor.data_ptr() as i64;
        let elements = one.gradient.numel() as i64;
        rows.extend([one.weight, one.first, one.second].map(|tensor| tensor.map_or(0, address)));
        rows.extend([address(one.gradient), elements]);
        rows.push(i64::from(one.keep.to_bits()) | i64::from(one.rate.to_bits()) << 32);
        rows.push(blocks);
        blocks += (elements + EACH - 1) / EACH;
    }
    Ok((queue.upload(&rows)?, blocks))
}

/// Launches a kernel over a table of tensors; nothing where they are empty.
fn launch(queue: &Queue, kernel: &CStr, moves: &[Move], numbers: &[Argument]) -> Result<()> {
    let (table, blocks) = table(queue, moves)?;
    let count = table.size()[0] / 7;
    queue.launch(kernel, blocks, &[&[(&table).into(), count.into()][..], numbers].concat())
}

pub(super) fn adamw(queue: &Queue, by: AdamW, tensors: &[Moved]) -> Result<()> {
    let mut moves = Vec::with_capacity(tensors.len());
    for Moved { weight, moments: [first, second], gradient } in tensors {
        check::adamw(weight, [first, second], gradient)?;
        let (weight, first, second) = (Some(&**weight), Some(&**first), Some(&**second));
        moves.push(Move { weight, first, second, gradient, keep: by.keep, rate: by.rate });
    }
    let numbers = [by.scale, by.first, by.second, by.root, by.eps].map(Argument::from);
    launch(queue, c"adamw", &moves, &numbers)
}

pub(super) fn nesterov(
    queue: &Queue,
    pairs: &[(&mut Tensor, &Tensor)],
    by: f32,
    scale: f32,
) -> Result<Vec<Tensor>> {
    pairs
        .iter()
        .try_for_each(|(momentum, gradient)| check::nesterov(momentum, gradient).map(drop))?;
    let gradients: Vec<_> = pairs.iter().map(|(_, gradient)| gradient.shallow_clone()).collect();
    let out = copies(queue, &gradients)?;
    let mut moves = Vec::with_capacity(pairs.len());
    for ((momentum, _), gradient) in pairs.iter().zip(&out) {
        let first = Some(&**momentum);
        moves.push(Move { weight: None, first, second: None, gradient, keep: 0.0, rate: 0.0 });
    }
    launch(queue, c"nesterov", &moves, &[scale.into(), by.into()])?;
    Ok(out)
}

pub(super) fn descend(
    queue: &Queue,
    moves: &[(&mut Tensor, &Tensor, f32)],
    keep: f32,
) -> Result<()> {
    let mut rows = Vec::with_capacity(moves.len());
    for (weight, direction, rate) in moves {
        check::descend(weight, direction)?;
        let weight = Some(&**weight);
        let (first, second, gradient, rate) = (None, None, *direction, *rate);
        rows.push(Move { weight, first, second, gradient, keep, rate });
    }
    launch(queue, c"descend", &rows, &[])
}

/// Into one buffer.
pub(super) fn copies(queue: &Queue, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    let call = Call("copies");
    tensors.iter().try_for_each(|tensor| call.f32("x", tensor, &tensor.size()))?;
    let all =
        queue.room(&[tensors.iter().map(|tensor| tensor.numel() as i64).sum()], Kind::Float)?;
    let (mut out, mut at) = (Vec::with_capacity(tensors.len()), 0);
    for tensor in tensors {
        let count = tensor.numel() as i64;
        let part = all.f_narrow(0, at, count)?;
        out.push(match tensor.dim() {
            1 => part,
            _ => part.f_view(tensor.size().as_slice())?,
        });
        at += count;
    }
    let piece = |(tensor, out)| Piece { tensor, other: Some(out), first: 0, salt: 0 };
    pieces::copy(queue, &tensors.iter().zip(&out).map(piece).collect::<Vec<_>>())?;
    Ok(out)
}

pub(super) fn rounded(queue: &Queue, pairs: &[[Tensor; 2]]) -> Result<()> {
    pairs.iter().try_for_each(|[narrow, wide]| check::rounded(narrow, wide))?;
    let mut rows = Vec::with_capacity(pairs.len());
    for [narrow, wide] in pairs {
        rows.push(Piece { tensor: wide, other: Some(narrow), first: 0, salt: 0 });
    }
    pieces::round(queue, &rows)
}

/// The sum of squares of each chunk of each part, and, where they are asked for, its checksum.
pub(super) fn squares(
    queue: &Queue,
    parts: &pieces::Parts,
    chunk: i64,
    checked: bool,
) -> Result<[Tensor; 2]> {
    let call = Call("squares");
    parts.iter().try_for_each(|(tensor, ..)| call.f32("x", tensor, &tensor.size()))?;
    pieces::squares(queue, parts, chunk, checked)
}

/// The sum of squares of the difference of each chunk.
pub(super) fn differences(queue: &Queue, pairs: &[[Tensor; 2]], chunk: i64) -> Result<Tensor> {
    let call = Call("differences");
    for [one, other] in pairs {
        call.f32("one", one, &one.size())?;
        call.f32("other", other, &one.size())?;
    }
    let pairs = pairs.iter().map(|[tensor, other]| (tensor, other));
    pieces::differences(queue, &pairs.collect::<Vec<_>>(), chunk)
}
