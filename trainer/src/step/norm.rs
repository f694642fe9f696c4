//! The norm of the summed gradient: each owner has whole chunks of it, and all come to the same number.

use contract::Result;
use kernels::checksum;
use tch::{Device, Tensor};

use super::Context;
use crate::ledger;
use crate::mesh::words::Writer;
use crate::optim::norm;
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

/// Checksums and norms of the summed gradient, of which `own` are this rank's pieces.
pub(super) fn norm_of(cx: Context<'_>, owners: &Ownership, own: &[Tensor]) -> Result<Norms> {
    let device = own.first().map_or(Device::Cpu, Tensor::device);
    let items = owners.own().cloned().zip(own.iter().map(Tensor::shallow_clone));
    let found =
        cx.workers.map(Workers::batched(device, items), |items: Vec<(Piece, Tensor)>| {
            let _watch = timing::part(timing::Part::Norm);
            let mut slices = Vec::with_capacity(items.len());
            for (piece, gradient) in &items {
                slices.push((gradient, piece.first as u64, salt(Part::Gradient, piece.tensor)));
            }
            let cut: Vec<Vec<Tensor>> =
                items.iter().map(|(_, gradient)| norm::cut(gradient)).collect();
            let counts: Vec<usize> = cut.iter().map(Vec::len).collect();
            let chunks: Vec<Tensor> = cut.into_iter().flatten().collect();
            let mut squares = cx.workers.ops().all_squares(&chunks).map_err(refused)?.into_iter();
            let squares = counts.into_iter().map(|count| squares.by_ref().take(count).collect());
            Ok(checksum::slices(&slices).into_iter().zip(squares).collect())
        })?;
    let mut mine = Writer::default();
    for (checksum, squares) in found.iter().flat_map(|found: &Vec<(u64, Vec<f64>)>| found) {
        mine.word(*checksum);
        squares.iter().for_each(|square| {
            mine.float(*square);
        });
    }
    let heard = cx.team.tell("the gathering of norms", &mine)?;
    let mut heard = heard.readers();
    let tensors = cx.spec.parameters.len();
    let (mut checksums, mut squares) = (vec![0u64; tensors], vec![Vec::new(); tensors]);
    for piece in owners.pieces() {
        let heard = &mut heard[piece.owner as usize];
        checksums[piece.tensor] = checksums[piece.tensor].wrapping_add(heard.word()?);
        for _ in 0..piece.chunks() {
            squares[piece.tensor].push(heard.float()?);
        }
    }
    heard.into_iter().try_for_each(|heard| heard.end())?;
    let squares: Vec<f64> = squares.iter().map(|chunks| norm::sum(chunks)).collect();
    Ok(Norms { checksums, norm: norm::norm(&squares), by_layer: by_layer(cx, &squares) })
}

/// The norm of each layer, from the sums of squares of all tensors in canonical order.
pub(super) fn by_layer(cx: Context<'_>, squares: &[f64]) -> Vec<f64> {
    let layers = ledger::layers(&cx.spec.names());
    layers.into_iter().map(|layer| norm::norm(&squares[layer.parameters])).collect()
}
