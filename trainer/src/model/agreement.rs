//! Checks the hand-written passes against autograd, against a formula, and against themselves on other threads.

use curriculum::Dtype;
use kernels::device::Stager;
use kernels::ops::{CPU, REFERENCE};
use kernels::share::SharedTensors;
use tch::{Device, Kind, Tensor};

use super::parity::{Arrays, Fixture, all_rounded, assert_gradients, relative};
use super::{
    ActivationCheckpointing, Cut, FeedForward, Init, LogitsDtype, MicroBatchOptions,
    MicroBatchOutput, ParamSpec, SkipOutput, ZayaConfig, forward_backward, forward_backward_staged,
    init, init_balance, logits, oracle, parameters,
};

/// A model and a micro-batch large enough that kernels take their vector paths, with documents of awkward lengths.
fn middling(skip: SkipOutput) -> (ZayaConfig, Vec<Tensor>, Vec<Tensor>, Arrays) {
    middling_of(ZayaConfig { skip, ..preset() })
}

/// The same with another configuration.
pub(super) fn middling_of(config: ZayaConfig) -> (ZayaConfig, Vec<Tensor>, Vec<Tensor>, Arrays) {
    let config = ZayaConfig { vocab_size: 331, num_hidden_layers: 2, loss_chunk: 50, ..config };
    let key = contract::Key::from_seed(3);
    let draw = |i| contract::draw(key, contract::Purpose::Generate, i);
    let tokens = (0..256).map(|i| (draw(i) % 331) as i32).collect();
    let arrays = Arrays::new(tokens, 2, vec![vec![0, 1, 2, 40, 41, 127], vec![0, 64]]);
    // Larger weights than initial ones: with those, attention is almost uniform, and the gradient of its temperature is
    // a sum of terms that cancel.
    let larger = |(spec, weight): (&ParamSpec, Tensor)| match spec.init {
        Init::Normal(_) => weight * 5.0,
        Init::Constant(_) => weight,
    };
    let specs = parameters(&config);
    let params = specs.iter().zip(init(&config, 1).unwrap()).map(larger).collect();
    let lifted = |biases: Tensor| match biases.numel() {
        0 => biases,
        // Without a skip class they decide some choices.
        8 => Tensor::linspace(-0.02, 0.02, 8, (Kind::Float, Device::Cpu)),
        _ => biases + skip_lift(),
    };
    let balance = init_balance(&config).into_iter().map(lifted).collect();
    (config, params, balance, arrays)
}

fn preset() -> ZayaConfig {
    ZayaConfig::preset("zaya1-nano").unwrap()
}

/// Balancing biases that make the skip class about as likely as the others.
fn skip_lift() -> Tensor {
    let mut lift = vec![0.0f32; 8];
    lift.push(1.0);
    Tensor::from_slice(&lift)
}

pub(super) fn same_bits(a: &MicroBatchOutput, b: &MicroBatchOutput) -> bool {
    let checksums = |out: &MicroBatchOutput| {
        let tensors = out.grads.iter().chain([&out.token_losses]);
        tensors.map(|tensor| kernels::checksum::tensor(tensor, 1).unwrap()).collect::<Vec<_>>()
    };
    let sums = |out: &MicroBatchOutput| [out.loss, out.z_loss].map(f64::to_bits);
    sums(a) == sums(b) && a.counts == b.counts && checksums(a) == checksums(b)
}

