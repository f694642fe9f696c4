//! What stands around attention: the depthwise convolution, queries and keys, the value shift.

use tch::{Kind, Tensor};

use super::rows::{banded, lanes, sums};
use super::{Argument, Queue, by_kind, each};
use crate::Result;
use crate::ops::check::Call;
use crate::ops::{ConvGrads, DepthwiseConv, QueryKey, QueryKeyGrads, check};

/// A number of rows that stands for all of them (`EVERY` in `attention.h`).
const EVERY: i64 = u32::MAX as i64;

/// A list of rows, as a kernel takes it.
fn listed(list: &Tensor) -> [Argument<'_>; 2] {
    [list.into(), list.size()[0].into()]
}

pub(super) fn depthwise_conv(queue: &Queue, z: &Tensor, by: DepthwiseConv) -> Result<Tensor> {
    let [rows, channels] = check::depthwise_conv(z, by)?;
    let [heads, width] = by.heads;
    let both = queue.room(&[heads, rows, 2 * width], z.kind())?;
    let kernel = by_kind(z, [c"depthwise_conv_f32", c"depthwise_conv_bf16"]);
    let memory = [z, by.weights, by.bias].map(Argument::from);
    let rest = [(&both).into(), rows.into(), width.into(), channels.into()];
    let arguments = [&memory[..], &listed(by.starts), &rest].concat();
    queue.launch(kernel, super::blocks(rows, channels)?, &arguments)?;
    Ok(both)
}

pub(super) fn depthwise_conv_backward(
    queue: &Queue,
    z: &Tensor,
    by: DepthwiseConv,
    grad: &Tensor,
) -> Result<ConvGrads> {
    let [rows, channels] = check::depthwise_conv_backward(z, by, grad)?;
    let input = queue.room(&[rows, channels], Kind::Float)?;
    let grad = grad.f_to_kind(z.kind())?;
    let kernel = by_kind(z, [c"depthwise_conv_backward_f32", c"depthwise_conv_backward_bf16"]);
    let sums = banded(queue, [3, rows, channels], |partial, blocks| {
        let counted = by.counted.map_or([Argument::Nothing, EVERY.into()], listed);
        let memory = [z, by.weights].map(Argument::from);
        let rest = [&grad, &input, partial].map(Argument::from);
        let sizes = [rows, by.heads[1], channels].map(Argument::from);
        let arguments = [&memory[..], &listed(by.starts), &counted, &rest, &sizes].concat();
        queue.launch(kernel, blocks, &arguments)
    })?;
    let weights = sums.f_narrow(0, 0, 2)?.f_tr()?.f_contiguous()?;
    Ok(ConvGrads { input, weights: weights.f_view([channels, 1, 2])?, bias: sums.f_get(2)? })
}

pub(super) fn query_key(
    queue: &Queue,
    z: &Tensor,
    raw: &mut Tensor,
    by: QueryKey,
) -> Result<(Tensor, Tensor)> {
    let (_, [heads, tokens, width]) = check::query_key(z, raw, by)?;
    let [queries, keys, _] = by.shape;
    let factors = queue.room(&[heads, tokens, 1], Kind::Float)?;
    let out = queue.room(&[heads, tokens, width], Kind::Float)?;
    let kernel = by_kind(z, [c"query_key_f32", c"query_key_bf16"]);
    let [cosines, sines] = by.angles;
    let memory = [z, by.bias, &*raw, by.temperature, cosines, sines, &factors, &out];
    let sizes = [tokens, queries, keys, width, cosines.size()[1]].map(Argument::from);
    let arguments = [&memory.map(Argument::from)[..], &sizes].concat();
    queue.launch(kernel, lanes(heads * tokens), &arguments)?;
    Ok((out, factors))
}

