//! The router: one launch each way between the matmuls of its input, which a library computes.

use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::rows::{bands, of_bands};
use super::{Argument, Queue};
use crate::Result;
use crate::layout::Parts as _;
use crate::ops::operands::RouterHidden;
use crate::ops::{
    ParamGradient, REFERENCE, RouterGrads, RouterSaved, RouterWeights, Routes, check,
};

/// Dimensions of the widest router that our kernels compute, in one of two sizes; libtorch's operators compute others.
const WIDEST: [i64; 2] = [128, 256];

/// The kernel for a router of `size` dimensions.
fn by_size(size: i64, [usual, wide]: [&'static CStr; 2]) -> &'static CStr {
    if size <= WIDEST[0] { usual } else { wide }
}

fn or_nothing(tensor: Option<&Tensor>) -> Argument<'_> {
    tensor.map_or(Argument::Nothing, Argument::from)
}

pub(super) fn router(
    queue: &Queue,
    by: RouterWeights,
    x: &Tensor,
    before: Option<&Tensor>,
    balance: &Tensor,
) -> Result<(Routes, RouterSaved)> {
    check::router(by, x, before, balance)?;
    let [rows, size, classes] = [x.extent(0), by.down.extent(0), by.out.extent(0)];
    if size > WIDEST[1] {
        return REFERENCE.router(by, x, before, balance);
    }
    let projected = x.f_matmul(&by.down.swapped(0, 1)?)?;
    let state = match projected.kind() {
        Kind::Float => projected.shallow_clone(),
        _ => queue.room(&[rows, size], Kind::Float)?,
    };
    let (decay, entered) = by.decay.zip(before).unzip();
    let hidden = queue.room(&[2, rows, size], Kind::Float)?;
    let probabilities = queue.room(&[rows, classes], Kind::Float)?;
    let [factors, weight] = [(); 2].map(|()| queue.room(&[rows, 1], Kind::Float));
    let (factors, weight, choice) = (factors?, weight?, queue.room(&[rows], Kind::Int64)?);
    let counts = queue.room(&[bands(rows), classes], Kind::Int)?;
    let kernel = match projected.kind() {
        Kind::Float => by_size(size, [c"router_f32", c"router_wide_f32"]),
        _ => by_size(size, [c"router_bf16", c"router_wide_bf16"]),
    };
    let memory = [&projected, &state, by.down_bias].map(Argument::from);
    let given = [or_nothing(entered), or_nothing(decay)];
    let layers = [by.norm, &factors, by.fc1, by.fc1_bias, by.fc2, by.fc2_bias, by.out, balance];
    let out = [&hidden, &probabilities, &choice, &weight, &counts].map(Argument::from);
    let sizes = [rows.into(), size.into(), classes.into(), (by.eps as f32).into()];
    let arguments = [&memory[..], &given, &layers.map(Argument::from), &out, &sizes].concat();
    queue.launch(kernel, bands(rows), &arguments)?;
    let saved = RouterSaved {
        before: entered.map(Tensor::shallow_clone),
        state: state.shallow_clone(),
        factors,
        hidden: RouterHidden::Before(hidden),
        probabilities,
        choice: choice.shallow_clone(),
    };
    Ok((Routes { choice, weight, state: Some(state), counts: Some(counts) }, saved))
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
    let RouterHidden::Before(hidden) = &saved.hidden else {
        return REFERENCE.router_backward(by, x, saved, weight, state);
    };
    let [rows, classes] = [saved.probabilities.extent(0), saved.probabilities.extent(1)];
    let size = saved.state.extent(1);
    let (logits, last) =
        (queue.room(&[rows, classes], Kind::Float)?, queue.room(&[rows, size], Kind::Float)?);
    let layers = queue.room(&[4, rows, size], Kind::Float)?;
    let (decay, entered) = by.decay.zip(saved.before.as_ref()).unzip();
    let before = entered.map(|_| queue.room(&[rows, size], Kind::Float)).transpose()?;
    let narrow = queue.room(&[rows, size], x.kind())?;
    let partial = queue.room(&[5, bands(rows), size], Kind::Float)?;
    let own = match x.kind() {
        Kind::Float => [Argument::from(&narrow), Argument::Nothing],
        _ => [Argument::Nothing, Argument::from(&narrow)],
    };
    let memory = [&saved.probabilities, &saved.choice, weight, by.out, &logits, &last, hidden];
    let weights = [by.fc2_bias, by.fc2, by.fc1_bias, by.fc1, &layers];
    let norm = [&saved.state, &saved.factors, by.norm].map(Argument::from);
    let given = [state, decay, entered].map(or_nothing);
    let out = [or_nothing(before.as_ref()), Argument::from(&partial)];
    let sizes = [rows, size, classes].map(Argument::from);
    let (memory, weights) = (memory.map(Argument::from), weights.map(Argument::from));
    let arguments = [&memory[..], &weights, &norm, &given, &own, &out, &sizes].concat();
    let kernel = by_size(size, [c"router_backward", c"router_wide_backward"]);
    queue.launch(kernel, bands(rows), &arguments)?;
    let squares = over_rows(&layers.part(0, 2, 2)?, &layers.part(0, 0, 2)?)?;
    let vector = |which| of_bands(&partial, &[which], &[size]);
    let down = match by.part {
        true => {
            narrow.f_to_kind(Kind::Float)?.swapped(0, 1)?.f_matmul(&x.f_to_kind(Kind::Float)?)?
        }
        false => narrow.swapped(0, 1)?.f_matmul(x)?,
    };
    Ok(RouterGrads {
        input: narrow.f_matmul(by.down)?,
        before,
        down: down.into(),
        down_bias: vector(1),
        decay: decay.map(|_| vector(2)),
        norm: vector(0),
        fc1: of_parts(&squares, 0)?,
        fc1_bias: vector(3),
        fc2: of_parts(&squares, 1)?,
        fc2_bias: vector(4),
        out: of_parts(&over_rows(&logits.f_unsqueeze(0)?, &last.f_unsqueeze(0)?)?, 0)?,
    })
}

/// `a^T b` of stacks `[stack, rows, width]`, f32, in parts of rows, which remain to be added: `[stack, parts, ..]`. A
/// library assigns a sum over all rows to as many compute units as its small result has tiles, one or two; so there are
/// up to 16 parts, by the number of rows only.
fn over_rows(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [stack, rows, left] = [0, 1, 2].map(|dimension| a.extent(dimension));
    let right = b.extent(2);
    let mut parts = 1;
    while parts < 16 && rows % (2 * parts) == 0 && rows / (2 * parts) >= 256 {
        parts *= 2;
    }
    let cut = |x: &Tensor, width| x.f_view([stack * parts, rows / parts, width]);
    let sums = cut(a, left)?.swapped(1, 2)?.f_bmm(&cut(b, right)?)?;
    Ok(sums.f_view([stack, parts, left, right])?)
}

/// The sum over the parts of one of them.
fn of_parts(sums: &Tensor, which: i64) -> Result<ParamGradient> {
    let [parts, left, right] = [1, 2, 3].map(|dimension| sums.extent(dimension));
    match parts {
        1 => Ok(sums.f_get(which)?.f_get(0)?.into()),
        _ => Ok(of_bands(&sums.f_flatten(2, 3)?, &[which], &[left, right])),
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::finish::finish;
    use super::*;
    use crate::device::emulated::queue;

    #[test]
    fn sums_over_rows_are_those_of_f64() {
        for rows in [0, 1, 511, 512, 768, 1023, 1024, 8192] {
            let waves = |width: i64| {
                let places = Tensor::arange(2 * rows * width, (Kind::Double, Device::Cpu));
                (places * (1.0 + width as f64)).sin().view([2, rows, width])
            };
            let [a, b] = [waves(5), waves(3)];
            let narrow = |x: &Tensor| x.to_kind(Kind::Float);
            let sums = over_rows(&narrow(&a), &narrow(&b)).unwrap();
            let queue = queue(Device::Cpu).unwrap();
            let all = [0, 1].map(|which| of_parts(&sums, which).unwrap());
            let found = Tensor::stack(&finish(&queue, all.into()).unwrap(), 0);
            let wanted = a.transpose(1, 2).bmm(&b);
            assert_eq!(found.size(), [2, 5, 3]);
            let off = (found.to_kind(Kind::Double) - wanted).abs().max().double_value(&[]);
            assert!(off <= 1e-5 * (rows as f64).max(1.0).sqrt(), "{rows} rows: {off}");
        }
    }
}
