//! A depthwise convolution over a token and the one before it, inside documents, and what a second convolution reads of it.

use tch::Tensor;

use super::norm::Columns;
use super::{empty, integers, read, simd, to_f32, write};
use crate::Result;
use crate::ops::{ConvGrads, DepthwiseConv, check};

/// Weights of the token before, and of the token: a vector of `[C]` each.
fn by_tap(by: DepthwiseConv) -> Result<[Vec<f32>; 2]> {
    let weights = read(by.weights)?;
    Ok([0, 1].map(|tap| weights.iter().skip(tap).step_by(2).copied().collect()))
}

pub(super) fn depthwise_conv(z: &Tensor, by: DepthwiseConv) -> Result<Tensor> {
    let [rows, _] = check::depthwise_conv(z, by)?;
    let [count, width] = by.heads;
    let (wide, mut both) = (to_f32(z)?, empty(&[count, rows, 2 * width])?);
    let [before, now] = by_tap(by)?;
    let vectors = [before.as_slice(), now.as_slice(), read(by.bias)?];
    forward(read(&wide)?, vectors, integers(by.starts)?, width as usize, write(&mut both)?);
    Ok(both.f_to_kind(z.kind())?)
}

simd! {
    fn forward(z: &[f32], by: [&[f32]; 3], starts: &[i64], width: usize, both: &mut [f32]) {
        let [before, now, bias] = by;
        let channels = bias.len();
        let rows = z.len() / channels;
        let (mut starts, mut c) = (starts.iter().peekable(), bias.to_vec());
        for (row, z_now) in z.chunks_exact(channels).enumerate() {
            let begins = starts.next_if(|start| **start == row as i64).is_some();
            let last = if begins { bias } else { c.as_slice() };
            for (head, last) in last.chunks_exact(width).enumerate() {
                both[(head * rows + row) * 2 * width..][..width].copy_from_slice(last);
            }
            for (((c, bias), now), z) in c.iter_mut().zip(bias).zip(now).zip(z_now) {
                *c = *bias + *now * *z;
            }
            if !begins {
                let z_before = &z[(row - 1) * channels..row * channels];
                for ((c, before), z) in c.iter_mut().zip(before).zip(z_before) {
                    *c += *before * *z;
                }
            }
            for (head, c) in c.chunks_exact(width).enumerate() {
                both[((head * rows + row) * 2 + 1) * width..][..width].copy_from_slice(c);
            }
        }
    }
}

pub(super) fn depthwise_conv_backward(
    z: &Tensor,
    by: DepthwiseConv,
    grad: &Tensor,
) -> Result<ConvGrads> {
    let [rows, channels] = check::depthwise_conv_backward(z, by, grad)?;
    let (z, grad, mut input) = (to_f32(z)?, to_f32(grad)?, empty(&[rows, channels])?);
    let [before, now] = by_tap(by)?;
    let mut columns = Columns::<3>::new(channels as usize);
    let counted = by.counted.map(integers).transpose()?;
    backward(
        read(&z)?,
        [before.as_slice(), now.as_slice()],
        (integers(by.starts)?, counted),
        (by.heads[1] as usize, read(&grad)?),
        write(&mut input)?,
        &mut columns,
    );
    let [before, now, bias] = columns.finish();
    let weights = Tensor::f_stack(&[before, now], 1)?.f_unsqueeze(1)?;
    Ok(ConvGrads { input, weights, bias })
}

simd! {
    fn backward(
        z: &[f32],
        by: [&[f32]; 2],
        rows: (&[i64], Option<&[i64]>),
        grad: (usize, &[f32]),
        out: &mut [f32],
        columns: &mut Columns<3>,
    ) {
        let ([before, now], (starts, counted), (width, grad)) = (by, rows, grad);
        let channels = now.len();
        let rows = z.len() / channels;
        // What a row's `c` gets from `c_t` of its own row and from `c_{t-1}` of the next one.
        let collect = |c: &mut [f32], row: usize, next_begins: bool| {
            for (head, c) in c.chunks_exact_mut(width).enumerate() {
                let at = (head * rows + row) * 2 * width;
                c.copy_from_slice(&grad[at + width..at + 2 * width]);
                if !next_begins {
                    for (c, grad) in c.iter_mut().zip(&grad[at + 2 * width..at + 3 * width]) {
                        *c += *grad;
                    }
                }
            }
        };
        let mut starts = starts.iter().copied().skip(1).chain([rows as i64]).peekable();
        let mut begins = |row: usize| starts.next_if_eq(&(row as i64)).is_some();
        let mut counted = counted.map(|rows| rows.iter().peekable());
        let mut counts = |row: usize| {
            counted.as_mut().is_none_or(|rows| rows.next_if(|next| **next == row as i64).is_some())
        };
        let (mut c, mut c_next) = (vec![0f32; channels], vec![0f32; channels]);
        let (mut starts_here, mut starts_next) = (true, begins(1));
        collect(&mut c, 0, starts_next);
        for (row, out) in out.chunks_exact_mut(channels).enumerate() {
            for place in 0..channels {
                out[place] = c[place] * now[place];
            }
            if counts(row) {
                let [to_before, to_now, to_bias] = columns.next_row();
                let z_now = &z[row * channels..(row + 1) * channels];
                for place in 0..channels {
                    to_bias[place] += c[place];
                    to_now[place] += c[place] * z_now[place];
                }
                if starts_here {
                    for (head, bias) in to_bias.chunks_exact_mut(width).enumerate() {
                        let at = (head * rows + row) * 2 * width;
                        for (bias, grad) in bias.iter_mut().zip(&grad[at..at + width]) {
                            *bias += *grad;
                        }
                    }
                } else {
                    let z_before = &z[(row - 1) * channels..row * channels];
                    for ((to, c), z) in to_before.iter_mut().zip(&c).zip(z_before) {
                        *to += *c * *z;
                    }
                }
            }
            if row + 1 < rows {
                let after_begins = begins(row + 2);
                collect(&mut c_next, row + 1, after_begins);
                if !starts_next {
                    for ((out, c), before) in out.iter_mut().zip(&c_next).zip(before) {
                        *out += *c * *before;
                    }
                }
                (starts_here, starts_next) = (starts_next, after_begins);
                std::mem::swap(&mut c, &mut c_next);
            }
        }
    }
}
