//! Attention by libtorch's own kernels, all documents of a chunk in one launch: in bf16, on devices with matrix units
//! for it.
//!
//! It is FlashAttention-2 (arXiv:2307.08691) with variable-length documents. The last query of a document sees its last
//! key, so a part of a document, with the keys before it, needs no mask of its own. The determinism switches select the
//! deterministic backward pass. It adds the gradients of queries in a number of parts that depends on how many
//! documents a call has and on the size of the device, so the bits depend on all documents of the call. Gradients come
//! in bf16.
//!
//! The default from NVIDIA compute capability 8.0 on. AMD's half of libtorch has another implementation, whose masks
//! begin at the first key: there it is used only if [`ATTENTION`] requests it, and for whole documents without a window
//! only. The stand-in device of the tests reports no architecture.

#![expect(unsafe_code, reason = "calls the C++ shim, for tch has no call for the way there")]

use std::ffi::c_int;

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use super::Queue;
use super::choice::{ATTENTION, capability};
use crate::layout::Parts as _;
use crate::ops::call::Call;
use crate::ops::{Attended, Attention, AttentionGrads, AttentionSpan, HeadGrads, check};
use crate::shim::guarded;
use crate::{Error, Result};

/// Widths of heads must be multiples of this: 16 bytes.
const ALIGNED: i64 = 8;

/// Widest head that it supports on every device.
const WIDEST: i64 = 192;

unsafe extern "C" {
    fn shim_flash_attention(
        operands: *const *const C_tensor,
        longest: *const i64,
        scale: f64,
        before: i64,
        out: *mut *mut C_tensor,
    ) -> c_int;
}

/// Whether it computes this.
pub(super) fn takes(queue: &Queue, wanted: Option<bool>, by: Attention) -> bool {
    let width = by.shape[2];
    // libtorch has no such kernel for main memory, where tests run our own kernels.
    let narrow = by.value.kind() == Kind::BFloat16 && by.value.device().is_cuda();
    let fits = narrow && width % ALIGNED == 0 && width <= WIDEST;
    // With single queries only, its log-sums would have another shape.
    if !fits || by.spans.iter().all(|span| span.len <= 1) {
        return false;
    }
    match (wanted.or_else(|| ATTENTION.known()), capability(queue.architecture())) {
        (Some(false), _) => false,
        (_, Some(number)) => number >= 80,
        (Some(true), None) => {
            let whole = by.spans.iter().all(|span| span.before == 0);
            queue.architecture().is_empty() || (whole && by.window.is_none())
        }
        (None, None) => false,
    }
}

/// Queries and keys of the longest document.
fn longest(by: Attention) -> [i64; 2] {
    let most =
        |of: fn(AttentionSpan) -> i64| by.spans.iter().copied().map(of).max().unwrap_or_default();
    [most(|span| span.len), most(AttentionSpan::keys)]
}

/// Ends of documents among the queries, then among the keys, `[2 (S + 1)]`, i32, on the device.
fn ends(queue: &Queue, by: Attention) -> Result<Tensor> {
    if let Some(kept) = by.kept.and_then(std::cell::OnceCell::get) {
        return Ok(kept.shallow_clone());
    }
    let (mut queries, mut keys) = (vec![0i64], vec![0i64]);
    for span in by.spans {
        queries.push(queries[queries.len() - 1] + span.len);
        keys.push(keys[keys.len() - 1] + span.keys());
    }
    queries.extend(keys);
    if queries.iter().any(|end| i32::try_from(*end).is_err()) {
        let found = format!("{:?} documents", by.spans.len());
        return Err(Call("attention").refuse("spans", found, "fewer than 2^31 tokens".to_owned()));
    }
    // Two i32 in each word, the first in the low half.
    let words: Vec<i64> = queries.chunks(2).map(|pair| pair[0] | pair[1] << 32).collect();
    let made = queue.upload(&words)?.f_view_dtype(Kind::Int)?;
    if let Some(kept) = by.kept {
        kept.get_or_init(|| made.shallow_clone());
    }
    Ok(made)
}

