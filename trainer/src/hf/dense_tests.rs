//! Export and import of baselines as `llama`, `qwen3`, `mixtral` and `qwen3_moe`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use contract::{Class, Identity};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use store::manifest::TokenizerRecord;
use tch::Tensor;

use super::config;
use super::export::{in_parts, model_files, named};
use super::family::HfModel;
use super::import::import;
use crate::costs::flops;
use crate::model::{
    Attention, BalanceKind, FeedForward, LayerType, ParamSpec, ResidualKind, RouterKind,
    SkipOutput, ZayaConfig, active_parameters, init, init_balance, parameters,
};
use crate::optim::balance::RouterBalance;

fn record() -> TokenizerRecord {
    let (sha256, encoder) = (Identity([0; 32]), String::new());
    TokenizerRecord { sha256, vocab: 40, begin: Some(2), end: Some(1), encoder }
}

/// A small model of two layers; what `llama` does not have is as in an import.
fn baseline(qk_norm: bool, tie_word_embeddings: bool) -> ZayaConfig {
    ZayaConfig {
        vocab_size: 40,
        hidden_size: 12,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        moe_intermediate_size: 10,
        max_position_embeddings: 64,
        rope_theta: 3e4,
        rms_norm_eps: 1e-6,
        partial_rotary_factor: 1.0,
        layers: vec![Attention::Gqa],
        feed_forward: vec![FeedForward::Mlp],
        residual: ResidualKind::Plain,
        loss_chunk: 4096,
        tie_word_embeddings,
        qk_norm,
        ..ZayaConfig::preset("zaya1-8b").unwrap()
    }
}

/// The same with a window in these layers.
fn sliding(layer_types: &[LayerType], config: ZayaConfig) -> ZayaConfig {
    ZayaConfig { sliding_window: 5, layer_types: layer_types.to_vec(), ..config }
}

/// The same with three experts, two of them for each token.
fn routed(qk_norm: bool, norm_topk_prob: bool) -> ZayaConfig {
    ZayaConfig {
        feed_forward: vec![FeedForward::Moe],
        router: RouterKind::Linear,
        skip: SkipOutput::None,
        balance: BalanceKind::None,
        num_experts: 3,
        num_experts_per_tok: 2,
        norm_topk_prob,
        ..baseline(qk_norm, false)
    }
}

fn write(config: &ZayaConfig, folder: &Path) -> Vec<Tensor> {
    let weights = init(config, 5).unwrap();
    let bias = |bias: &Tensor| Vec::<f32>::try_from(bias).unwrap();
    let balance = init_balance(config);
    let balance: Vec<_> = balance
        .iter()
        .map(|biases| RouterBalance { bias: bias(biases), first: vec![], second: vec![] })
        .collect();
    let specs = parameters(config);
    let tensors = in_parts(config, &specs, named(&specs, &weights, &balance)).unwrap();
    model_files(folder, config, &record(), &tensors).unwrap();
    weights
}

/// The names in released files, written by hand.
fn names(model: HfModel, tied: bool, experts: i64) -> BTreeSet<String> {
    let mut layer: Vec<String> =
        ["q", "k", "v", "o"].map(|part| format!("self_attn.{part}_proj")).into();
    let sides = ["gate_proj", "up_proj", "down_proj"];
    let expert = |base: &str, sides: [&str; 3]| {
        let base = format!("{base}.experts");
        let all = (0..experts)
            .flat_map(move |expert| sides.map(|side| format!("{base}.{expert}.{side}")));
        all.collect::<Vec<_>>()
    };
    match model {
        HfModel::Mixtral => {
            layer.push("block_sparse_moe.gate".to_owned());
            layer.extend(expert("block_sparse_moe", ["w1", "w2", "w3"]));
        }
        HfModel::Qwen3Moe => {
            layer.push("mlp.gate".to_owned());
            layer.extend(expert("mlp", sides));
        }
        _ => layer.extend(sides.map(|side| format!("mlp.{side}"))),
    }
    layer.extend(["input_layernorm", "post_attention_layernorm"].map(str::to_owned));
    if matches!(model, HfModel::Qwen3 | HfModel::Qwen3Moe) {
        layer.extend(["q", "k"].map(|part| format!("self_attn.{part}_norm")));
    }
    let layers =
        (0..2).flat_map(|at| layer.iter().map(move |one| format!("model.layers.{at}.{one}")));
    let ends = ["model.embed_tokens", "model.norm"].map(str::to_owned);
    let head = (!tied).then(|| "lm_head".to_owned());
    layers.chain(ends).chain(head).map(|name| format!("{name}.weight")).collect()
}

