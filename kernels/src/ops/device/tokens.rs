//! Tokens: their rows of the embedding, and their way to experts and back.

use tch::{Kind, Tensor};

use super::rows::{columns, lanes, products};
use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::ops::operands::{Groups, Order};
use crate::ops::{Dispatch, Summed, check};

/// An expert's rows are filled up to a multiple of this (`FILL + 1` in `dispatch.h`).
const ROWS: i64 = 8;

/// Classes that `dispatch_offsets` holds at once.
const CLASSES: i64 = 1024;

pub(super) fn embedding(
    queue: &Queue,
    table: &Tensor,
    tokens: &Tensor,
    bias: &Tensor,
    scale: &Tensor,
) -> Result<[Tensor; 2]> {
    check::embedding(table, tokens, bias, scale)?;
    let (count, width) = (tokens.size()[0], table.size()[1]);
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
) -> Result<[Summed; 2]> {
    check::embedding_backward(tokens, embedded, scale, grad, table)?;
    let (count, width) = (tokens.size()[0], table.size()[1]);
    let memory = [tokens, scale, grad, table].map(Argument::from);
    let sizes = [count, width].map(Argument::from);
    queue.launch(c"embedding_backward", count, &[&memory[..], &sizes].concat())?;
    Ok([columns(queue, grad, scale)?, products(queue, grad, embedded)?])
}

/// Counts and places are made on the device, and stay there: there are as many places as there can be.
pub(super) fn dispatch(queue: &Queue, choice: &Tensor, classes: i64) -> Result<Dispatch> {
    check::dispatch(choice, classes)?;
    if classes > CLASSES {
        let wanted = format!("at most {CLASSES}");
        return Err(check::Call("dispatch").refuse("classes", format!("{classes}"), wanted));
    }
    let tokens = choice.size()[0];
    let (blocks, most) = ((tokens + 255) / 256, tokens + (ROWS - 1) * (classes - 1));
    let first = queue.room(&[blocks, classes], Kind::Int)?;
    let [counts, places] = [classes, tokens].map(|count| queue.room(&[count], Kind::Int64));
    let [ends, order] = [classes, most].map(|count| queue.room(&[count], Kind::Int));
    let (counts, places, ends, order) = (counts?, places?, ends?, order?);
    let sizes = [tokens, classes].map(Argument::from);
    let memory = [choice, &first].map(Argument::from);
    queue.launch(c"dispatch_counts", blocks, &[&memory[..], &sizes].concat())?;
    let memory = [&first, &counts, &ends, &order].map(Argument::from);
    let all = [blocks, classes, most].map(Argument::from);
    queue.launch(c"dispatch_offsets", 1, &[&memory[..], &all].concat())?;
    let memory = [choice, &first, &places, &order].map(Argument::from);
    queue.launch(c"dispatch_places", blocks, &[&memory[..], &sizes].concat())?;

    let (order, groups) = (Order::Marked(order), Groups::There(ends));
    Ok(Dispatch { order, places, counts, experts: classes - 1, rows: most, computed: most, groups })
}

pub(super) fn permute(queue: &Queue, x: &Tensor, by: &Dispatch) -> Result<Tensor> {
    let call = check::Call("permute");
    let Order::Marked(order) = &by.order else {
        return Err(call.refuse("by", "another table's".to_owned(), "its own".to_owned()));
    };
    let (rows, tokens, width) = (order.size()[0], by.places.size()[0], call.matrix("x", x)?[1]);
    call.float("x", x, &[tokens, width])?;
    let out = queue.room(&[rows, width], x.kind())?;
    let kernel = by_kind(x, [c"permute_f32", c"permute_bf16"]);
    let arguments = [x.into(), order.into(), (&out).into(), width.into()];
    queue.launch(kernel, rows, &arguments)?;
    Ok(out)
}

pub(super) fn unpermute(
    queue: &Queue,
    x: &Tensor,
    by: &Dispatch,
    beside: &Tensor,
) -> Result<Tensor> {
    let [tokens, width] = check::unpermute(x, by, beside)?;
    let out = queue.room(&[tokens, width], Kind::Float)?;
    let kernel = by_kind(x, [c"unpermute_f32", c"unpermute_bf16"]);
    let memory = [x, &by.places, beside, &out].map(Argument::from);
    queue.launch(kernel, tokens, &[&memory[..], &[width.into()]].concat())?;
    Ok(out)
}

pub(super) fn gather(
    queue: &Queue,
    x: &Tensor,
    places: &Tensor,
    weight: &Tensor,
) -> Result<Tensor> {
    let [_, tokens, width] = check::gather(x, places, weight)?;
    let out = queue.room(&[tokens, width], Kind::Float)?;
    let kernel = by_kind(x, [c"gather_f32", c"gather_bf16"]);
    let memory = [x, places, weight, &out].map(Argument::from);
    queue.launch(kernel, tokens, &[&memory[..], &[width.into()]].concat())?;
    Ok(out)
}

pub(super) fn gather_backward(
    queue: &Queue,
    x: &Tensor,
    places: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
) -> Result<[Tensor; 2]> {
    let [rows, tokens, width] = check::gather_backward(x, places, weight, grad)?;
    let to_x = Tensor::f_zeros([rows, width], (Kind::Float, queue.device()))?;
    let to_weight = queue.room(&[tokens, 1], Kind::Float)?;
    let kernel = by_kind(x, [c"gather_backward_f32", c"gather_backward_bf16"]);
    let memory = [x, places, weight, grad, &to_x, &to_weight].map(Argument::from);
    let sizes = [tokens, width].map(Argument::from);
    queue.launch(kernel, lanes(tokens), &[&memory[..], &sizes].concat())?;
    Ok([to_x, to_weight])
}