#[test]
fn gradients_are_those_of_automatic_differentiation() {
    for (skip, z_loss) in
        [(SkipOutput::Zero, 0.0), (SkipOutput::Identity, 0.0), (SkipOutput::Zero, 0.1)]
    {
        let (config, params, balance, arrays) =
            middling_of(ZayaConfig { skip, z_loss, ..preset() });
        let prepared = arrays.input().prepare(&config, Device::Cpu).unwrap();
        let specs = parameters(&config);
        let ([losses, z_losses], grads) =
            oracle::forward_backward(&config, &specs, &params, &balance, &prepared, 200);
        let z_loss_sum = z_losses.sum(Kind::Double).double_value(&[]);
        for ops in [CPU, REFERENCE] {
            let options = MicroBatchOptions { ops, ..MicroBatchOptions::default() };
            let staged = arrays.input().stage(&config, &Stager::new(Device::Cpu).unwrap()).unwrap();
            let out =
                forward_backward_staged(&config, &params, &balance, staged, 200, options).unwrap();
            let skipped = out.counts.iter().all(|layer| layer[8] > 0);
            assert!(skipped, "some tokens skip: {:?}", out.counts);
            assert!(relative(&out.token_losses, &losses) < 1e-6);
            assert!((out.z_loss - z_loss_sum).abs() <= 1e-6 * z_loss_sum, "{}", out.z_loss);
            let worst = assert_gradients(&specs, &out.grads, &grads, 2e-5, &(ops.name(), skip));
            println!("{} {skip:?}: largest |a - b| / |b| against f64: {worst:.1e}", ops.name());
        }
    }
}

/// Plain feed-forwards before, after and instead of experts: checked like these. The first router has no previous
/// state, whichever layer it is in.
#[test]
fn plain_feed_forwards_have_the_gradients_of_automatic_differentiation() {
    use FeedForward::{Mlp, Moe};
    for (feed_forward, classes) in
        [(vec![Mlp, Moe], [0, 9]), (vec![Moe, Mlp], [9, 0]), (vec![Mlp], [0, 0])]
    {
        let (config, params, balance, arrays) =
            middling_of(ZayaConfig { feed_forward, ..preset() });
        assert_eq!(super::router_classes(&config), classes);
        let specs = parameters(&config);
        assert!(specs.iter().all(|spec| !spec.name.contains("router_states_scale")));
        let prepared = arrays.input().prepare(&config, Device::Cpu).unwrap();
        let ([losses, _], grads) =
            oracle::forward_backward(&config, &specs, &params, &balance, &prepared, 200);
        let whole = MicroBatchOptions::default();
        let cut = |chunks, shards| whole.cut(Cut { chunks, shards });
        let by_library = MicroBatchOptions { ops: REFERENCE, ..cut(4, 2) };
        for options in [whole, cut(2, 3), cut(1, 50), by_library] {
            let stage = || arrays.input().stage(&config, &Stager::new(Device::Cpu).unwrap());
            let compute = |options| {
                let staged = stage().unwrap();
                forward_backward_staged(&config, &params, &balance, staged, 200, options).unwrap()
            };
            let out = compute(options);
            assert_eq!(out.counts.iter().map(Vec::len).collect::<Vec<_>>(), classes);
            assert!(relative(&out.token_losses, &losses) < 1e-6);
            assert_gradients(&specs, &out.grads, &grads, 2e-5, &(&classes, options));
            let keep = ActivationCheckpointing::LayerInputs;
            assert!(same_bits(&out, &compute(MicroBatchOptions { keep, ..options })));
        }
    }
}

/// A micro-batch gives the same bits on several threads at once, and while the workers compute other micro-batches.
#[test]
fn threads_do_not_change_a_bit() {
    let (config, params, balance, arrays) = middling(SkipOutput::Zero);
    let alone = forward_backward(&config, &params, &balance, &arrays.input(), 200).unwrap();
    let (params, balance) = (SharedTensors::new(&params), SharedTensors::new(&balance));
    std::thread::scope(|scope| {
        for worker in 0..3 {
            let (config, arrays, alone) = (&config, &arrays, SharedTensors::new(&alone.grads));
            let (params, balance) = (&params, &balance);
            scope.spawn(move || {
                let (params, balance) = (params.aliases(), balance.aliases());
                for _ in 0..=worker {
                    let out =
                        forward_backward(config, &params, &balance, &arrays.input(), 200).unwrap();
                    assert_eq!(out.grads, alone.aliases());
                }
            });
        }
    });
    let again =
        forward_backward(&config, &params.aliases(), &balance.aliases(), &arrays.input(), 200)
            .unwrap();
    assert!(same_bits(&alone, &again));
}

