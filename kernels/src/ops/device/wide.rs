//! bf16 matmuls with f32 results: parts of a sum, which must not be rounded before they are added.
//!
//! libtorch has an operator for them (`mm.dtype`, `bmm.dtype`), which keeps the f32 accumulators of bf16 matrix units.
//! It is not available everywhere: some releases for AMD refuse it, and the CPU has none. There the operands are
//! converted to f32, which costs a pass over each, and the matmul runs at f32 speed.

use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

use crate::{Error, Result, shapes};

/// Whether libtorch has such matmuls on this device. Tries a small one, once per process.
///
/// # Errors
/// If memory runs out during the attempt, which answers nothing.
pub(crate) fn multiplies(device: Device) -> Result<bool> {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    if let Some(answer) = ANSWER.get() {
        return Ok(*answer);
    }
    let square = Tensor::f_ones([8, 8], (Kind::BFloat16, device))?;
    let made = match square.f_mm_dtype(&square, Kind::Float).map_err(Error::from) {
        Ok(_) => true,
        Err(Error::Torch(_)) => false,
        Err(error) => return Err(error),
    };
    Ok(*ANSWER.get_or_init(|| made))
}

/// `left right` of float matrices, or batches of them, in f32.
pub(super) fn product(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    let narrow = [left, right].iter().all(|side| side.kind() == Kind::BFloat16);
    if narrow && left.device() == shapes::DEVICE {
        // The operator has no shapes, and its answer is that of a real device.
        let product = left.f_matmul(right)?.size();
        return Ok(Tensor::f_empty(product, (Kind::Float, shapes::DEVICE))?);
    }
    match (left.dim(), right.dim()) {
        (2, 2) if narrow && multiplies(left.device())? => Ok(left.f_mm_dtype(right, Kind::Float)?),
        (3, 3) if narrow && multiplies(left.device())? => Ok(left.f_bmm_dtype(right, Kind::Float)?),
        _ => Ok(left.f_to_kind(Kind::Float)?.f_matmul(&right.f_to_kind(Kind::Float)?)?),
    }
}
