//! Products of bf16 whose outcome is f32: parts of a sum, which are not rounded before the others have come.
//!
//! libtorch has one product for them (`mm.dtype`, `bmm.dtype`), which keeps what units for bf16 add up in f32. Not everywhere:
//! releases for AMD refused it for a while, and main memory has none. There the operands are widened, which costs a pass over
//! each and the speed of f32.

use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// Whether libtorch makes such products on this device. It is asked for a small one, once in a process.
///
/// # Errors
/// Where there is no memory for the question: that is no answer.
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
    match (left.dim(), right.dim()) {
        (2, 2) if narrow && multiplies(left.device())? => Ok(left.f_mm_dtype(right, Kind::Float)?),
        (3, 3) if narrow && multiplies(left.device())? => Ok(left.f_bmm_dtype(right, Kind::Float)?),
        _ => Ok(left.f_to_kind(Kind::Float)?.f_matmul(&right.f_to_kind(Kind::Float)?)?),
    }
}
