//! Queries and keys by head: means of both added to each, normalization, a temperature for keys, and rotary embedding.
//!
//! H query heads in K groups of H / K, then K key heads: G = H + K heads of d dimensions. `[N, G d]` is by token,
//! `[G, N, d]` by head.

use tch::{Kind, Tensor};

use super::norm::{Columns, dot};
use super::{apart, empty, read, simd, to_f32, write};
use crate::Result;
use crate::ops::{HeadGrads, ParamGradient, QueriesAndKeys, QueryKey, QueryKeyGrads, check};

/// Smallest length that a vector is divided by.
const LEAST: f32 = f32::EPSILON;

pub(super) fn query_key(z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys> {
    let (call, [heads, tokens, width]) = check::query_key(z, &raw, by)?;
    apart(call, &[&raw], &[z, by.bias, by.temperature, by.angles[0], by.angles[1]])?;
    let mut raw = to_f32(&raw)?;
    let (mut factors, mut out) = (empty(&[heads, tokens, 1])?, empty(&[heads, tokens, width])?);
    let shape = by.shape.map(|size| size as usize);
    let sizes = (shape, z.size()[1] as usize);
    add_means(read(&to_f32(z)?)?, read(by.bias)?, sizes, write(&mut raw)?);
    let by = (read(by.temperature)?, [read(by.angles[0])?, read(by.angles[1])?]);
    turn(read(&raw)?, by, shape, write(&mut factors)?, write(&mut out)?);
    Ok(QueriesAndKeys { out: out.f_to_kind(z.kind())?, raw, factors })
}

simd! {
    fn add_means(z: &[f32], bias: &[f32], sizes: ([usize; 3], usize), raw: &mut [f32]) {
        let ([queries, keys, width], columns) = sizes;
        let (tokens, group) = (z.len() / columns, queries / keys);
        let mut sum = vec![0f32; width];
        for (token, z) in z.chunks_exact(columns).enumerate() {
            for key in 0..keys {
                let key_row = &z[(queries + key) * width..(queries + key + 1) * width];
                sum.fill(0.0);
                for head in key * group..(key + 1) * group {
                    let raw = &mut raw[(head * tokens + token) * width..][..width];
                    let query_row = &z[head * width..(head + 1) * width];
                    let bias = &bias[head * width..(head + 1) * width];
                    for place in 0..width {
                        let mean = (query_row[place] + key_row[place]) * 0.5;
                        raw[place] = raw[place] + bias[place] + mean;
                        sum[place] += mean;
                    }
                }
                let raw = &mut raw[((queries + key) * tokens + token) * width..][..width];
                let bias = &bias[(queries + key) * width..(queries + key + 1) * width];
                for ((raw, bias), sum) in raw.iter_mut().zip(bias).zip(&sum) {
                    *raw = *raw + *bias + *sum / group as f32;
                }
            }
        }
    }
}

simd! {
    fn turn(
        raw: &[f32],
        by: (&[f32], [&[f32]; 2]),
        shape: [usize; 3],
        factors: &mut [f32],
        out: &mut [f32],
    ) {
        let ((temperature, [cos, sin]), [queries, keys, width]) = (by, shape);
        let tokens = factors.len() / (queries + keys);
        let half = cos.len() / tokens;
        let rows = raw.chunks_exact(width).zip(out.chunks_exact_mut(width)).zip(factors);
        for (index, ((raw, out), factor)) in rows.enumerate() {
            let (head, token) = (index / tokens, index % tokens);
            let scale = if head < queries { 1.0 } else { temperature[head - queries] };
            let length = dot(raw, raw, |a, b| a * b).sqrt();
            *factor = 1.0 / length.max(LEAST) * (width as f32).sqrt();
            let by = *factor * scale;
            for (out, raw) in out.iter_mut().zip(raw) {
                *out = *raw * by;
            }
            let (cos, sin) = (&cos[token * half..(token + 1) * half], &sin[token * half..(token + 1) * half]);
            let (a, b) = out.split_at_mut(half);
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                (*a, *b) = (*a * *cos - *b * *sin, *b * *cos + *a * *sin);
            }
        }
    }
}

