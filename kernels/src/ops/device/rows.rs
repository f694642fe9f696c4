//! Row by row over matrices `[N, D]`: norms, residual additions, sums over rows.

use tch::{Kind, Tensor};

use super::{Argument, Queue, by_kind, each};
use crate::Result;
use crate::ops::{NormBack, ResidualGrads, Scaling, check};

/// Rows whose part of a sum over rows is kept in f32, and columns of a block.
const BAND: i64 = 32;
const COLUMNS: i64 = 256;

/// Rows of which a block has 16 lanes each.
pub(super) fn lanes(rows: i64) -> i64 {
    rows.div_euclid(16) + i64::from(rows % 16 > 0)
}

fn bands(rows: i64) -> i64 {
    (rows + BAND - 1) / BAND
}

/// Sums over the rows of each matrix of a stack, `[stack, width]`: `launch` makes those of bands of rows, into the memory and
/// with so many blocks for one matrix.
pub(super) fn banded(
    queue: &Queue,
    [stack, rows, width]: [i64; 3],
    launch: impl FnOnce(&Tensor, i64) -> Result<()>,
) -> Result<Tensor> {
    let (bands, tiles) = (bands(rows), (width + COLUMNS - 1) / COLUMNS);
    let partial = queue.room(&[stack, bands, width], Kind::Float)?;
    let out = queue.room(&[stack, width], Kind::Float)?;
    launch(&partial, tiles * bands)?;
    let arguments = [(&partial).into(), (&out).into(), bands.into(), width.into()];
    queue.launch(c"band_sums", stack * tiles, &arguments)?;
    Ok(out)
}

/// The sum over the rows of each matrix of a stack, `[stack, rows, width]` f32: `[stack, width]`.
pub(super) fn sums(queue: &Queue, x: &Tensor, shape: [i64; 3]) -> Result<Tensor> {
    let [stack, rows, width] = shape;
    banded(queue, shape, |partial, blocks| {
        let arguments = [x.into(), partial.into(), rows.into(), width.into()];
        queue.launch(c"column_sums", stack * blocks, &arguments)
    })
}

/// The same of the products of two matrices, `[width]`.
pub(super) fn products(queue: &Queue, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let [rows, width] = [x.size()[0], x.size()[1]];
    let sums = banded(queue, [1, rows, width], |partial, blocks| {
        let arguments = [x.into(), y.into(), partial.into(), rows.into(), width.into()];
        queue.launch(c"column_products", blocks, &arguments)
    });
    Ok(sums?.f_view([width])?)
}

pub(super) fn rms_norm(
    queue: &Queue,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let [rows, width] = check::rms_norm(x, weight)?;
    let out = queue.room(&[rows, width], Kind::Float)?;
    let factors = queue.room(&[rows, 1], Kind::Float)?;
    let memory = [x, weight, &out, &factors].map(Argument::from);
    let sizes = [rows.into(), width.into(), (eps as f32).into()];
    queue.launch(c"rms_norm_f32", lanes(rows), &[&memory[..], &sizes].concat())?;
    Ok((out, factors))
}

/// From the gradient of the outcome, and what came past the norm.
pub(super) fn rms_norm_backward(
    queue: &Queue,
    x: &Tensor,
    factors: &Tensor,
    weight: &Tensor,
    (grad, beside): (&Tensor, Option<&Tensor>),
) -> Result<(Tensor, Tensor)> {
    let [rows, width] = check::rms_norm_backward(x, factors, weight, grad)?;
    if let Some(beside) = beside {
        check::Call("rms_norm_backward").f32("beside", beside, &[rows, width])?;
    }
    let input = queue.room(&[rows, width], Kind::Float)?;
    let to_weight = banded(queue, [1, rows, width], |partial, _| {
        let beside = beside.map_or(Argument::Nothing, Argument::from);
        let memory = [x, factors, weight, grad].map(Argument::from);
        let rest = [beside, (&input).into(), partial.into(), rows.into(), width.into()];
        queue.launch(c"rms_norm_backward", bands(rows), &[&memory[..], &rest].concat())
    });
    Ok((input, to_weight?.f_view([width])?))
}

pub(super) fn residual(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: Scaling,
) -> Result<Tensor> {
    let [rows, width] = check::residual(branch, residual, by)?;
    let out = queue.room(&[rows, width], Kind::Float)?;
    let kernel = by_kind(branch, [c"residual_sum_f32", c"residual_sum_bf16"]);
    let memory = [branch, residual, by.scale, by.bias, by.residual_scale, by.residual_bias, &out];
    each(queue, kernel, [rows, width], &memory.map(Argument::from))?;
    Ok(out)
}

