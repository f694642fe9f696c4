//! Sums of pairs, widened and checked on the way, for many tensors by one launch: `finish_add` of `finish.h`, over a table.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::pieces::blocks_of;
use super::queue::{Argument, Queue};
use crate::Result;
use crate::checksum::Total;

/// Words of a row of the table (`Addition` in `finish.h`).
const ROW: i64 = 10;

/// Words of one that says of which blocks a checksum is made (`Piece` in `exact.h`).
const SUM: i64 = 6;

/// What is added, or added to: contiguous, bf16 or f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side<'a> {
    pub(crate) tensor: &'a Tensor,
    /// Where the rows of each expert end, i32; those without rows count as zeros.
    pub(crate) ends: Option<&'a Tensor>,
    /// What its checksum is to be added to, and the salt.
    pub(crate) asked: Option<(&'a Total, u64)>,
}

impl<'a> From<&'a Tensor> for Side<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Side { tensor, ends: None, asked: None }
    }
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Addition<'a> {
    pub(crate) left: Side<'a>,
    /// Of as many numbers; without it the left is only widened.
    pub(crate) right: Option<Side<'a>>,
    /// Where the sum goes, f32 from its first number on; without it the sides are only checked.
    pub(crate) out: Option<&'a Tensor>,
    /// Which numbers of both sides.
    pub(crate) range: Range<i64>,
}

impl<'a> Addition<'a> {
    /// All of a side, by itself.
    pub(crate) fn of(left: Side<'a>, out: Option<&'a Tensor>) -> Self {
        Addition { left, right: None, out, range: 0..left.tensor.numel() as i64 }
    }
}

/// Makes them, by one launch, and by a second one the checksums that are asked for. Tensors must live until what is queued here is
/// done, as those of a stream do.
pub(crate) fn make(queue: &Queue, all: &[Addition]) -> Result<()> {
    let address = |tensor: &Tensor| tensor.data_ptr() as i64;
    let total: i64 = all.iter().map(|one| blocks_of(one.range.end - one.range.start)).sum();
    let (mut words, mut sums, mut blocks) = (Vec::new(), Vec::new(), 0);
    for Addition { left, right, out, range } in all {
        let (elements, mut asked) = (range.end - range.start, 0);
        let sides = [Some(*left), *right];
        for (place, side) in (0..).zip(&sides) {
            let Some(side) = side else { continue };
            asked |= i64::from(side.tensor.kind() == Kind::BFloat16) << place;
            if let Some((total_of, _)) = side.asked {
                asked |= 4 << place;
                sums.push((total_of, [0, 0, elements, 0, 0, 4 | (place * total + blocks) << 32]));
            }
        }
        let begin = |side: &Option<Side>| {
            side.map_or(0, |side| {
                address(side.tensor) + range.start * side.tensor.kind().elt_size_in_bytes() as i64
            })
        };
        let ends = |side: &Option<Side>| side.and_then(|side| side.ends).map_or(0, address);
        let salt = sides.iter().flatten().find_map(|side| side.asked).map_or(0, |(_, salt)| salt);
        let count = left.tensor.size().first().copied().unwrap_or(1).max(1);
        words.extend([begin(&sides[0]), begin(&sides[1]), out.map_or(0, address)]);
        words.extend([ends(&sides[0]), ends(&sides[1]), elements, range.start]);
        words.extend([
            salt.cast_signed(),
            left.tensor.numel() as i64 / count,
            asked | blocks << 32,
        ]);
        blocks += blocks_of(elements);
    }
    if blocks == 0 {
        return Ok(());
    }
    // Those of one total beside each other.
    sums.sort_by_key(|(total, _)| total.address());
    words.extend(sums.iter().flat_map(|(_, row)| row));
    let (rows, count) = (queue.upload(&words)?, all.len() as i64);
    let table = [(&rows).into(), count.into(), blocks.into()];
    if sums.is_empty() {
        let arguments = [&table[..], &[Argument::Nothing]].concat();
        return queue.launch(c"finish_add", blocks, &arguments);
    }
    let [partial, out] = [2 * blocks, sums.len() as i64].map(|n| queue.room(&[n], Kind::Int64));
    let (partial, out) = (partial?, out?);
    queue.launch(c"finish_add", blocks, &[&table[..], &[(&partial).into()]].concat())?;
    let rows = rows.f_narrow(0, ROW * count, SUM * sums.len() as i64)?;
    let arguments = [&rows, &partial, &out].map(Into::into);
    queue.launch(c"checksum_pieces", sums.len() as i64, &arguments)?;
    let mut at = 0;
    for own in sums.chunk_by(|(one, _), (next, _)| one.address() == next.address()) {
        own[0].0.push(out.f_narrow(0, at, own.len() as i64)?);
        at += own.len() as i64;
    }
    Ok(())
}
