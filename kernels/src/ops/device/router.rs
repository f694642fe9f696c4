//! The router, and the loss: what stands between their products.

use tch::{Kind, Tensor};

use super::rows::{banded, lanes, of_bands};
use super::{Argument, Queue, by_kind, each};
use crate::Result;
use crate::ops::operands::Inputs;
use crate::ops::{
    CrossEntropy, CrossEntropyGrads, Ops, RouterGrads, RouterSaved, RouterWeights, Routes, check,
};

/// `x += bias`, and `out = gelu(x)`.
fn gelu(queue: &Queue, x: &Tensor, bias: &Tensor, out: &Tensor) -> Result<()> {
    let shape = [x.size()[0], x.size()[1]];
    one(queue, c"bias_gelu", shape, &[x, bias, out].map(Argument::from))
}

/// A kernel with one element a thread.
fn one(
    queue: &Queue,
    kernel: &std::ffi::CStr,
    [rows, width]: [i64; 2],
    memory: &[Argument],
) -> Result<()> {
    super::blocks(rows, width)?;
    let arguments = [memory, &[rows.into(), width.into()]].concat();
    queue.launch(kernel, (rows * width + 255) / 256, &arguments)
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
        inputs: Inputs::Stacked(inputs),
        first,
        second,
        second_out,
        probabilities,
        choice: choice.shallow_clone(),
    };
    Ok((Routes { choice, weight, state }, saved))
}

/// Back through a GELU, into `out`.
fn gelu_backward(queue: &Queue, x: &Tensor, grad: &Tensor, out: &Tensor) -> Result<()> {
    let shape = [x.size()[0], x.size()[1]];
    one(queue, c"gelu_backward", shape, &[x, grad, out].map(Argument::from))
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
    gelu_backward(queue, &saved.second, &logits.f_matmul(by.out)?, &second)?;
    gelu_backward(queue, &saved.first, &second.f_matmul(by.fc2)?, &first)?;
    let squares = hidden.f_transpose(1, 2)?.f_bmm(saved.stacked()?)?;
    let inner = first.f_matmul(by.fc1)?;
    let own = queue.room(&[rows, size], Kind::Float)?;
    let (decay, entered) = by.decay.zip(saved.before.as_ref()).unzip();
    let before = entered.map(|_| queue.room(&[rows, size], Kind::Float)).transpose()?;
    let or_nothing = |tensor: Option<_>| tensor.map_or(Argument::Nothing, Argument::from);
    let memory = [&saved.state, &saved.factors, by.norm, &inner].map(Argument::from);
    let rounded = match x.kind() {
        Kind::Float => None,
        kind => Some(queue.room(&[rows, size], kind)?),
    };
    let out = [Some(&own), rounded.as_ref(), before.as_ref()].map(or_nothing);
    let rest = [&[or_nothing(state), or_nothing(decay)][..], &out].concat();
    let sizes = [rows, size].map(Argument::from);
    let arguments = [&memory[..], &rest, &sizes].concat();
    queue.launch(c"router_norm_backward", lanes(rows), &arguments)?;
    let (partial, blocks) = banded(queue, [5, rows, size])?;
    let memory = [&saved.state, &saved.factors, &inner, &own].map(Argument::from);
    let rest = [or_nothing(entered), (&first).into(), (&second).into(), (&partial).into()];
    queue.launch(c"router_vectors", blocks, &[&memory[..], &rest, &sizes].concat())?;
    let vector = |which| of_bands(&partial, &[which], &[size]);
    let narrow = rounded.unwrap_or(own);
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
        fc1_bias: vector(3)?,
        fc2: squares.f_get(1)?,
        fc2_bias: vector(4)?,
        out: logits.f_tr()?.f_matmul(&saved.second_out)?,
    })
}

/// A chunk of a cross-entropy over the whole vocabulary.
struct Chunk {
    rows: Tensor,
    labels: Tensor,
    mask: Tensor,
    /// In the kind of the rows: first logits, then their slopes.
    logits: Tensor,
    log_sum: Tensor,
}

