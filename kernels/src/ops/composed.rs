//! Operations composed of others and of libtorch's operators, the same in every table; a device may have kernels of its
//! own.

use tch::{Kind, Tensor};

use super::call::Call;
use super::check;
use super::linear_router::{TopK, chosen, chosen_back};
use super::operands::{RouterHidden, foreign};
use super::{
    Attention, AttentionGrads, ConvShift, Dispatch, ExpertInput, ExpertRows, HeadGrads, NormBack,
    Ops, ParamGradient, ResidualGrads, ResidualScaling, RouterGrads, RouterSaved, RouterWeights,
    Routes,
};
use crate::Result;
use crate::layout::Parts as _;

pub(super) fn attention_backward_whole<O: Ops + ?Sized>(
    ops: &O,
    by: Attention,
    saved: Vec<[Tensor; 2]>,
    grad: &Tensor,
) -> Result<(HeadGrads, Tensor)> {
    let ([queries, keys, width], tokens) = (by.shape, by.query.extent(1));
    let all = [queries + keys, tokens, width];
    let (all, value) =
        (Tensor::f_empty(all, (Kind::Float, grad.device()))?, by.value.f_empty_like()?);
    let [query, key] = [all.part(0, 0, queries)?, all.part(0, queries, keys)?];
    let out = AttentionGrads { query: &query, key: &key, value: &value };
    ops.attention_backward(by, saved, grad, out)?;
    Ok((HeadGrads::Stacked(all), value))
}

/// The sum over rows.
fn columns(x: &Tensor) -> Result<ParamGradient> {
    Ok(ParamGradient::Made(x.f_sum_dim_intlist(0, false, Kind::Float)?))
}

pub(super) fn router<O: Ops + ?Sized>(
    ops: &O,
    by: RouterWeights,
    x: &Tensor,
    before: Option<&Tensor>,
    balance: &Tensor,
) -> Result<(Routes, RouterSaved)> {
    check::router(by, x, before, balance)?;
    let mut state = match by.down.kind() {
        Kind::Float => x.f_linear(by.down, Some(by.down_bias))?,
        _ => x.f_matmul(&by.down.swapped(0, 1)?)?.f_add(by.down_bias)?,
    };
    if let (Some(decay), Some(before)) = (by.decay, before) {
        let _ = state.f_addcmul_(before, decay)?;
    }
    let (normed, factors) = ops.rms_norm(&state, by.norm, by.eps, Kind::Float)?;
    let first = normed.f_linear(by.fc1, Some(by.fc1_bias))?;
    let first_out = first.f_gelu("none")?;
    let second = first_out.f_linear(by.fc2, Some(by.fc2_bias))?;
    let second_out = second.f_gelu("none")?;
    let logits = second_out.f_matmul(&by.out.swapped(0, 1)?)?;
    let [probabilities, choice, weight] = chosen(&logits, Some(balance), TopK::ONE)?;
    let saved = RouterSaved {
        before: before.map(Tensor::shallow_clone),
        state: state.shallow_clone(),
        factors,
        hidden: RouterHidden::All {
            inputs: [normed, first_out, second_out],
            before: [first, second],
        },
        probabilities,
        choice: choice.shallow_clone(),
    };
    Ok((Routes { choice, weight, state: Some(state), counts: None }, saved))
}

pub(super) fn router_backward<O: Ops + ?Sized>(
    ops: &O,
    by: RouterWeights,
    x: &Tensor,
    saved: RouterSaved,
    weight: &Tensor,
    state: Option<&Tensor>,
) -> Result<RouterGrads> {
    check::router_backward(x, weight, state, &saved.state)?;
    let RouterHidden::All { inputs: [normed, first_out, second_out], before: [first, second] } =
        &saved.hidden
    else {
        return Err(foreign("router_backward", "saved"));
    };
    let logits = chosen_back(&saved.probabilities, &saved.choice, weight, TopK::ONE)?;
    let out = logits.swapped(0, 1)?.f_matmul(second_out)?;
    let second = second.f_gelu_backward(&logits.f_matmul(by.out)?, "none")?;
    let fc2 = second.swapped(0, 1)?.f_matmul(first_out)?;
    let first = first.f_gelu_backward(&second.f_matmul(by.fc2)?, "none")?;
    let fc1 = first.swapped(0, 1)?.f_matmul(normed)?;
    let inner = first.f_matmul(by.fc1)?;
    let (mut own, norm) = ops.rms_norm_backward(&saved.state, &saved.factors, by.norm, &inner)?;
    if let Some(state) = state {
        let _ = own.f_add_(state)?;
    }
    let narrow = own.f_to_kind(x.kind())?;
    let down = match by.part {
        true => ops.matmul_part(&narrow.swapped(0, 1)?, x)?,
        false => narrow.swapped(0, 1)?.f_matmul(x)?,
    };
    let (mut decay, mut before) = (None, None);
    if let (Some(by), Some(entered)) = (by.decay, &saved.before) {
        decay = Some(columns(&own.f_mul(entered)?)?);
        before = Some(own.f_mul(by)?);
    }
    Ok(RouterGrads {
        input: narrow.f_matmul(by.down)?,
        before,
        down: down.into(),
        down_bias: columns(&own)?,
        decay,
        norm,
        fc1: fc1.into(),
        fc1_bias: columns(&first)?,
        fc2: fc2.into(),
        fc2_bias: columns(&second)?,
        out: out.into(),
    })
}