pub(super) fn query_key_backward(
    raw: &Tensor,
    factors: &Tensor,
    by: QueryKey,
    grad: HeadGrads,
    kind: Kind,
) -> Result<QueryKeyGrads> {
    let mut grad = grad.stacked()?;
    let (call, [_, tokens, width]) = check::query_key_backward(raw, factors, by, &grad)?;
    apart(call, &[&grad], &[raw, factors, by.temperature, by.angles[0], by.angles[1]])?;
    let shape = by.shape.map(|size| size as usize);
    let ([queries, keys, _], tokens) = (shape, tokens as usize);
    let block = tokens * width as usize;
    let angles = [read(by.angles[0])?, read(by.angles[1])?];
    let (raw, factors, scales) = (read(raw)?, read(factors)?, read(by.temperature)?);
    let (mut temperature, mut bias) = (Vec::new(), Vec::with_capacity(queries + keys));
    for (head, grad) in write(&mut grad)?.chunks_exact_mut(block).enumerate() {
        let (mut columns, mut dots) = (Columns::<1>::new(width as usize), Columns::<1>::new(1));
        let scale = if head < queries { 1.0 } else { scales[head - queries] };
        let of_head = (&raw[head * block..][..block], &factors[head * tokens..][..tokens]);
        turn_back(of_head, (scale, angles), grad, &mut columns, &mut dots);
        if head >= queries {
            temperature.extend(dots.finish());
        }
        bias.extend(columns.finish());
    }
    let mut means = empty(&[tokens as i64, (queries + keys) as i64 * width])?;
    means_back(read(&grad)?, shape, write(&mut means)?);
    let [temperature, bias] = [temperature, bias].map(|parts| Tensor::f_cat(&parts, 0));
    let (temperature, bias) = (ParamGradient::Made(temperature?), ParamGradient::Made(bias?));
    Ok(QueryKeyGrads { raw: grad.f_to_kind(kind)?, means, temperature, bias })
}

simd! {
    /// One head: applies the inverse rotation to the gradient, then the backward pass of the normalization; `dots` is
    /// for the temperature.
    fn turn_back(
        of_head: (&[f32], &[f32]),
        by: (f32, [&[f32]; 2]),
        grad: &mut [f32],
        columns: &mut Columns<1>,
        dots: &mut Columns<1>,
    ) {
        let ((raw, factors), (scale, [cos, sin])) = (of_head, by);
        let (width, half) = (raw.len() / factors.len(), cos.len() / factors.len());
        // Where the length was clamped, the factor is a constant.
        let clamped = 0.999 * (width as f32).sqrt() / LEAST;
        let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
        let rows = raw.chunks_exact(width).zip(grad.chunks_exact_mut(width)).zip(factors);
        for (((raw, grad), factor), (cos, sin)) in rows.zip(angles) {
            let (a, b) = grad.split_at_mut(half);
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                (*a, *b) = (*a * *cos + *b * *sin, *b * *cos - *a * *sin);
            }
            let dot = dot(grad, raw, |a, b| a * b);
            let [temperature] = dots.next_row();
            temperature[0] += *factor * dot;
            let along = if *factor >= clamped { 0.0 } else { *factor * *factor * *factor * scale * dot / -(width as f32) };
            let by = *factor * scale;
            let [sums] = columns.next_row();
            for ((grad, raw), sum) in grad.iter_mut().zip(raw).zip(sums) {
                *grad = *grad * by + *raw * along;
                *sum += *grad;
            }
        }
    }
}

simd! {
    /// The gradient of `z` through the means, from the gradient of raw.
    fn means_back(raw: &[f32], shape: [usize; 3], z: &mut [f32]) {
        let [queries, keys, width] = shape;
        let (channels, group) = ((queries + keys) * width, queries / keys);
        let tokens = z.len() / channels;
        for (token, z) in z.chunks_exact_mut(channels).enumerate() {
            let (to_queries, to_keys) = z.split_at_mut(queries * width);
            for (key, to_key) in to_keys.chunks_exact_mut(width).enumerate() {
                let key_row = &raw[((queries + key) * tokens + token) * width..][..width];
                to_key.fill(0.0);
                for head in key * group..(key + 1) * group {
                    let query_row = &raw[(head * tokens + token) * width..][..width];
                    let to_query = &mut to_queries[head * width..(head + 1) * width];
                    for place in 0..width {
                        let mean = (query_row[place] + key_row[place] / group as f32) * 0.5;
                        to_query[place] = mean;
                        to_key[place] += mean;
                    }
                }
            }
        }
    }
}
