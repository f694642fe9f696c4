//! Row-wise operations on matrices `[N, D]`: RMS norm, and a residual addition with scales and biases.

use tch::{Kind, Tensor};

use super::{PARTS, empty, read, simd, to_f32, together, write};
use crate::Result;
use crate::ops::{NormBack, ParamGradient, ResidualGrads, ResidualScaling, check};

/// Number of rows whose sums over columns are kept in f32 before they are added to f64.
const BLOCK: usize = 32;

pub(super) fn rms_norm(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    kind: Kind,
) -> Result<(Tensor, Tensor)> {
    let [rows, width] = check::rms_norm(x, weight)?;
    let (mut out, mut factors) = (empty(&[rows, width])?, empty(&[rows, 1])?);
    let size = (eps as f32, width as usize);
    norm_rows(read(x)?, read(weight)?, size, write(&mut out)?, write(&mut factors)?);
    Ok((out.f_to_kind(kind)?, factors))
}

simd! {
    fn norm_rows(x: &[f32], weight: &[f32], size: (f32, usize), out: &mut [f32], factors: &mut [f32]) {
        let (eps, width) = size;
        let rows = x.chunks_exact(width).zip(out.chunks_exact_mut(width)).zip(factors);
        for ((x, out), factor) in rows {
            let square = dot(x, x, |a, b| a * b);
            *factor = 1.0 / (square / width as f32 + eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = *x * *factor * *weight;
            }
        }
    }
}

pub(super) fn rms_norm_backward(
    x: &Tensor,
    factors: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, ParamGradient)> {
    let [rows, width] = check::rms_norm_backward(x, factors, weight, grad)?;
    let (mut input, mut columns) = (empty(&[rows, width])?, Columns::<1>::new(width as usize));
    let saved = (read(x)?, read(factors)?);
    let grad = to_f32(grad)?;
    norm_rows_back(saved, read(weight)?, read(&grad)?, write(&mut input)?, &mut columns);
    let [weight] = columns.finish();
    Ok((input, ParamGradient::Made(weight)))
}

simd! {
    fn norm_rows_back(
        saved: (&[f32], &[f32]),
        weight: &[f32],
        grad: &[f32],
        input: &mut [f32],
        columns: &mut Columns<1>,
    ) {
        let (x, factors) = saved;
        let width = weight.len();
        let rows = x.chunks_exact(width).zip(grad.chunks_exact(width)).zip(input.chunks_exact_mut(width));
        for (((x, grad), input), factor) in rows.zip(factors) {
            let mut parts = [0f32; PARTS];
            let [sums] = columns.next_row();
            let ((xs, x_rest), (grads, grad_rest)) = (x.as_chunks::<PARTS>(), grad.as_chunks::<PARTS>());
            let ((weights, weight_rest), (sums, sum_rest)) = (weight.as_chunks::<PARTS>(), sums.as_chunks_mut::<PARTS>());
            for ((x, grad), (weight, sum)) in xs.iter().zip(grads).zip(weights.iter().zip(sums)) {
                for place in 0..PARTS {
                    let product = grad[place] * (x[place] * *factor);
                    sum[place] += product;
                    parts[place] += product * weight[place];
                }
            }
            for (place, ((x, grad), (weight, sum))) in
                x_rest.iter().zip(grad_rest).zip(weight_rest.iter().zip(sum_rest)).enumerate()
            {
                let product = *grad * (*x * *factor);
                *sum += product;
                parts[place] += product * *weight;
            }
            let along = together(parts) / -(width as f32);
            for (((input, x), grad), weight) in input.iter_mut().zip(x).zip(grad).zip(weight) {
                *input = (*grad * *weight + *x * *factor * along) * *factor;
            }
        }
    }
}

pub(super) fn residual(branch: &Tensor, residual: &Tensor, by: ResidualScaling) -> Result<Tensor> {
    let shape = check::residual(branch, residual, by)?;
    let (branch, mut out) = (to_f32(branch)?, empty(&shape)?);
    residual_rows(read(&branch)?, read(residual)?, vectors(by)?, write(&mut out)?);
    Ok(out)
}

fn vectors(by: ResidualScaling<'_>) -> Result<[&[f32]; 4]> {
    Ok([read(by.scale)?, read(by.bias)?, read(by.residual_scale)?, read(by.residual_bias)?])
}

simd! {
    fn residual_rows(branch: &[f32], stream: &[f32], by: [&[f32]; 4], out: &mut [f32]) {
        let [scale, bias, stream_scale, stream_bias] = by;
        let width = scale.len();
        let rows = branch.chunks_exact(width).zip(stream.chunks_exact(width)).zip(out.chunks_exact_mut(width));
        for ((branch, stream), out) in rows {
            let one = branch.iter().zip(bias).zip(scale);
            let other = stream.iter().zip(stream_bias).zip(stream_scale);
            for ((out, ((x, bias), scale)), ((y, stream_bias), stream_scale)) in out.iter_mut().zip(one).zip(other) {
                *out = (*x + *bias) * *scale + (*y + *stream_bias) * *stream_scale;
            }
        }
    }
}

pub(super) fn residual_backward(
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    grad: &Tensor,
) -> Result<ResidualGrads> {
    let shape = check::residual_backward(branch, residual, by, grad)?;
    let (kind, branch) = (branch.kind(), to_f32(branch)?);
    let (mut to_branch, mut to_residual) = (empty(&shape)?, empty(&shape)?);
    let mut columns = Columns::<3>::new(shape[1] as usize);
    residual_rows_back(
        [read(&branch)?, read(residual)?, read(grad)?],
        [read(by.scale)?, read(by.residual_scale)?],
        [write(&mut to_branch)?, write(&mut to_residual)?],
        &mut columns,
    );
    let [all, of_branch, of_residual] = columns.finish();
    let scaling = by.gradients(&all, &of_branch, &of_residual)?;
    Ok(ResidualGrads {
        branch: to_branch.f_to_kind(kind)?,
        gates: None,
        residual: to_residual,
        scaling,
    })
}