impl Chunk {
    /// Of the tokens from `start` on; their losses go into `losses`.
    fn of(
        queue: &Queue,
        ops: &dyn Ops,
        by: CrossEntropy,
        start: i64,
        losses: &Tensor,
    ) -> Result<Chunk> {
        let count = by.chunk.min(by.hidden.size()[0] - start);
        let part = |x: &Tensor| x.f_narrow(0, start, count);
        let (rows, labels, mask) = (part(by.hidden)?, part(by.labels)?, part(by.mask)?);
        let logits = ops.matmul(&rows, &by.weights.f_tr()?)?;
        let log_sum = queue.room(&[count], Kind::Float)?;
        let kernel = by_kind(&logits, [c"cross_entropy_f32", c"cross_entropy_bf16"]);
        let losses = part(losses)?;
        let memory = [&logits, &labels, &mask, &log_sum, &losses].map(Argument::from);
        let size = [logits.size()[1].into()];
        queue.launch(kernel, count, &[&memory[..], &size].concat())?;
        Ok(Chunk { rows, labels, mask, logits, log_sum })
    }

    /// Makes slopes of the logits.
    fn slopes(&self, queue: &Queue) -> Result<()> {
        let Chunk { labels, logits, log_sum, .. } = self;
        let kernel = by_kind(logits, [c"cross_entropy_slope_f32", c"cross_entropy_slope_bf16"]);
        let memory = [logits, labels, log_sum].map(Argument::from);
        let arguments = [&memory[..], &[logits.size()[1].into()]].concat();
        queue.launch(kernel, labels.size()[0], &arguments)
    }

    /// `out = x mask / divisor`, row by row; `out` may be `x`.
    fn scaled(&self, queue: &Queue, x: &Tensor, out: &Tensor, divisor: f64) -> Result<()> {
        let kernel = by_kind(x, [c"scale_rows_f32", c"scale_rows_bf16"]);
        let memory = [x, &self.mask, out].map(Argument::from);
        let sizes = [(divisor as f32).into(), x.size()[1].into()];
        queue.launch(kernel, x.size()[0], &[&memory[..], &sizes].concat())
    }
}

/// Losses of the whole vocabulary in one piece.
pub(super) fn cross_entropy(queue: &Queue, ops: &dyn Ops, by: CrossEntropy) -> Result<Tensor> {
    let [tokens, _] = check::cross_entropy(by)?;
    let losses = queue.room(&[tokens], Kind::Float)?;
    for start in (0..tokens).step_by(by.chunk as usize) {
        Chunk::of(queue, ops, by, start, &losses)?;
    }
    Ok(losses)
}

/// The same, and gradients of their sum over `divisor`.
pub(super) fn cross_entropy_backward(
    queue: &Queue,
    ops: &dyn Ops,
    by: CrossEntropy,
    divisor: f64,
) -> Result<CrossEntropyGrads> {
    let [tokens, _] = check::cross_entropy(by)?;
    let float = (Kind::Float, queue.device());
    let mut weights = by.weights.f_new_zeros(by.weights.size(), float)?;
    let hidden = by.hidden.f_empty_like()?;
    let losses = queue.room(&[tokens], Kind::Float)?;
    for start in (0..tokens).step_by(by.chunk as usize) {
        let chunk = Chunk::of(queue, ops, by, start, &losses)?;
        chunk.slopes(queue)?;
        // The mask and the divisor scale the narrow side: rows of D numbers, not of V.
        let scaled = chunk.rows.f_empty_like()?;
        chunk.scaled(queue, &chunk.rows, &scaled, divisor)?;
        let to_hidden = hidden.f_narrow(0, start, chunk.rows.size()[0])?;
        ops.matmul_into(&to_hidden, &chunk.logits, by.weights)?;
        chunk.scaled(queue, &to_hidden, &to_hidden, divisor)?;
        match by.part {
            true => drop(weights.f_add_(&ops.matmul_part(&chunk.logits.f_tr()?, &scaled)?)?),
            false => ops.matmul_add(&mut weights, &chunk.logits.f_tr()?, &scaled)?,
        }
    }
    Ok(CrossEntropyGrads { losses, hidden, weights })
}
