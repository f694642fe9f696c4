//! The router and the elementwise parts between its matmuls.

use tch::{Kind, Tensor};

use super::rows::{banded, bands, lanes, of_bands};
use super::{Argument, Queue, by_kind, each};
use crate::Result;
use crate::ops::operands::HiddenInputs;
use crate::ops::{ParamGradient, RouterGrads, RouterSaved, RouterWeights, Routes, check};

/// `out = gelu(x + bias)`.
fn gelu(queue: &Queue, x: &Tensor, bias: &Tensor, out: &Tensor) -> Result<()> {
    let [rows, width] = [x.size()[0], x.size()[1]];
    let memory = [x, bias, out].map(Argument::from);
    let arguments = [&memory[..], &[rows.into(), width.into()]].concat();
    queue.launch(c"bias_gelu", patches(rows, width), &arguments)
}

/// Blocks that have 32 columns of a band each.
fn patches(rows: i64, width: i64) -> i64 {
    bands(rows) * ((width + 31) / 32)
}

pub(super) fn router(
    queue: &Queue,
    by: RouterWeights,
    x: &Tensor,
    before: Option<&Tensor>,
    balance: &Tensor,
) -> Result<(Routes, RouterSaved)> {
    check::router(by, x, before, balance)?;
    let [rows, size] = [x.size()[0], by.down.size()[0]];
    let projected = x.f_matmul(&by.down.f_tr()?)?;
    let state = match projected.kind() {
        Kind::Float => projected.shallow_clone(),
        _ => queue.room(&[rows, size], Kind::Float)?,
    };
    let (decay, entered) = match (by.decay, before) {
        (Some(decay), Some(before)) => (Argument::from(decay), Argument::from(before)),
        _ => (Argument::Nothing, Argument::Nothing),
    };
    let inputs = queue.room(&[2, rows, size], Kind::Float)?;
    let (normed, first_out) = (inputs.f_get(0)?, inputs.f_get(1)?);
    let factors = queue.room(&[rows, 1], Kind::Float)?;
    let kernel = by_kind(&projected, [c"router_norm_f32", c"router_norm_bf16"]);
    let memory = [&projected, &state, by.down_bias].map(Argument::from);
    let memory = [&memory[..], &[entered, decay, by.norm.into()]].concat();
    let out = [(&normed).into(), (&factors).into()];
    let sizes = [rows.into(), size.into(), (by.eps as f32).into()];
    queue.launch(kernel, lanes(rows), &[&memory[..], &out, &sizes].concat())?;
    let first = normed.f_matmul(&by.fc1.f_tr()?)?;
    gelu(queue, &first, by.fc1_bias, &first_out)?;
    let second = first_out.f_matmul(&by.fc2.f_tr()?)?;
    let second_out = queue.room(&[rows, size], Kind::Float)?;
    gelu(queue, &second, by.fc2_bias, &second_out)?;
    let logits = second_out.f_matmul(&by.out.f_tr()?)?;
    let classes = logits.size()[1];
    let probabilities = queue.room(&[rows, classes], Kind::Float)?;
    let (choice, weight) =
        (queue.room(&[rows], Kind::Int64)?, queue.room(&[rows, 1], Kind::Float)?);
    let memory = [&logits, balance, &probabilities, &choice, &weight].map(Argument::from);
    let sizes = [rows.into(), classes.into()];
    queue.launch(c"router_choice", lanes(rows), &[&memory[..], &sizes].concat())?;
    let saved = RouterSaved {
        before: before.map(Tensor::shallow_clone),
        state: state.shallow_clone(),
        factors,
        inputs: HiddenInputs::Stacked(inputs),
        first,
        second,
        second_out,
        probabilities,
        choice: choice.shallow_clone(),
    };
    Ok((Routes { choice, weight, state: Some(state) }, saved))
}

/// The backward pass of [`gelu`], into `out`; returns the gradient of the bias.
fn gelu_backward(
    queue: &Queue,
    x: &Tensor,
    bias: &Tensor,
    grad: &Tensor,
    out: &Tensor,
) -> Result<ParamGradient> {
    let [rows, width] = [x.size()[0], x.size()[1]];
    let partial = queue.room(&[1, bands(rows), width], Kind::Float)?;
    let memory = [x, bias, grad, out, &partial].map(Argument::from);
    let arguments = [&memory[..], &[rows.into(), width.into()]].concat();
    queue.launch(c"gelu_backward", patches(rows, width), &arguments)?;
    of_bands(&partial, &[0], &[width])
}