pub(super) fn permute(x: &Tensor, by: &Dispatch) -> Result<Tensor> {
    let [tokens, filled] = by.listed("permute")?;
    let mut rows = x.f_index_select(0, tokens)?;
    if filled.extent(0) > 0 {
        let _ = rows.f_index_fill_(0, filled, 0.0)?;
    }
    Ok(rows)
}

pub(super) fn grouped_matmul<O: Ops + ?Sized>(
    ops: &O,
    rows: &Tensor,
    weights: &Tensor,
    by: &Dispatch,
) -> Result<Tensor> {
    let [width, _] = check::grouped(&Call("grouped_matmul"), by, rows, weights, [1, 2])?;
    let out = Tensor::f_empty([by.rows, width], (rows.kind(), rows.device()))?;
    for &[expert, start, count] in by.runs("grouped_matmul")? {
        let weight = weights.f_get(expert)?;
        let part = |x: &Tensor| x.part(0, start, count);
        ops.matmul_into(&part(&out)?, &part(rows)?, &weight.swapped(0, 1)?)?;
    }
    Ok(out)
}

pub(super) fn grouped_matmul_input<O: Ops + ?Sized>(
    ops: &O,
    grad: &Tensor,
    weights: &Tensor,
    by: &Dispatch,
) -> Result<Tensor> {
    let [width, _] = check::grouped(&Call("grouped_matmul_input"), by, grad, weights, [2, 1])?;
    let out = Tensor::f_empty([by.rows, width], (grad.kind(), grad.device()))?;
    for &[expert, start, count] in by.runs("grouped_matmul_input")? {
        let part = |x: &Tensor| x.part(0, start, count);
        ops.matmul_into(&part(&out)?, &part(grad)?, &weights.f_get(expert)?)?;
    }
    Ok(out)
}

pub(super) fn grouped_swiglu<O: Ops + ?Sized>(
    ops: &O,
    rows: &ExpertInput,
    weights: &Tensor,
    by: &Dispatch,
) -> Result<[Tensor; 2]> {
    let both = ops.grouped_matmul(&rows.sorted(ops, by)?, weights, by)?;
    let both = both.part(0, 0, by.computed)?;
    let product = ops.swiglu(&both)?;
    Ok([both, product])
}

pub(super) fn grouped_swiglu_backward<O: Ops + ?Sized>(
    ops: &O,
    grad: &Tensor,
    weights: &Tensor,
    x: &Tensor,
    by: &Dispatch,
) -> Result<Tensor> {
    let grad = ops.grouped_matmul_input(grad, weights, by)?;
    ops.swiglu_backward(x, &grad.part(0, 0, by.computed)?)
}

pub(super) fn grouped_matmul_weights<O: Ops + ?Sized>(
    ops: &O,
    grad: &Tensor,
    rows: &Tensor,
    by: &Dispatch,
) -> Result<Tensor> {
    let shape = [by.experts, grad.extent(1), rows.extent(1)];
    let out = Tensor::f_empty(shape, (rows.kind(), rows.device()))?;
    let mut idle = 0;
    for &[expert, start, count] in by.runs("grouped_matmul_weights")? {
        let part = |x: &Tensor| x.part(0, start, count);
        let _ = out.part(0, idle, expert - idle)?.f_zero_()?;
        ops.matmul_into(&out.f_get(expert)?, &part(grad)?.swapped(0, 1)?, &part(rows)?)?;
        idle = expert + 1;
    }
    let _ = out.part(0, idle, by.experts - idle)?.f_zero_()?;
    Ok(out)
}

