//! Causal softmax attention, document by document, by libtorch's kernel.
//!
//! Keys and values are shared by the query heads of a group: heads of a group are libtorch's heads, key heads its batch, and
//! a key is repeated by a stride of 0.
//!
//! A part of a document that has keys before it is taken in blocks of [`ATTENTION_ROWS`] queries: what hides later keys from them
//! is a tensor with a number for each pair, which for a whole part of a long document would be the largest of all.

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::ops::call::Call;
use crate::ops::{ATTENTION_ROWS, Attended, Attention, AttentionGrads, Span, check};

pub(super) fn attention(by: Attention) -> Result<Attended> {
    let tokens = check::attention(by)?;
    let [queries, keys, width] = by.shape;
    let group = queries / keys;
    let heads = Tensor::f_empty([tokens, queries * width], (by.value.kind(), by.value.device()))?;
    let mut saved = Vec::with_capacity(by.spans.len());
    let spans = by.spans.iter().zip(first_keys(by.spans));
    for (span, first) in spans.flat_map(|(span, first)| blocks(*span).map(move |it| (it, first))) {
        let [query, key, value] = operands(by, span, first)?;
        let (out, log_sum) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
            &query,
            &key,
            &value,
            0.0,
            span.before == 0,
            earlier(span)?,
            scale(by),
        )?;
        let rows = heads.f_narrow(0, span.start, span.len)?;
        let rows = rows.f_view([span.len, keys, group, width])?.f_permute([1, 2, 0, 3])?;
        rows.shallow_clone().f_copy_(&out)?;
        saved.push([out, log_sum]);
    }
    Ok(Attended { heads, saved })
}

pub(super) fn attention_backward(
    by: Attention,
    saved: Vec<[Tensor; 2]>,
    grad: &Tensor,
    out: AttentionGrads,
) -> Result<()> {
    check::attention_backward(by, grad, out)?;
    let parts: usize = by.spans.iter().map(|span| blocks(*span).count()).sum();
    if saved.len() != parts {
        let found = format!("{} blocks of documents", saved.len());
        let call = Call("attention_backward");
        return Err(call.refuse("saved", found, format!("{parts}")));
    }
    let keys = by.shape[1];
    let to_query = out.query.f_unflatten(0, [keys, by.shape[0] / keys])?;
    let (to_key, to_value) = (out.key.f_unsqueeze(1)?, values(out.value, by.shape)?);
    let mut saved = saved.into_iter();
    for (span, first) in by.spans.iter().zip(first_keys(by.spans)) {
        let blocks: Vec<_> = blocks(*span).zip(saved.by_ref()).collect();
        let here = |x: &Tensor| x.f_narrow(2, first, span.keys());
        // The last block sees all keys; what the others say of theirs is added to it, in f32.
        let mut sums: Option<[Tensor; 2]> = None;
        for (block, saved) in blocks.into_iter().rev() {
            let rows = grad.f_narrow(0, block.start, block.len)?;
            let [dq, dk, dv] = back(by, (block, first), saved, &rows)?;
            to_query.f_narrow(2, block.start, block.len)?.f_copy_(&dq)?;
            match &sums {
                None => sums = Some([dk, dv]),
                Some(sums) => {
                    for (sum, term) in sums.iter().zip([dk, dv]) {
                        let _ = sum.f_narrow(2, 0, block.keys())?.f_add_(&term)?;
                    }
                }
            }
        }
        for (sum, to) in sums.iter().flatten().zip([&to_key, &to_value]) {
            here(to)?.f_copy_(sum)?;
        }
    }
    Ok(())
}

/// Gradients of the queries of a block, and, added up over the heads of a group in f32, of all keys and values that it sees.
fn back(
    by: Attention,
    (block, first): (Span, i64),
    [out, log_sum]: [Tensor; 2],
    rows: &Tensor,
) -> Result<[Tensor; 3]> {
    let [queries, keys, width] = by.shape;
    let rows = rows.f_view([block.len, keys, queries / keys, width])?.f_permute([1, 2, 0, 3])?;
    let [q, k, v] = operands(by, block, first)?;
    let (dq, dk, dv) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
        &rows,
        &q,
        &k,
        &v,
        &out,
        &log_sum,
        0.0,
        block.before == 0,
        earlier(block)?,
        scale(by),
    )?;
    let over_group = |x: Tensor| x.f_sum_dim_intlist(1, true, Kind::Float);
    Ok([dq, over_group(dk)?, over_group(dv)?])
}

/// A span in blocks of queries; whole where its document begins with it, for that order libtorch knows by itself.
fn blocks(span: Span) -> impl Iterator<Item = Span> {
    let rows = if span.before == 0 { span.len.max(1) } else { ATTENTION_ROWS };
    (0..span.len).step_by(rows as usize).map(move |at| {
        let (start, len, before) = (span.start + at, rows.min(span.len - at), span.before + at);
        Span { start, len, before }
    })
}

/// The first key of each span.
fn first_keys(spans: &[Span]) -> impl Iterator<Item = i64> {
    spans.iter().scan(0, |end, span| {
        let first = *end;
        *end += span.keys();
        Some(first)
    })
}

/// What is added to the scores of a span with keys before it, `[n, m]`: token t sees what came before, and keys up to its own.
/// libtorch's own causal order would have its first token see the first key alone.
fn earlier(span: Span) -> Result<Option<Tensor>> {
    if span.before == 0 {
        return Ok(None);
    }
    let shape = [span.len, span.keys()];
    let mut hidden = Tensor::f_full(shape, f64::NEG_INFINITY, (Kind::Float, Device::Cpu))?;
    Ok(Some(hidden.f_triu_(span.before + 1)?))
}

/// Queries of a span, `[K, H / K, n, d]`, and its keys and values from `first` on, `[K, H / K, m, d]`.
fn operands(by: Attention, span: Span, first: i64) -> Result<[Tensor; 3]> {
    let [queries, keys, width] = by.shape;
    let group = queries / keys;
    let query = by.query.f_unflatten(0, [keys, group])?.f_narrow(2, span.start, span.len)?;
    let shape = [keys, group, -1, width];
    let shared = |x: Tensor| x.f_narrow(2, first, span.keys())?.f_expand(shape, false);
    Ok([query, shared(by.key.f_unsqueeze(1)?)?, shared(values(by.value, by.shape)?)?])
}

/// `[M, K d]` as `[K, 1, M, d]`.
fn values(value: &Tensor, [_, keys, width]: [i64; 3]) -> Result<Tensor> {
    Ok(value.f_view([value.size()[0], keys, width])?.f_transpose(0, 1)?.f_unsqueeze(1)?)
}

fn scale(by: Attention) -> f64 {
    1.0 / (by.shape[2] as f64).sqrt()
}
