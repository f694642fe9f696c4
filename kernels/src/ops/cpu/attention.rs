//! Causal softmax attention, document by document, by libtorch's kernel.
//!
//! Keys and values are shared by the query heads of a group: heads of a group are libtorch's heads, key heads its batch, and
//! a key is repeated by a stride of 0.

use tch::{Kind, Tensor};

use crate::Result;
use crate::ops::{Attended, Attention, Span, check};

pub(super) fn attention(by: Attention) -> Result<Attended> {
    let tokens = check::attention(by)?;
    let [queries, keys, width] = by.shape;
    let group = queries / keys;
    let heads = Tensor::f_empty([tokens, queries * width], (by.value.kind(), by.value.device()))?;
    let mut saved = Vec::with_capacity(by.spans.len());
    for span in by.spans {
        let [query, key, value] = operands(by, *span)?;
        let (out, log_sum) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
            &query,
            &key,
            &value,
            0.0,
            true,
            None::<Tensor>,
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
) -> Result<[Tensor; 2]> {
    check::attention_backward(by, grad)?;
    if saved.len() != by.spans.len() {
        let found = format!("{} documents", saved.len());
        let call = check::Call("attention_backward");
        return Err(call.refuse("saved", found, format!("{}", by.spans.len())));
    }
    let [queries, keys, width] = by.shape;
    let group = queries / keys;
    let qk_grad = Tensor::f_empty(by.qk.size(), (Kind::Float, by.qk.device()))?;
    let value_grad = by.value.f_empty_like()?;
    let (query, key) = heads(&qk_grad, by.shape)?;
    let values = values(&value_grad, by.shape)?;
    for (span, [out, log_sum]) in by.spans.iter().zip(saved) {
        let rows = grad.f_narrow(0, span.start, span.len)?;
        let rows = rows.f_view([span.len, keys, group, width])?.f_permute([1, 2, 0, 3])?;
        let [q, k, v] = operands(by, *span)?;
        let (dq, dk, dv) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
            &rows,
            &q,
            &k,
            &v,
            &out,
            &log_sum,
            0.0,
            true,
            None::<Tensor>,
            scale(by),
        )?;
        let part = |x: &Tensor| x.f_narrow(2, span.start, span.len);
        part(&query)?.f_copy_(&dq)?;
        part(&key)?.f_copy_(&dk.f_sum_dim_intlist(1, true, Kind::Float)?)?;
        part(&values)?.f_copy_(&dv.f_sum_dim_intlist(1, true, Kind::Float)?)?;
    }
    Ok([qk_grad, value_grad])
}

/// Queries, keys and values of one document: `[K, H / K, n, d]` each.
fn operands(by: Attention, span: Span) -> Result<[Tensor; 3]> {
    let [queries, keys, width] = by.shape;
    let shape = [keys, queries / keys, -1, width];
    let part = |x: Tensor| x.f_narrow(2, span.start, span.len);
    let (query, key) = heads(by.qk, by.shape)?;
    let value = part(values(by.value, by.shape)?)?.f_expand(shape, false)?;
    Ok([part(query)?, part(key)?.f_expand(shape, false)?, value])
}

/// Of `[G, N, d]`: queries as `[K, H / K, N, d]`, and keys as `[K, 1, N, d]`.
fn heads(qk: &Tensor, [queries, keys, _]: [i64; 3]) -> Result<(Tensor, Tensor)> {
    let query = qk.f_narrow(0, 0, queries)?.f_unflatten(0, [keys, queries / keys])?;
    Ok((query, qk.f_narrow(0, queries, keys)?.f_unsqueeze(1)?))
}

/// `[N, K d]` as `[K, 1, N, d]`.
fn values(value: &Tensor, [_, keys, width]: [i64; 3]) -> Result<Tensor> {
    Ok(value.f_view([value.size()[0], keys, width])?.f_transpose(0, 1)?.f_unsqueeze(1)?)
}

fn scale(by: Attention) -> f64 {
    1.0 / (by.shape[2] as f64).sqrt()
}
