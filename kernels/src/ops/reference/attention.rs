//! Causal softmax attention, document by document, with its scores written down.

use tch::{Kind, Tensor};

use super::to_f32;
use crate::Result;
use crate::ops::{Attended, Attention, Span, check};

pub(super) fn attention(by: Attention) -> Result<Attended> {
    let tokens = check::attention(by)?;
    let [queries, _, width] = by.shape;
    let mut heads = Vec::with_capacity(by.spans.len());
    for span in by.spans {
        let [_, _, value, scores] = scored(by, *span)?;
        let out = scores.f_matmul(&value)?.f_permute([2, 0, 1, 3])?;
        heads.push(out.f_reshape([span.len, queries * width])?);
    }
    let heads = Tensor::f_cat(&heads, 0)?.f_to_kind(by.value.kind())?;
    debug_assert_eq!(heads.size()[0], tokens, "documents cover all tokens, as was checked");
    Ok(Attended { heads, saved: Vec::new() })
}

pub(super) fn attention_backward(
    by: Attention,
    saved: &[[Tensor; 2]],
    grad: &Tensor,
) -> Result<[Tensor; 2]> {
    check::attention_backward(by, grad)?;
    if !saved.is_empty() {
        let found = "what another table kept".to_owned();
        return Err(check::Call("attention_backward").refuse("saved", found, "its own".to_owned()));
    }
    let [queries, keys, width] = by.shape;
    let scale = 1.0 / (width as f64).sqrt();
    let (mut of_queries, mut of_keys, mut of_values) = (Vec::new(), Vec::new(), Vec::new());
    for span in by.spans {
        let [query, key, value, scores] = scored(by, *span)?;
        let grad = to_f32(&grad.f_narrow(0, span.start, span.len)?)?;
        let grad = grad.f_view([span.len, keys, queries / keys, width])?.f_permute([1, 2, 0, 3])?;
        let of_scores = grad.f_matmul(&value.f_transpose(-1, -2)?)?;
        let along = of_scores.f_mul(&scores)?.f_sum_dim_intlist(-1, true, Kind::Float)?;
        let logits = of_scores.f_sub(&along)?.f_mul(&scores)?.f_mul_scalar(scale)?;
        let group = |x: Tensor| x.f_sum_dim_intlist(1, false, Kind::Float);
        of_queries.push(logits.f_matmul(&key)?.f_flatten(0, 1)?);
        of_keys.push(group(logits.f_transpose(-1, -2)?.f_matmul(&query)?)?);
        of_values.push(group(scores.f_transpose(-1, -2)?.f_matmul(&grad)?)?);
    }
    let along_tokens = |parts: &[Tensor]| Tensor::f_cat(parts, 1);
    let qk = Tensor::f_cat(&[along_tokens(&of_queries)?, along_tokens(&of_keys)?], 0)?;
    let value = along_tokens(&of_values)?.f_transpose(0, 1)?.f_reshape(by.value.size())?;
    Ok([qk, value.f_to_kind(by.value.kind())?])
}

/// Queries `[K, H / K, n, d]`, keys and values `[K, 1, n, d]`, and the softmax of their scores, `[K, H / K, n, n]`, all f32.
fn scored(by: Attention, span: Span) -> Result<[Tensor; 4]> {
    let [queries, keys, width] = by.shape;
    let qk = to_f32(&by.qk.f_narrow(1, span.start, span.len)?)?;
    let query = qk.f_narrow(0, 0, queries)?.f_unflatten(0, [keys, queries / keys])?;
    let key = qk.f_narrow(0, queries, keys)?.f_unsqueeze(1)?;
    let value = to_f32(&by.value.f_narrow(0, span.start, span.len)?)?;
    let value = value.f_view([span.len, keys, width])?.f_transpose(0, 1)?.f_unsqueeze(1)?;
    let logits = query.f_matmul(&key.f_transpose(-1, -2)?)?;
    let logits = logits.f_div_scalar((width as f64).sqrt())?;
    let later = Tensor::f_ones([span.len, span.len], (Kind::Bool, by.qk.device()))?.f_triu(1)?;
    let scores = logits.f_masked_fill(&later, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?;
    Ok([query, key, value, scores])
}