#[test]
fn a_baseline_goes_out_and_in_again() {
    use LayerType::{Full, Sliding};
    for (config, model) in [
        (baseline(false, false), HfModel::Llama),
        (baseline(false, true), HfModel::Llama),
        (baseline(true, true), HfModel::Qwen3),
        (routed(false, true), HfModel::Mixtral),
        (routed(true, true), HfModel::Qwen3Moe),
        (routed(true, false), HfModel::Qwen3Moe),
        (sliding(&[Sliding], baseline(true, true)), HfModel::Qwen3),
        (sliding(&[Full, Sliding], baseline(true, true)), HfModel::Qwen3),
        (sliding(&[Sliding, Full], baseline(true, false)), HfModel::Qwen3),
        (sliding(&[Sliding], routed(false, true)), HfModel::Mixtral),
        (sliding(&[Sliding], routed(true, true)), HfModel::Qwen3Moe),
        (
            ZayaConfig { num_experts: 1, num_experts_per_tok: 1, ..routed(true, false) },
            HfModel::Qwen3Moe,
        ),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        assert_eq!(HfModel::of(&config).unwrap(), model);
        let source = scratch.path().join("hf");
        fs::create_dir(&source).unwrap();
        let weights = write(&config, &source);
        let bytes = fs::read(source.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let found: BTreeSet<_> = file.names().into_iter().map(str::to_owned).collect();
        assert_eq!(found, names(model, config.tie_word_embeddings, config.num_experts));
        let imported = import(&source, &scratch.path().join("start")).unwrap();
        assert_eq!((imported.start.config(), imported.tensors), (&config, weights.len()));
        let mut read = BTreeMap::new();
        let biases = imported.start.read(|place, weight| {
            read.insert(place, weight.shallow_clone());
            Ok(())
        });
        assert_eq!(biases.unwrap(), [vec![], vec![]] as [Vec<f32>; 2]);
        assert_eq!(read.into_values().collect::<Vec<_>>(), weights);
    }
}

/// An expert is the rows of its gate, then those of its up matrix; the file stores each by itself.
#[test]
fn an_expert_is_stored_by_side_and_missing_ones_are_named() {
    let (config, scratch) = (routed(false, true), tempfile::tempdir().unwrap());
    let source = scratch.path().join("hf");
    fs::create_dir(&source).unwrap();
    let weights = write(&config, &source);
    let place = parameters(&config).iter().position(|spec| spec.name.ends_with("gate_up_proj"));
    let gate_up = &weights[place.unwrap()];
    let path = source.join("model.safetensors");
    let mut all = Tensor::read_safetensors(&path).unwrap();
    let of = |all: &[(String, Tensor)], name: &str| {
        let name = format!("model.layers.0.block_sparse_moe.experts.{name}.weight");
        all.iter().find(|(found, _)| *found == name).unwrap().1.copy()
    };
    for (expert, side, first) in [(0, "w1", 0), (0, "w3", 10), (2, "w1", 0), (2, "w3", 10)] {
        let wanted = gate_up.get(expert).narrow(0, first, 10);
        assert_eq!(of(&all, &format!("{expert}.{side}")), wanted, "{expert} {side}");
    }
    let target = scratch.path().join("start");
    let lost = "model.layers.1.block_sparse_moe.experts.1.w3.weight";
    all.retain(|(name, _)| name != lost);
    Tensor::write_safetensors(&all, &path).unwrap();
    let fault = import(&source, &target).unwrap_err();
    assert_eq!(fault.class(), Class::Data, "{fault}");
    let text = fault.to_string();
    assert!(text.contains("gate_up_proj lacks an expert") && text.contains(lost), "{text}");
    // An expert of another width, and one that the configuration does not have.
    for (name, shape) in [
        (lost, &[9, 12][..]),
        (lost, &[120]),
        (lost, &[1, 10, 12]),
        ("model.layers.1.block_sparse_moe.experts.3.w1.weight", &[10, 12]),
    ] {
        let mut odd: Vec<_> =
            all.iter().map(|(name, tensor)| (name.clone(), tensor.copy())).collect();
        odd.push((name.to_owned(), Tensor::zeros(shape, tch::kind::FLOAT_CPU)));
        Tensor::write_safetensors(&odd, &path).unwrap();
        let fault = import(&source, &target).unwrap_err();
        assert!(fault.class() == Class::Data && !target.exists(), "{fault}");
    }
}

/// transformers leaves out what has its default, and says some things twice.
#[test]
fn a_file_that_leaves_out_defaults_is_understood() {
    let small = json!({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": null, "rope_scaling": null});
    let found = config::read(&small.to_string(), "config.json").unwrap().config;
    let heads = (found.num_key_value_heads, found.head_dim, found.moe_intermediate_size);
    assert_eq!(heads, (4, 16, 11_008));
    assert_eq!((found.vocab_size, found.rms_norm_eps, found.rope_theta), (32_000, 1e-6, 1e4));
    assert!(!found.tie_word_embeddings && !found.qk_norm);
    assert_eq!(HfModel::of(&found).unwrap(), HfModel::Llama);
    let edited = |key: &str, to: Value| {
        let mut value = small.clone();
        value[key] = to;
        config::read(&value.to_string(), "config.json")
    };
    let qwen = edited("model_type", json!("qwen3")).unwrap().config;
    assert_eq!((qwen.head_dim, qwen.vocab_size), (128, 151_936));
    assert_eq!(HfModel::of(&qwen).unwrap(), HfModel::Qwen3);
    let mixtral = edited("model_type", json!("mixtral")).unwrap().config;
    assert_eq!((mixtral.num_experts, mixtral.num_experts_per_tok), (8, 2));
    assert_eq!((mixtral.num_key_value_heads, mixtral.moe_intermediate_size), (4, 14_336));
    assert_eq!((mixtral.rope_theta, mixtral.rms_norm_eps), (1e6, 1e-5));
    assert_eq!(HfModel::of(&mixtral).unwrap(), HfModel::Mixtral);
    let moe = json!({"model_type": "qwen3_moe", "num_attention_heads": 32, "num_local_experts": 16,
        "intermediate_size": 99, "mlp_only_layers": [], "head_dim": 8});
    let read = |value: &Value| config::read(&value.to_string(), "config.json");
    let found = read(&moe).unwrap().config;
    assert_eq!((found.num_experts, found.num_experts_per_tok), (16, 8));
    assert_eq!((found.moe_intermediate_size, found.norm_topk_prob), (768, false));
    assert_eq!((found.num_key_value_heads, found.hidden_size), (4, 2048));
    assert_eq!(HfModel::of(&found).unwrap(), HfModel::Qwen3Moe);
    for (model, key, to) in [
        ("mixtral", "sliding_window", json!(0)),
        ("mixtral", "layer_types", json!(["sliding_attention"])),
        ("mixtral", "num_experts_per_tok", json!(9)),
        ("qwen3_moe", "layer_types", json!(["sliding_attention"])),
        ("qwen3", "layer_types", json!(["sliding"])),
        ("qwen3_moe", "mlp_only_layers", json!([0])),
        ("qwen3_moe", "decoder_sparse_step", json!(2)),
        ("qwen3_moe", "norm_topk_prob", json!("yes")),
        ("qwen2_moe", "model_type", json!("qwen2_moe")),
    ] {
        let mut value = moe.clone();
        (value["model_type"], value[key]) = (json!(model), to);
        let fault = read(&value).unwrap_err();
        let class = [Class::Data, Class::Usage].contains(&fault.class());
        assert!(class && fault.to_string().contains(key), "{fault}");
    }
    for (key, to) in [
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("use_sliding_window", json!(true)),
        ("hidden_act", json!("gelu")),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0})),
        ("rope_parameters", json!({"rope_type": "yarn"})),
        ("num_key_value_heads", json!(3)),
        ("partial_rotary_factor", json!(0.5)),
    ] {
        let fault = edited(key, to).unwrap_err();
        let class = [Class::Data, Class::Usage].contains(&fault.class());
        assert!(class && fault.to_string().contains(key), "{fault}");
    }
}

