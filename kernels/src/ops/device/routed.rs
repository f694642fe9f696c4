//! Residual additions and norms that read the rows of experts where they are, and write gradients there.

use tch::{Kind, Tensor};

use super::rows::{NormWay, lanes};
use super::tokens::returning;
use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::ops::{ExpertRows, NormBack, ParamGradient, ResidualGrads, ResidualScaling, check};

/// Whether the kernels can read the rows and these matrices: four elements at a time, and at least one row.
pub(super) fn fits(rows: ExpertRows, matrices: &[Option<&Tensor>]) -> bool {
    let whole = |matrix: &Tensor| {
        matrix.size().last().is_some_and(|width| width % 4 == 0)
            && (matrix.data_ptr() as usize).is_multiple_of(16)
    };
    let all = [&[Some(rows.x), rows.passed], matrices].concat();
    rows.by.places.numel() > 0 && all.into_iter().flatten().all(whole)
}

pub(super) fn residual_norm_gathered(
    queue: &Queue,
    rows: ExpertRows,
    residual: &Tensor,
    by: ResidualScaling,
    weight: &Tensor,
    eps: f64,
) -> Result<[Tensor; 3]> {
    let shape @ [tokens, width] = check::residual_gathered(rows, residual, by)?;
    check::rms_norm(residual, weight)?;
    let sum = queue.room(&shape, Kind::Float)?;
    let out = queue.room(&shape, rows.x.kind())?;
    let factors = queue.room(&[tokens, 1], Kind::Float)?;
    let kernel = by_kind(rows.x, [c"residual_norm_gathered_f32", c"residual_norm_gathered_bf16"]);
    let vectors = [by.scale, by.bias, by.residual_scale, by.residual_bias, weight];
    let memory = [&[residual][..], &vectors, &[&sum, &out, &factors]].concat();
    let memory: Vec<_> = memory.into_iter().map(Argument::from).collect();
    let sizes = [tokens.into(), rows.by.experts.into(), width.into(), (eps as f32).into()];
    let from = returning("residual_norm_gathered", rows)?;
    queue.launch(kernel, lanes(tokens), &[&from[..], &memory, &sizes].concat())?;
    Ok([sum, out, factors])
}

pub(super) fn residual_norm_gathered_backward(
    queue: &Queue,
    rows: ExpertRows,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    grad: &Tensor,
) -> Result<(ResidualGrads, ParamGradient)> {
    let shape = check::residual_norm_gathered_backward(rows, residual, by, norm, grad)?;
    let to_branch = queue.room(&[rows.by.rows, shape[1]], rows.x.kind())?;
    let to_gates = queue.room(&[shape[0], 1], Kind::Float)?;
    let kernels = [c"residual_norm_gathered_backward_f32", c"residual_norm_gathered_backward_bf16"];
    let operation = "residual_norm_gathered_backward";
    let order = [rows.by.marked(operation)?.into()];
    let sides = [&order[..], &returning(operation, rows)?, &[residual.into()]];
    let sizes = [rows.by.rows, shape[0], rows.by.experts, shape[1]].map(Argument::from);
    let rest = [&[(&to_gates).into()][..], &sizes].concat();
    let way = NormWay { by, norm, to_branch };
    let operands = [&sides.concat()[..], &[grad.into()], &rest];
    let (found, weight) = way.back(queue, by_kind(rows.x, kernels), shape, operands)?;
    Ok((ResidualGrads { gates: Some(to_gates), ..found }, weight))
}

pub(super) fn residual_norm_unpermuted_backward(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    rows: ExpertRows,
) -> Result<(ResidualGrads, ParamGradient)> {
    let shape = check::residual_norm_unpermuted_backward(branch, residual, by, norm, rows)?;
    let kernels =
        [c"residual_norm_unpermuted_backward_f32", c"residual_norm_unpermuted_backward_bf16"];
    let grad = returning("residual_norm_unpermuted_backward", rows)?;
    let sides = [branch, residual].map(Argument::from);
    let sizes = [shape[0], rows.by.experts, shape[1]].map(Argument::from);
    let way = NormWay { by, norm, to_branch: queue.room(&shape, branch.kind())? };
    way.back(queue, by_kind(branch, kernels), shape, [&sides, &grad, &sizes])
}
