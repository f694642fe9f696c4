//! Convolution, means, norm and rotation of queries and keys, and the shift of values.

use tch::{Kind, Tensor};

use super::{columns, to_f32};
use crate::Result;
use crate::ops::rotary::{rotated, rotated_back};
use crate::ops::{
    ConvShift, ConvShiftGrads, HeadGrads, ParamGradient, QueriesAndKeys, QueryKey, QueryKeyGrads,
    check, composed,
};

pub(super) fn conv_shift(z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
    let [rows, _] = check::conv_shift(z, by)?;
    let [heads, width] = by.heads;
    let wide = to_f32(&z.f_narrow(1, 0, by.channels())?)?;
    let (before, now) = taps(by)?;
    let earlier = delayed(&wide, by.starts, None)?;
    let c = by.bias.f_addcmul(&wide, &now)?.f_addcmul(&earlier, &before)?;
    let both = Tensor::f_stack(&[delayed(&c, by.starts, Some(by.bias))?, c], 2)?;
    let both = both.f_view([rows, heads, 2 * width])?.f_transpose(0, 1)?.f_contiguous()?;
    Ok([both.f_to_kind(z.kind())?, composed::shifted(z, by)?])
}

pub(super) fn conv_shift_backward(
    z: &Tensor,
    by: ConvShift,
    [grad, values]: [&Tensor; 2],
    means: &Tensor,
) -> Result<ConvShiftGrads> {
    let [rows, _] = check::conv_shift_backward(z, by, [grad, values], means)?;
    let ([heads, width], channels) = (by.heads, by.channels());
    let input = z.f_empty_like()?;
    let z = to_f32(&z.f_narrow(1, 0, channels)?)?;
    let both = to_f32(grad)?.f_view([heads, rows, width, 2])?.f_permute([1, 3, 0, 2])?;
    let part = |tap| both.f_select(1, tap)?.f_reshape([rows, channels]);
    let (c_before, c_now) = (part(0)?, part(1)?);
    // Before a document `c` is the bias; rows that are not counted are excluded from every sum.
    let counted = |x: &Tensor| match by.counted {
        None => columns(x),
        Some(rows) => columns(&x.f_index_select(0, rows)?),
    };
    let first = c_before.f_index_select(0, by.starts)?;
    let early = match by.counted {
        None => columns(&first)?,
        Some(_) => counted(&c_before.f_zeros_like()?.f_index_copy(0, by.starts, &first)?)?,
    };
    let c = c_now.f_add(&advanced(&c_before, by.starts)?)?;
    let (before, now) = taps(by)?;
    let earlier = delayed(&z, by.starts, None)?;
    let weights = [counted(&c.f_mul(&earlier)?)?, counted(&c.f_mul(&z)?)?];
    let from_next = advanced(&c.f_mul(&before)?, by.starts)?;
    let of_channels = c.f_mul(&now)?.f_add(&from_next)?;
    let of_channels = match by.counted {
        None => of_channels.f_add(means)?,
        Some(rows) => of_channels.f_index_add(0, rows, means)?,
    };
    input.f_narrow(1, 0, channels)?.f_copy_(&of_channels)?;
    composed::shifted_back(values, by, &input)?;
    Ok(ConvShiftGrads {
        input,
        weights: ParamGradient::Made(Tensor::f_stack(&weights, 1)?.f_unsqueeze(1)?),
        bias: ParamGradient::Made(counted(&c)?.f_add(&early)?),
    })
}

/// Weights of the previous token, and of the token.
fn taps(by: ConvShift) -> Result<(Tensor, Tensor)> {
    let taps = by.weights.f_squeeze_dim(1)?;
    Ok((taps.f_select(1, 0)?, taps.f_select(1, 1)?))
}

/// Row t - 1 in place of row t; at the start of a document `first`, or zero.
fn delayed(x: &Tensor, starts: &Tensor, first: Option<&Tensor>) -> Result<Tensor> {
    let out = x.f_roll([1], [0])?;
    Ok(match first {
        None => out.f_index_fill(0, starts, 0.0)?,
        Some(first) => {
            let mut shape = x.size();
            shape[0] = starts.size()[0];
            out.f_index_copy(0, starts, &first.f_expand(&shape, false)?)?
        }
    })
}

/// Row t + 1 in place of row t, and zero at the end of a document: the transpose of [`delayed`].
fn advanced(x: &Tensor, starts: &Tensor) -> Result<Tensor> {
    Ok(x.f_index_fill(0, starts, 0.0)?.f_roll([-1], [0])?)
}

