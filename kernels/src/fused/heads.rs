//! Queries and keys by head: means of both added to each, unit length, a temperature for keys, and rotation.
//!
//! H query heads in K groups of H / K, then K key heads: G = H + K heads of d dimensions. `[N, G d]` is by token, `[G, N, d]`
//! by head.

use tch::Tensor;

use super::rows::{Columns, dot};
use super::{apart, empty, read, wide, write};

/// What queries and keys are made with.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// Added to each head, `[G d]`.
    pub bias: &'a Tensor,
    /// What keys are multiplied with, `[K]`.
    pub temperature: &'a Tensor,
    /// Cosines and sines of each token's angles, `[N, r]`: dimension i turns with dimension i + r, 2 r <= d.
    pub angles: [&'a Tensor; 2],
    /// `[H, K, d]`.
    pub shape: [usize; 3],
}

impl Heads<'_> {
    /// Each of `[N, G d]` or `[G, N, d]` belongs to these heads and angles.
    fn fit(&self, tensors: &[&Tensor]) {
        let [queries, keys, width] = self.shape;
        let tokens = tensors[0].numel() / ((queries + keys) * width);
        let [cos, sin] = self.angles.map(Tensor::numel);
        let whole = (queries + keys) * width;
        let same = tensors.iter().all(|tensor| tensor.numel() == tokens * whole);
        assert!(
            same && cos == sin && cos % tokens == 0 && 2 * cos <= tokens * width,
            "angles of these tokens"
        );
        assert!(
            self.bias.numel() == whole && self.temperature.numel() == keys,
            "one for each head"
        );
    }
}

/// The least length that a vector is divided by.
const LEAST: f32 = f32::EPSILON;

/// Adds to each of `raw`, `[G, N, d]`, its bias and the mean that belongs to it of what stands in `z`, `[N, G d]`; makes it
/// sqrt(d) long (`factors`, `[G, N, 1]`, say by what); multiplies keys with their temperature, and turns all.
///
/// ```text
/// m_h = (q_h + k) / 2        for query head h and the key head of its group
/// raw_h += bias_h + m_h;  raw_k += bias_k + mean of m_h over the group
/// f = sqrt(d) / max(|raw|, eps);  out = turn(raw f temperature)
/// ```
pub fn mix(z: &Tensor, raw: &mut Tensor, by: Heads) -> (Tensor, Tensor) {
    let [_, _, width] = by.shape;
    let (tokens, heads) = (z.size()[0], raw.size()[0]);
    let (mut factors, mut out) =
        (empty(&[heads, tokens, 1]), empty(&[heads, tokens, width as i64]));
    by.fit(&[z, raw]);
    apart(&[raw], &[z, by.bias, by.temperature, by.angles[0], by.angles[1]]);
    add_means(read(z), read(by.bias), by.shape, write(raw));
    let angles = by.angles.map(read);
    turn(read(raw), (read(by.temperature), angles), by.shape, write(&mut factors), write(&mut out));
    (out, factors)
}

