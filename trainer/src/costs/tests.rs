//! Compares what is counted with what runs, and with rules of thumb.

use super::*;
use crate::model::{Attention, FeedForward, parameters};
use crate::model::{CollectedGradients, LayerType, MicroBatchInput, RouterKind, SkipOutput};

/// Six operations for each token and active weight, plus attention: the rule of thumb, for matrices only.
#[test]
fn it_is_six_for_each_active_weight_and_token() {
    let config = ZayaConfig::preset("zaya1-8b").unwrap();
    let experts = config.num_experts as u64;
    let active: u64 = parameters(&config)
        .iter()
        .filter(|spec| spec.shape.len() > 1 && !spec.name.contains("depthwise"))
        .map(|spec| {
            if spec.name.contains(".experts.") {
                spec.elements() / experts
            } else {
                spec.elements()
            }
        })
        .sum();
    let tokens = 1000;
    let routed = vec![tokens; config.num_hidden_layers as usize];
    let found = flops(&config, tokens, &routed, 0).unwrap();
    assert_eq!(found, 6.0 * active as f64 * tokens as f64);
    let with = flops(&config, tokens, &routed, 10).unwrap();
    // Scores and values: 2 x 2 x query width for a pair, three times.
    assert_eq!(with - found, (12 * config.query_size() as u64 * 10) as f64);
}

/// Three matmuls of an expert's width instead of a router and one expert: 6 operations per weight and token.
#[test]
fn a_plain_feed_forward_costs_what_an_expert_does() {
    let config = ZayaConfig { num_hidden_layers: 2, ..ZayaConfig::preset("zaya1-nano").unwrap() };
    let feed_forward = vec![FeedForward::Moe, FeedForward::Mlp];
    let plain = ZayaConfig { feed_forward, ..config.clone() };
    let specs = parameters(&plain);
    let router = specs.iter().filter(|spec| spec.name.contains("layers.0.mlp.gate."));
    let router: u64 = router.filter(|spec| spec.shape.len() > 1).map(ParamSpec::elements).sum();
    let operations = |config: &ZayaConfig| flops(config, 1, &[1, 1], 0).unwrap();
    assert!(router > 0);
    assert_eq!(operations(&config) - operations(&plain), 6.0 * router as f64);
}

/// 6 operations per weight of a matmul and token, and 12 per (query, key) pair and number of a query.
#[test]
fn a_baseline_costs_its_weights_and_pairs() {
    let config = ZayaConfig {
        layers: vec![Attention::Gqa],
        feed_forward: vec![FeedForward::Mlp],
        qk_norm: true,
        num_hidden_layers: 2,
        ..ZayaConfig::preset("zaya1-nano").unwrap()
    };
    let specs = parameters(&config);
    let weights: u64 =
        specs.iter().filter(|spec| spec.shape.len() > 1).map(ParamSpec::elements).sum();
    let pairs = 12.0 * (7 * config.query_size()) as f64;
    assert_eq!(flops(&config, 5, &[0, 0], 7).unwrap(), 6.0 * 5.0 * weights as f64 + pairs);
}

/// ZAYA1, and models of every kind of layer.
fn models() -> Vec<ZayaConfig> {
    let nano = ZayaConfig { vocab_size: 97, ..ZayaConfig::preset("zaya1-nano").unwrap() };
    let gqa = vec![Attention::Gqa];
    let moe = ZayaConfig { num_experts_per_tok: 2, num_shared_experts: 1, ..nano.clone() };
    let layer_types = vec![LayerType::Sliding, LayerType::Full];
    vec![
        ZayaConfig { layers: gqa.clone(), feed_forward: vec![FeedForward::Mlp], ..nano.clone() },
        ZayaConfig { layers: vec![Attention::Linear, Attention::Cca], ..nano.clone() },
        ZayaConfig { sliding_window: 7, layer_types, z_loss: 1e-3, ..nano.clone() },
        ZayaConfig { layers: gqa, router: RouterKind::Linear, skip: SkipOutput::None, ..moe },
        nano,
    ]
}

