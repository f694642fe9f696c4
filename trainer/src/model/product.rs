//! Matrix products in the kind of their weights; what they are added to is f32.
//!
//! A product of bf16 operands is summed in f32 and rounded once, when it is written.

use kernels::product;
use tch::{Kind, Tensor};

/// `a b`, in their kind.
pub(super) fn of(a: &Tensor, b: &Tensor) -> Tensor {
    product::of(a, b)
}

/// `out = a b`, into an `out` of their kind or an f32 one.
pub(super) fn into(out: &Tensor, a: &Tensor, b: &Tensor) {
    if a.kind() == out.kind() {
        product::into(out, a, b);
    } else {
        out.shallow_clone().copy_(&product::of(a, b));
    }
}

/// `out += a b`, into an f32 `out`.
pub(super) fn add(out: &mut Tensor, a: &Tensor, b: &Tensor) {
    if a.kind() == out.kind() {
        product::add(out, a, b);
    } else {
        *out += product::of(a, b);
    }
}

/// `x weight^T + bias`, f32, from `x` in the kind of the weight.
pub(super) fn affine(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
    match weight.kind() {
        Kind::Float => x.linear(weight, Some(bias)),
        _ => x.matmul(&weight.tr()) + bias,
    }
}

/// The same numbers in f32: sums, and what leaves the model.
pub(super) fn wide(x: Tensor) -> Tensor {
    x.to_kind(Kind::Float)
}
