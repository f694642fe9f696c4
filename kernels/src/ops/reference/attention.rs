//! Causal softmax attention, document by document, with materialized scores.

use tch::{Kind, Tensor};

use super::to_f32;
use crate::Result;
use crate::ops::{Attended, Attention, AttentionGrads, AttentionSpan, check};

pub(super) fn attention(by: Attention) -> Result<Attended> {
    let tokens = check::attention(by)?;
    let [queries, _, width] = by.shape;
    let (mut heads, mut first) = (Vec::with_capacity(by.spans.len()), 0);
    for span in by.spans {
        let [_, _, value, scores] = scored(by, *span, first)?;
        let out = scores.f_matmul(&value)?.f_permute([2, 0, 1, 3])?;
        heads.push(out.f_reshape([span.len, queries * width])?);
        first += span.keys();
    }
    let heads = Tensor::f_cat(&heads, 0)?.f_to_kind(by.value.kind())?;
    debug_assert_eq!(heads.size()[0], tokens, "documents cover all tokens, as was checked");
    Ok(Attended { heads, saved: Vec::new() })
}

pub(super) fn attention_backward(
    by: Attention,
    saved: &[[Tensor; 2]],
    grad: &Tensor,
    out: AttentionGrads,
) -> Result<()> {
    check::attention_backward(by, grad, out)?;
    if !saved.is_empty() {
        return Err(check::not_its_own(saved));
    }
    let [queries, keys, width] = by.shape;
    let scale = 1.0 / (width as f64).sqrt();
    let to_value = out.value.f_view([-1, keys, width])?.f_transpose(0, 1)?;
    let mut first = 0;
    for span in by.spans {
        let [query, key, value, scores] = scored(by, *span, first)?;
        let grad = to_f32(&grad.f_narrow(0, span.start, span.len)?)?;
        let grad = grad.f_view([span.len, keys, queries / keys, width])?.f_permute([1, 2, 0, 3])?;
        let of_scores = grad.f_matmul(&value.f_transpose(-1, -2)?)?;
        let along = of_scores.f_mul(&scores)?.f_sum_dim_intlist(-1, true, Kind::Float)?;
        let logits = of_scores.f_sub(&along)?.f_mul(&scores)?.f_mul_scalar(scale)?;
        let group = |x: Tensor| x.f_sum_dim_intlist(1, false, Kind::Float);
        let keys = |x: &Tensor| x.f_narrow(1, first, span.keys());
        let of_query = logits.f_matmul(&key)?.f_flatten(0, 1)?;
        out.query.f_narrow(1, span.start, span.len)?.f_copy_(&of_query)?;
        keys(out.key)?.f_copy_(&group(logits.f_transpose(-1, -2)?.f_matmul(&query)?)?)?;
        keys(&to_value)?.f_copy_(&group(scores.f_transpose(-1, -2)?.f_matmul(&grad)?)?)?;
        first += span.keys();
    }
    Ok(())
}

/// Queries of a span, `[K, H / K, n, d]`, its keys and values from `first` on, `[K, 1, m, d]`, and the softmax of their
/// scores, `[K, H / K, n, m]`, all f32.
fn scored(by: Attention, span: AttentionSpan, first: i64) -> Result<[Tensor; 4]> {
    let [queries, keys, width] = by.shape;
    let query = to_f32(&by.query.f_narrow(1, span.start, span.len)?)?;
    let query = query.f_unflatten(0, [keys, queries / keys])?;
    let key = to_f32(&by.key.f_narrow(1, first, span.keys())?)?.f_unsqueeze(1)?;
    let value = to_f32(&by.value.f_narrow(0, first, span.keys())?)?;
    let value = value.f_view([span.keys(), keys, width])?.f_transpose(0, 1)?.f_unsqueeze(1)?;
    let logits = query.f_matmul(&key.f_transpose(-1, -2)?)?;
    let logits = logits.f_div_scalar((width as f64).sqrt())?;
    let (shape, options) = ([span.len, span.keys()], (Kind::Bool, by.query.device()));
    let all = Tensor::f_ones(shape, options)?;
    let mut hidden = all.f_triu(span.before + 1)?;
    if let Some(window) = by.window {
        hidden = hidden.f_logical_or(&all.f_tril(span.before - window)?)?;
    }
    let scores = logits.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?;
    Ok([query, key, value, scores])
}