/// The arithmetic of both passes on the CPU, and the rows of experts that it multiplies.
fn computed(config: &ZayaConfig, rows: usize, seq_len: usize) -> (Vec<(StepPart, Work)>, u64) {
    let count = (rows * seq_len) as i32;
    let tokens: Vec<i32> = (0..count).map(|i| i * 37 % 97).collect();
    let positions: Vec<i32> = (0..count).map(|i| i % seq_len as i32).collect();
    let (mask, boundaries) = (vec![1; rows * seq_len], vec![vec![0]; rows]);
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
    let stager = kernels::device::Stager::new(Device::Cpu).unwrap();
    let staged = input.stage(config, &stager).unwrap();
    let (params, balance) = (model::init(config, 1).unwrap(), model::init_balance(config));
    let (note, noted) = mpsc::channel();
    let see = move |work| note.send((timing::current(), work)).unwrap();
    let mut sink = CollectedGradients::default();
    let how = MicroBatchOptions::default();
    let labels = count as u64;
    let found = shapes::watched(see, || {
        model::micro_batch(config, &params, &balance, staged, labels, how, &mut sink)
    });
    // The CPU's table pads the rows of an expert to a multiple of eight.
    let filled = |counts: Vec<u64>| -> u64 {
        counts.iter().rev().skip(1).map(|count| count.next_multiple_of(8)).sum()
    };
    let rows = found.unwrap().read_counts().unwrap().into_iter().map(filled).sum();
    (noted.into_iter().collect(), rows)
}

#[test]
fn what_is_counted_is_what_runs() {
    let sizes = [(2usize, 48usize, 40), (1, 96, 200)];
    for (model, (rows, seq_len, loss_chunk)) in
        models().into_iter().flat_map(|model| sizes.map(|size| (model.clone(), size)))
    {
        let config = ZayaConfig { loss_chunk, ..model };
        let (ran, expert_rows) = computed(&config, rows, seq_len);
        let shape = MicroBatchShape::whole(rows as u64, seq_len as u64);
        let costs = count(&config, MicroBatchShape { dtype: Dtype::F32, ..shape }).unwrap();
        let attention = ran.iter().filter_map(|(_, work)| match work {
            Work::Attention(operations) => Some(operations),
            _ => None,
        });
        assert_eq!(costs.attention, attention.sum::<f64>(), "{config:?}");
        let network = |part| {
            config.router == RouterKind::Mlp
                && [StepPart::Router, StepPart::RouterBack].contains(&part)
        };
        let experts = |part| [StepPart::Experts, StepPart::ExpertsBack].contains(&part);
        let ran = ran.into_iter().filter_map(|(part, work)| match work {
            Work::Matmul { count, shape: [rows, inner, columns], wide, .. } => {
                let (shape, count) = (MatmulShape { rows, inner, columns }, count as u64);
                Some(MatmulCount { part, shape, count, wide, routed: false })
            }
            _ => None,
        });
        let ran = merged(ran.collect());
        let of = |all: &[MatmulCount]| -> Vec<MatmulCount> {
            let others = all.iter().filter(|one| !experts(one.part) && !network(one.part));
            others.copied().collect()
        };
        assert_eq!(of(&ran), of(&costs.matmuls), "{config:?}");
        let sum = |all: &[MatmulCount], which: &dyn Fn(&MatmulCount) -> bool| -> f64 {
            let some = all.iter().filter(|one| experts(one.part) && which(one));
            some.map(MatmulCount::operations).sum()
        };
        let layers = config.kinds().filter(|(_, kind)| *kind == FeedForward::Moe).count();
        let routed = layers as i64 * (rows * seq_len) as i64 * config.num_experts_per_tok;
        let each = sum(&costs.matmuls, &|one| one.routed) / routed.max(1) as f64;
        let wanted = sum(&costs.matmuls, &|one| !one.routed) + each * expert_rows as f64;
        assert_eq!(sum(&ran, &|_| true), wanted, "{config:?}");
    }
}