pub(super) fn router_backward(
    queue: &Queue,
    by: RouterWeights,
    x: &Tensor,
    saved: RouterSaved,
    weight: &Tensor,
    state: Option<&Tensor>,
) -> Result<RouterGrads> {
    check::router_backward(x, weight, state, &saved.state)?;
    let [rows, classes] = [saved.probabilities.size()[0], saved.probabilities.size()[1]];
    let size = saved.state.size()[1];
    let logits = queue.room(&[rows, classes], Kind::Float)?;
    let memory = [&saved.probabilities, &saved.choice, weight, &logits].map(Argument::from);
    each(queue, c"router_backward", [rows, classes], &memory)?;
    let hidden = queue.room(&[2, rows, size], Kind::Float)?;
    let (first, second) = (hidden.f_get(0)?, hidden.f_get(1)?);
    let grad = logits.f_matmul(by.out)?;
    let fc2_bias = gelu_backward(queue, &saved.second, by.fc2_bias, &grad, &second)?;
    let grad = second.f_matmul(by.fc2)?;
    let fc1_bias = gelu_backward(queue, &saved.first, by.fc1_bias, &grad, &first)?;
    let squares = over_rows(&hidden, saved.stacked()?)?;
    let inner = first.f_matmul(by.fc1)?;
    let (decay, entered) = by.decay.zip(saved.before.as_ref()).unzip();
    let before = entered.map(|_| queue.room(&[rows, size], Kind::Float)).transpose()?;
    let narrow = queue.room(&[rows, size], x.kind())?;
    let (partial, _) = banded(queue, [3, rows, size])?;
    let or_nothing = |tensor: Option<_>| tensor.map_or(Argument::Nothing, Argument::from);
    let (own, rounded) = match x.kind() {
        Kind::Float => ((&narrow).into(), Argument::Nothing),
        _ => (Argument::Nothing, (&narrow).into()),
    };
    let memory = [&saved.state, &saved.factors, by.norm, &inner].map(Argument::from);
    let given = [state, decay, entered].map(or_nothing);
    let out = [own, rounded, or_nothing(before.as_ref()), (&partial).into()];
    let sizes = [rows, size].map(Argument::from);
    let arguments = [&memory[..], &given, &out, &sizes].concat();
    queue.launch(c"router_norm_backward", bands(rows), &arguments)?;
    let vector = |which| of_bands(&partial, &[which], &[size]);
    let down = match by.part {
        true => narrow.f_to_kind(Kind::Float)?.f_tr()?.f_matmul(&x.f_to_kind(Kind::Float)?)?,
        false => narrow.f_tr()?.f_matmul(x)?.f_to_kind(Kind::Float)?,
    };
    Ok(RouterGrads {
        input: narrow.f_matmul(by.down)?,
        before,
        down,
        down_bias: vector(1)?,
        decay: decay.map(|_| vector(2)).transpose()?,
        norm: vector(0)?,
        fc1: squares.f_get(0)?,
        fc1_bias,
        fc2: squares.f_get(1)?,
        fc2_bias,
        out: over_rows(&logits.f_unsqueeze(0)?, &saved.second_out.f_unsqueeze(0)?)?.f_get(0)?,
    })
}

/// `a^T b` of stacks `[stack, rows, width]`, f32. A library assigns a sum over all rows to as many compute units as its
/// small result has tiles, one or two; so rows are summed in up to 16 parts, whose number depends on the number of rows
/// only.
fn over_rows(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [stack, rows, left] = [0, 1, 2].map(|dimension| a.size()[dimension]);
    let right = b.size()[2];
    let mut parts = 1;
    while parts < 16 && rows % (2 * parts) == 0 && rows / (2 * parts) >= 256 {
        parts *= 2;
    }
    let cut = |x: &Tensor, width| x.f_view([stack * parts, rows / parts, width]);
    let sums = cut(a, left)?.f_transpose(1, 2)?.f_bmm(&cut(b, right)?)?;
    if parts == 1 {
        return Ok(sums);
    }
    Ok(sums.f_view([stack, parts, left, right])?.f_sum_dim_intlist(
        &[1i64][..],
        false,
        Kind::Float,
    )?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn sums_over_rows_are_those_of_f64() {
        for rows in [0, 1, 511, 512, 768, 1023, 1024, 8192] {
            let waves = |width: i64| {
                let places = Tensor::arange(2 * rows * width, (Kind::Double, Device::Cpu));
                (places * (1.0 + width as f64)).sin().view([2, rows, width])
            };
            let [a, b] = [waves(5), waves(3)];
            let narrow = |x: &Tensor| x.to_kind(Kind::Float);
            let found = over_rows(&narrow(&a), &narrow(&b)).unwrap();
            let wanted = a.transpose(1, 2).bmm(&b);
            assert_eq!(found.size(), [2, 5, 3]);
            let off = (found.to_kind(Kind::Double) - wanted).abs().max().double_value(&[]);
            assert!(off <= 1e-5 * (rows as f64).max(1.0).sqrt(), "{rows} rows: {off}");
        }
    }
}