simd! {
    fn residual_rows_back(
        from: [&[f32]; 3],
        scales: [&[f32]; 2],
        into: [&mut [f32]; 2],
        columns: &mut Columns<3>,
    ) {
        let ([branch, stream, grad], [scale, stream_scale], [to_branch, to_stream]) = (from, scales, into);
        let width = scale.len();
        let from = branch.chunks_exact(width).zip(stream.chunks_exact(width)).zip(grad.chunks_exact(width));
        let into = to_branch.chunks_exact_mut(width).zip(to_stream.chunks_exact_mut(width));
        for (((branch, stream), grad), (to_branch, to_stream)) in from.zip(into) {
            let [all, branches, streams] = columns.next_row();
            for (place, grad) in grad.iter().enumerate() {
                all[place] += *grad;
                branches[place] += *grad * branch[place];
                streams[place] += *grad * stream[place];
                to_branch[place] = *grad * scale[place];
                to_stream[place] = *grad * stream_scale[place];
            }
        }
    }
}

/// A few rows at a time pass through both backward steps, so that the gradient between them stays in cache.
pub(super) fn residual_norm_backward(
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    grad: &Tensor,
) -> Result<(ResidualGrads, ParamGradient)> {
    let [rows, width] = check::residual_norm_backward(branch, residual, by, norm, grad)?;
    let (kind, branch, width) = (branch.kind(), to_f32(branch)?, width as usize);
    let (mut to_branch, mut to_residual) = (empty(&residual.size())?, empty(&residual.size())?);
    let (mut of_norm, mut columns) = (Columns::<1>::new(width), Columns::<3>::new(width));
    let grad = to_f32(grad)?;
    let (x, factors, grad) = (read(norm.x)?, read(norm.factors)?, read(&grad)?);
    let (weight, beside) = (read(norm.weight)?, norm.beside.map(read).transpose()?);
    let (branch, stream) = (read(&branch)?, read(residual)?);
    let scales = [read(by.scale)?, read(by.residual_scale)?];
    let (into_branch, into_stream) = (write(&mut to_branch)?, write(&mut to_residual)?);
    let mut sum = vec![0f32; BLOCK * width];
    for first in (0..rows as usize).step_by(BLOCK) {
        let end = (rows as usize).min(first + BLOCK);
        let band = first * width..end * width;
        let sum = &mut sum[..band.len()];
        let saved = (&x[band.clone()], &factors[first..end]);
        norm_rows_back(saved, weight, &grad[band.clone()], sum, &mut of_norm);
        if let Some(beside) = beside {
            sum.iter_mut().zip(&beside[band.clone()]).for_each(|(sum, beside)| *sum += *beside);
        }
        let into = [&mut into_branch[band.clone()], &mut into_stream[band.clone()]];
        residual_rows_back([&branch[band.clone()], &stream[band], sum], scales, into, &mut columns);
    }
    let ([weight], [all, of_branch, of_residual]) = (of_norm.finish(), columns.finish());
    let scaling = by.gradients(&all, &of_branch, &of_residual)?;
    let to_branch = to_branch.f_to_kind(kind)?;
    let grads = ResidualGrads { branch: to_branch, gates: None, residual: to_residual, scaling };
    Ok((grads, ParamGradient::Made(weight)))
}

/// Sums over the rows of a matrix, one vector each: in f32 over a few rows, in f64 over those sums.
pub(super) struct Columns<const K: usize> {
    block: [Vec<f32>; K],
    total: [Vec<f64>; K],
    rows: usize,
}

impl<const K: usize> Columns<K> {
    pub(super) fn new(width: usize) -> Self {
        let (block, total) =
            (std::array::from_fn(|_| vec![0.0; width]), std::array::from_fn(|_| vec![0.0; width]));
        Columns { block, total, rows: 0 }
    }

    /// The vectors to which the next row is added.
    #[inline(always)]
    pub(super) fn next_row(&mut self) -> [&mut [f32]; K] {
        if self.rows == BLOCK {
            self.flush();
        }
        self.rows += 1;
        self.block.each_mut().map(Vec::as_mut_slice)
    }

    #[inline(always)]
    fn flush(&mut self) {
        for (total, block) in self.total.iter_mut().zip(&mut self.block) {
            for (total, block) in total.iter_mut().zip(block) {
                *total += f64::from(*block);
                *block = 0.0;
            }
        }
        self.rows = 0;
    }

    pub(super) fn finish(mut self) -> [Tensor; K] {
        self.flush();
        self.total.map(|total| {
            Tensor::from_slice(&total.iter().map(|sum| *sum as f32).collect::<Vec<_>>())
        })
    }
}

/// The sum of `of` over two rows, in f32 and in partial sums.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut parts = [0f32; PARTS];
    let ((a, rest_a), (b, rest_b)) = (a.as_chunks::<PARTS>(), b.as_chunks::<PARTS>());
    for (a, b) in a.iter().zip(b) {
        for ((part, a), b) in parts.iter_mut().zip(a).zip(b) {
            *part += of(*a, *b);
        }
    }
    for ((part, a), b) in parts.iter_mut().zip(rest_a).zip(rest_b) {
        *part += of(*a, *b);
    }
    together(parts)
}
