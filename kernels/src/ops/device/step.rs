//! The optimizer: passes over a table of tensors, which consists of addresses. A model of 10^9 weights has 2,000
//! tensors to update, and the device waits for their table: each tensor takes the host two microseconds, most of which
//! are checks.

use tch::{Kind, Tensor};

use super::Queue;
use crate::Result;
use crate::device::pieces::{self, TensorRange};
use crate::ops::call::Call;
use crate::ops::{AdamWStep, CHUNK, Update, UpdateRule, check};

/// Elements per block before an orthogonalization (`elements.h`).
const EACH: i64 = 1024;

/// A row of the table (`Move` in `optimizer.h`).
#[derive(Default)]
struct UpdateRow {
    /// Of weights, first and second moments, gradient, and bf16 copy.
    addresses: [i64; 5],
    elements: i64,
    number: u64,
    salts: [u64; 3],
    by: AdamWStep,
}

/// The table of the non-empty tensors on the device, their number, and their number of blocks of so many elements.
fn table(queue: &Queue, moves: &[UpdateRow], block: i64) -> Result<(Tensor, i64, i64)> {
    let (mut rows, mut blocks) = (Vec::with_capacity(14 * moves.len()), 0);
    for one in moves.iter().filter(|one| one.elements > 0) {
        let AdamWStep { keep, first, second, root, eps, rate, scale } = one.by;
        let pair = |low: u32, high: u32| i64::from(low) | i64::from(high) << 32;
        rows.extend(one.addresses);
        rows.push(one.elements);
        rows.push(one.number.cast_signed());
        rows.extend(one.salts.map(u64::cast_signed));
        let numbers = [[keep, rate], [scale, first], [second, root]];
        rows.extend(numbers.map(|[low, high]| pair(low.to_bits(), high.to_bits())));
        rows.push(pair(eps.to_bits(), blocks as u32));
        blocks += (one.elements + block - 1) / block;
    }
    Ok((queue.upload(&rows)?, rows.len() as i64 / 14, blocks))
}

fn address(tensor: &Tensor) -> i64 {
    tensor.data_ptr() as i64
}

/// Returns the same as [`crate::ops::Ops::update`].
pub(super) fn update(queue: &Queue, all: &[Update]) -> Result<Tensor> {
    let mut moves = Vec::with_capacity(all.len());
    for one in all {
        check::update(one)?;
        let [weight, first, second] = one.parts().map(|part| part.map_or(0, address));
        let rounded = one.rounded.as_ref().map_or(0, |(to, first)| address(to) + 2 * first);
        let by = match one.rule {
            UpdateRule::AdamW { by, .. } => by,
            UpdateRule::Muon { keep, rate, .. } => AdamWStep { keep, rate, ..AdamWStep::default() },
        };
        moves.push(UpdateRow {
            addresses: [weight, first, second, address(one.gradient), rounded],
            elements: one.weight.numel() as i64,
            number: one.number,
            salts: one.salts,
            by,
        });
    }
    let (rows, count, chunks) = table(queue, &moves, CHUNK)?;
    let out = queue.room(&[chunks, 4], Kind::Int64)?;
    queue.launch(c"update_chunks", chunks, &[(&rows).into(), count.into(), (&out).into()])?;
    Ok(out)
}

pub(super) fn nesterov(
    queue: &Queue,
    pairs: &[(&mut Tensor, &Tensor)],
    by: f32,
    scale: f32,
) -> Result<Vec<Tensor>> {
    let (mut out, mut moves) = (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
    for (momentum, gradient) in pairs {
        check::nesterov(momentum, gradient)?;
        let direction = queue.room(&gradient.size(), Kind::Float)?;
        let addresses = [address(&direction), address(momentum), 0, address(gradient), 0];
        let elements = gradient.numel() as i64;
        moves.push(UpdateRow { addresses, elements, ..UpdateRow::default() });
        out.push(direction);
    }
    let (rows, count, blocks) = table(queue, &moves, EACH)?;
    let arguments = [(&rows).into(), count.into(), scale.into(), by.into()];
    queue.launch(c"nesterov", blocks, &arguments)?;
    Ok(out)
}

pub(super) fn rounded(queue: &Queue, pairs: &[[Tensor; 2]]) -> Result<()> {
    pairs.iter().try_for_each(|[narrow, wide]| check::rounded(narrow, wide))?;
    let mut rows = Vec::with_capacity(pairs.len());
    for [narrow, wide] in pairs {
        rows.push(TensorRange { tensor: wide, other: Some(narrow), first: 0, salt: 0 });
    }
    pieces::round(queue, &rows)
}

/// The sum of squares of each chunk of each part and, if requested, its checksum.
pub(super) fn squares(
    queue: &Queue,
    parts: &pieces::TensorParts,
    chunk: i64,
    checked: bool,
) -> Result<[Tensor; 2]> {
    let call = Call("squares");
    parts.iter().try_for_each(|(tensor, ..)| call.f32("x", tensor, &tensor.size()))?;
    pieces::squares(queue, parts, chunk, checked)
}
