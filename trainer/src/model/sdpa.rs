//! Causal softmax attention, span by span: a token sees its own document and nothing else.
//!
//! Keys and values are shared by the query heads of a group: heads of a group are libtorch's heads, key heads its
//! batch, and a key is repeated by a stride of 0.

use tch::{Device, Kind, Tensor};

use super::ZayaConfig;
use super::attention::split;
use super::input::Span;

/// What the backward pass needs.
#[derive(Debug)]
pub(super) struct Saved {
    /// `[G, N, d]`.
    qk: Tensor,
    /// `[N, K d]`.
    value: Tensor,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    /// Log of the softmax' denominators; on CPU only.
    log_sum: Option<Tensor>,
}

/// Outputs of all heads, `[N, H d]`, from queries and keys `[G, N, d]` and values `[N, K d]`.
pub(super) fn forward(
    config: &ZayaConfig,
    spans: &[Span],
    qk: Tensor,
    value: Tensor,
) -> (Tensor, Saved) {
    let (query, key) = split(config, &qk);
    let values = values_of(config, &value);
    let n = value.size()[0];
    let heads = Tensor::empty([n, config.query_size()], (value.kind(), value.device()));
    let group = config.group();
    let shape = [config.num_key_value_heads, group, -1, config.head_dim];
    let mut parts = Vec::with_capacity(spans.len());
    for span in spans {
        let part = |x: &Tensor| x.narrow(2, span.start, span.len);
        let (query, key) = (part(&query), part(&key).expand(shape, false));
        let part = attend(config, query, key, part(&values).expand(shape, false));
        let rows = heads.narrow(0, span.start, span.len);
        let rows = rows.view([span.len, shape[0], group, shape[3]]).permute([1, 2, 0, 3]);
        rows.shallow_clone().copy_(&part.out.detach());
        parts.push(part);
    }
    (heads, Saved { qk, value, parts })
}

/// Gradients of queries and keys, `[G, N, d]`, f32, and of values, `[N, K d]`.
pub(super) fn backward(
    config: &ZayaConfig,
    spans: &[Span],
    saved: Saved,
    grad: &Tensor,
) -> (Tensor, Tensor) {
    let Saved { qk, value, parts } = saved;
    // What follows turns and scales the gradients of queries and keys in f32.
    let qk_grad = qk.new_empty(qk.size(), (Kind::Float, qk.device()));
    let value_grad = value.empty_like();
    let (query, key) = split(config, &qk_grad);
    let values = values_of(config, &value_grad);
    let (keys, group) = (config.num_key_value_heads, config.group());
    for (span, part) in spans.iter().zip(parts) {
        let rows = grad.narrow(0, span.start, span.len);
        let rows = rows.view([span.len, keys, group, config.head_dim]).permute([1, 2, 0, 3]);
        let (dq, dk, dv) = attend_backward(config, part, &rows);
        let part = |x: &Tensor| x.narrow(2, span.start, span.len);
        part(&query).copy_(&dq);
        part(&key).copy_(&dk.sum_dim_intlist(1, true, Kind::Float));
        part(&values).copy_(&dv.sum_dim_intlist(1, true, Kind::Float));
    }
    (qk_grad, value_grad)
}

/// `[N, K d]` as `[K, 1, N, d]`.
fn values_of(config: &ZayaConfig, value: &Tensor) -> Tensor {
    let shape = [value.size()[0], config.num_key_value_heads, config.head_dim];
    value.view(shape).transpose(0, 1).unsqueeze(1)
}

fn scale(config: &ZayaConfig) -> f64 {
    1.0 / (config.head_dim as f64).sqrt()
}

fn attend(config: &ZayaConfig, query: Tensor, key: Tensor, value: Tensor) -> Part {
    let none = None::<Tensor>;
    if query.device() == Device::Cpu {
        let (out, log_sum) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
            &query,
            &key,
            &value,
            0.0,
            true,
            none,
            scale(config),
        );
        return Part { query, key, value, out, log_sum: Some(log_sum) };
    }
    // Other devices have several kernels, each with a backward of its own signature: libtorch chooses and
    // differentiates, inside this span only.
    let watched = |x: Tensor| x.detach().set_requires_grad(true);
    let (query, key, value) = (watched(query), watched(key), watched(value));
    let out = tch::with_grad(|| {
        Tensor::scaled_dot_product_attention(
            &query,
            &key,
            &value,
            none,
            0.0,
            true,
            scale(config),
            false,
        )
    });
    Part { query, key, value, out, log_sum: None }
}

fn attend_backward(config: &ZayaConfig, part: Part, grad: &Tensor) -> (Tensor, Tensor, Tensor) {
    let Part { query, key, value, out, log_sum } = part;
    if let Some(log_sum) = log_sum {
        return Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            &query,
            &key,
            &value,
            &out,
            &log_sum,
            0.0,
            true,
            None::<Tensor>,
            scale(config),
        );
    }
    // The gradient of this sum with respect to `out` is `grad`, bit for bit.
    let surrogate = tch::with_grad(|| (out * grad).sum(Kind::Float));
    let grads = Tensor::run_backward(&[surrogate], &[&query, &key, &value], false, false);
    let grads: [Tensor; 3] = grads.try_into().unwrap_or_else(|grads: Vec<Tensor>| {
        panic!("libtorch gave {} gradients for three tensors", grads.len())
    });
    grads.into()
}
