//! The norm of the summed gradient: each owner has whole chunks of it, and all come to the same number.

use contract::Result;
use kernels::checksum;
use kernels::ops::{Ops, chunks};
use kernels::record::Record;
use tch::{Device, Tensor};

use super::Context;
use crate::ledger;
use crate::mesh::words::{Reader, Writer};
use crate::optim::norm::{self, CHUNK};
use crate::refusal::refused;
use crate::state::ownership::{Ownership, Piece};
use crate::state::{Part, salt};
use crate::timing;
use crate::workers::Workers;

/// What all ranks found of the summed gradient.
pub(super) struct Norms {
    /// The checksum of each tensor.
    pub(super) checksums: Vec<u64>,
    /// The norm of the whole.
    pub(super) norm: f64,
    /// The same of each layer.
    pub(super) by_layer: Vec<f64>,
}

/// What this rank's pieces of the summed gradient come to, for the host to read.
pub(super) struct Measured {
    record: Record,
    /// Chunks of each piece, in groups that were measured together.
    groups: Vec<Vec<usize>>,
}

/// Measures the pieces `own`: in main memory each chunk is read once.
pub(super) fn measure(cx: Context<'_>, owners: &Ownership, own: &[Tensor]) -> Result<Measured> {
    let device = own.first().map_or(Device::Cpu, Tensor::device);
    let items = owners.own().cloned().zip(own.iter().map(Tensor::shallow_clone));
    let groups = Workers::batched(device, items);
    let chunks = |group: &Vec<(Piece, Tensor)>| {
        group.iter().map(|(_, gradient)| gradient.numel().div_ceil(CHUNK as usize)).collect()
    };
    let shapes = groups.iter().map(chunks).collect();
    let found = cx.workers.map(groups, |items: Vec<(Piece, Tensor)>| {
        let _watch = timing::part(timing::Part::Norm);
        let words = match device {
            Device::Cpu => items.iter().map(|item| alone(cx.workers.ops(), item)).collect(),
            _ => together(cx.workers.ops(), &items).map(|words| vec![words]),
        };
        words.map_err(refused)
    })?;
    let mut record = Record::default();
    let mut words = found.iter().flatten().flatten();
    words.try_for_each(|words| record.put(words)).map_err(refused)?;
    Ok(Measured { record, groups: shapes })
}

/// The checksum of a piece, and the squares of its chunks.
fn alone(ops: &dyn Ops, (piece, gradient): &(Piece, Tensor)) -> kernels::Result<[Tensor; 2]> {
    let (mut at, salt) = (piece.first as u64, salt(Part::Gradient, piece.tensor));
    let (mut sum, mut squares) = (0u64, Vec::new());
    for chunk in chunks(gradient, CHUNK)? {
        squares.push(ops.squares(&chunk)?);
        sum = sum.wrapping_add(checksum::slice(&chunk, at, salt)?);
        at += chunk.numel() as u64;
    }
    Ok([Tensor::f_from_slice(&[sum.cast_signed()])?, Tensor::f_from_slice(&squares)?])
}

/// The same of many on a device: all checksums, then all squares.
fn together(ops: &dyn Ops, items: &[(Piece, Tensor)]) -> kernels::Result<[Tensor; 2]> {
    let slice = |(piece, gradient)| -> (&Tensor, u64, u64) {
        let piece: &Piece = piece;
        (gradient, piece.first as u64, salt(Part::Gradient, piece.tensor))
    };
    let slices: Vec<_> = items.iter().map(|(piece, gradient)| slice((piece, gradient))).collect();
    let flat: Vec<Tensor> = items.iter().map(|(_, gradient)| gradient.reshape([-1])).collect();
    Ok([checksum::slices(&slices)?, ops.chunk_squares(&flat, CHUNK)?])
}

impl Measured {
    /// Puts its words down, to be read with others.
    pub(super) fn put(&mut self, record: &mut Record) {
        record.append(std::mem::take(&mut self.record));
    }

    /// Writes what was read, for the others: of each piece its checksum and the squares of its chunks.
    pub(super) fn write(self, record: &mut Record, mine: &mut Writer) -> Result<()> {
        for chunks in self.groups {
            let sums = chunks.iter().map(|_| record.word().map_err(refused));
            let sums = sums.collect::<Result<Vec<_>>>()?;
            for (sum, count) in sums.into_iter().zip(chunks) {
                mine.word(sum);
                for _ in 0..count {
                    mine.word(record.word().map_err(refused)?);
                }
            }
        }
        Ok(())
    }
}

/// Checksums and norms of the summed gradient, from what each rank wrote.
pub(super) fn norms(
    cx: Context<'_>,
    owners: &Ownership,
    heard: &mut [Reader<'_>],
) -> Result<Norms> {
    let tensors = cx.spec.parameters.len();
    let (mut checksums, mut squares) = (vec![0u64; tensors], vec![Vec::new(); tensors]);
    for piece in owners.pieces() {
        let heard = &mut heard[piece.owner as usize];
        checksums[piece.tensor] = checksums[piece.tensor].wrapping_add(heard.word()?);
        for _ in 0..piece.chunks() {
            squares[piece.tensor].push(heard.float()?);
        }
    }
    let squares: Vec<f64> = squares.iter().map(|chunks| norm::sum(chunks)).collect();
    Ok(Norms { checksums, norm: norm::norm(&squares), by_layer: by_layer(cx, &squares) })
}

/// The norm of each layer, from the sums of squares of all tensors in canonical order.
pub(super) fn by_layer(cx: Context<'_>, squares: &[f64]) -> Vec<f64> {
    let layers = ledger::layers(&cx.spec.names());
    layers.into_iter().map(|layer| norm::norm(&squares[layer.parameters])).collect()
}
