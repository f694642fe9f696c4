//! Checks of the operands of operations. All tables use them, so all refuse the same operands.
//!
//! A tensor of another shape, kind or layout is a bug of the caller. It is an error that names the operation and the
//! operand, never a reason to compute in another way.

use tch::{Kind, Tensor};

use super::call::Call;
use super::{
    Attention, AttentionGrads, ConvShift, CrossEntropy, Dispatch, ExpertRows, NormBack, QueryKey,
    ResidualScaling, RouterWeights, Update,
};
use crate::layout::Parts as _;
use crate::{Error, Result};

pub(super) fn rms_norm(x: &Tensor, weight: &Tensor) -> Result<[i64; 2]> {
    let call = Call("rms_norm");
    let shape = call.matrix("x", x)?;
    call.f32("x", x, &shape)?;
    call.f32("weight", weight, &shape[1..])?;
    Ok(shape)
}

pub(super) fn rms_norm_backward(
    x: &Tensor,
    factors: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<[i64; 2]> {
    let shape = rms_norm(x, weight)?;
    let call = Call("rms_norm_backward");
    call.f32("factors", factors, &[shape[0], 1])?;
    call.float("grad", grad, &shape)?;
    Ok(shape)
}

pub(super) fn residual(
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
) -> Result<[i64; 2]> {
    let call = Call("residual");
    let shape = call.matrix("residual", residual)?;
    call.float("branch", branch, &shape)?;
    residual_sides(residual, by, &shape)?;
    Ok(shape)
}

fn residual_sides(residual: &Tensor, by: ResidualScaling, shape: &[i64]) -> Result<()> {
    let call = Call("residual");
    call.f32("residual", residual, shape)?;
    call.f32("scale", by.scale, &shape[1..])?;
    call.f32("bias", by.bias, &shape[1..])?;
    call.f32("residual_scale", by.residual_scale, &shape[1..])?;
    call.f32("residual_bias", by.residual_bias, &shape[1..])
}

pub(super) fn residual_backward(
    branch: &Tensor,
    stream: &Tensor,
    by: ResidualScaling,
    grad: &Tensor,
) -> Result<[i64; 2]> {
    let shape = residual(branch, stream, by)?;
    Call("residual_backward").f32("grad", grad, &shape)?;
    Ok(shape)
}

pub(super) fn residual_norm_backward(
    branch: &Tensor,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    grad: &Tensor,
) -> Result<[i64; 2]> {
    let shape = self::residual(branch, residual, by)?;
    norm_back(norm, &shape)?;
    Call("residual_norm_backward").is("grad", grad, &shape, &[branch.kind()])?;
    Ok(shape)
}

fn norm_back(norm: NormBack, shape: &[i64]) -> Result<()> {
    let call = Call("residual_norm_backward");
    let rows = [("x", Some(norm.x)), ("beside", norm.beside)];
    for (operand, tensor) in rows {
        tensor.map_or(Ok(()), |tensor| call.f32(operand, tensor, shape))?;
    }
    call.f32("factors", norm.factors, &[shape[0], 1])?;
    call.f32("weight", norm.weight, &shape[1..])
}

/// Requires experts' rows and gates that fit a residual.
pub(super) fn residual_gathered(
    rows: ExpertRows,
    residual: &Tensor,
    by: ResidualScaling,
) -> Result<[i64; 2]> {
    let shape = gather(rows)?;
    residual_sides(residual, by, &shape)?;
    Ok(shape)
}

/// The same with the operands of the way back.
pub(super) fn residual_norm_gathered_backward(
    rows: ExpertRows,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    grad: &Tensor,
) -> Result<[i64; 2]> {
    let shape = residual_gathered(rows, residual, by)?;
    norm_back(norm, &shape)?;
    Call("residual_norm_gathered_backward").is("grad", grad, &shape, &[rows.x.kind()])?;
    Ok(shape)
}

pub(super) fn residual_norm_unpermuted_backward(
    branch: &Tensor,
    stream: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    rows: ExpertRows,
) -> Result<[i64; 2]> {
    let shape = unpermute(rows)?;
    Call("residual_norm_unpermuted_backward").is("branch", branch, &shape, &[rows.x.kind()])?;
    residual_sides(stream, by, &shape)?;
    norm_back(norm, &shape)?;
    Ok(shape)
}

/// Returns the rows and columns of `z`.
pub(super) fn conv_shift(z: &Tensor, by: ConvShift) -> Result<[i64; 2]> {
    let (call, channels) = (Call("conv_shift"), by.channels());
    let shape = [call.matrix("z", z)?[0], channels + by.shifted()];
    call.float("z", z, &shape)?;
    call.f32("weights", by.weights, &[channels, 1, 2])?;
    call.f32("bias", by.bias, &[channels])?;
    let list = |name, rows: &Tensor| call.i64(name, rows, &call.sizes::<1>(name, rows)?);
    list("starts", by.starts)?;
    by.counted.map_or(Ok(()), |rows| list("counted", rows))?;
    Ok(shape)
}

pub(super) fn conv_shift_backward(
    z: &Tensor,
    by: ConvShift,
    [taps, values]: [&Tensor; 2],
    means: &Tensor,
) -> Result<[i64; 2]> {
    let shape = conv_shift(z, by)?;
    let (call, rows) = (Call("conv_shift_backward"), shape[0]);
    call.is("the gradient of taps", taps, &[by.heads[0], rows, 2 * by.heads[1]], &[z.kind()])?;
    call.is("the gradient of values", values, &[rows, by.shifted()], &[z.kind()])?;
    let counted = by.counted.map_or(rows, |counted| counted.extent(0));
    call.f32("means", means, &[counted, by.channels()])?;
    Ok(shape)
}

/// Returns `[G, N, d]`.
pub(super) fn query_key(z: &Tensor, raw: &Tensor, by: QueryKey) -> Result<(Call, [i64; 3])> {
    let call = Call("query_key");
    let shape = heads(call, raw, by, z.kind())?;
    let channels = shape[0] * shape[2];
    call.float("z", z, &[shape[1], channels.max(call.matrix("z", z)?[1])])?;
    call.f32("bias", by.bias, &[channels])?;
    Ok((call, shape))
}

pub(super) fn query_key_backward(
    raw: &Tensor,
    factors: &Tensor,
    by: QueryKey,
    grad: &Tensor,
) -> Result<(Call, [i64; 3])> {
    let call = Call("query_key_backward");
    let shape = heads(call, raw, by, Kind::Float)?;
    call.f32("factors", factors, &[shape[0], shape[1], 1])?;
    call.f32("grad", grad, &shape)?;
    Ok((call, shape))
}

fn heads(call: Call, raw: &Tensor, by: QueryKey, kind: Kind) -> Result<[i64; 3]> {
    let [queries, keys, width] = by.shape;
    if keys <= 0 || queries % keys != 0 {
        let found = format!("{queries} queries for {keys} keys");
        return Err(call.refuse("shape", found, "as many queries for each key".to_owned()));
    }
    let shape = [queries + keys, call.sizes::<3>("raw", raw)?[1], width];
    call.is("raw", raw, &shape, &[kind])?;
    call.f32("temperature", by.temperature, &[keys])?;
    let angles = [shape[1], call.matrix("angles", by.angles[0])?[1]];
    by.angles.into_iter().try_for_each(|angle| call.f32("angles", angle, &angles))?;
    if 2 * angles[1] > width {
        let wanted = format!("at most {} of a head's {width} dimensions", width / 2);
        return Err(call.refuse("angles", format!("{}", angles[1]), wanted));
    }
    Ok(shape)
}

/// Returns the rows and columns of the result.
pub(super) fn swiglu(x: &Tensor) -> Result<[i64; 2]> {
    let call = Call("swiglu");
    let shape = call.matrix("x", x)?;
    call.float("x", x, &[shape[0], shape[1] / 2 * 2])?;
    Ok([shape[0], shape[1] / 2])
}

pub(super) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<[i64; 2]> {
    let shape = swiglu(x)?;
    Call("swiglu_backward").is("grad", grad, &shape, &[x.kind()])?;
    Ok(shape)
}

/// Returns the tokens and the width of their rows.
pub(super) fn gather(rows: ExpertRows) -> Result<[i64; 2]> {
    let call = Call("gather");
    let shape = returned(call, rows)?;
    call.f32("by_token", rows.by_token, &[shape[0], 1])?;
    Ok(shape)
}

pub(super) fn gather_backward(rows: ExpertRows, grad: &Tensor) -> Result<[i64; 2]> {
    let shape = gather(rows)?;
    Call("gather_backward").is("grad", grad, &shape, &[rows.x.kind()])?;
    Ok(shape)
}

/// The same for rows that return to tokens, some of which bypassed the experts.
fn returned(call: Call, ExpertRows { x, by, passed, .. }: ExpertRows) -> Result<[i64; 2]> {
    let shape = [by.rows, call.matrix("x", x)?[1]];
    call.float("x", x, &shape)?;
    passed.map_or(Ok(()), |passed| call.is("passed", passed, &shape, &[x.kind()]))?;
    Ok([by.places.extent(0), shape[1]])
}

/// Returns the rows and columns of each matrix.
pub(super) fn newton_schulz(stack: &Tensor) -> Result<[i64; 2]> {
    let (call, size) = (Call("newton_schulz"), stack.size());
    call.f32("stack", stack, &size)?;
    match size[..] {
        [rows, columns] | [_, rows, columns] => Ok([rows, columns]),
        _ => Err(call.refuse("stack", format!("{size:?}"), "2 or 3 dimensions".to_owned())),
    }
}

pub(super) fn adamw(weight: &Tensor, moments: [&Tensor; 2], gradient: &Tensor) -> Result<Call> {
    let (call, shape) = (Call("adamw"), weight.size());
    call.f32("weight", weight, &shape)?;
    moments.into_iter().try_for_each(|moment| call.f32("a moment", moment, &shape))?;
    call.f32("gradient", gradient, &shape)?;
    Ok(call)
}

/// Returns the number of tokens.
pub(super) fn attention(by: Attention) -> Result<i64> {
    let (call, [queries, keys, width]) = (Call("attention"), by.shape);
    if keys <= 0 || queries % keys != 0 {
        let found = format!("{queries} queries for {keys} keys");
        return Err(call.refuse("shape", found, "as many queries for each key".to_owned()));
    }
    let (tokens, others) =
        (call.sizes::<3>("query", by.query)?[1], call.matrix("value", by.value)?[0]);
    call.float("query", by.query, &[queries, tokens, width])?;
    call.is("key", by.key, &[keys, others, width], &[by.query.kind()])?;
    call.is("value", by.value, &[others, keys * width], &[by.query.kind()])?;
    let end = by.spans.iter().try_fold((0, 0), |(end, keys), span| {
        let follows = span.start == end && span.len > 0 && span.before >= 0;
        follows.then_some((end + span.len, keys + span.keys()))
    });
    if end != Some((tokens, others)) {
        let wanted = format!("spans in order that cover {tokens} queries and {others} keys");
        return Err(call.refuse("spans", format!("{:?}", by.spans), wanted));
    }
    if let Some(window) = by.window.filter(|window| *window < 1) {
        return Err(call.refuse("window", window.to_string(), "1 or more".to_owned()));
    }
    Ok(tokens)
}

/// The error if attention's backward pass gets what other kernels saved.
pub(super) fn not_its_own(saved: &[[Tensor; 2]]) -> Error {
    let found = format!("{} pairs of tensors", saved.len());
    Call("attention_backward").refuse("saved", found, "its own".to_owned())
}

/// The gradient of attention's output.
pub(super) fn attention_gradient(by: Attention, grad: &Tensor) -> Result<()> {
    let shape = [attention(by)?, by.shape[0] * by.shape[2]];
    Call("attention_backward").is("grad", grad, &shape, &[by.query.kind()])
}

pub(super) fn attention_backward(by: Attention, grad: &Tensor, out: AttentionGrads) -> Result<()> {
    attention_gradient(by, grad)?;
    let (call, kind) = (Call("attention_backward"), by.query.kind());
    for (operand, found, wanted, kinds) in [
        ("out.query", out.query, by.query, [Kind::Float; 2]),
        ("out.key", out.key, by.key, [Kind::Float; 2]),
        ("out.value", out.value, by.value, [Kind::Float, kind]),
    ] {
        if found.size() != wanted.size() || !kinds.contains(&found.kind()) {
            let shown = format!("{:?} {:?}", found.kind(), found.size());
            return Err(call.refuse(operand, shown, format!("{kinds:?} {:?}", wanted.size())));
        }
    }
    Ok(())
}

pub(super) fn embedding(
    table: &Tensor,
    tokens: &Tensor,
    bias: &Tensor,
    scale: &Tensor,
) -> Result<()> {
    let call = Call("embedding");
    let ([rows, width], count) = (call.matrix("table", table)?, call.sizes::<1>("tokens", tokens)?);
    call.float("table", table, &[rows, width])?;
    call.i64("tokens", tokens, &count)?;
    call.f32("bias", bias, &[width])?;
    call.f32("scale", scale, &[width])
}

pub(super) fn embedding_backward(
    tokens: &Tensor,
    embedded: &Tensor,
    scale: &Tensor,
    grad: &Tensor,
    table: &Tensor,
) -> Result<()> {
    let call = Call("embedding_backward");
    let ([rows, width], count) = (call.matrix("table", table)?, call.sizes::<1>("tokens", tokens)?);
    call.f32("table", table, &[rows, width])?;
    call.i64("tokens", tokens, &count)?;
    call.f32("embedded", embedded, &[count[0], width])?;
    call.f32("scale", scale, &[width])?;
    call.f32("grad", grad, &[count[0], width])
}

pub(super) fn router(
    by: RouterWeights,
    x: &Tensor,
    before: Option<&Tensor>,
    balance: &Tensor,
) -> Result<()> {
    let call = Call("router");
    let ([tokens, width], [classes, size]) = (call.matrix("x", x)?, call.matrix("out", by.out)?);
    call.float("x", x, &[tokens, width])?;
    call.is("down", by.down, &[size, width], &[x.kind()])?;
    for (name, vector) in [
        ("down_bias", by.down_bias),
        ("norm", by.norm),
        ("fc1_bias", by.fc1_bias),
        ("fc2_bias", by.fc2_bias),
    ] {
        call.f32(name, vector, &[size])?;
    }
    call.f32("fc1", by.fc1, &[size, size])?;
    call.f32("fc2", by.fc2, &[size, size])?;
    call.f32("out", by.out, &[classes, size])?;
    call.f32("balance", balance, &[classes])?;
    by.decay.map_or(Ok(()), |decay| call.f32("decay", decay, &[size]))?;
    before.map_or(Ok(()), |before| call.f32("before", before, &[tokens, size]))
}

pub(super) fn router_backward(
    x: &Tensor,
    weight: &Tensor,
    state: Option<&Tensor>,
    saved: &Tensor,
) -> Result<()> {
    let call = Call("router_backward");
    let shape = call.matrix("saved", saved)?;
    let width = call.matrix("x", x)?[1];
    call.float("x", x, &[shape[0], width])?;
    call.f32("weight", weight, &[shape[0], 1])?;
    state.map_or(Ok(()), |state| call.f32("state", state, &shape))
}

pub(super) fn dispatch(choice: &Tensor, classes: i64) -> Result<()> {
    let call = Call("dispatch");
    let count = call.sizes::<1>("choice", choice)?;
    if classes < 1 {
        return Err(call.refuse("classes", format!("{classes}"), "at least 1".to_owned()));
    }
    call.i64("choice", choice, &count)
}

/// Returns the columns of the result and of `rows`, for a matmul with expert weights of which these are the dimensions.
pub(super) fn grouped(
    call: &Call,
    by: &Dispatch,
    rows: &Tensor,
    weights: &Tensor,
    [own, inner]: [usize; 2],
) -> Result<[i64; 2]> {
    let [own, inner] = expert_weights(call, by, rows, weights, [own, inner])?;
    let count = call.matrix("rows", rows)?[0].max(by.computed);
    call.float("rows", rows, &[count, inner])?;
    Ok([own, inner])
}

/// The same without requirements on the number of rows.
pub(super) fn expert_weights(
    call: &Call,
    by: &Dispatch,
    rows: &Tensor,
    weights: &Tensor,
    [own, inner]: [usize; 2],
) -> Result<[i64; 2]> {
    let size = call.sizes::<3>("weights", weights)?;
    call.is("weights", weights, &[by.experts, size[1], size[2]], &[rows.kind()])?;
    let count = call.matrix("rows", rows)?[0];
    call.float("rows", rows, &[count, size[inner]])?;
    Ok([size[own], size[inner]])
}

/// Returns the columns of both operands of a matmul that is the gradient of expert weights.
pub(super) fn grouped_weights(
    call: &Call,
    by: &Dispatch,
    grad: &Tensor,
    rows: &Tensor,
) -> Result<[i64; 2]> {
    let mut widths = [0; 2];
    for (width, (name, tensor)) in widths.iter_mut().zip([("grad", grad), ("rows", rows)]) {
        let [count, own] = call.matrix(name, tensor)?;
        call.is(name, tensor, &[count.max(by.computed), own], &[rows.kind()])?;
        call.float(name, tensor, &[count, own])?;
        *width = own;
    }
    Ok(widths)
}

/// Returns tokens and columns.
pub(super) fn unpermute(rows: ExpertRows) -> Result<[i64; 2]> {
    let call = Call("unpermute");
    let shape = returned(call, rows)?;
    call.is("by_token", rows.by_token, &shape, &[rows.x.kind()])?;
    Ok(shape)
}

/// Returns tokens and vocabulary size.
pub(super) fn cross_entropy(by: CrossEntropy) -> Result<[i64; 2]> {
    let call = Call("cross_entropy");
    let ([tokens, width], [size, _]) =
        (call.matrix("hidden", by.hidden)?, call.matrix("weights", by.weights)?);
    call.float("hidden", by.hidden, &[tokens, width])?;
    call.is("weights", by.weights, &[size, width], &[by.hidden.kind()])?;
    call.i64("labels", by.labels, &[tokens])?;
    call.f32("mask", by.mask, &[tokens])?;
    for (name, number, most) in [("chunk", by.chunk, i64::MAX), ("shards", by.shards, size)] {
        if number < 1 || number > most {
            return Err(call.refuse(name, format!("{number}"), format!("1 to {most}")));
        }
    }
    if !(0.0..=f64::from(f32::MAX)).contains(&by.z_loss) {
        let wanted = "a finite number from 0".to_owned();
        return Err(call.refuse("z_loss", by.z_loss.to_string(), wanted));
    }
    Ok([tokens, size])
}

pub(super) fn nesterov(momentum: &Tensor, gradient: &Tensor) -> Result<Call> {
    let (call, shape) = (Call("nesterov"), gradient.size());
    call.f32("momentum", momentum, &shape)?;
    call.f32("gradient", gradient, &shape)?;
    Ok(call)
}

pub(super) fn rounded(narrow: &Tensor, wide: &Tensor) -> Result<()> {
    let (call, shape) = (Call("rounded"), narrow.size());
    call.is("narrow", narrow, &shape, &[Kind::BFloat16])?;
    call.f32("wide", wide, &shape)
}

pub(super) fn update(one: &Update) -> Result<()> {
    let (call, shape) = (Call("update"), one.weight.size());
    let [weight, first, second] = one.parts();
    for (name, tensor) in [("weight", weight), ("first", first), ("second", second)] {
        tensor.map_or(Ok(()), |tensor| call.f32(name, tensor, &shape))?;
    }
    call.f32("gradient", one.gradient, &shape)?;
    let Some((rounded, first)) = &one.rounded else { return Ok(()) };
    call.is("rounded", rounded, &rounded.size(), &[Kind::BFloat16])?;
    let [first, length, whole] = [*first, one.weight.numel() as i64, rounded.numel() as i64];
    match (0..=whole - length).contains(&first) {
        true => Ok(()),
        false => {
            let wanted = format!("{length} elements from element {first} on");
            Err(call.refuse("rounded", format!("{whole} elements"), wanted))
        }
    }
}

pub(super) fn descend(weight: &Tensor, direction: &Tensor) -> Result<Call> {
    let (call, shape) = (Call("descend"), weight.size());
    call.f32("weight", weight, &shape)?;
    call.f32("direction", direction, &shape)?;
    Ok(call)
}
