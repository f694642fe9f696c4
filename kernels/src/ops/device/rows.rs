//! Row-wise operations on matrices `[N, D]`: norms, residual additions, sums over rows.

use tch::{Kind, Tensor};

use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::ops::call::Call;
use crate::ops::operands::BandSum;
use crate::ops::{BandSums, NormBack, ParamGradient, ResidualGrads, ResidualScaling, check};

/// Rows per partial sum in f32, and columns of a block.
const BAND: i64 = 32;
const COLUMNS: i64 = 256;

/// Number of blocks if each has 16 rows of 16 lanes.
pub(super) fn lanes(rows: i64) -> i64 {
    rows.div_euclid(16) + i64::from(rows % 16 > 0)
}

pub(super) fn bands(rows: i64) -> i64 {
    (rows + BAND - 1) / BAND
}

/// Memory for sums over bands of rows, `[stack, bands, width]`, and the number of blocks if a thread has a column of a
/// band.
pub(super) fn banded(queue: &Queue, [stack, rows, width]: [i64; 3]) -> Result<(Tensor, i64)> {
    let partial = queue.room(&[stack, bands(rows), width], Kind::Float)?;
    Ok((partial, tiles(width) * bands(rows)))
}

pub(super) fn tiles(width: i64) -> i64 {
    (width + COLUMNS - 1) / COLUMNS
}

/// The sums `which` of a stack from [`banded`], with interleaved columns, as a gradient of this shape.
pub(super) fn of_bands(partial: &Tensor, which: &[i64], shape: &[i64]) -> Result<ParamGradient> {
    let bands =
        |which: &i64| Ok(BandSum { partial: partial.f_get(*which)?, other: None, factor: None });
    let sums = which.iter().map(bands).collect::<Result<_>>()?;
    Ok(ParamGradient::Banded(BandSums { sums, shape: shape.to_vec() }))
}

/// One of the sums, times the factor, or plus the factor times another one.
fn scaled(
    partial: &Tensor,
    which: i64,
    other: Option<i64>,
    factor: &Tensor,
) -> Result<ParamGradient> {
    let other = other.map(|other| partial.f_get(other)).transpose()?;
    let (factor, shape) = (Some(factor.shallow_clone()), factor.size());
    let sums = vec![BandSum { partial: partial.f_get(which)?, other, factor }];
    Ok(ParamGradient::Banded(BandSums { sums, shape }))
}

/// The sum over the rows of a matrix, f32, times the factor: `[width]`.
pub(super) fn columns(queue: &Queue, x: &Tensor, factor: &Tensor) -> Result<ParamGradient> {
    let [rows, width] = [x.size()[0], x.size()[1]];
    let (partial, blocks) = banded(queue, [1, rows, width])?;
    let arguments = [x.into(), (&partial).into(), rows.into(), width.into()];
    queue.launch(c"column_sums", blocks, &arguments)?;
    scaled(&partial, 0, None, factor)
}

