//! The norm of the summed gradient: each owner has whole chunks of it, and all come to the same number.

use contract::Result;
use kernels::checksum;
use tch::Tensor;

use super::Context;
use crate::ledger;
use crate::mesh::words::Writer;
use crate::optim::norm;
use crate::state::ownership::{Ownership, Piece};
use crate::state::{Part, salt};
use crate::timing;

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
    let items = owners.own().cloned().zip(own.iter().map(Tensor::shallow_clone));
    let found = cx.workers.map(items.collect(), |(piece, gradient): (Piece, Tensor)| {
        let _watch = timing::part(timing::Part::Norm);
        let salt = salt(Part::Gradient, piece.tensor);
        let squares = norm::chunks(cx.workers.ops(), &gradient)?;
        Ok((checksum::slice(&gradient, piece.first as u64, salt), squares))
    })?;
    let mut mine = Writer::default();
    for (checksum, squares) in &found {
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
