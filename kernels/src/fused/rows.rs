//! Row by row over matrices `[N, D]`: root mean square norm, and a residual addition with scales and biases.

use tch::Tensor;

use super::{PARTS, empty, read, together, wide, write};

/// Rows whose part of a sum over columns is kept in f32 before it is added to an f64.
const BLOCK: usize = 32;

/// `x * rsqrt(mean(x^2) + eps) * weight` of each row, and the factors `[N, 1]`.
///
/// In operators: `f = (x.square().mean(-1) + eps).rsqrt(); x * f * weight`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> (Tensor, Tensor) {
    fit(&[x], &[weight]);
    let [rows, width] = sizes(x);
    let (mut out, mut factors) = (empty(&[rows, width]), empty(&[rows, 1]));
    norm_rows(
        read(x),
        read(weight),
        (eps as f32, width as usize),
        write(&mut out),
        write(&mut factors),
    );
    (out, factors)
}

wide! {
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

/// Back through [`rms_norm`], from the gradient of its outcome: that of `x`, and that of `weight`.
///
/// In operators: `u = x * f; p = grad * u; (grad * weight - u * p.mv(weight) / D) * f` and `p.sum(0)`.
pub fn rms_norm_backward(
    x: &Tensor,
    factors: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> (Tensor, Tensor) {
    fit(&[x, grad], &[weight]);
    let [rows, width] = sizes(x);
    assert_eq!(factors.numel() as i64, rows, "a factor for each row");
    let mut input = empty(&x.size());
    let mut columns = Columns::<1>::new(width as usize);
    norm_rows_back(
        (read(x), read(factors)),
        read(weight),
        read(grad),
        write(&mut input),
        &mut columns,
    );
    let [weight] = columns.finish();
    (input, weight)
}

wide! {
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

/// Vectors of `[D]` by which a residual addition scales and shifts both of its sides.
#[derive(Clone, Copy)]
pub struct Scaled<'a> {
    /// Of the branch.
    pub scale: &'a Tensor,
    /// Added to the branch first.
    pub bias: &'a Tensor,
    /// Of the stream.
    pub stream_scale: &'a Tensor,
    /// Added to the stream first.
    pub stream_bias: &'a Tensor,
}

/// `(branch + bias) * scale + (stream + stream_bias) * stream_scale`, as these operators.
pub fn residual(branch: &Tensor, stream: &Tensor, by: Scaled) -> Tensor {
    fit(&[branch, stream], &[by.scale, by.bias, by.stream_scale, by.stream_bias]);
    let mut out = empty(&stream.size());
    let vectors = [by.scale, by.bias, by.stream_scale, by.stream_bias].map(read);
    residual_rows(read(branch), read(stream), vectors, write(&mut out));
    out
}

wide! {
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

/// Back through [`residual`]: the gradients of the branch and of the stream, and the sums over rows of the gradient, of
/// the gradient times the branch, and of the gradient times the stream.
///
/// In operators: `grad * scale`, `grad * stream_scale`, `grad.sum(0)`, `(grad * branch).sum(0)`, `(grad * stream).sum(0)`.
pub fn residual_backward(
    branch: &Tensor,
    stream: &Tensor,
    (scale, stream_scale): (&Tensor, &Tensor),
    grad: &Tensor,
) -> (Tensor, Tensor, [Tensor; 3]) {
    fit(&[branch, stream, grad], &[scale, stream_scale]);
    let [_, width] = sizes(stream);
    let (mut to_branch, mut to_stream) = (empty(&stream.size()), empty(&stream.size()));
    let mut columns = Columns::<3>::new(width as usize);
    residual_rows_back(
        [branch, stream, grad].map(read),
        [scale, stream_scale].map(read),
        [write(&mut to_branch), write(&mut to_stream)],
        &mut columns,
    );
    (to_branch, to_stream, columns.finish())
}

wide! {
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

/// Sums over the rows of a matrix, a vector each: in f32 over a few rows, in f64 over those.
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

    /// What the next row is added to.
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

/// The sum of `of` over two rows, in f32 and in parts.
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

/// A number of each vector belongs to each column of a matrix, and matrices that meet have one shape.
fn fit(matrices: &[&Tensor], vectors: &[&Tensor]) {
    let [_, width] = sizes(matrices[0]);
    let same = matrices.iter().all(|matrix| matrix.size() == matrices[0].size());
    assert!(
        same && vectors.iter().all(|vector| vector.numel() as i64 == width),
        "rows of one width"
    );
}

fn sizes(x: &Tensor) -> [i64; 2] {
    let size = x.size();
    assert_eq!(size.len(), 2, "rows of a matrix");
    [size[0], size[1]]
}
