//! Sums of pairs of tensors, converted to f32 and checksummed in the same pass, for many tensors in one launch:
//! `finish_add` of `finish.h`, over a table.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::pieces::blocks_of;
use super::queue::{Argument, Queue};
use crate::Result;
use crate::layout::Parts as _;

/// Words of a row of the table (`Addition` in `finish.h`).
const ROW: i64 = 10;

/// Words of a row that lists the blocks of one checksum (`Piece` in `exact.h`).
const SUM: i64 = 6;

/// One operand of an addition: contiguous, bf16 or f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand<'a> {
    pub(crate) tensor: &'a Tensor,
    /// Where the rows of each expert end, i32; experts without rows count as zeros.
    pub(crate) ends: Option<&'a Tensor>,
    /// The salt, if a checksum of this side is requested.
    pub(crate) asked: Option<u64>,
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Operand { tensor, ends: None, asked: None }
    }
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Addition<'a> {
    pub(crate) left: Operand<'a>,
    /// As many elements as the left side; without it the left is only converted to f32.
    pub(crate) right: Option<Operand<'a>>,
    /// Where the sum is written, as f32 from the first element on; without it the sides are only checked.
    pub(crate) out: Option<&'a Tensor>,
    /// The range of elements of both sides.
    pub(crate) range: Range<i64>,
}

impl<'a> Addition<'a> {
    /// One side as a whole, without an addition.
    pub(crate) fn of(left: Operand<'a>, out: Option<&'a Tensor>) -> Self {
        Addition { left, right: None, out, range: 0..left.tensor.numel() as i64 }
    }
}

/// Computes all rows in one launch. A second launch computes the requested checksums, i64: first those of all left
/// sides, then of all right sides. Tensors must live until the queued work is done, as those of a stream do.
pub(crate) fn make(queue: &Queue, all: &[Addition]) -> Result<Tensor> {
    if all.is_empty() {
        return Ok(Tensor::new());
    }
    let address = |tensor: &Tensor| tensor.data_ptr() as i64;
    let total: i64 = all.iter().map(|one| blocks_of(one.range.end - one.range.start)).sum();
    let (mut words, mut sums, mut blocks) = (Vec::new(), [Vec::new(), Vec::new()], 0);
    for Addition { left, right, out, range } in all {
        let (elements, mut asked) = (range.end - range.start, 0);
        let sides = [Some(*left), *right];
        for (place, side) in sides.iter().enumerate() {
            let Some(side) = side else { continue };
            asked |= i64::from(side.tensor.kind() == Kind::BFloat16) << place;
            if side.asked.is_some() {
                asked |= 4 << place;
                let block = place as i64 * total + blocks;
                sums[place].extend([0, 0, elements, 0, 0, 4 | block << 32]);
            }
        }
        let begin = |side: &Option<Operand>| {
            side.map_or(0, |side| {
                address(side.tensor) + range.start * side.tensor.kind().elt_size_in_bytes() as i64
            })
        };
        let ends = |side: &Option<Operand>| side.and_then(|side| side.ends).map_or(0, address);
        let salt = sides.iter().flatten().find_map(|side| side.asked).unwrap_or(0);
        let count = left.tensor.size().first().copied().unwrap_or(1).max(1);
        words.extend([begin(&sides[0]), begin(&sides[1]), out.map_or(0, address)]);
        words.extend([ends(&sides[0]), ends(&sides[1]), elements, range.start, salt.cast_signed()]);
        words.extend([left.tensor.numel() as i64 / count, asked | blocks << 32]);
        blocks += blocks_of(elements);
    }
    words.extend(sums.iter().flatten());
    let (count, asked) = (all.len() as i64, sums.iter().flatten().count() as i64 / SUM);
    if blocks == 0 {
        return Ok(Tensor::f_zeros([asked], (Kind::Int64, queue.device()))?);
    }
    let out = queue.room(&[asked], Kind::Int64)?;
    let rows = queue.upload(&words)?;
    let table = [(&rows).into(), count.into(), blocks.into()];
    if asked == 0 {
        let arguments = [&table[..], &[Argument::Nothing]].concat();
        queue.launch(c"finish_add", blocks, &arguments)?;
        return Ok(out);
    }
    let partial = queue.room(&[2 * blocks], Kind::Int64)?;
    queue.launch(c"finish_add", blocks, &[&table[..], &[(&partial).into()]].concat())?;
    let rows = rows.part(0, ROW * count, SUM * asked)?;
    let arguments = [&rows, &partial, &out].map(Into::into);
    queue.launch(c"checksum_pieces", asked, &arguments)?;
    Ok(out)
}