pub(super) fn residual_norm(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: Scaling,
    (weight, eps): (&Tensor, f64),
) -> Result<[Tensor; 3]> {
    let [rows, width] = check::residual(branch, residual, by)?;
    check::rms_norm(residual, weight)?;
    let sum = queue.room(&[rows, width], Kind::Float)?;
    let out = queue.room(&[rows, width], branch.kind())?;
    let factors = queue.room(&[rows, 1], Kind::Float)?;
    let kernel = by_kind(branch, [c"residual_norm_f32", c"residual_norm_bf16"]);
    let vectors = [by.scale, by.bias, by.residual_scale, by.residual_bias, weight];
    let memory = [&[branch, residual][..], &vectors, &[&sum, &out, &factors]].concat();
    let memory: Vec<_> = memory.into_iter().map(Argument::from).collect();
    let sizes = [rows.into(), width.into(), (eps as f32).into()];
    queue.launch(kernel, lanes(rows), &[&memory[..], &sizes].concat())?;
    Ok([sum, out, factors])
}

pub(super) fn residual_backward(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: Scaling,
    grad: &Tensor,
) -> Result<ResidualGrads> {
    let [rows, width] = check::residual_backward(branch, residual, by, grad)?;
    let [to_branch, to_residual] = [(); 2].map(|()| queue.room(&[rows, width], Kind::Float));
    let (to_branch, to_residual) = (to_branch?, to_residual?);
    let kernel = by_kind(branch, [c"residual_backward_f32", c"residual_backward_bf16"]);
    let (bands, tiles) = (bands(rows), (width + COLUMNS - 1) / COLUMNS);
    let partial = queue.room(&[3, bands, width], Kind::Float)?;
    let scales = [by.scale, by.residual_scale, &to_branch, &to_residual, &partial];
    let memory = [[branch, residual, grad].as_slice(), &scales].concat();
    let memory: Vec<_> = memory.into_iter().map(Argument::from).collect();
    let sizes = [rows, width].map(Argument::from);
    queue.launch(kernel, tiles * bands, &[&memory[..], &sizes].concat())?;
    let scaling = scaling(queue, &partial, by)?;
    Ok(ResidualGrads { branch: to_branch, residual: to_residual, scaling })
}

/// The gradients of the vectors, from sums over bands of rows, `[3, bands, width]`.
fn scaling(queue: &Queue, partial: &Tensor, by: Scaling) -> Result<[Tensor; 4]> {
    let [bands, width] = [partial.size()[1], partial.size()[2]];
    let vectors = queue.room(&[4, width], Kind::Float)?;
    let memory = [partial, by.scale, by.bias, by.residual_scale, by.residual_bias, &vectors];
    let arguments = [&memory.map(Argument::from)[..], &[bands.into(), width.into()]].concat();
    queue.launch(c"residual_vectors", (width + COLUMNS - 1) / COLUMNS, &arguments)?;
    Ok([vectors.f_get(0)?, vectors.f_get(1)?, vectors.f_get(2)?, vectors.f_get(3)?])
}

pub(super) fn residual_norm_backward(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: Scaling,
    norm: NormBack,
) -> Result<(ResidualGrads, Tensor)> {
    let [rows, width] = check::residual_norm_backward(branch, residual, by, norm)?;
    let [to_branch, to_residual] = [(); 2].map(|()| queue.room(&[rows, width], Kind::Float));
    let (to_branch, to_residual) = (to_branch?, to_residual?);
    let kernel = by_kind(branch, [c"residual_norm_backward_f32", c"residual_norm_backward_bf16"]);
    let partial = queue.room(&[3, bands(rows), width], Kind::Float)?;
    let to_weight = banded(queue, [1, rows, width], |of_norm, _| {
        let back = [norm.x, norm.factors, norm.weight, norm.grad].map(Argument::from);
        let beside = [norm.beside.map_or(Argument::Nothing, Argument::from)];
        let from = [branch, residual, by.scale, by.residual_scale].map(Argument::from);
        let into = [&to_branch, &to_residual, of_norm, &partial].map(Argument::from);
        let sizes = [rows, width].map(Argument::from);
        queue.launch(kernel, bands(rows), &[&back[..], &beside, &from, &into, &sizes].concat())
    });
    let (to_weight, scaling) = (to_weight?.f_view([width])?, scaling(queue, &partial, by)?);
    Ok((ResidualGrads { branch: to_branch, residual: to_residual, scaling }, to_weight))
}