/// Recomputation repeats the same calls, so each dtype gives the same bits; bf16 gives other bits than f32.
#[test]
fn what_is_kept_between_the_passes_decides_no_bit() {
    let (config, params, balance, arrays) = middling(SkipOutput::Identity);
    let compute = |dtype, keep| {
        let params = all_rounded(&parameters(&config), &params, dtype);
        let stager = kernels::device::Stager::new(Device::Cpu).unwrap();
        let staged = arrays.input().stage(&config, &stager).unwrap();
        let options = MicroBatchOptions { keep, ..MicroBatchOptions::default() };
        forward_backward_staged(&config, &params, &balance, staged, 200, options).unwrap()
    };
    let [wide, narrow] = [Dtype::F32, Dtype::Bf16].map(|dtype| {
        let whole = compute(dtype, ActivationCheckpointing::Everything);
        assert!(
            same_bits(&whole, &compute(dtype, ActivationCheckpointing::LayerInputs)),
            "{dtype:?}"
        );
        assert!(whole.grads.iter().all(|grad| grad.kind() == Kind::Float));
        whole
    });
    assert!(!same_bits(&wide, &narrow));
}

/// Under bf16 a head in f32 has the losses and gradients of its inputs in f32; in f32 it is the head.
#[test]
fn a_head_in_f32_is_that_of_its_widened_inputs() {
    let config = ZayaConfig { skip: SkipOutput::Identity, z_loss: 0.1, ..preset() };
    let (config, params, balance, arrays) = middling_of(config);
    let wide = ZayaConfig { logits_dtype: LogitsDtype::F32, ..config.clone() };
    let input = arrays.input();
    let compute = |config: &ZayaConfig, params: &[Tensor]| {
        forward_backward(config, params, &balance, &input, 200).unwrap()
    };
    assert!(same_bits(&compute(&config, &params), &compute(&wide, &params)));
    let narrow = all_rounded(&parameters(&config), &params, Dtype::Bf16);
    let found = compute(&wide, &narrow);
    assert_ne!(found.loss, compute(&config, &narrow).loss);
    let all = logits(&wide, &narrow, &balance, &input).unwrap().to_kind(Kind::Double);
    let rounded = logits(&config, &narrow, &balance, &input).unwrap();
    assert_eq!(rounded.to_kind(Kind::BFloat16).to_kind(Kind::Float), rounded, "products in bf16");
    assert_ne!(all.to_kind(Kind::BFloat16).to_kind(Kind::Double), all);
    let labels: Vec<i64> = input.labels.iter().map(|label| i64::from(*label)).collect();
    let mask: Vec<f64> = input.mask.iter().map(|mask| f64::from(*mask)).collect();
    let over_labels =
        |x: &Tensor| (x * Tensor::from_slice(&mask)).sum(Kind::Double).double_value(&[]);
    let losses = all.log_softmax(-1, Kind::Double);
    let losses = losses.gather(1, &Tensor::from_slice(&labels).unsqueeze(1), false).squeeze_dim(1);
    let wanted = -over_labels(&losses);
    assert!((found.loss - wanted).abs() < 1e-5 * wanted, "{} and {wanted}", found.loss);
    let wanted = 0.1 * over_labels(&all.logsumexp([1i64].as_slice(), false).square());
    assert!((found.z_loss - wanted).abs() < 1e-5 * wanted, "{} and {wanted}", found.z_loss);
    assert!(found.grads.iter().all(|grad| grad.kind() == Kind::Float));
}

/// As a prefetcher does it: staged on another thread, computed on this one.
#[test]
fn a_staged_micro_batch_has_the_same_bits() {
    let (config, params, balance, arrays) = middling(SkipOutput::Zero);
    let alone = forward_backward(&config, &params, &balance, &arrays.input(), 200).unwrap();
    let stage = || {
        let stager = kernels::device::Stager::new(Device::Cpu).unwrap();
        arrays.input().stage(&config, &stager).unwrap()
    };
    let staged = std::thread::scope(|scope| scope.spawn(stage).join().unwrap());
    let options = MicroBatchOptions::default();
    let out = forward_backward_staged(&config, &params, &balance, staged, 200, options).unwrap();
    assert!(same_bits(&alone, &out));
}

