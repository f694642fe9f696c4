//! Guards against a list of matmuls that differs from what a micro-batch computes.
//!
//! A micro-batch is computed by a table of operations that records every matmul that is called.

use std::collections::BTreeMap;
use std::sync::Mutex;

use kernels::Result;
use kernels::device::Stager;
use kernels::ops::{
    AdamWStep, Attended, Attention, AttentionGrads, AttentionSpan, CPU, ConvShift, ConvShiftGrads,
    Dispatch, NewtonSchulz, Ops, ParamGradient, QueriesAndKeys, QueryKey, QueryKeyGrads,
    ResidualGrads, ResidualScaling,
};
use tch::{Device, Kind, Tensor};

use super::matmuls::{self, MatmulShape, MicroBatchShape};
use crate::model::{
    self, ActivationCheckpointing, Attention as AttentionKind, CollectedGradients, FeedForward,
    LayerType, MicroBatchInput, MicroBatchOptions, RouterKind, SkipOutput, ZayaConfig,
};
use crate::timing::StepPart;

/// How often each shape was multiplied, and the operations of attention forward.
#[derive(Default)]
struct CountedShapes {
    products: BTreeMap<MatmulShape, u64>,
    attention: f64,
}

static SEEN: Mutex<Option<CountedShapes>> = Mutex::new(None);

#[derive(Debug)]
struct CountingOps;

fn note(left: &Tensor, right: &Tensor) {
    let (left, right) = (left.size(), right.size());
    let [.., rows, inner] = left[..] else { panic!("{left:?}") };
    let shape = MatmulShape { rows, inner, columns: right[right.len() - 1] };
    let batch: i64 = left[..left.len() - 2].iter().product();
    let mut seen = SEEN.lock().unwrap();
    *seen.as_mut().unwrap().products.entry(shape).or_default() += batch as u64;
}

impl Ops for CountingOps {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        note(left, right);
        CPU.matmul(left, right)
    }

    fn matmul_into(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        note(left, right);
        CPU.matmul_into(out, left, right)
    }

    fn matmul_add(&self, out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        note(left, right);
        CPU.matmul_add(out, left, right)
    }

    fn attention(&self, by: Attention) -> Result<Attended> {
        let seen = |span: &AttentionSpan| {
            (1..=span.len)
                .map(|keys| by.window.map_or(keys, |window| keys.min(window)))
                .sum::<i64>()
        };
        let pairs = by.spans.iter().map(seen).sum::<i64>() as f64;
        let [queries, _, width] = by.shape;
        SEEN.lock().unwrap().as_mut().unwrap().attention += 4.0 * (queries * width) as f64 * pairs;
        CPU.attention(by)
    }

    fn attention_backward(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
        out: AttentionGrads,
    ) -> Result<()> {
        CPU.attention_backward(by, saved, grad, out)
    }

    fn dispatch(&self, choice: &Tensor, classes: i64) -> Result<Dispatch> {
        CPU.dispatch(choice, classes)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
        CPU.rms_norm(x, weight, eps)
    }

    fn rms_norm_backward(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, ParamGradient)> {
        CPU.rms_norm_backward(x, factors, weight, grad)
    }

    fn residual(&self, branch: &Tensor, residual: &Tensor, by: ResidualScaling) -> Result<Tensor> {
        CPU.residual(branch, residual, by)
    }

    fn residual_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        grad: &Tensor,
    ) -> Result<ResidualGrads> {
        CPU.residual_backward(branch, residual, by, grad)
    }

    fn conv_shift(&self, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
        CPU.conv_shift(z, by)
    }

    fn conv_shift_backward(
        &self,
        z: &Tensor,
        by: ConvShift,
        grads: [&Tensor; 2],
        means: &Tensor,
    ) -> Result<ConvShiftGrads> {
        CPU.conv_shift_backward(z, by, grads, means)
    }

    fn query_key(&self, z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys> {
        CPU.query_key(z, raw, by)
    }

    fn query_key_backward(
        &self,
        raw: &Tensor,
        factors: &Tensor,
        by: QueryKey,
        grad: Tensor,
        kind: Kind,
    ) -> Result<QueryKeyGrads> {
        CPU.query_key_backward(raw, factors, by, grad, kind)
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        CPU.swiglu(x)
    }

    fn swiglu_backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        CPU.swiglu_backward(x, grad)
    }

    fn gather(
        &self,
        x: &Tensor,
        by: &Dispatch,
        passed: Option<&Tensor>,
        weight: &Tensor,
    ) -> Result<Tensor> {
        CPU.gather(x, by, passed, weight)
    }

    fn gather_backward(
        &self,
        x: &Tensor,
        by: &Dispatch,
        passed: Option<&Tensor>,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 2]> {
        CPU.gather_backward(x, by, passed, weight, grad)
    }

    fn adamw(
        &self,
        by: AdamWStep,
        weight: &mut Tensor,
        moments: [&mut Tensor; 2],
        gradient: &Tensor,
    ) -> Result<()> {
        CPU.adamw(by, weight, moments, gradient)
    }

    fn nesterov(
        &self,
        momentum: &mut Tensor,
        gradient: &Tensor,
        by: f32,
        scale: f32,
    ) -> Result<Tensor> {
        CPU.nesterov(momentum, gradient, by, scale)
    }

    fn descend(&self, weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()> {
        CPU.descend(weight, direction, keep, rate)
    }

    fn newton_schulz(&self, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
        CPU.newton_schulz(stack, by)
    }

    fn squares(&self, x: &Tensor) -> Result<f64> {
        CPU.squares(x)
    }
}