/// As transformers' configurations and masks decide which layers slide.
#[test]
fn windows_are_those_of_transformers() {
    let windows = |value: Value| {
        let found = config::read(&value.to_string(), "config.json").unwrap().config;
        assert_eq!(found.layer_types.contains(&LayerType::Sliding), found.sliding_window > 0);
        found.windows().collect::<Vec<_>>()
    };
    let qwen = |more: Value| {
        let mut all = json!({"model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 8,
            "use_sliding_window": true, "sliding_window": 64, "max_window_layers": 3});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    let some = Some(64);
    assert_eq!(windows(qwen(json!({}))), [None, None, None, some]);
    assert_eq!(windows(qwen(json!({"max_window_layers": 0}))), [some; 4]);
    assert_eq!(windows(qwen(json!({"use_sliding_window": false}))), [None; 4]);
    assert_eq!(windows(qwen(json!({"sliding_window": null}))), [None; 4]);
    let types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];
    assert_eq!(windows(qwen(json!({"layer_types": types}))), [some, None, some, None]);
    assert_eq!(windows(qwen(json!({"model_type": "qwen3_moe"}))), [some; 4]);
    let bare =
        json!({"model_type": "qwen3_moe", "num_hidden_layers": 2, "use_sliding_window": true});
    assert_eq!(windows(bare), [Some(4096); 2]);
    let mixtral = json!({"model_type": "mixtral", "num_hidden_layers": 2, "sliding_window": 9});
    assert_eq!(windows(mixtral), [Some(9); 2]);
}