/// The number of logits that exist at once changes the rounding of one sum and nothing else.
#[test]
fn chunks_of_the_head_agree() {
    let (config, params, balance, arrays) = middling(SkipOutput::Zero);
    let whole = ZayaConfig { loss_chunk: 1000, ..config.clone() };
    let a = forward_backward(&config, &params, &balance, &arrays.input(), 200).unwrap();
    let b = forward_backward(&whole, &params, &balance, &arrays.input(), 200).unwrap();
    assert!(relative(&a.token_losses, &b.token_losses) < 1e-6);
    for ((spec, a), b) in parameters(&config).iter().zip(&a.grads).zip(&b.grads) {
        assert!(relative(a, b) < 1e-5, "{}", spec.name);
    }
}

/// Tokens without a label have no loss and no gradient, whatever their ids.
#[test]
fn padding_has_no_effect() {
    let (config, params, balance, arrays) = middling(SkipOutput::Zero);
    let input = arrays.input();
    let mut mask = input.mask.to_vec();
    mask[200..].fill(0);
    let a = forward_backward(
        &config,
        &params,
        &balance,
        &super::MicroBatchInput { mask: &mask, ..input },
        9,
    )
    .unwrap();
    let (mut tokens, mut labels) = (input.tokens.to_vec(), input.labels.to_vec());
    tokens[201..].fill(5);
    labels[200..].fill(-1);
    let other = super::MicroBatchInput { mask: &mask, tokens: &tokens, labels: &labels, ..input };
    let b = forward_backward(&config, &params, &balance, &other, 9).unwrap();
    // Other padding tokens are routed to other experts' matmuls, so only the rounding may differ.
    assert!(relative(&a.token_losses, &b.token_losses) < 1e-6);
    assert_eq!(a.labels, b.labels);
    assert!(a.token_losses.narrow(0, 200, 56).abs().sum(Kind::Float).double_value(&[]) == 0.0);
    for ((spec, a), b) in parameters(&config).iter().zip(&a.grads).zip(&b.grads) {
        assert!(relative(a, b) < 1e-5, "{}", spec.name);
    }
}

/// Zyphra's skip against its formula in f64: one layer, zero attention output, every token in the skip class.
#[test]
fn identity_skip_is_its_probability_times_its_input() {
    let fixture = Fixture::read("wide");
    let config =
        ZayaConfig { num_hidden_layers: 1, skip: SkipOutput::Identity, ..fixture.config.clone() };
    let specs = parameters(&config);
    let index = |end: &str| specs.iter().position(|spec| spec.name.ends_with(end)).unwrap();
    let mut params = fixture.params();
    params.truncate(specs.len() - 1);
    params.push(fixture.params().pop().unwrap());
    let silent = index("o_proj.weight");
    params[silent] = params[silent].zeros_like();
    let balance = [Tensor::from_slice(&[0f32, 0.0, 0.0, 0.0, 2.0])];
    let arrays = fixture.arrays();
    let out = forward_backward(&config, &params, &balance, &arrays.input(), 46).unwrap();
    assert_eq!(out.counts, [[0, 0, 0, 0, 48]]);

    let wide: Vec<Tensor> =
        params.iter().map(|p| p.to_kind(Kind::Double).set_requires_grad(true)).collect();
    let p = |end: &str| &wide[index(end)];
    let norm = |x: &Tensor, weight: &Tensor| {
        let mean = (x * x).mean_dim(-1, true, Kind::Double);
        x / (mean + config.rms_norm_eps).sqrt() * weight
    };
    let gelu = |x: Tensor| &x * ((&x / 2f64.sqrt()).erf() + 1.0) / 2.0;
    let affine = |x: &Tensor, to: &str, kind: &str| {
        (x + p(&format!("{to}.{kind}_bias"))) * p(&format!("{to}.{kind}_scale"))
    };
    let tokens = Tensor::from_slice(&arrays.tokens).to_kind(Kind::Int64);
    let x = wide[0].index_select(0, &tokens);
    let x = (x + p("input_hidden_states_bias")) * p("input_hidden_states_scale");
    let (mid, end) = ("post_attention_residual_scale", "post_mlp_residual_scale");
    let x = affine(&x.zeros_like(), mid, "hidden_states") + affine(&x, mid, "residual");
    let v = norm(&x, p("post_attention_layernorm.weight"));
    let layer = |x: &Tensor, name: &str| {
        x.matmul(&p(&format!("{name}.weight")).tr()) + p(&format!("{name}.bias"))
    };
    let n = norm(&layer(&v, "gate.down_proj"), p("router_mlp.norm.weight"));
    let h = gelu(layer(&gelu(layer(&n, "router_mlp.fc1")), "router_mlp.fc2"));
    let logits = h.matmul(&p("router_mlp.out_proj.weight").tr()).exp();
    let chance = logits.select(1, 4) / logits.sum_dim_intlist(1, false, Kind::Double);
    let out_of_layer = v * chance.unsqueeze(1);
    let x = affine(&out_of_layer, end, "hidden_states") + affine(&x, end, "residual");
    let logits = norm(&x, &wide[specs.len() - 1]).matmul(&wide[0].tr());
    let prepared = arrays.input().prepare(&config, Device::Cpu).unwrap();
    let own = logits.gather(1, &prepared.labels.unsqueeze(1), false).squeeze_dim(1);
    let log_sum = logits.exp().sum_dim_intlist(1, false, Kind::Double).log();
    let losses = (log_sum - own) * prepared.mask.to_kind(Kind::Double);
    (losses.sum(Kind::Double) / 46.0).backward();

    assert!(relative(&out.token_losses, &losses.detach()) < 1e-6);
    for (index, spec) in specs.iter().enumerate() {
        let grad = wide[index].grad();
        if grad.defined() {
            let error = relative(&out.grads[index], &grad);
            assert!(error < 1e-5, "{}: {error:e}", spec.name);
        } else if index != silent {
            let size = out.grads[index].abs().max().double_value(&[]);
            assert!(size == 0.0, "{} takes no part", spec.name);
        }
    }
}

