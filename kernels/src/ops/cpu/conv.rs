//! A depthwise convolution within documents over a token and the previous one, laid out as the input of a second
//! convolution; and values, some of which are shifted by a token.

use tch::Tensor;

use super::norm::Columns;
use super::{empty, integers, read, simd, to_f32, write};
use crate::Result;
use crate::ops::{ConvShift, ConvShiftGrads, ParamGradient, check, composed};

/// Weights of the previous token and of the token: a vector of `[C]` each.
fn by_tap(by: ConvShift) -> Result<[Vec<f32>; 2]> {
    let weights = read(by.weights)?;
    Ok([0, 1].map(|tap| weights.iter().skip(tap).step_by(2).copied().collect()))
}

pub(super) fn conv_shift(z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
    let [rows, columns] = check::conv_shift(z, by)?;
    let [count, width] = by.heads;
    let (wide, mut both) = (to_f32(z)?, empty(&[count, rows, 2 * width])?);
    let [before, now] = by_tap(by)?;
    let vectors = [before.as_slice(), now.as_slice(), read(by.bias)?];
    let sizes = [columns as usize, width as usize];
    forward(read(&wide)?, vectors, integers(by.starts)?, sizes, write(&mut both)?);
    Ok([both.f_to_kind(z.kind())?, composed::shifted(z, by)?])
}

simd! {
    fn forward(z: &[f32], by: [&[f32]; 3], starts: &[i64], sizes: [usize; 2], both: &mut [f32]) {
        let ([before, now, bias], [columns, width]) = (by, sizes);
        let rows = z.len() / columns;
        let mut starts = starts.iter().peekable();
        let (mut c, mut last) = (bias.to_vec(), bias.to_vec());
        for (row, z_now) in z.chunks_exact(columns).enumerate() {
            let begins = starts.next_if(|start| **start == row as i64).is_some();
            std::mem::swap(&mut c, &mut last);
            for (((c, bias), now), z) in c.iter_mut().zip(bias).zip(now).zip(z_now) {
                *c = *bias + *now * *z;
            }
            if begins {
                last.copy_from_slice(bias);
            } else {
                let z_before = &z[(row - 1) * columns..row * columns];
                for ((c, before), z) in c.iter_mut().zip(before).zip(z_before) {
                    *c += *before * *z;
                }
            }
            for (head, (last, c)) in last.chunks_exact(width).zip(c.chunks_exact(width)).enumerate() {
                let both = &mut both[(head * rows + row) * 2 * width..][..2 * width];
                for ((both, last), c) in both.as_chunks_mut::<2>().0.iter_mut().zip(last).zip(c) {
                    *both = [*last, *c];
                }
            }
        }
    }
}

pub(super) fn conv_shift_backward(
    z: &Tensor,
    by: ConvShift,
    [taps, values]: [&Tensor; 2],
    means: &Tensor,
) -> Result<ConvShiftGrads> {
    let [rows, columns] = check::conv_shift_backward(z, by, [taps, values], means)?;
    let (wide, taps, mut input) = (to_f32(z)?, to_f32(taps)?, empty(&[rows, columns])?);
    let [before, now] = by_tap(by)?;
    let mut sums = Columns::<3>::new(now.len());
    let counted = by.counted.map(integers).transpose()?;
    backward(
        (read(&wide)?, columns as usize),
        [before.as_slice(), now.as_slice()],
        (integers(by.starts)?, counted),
        (by.heads[1] as usize, read(&taps)?, read(means)?),
        write(&mut input)?,
        &mut sums,
    );
    let input = input.f_to_kind(z.kind())?;
    composed::shifted_back(values, by, &input)?;
    let [before, now, bias] = sums.finish();
    let weights = ParamGradient::Made(Tensor::f_stack(&[before, now], 1)?.f_unsqueeze(1)?);
    Ok(ConvShiftGrads { input, weights, bias: ParamGradient::Made(bias) })
}