pub(super) fn embedding(
    table: &Tensor,
    tokens: &Tensor,
    bias: &Tensor,
    scale: &Tensor,
) -> Result<[Tensor; 2]> {
    check::embedding(table, tokens, bias, scale)?;
    let embedded = table.f_index_select(0, tokens)?.f_add(bias)?;
    let scaled = embedded.f_mul(scale)?;
    Ok([embedded, scaled])
}

pub(super) fn embedding_backward(
    tokens: &Tensor,
    embedded: &Tensor,
    scale: &Tensor,
    grad: &Tensor,
    table: &mut Tensor,
) -> Result<[ParamGradient; 2]> {
    check::embedding_backward(tokens, embedded, scale, grad, table)?;
    let to_scale = columns(&grad.f_mul(embedded)?)?;
    let to_bias = grad.f_sum_dim_intlist(0, false, Kind::Float)?.f_mul(scale)?;
    // In token order, as a token may occur several times.
    let _ = table.f_index_add_(0, tokens, &grad.f_mul(scale)?)?;
    Ok([ParamGradient::Made(to_bias), to_scale])
}

/// The shifted values of [`Ops::conv_shift`].
pub(super) fn shifted(z: &Tensor, by: ConvShift) -> Result<Tensor> {
    let ([stay, go], tokens) = (by.values, z.extent(0));
    let out = Tensor::f_empty([tokens, stay + go], (z.kind(), z.device()))?;
    let from = z.part(1, by.channels(), stay + go)?;
    out.part(1, 0, stay)?.f_copy_(&from.part(1, 0, stay)?)?;
    let (mut later, delayed) = (out.part(1, stay, go)?, from.part(1, stay, go)?);
    later.part(0, 1, tokens - 1)?.f_copy_(&delayed.part(0, 0, tokens - 1)?)?;
    let _ = later.f_index_fill_(0, by.starts, 0.0)?;
    Ok(out)
}

/// Their gradients, written to their columns of the gradient of the input.
pub(super) fn shifted_back(grad: &Tensor, by: ConvShift, into: &Tensor) -> Result<()> {
    let ([stay, go], tokens) = (by.values, into.extent(0));
    let into = into.part(1, by.channels(), stay + go)?;
    into.part(1, 0, stay)?.f_copy_(&grad.part(1, 0, stay)?)?;
    let (later, delayed) = (grad.part(1, stay, go)?, into.part(1, stay, go)?);
    let later = later.f_index_fill(0, by.starts, 0.0)?;
    delayed.part(0, 0, tokens - 1)?.f_copy_(&later.part(0, 1, tokens - 1)?)?;
    let _ = delayed.part(0, tokens - 1, 1)?.f_zero_()?;
    Ok(())
}

/// The row of each token, `[N, D]`.
pub(super) fn returned(
    operation: &'static str,
    ExpertRows { x, by, passed, .. }: ExpertRows,
) -> Result<Tensor> {
    let [tokens, _] = by.listed(operation)?;
    let mut rows = x.f_index_select(0, &by.places)?;
    let rest = |x: &Tensor| x.part(0, by.computed, by.rows - by.computed);
    if by.rows > by.computed {
        let _ = match passed {
            None => rows.f_index_fill_(0, &rest(tokens)?, 0.0)?,
            Some(passed) => rows.f_index_copy_(0, &rest(tokens)?, &rest(passed)?)?,
        };
    }
    Ok(rows)
}

pub(super) fn unpermute(rows: ExpertRows) -> Result<Tensor> {
    check::unpermute(rows)?;
    Ok(returned("unpermute", rows)?.f_add(rows.by_token)?)
}

pub(super) fn residual_norm_gathered<O: Ops + ?Sized>(
    ops: &O,
    branch: ExpertRows,
    residual: &Tensor,
    by: ResidualScaling,
    weight: &Tensor,
    eps: f64,
) -> Result<[Tensor; 3]> {
    ops.residual_norm(&ops.gather(branch)?, residual, by, weight, eps)
}

pub(super) fn residual_norm_gathered_backward<O: Ops + ?Sized>(
    ops: &O,
    branch: ExpertRows,
    residual: &Tensor,
    by: ResidualScaling,
    norm: NormBack,
    grad: &Tensor,
) -> Result<(ResidualGrads, ParamGradient)> {
    let gathered = ops.gather(branch)?;
    let (found, weight) = ops.residual_norm_backward(&gathered, residual, by, norm, grad)?;
    let [branch, gates] = ops.gather_backward(branch, &found.branch)?;
    Ok((ResidualGrads { branch, gates: Some(gates), ..found }, weight))
}
