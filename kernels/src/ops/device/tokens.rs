//! Tokens: their embedding rows, and their dispatch to experts and back.

use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::rows::{BAND, bands, columns, lanes, products};
use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::layout::Parts as _;
use crate::ops::call::Call;
use crate::ops::operands::{ExpertRanges, TokenOrder};
use crate::ops::{Dispatch, ExpertRows, ParamGradient, check};

/// An expert's rows are padded to a multiple of this (`FILL + 1` in `dispatch.h`).
const ROWS: i64 = 8;

/// Maximum number of classes of `dispatch_places`.
const CLASSES: i64 = 1024;

/// Tokens of one round of a block, and the maximum number of blocks, each of which reads the counts of all.
const ROUND: i64 = 256;
const BLOCKS: i64 = 128;

/// Blocks that share the tokens of the embedding's gradient: each scans all of them.
const SHARED: i64 = 512;

pub(super) fn embedding(
    queue: &Queue,
    table: &Tensor,
    tokens: &Tensor,
    bias: &Tensor,
    scale: &Tensor,
) -> Result<[Tensor; 2]> {
    check::embedding(table, tokens, bias, scale)?;
    let (count, width) = (tokens.extent(0), table.extent(1));
    let embedded = queue.room(&[count, width], Kind::Float)?;
    let scaled = queue.room(&[count, width], Kind::Float)?;
    let kernel = by_kind(table, [c"embedding_f32", c"embedding_bf16"]);
    let memory = [table, tokens, bias, scale, &embedded, &scaled].map(Argument::from);
    queue.launch(kernel, count, &[&memory[..], &[width.into()]].concat())?;
    Ok([embedded, scaled])
}

pub(super) fn embedding_backward(
    queue: &Queue,
    tokens: &Tensor,
    embedded: &Tensor,
    scale: &Tensor,
    grad: &Tensor,
    table: &Tensor,
) -> Result<[ParamGradient; 2]> {
    check::embedding_backward(tokens, embedded, scale, grad, table)?;
    let (count, width) = (tokens.extent(0), table.extent(1));
    let memory = [tokens, scale, grad, table].map(Argument::from);
    let blocks = count.min(SHARED);
    let sizes = [count, width, blocks].map(Argument::from);
    queue.launch(c"embedding_backward", blocks, &[&memory[..], &sizes].concat())?;
    Ok([columns(queue, grad, scale)?, products(queue, grad, embedded)?])
}

/// Counts and places are computed and stay on the device; the number of places is the maximum possible. A router may
/// have counted the tokens of each band.
pub(super) fn dispatch(
    queue: &Queue,
    choice: &Tensor,
    counted: Option<&Tensor>,
    classes: i64,
) -> Result<Dispatch> {
    check::dispatch(choice, classes)?;
    if classes > CLASSES {
        let wanted = format!("at most {CLASSES}");
        return Err(Call("dispatch").refuse("classes", format!("{classes}"), wanted));
    }
    let tokens = choice.extent(0);
    let rounds = ((tokens + ROUND * BLOCKS - 1) / (ROUND * BLOCKS)).max(1);
    let blocks = (tokens + ROUND * rounds - 1) / (ROUND * rounds);
    let most = tokens + (ROWS - 1) * (classes - 1);
    let [counts, places] = [classes, tokens].map(|count| queue.room(&[count], Kind::Int64));
    let [ends, order] = [classes, most].map(|count| queue.room(&[count], Kind::Int));
    let (counts, places, ends, order) = (counts?, places?, ends?, order?);
    let (counted, part) = match counted {
        Some(counted) => {
            let call = Call("dispatch");
            call.is("counts", counted, &[bands(tokens), classes], &[Kind::Int])?;
            (counted.shallow_clone(), BAND)
        }
        None => {
            let counted = queue.room(&[blocks, classes], Kind::Int)?;
            let memory = [choice, &counted].map(Argument::from);
            let sizes = [tokens, classes, rounds].map(Argument::from);
            queue.launch(c"dispatch_counts", blocks, &[&memory[..], &sizes].concat())?;
            (counted, ROUND * rounds)
        }
    };
    let memory = [choice, &counted, &counts, &ends, &places, &order].map(Argument::from);
    let sizes = [tokens, classes, most, rounds, part].map(Argument::from);
    queue.launch(c"dispatch_places", blocks.max(1), &[&memory[..], &sizes].concat())?;
    let (order, groups) = (TokenOrder::Marked(order), ExpertRanges::There(ends));
    Ok(Dispatch { order, places, counts, experts: classes - 1, rows: most, computed: most, groups })
}