pub(super) fn query_key(z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys> {
    let (_, [heads, tokens, width]) = check::query_key(z, &raw, by)?;
    let (mut raw, kind) = (to_f32(&raw)?, z.kind());
    let _ = raw.f_add_(&by.bias.f_view([heads, 1, width])?)?;
    let z = to_f32(&z.f_narrow(1, 0, heads * width)?)?;
    let z = z.f_reshape([tokens, heads, width])?.f_transpose(0, 1)?;
    let (q, k) = split(&z, by.shape)?;
    let mean = q.f_add(&k)?.f_mul_scalar(0.5)?;
    let (mut query, mut key) = split(&raw, by.shape)?;
    let _ = key.f_add_(&mean.f_mean_dim(1, true, Kind::Float)?)?;
    let _ = query.f_add_(&mean)?;
    let length = raw.f_square()?.f_sum_dim_intlist(-1, true, Kind::Float)?.f_sqrt()?;
    let factors = length.f_clamp_min(f64::from(f32::EPSILON))?.f_reciprocal()?;
    let factors = factors.f_mul_scalar((width as f64).sqrt())?;
    let out = raw.f_mul(&factors.f_mul(&scales(by)?)?)?;
    let out = rotated(&out, by.angles)?.f_to_kind(kind)?;
    Ok(QueriesAndKeys { out, raw, factors })
}

pub(super) fn query_key_backward(
    raw: &Tensor,
    factors: &Tensor,
    by: QueryKey,
    grad: HeadGrads,
    kind: Kind,
) -> Result<QueryKeyGrads> {
    let grad = grad.stacked()?;
    let (_, [_, _, width]) = check::query_key_backward(raw, factors, by, &grad)?;
    let [queries, keys, _] = by.shape;
    let grad = rotated_back(&grad, by.angles)?;
    let scales = scales(by)?;
    let dot = grad.f_mul(raw)?.f_sum_dim_intlist(-1, true, Kind::Float)?;
    let of_keys = factors.f_mul(&dot)?.f_narrow(0, queries, keys)?;
    let temperature = of_keys.f_sum_dim_intlist([1, 2].as_slice(), false, Kind::Float)?;
    let along = factors.f_pow_tensor_scalar(3)?.f_mul(&scales)?.f_mul(&dot)?;
    let along = along.f_div_scalar(-(width as f64))?;
    // Where the length was clamped, the factor is a constant.
    let clamped = factors.f_ge(0.999 * (width as f64).sqrt() / f64::from(f32::EPSILON))?;
    let along = along.f_masked_fill(&clamped, 0.0)?;
    let raw = grad.f_mul(&factors.f_mul(&scales)?)?.f_addcmul(raw, &along)?;
    let bias = raw.f_sum_dim_intlist(1, false, Kind::Float)?.f_reshape([-1])?;
    let (means, temperature) = (means_back(&raw, by.shape)?, ParamGradient::Made(temperature));
    let raw = raw.f_to_kind(kind)?;
    Ok(QueryKeyGrads { raw, means, temperature, bias: ParamGradient::Made(bias) })
}

/// The gradient through the means, from the gradient of raw: `[N, G d]`.
fn means_back(raw: &Tensor, shape: [i64; 3]) -> Result<Tensor> {
    let (query, key) = split(raw, shape)?;
    let ([queries, ..], tokens) = (shape, raw.size()[1]);
    let group = (queries / shape[1]) as f64;
    let mean = query.f_add(&key.f_div_scalar(group)?)?.f_mul_scalar(0.5)?;
    let of_keys = mean.f_sum_dim_intlist(1, false, Kind::Float)?;
    let of_queries = mean.f_reshape([queries, tokens, shape[2]])?;
    let by_head = Tensor::f_cat(&[of_queries, of_keys], 0)?;
    Ok(by_head.f_transpose(0, 1)?.f_reshape([tokens, -1])?)
}

/// `[G, N, d]` as queries `[K, H / K, N, d]` and keys `[K, 1, N, d]`.
fn split(heads: &Tensor, [queries, keys, _]: [i64; 3]) -> Result<(Tensor, Tensor)> {
    let query = heads.f_narrow(0, 0, queries)?.f_unflatten(0, [keys, queries / keys])?;
    Ok((query, heads.f_narrow(0, queries, keys)?.f_unsqueeze(1)?))
}

/// `[G, 1, 1]`: 1 for query heads, the temperature for key heads.
fn scales(by: QueryKey) -> Result<Tensor> {
    let ones = by.temperature.f_new_ones([by.shape[0]], (Kind::Float, by.temperature.device()))?;
    Ok(Tensor::f_cat(&[&ones, by.temperature], 0)?.f_view([-1, 1, 1])?)
}