/// A pass computes a second time what it does not keep, holds less, and each of several ranks holds and computes a
/// part, as a device does with fewer copies.
#[test]
fn every_way_to_compute_is_counted() {
    for config in models() {
        let whole = MicroBatchShape::whole(2, 96);
        let cut = Cut { chunks: 4, shards: 2 };
        let of = |shape| count(&config, shape).unwrap();
        let operations = |costs: &MicroBatchCosts| -> f64 {
            costs.matmuls.iter().map(MatmulCount::operations).sum()
        };
        let keep = ActivationCheckpointing::LayerInputs;
        let (once, again) = (of(whole), of(MicroBatchShape { keep, ..whole }));
        let head = once.matmuls.iter().filter(|one| one.part == StepPart::Head);
        let layers = operations(&once) - head.map(MatmulCount::operations).sum::<f64>();
        let more = operations(&again) - operations(&once);
        assert!((3.0 * more - layers).abs() <= 1e-9 * layers, "{config:?}");
        assert!(again.activations[0] < once.activations[0], "{config:?}");
        let cut_once = of(MicroBatchShape { cut, ..whole });
        assert_eq!(operations(&cut_once), operations(&once), "{config:?}");
        for on_device in [false, true] {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                for degree in [1, 2, 4] {
                    let at = |degree, place| RankPlace { degree, place: place % degree };
                    let ranks = (0..degree).map(|place| {
                        let (shared, folded) = (at(degree, place), at(degree.min(2), place));
                        let shape =
                            MicroBatchShape { cut, dtype, on_device, shared, folded, ..whole };
                        of(shape)
                    });
                    let ranks: Vec<MicroBatchCosts> = ranks.collect();
                    for rank in &ranks {
                        assert!(rank.activations[0] >= rank.activations[1]);
                        assert!(rank.activations[1] > 0);
                        assert_eq!(degree > 1, rank.operands > 0, "{config:?}");
                    }
                    let attention: f64 = ranks.iter().map(|rank| rank.attention).sum();
                    let all = if on_device { 0.0 } else { once.attention };
                    assert_eq!(attention, all, "{config:?}");
                }
            }
        }
    }
}

/// Four ranks send each other the keys and values of a window before each of their eighths, and the gradients of these,
/// f32; and the losses of all tokens.
#[test]
fn a_window_bounds_what_ranks_send() {
    let config = ZayaConfig {
        layers: vec![Attention::Gqa],
        feed_forward: vec![FeedForward::Mlp],
        num_hidden_layers: 1,
        sliding_window: 51,
        layer_types: vec![LayerType::Sliding],
        ..ZayaConfig::preset("zaya1-nano").unwrap()
    };
    let sent = |config: &ZayaConfig| -> u64 {
        let of = |place| MicroBatchShape {
            cut: Cut { chunks: 8, shards: 1 },
            dtype: Dtype::F32,
            shared: RankPlace { degree: 4, place },
            ..MicroBatchShape::whole(2, 800)
        };
        (0..4).map(|place| count(config, of(place)).unwrap().operands).sum()
    };
    let (both, losses) = (2 * 4 * config.key_size() as u64, 4 * 1600 * 3);
    // Chunks 0 to 7 have the ranks 0, 1, 2, 3, 3, 2, 1, 0: six edges between ranks, in both sequences. Keys and values
    // are sent for the forward pass and for the backward pass.
    assert_eq!(sent(&config), 3 * 6 * 2 * 50 * both + losses);
    let full = ZayaConfig { layer_types: vec![LayerType::Full], sliding_window: 0, ..config };
    // Rank 0 reads the chunks between its own, and so on.
    assert!(sent(&full) > 2 * 2 * 100 * (6 + 5 + 4 + 3) * both + losses);
}
