//! Checks the kinds of layers that ZAYA1 does not have, in any list of kinds, against autograd and themselves.

use kernels::ops::{CPU, REFERENCE};
use proptest::prelude::*;

use super::agreement::same_bits;
use super::cuts::{both, model_of};
use super::parity::{Arrays, relative};
use super::{
    ActivationCheckpointing, Attention, BalanceKind, Cut, FeedForward, LayerType,
    MicroBatchOptions, ResidualKind, RouterKind, SkipOutput, ZayaConfig, parameters,
};

fn kinds<T: Clone + std::fmt::Debug + 'static>(all: [T; 2]) -> impl Strategy<Value = Vec<T>> {
    prop::collection::vec(prop::sample::select(all.to_vec()), 1..=2)
}

/// A model of two layers with every key that a baseline sets.
fn models() -> impl Strategy<Value = ZayaConfig> {
    let layers = prop_oneof![
        2 => Just(vec![Attention::Gqa]),
        1 => kinds([Attention::Gqa, Attention::Cca]),
        1 => kinds([Attention::Gqa, Attention::Linear]),
    ];
    let feed_forward = kinds([FeedForward::Moe, FeedForward::Mlp]);
    let flags = any::<[bool; 3]>();
    let residual = prop::sample::select(vec![ResidualKind::Scaled, ResidualKind::Plain]);
    let rotary = prop::sample::select(vec![0.25, 0.5, 1.0]);
    let z_loss = prop_oneof![Just(0.0), 1e-4..0.1];
    let all = (layers, feed_forward, flags, residual, routers(), (rotary, sliding(), z_loss));
    all.prop_map(|(layers, feed_forward, flags, residual, routers, (rotary, sliding, z_loss))| {
        let [qk_norm, document_mask, tie_word_embeddings] = flags;
        let softmax = !layers.contains(&Attention::Linear);
        let (sliding_window, layer_types, sliding_rope_theta) =
            sliding.filter(|_| softmax).unwrap_or((0, vec![LayerType::Full], 0.0));
        ZayaConfig {
            sliding_window,
            layer_types,
            sliding_rope_theta,
            residual,
            tie_word_embeddings,
            layers,
            feed_forward,
            qk_norm,
            document_mask,
            partial_rotary_factor: rotary,
            z_loss,
            moe_intermediate_size: 50,
            ..routers
        }
    })
}

/// Windows shorter than a chunk and longer ones, in both layers or in the second, with frequencies of their own or not;
/// or none. Where a query sees one key alone, its gradient is zero.
fn sliding() -> impl Strategy<Value = Option<(i64, Vec<LayerType>, f64)>> {
    let all = (2i64..90, any::<bool>(), prop::sample::select(vec![0.0, 300.0]));
    let types = |some| {
        if some { vec![LayerType::Full, LayerType::Sliding] } else { vec![LayerType::Sliding] }
    };
    prop::option::weighted(
        0.7,
        all.prop_map(move |(window, some, theta)| (window, types(some), theta)),
    )
}

/// Every key of a router and its experts.
fn routers() -> impl Strategy<Value = ZayaConfig> {
    let nano = || ZayaConfig::preset("zaya1-nano").unwrap();
    let skips = vec![SkipOutput::None, SkipOutput::Zero, SkipOutput::Identity];
    let skip = prop::sample::select(skips);
    let linear = (1i64..=8, any::<[bool; 2]>(), skip, 0i64..3).prop_map(
        move |(num_experts_per_tok, [normalized, balanced], skip, num_shared_experts)| ZayaConfig {
            router: RouterKind::Linear,
            num_experts_per_tok,
            norm_topk_prob: normalized && num_experts_per_tok > 1,
            skip,
            balance: if balanced { BalanceKind::Bias } else { BalanceKind::None },
            num_shared_experts,
            ..nano()
        },
    );
    let own =
        (0i64..2).prop_map(move |num_shared_experts| ZayaConfig { num_shared_experts, ..nano() });
    prop_oneof![2 => linear, 1 => own]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    /// Any list of kinds, cut in any way, in either table of operations; recomputation has the same bits.
    #[test]
    fn any_kinds_have_the_gradients_of_automatic_differentiation(
        config in models(),
        chunks in prop::sample::select(vec![1u64, 2, 8]),
        shards in prop::sample::select(vec![1u64, 2, 3]),
        reference in any::<bool>(),
    ) {
        let (model, arrays) = model_of(config);
        let ops = if reference { REFERENCE } else { CPU };
        let options = MicroBatchOptions { ops, ..both(chunks, shards) };
        model.assert_differentiated(&arrays, options);
        let again = MicroBatchOptions { keep: ActivationCheckpointing::LayerInputs, ..options };
        let [out, again] = [options, again].map(|how| model.micro_batch(&arrays.input(), how));
        prop_assert!(same_bits(&out, &again));
    }
}