/// Both halves of [`ends`].
fn halves(ends: &Tensor) -> Result<[Tensor; 2]> {
    let half = ends.extent(0) / 2;
    Ok([ends.part(0, 0, half)?, ends.part(0, half, half)?])
}

/// Queries, keys and values as views `[tokens, heads, d]`, without a copy.
fn operands(by: Attention) -> Result<[Tensor; 3]> {
    let [_, keys, width] = by.shape;
    let value = by.value.f_view([-1, keys, width])?;
    Ok([by.query.swapped(0, 1)?, by.key.swapped(0, 1)?, value])
}

fn scale(by: Attention) -> f64 {
    1.0 / (by.shape[2] as f64).sqrt()
}

/// How many keys before its own a query sees; `None`: all. libtorch counts in 32 bits.
fn before(by: Attention) -> Option<i64> {
    by.window.filter(|window| *window <= i64::from(i32::MAX)).map(|window| window - 1)
}

pub(super) fn attention(queue: &Queue, by: Attention) -> Result<Attended> {
    let tokens = check::attention(by)?;
    let ([query, key, value], ends) = (operands(by)?, ends(queue, by)?);
    let [of_queries, of_keys] = halves(&ends)?;
    let given = [&query, &key, &value, &of_queries, &of_keys].map(Tensor::as_ptr);
    let (longest, mut made) = (longest(by), [std::ptr::null_mut(); 4]);
    // SAFETY: five tensors that outlive the call, two counts, and space for four tensors, all of which it fills on
    // success.
    let code = unsafe {
        let before = before(by).unwrap_or(-1);
        shim_flash_attention(given.as_ptr(), longest.as_ptr(), scale(by), before, made.as_mut_ptr())
    };
    guarded("attention", code)?;
    // SAFETY: each is a new tensor that the shim made for us.
    let [out, logs, seed, offset] = made.map(|tensor| unsafe { Tensor::from_ptr(tensor) });
    let out = out.f_reshape([tokens, by.shape[0] * by.shape[2]])?;
    let again = offset.shallow_clone();
    let saved = vec![[out.shallow_clone(), logs], [ends, seed], [offset, again]];
    Ok(Attended { heads: out, saved })
}

pub(super) fn attention_backward(
    by: Attention,
    saved: &[[Tensor; 2]],
    grad: &Tensor,
    out: AttentionGrads,
) -> Result<()> {
    check::attention_backward(by, grad, out)?;
    let made = gradients(by, saved, grad)?;
    for (out, made) in [out.query, out.key, out.value].into_iter().zip(made) {
        out.shallow_clone().f_copy_(&made)?;
    }
    Ok(())
}

pub(super) fn attention_backward_whole(
    by: Attention,
    saved: &[[Tensor; 2]],
    grad: &Tensor,
) -> Result<(HeadGrads, Tensor)> {
    check::attention_gradient(by, grad)?;
    let [query, key, value] = gradients(by, saved, grad)?;
    // Laid out as its operands are, so none is copied.
    Ok((HeadGrads::Apart([query.f_contiguous()?, key.f_contiguous()?]), value.f_contiguous()?))
}

/// The gradients in the shapes of queries, keys and values, bf16.
fn gradients(by: Attention, saved: &[[Tensor; 2]], grad: &Tensor) -> Result<[Tensor; 3]> {
    let [[heads, logs], [ends, seed], [offset, _]] = saved else {
        return Err(check::not_its_own(saved));
    };
    let ([query, key, value], [of_queries, of_keys]) = (operands(by)?, halves(ends)?);
    let ([queries, _, width], [most, most_keys]) = (by.shape, longest(by));
    let of_token = |tensor: &Tensor| tensor.f_view([-1, queries, width]);
    let (to_query, to_key, to_value) = Tensor::f_internal_flash_attention_backward(
        &of_token(grad)?,
        &query,
        &key,
        &value,
        &of_token(heads)?,
        logs,
        &of_queries,
        &of_keys,
        most,
        most_keys,
        0.0,
        true,
        seed,
        offset,
        scale(by),
        before(by),
        None,
    )
    .map_err(Error::from)?;
    Ok([to_query.swapped(0, 1)?, to_key.swapped(0, 1)?, to_value.f_reshape(by.value.size())?])
}
