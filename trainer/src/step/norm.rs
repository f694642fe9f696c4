//! The norm of the summed gradient: each owner has whole chunks of the gradient, and all ranks get the same norm.

use contract::Result;
use kernels::record::Record;
use tch::{Device, Tensor};

use super::StepContext;
use crate::ledger;
use crate::mesh::words::{WordReader, WordWriter};
use crate::optim::norm::{self, CHUNK};
use crate::refusal::refused;
use crate::state::ownership::{Ownership, ParamShard};
use crate::state::{Part, salt};
use crate::timing;
use crate::workers::Workers;

/// What all ranks report of the summed gradient.
pub(super) struct Norms {
    /// The checksum of each tensor.
    pub(super) checksums: Vec<u64>,
    /// The norm of the whole gradient.
    pub(super) norm: f64,
    /// The norm of each layer.
    pub(super) by_layer: Vec<f64>,
}

/// Checksums and squares of this rank's pieces of the summed gradient, for the host to read.
pub(super) struct LocalNorms {
    record: Record,
    /// Chunks of each piece, in groups that were measured together.
    groups: Vec<Vec<usize>>,
}

/// Measures the pieces `own` in one pass: the squares of chunks, and the terms of checksums.
pub(super) fn measure(
    cx: StepContext<'_>,
    owners: &Ownership,
    own: &[Tensor],
) -> Result<LocalNorms> {
    let device = own.first().map_or(Device::Cpu, Tensor::device);
    let items = owners.own().cloned().zip(own.iter().map(Tensor::shallow_clone));
    let groups = Workers::batched(device, items);
    let chunks = |group: &Vec<(ParamShard, Tensor)>| {
        group.iter().map(|(_, gradient)| gradient.numel().div_ceil(CHUNK as usize)).collect()
    };
    let shapes = groups.iter().map(chunks).collect();
    let found = cx.workers.map(groups, |items: Vec<(ParamShard, Tensor)>| {
        let _watch = timing::part(timing::StepPart::Norm);
        let part = |(piece, gradient): &'_ (ParamShard, Tensor)| {
            (gradient.reshape([-1]), piece.first as u64, salt(Part::Gradient, piece.tensor))
        };
        let parts: Vec<_> = items.iter().map(part).collect();
        let parts: Vec<_> = parts.iter().map(|(flat, first, salt)| (flat, *first, *salt)).collect();
        cx.workers.ops().chunk_sums(&parts, CHUNK).map_err(refused)
    })?;
    let mut record = Record::default();
    let mut words = found.iter().flatten();
    words.try_for_each(|words| record.put(words)).map_err(refused)?;
    Ok(LocalNorms { record, groups: shapes })
}

impl LocalNorms {
    /// Adds its words to `record`, to be read with others.
    pub(super) fn put(&mut self, record: &mut Record) {
        record.append(std::mem::take(&mut self.record));
    }

    /// Writes the report for other ranks: for each piece its checksum and the squares of its chunks.
    pub(super) fn write(self, record: &mut Record, message: &mut WordWriter) -> Result<()> {
        for chunks in self.groups {
            let all: usize = chunks.iter().sum();
            let mut read = || {
                let words = (0..all).map(|_| record.word().map_err(refused));
                words.collect::<Result<Vec<u64>>>()
            };
            let (squares, sums) = (read()?, read()?);
            let mut at = 0;
            for count in chunks {
                let own = at..at + count;
                message.word(sums[own.clone()].iter().copied().fold(0, u64::wrapping_add));
                for square in &squares[own] {
                    message.word(*square);
                }
                at += count;
            }
        }
        Ok(())
    }
}

/// Checksums and norms of the summed gradient, from the ranks' reports.
pub(super) fn norms(
    cx: StepContext<'_>,
    owners: &Ownership,
    heard: &mut [WordReader<'_>],
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
pub(super) fn by_layer(cx: StepContext<'_>, squares: &[f64]) -> Vec<f64> {
    let layers = ledger::layers(&cx.spec.names());
    layers.into_iter().map(|layer| norm::norm(&squares[layer.parameters])).collect()
}