/// Weights of rows multiply their part of the gradient, and neither the losses nor anything of another row.
#[test]
fn weights_of_rows_scale_the_gradient_alone() {
    let (config, params, balance, arrays) = middling(SkipOutput::Zero);
    let (input, specs) = (arrays.input(), parameters(&config));
    let drawn: Vec<f32> = (0..input.rows).map(|row| [0.25, 3.0, 1.7][row % 3]).collect();
    let whole = MicroBatchOptions::default();
    let by_library = MicroBatchOptions { ops: REFERENCE, ..whole };
    let compute = |weights: &[f32], options, label_count| {
        let input = super::MicroBatchInput { weights, ..input };
        let staged = input.stage(&config, &Stager::new(Device::Cpu).unwrap()).unwrap();
        forward_backward_staged(&config, &params, &balance, staged, label_count, options).unwrap()
    };
    let weighted = super::MicroBatchInput { weights: &drawn, ..input };
    let prepared = weighted.prepare(&config, Device::Cpu).unwrap();
    let (_, grads) = oracle::forward_backward(&config, &specs, &params, &balance, &prepared, 200);
    for options in [whole, whole.cut(Cut { chunks: 4, shards: 2 }), by_library] {
        let (plain, out) = (compute(&[], options, 200), compute(&drawn, options, 200));
        assert_eq!(plain.token_losses, out.token_losses);
        assert_eq!((plain.loss, plain.labels), (out.loss, out.labels));
        assert_gradients(&specs, &out.grads, &grads, 2e-5, &options);
        // A power of two and as many times the labels cancel exactly, and a weight of 1 changes no bit.
        let twice = vec![2.0; input.rows];
        assert!(same_bits(&plain, &compute(&twice, options, 400)));
        assert!(same_bits(&plain, &compute(&vec![1.0; input.rows], options, 200)));
        assert!(!same_bits(&plain, &out));
    }
    for wrong in [vec![1.0], vec![0.0; input.rows], vec![f32::NAN; input.rows]] {
        let input = super::MicroBatchInput { weights: &wrong, ..input };
        assert!(input.check(&config).is_err(), "{wrong:?}");
    }
}
