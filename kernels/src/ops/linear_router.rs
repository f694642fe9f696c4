//! A router that is one matrix, and the choice of classes from logits: composed of other operations, the same in every
//! table.
//!
//! A token with k experts is k rows for the operations on experts: one for each of its classes, in ascending order. So
//! the sum over a token's experts has one order.

use tch::{Kind, Tensor};

use super::{OpsTable, Routes};
use crate::Result;

/// How many classes a token has, and what their weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopK {
    /// Classes of a token: k.
    pub count: i64,
    /// Whether their probabilities are divided by their sum.
    pub normalized: bool,
}

impl TopK {
    /// One class with its probability.
    pub const ONE: TopK = TopK { count: 1, normalized: false };
}

/// Data for the backward pass of [`linear_router`].
#[derive(Debug)]
pub struct LinearRouterSaved {
    probabilities: Tensor,
    choice: Tensor,
}

/// Gradients of [`linear_router`].
#[derive(Debug)]
pub struct LinearRouterGrads {
    /// Of its input, `[N, D]`, in its kind.
    pub input: Tensor,
    /// `[C, D]`, f32.
    pub weights: Tensor,
}

/// Routes of `x`, `[N, D]` float, by the matrix `weights`, `[C, D]` f32, which is multiplied in f32. `balance`, `[C]`,
/// is added to the probabilities for the choice only.
///
/// # Errors
/// If the shapes do not fit.
pub fn linear_router(
    ops: OpsTable,
    weights: &Tensor,
    x: &Tensor,
    balance: Option<&Tensor>,
    by: TopK,
) -> Result<(Routes, LinearRouterSaved)> {
    let logits = ops.matmul(&x.f_to_kind(Kind::Float)?, &weights.f_tr()?)?;
    let [probabilities, choice, weight] = chosen(&logits, balance, by)?;
    let saved = LinearRouterSaved { probabilities, choice: choice.shallow_clone() };
    Ok((Routes { choice, weight, state: None, counts: None }, saved))
}

/// Backward of [`linear_router`], from the gradients of the weights of the choices, `[N k, 1]`.
///
/// # Errors
/// If the shapes do not fit.
pub fn linear_router_backward(
    ops: OpsTable,
    weights: &Tensor,
    x: &Tensor,
    saved: LinearRouterSaved,
    grad: &Tensor,
    by: TopK,
) -> Result<LinearRouterGrads> {
    let LinearRouterSaved { probabilities, choice } = saved;
    let logits = chosen_back(&probabilities, &choice, grad, by)?;
    Ok(LinearRouterGrads {
        input: ops.matmul(&logits, weights)?.f_to_kind(x.kind())?,
        weights: ops.matmul(&logits.f_tr()?, &x.f_to_kind(Kind::Float)?)?,
    })
}

/// Each row of `x`, `[N, D]`, once for each of its token's classes: `[N k, D]`.
///
/// # Errors
/// If `x` is not a matrix.
pub fn repeated(x: &Tensor, by: TopK) -> Result<Tensor> {
    if by.count == 1 {
        return Ok(x.shallow_clone());
    }
    let [tokens, width] = super::Call("repeated").matrix("x", x)?;
    let rows = x.f_unsqueeze(1)?.f_expand([tokens, by.count, width], false)?;
    Ok(rows.f_reshape([tokens * by.count, width])?)
}

/// The sum of each token's rows of `rows`, `[N k, D]` float: `[N, D]` in their kind, added in f32, lowest class first.
///
/// # Errors
/// If the number of rows is not a multiple of k.
pub fn summed(rows: &Tensor, by: TopK) -> Result<Tensor> {
    if by.count == 1 {
        return Ok(rows.shallow_clone());
    }
    let width = rows.size()[1];
    let by_token = rows.f_view([-1, by.count, width])?;
    // One class at a time, so that no copy of all rows in f32 is ever held.
    let of = |class| by_token.f_select(1, class)?.f_to_kind(Kind::Float);
    let mut sum = of(0)?;
    for class in 1..by.count {
        sum = sum.f_add(&of(class)?)?;
    }
    Ok(sum.f_to_kind(rows.kind())?)
}

/// Probabilities from logits, `[N, C]`; the classes of the k largest ones plus `balance`, `[N k]`, ascending for each
/// token; and their weights, `[N k, 1]`.
pub(super) fn chosen(logits: &Tensor, balance: Option<&Tensor>, by: TopK) -> Result<[Tensor; 3]> {
    let probabilities = logits.f_softmax(-1, Kind::Float)?;
    let choice = match balance {
        Some(balance) => largest(&probabilities.f_add(balance)?, by)?,
        None => largest(&probabilities, by)?,
    };
    let weight = probabilities.f_gather(1, &choice, false)?;
    let weight = if by.normalized { weight.f_div(&added(&weight, by)?)? } else { weight };
    Ok([probabilities, choice.f_flatten(0, 1)?, weight.f_reshape([-1, 1])?])
}

/// The columns of the k largest numbers of each row, `[N, k]`, ascending.
fn largest(x: &Tensor, by: TopK) -> Result<Tensor> {
    // argmax returns the first of equal values on every device, which topk does not promise.
    let first = x.f_argmax(-1, true)?;
    if by.count == 1 {
        return Ok(first);
    }
    let (mut left, mut found) = (x.shallow_clone(), vec![first]);
    for _ in 1..by.count {
        let last = &found[found.len() - 1];
        left = left.f_scatter_value(1, last, f64::NEG_INFINITY)?;
        found.push(left.f_argmax(-1, true)?);
    }
    Ok(Tensor::f_cat(&found, 1)?.f_sort(1, false)?.0)
}

/// The sum over the classes of each token, dimension 1, which stays: the first is copied, the others added in order.
fn added(x: &Tensor, by: TopK) -> Result<Tensor> {
    let mut sum = x.f_narrow(1, 0, 1)?;
    for class in 1..by.count {
        sum = sum.f_add(&x.f_narrow(1, class, 1)?)?;
    }
    Ok(sum)
}

/// The gradient of the logits from those of the weights.
///
/// ```text
/// w_c = p_c, or p_c / s with s the sum over the chosen classes
/// g_c = dw_c, or (dw_c - sum_j(dw_j w_j)) / s: the gradient of p_c, 0 for classes that are not chosen
/// dlogit_j = p_j (g_j - sum_c(g_c p_c))
/// ```
pub(super) fn chosen_back(
    probabilities: &Tensor,
    choice: &Tensor,
    grad: &Tensor,
    by: TopK,
) -> Result<Tensor> {
    let (choice, mut grad) = (choice.f_reshape([-1, by.count])?, grad.f_reshape([-1, by.count])?);
    let chosen = probabilities.f_gather(1, &choice, false)?;
    if by.normalized {
        let sum = added(&chosen, by)?;
        let mean = added(&grad.f_mul(&chosen.f_div(&sum)?)?, by)?;
        grad = grad.f_sub(&mean)?.f_div(&sum)?;
    }
    let scaled = grad.f_mul(&chosen)?;
    let mut logits = probabilities.f_mul(&added(&scaled, by)?.f_neg()?)?;
    let _ = logits.f_scatter_add_(1, &choice, &scaled)?;
    Ok(logits)
}