wide! {
    fn add_means(z: &[f32], bias: &[f32], shape: [usize; 3], raw: &mut [f32]) {
        let [queries, keys, width] = shape;
        let (channels, group) = ((queries + keys) * width, queries / keys);
        let tokens = z.len() / channels;
        let mut sum = vec![0f32; width];
        for (token, z) in z.chunks_exact(channels).enumerate() {
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

wide! {
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

/// Back through [`mix`], from the gradient of its outcome, which becomes that of `raw`, `[G, N, d]`; also the gradient of
/// the temperature, `[K]`, and the sum over tokens of the gradient of `raw`, `[G d]`.
pub fn mix_backward(
    raw: &Tensor,
    factors: &Tensor,
    by: Heads,
    grad: Tensor,
) -> (Tensor, [Tensor; 2]) {
    let mut grad = grad;
    by.fit(&[raw, &grad]);
    apart(&[&grad], &[raw, factors, by.temperature, by.angles[0], by.angles[1]]);
    let [queries, keys, width] = by.shape;
    let (heads, tokens) = (queries + keys, factors.numel() / (queries + keys));
    let (mut temperature, mut sums) = (vec![0f32; keys], Vec::with_capacity(heads));
    let (raw, factors, angles) = (read(raw), read(factors), by.angles.map(read));
    let grads = write(&mut grad).chunks_exact_mut(tokens * width);
    for (head, grad) in grads.enumerate() {
        let mut columns = Columns::<1>::new(width);
        let scale = if head < queries { 1.0 } else { read(by.temperature)[head - queries] };
        let of_head =
            (&raw[head * tokens * width..][..tokens * width], &factors[head * tokens..][..tokens]);
        let sum = turn_back(of_head, (scale, angles), grad, &mut columns);
        if let Some(temperature) =
            head.checked_sub(queries).and_then(|key| temperature.get_mut(key))
        {
            *temperature = sum as f32;
        }
        sums.extend(columns.finish());
    }
    (grad, [Tensor::from_slice(&temperature), Tensor::cat(&sums, 0)])
}

wide! {
    /// One head: turns the gradient back, takes it through the division by the length, and returns the temperature's.
    fn turn_back(
        of_head: (&[f32], &[f32]),
        by: (f32, [&[f32]; 2]),
        grad: &mut [f32],
        columns: &mut Columns<1>,
    ) -> f64 {
        let ((raw, factors), (scale, [cos, sin])) = (of_head, by);
        let (width, half) = (raw.len() / factors.len(), cos.len() / factors.len());
        // Where the length was clamped, the factor is a constant.
        let clamped = 0.999 * (width as f32).sqrt() / LEAST;
        let mut temperature = 0f64;
        let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
        let rows = raw.chunks_exact(width).zip(grad.chunks_exact_mut(width)).zip(factors);
        for (((raw, grad), factor), (cos, sin)) in rows.zip(angles) {
            let (a, b) = grad.split_at_mut(half);
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                (*a, *b) = (*a * *cos + *b * *sin, *b * *cos - *a * *sin);
            }
            let dot = dot(grad, raw, |a, b| a * b);
            temperature += f64::from(*factor * dot);
            let along = if *factor >= clamped { 0.0 } else { *factor * *factor * *factor * scale * dot / -(width as f32) };
            let by = *factor * scale;
            let [sums] = columns.next_row();
            for ((grad, raw), sum) in grad.iter_mut().zip(raw).zip(sums) {
                *grad = *grad * by + *raw * along;
                *sum += *grad;
            }
        }
        temperature
    }
}

/// Back through the means of [`mix`]: adds to the gradient of `z`, `[N, G d]`, what comes from that of `raw`.
pub fn means_backward(raw_grad: &Tensor, shape: [usize; 3], z_grad: &mut Tensor) {
    apart(&[z_grad], &[raw_grad]);
    means_back(read(raw_grad), shape, write(z_grad));
}

wide! {
    fn means_back(raw: &[f32], shape: [usize; 3], z: &mut [f32]) {
        let [queries, keys, width] = shape;
        let (channels, group) = ((queries + keys) * width, queries / keys);
        let tokens = z.len() / channels;
        for (token, z) in z.chunks_exact_mut(channels).enumerate() {
            let (to_queries, to_keys) = z.split_at_mut(queries * width);
            for (key, to_key) in to_keys.chunks_exact_mut(width).enumerate() {
                let key_row = &raw[((queries + key) * tokens + token) * width..][..width];
                for head in key * group..(key + 1) * group {
                    let query_row = &raw[(head * tokens + token) * width..][..width];
                    let to_query = &mut to_queries[head * width..(head + 1) * width];
                    for place in 0..width {
                        let mean = (query_row[place] + key_row[place] / group as f32) * 0.5;
                        to_query[place] += mean;
                        to_key[place] += mean;
                    }
                }
            }
        }
    }
}