/// A plain residual, a router of one matrix and a head of its own, where tokens keep their input if they skip experts.
#[test]
fn experts_of_a_linear_router_have_the_gradients_of_automatic_differentiation() {
    let config = ZayaConfig {
        residual: ResidualKind::Plain,
        router: RouterKind::Linear,
        tie_word_embeddings: false,
        skip: SkipOutput::Identity,
        ..ZayaConfig::preset("zaya1-nano").unwrap()
    };
    let names: Vec<_> = parameters(&config).into_iter().map(|spec| spec.name).collect();
    assert!(names.iter().all(|name| !name.contains("scale") && !name.contains("router_mlp")));
    assert_eq!(names.last().unwrap(), "lm_head.weight");
    let (model, arrays) = model_of(config);
    for (chunks, shards) in [(1, 1), (4, 2)] {
        model.assert_differentiated(&arrays, both(chunks, shards));
    }
    let routed = model.micro_batch(&arrays.input(), both(1, 1)).counts;
    assert!(routed.iter().all(|layer| layer[8] > 0), "some tokens skip: {routed:?}");
}

/// The two families of transformers, and experts that every token has.
#[test]
fn several_experts_of_a_token_have_the_gradients_of_automatic_differentiation() {
    let mixtral = ZayaConfig {
        layers: vec![Attention::Gqa],
        residual: ResidualKind::Plain,
        router: RouterKind::Linear,
        skip: SkipOutput::None,
        balance: BalanceKind::None,
        num_experts_per_tok: 2,
        norm_topk_prob: true,
        ..ZayaConfig::preset("zaya1-nano").unwrap()
    };
    let qwen = ZayaConfig { num_experts_per_tok: 4, norm_topk_prob: false, ..mixtral.clone() };
    let shared =
        ZayaConfig { num_shared_experts: 2, balance: BalanceKind::Bias, ..mixtral.clone() };
    let skips =
        ZayaConfig { skip: SkipOutput::Identity, balance: BalanceKind::Bias, ..qwen.clone() };
    for config in [mixtral, qwen, shared, skips] {
        let (model, arrays) = model_of(config);
        for (ops, cut) in [(CPU, both(1, 1)), (REFERENCE, both(4, 2))] {
            model.assert_differentiated(&arrays, MicroBatchOptions { ops, ..cut });
        }
        let counts = model.micro_batch(&arrays.input(), both(1, 1)).counts;
        for layer in counts {
            assert_eq!(layer.len(), 9);
            assert_eq!(layer.iter().sum::<u64>(), 256 * model.config.num_experts_per_tok as u64);
            assert_eq!(layer[8] > 0, model.config.skip == SkipOutput::Identity);
        }
    }
}

/// ZAYA1's own layers and grouped-query layers, with windows that end within a chunk, at its edge and before it: every
/// cut sees what autograd does, and the key before the window does not count.
#[test]
fn windows_have_the_gradients_of_automatic_differentiation() {
    for (attention, sliding_window) in
        [(Attention::Cca, 9), (Attention::Cca, 64), (Attention::Gqa, 2), (Attention::Gqa, 33)]
    {
        let config = ZayaConfig {
            layers: vec![attention],
            sliding_window,
            layer_types: vec![LayerType::Sliding, LayerType::Full],
            sliding_rope_theta: 500.0,
            ..ZayaConfig::preset("zaya1-nano").unwrap()
        };
        let (model, arrays) = model_of(config);
        for options in
            [both(1, 1), both(2, 1), both(8, 2), MicroBatchOptions { ops: REFERENCE, ..both(4, 1) }]
        {
            model.assert_differentiated(&arrays, options);
        }
    }
}

/// Keys of a long document that lie blocks before the window are not even operands of a chunk's attention.
#[test]
fn windows_of_long_documents_are_those_of_documents_in_one_chunk() {
    let (model, short) = model_of(ZayaConfig {
        layers: vec![Attention::Gqa],
        sliding_window: 40,
        layer_types: vec![LayerType::Sliding],
        ..ZayaConfig::preset("zaya1-nano").unwrap()
    });
    let arrays = Arrays::new(short.tokens.repeat(4), 1, vec![vec![0, 30]]);
    let [whole, cut] = [1, 4].map(|chunks| model.micro_batch(&arrays.input(), both(chunks, 1)));
    assert!(relative(&cut.token_losses, &whole.token_losses) < 1e-6);
    for (cut, whole) in cut.grads.iter().zip(&whole.grads) {
        assert!(relative(cut, whole) < 1e-5);
    }
}

/// Without rotary embedding of all but two dimensions, and with one key head for all queries.
#[test]
fn grouped_queries_of_one_key_head_have_the_gradients_of_automatic_differentiation() {
    for (partial_rotary_factor, qk_norm) in [(1.0, false), (1.0 / 32.0, true)] {
        let (model, arrays) = model_of(ZayaConfig {
            layers: vec![Attention::Gqa],
            num_key_value_heads: 1,
            partial_rotary_factor,
            qk_norm,
            ..ZayaConfig::preset("zaya1-nano").unwrap()
        });
        model.assert_differentiated(&arrays, both(4, 2));
        model.assert_differentiated(&arrays, MicroBatchOptions::default().cut(Cut::WHOLE));
    }
}