/// Gradients for both taps of every channel, `[G, N, d, 2]`.
#[derive(Clone, Copy)]
struct DepthwiseGrads<'a> {
    grad: &'a [f32],
    rows: usize,
    width: usize,
}

impl<'a> DepthwiseGrads<'a> {
    /// The gradients of a head in a row.
    #[inline(always)]
    fn of(self, head: usize, row: usize) -> &'a [[f32; 2]] {
        let DepthwiseGrads { grad, rows, width } = self;
        grad[(head * rows + row) * 2 * width..][..2 * width].as_chunks().0
    }

    /// The gradient of a row's `c`, from `c_t` of its own row and from `c_{t-1}` of the next one.
    #[inline(always)]
    fn collect(self, c: &mut [f32], row: usize, next_begins: bool) {
        for (head, c) in c.chunks_exact_mut(self.width).enumerate() {
            for (c, [_, own]) in c.iter_mut().zip(self.of(head, row)) {
                *c = *own;
            }
            if !next_begins {
                for (c, [next, _]) in c.iter_mut().zip(self.of(head, row + 1)) {
                    *c += *next;
                }
            }
        }
    }

    /// Adds a row's gradient from `c_{t-1}` to a sum.
    #[inline(always)]
    fn add_before(self, to: &mut [f32], row: usize) {
        for (head, to) in to.chunks_exact_mut(self.width).enumerate() {
            for (to, [before, _]) in to.iter_mut().zip(self.of(head, row)) {
                *to += *before;
            }
        }
    }
}

simd! {
    fn backward(
        z: (&[f32], usize),
        by: [&[f32]; 2],
        rows: (&[i64], Option<&[i64]>),
        grads: (usize, &[f32], &[f32]),
        out: &mut [f32],
        sums: &mut Columns<3>,
    ) {
        let ((z, columns), [before, now], (starts, counted), (width, grad, means)) = (z, by, rows, grads);
        let channels = now.len();
        let rows = z.len() / columns;
        let taps = DepthwiseGrads { grad, rows, width };
        let mut starts = starts.iter().copied().skip(1).chain([rows as i64]).peekable();
        let mut begins = |row: usize| starts.next_if_eq(&(row as i64)).is_some();
        let mut counted = counted.map(|rows| rows.iter().peekable());
        let mut counts = |row: usize| {
            counted.as_mut().is_none_or(|rows| rows.next_if(|next| **next == row as i64).is_some())
        };
        let mut means = means.chunks_exact(channels);
        let (mut c, mut c_next) = (vec![0f32; channels], vec![0f32; channels]);
        let (mut starts_here, mut starts_next) = (true, begins(1));
        taps.collect(&mut c, 0, starts_next);
        for (row, out) in out.chunks_exact_mut(columns).enumerate() {
            let out = &mut out[..channels];
            for ((out, c), now) in out.iter_mut().zip(&c).zip(now) {
                *out = *c * *now;
            }
            let counted = counts(row);
            if counted {
                let [to_before, to_now, to_bias] = sums.next_row();
                let z_now = &z[row * columns..][..channels];
                for place in 0..channels {
                    to_bias[place] += c[place];
                    to_now[place] += c[place] * z_now[place];
                }
                if starts_here {
                    taps.add_before(to_bias, row);
                } else {
                    let z_before = &z[(row - 1) * columns..][..channels];
                    for ((to, c), z) in to_before.iter_mut().zip(&c).zip(z_before) {
                        *to += *c * *z;
                    }
                }
            }
            if row + 1 < rows {
                let after_begins = begins(row + 2);
                taps.collect(&mut c_next, row + 1, after_begins);
                if !starts_next {
                    for ((out, c), before) in out.iter_mut().zip(&c_next).zip(before) {
                        *out += *c * *before;
                    }
                }
                (starts_here, starts_next) = (starts_next, after_begins);
                std::mem::swap(&mut c, &mut c_next);
            }
            if counted {
                for (out, mean) in out.iter_mut().zip(means.next().unwrap_or_default()) {
                    *out += *mean;
                }
            }
        }
    }
}
