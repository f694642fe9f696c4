//! Checksums, sums of squares and copies of many tensors in one launch each: the kernels of `exact.h`, over a table of
//! pieces.

use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::queue::{Argument, Queue};
use crate::Result;

/// Elements per block in `exact.h`.
const ELEMENTS: i64 = 4096;

/// A piece of a tensor, contiguous, as a row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorRange<'a> {
    /// The piece.
    pub(crate) tensor: &'a Tensor,
    /// The second operand: as many elements.
    pub(crate) other: Option<&'a Tensor>,
    /// Number of its first element in its tensor.
    pub(crate) first: u64,
    /// Salt of its checksum.
    pub(crate) salt: u64,
}

/// The rows in the layout of `exact.h`, and their number of blocks.
pub(crate) fn table(pieces: &[TensorRange]) -> (Vec<i64>, i64) {
    let (mut rows, mut blocks) = (Vec::with_capacity(6 * pieces.len()), 0);
    for TensorRange { tensor, other, first, salt } in pieces {
        let elements = tensor.numel() as i64;
        let width = tensor.kind().elt_size_in_bytes() as i64;
        let address = tensor.data_ptr() as i64;
        let other = other.map_or(0, |other| other.data_ptr() as i64);
        rows.extend([address, other, elements, first.cast_signed(), salt.cast_signed()]);
        rows.push(width | blocks << 32);
        blocks += blocks_of(elements);
    }
    (rows, blocks)
}

/// Number of blocks for so many elements.
pub(super) fn blocks_of(elements: i64) -> i64 {
    elements.div_euclid(ELEMENTS) + i64::from(elements % ELEMENTS > 0)
}

/// The checksum of each piece, i64, on the device. The tensors must live until the queued work is done, as those of a
/// stream do.
pub(crate) fn checksums(queue: &Queue, pieces: &[TensorRange]) -> Result<Tensor> {
    let (rows, blocks) = table(pieces);
    let (rows, count) = (queue.upload(&rows)?, pieces.len() as i64);
    let [partial, out] = [blocks, count].map(|count| queue.room(&[count], Kind::Int64));
    let (partial, out) = (partial?, out?);
    let arguments = [(&rows).into(), count.into(), (&partial).into()];
    queue.launch(c"checksum_blocks", blocks, &arguments)?;
    let arguments = [&rows, &partial, &out].map(Into::into);
    queue.launch(c"checksum_pieces", count, &arguments)?;
    Ok(out)
}

/// Tensors or parts of some, contiguous f32: each with the number of its first element in its tensor, and a salt.
pub(crate) type TensorParts<'a> = [(&'a Tensor, u64, u64)];

/// The sum of squares of each `chunk` elements of each part, in f64, on the device; and, if requested, each chunk's
/// part of its tensor's checksum, i64. Rows are built from addresses: a model of 10^9 weights has 15,000 chunks, and a
/// tensor for each would take the host longer than the device takes for all of them.
pub(crate) fn squares(
    queue: &Queue,
    parts: &TensorParts,
    chunk: i64,
    checked: bool,
) -> Result<[Tensor; 2]> {
    let mut rows = Vec::new();
    for (tensor, first, salt) in parts {
        let (address, length) = (tensor.data_ptr() as i64, tensor.numel() as i64);
        for at in (0..length).step_by(chunk as usize) {
            let elements = chunk.min(length - at);
            let first = first.cast_signed().wrapping_add(at);
            rows.extend([address + 4 * at, 0, elements, first, salt.cast_signed(), 4]);
        }
    }
    let count = rows.len() as i64 / 6;
    let (out, sums) = (queue.room(&[count], Kind::Double)?, queue.room(&[count], Kind::Int64)?);
    if count > 0 {
        let rows = queue.upload(&rows)?;
        let sums = if checked { Argument::from(&sums) } else { Argument::Nothing };
        queue.launch(c"squares", count, &[(&rows).into(), count.into(), (&out).into(), sums])?;
    }
    Ok([out, sums])
}

/// Adds `other` to each piece; `add_present` of `exact.h` defines the meaning of `first` and `salt`.
pub(crate) fn add_present(queue: &Queue, pieces: &[TensorRange]) -> Result<()> {
    over(queue, c"add_present", pieces, &[])
}

/// Copies each piece, of 2 or 4 bytes an element, into its `other`.
pub(crate) fn copy(queue: &Queue, pieces: &[TensorRange]) -> Result<()> {
    over(queue, c"copy_blocks", pieces, &[])
}

/// Rounds each piece, f32, into its `other`, bf16.
pub(crate) fn round(queue: &Queue, pieces: &[TensorRange]) -> Result<()> {
    over(queue, c"round_blocks", pieces, &[])
}

/// Launches a kernel over the table of pieces, with the number of blocks that they have.
fn over(queue: &Queue, kernel: &CStr, pieces: &[TensorRange], rest: &[Argument]) -> Result<()> {
    let (rows, blocks) = table(pieces);
    let (rows, count) = (queue.upload(&rows)?, pieces.len() as i64);
    let arguments = [&[(&rows).into(), count.into()][..], rest].concat();
    queue.launch(kernel, blocks, &arguments)
}
