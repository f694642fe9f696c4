//! Error messages of an operation whose operand does not fit.

use tch::{Kind, Tensor};

use crate::{Error, Result, layout};

/// A call of the operation with this name.
#[derive(Clone, Copy)]
pub(crate) struct Call(pub(crate) &'static str);

impl Call {
    /// The error for an operand that does not fit.
    pub(crate) fn refuse(self, operand: &'static str, found: String, wanted: String) -> Error {
        Error::Operand { operation: self.0, operand, found, wanted }
    }

    /// Requires contiguous f32 of this shape.
    pub(crate) fn f32(self, operand: &'static str, tensor: &Tensor, shape: &[i64]) -> Result<()> {
        self.is(operand, tensor, shape, &[Kind::Float])
    }

    /// Requires contiguous f32 or bf16 of this shape.
    pub(crate) fn float(self, operand: &'static str, tensor: &Tensor, shape: &[i64]) -> Result<()> {
        self.is(operand, tensor, shape, &[Kind::Float, Kind::BFloat16])
    }

    /// Requires contiguous i64 of this shape.
    pub(crate) fn i64(self, operand: &'static str, tensor: &Tensor, shape: &[i64]) -> Result<()> {
        self.is(operand, tensor, shape, &[Kind::Int64])
    }

    pub(super) fn is(
        self,
        operand: &'static str,
        tensor: &Tensor,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<()> {
        if layout::fits(tensor, shape, kinds) {
            return Ok(());
        }
        let layout = if tensor.is_contiguous() { "contiguous" } else { "not contiguous" };
        let found = format!("{:?} {:?}, {layout}", tensor.kind(), tensor.size());
        let kinds: Vec<_> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
        Err(self.refuse(operand, found, format!("{} {shape:?}, contiguous", kinds.join(" or "))))
    }

    /// The sizes of a matrix.
    pub(crate) fn matrix(self, operand: &'static str, tensor: &Tensor) -> Result<[i64; 2]> {
        self.sizes(operand, tensor)
    }

    /// The sizes of a tensor of `D` dimensions.
    pub(crate) fn sizes<const D: usize>(
        self,
        operand: &'static str,
        tensor: &Tensor,
    ) -> Result<[i64; D]> {
        layout::sizes(tensor).ok_or_else(|| {
            self.refuse(operand, format!("{:?}", tensor.size()), format!("{D} dimensions"))
        })
    }
}