pub(super) fn query_key_backward(
    queue: &Queue,
    raw: &Tensor,
    factors: &Tensor,
    by: QueryKey,
    grad: Tensor,
) -> Result<QueryKeyGrads> {
    let (_, [heads, tokens, width]) = check::query_key_backward(raw, factors, by, &grad)?;
    let [queries, keys, _] = by.shape;
    let shares = queue.room(&[heads, tokens], Kind::Float)?;
    let [cosines, sines] = by.angles;
    let memory = [raw, factors, by.temperature, cosines, sines, &grad, &shares].map(Argument::from);
    let sizes = [tokens, queries, keys, width, cosines.size()[1]].map(Argument::from);
    let arguments = [&memory[..], &sizes].concat();
    queue.launch(c"query_key_backward", lanes(heads * tokens), &arguments)?;
    let temperature = queue.room(&[keys], Kind::Float)?;
    let of_keys = shares.f_narrow(0, queries, keys)?;
    let arguments = [(&of_keys).into(), (&temperature).into(), keys.into(), tokens.into()];
    queue.launch(c"head_sums", (keys + 255) / 256, &arguments)?;
    let bias = sums(queue, &grad, [heads, tokens, width])?.f_view([-1])?;
    Ok(QueryKeyGrads { raw: grad, temperature, bias })
}

pub(super) fn means_backward(
    queue: &Queue,
    raw: &Tensor,
    shape: [i64; 3],
    z: &Tensor,
) -> Result<()> {
    check::means_backward(raw, shape, z)?;
    let ([queries, keys, width], tokens) = (shape, z.size()[0]);
    let sizes = [tokens, queries, keys, width].map(Argument::from);
    let arguments = [&[raw.into(), z.into()][..], &sizes].concat();
    queue.launch(c"means_backward", super::blocks(tokens * keys, width)?, &arguments)
}

pub(super) fn value_shift(
    queue: &Queue,
    current: &Tensor,
    delayed: &Tensor,
    starts: &Tensor,
) -> Result<Tensor> {
    let [tokens, left, right] = check::value_shift(current, delayed, starts)?;
    let out = queue.room(&[tokens, left + right], current.kind())?;
    let kernel = by_kind(current, [c"value_shift_f32", c"value_shift_bf16"]);
    let memory = [current, delayed].map(Argument::from);
    let rest = [(&out).into(), tokens.into(), left.into(), right.into()];
    let blocks = super::blocks(tokens, left + right)?;
    queue.launch(kernel, blocks, &[&memory[..], &listed(starts), &rest].concat())?;
    Ok(out)
}

pub(super) fn value_shift_backward(
    queue: &Queue,
    grad: &Tensor,
    left: i64,
    starts: &Tensor,
) -> Result<Tensor> {
    let call = Call("value_shift_backward");
    let [tokens, width] = call.matrix("grad", grad)?;
    call.float("grad", grad, &[tokens, width])?;
    let count = call.sizes::<1>("starts", starts)?;
    call.i64("starts", starts, &count)?;
    let out = queue.room(&[tokens, width], grad.kind())?;
    let kernel = by_kind(grad, [c"value_shift_backward_f32", c"value_shift_backward_bf16"]);
    let rest = [(&out).into(), tokens.into(), left.into(), (width - left).into()];
    let blocks = super::blocks(tokens, width)?;
    queue.launch(kernel, blocks, &[&[grad.into()][..], &listed(starts), &rest].concat())?;
    Ok(out)
}

/// `silu(gate) * up`.
pub(super) fn swiglu(queue: &Queue, x: &Tensor) -> Result<Tensor> {
    let [rows, width] = check::swiglu(x)?;
    let out = queue.room(&[rows, width], x.kind())?;
    let kernel = by_kind(x, [c"swiglu_f32", c"swiglu_bf16"]);
    each(queue, kernel, [rows, width], &[x, &out].map(Argument::from))?;
    Ok(out)
}

pub(super) fn swiglu_backward(queue: &Queue, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let [rows, width] = check::swiglu_backward(x, grad)?;
    let out = queue.room(&[rows, 2 * width], x.kind())?;
    let kernel = by_kind(x, [c"swiglu_backward_f32", c"swiglu_backward_bf16"]);
    each(queue, kernel, [rows, width], &[x, grad, &out].map(Argument::from))?;
    Ok(out)
}