/// The same for the elementwise product of two matrices.
pub(super) fn products(queue: &Queue, x: &Tensor, y: &Tensor) -> Result<ParamGradient> {
    let [rows, width] = [x.size()[0], x.size()[1]];
    let (partial, blocks) = banded(queue, [1, rows, width])?;
    let arguments = [x.into(), y.into(), (&partial).into(), rows.into(), width.into()];
    queue.launch(c"column_products", blocks, &arguments)?;
    of_bands(&partial, &[0], &[width])
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

/// From the gradient of the result, and the gradient that bypassed the norm.
pub(super) fn rms_norm_backward(
    queue: &Queue,
    x: &Tensor,
    factors: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    beside: Option<&Tensor>,
) -> Result<(Tensor, ParamGradient)> {
    let [rows, width] = check::rms_norm_backward(x, factors, weight, grad)?;
    if let Some(beside) = beside {
        Call("rms_norm_backward").f32("beside", beside, &[rows, width])?;
    }
    let input = queue.room(&[rows, width], Kind::Float)?;
    let (partial, _) = banded(queue, [1, rows, width])?;
    let beside = beside.map_or(Argument::Nothing, Argument::from);
    let memory = [x, factors, weight, grad].map(Argument::from);
    let rest = [beside, (&input).into(), (&partial).into(), rows.into(), width.into()];
    let kernel = by_kind(grad, [c"rms_norm_backward_f32", c"rms_norm_backward_bf16"]);
    queue.launch(kernel, bands(rows), &[&memory[..], &rest].concat())?;
    Ok((input, of_bands(&partial, &[0], &[width])?))
}

pub(super) fn residual(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
) -> Result<Tensor> {
    let [rows, width] = check::residual(branch, residual, by)?;
    let out = queue.room(&[rows, width], Kind::Float)?;
    let kernel = by_kind(branch, [c"residual_sum_f32", c"residual_sum_bf16"]);
    let memory = [branch, residual, by.scale, by.bias, by.residual_scale, by.residual_bias, &out];
    let sizes = [rows, width].map(Argument::from);
    queue.launch(kernel, lanes(rows), &[&memory.map(Argument::from)[..], &sizes].concat())?;
    Ok(out)
}

pub(super) fn residual_norm(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    weight: &Tensor,
    eps: f64,
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
    by: ResidualScaling,
    grad: &Tensor,
) -> Result<ResidualGrads> {
    let [rows, width] = check::residual_backward(branch, residual, by, grad)?;
    let to_branch = queue.room(&[rows, width], branch.kind())?;
    let to_residual = queue.room(&[rows, width], Kind::Float)?;
    let kernel = by_kind(branch, [c"residual_backward_f32", c"residual_backward_bf16"]);
    let (partial, _) = banded(queue, [3, rows, width])?;
    let scales = [by.scale, by.residual_scale, &to_branch, &to_residual, &partial];
    let memory = [[branch, residual, grad].as_slice(), &scales].concat();
    let memory: Vec<_> = memory.into_iter().map(Argument::from).collect();
    let sizes = [rows, width].map(Argument::from);
    queue.launch(kernel, bands(rows), &[&memory[..], &sizes].concat())?;
    let scaling = by.of_bands(&partial)?;
    Ok(ResidualGrads { branch: to_branch, residual: to_residual, scaling })
}

impl ResidualScaling<'_> {
    /// The gradients of the vectors, from the sums over bands of the gradient, of the gradient times the branch, and of
    /// the gradient times the residual.
    fn of_bands(self, partial: &Tensor) -> Result<[ParamGradient; 4]> {
        Ok([
            scaled(partial, 1, Some(0), self.bias)?,
            scaled(partial, 0, None, self.scale)?,
            scaled(partial, 2, Some(0), self.residual_bias)?,
            scaled(partial, 0, None, self.residual_scale)?,
        ])
    }
}

/// Does not read the norm's input: recomputes it from branch and residual.
pub(super) fn residual_norm_backward(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
) -> Result<(ResidualGrads, ParamGradient)> {
    let [rows, width] = check::residual_norm_backward(branch, residual, by, norm)?;
    let to_branch = queue.room(&[rows, width], branch.kind())?;
    let to_residual = queue.room(&[rows, width], Kind::Float)?;
    let kernel = by_kind(branch, [c"residual_norm_backward_f32", c"residual_norm_backward_bf16"]);
    let [of_norm, partial] = [1, 3].map(|stack| banded(queue, [stack, rows, width]));
    let ((of_norm, _), (partial, _)) = (of_norm?, partial?);
    let scaling = [by.scale, by.bias, by.residual_scale, by.residual_bias];
    let from =
        [&[branch, residual][..], &scaling, &[norm.factors, norm.weight, norm.grad]].concat();
    let from: Vec<_> = from.into_iter().map(Argument::from).collect();
    let beside = [norm.beside.map_or(Argument::Nothing, Argument::from)];
    let into = [&to_branch, &to_residual, &of_norm, &partial].map(Argument::from);
    let sizes = [rows, width].map(Argument::from);
    queue.launch(kernel, bands(rows), &[&from[..], &beside, &into, &sizes].concat())?;
    let (to_weight, scaling) = (of_bands(&of_norm, &[0], &[width])?, by.of_bands(&partial)?);
    Ok((ResidualGrads { branch: to_branch, residual: to_residual, scaling }, to_weight))
}