/// The expected shapes of all recorded matmuls: a router network's are computed inside one operation, and left out.
fn planned(config: &ZayaConfig, tokens: i64, counts: &[Vec<u64>]) -> BTreeMap<MatmulShape, u64> {
    let by = MicroBatchShape { tokens, chunks: 1, routed: &[], recompute: false };
    let mut found = matmuls::of_micro_batch(config, by);
    for counts in counts.iter().filter(|counts| !counts.is_empty()) {
        // The CPU table pads the rows of an expert to a multiple of eight: a little more than was routed.
        let filled = |count: &u64| count.next_multiple_of(8) as i64;
        let routed = counts[..counts.len() - 1].iter().map(filled);
        found.extend(routed.flat_map(|rows| matmuls::of_expert(config, rows)));
    }
    let inside = |part| matches!(part, StepPart::Router | StepPart::RouterBack);
    let mut all = BTreeMap::new();
    for matmul in found.iter().filter(|it| !inside(it.part) || config.router != RouterKind::Mlp) {
        *all.entry(matmul.shape).or_default() += matmul.count;
    }
    all
}

/// ZAYA1, and models of every kind of layer.
fn models() -> Vec<ZayaConfig> {
    let nano = ZayaConfig::preset("zaya1-nano").unwrap();
    let gqa = vec![AttentionKind::Gqa];
    let moe = ZayaConfig { num_experts_per_tok: 2, num_shared_experts: 1, ..nano.clone() };
    vec![
        ZayaConfig { layers: gqa.clone(), feed_forward: vec![FeedForward::Mlp], ..nano.clone() },
        ZayaConfig { layers: vec![AttentionKind::Linear, AttentionKind::Cca], ..nano.clone() },
        ZayaConfig {
            sliding_window: 7,
            layer_types: vec![LayerType::Sliding, LayerType::Full],
            ..nano.clone()
        },
        ZayaConfig { layers: gqa, router: RouterKind::Linear, skip: SkipOutput::None, ..moe },
        nano,
    ]
}

#[test]
fn a_micro_batch_multiplies_what_is_planned() {
    let sizes = [(2usize, 48usize, 40), (1, 96, 200)];
    for (model, (rows, seq_len, loss_chunk)) in
        models().into_iter().flat_map(|model| sizes.map(|size| (model.clone(), size)))
    {
        let config = ZayaConfig { vocab_size: 97, loss_chunk, ..model };
        let count = (rows * seq_len) as i64;
        let tokens: Vec<i32> = (0..count as i32).map(|i| i * 37 % 97).collect();
        let positions: Vec<i32> = (0..count as i32).map(|i| i % seq_len as i32).collect();
        let (mask, boundaries) = (vec![1; rows * seq_len], vec![vec![0, 20]; rows]);
        let input = MicroBatchInput {
            tokens: &tokens,
            labels: &tokens,
            positions: &positions,
            mask: &mask,
            boundaries: &boundaries,
            weights: &[],
            rows,
            seq_len,
        };
        let staged = input.stage(&config, &Stager::new(Device::Cpu).unwrap()).unwrap();
        let options = MicroBatchOptions {
            ops: &CountingOps,
            keep: ActivationCheckpointing::Everything,
            ..Default::default()
        };
        let (params, balance) = (model::init(&config, 1).unwrap(), model::init_balance(&config));
        *SEEN.lock().unwrap() = Some(CountedShapes::default());
        let mut sink = CollectedGradients::default();
        let found = model::micro_batch(
            &config,
            &params,
            &balance,
            staged,
            count as u64,
            options,
            &mut sink,
        );
        let counts = found.unwrap().read_counts().unwrap();
        let seen = SEEN.lock().unwrap().take().unwrap();
        let planned = planned(&config, count, &counts);
        let mut found = seen.products;
        if config.layers.contains(&AttentionKind::Linear) {
            // Its recurrence multiplies matrices of its own.
            found.retain(|shape, _| planned.contains_key(shape));
        }
        assert_eq!(found, planned, "{:?}: {rows} x {seq_len}", config.layers);
        let starts: &[u32] = if config.document_mask { &[0, 20] } else { &[0] };
        let pairs = rows as u64 * model::attended_pairs(&config, starts, seq_len as u32);
        assert_eq!(seen.attention, matmuls::of_attention(&config, 0, pairs));
    }
}
