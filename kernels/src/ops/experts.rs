//! Operands of experts' matmuls.

use tch::{Kind, Tensor};

use super::{Dispatch, Ops};
use crate::Result;

/// Rows of tokens, as operands of experts' matmuls.
#[derive(Debug)]
pub enum ExpertInput {
    /// `[P, D]` or the first rows of such: in expert order, zeros in padding.
    Sorted(Tensor),
    /// `[N, D]`, in token order: a matmul reads each row where it is.
    Tokens(Tensor),
}

impl ExpertInput {
    /// In expert order.
    pub(super) fn sorted<O: Ops + ?Sized>(&self, ops: &O, by: &Dispatch) -> Result<Tensor> {
        match self {
            ExpertInput::Sorted(rows) => Ok(rows.shallow_clone()),
            ExpertInput::Tokens(rows) => Ok(ops.permute(rows, by)?.f_narrow(0, 0, by.computed)?),
        }
    }

    /// The same in f32.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn wide(&self) -> Result<ExpertInput> {
        match self {
            ExpertInput::Sorted(rows) => Ok(ExpertInput::Sorted(rows.f_to_kind(Kind::Float)?)),
            ExpertInput::Tokens(rows) => Ok(ExpertInput::Tokens(rows.f_to_kind(Kind::Float)?)),
        }
    }
}