/// Mixtral 8x7B has 46.7 billion parameters of which a token uses 12.9 (arXiv 2401.04088, section 2.1), Qwen3-30B-A3B
/// 30.5 and 3.3 (arXiv 2505.09388, table 2); the exact numbers are those of transformers' modules.
#[test]
fn published_models_with_experts_have_the_published_counts() {
    let qwen = json!({"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128});
    for (value, all, active) in [
        (json!({"model_type": "mixtral"}), 46_702_792_704, 12_879_925_248),
        (qwen, 30_532_122_624u64, 3_353_032_704u64),
    ] {
        let config = config::read(&value.to_string(), "config.json").unwrap().config;
        let specs = parameters(&config);
        assert_eq!(specs.iter().map(ParamSpec::elements).sum::<u64>(), all);
        assert_eq!(active_parameters(&config, &specs), active);
        // Six operations for each active weight of a matmul and token; the embedding is none.
        let products = specs.iter().filter(|spec| spec.shape.len() > 1).skip(1).cloned();
        let products = active_parameters(&config, &products.collect::<Vec<_>>());
        let routed = vec![config.num_experts_per_tok as u64; config.num_hidden_layers as usize];
        assert_eq!(flops(&config, 1, &routed, 0).unwrap(), 6.0 * products as f64);
    }
}

#[test]
fn a_model_that_transformers_lacks_is_refused_with_its_key() {
    let zaya = ZayaConfig::preset("zaya1-nano").unwrap();
    assert_eq!(HfModel::of(&zaya).unwrap(), HfModel::Zaya);
    let of = |config: ZayaConfig| HfModel::of(&config).unwrap_err().to_string();
    let llama = baseline(false, true);
    let mixed = vec![Attention::Gqa, Attention::Cca];
    let (both, mixtral) = (vec![FeedForward::Mlp, FeedForward::Moe], routed(false, true));
    let slides = sliding(&[LayerType::Sliding], mixtral.clone());
    let cases = [
        ("skip", of(ZayaConfig { skip: SkipOutput::Identity, ..zaya.clone() })),
        ("residual", of(ZayaConfig { residual: ResidualKind::Plain, ..zaya.clone() })),
        ("router", of(ZayaConfig { router: RouterKind::Linear, ..zaya.clone() })),
        ("tie_word_embeddings", of(ZayaConfig { tie_word_embeddings: false, ..zaya.clone() })),
        ("layers", of(ZayaConfig { layers: mixed, ..llama.clone() })),
        ("router", of(ZayaConfig { feed_forward: vec![FeedForward::Moe], ..llama.clone() })),
        ("feed_forward", of(ZayaConfig { feed_forward: both, ..llama.clone() })),
        ("skip", of(ZayaConfig { skip: SkipOutput::Zero, ..mixtral.clone() })),
        ("balance", of(ZayaConfig { balance: BalanceKind::Bias, ..mixtral.clone() })),
        ("norm_topk_prob", of(ZayaConfig { norm_topk_prob: false, ..mixtral.clone() })),
        ("num_shared_experts", of(ZayaConfig { num_shared_experts: 1, ..mixtral })),
        ("num_shared_experts", of(ZayaConfig { num_shared_experts: 1, ..zaya.clone() })),
        ("residual", of(ZayaConfig { residual: ResidualKind::Scaled, ..llama.clone() })),
        ("sliding_window", of(sliding(&[LayerType::Sliding], llama.clone()))),
        ("sliding_rope_theta", of(ZayaConfig { sliding_rope_theta: 2e4, ..slides.clone() })),
        ("layer_types", of(sliding(&[LayerType::Sliding, LayerType::Full], slides))),
        ("partial_rotary_factor", of(ZayaConfig { partial_rotary_factor: 0.5, ..llama })),
    ];
    for (key, text) in cases {
        let next = "replay, fork and validate it with ztrain";
        assert!(text.contains(&format!("[model] {key}")) && text.contains(next), "{text}");
    }
}