pub(super) fn permute(queue: &Queue, x: &Tensor, by: &Dispatch) -> Result<Tensor> {
    let call = Call("permute");
    let order = by.marked("permute")?;
    let (rows, tokens, width) = (order.extent(0), by.places.extent(0), call.matrix("x", x)?[1]);
    call.float("x", x, &[tokens, width])?;
    let out = queue.room(&[rows, width], x.kind())?;
    let kernel = by_kind(x, [c"permute_f32", c"permute_bf16"]);
    let arguments = [x.into(), order.into(), (&out).into(), rows.into(), width.into()];
    queue.launch(kernel, lanes(rows), &arguments)?;
    Ok(out)
}

/// The first arguments of kernels that read rows of experts: places, the rows, those that bypassed experts or a null
/// pointer, the end of the experts' rows, and the operand of each token.
pub(super) fn returning<'a>(
    operation: &'static str,
    ExpertRows { x, by, passed, by_token }: ExpertRows<'a>,
) -> Result<[Argument<'a>; 5]> {
    let passed = passed.map_or(Argument::Nothing, Argument::from);
    Ok([(&by.places).into(), x.into(), passed, by.ends(operation)?.into(), by_token.into()])
}

pub(super) fn unpermute(queue: &Queue, rows: ExpertRows) -> Result<Tensor> {
    let (shape, kernels) = (check::unpermute(rows)?, [c"unpermute_f32", c"unpermute_bf16"]);
    returned(queue, returning("unpermute", rows)?, rows, shape, kernels)
}

pub(super) fn gather(queue: &Queue, rows: ExpertRows) -> Result<Tensor> {
    let (shape, kernels) = (check::gather(rows)?, [c"gather_f32", c"gather_bf16"]);
    returned(queue, returning("gather", rows)?, rows, shape, kernels)
}

fn returned(
    queue: &Queue,
    from: [Argument; 5],
    ExpertRows { x, by, .. }: ExpertRows,
    [tokens, width]: [i64; 2],
    kernels: [&CStr; 2],
) -> Result<Tensor> {
    let out = queue.room(&[tokens, width], x.kind())?;
    let rest = [(&out).into(), tokens.into(), by.experts.into(), width.into()];
    queue.launch(by_kind(x, kernels), lanes(tokens), &[&from[..], &rest].concat())?;
    Ok(out)
}

/// One place at a time, so that places without a token get zeros.
pub(super) fn gather_backward(
    queue: &Queue,
    rows: ExpertRows,
    grad: &Tensor,
) -> Result<[Tensor; 2]> {
    let ([tokens, width], ExpertRows { x, by, .. }) = (check::gather_backward(rows, grad)?, rows);
    let to_x = queue.room(&[by.rows, width], x.kind())?;
    let to_weight = queue.room(&[tokens, 1], Kind::Float)?;
    let kernel = by_kind(x, [c"gather_backward_f32", c"gather_backward_bf16"]);
    let [_, rows @ ..] = returning("gather_backward", rows)?;
    let order = [by.marked("gather_backward")?.into()];
    let rest = [grad, &to_x, &to_weight].map(Argument::from);
    let sizes = [by.rows, by.experts, width].map(Argument::from);
    queue.launch(kernel, lanes(by.rows), &[&order[..], &rows, &rest, &sizes].concat())?;
    Ok([to_x, to_weight])
}
