//! Attention rates on one core over the causal half of the square, ours and libtorch's kernel alternating, and times of
//! ours by window: `cargo bench -p kernels --bench attention`.

#![expect(clippy::print_stdout, reason = "results go to standard output")]

use std::time::Instant;

use kernels::ops::{Attention, AttentionGrads, AttentionSpan, CPU};
use tch::{Device, Kind, Tensor};

/// Query heads, key heads, head width.
const SHAPE: [i64; 3] = [4, 2, 64];

/// Keeps the fastest time of several calls, in seconds.
fn fastest(best: &mut f64, call: impl FnOnce()) {
    let begin = Instant::now();
    call();
    *best = best.min(begin.elapsed().as_secs_f64());
}

/// Queries, keys, values and the gradient of the heads in libtorch's layout: `[K, H / K, N, d]`, keys and values with a
/// stride of 0.
fn as_libtorch_wants(by: Attention, grad: &Tensor) -> [Tensor; 4] {
    let [heads, keys, width] = by.shape;
    let (group, tokens) = (heads / keys, grad.size()[0]);
    let by_head = |x: &Tensor, group: i64| x.unflatten(0, [keys, group]);
    let by_token =
        |x: &Tensor, group: i64| x.view([tokens, keys, group, width]).permute([1, 2, 0, 3]);
    [by_head(by.query, group), by_head(by.key, 1), by_token(by.value, 1), by_token(grad, group)]
        .map(|x| x.expand([keys, group, tokens, width], false))
}

/// Prints how long each pass takes with windows of all tokens, of half of them and of an eighth.
fn by_window(by: Attention, grad: &Tensor, out: AttentionGrads) {
    let tokens = grad.size()[0];
    for window in [None, Some(tokens / 2), Some(tokens / 8)] {
        let (by, mut best) = (Attention { window, ..by }, [f64::MAX; 2]);
        for _ in 0..30 {
            let mut attended = None;
            fastest(&mut best[0], || attended = CPU.attention(by).ok());
            let saved = attended.expect("operands that fit").saved;
            fastest(&mut best[1], || {
                CPU.attention_backward(by, saved, grad, out).expect("the same");
            });
        }
        let [forward, back] = best.map(|seconds| seconds * 1e3);
        println!("  window {window:?}: {forward:.2} ms, {back:.2} ms");
    }
}

fn main() {
    tch::set_num_threads(1);
    let [heads, keys, width] = SHAPE;
    for (tokens, kind) in
        [256, 1024].into_iter().flat_map(|n| [(n, Kind::Float), (n, Kind::BFloat16)])
    {
        let made = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
        let (query, key) = (made(&[heads, tokens, width]), made(&[keys, tokens, width]));
        let (value, grad) = (made(&[tokens, keys * width]), made(&[tokens, heads * width]));
        let spans = [AttentionSpan::whole(0, tokens)];
        let by = Attention {
            query: &query,
            key: &key,
            value: &value,
            spans: &spans,
            shape: SHAPE,
            window: None,
            kept: None,
        };
        let to = [&query, &key, &value].map(|x| x.to_kind(Kind::Float).zeros_like());
        let out = AttentionGrads { query: &to[0], key: &to[1], value: &to[2] };
        let [q, k, v, g] = as_libtorch_wants(by, &grad);
        let (mut ours, mut theirs) = ([f64::MAX; 2], [f64::MAX; 2]);
        for _ in 0..30 {
            let mut attended = None;
            fastest(&mut ours[0], || attended = CPU.attention(by).ok());
            let saved = attended.expect("operands that fit").saved;
            fastest(&mut ours[1], || {
                CPU.attention_backward(by, saved, &grad, out).expect("the same")
            });
            let mut found = None;
            fastest(&mut theirs[0], || {
                found = Some(Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
                    &q,
                    &k,
                    &v,
                    0.0,
                    true,
                    None::<Tensor>,
                    None,
                ));
            });
            let (heads, logs) = found.expect("heads");
            fastest(&mut theirs[1], || {
                drop(Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
                    &g,
                    &q,
                    &k,
                    &v,
                    &heads,
                    &logs,
                    0.0,
                    true,
                    None::<Tensor>,
                    None,
                ));
            });
        }
        let half = (2 * tokens * tokens * width * heads) as f64 / 1e9;
        let rates =
            |[forward, back]: [f64; 2]| format!("{:.0}, {:.0}", half / forward, 2.5 * half / back);
        println!(
            "{tokens} tokens, {kind:?}: libtorch {} GFLOP/s, ours {}",
            rates(theirs),
            rates(ours)
        );
        by_window(by, &grad, out);
    }
}
