//! Attention over documents: all of a chunk in one launch forward and two backward.

use std::cell::OnceCell;
use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::{Argument, Queue, by_kind};
use crate::Result;
use crate::layout::Parts as _;
use crate::ops::call::Call;
use crate::ops::{Attended, Attention, AttentionGrads, AttentionSpan, check};

/// Queries and keys of a block in f32 (`TILE` in `spans.h`) and in bf16 (`OWN_ROWS` in `flash.h`).
const TILES: [i64; 2] = [32, 128];

/// Width of the widest head (`SLICES` times `SLICE` in `spans.h`).
const WIDEST: i64 = 256;

/// A window over any document: positions plus a window must fit in 32 bits.
const WIDEST_WINDOW: i64 = i32::MAX as i64;

fn tiles(by: Attention, rows: i64) -> i64 {
    let [wide, narrow] = TILES;
    let tile = if by.value.kind() == Kind::Float { wide } else { narrow };
    (rows + tile - 1) / tile
}

/// Blocks for each head: tiles of what `of` counts of a span.
fn blocks(by: Attention, of: impl Fn(&AttentionSpan) -> i64) -> i64 {
    by.spans.iter().map(|span| tiles(by, of(span))).sum()
}

/// The kernel for operands of this kind; in bf16 there is one for heads of up to 64, 128 and 256 dimensions.
fn kernel<'a>(by: Attention, wide: &'a CStr, narrow: [&'a CStr; 3]) -> &'a CStr {
    let width = by.shape[2];
    let [to_64, to_128, to_256] = narrow;
    let narrow = if width <= 64 {
        to_64
    } else if width <= 128 {
        to_128
    } else {
        to_256
    };
    by_kind(by.value, [wide, narrow])
}

/// The spans as `spans.h` lays them out, on the device.
fn table(queue: &Queue, by: Attention) -> Result<Tensor> {
    let mut words = Vec::with_capacity(3 * by.spans.len());
    let (mut first, mut tile, mut key_tile) = (0, 0, 0);
    for span in by.spans {
        words.extend([span.start | span.len << 32, span.before | first << 32]);
        words.push(tile | key_tile << 32);
        first += span.keys();
        tile += tiles(by, span.len);
        key_tile += tiles(by, span.keys());
    }
    queue.upload(&words)
}

/// The arguments after the operands, the same for all three kernels.
fn numbers(by: Attention) -> [Argument<'static>; 8] {
    let ([heads, keys, width], spans) = (by.shape, by.spans.len() as i64);
    let window = by.window.unwrap_or(i64::MAX).min(WIDEST_WINDOW);
    let sizes = [spans, by.query.extent(1), by.value.extent(0), heads, keys, width, window];
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
        None => table(queue, by)?,
    };
    if let Some(kept) = by.kept {
        kept.get_or_init(|| table.shallow_clone());
    }
    let narrow = [c"attention_64_bf16", c"attention_128_bf16", c"attention_256_bf16"];
    let kernel = kernel(by, c"attention_f32", narrow);
    let memory = [by.query, by.key, by.value, &table, &out, &logs].map(Argument::from);
    let blocks = heads * blocks(by, |span| span.len);
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
    let of_queries = [
        c"attention_queries_64_bf16",
        c"attention_queries_128_bf16",
        c"attention_queries_256_bf16",
    ];
    let of_queries = kernel(by, c"attention_queries_f32", of_queries);
    let memory = [heads, logs, grad, &query, &along].map(Argument::from);
    let tiles = queries * blocks(by, |span| span.len);
    queue.launch(of_queries, tiles, &[&operands[..], &memory, &numbers(by)].concat())?;

    let of_keys =
        [c"attention_keys_64_bf16", c"attention_keys_128_bf16", c"attention_keys_256_bf16"];
    let of_keys = kernel(by, c"attention_keys_f32", of_keys);
    // With bf16 operands the gradient of values may be requested in either kind.
    let values = match value.kind() == by.value.kind() {
        true => [(&value).into(), Argument::Nothing],
        false => [Argument::Nothing, (&value).into()],
    };
    let memory = [logs, &along, grad, &key].map(Argument::from);
    let tiles = keys * blocks(by, |span| span.keys());
    queue.launch(of_keys, tiles, &[&operands[..], &memory, &values, &numbers(by)].concat())?;
    for (out, made) in asked.into_iter().zip([query, key, value]) {
        if !out.is_contiguous() {
            out.shallow_clone().f_copy_(&made)?;
        }
    }
    Ok(())
}
