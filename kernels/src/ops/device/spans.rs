//! Attention over documents: all of a chunk in one launch forward and two backward.

use std::cell::OnceCell;

use tch::{Kind, Tensor};

use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::ops::call::Call;
use crate::ops::{Attended, Attention, AttentionGrads, AttentionSpan, check};

/// Queries and keys of a block (`TILE` in `spans.h`).
const TILE: i64 = 32;

/// Width of the widest head (`SLICES` times `SLICE` there).
const WIDEST: i64 = 256;

/// A window over any document: positions plus a window must fit in 32 bits.
const WIDEST_WINDOW: i64 = i32::MAX as i64;

fn tiles(rows: i64) -> i64 {
    (rows + TILE - 1) / TILE
}

/// The spans as `spans.h` lays them out, on the device.
fn table(queue: &Queue, spans: &[AttentionSpan]) -> Result<Tensor> {
    let mut words = Vec::with_capacity(3 * spans.len());
    let (mut first, mut tile, mut key_tile) = (0, 0, 0);
    for span in spans {
        words.extend([span.start | span.len << 32, span.before | first << 32]);
        words.push(tile | key_tile << 32);
        first += span.keys();
        tile += tiles(span.len);
        key_tile += tiles(span.keys());
    }
    queue.upload(&words)
}

/// The arguments after the operands, the same for all three kernels.
fn numbers(by: Attention) -> [Argument<'static>; 8] {
    let ([heads, keys, width], spans) = (by.shape, by.spans.len() as i64);
    let window = by.window.unwrap_or(i64::MAX).min(WIDEST_WINDOW);
    let sizes = [spans, by.query.size()[1], by.value.size()[0], heads, keys, width, window];
    let [a, b, c, d, e, f, g] = sizes.map(Argument::from);
    [a, b, c, d, e, f, g, ((1.0 / (width as f64).sqrt()) as f32).into()]
}

fn fits(by: Attention) -> Result<i64> {
    let tokens = check::attention(by)?;
    let width = by.shape[2];
    if width > WIDEST {
        let wanted = format!("at most {WIDEST} dimensions");
        return Err(Call("attention").refuse("shape", format!("{width}"), wanted));
    }
    Ok(tokens)
}

pub(super) fn attention(queue: &Queue, by: Attention) -> Result<Attended> {
    let tokens = fits(by)?;
    let [heads, _, width] = by.shape;
    let out = queue.room(&[tokens, heads * width], by.value.kind())?;
    let logs = queue.room(&[heads, tokens], Kind::Float)?;
    let table = match by.kept.and_then(OnceCell::get) {
        Some(kept) => kept.shallow_clone(),
        None => table(queue, by.spans)?,
    };
    if let Some(kept) = by.kept {
        kept.get_or_init(|| table.shallow_clone());
    }
    let kernel = by_kind(by.value, [c"attention_f32", c"attention_bf16"]);
    let memory = [by.query, by.key, by.value, &table, &out, &logs].map(Argument::from);
    let blocks = heads * by.spans.iter().map(|span| tiles(span.len)).sum::<i64>();
    queue.launch(kernel, blocks, &[&memory[..], &numbers(by)].concat())?;
    let saved = vec![[out.shallow_clone(), logs], [table.shallow_clone(), table]];
    Ok(Attended { heads: out, saved })
}

/// Memory for a result: `out` if it is contiguous, otherwise new.
fn side_by_side(queue: &Queue, out: &Tensor) -> Result<Tensor> {
    match out.is_contiguous() {
        true => Ok(out.shallow_clone()),
        false => queue.room(&out.size(), out.kind()),
    }
}

pub(super) fn attention_backward(
    queue: &Queue,
    by: Attention,
    saved: &[[Tensor; 2]],
    grad: &Tensor,
    out: AttentionGrads,
) -> Result<()> {
    check::attention_backward(by, grad, out)?;
    let [[heads, logs], [table, _]] = saved else {
        return Err(check::not_its_own(saved));
    };
    let asked = [out.query, out.key, out.value];
    let [query, key, value] = asked.map(|out| side_by_side(queue, out));
    let (query, key, value) = (query?, key?, value?);
    let [queries, keys, _] = by.shape;
    let along = queue.room(&logs.size(), Kind::Float)?;
    let operands = [by.query, by.key, by.value, table].map(Argument::from);
    let kernel = by_kind(by.value, [c"attention_queries_f32", c"attention_queries_bf16"]);
    let memory = [heads, logs, grad, &query, &along].map(Argument::from);
    let blocks = queries * by.spans.iter().map(|span| tiles(span.len)).sum::<i64>();
    queue.launch(kernel, blocks, &[&operands[..], &memory, &numbers(by)].concat())?;

    let kernel = by_kind(by.value, [c"attention_keys_f32", c"attention_keys_bf16"]);
    // With bf16 operands the gradient of values may be requested in either kind.
    let values = match value.kind() == by.value.kind() {
        true => [(&value).into(), Argument::Nothing],
        false => [Argument::Nothing, (&value).into()],
    };
    let memory = [logs, &along, grad, &key].map(Argument::from);
    let blocks = keys * by.spans.iter().map(|span| tiles(span.keys())).sum::<i64>();
    queue.launch(kernel, blocks, &[&operands[..], &memory, &values, &numbers(by)].concat())?;
    for (out, made) in asked.into_iter().zip([query, key, value]) {
        if !out.is_contiguous() {
            out.shallow_clone().f_copy_(&made)?;
        }
    }
    Ok(())
}
