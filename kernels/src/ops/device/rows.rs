//! Row-wise operations on matrices `[N, D]`: norms, residual additions, sums over rows.

use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::ops::call::Call;
use crate::ops::operands::BandSum;
use crate::ops::{BandSums, NormBack, ParamGradient, ResidualGrads, ResidualScaling, check};

/// Rows per partial sum in f32, and columns of a block.
pub(super) const BAND: i64 = 32;
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
pub(super) fn of_bands(partial: &Tensor, which: &[i64], shape: &[i64]) -> ParamGradient {
    let bands = |which: &i64| {
        let partial = partial.shallow_clone();
        BandSum { partial, which: *which, other: None, factor: None }
    };
    let sums = which.iter().map(bands).collect();
    ParamGradient::Banded(BandSums { sums, shape: shape.to_vec() })
}

/// One of the sums, times the factor, or plus the factor times another one.
fn scaled(partial: &Tensor, which: i64, other: Option<i64>, factor: &Tensor) -> ParamGradient {
    let (factor, shape) = (Some(factor.shallow_clone()), factor.size());
    let sums = vec![BandSum { partial: partial.shallow_clone(), which, other, factor }];
    ParamGradient::Banded(BandSums { sums, shape })
}

/// The sum over the rows of a matrix, f32, times the factor: `[width]`.
pub(super) fn columns(queue: &Queue, x: &Tensor, factor: &Tensor) -> Result<ParamGradient> {
    let [rows, width] = Call("column_sums").matrix("x", x)?;
    let (partial, blocks) = banded(queue, [1, rows, width])?;
    let arguments = [x.into(), (&partial).into(), rows.into(), width.into()];
    queue.launch(c"column_sums", blocks, &arguments)?;
    Ok(scaled(&partial, 0, None, factor))
}

/// The same for the elementwise product of two matrices.
pub(super) fn products(queue: &Queue, x: &Tensor, y: &Tensor) -> Result<ParamGradient> {
    let [rows, width] = Call("column_products").matrix("x", x)?;
    let (partial, blocks) = banded(queue, [1, rows, width])?;
    let arguments = [x.into(), y.into(), (&partial).into(), rows.into(), width.into()];
    queue.launch(c"column_products", blocks, &arguments)?;
    Ok(of_bands(&partial, &[0], &[width]))
}

pub(super) fn rms_norm(
    queue: &Queue,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    kind: Kind,
) -> Result<(Tensor, Tensor)> {
    let [rows, width] = check::rms_norm(x, weight)?;
    let out = queue.room(&[rows, width], kind)?;
    let factors = queue.room(&[rows, 1], Kind::Float)?;
    let memory = [x, weight, &out, &factors].map(Argument::from);
    let sizes = [rows.into(), width.into(), (eps as f32).into()];
    let kernel = by_kind(&out, [c"rms_norm_f32", c"rms_norm_bf16"]);
    queue.launch(kernel, lanes(rows), &[&memory[..], &sizes].concat())?;
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
    Ok((input, of_bands(&partial, &[0], &[width])))
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
    let scaling = by.of_bands(&partial);
    Ok(ResidualGrads { branch: to_branch, gates: None, residual: to_residual, scaling })
}

impl ResidualScaling<'_> {
    /// The gradients of the vectors, from the sums over bands of the gradient, of the gradient times the branch, and of
    /// the gradient times the residual.
    fn of_bands(self, partial: &Tensor) -> [ParamGradient; 4] {
        [
            scaled(partial, 1, Some(0), self.bias),
            scaled(partial, 0, None, self.scale),
            scaled(partial, 2, Some(0), self.residual_bias),
            scaled(partial, 0, None, self.residual_scale),
        ]
    }
}

/// Operands of a backward pass through an addition and its norm, and memory for the gradient of the branch.
pub(super) struct NormWay<'a> {
    pub(super) by: ResidualScaling<'a>,
    pub(super) norm: NormBack<'a>,
    pub(super) to_branch: Tensor,
}

impl NormWay<'_> {
    /// Launches a kernel whose arguments are `sides`, the vectors, `grad`, the gradient that bypassed the norm, the
    /// results, and `rest`. It does not read the norm's input, but recomputes it from branch and residual.
    pub(super) fn back(
        self,
        queue: &Queue,
        kernel: &CStr,
        [rows, width]: [i64; 2],
        [sides, grad, rest]: [&[Argument]; 3],
    ) -> Result<(ResidualGrads, ParamGradient)> {
        let NormWay { by, norm, to_branch } = self;
        let to_residual = queue.room(&[rows, width], Kind::Float)?;
        let [of_norm, partial] = [1, 3].map(|stack| banded(queue, [stack, rows, width]));
        let ((of_norm, _), (partial, _)) = (of_norm?, partial?);
        let vectors = [by.scale, by.bias, by.residual_scale, by.residual_bias];
        let vectors = [&vectors[..], &[norm.factors, norm.weight]].concat();
        let vectors: Vec<_> = vectors.into_iter().map(Argument::from).collect();
        let beside = [norm.beside.map_or(Argument::Nothing, Argument::from)];
        let into = [&to_branch, &to_residual, &of_norm, &partial].map(Argument::from);
        let arguments = [sides, &vectors, grad, &beside, &into, rest].concat();
        queue.launch(kernel, bands(rows), &arguments)?;
        let (to_weight, scaling) = (of_bands(&of_norm, &[0], &[width]), by.of_bands(&partial));
        let residual = to_residual;
        Ok((ResidualGrads { branch: to_branch, gates: None, residual, scaling }, to_weight))
    }
}

pub(super) fn residual_norm_backward(
    queue: &Queue,
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    grad: &Tensor,
) -> Result<(ResidualGrads, ParamGradient)> {
    let shape = check::residual_norm_backward(branch, residual, by, norm, grad)?;
    let kernel = by_kind(branch, [c"residual_norm_backward_f32", c"residual_norm_backward_bf16"]);
    let (sides, sizes) = ([branch, residual].map(Argument::from), shape.map(Argument::from));
    let way = NormWay { by, norm, to_branch: queue.room(&shape, branch.kind())? };
    way.back(queue, kernel, shape, [&sides, &[grad.into()], &sizes])
}
