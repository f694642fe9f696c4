//! The parts around attention: the depthwise convolution and the value shift, queries and keys; and gated linear units.

use tch::{Kind, Tensor};

use super::rows::{banded, bands, lanes, of_bands};
use super::{Argument, Queue, by_kind, each};
use crate::Result;
use crate::layout::Parts as _;
use crate::ops::call::Call;
use crate::ops::{
    ConvShift, ConvShiftGrads, HeadGrads, QueriesAndKeys, QueryKey, QueryKeyGrads, check,
};

/// A number of rows that means all rows (`EVERY` in `conv.h`).
const EVERY: i64 = u32::MAX as i64;

/// Rows of a thread that computes four columns (`STRIP` in `conv.h`), and threads of a block.
const STRIP: i64 = 8;
const BLOCK: i64 = 256;

/// Number of blocks if a thread computes four columns for each of so many groups of rows.
fn by_fours(columns: i64, groups: i64) -> i64 {
    (((columns + 3) / 4) * groups + BLOCK - 1) / BLOCK
}

/// A list of rows as kernel arguments.
fn listed(list: &Tensor) -> [Argument<'_>; 2] {
    [list.into(), list.extent(0).into()]
}

/// Sizes as kernel arguments: rows, d, channels, first shifted value, columns.
fn sizes([rows, columns]: [i64; 2], by: ConvShift) -> [Argument<'static>; 5] {
    let channels = by.channels();
    [rows, by.heads[1], channels, channels + by.values[0], columns].map(Argument::from)
}

pub(super) fn conv_shift(queue: &Queue, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
    let [rows, columns] = check::conv_shift(z, by)?;
    let [heads, width] = by.heads;
    let both = queue.room(&[heads, rows, 2 * width], z.kind())?;
    let values = queue.room(&[rows, by.shifted()], z.kind())?;
    let kernel = by_kind(z, [c"conv_shift_f32", c"conv_shift_bf16"]);
    let memory = [z, by.weights, by.bias].map(Argument::from);
    let out = [&both, &values].map(Argument::from);
    let arguments = [&memory[..], &listed(by.starts), &out, &sizes([rows, columns], by)].concat();
    queue.launch(kernel, by_fours(columns, (rows + STRIP - 1) / STRIP), &arguments)?;
    Ok([both, values])
}

pub(super) fn conv_shift_backward(
    queue: &Queue,
    z: &Tensor,
    by: ConvShift,
    grads: [&Tensor; 2],
    means: &Tensor,
) -> Result<ConvShiftGrads> {
    let [rows, columns] = check::conv_shift_backward(z, by, grads, means)?;
    let (input, channels) = (queue.room(&[rows, columns], z.kind())?, by.channels());
    let kernel = by_kind(z, [c"conv_shift_backward_f32", c"conv_shift_backward_bf16"]);
    let (partial, _) = banded(queue, [3, rows, channels])?;
    let counted = by.counted.map_or([Argument::Nothing, EVERY.into()], listed);
    let memory = [z, by.weights].map(Argument::from);
    let rest = [grads[0], grads[1], means, &input, &partial].map(Argument::from);
    let sizes = sizes([rows, columns], by);
    let arguments = [&memory[..], &listed(by.starts), &counted, &rest, &sizes].concat();
    queue.launch(kernel, by_fours(columns, bands(rows)), &arguments)?;
    let weights = of_bands(&partial, &[0, 1], &[channels, 1, 2]);
    Ok(ConvShiftGrads { input, weights, bias: of_bands(&partial, &[2], &[channels]) })
}

pub(super) fn query_key(
    queue: &Queue,
    z: &Tensor,
    made: &Tensor,
    by: QueryKey,
) -> Result<QueriesAndKeys> {
    let (_, [heads, tokens, width]) = check::query_key(z, made, by)?;
    // The kernel has 32-bit indices into `z`.
    super::blocks(tokens, z.extent(1))?;
    let [queries, keys, _] = by.shape;
    let factors = queue.room(&[heads, tokens, 1], Kind::Float)?;
    let out = queue.room(&[heads, tokens, width], z.kind())?;
    let raw = match made.kind() {
        Kind::Float => made.shallow_clone(),
        _ => queue.room(&[heads, tokens, width], Kind::Float)?,
    };
    let kernel = by_kind(z, [c"query_key_f32", c"query_key_bf16"]);
    let [cosines, sines] = by.angles;
    let memory = [z, made, by.bias, &raw, by.temperature, cosines, sines, &factors, &out];
    let sizes = [tokens, queries, keys, width, cosines.extent(1), z.extent(1)].map(Argument::from);
    let arguments = [&memory.map(Argument::from)[..], &sizes].concat();
    queue.launch(kernel, lanes(heads * tokens), &arguments)?;
    Ok(QueriesAndKeys { out, raw, factors })
}

pub(super) fn query_key_backward(
    queue: &Queue,
    raw: &Tensor,
    factors: &Tensor,
    by: QueryKey,
    grad: HeadGrads,
    kind: Kind,
) -> Result<QueryKeyGrads> {
    // Gradients in bf16 are converted into memory of f32, where the others are.
    let (grad, given) = match grad {
        HeadGrads::Stacked(grad) => (grad, None),
        HeadGrads::Apart(parts) => (queue.room(&raw.size(), Kind::Float)?, Some(parts)),
    };
    let (_, [heads, tokens, width]) = check::query_key_backward(raw, factors, by, &grad)?;
    if let Some([queries, keys]) = &given {
        let call = Call("query_key_backward");
        call.is("grad", queries, &[by.shape[0], tokens, width], &[Kind::BFloat16])?;
        call.is("grad", keys, &[by.shape[1], tokens, width], &[Kind::BFloat16])?;
    }
    let ([queries, keys, _], channels) = (by.shape, heads * width);
    let means = queue.room(&[tokens, channels], Kind::Float)?;
    let [bias, temperature] = [channels, keys].map(|width| banded(queue, [1, tokens, width]));
    let ((bias, _), (temperature, _)) = (bias?, temperature?);
    let [cosines, sines] = by.angles;
    let memory = [raw, factors, by.temperature, cosines, sines].map(Argument::from);
    let rounded = match kind {
        Kind::Float => None,
        kind => Some(queue.room(&grad.size(), kind)?),
    };
    let narrow = rounded.as_ref().map_or(Argument::Nothing, Argument::from);
    let given =
        given.as_ref().map_or([Argument::Nothing; 2], |parts| parts.each_ref().map(Argument::from));
    let out = [(&grad).into(), narrow, (&means).into(), (&bias).into(), (&temperature).into()];
    let sizes = [tokens, queries, keys, width, cosines.extent(1)].map(Argument::from);
    let arguments = [&memory[..], &given, &out, &sizes].concat();
    queue.launch(c"query_key_backward", keys * bands(tokens), &arguments)?;
    let temperature = of_bands(&temperature, &[0], &[keys]);
    let (raw, bias) = (rounded.unwrap_or(grad), of_bands(&bias, &[0], &[channels]));
    Ok(QueryKeyGrads { raw, means, temperature, bias })
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
