//! Matrix products in the kind of their weights; what they are added to is f32.
//!
//! A product of bf16 operands is summed in f32 and rounded once, when it is written. With f32 weights every function
//! here is the one call of libtorch that its name says.

use tch::{Kind, Tensor};

/// `out = a b`, into an f32 `out`.
pub(super) fn into(out: &Tensor, a: &Tensor, b: &Tensor) {
    if a.kind() == out.kind() {
        let _ = a.mm_out(out, b);
    } else {
        out.shallow_clone().copy_(&a.mm(b));
    }
}

/// `out += a b`, into an f32 `out`.
pub(super) fn add(out: &mut Tensor, a: &Tensor, b: &Tensor) {
    if a.kind() == out.kind() {
        let _ = out.addmm_(a, b);
    } else {
        *out += a.mm(b);
    }
}

/// `x weight^T + bias`, f32, from `x` in the kind of the weight.
pub(super) fn affine(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
    match weight.kind() {
        Kind::Float => x.linear(weight, Some(bias)),
        _ => x.matmul(&weight.tr()) + bias,
    }
}

/// `rows weights^T + bias`, f32, for every matrix of a batch.
pub(super) fn affine_batch(bias: &Tensor, rows: &Tensor, weights: &Tensor) -> Tensor {
    let weights = weights.transpose(1, 2);
    match rows.kind() {
        Kind::Float => bias.baddbmm(rows, &weights, 1.0, 1.0),
        _ => rows.bmm(&weights) + bias,
    }
}

/// The same numbers in f32: sums, and what leaves the model.
pub(super) fn wide(x: Tensor) -> Tensor {
    x.to_kind(Kind::Float)
}
