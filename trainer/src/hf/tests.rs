//! Export and import of the parity fixtures, whose tensors, names and logits come from `transformers`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use contract::{Class, Identity};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use store::manifest::TokenizerRecord;
use tch::{Kind, Tensor};

use super::config::{self, HfLayout};
use super::export::{model_files, named};
use super::files::write_parts;
use super::import::{HfImport, import};
use super::start::InitialModel;
use crate::model::LayerType::{Full, Sliding};
use crate::model::parity::{Fixture, relative};
use crate::model::{LogitsDtype, SkipOutput, ZayaConfig, balance_name, logits, parameters};
use crate::optim::balance::RouterBalance;

fn record() -> TokenizerRecord {
    let (sha256, encoder) = (Identity([0; 32]), String::new());
    TokenizerRecord { sha256, vocab: 96, begin: Some(2), end: Some(1), encoder }
}

fn balance(fixture: &Fixture) -> Vec<RouterBalance> {
    let bias = |tensor: &Tensor| Vec::<f32>::try_from(tensor).unwrap();
    let layer = |tensor| RouterBalance { bias: bias(tensor), first: vec![], second: vec![] };
    fixture.balance().iter().map(layer).collect()
}

/// Writes the fixture's model as an export does.
fn write(fixture: &Fixture, folder: &Path) {
    let tensors = named(&parameters(&fixture.config), &fixture.params(), &balance(fixture));
    model_files(folder, &fixture.config, &record(), &tensors).unwrap();
}

/// Weights of a start, in canonical order, and its biases.
fn read(start: &InitialModel) -> (Vec<Tensor>, Vec<Vec<f32>>) {
    let mut weights = BTreeMap::new();
    let taken = |place, weight: &Tensor| {
        assert!(weights.insert(place, weight.shallow_clone()).is_none());
        Ok(())
    };
    let biases = start.read(taken).unwrap();
    (weights.into_values().collect(), biases)
}

/// Asserts that a start has the fixture's weights, bit for bit, and computes its logits.
fn same(fixture: &Fixture, imported: &HfImport, expected: &[Tensor]) {
    let (weights, biases) = read(&imported.start);
    assert_eq!(weights, expected);
    let biases: Vec<Tensor> = biases.iter().map(|bias| Tensor::from_slice(bias)).collect();
    assert_eq!(biases, fixture.balance());
    let config = ZayaConfig { skip: SkipOutput::Zero, ..imported.start.config().clone() };
    let found = logits(&config, &weights, &biases, &fixture.arrays().input()).unwrap();
    let wanted = fixture.tensors["logits"].view([-1, config.vocab_size]);
    assert!(relative(&found, &wanted) < 1e-4);
}

#[test]
fn what_is_written_is_the_state_dict_of_transformers() {
    for name in ["wide", "narrow"] {
        let (fixture, folder) = (Fixture::read(name), tempfile::tempdir().unwrap());
        write(&fixture, folder.path());
        let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let found: BTreeMap<String, Tensor> = file
            .tensors()
            .iter()
            .map(|(name, view)| {
                assert_eq!(view.dtype(), Dtype::F32, "{name}");
                let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
                (name.clone(), Tensor::from_data_size(view.data(), &shape, Kind::Float))
            })
            .collect();
        let wanted: BTreeMap<String, Tensor> = fixture
            .tensors
            .iter()
            .filter_map(|(name, tensor)| {
                Some((name.strip_prefix("param.")?.to_owned(), tensor.copy()))
            })
            .collect();
        assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
        for (name, tensor) in &found {
            assert_eq!(tensor, &wanted[name], "{name}");
        }
    }
}

#[test]
fn out_and_in_again_is_the_same_model() {
    for name in ["wide", "narrow"] {
        let (fixture, scratch) = (Fixture::read(name), tempfile::tempdir().unwrap());
        let source = scratch.path().join("hf");
        fs::create_dir(&source).unwrap();
        write(&fixture, &source);
        let may = |name: &str| fs::metadata(source.join(name)).unwrap().permissions();
        assert_eq!(may("model.safetensors"), may("config.json"), "who reads one reads the other");
        let imported = import(&source, &scratch.path().join("start")).unwrap();
        assert_eq!(imported.start.config(), &fixture.config);
        assert_eq!((imported.layout, imported.notes.len()), (HfLayout::Transformers, 0));
        same(&fixture, &imported, &fixture.params());
        // In parts, with an index and an explicit output head.
        let parts = scratch.path().join("parts");
        fs::create_dir(&parts).unwrap();
        fs::copy(source.join("config.json"), parts.join("config.json")).unwrap();
        let mut tensors =
            named(&parameters(&fixture.config), &fixture.params(), &balance(&fixture));
        tensors.extend(named(&parameters(&fixture.config)[..1], &fixture.params(), &[]));
        tensors.last_mut().unwrap().name = "lm_head.weight".to_owned();
        assert!(write_parts(&parts, &tensors, 20_000).unwrap().len() > 2);
        let again = import(&parts, &scratch.path().join("again")).unwrap();
        assert_eq!(again.start.content(), imported.start.content());
    }
}

/// An index must name files in its own folder and list each tensor in its file; nothing outside the folder is read.
/// Weights must be finite.
#[test]
fn an_index_that_leads_elsewhere_or_says_other_things_than_its_files_is_refused() {
    let fixture = Fixture::read("wide");
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("model");
    fs::create_dir(&folder).unwrap();
    write(&fixture, &folder);
    fs::rename(folder.join("model.safetensors"), scratch.path().join("outside.safetensors"))
        .unwrap();
    let mut tensors = named(&parameters(&fixture.config), &fixture.params(), &balance(&fixture));
    write_parts(&folder, &tensors, 20_000).unwrap();
    let path = folder.join("model.safetensors.index.json");
    let index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let first = index["weight_map"].as_object().unwrap().keys().next().unwrap().clone();
    let refused = |edit: &dyn Fn(&mut serde_json::Map<String, Value>), words: &str| {
        let mut index = index.clone();
        edit(index["weight_map"].as_object_mut().unwrap());
        fs::write(&path, index.to_string()).unwrap();
        let fault = import(&folder, &scratch.path().join("start")).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(fault.to_string().contains(words), "{fault}");
        assert!(!scratch.path().join("start").exists());
    };
    let outside = scratch.path().join("outside.safetensors").to_str().unwrap().to_owned();
    for name in
        ["../outside.safetensors", outside.as_str(), "..", ".", "", "a/../b", "sub/x.safetensors"]
    {
        refused(&|map| drop(map.insert(first.clone(), name.into())), "outside of its folder");
        refused(
            &|map| map.values_mut().for_each(|one| *one = name.into()),
            "outside of its folder",
        );
    }
    refused(&|map| drop(map.remove(&first)), "is not in the index");
    let part = index["weight_map"][&first].clone();
    refused(&|map| drop(map.insert("invented".to_owned(), part.clone())), "invented is not here");
    refused(&|map| drop(map.insert(first.clone(), "lost.safetensors".into())), "missing");
    fs::write(&path, index.to_string()).unwrap();
    import(&folder, &scratch.path().join("whole")).unwrap();
    let _ = tensors[1].tensor.view([-1]).get(0).fill_(f64::NAN);
    write_parts(&folder, &tensors, 20_000).unwrap();
    let name = tensors.remove(1).name;
    refused(&|_| (), &format!("{name} has numbers that are not finite"));
}

/// Zyphra's name for one of ours, written independently from its list of modules, and its layer.
fn zyphra_name(name: &str, layers: i64) -> String {
    let Some(rest) = name.strip_prefix("model.layers.") else {
        let name = name.replace("model.input_", "model.layers.0.res_scale.");
        return name.replace("model.norm", "model.final_norm");
    };
    let (layer, rest) = rest.split_once('.').unwrap();
    let layer: i64 = layer.parse().unwrap();
    if let Some(part) = rest.strip_prefix("post_mlp_residual_scale.") {
        return match layer + 1 == layers {
            true => format!("model.res_scale.{part}"),
            false => format!("model.layers.{}.res_scale.{part}", 2 * layer + 2),
        };
    }
    let attention = rest.starts_with("self_attn") || rest.starts_with("input_layernorm");
    let half = 2 * layer + i64::from(!attention);
    let rest = [
        ("input_layernorm", "input_norm"),
        ("post_attention_layernorm", "input_norm"),
        ("post_attention_residual_scale", "res_scale"),
        ("qkv_proj.q_proj", "qkv.linear_q"),
        ("qkv_proj.k_proj", "qkv.linear_k"),
        ("qkv_proj.v_proj_current", "qkv.val_proj1"),
        ("qkv_proj.v_proj_delayed", "qkv.val_proj2"),
        ("qkv_proj.conv_qk_depthwise", "qkv.conv_qk.0"),
        ("qkv_proj.conv_qk_grouped", "qkv.conv_qk.1"),
        ("qk_norm.temp", "qkv.temp"),
        ("mlp.gate.router_mlp.norm", "zaya_block.router.rmsnorm_eda"),
        ("mlp.gate.router_mlp.fc1", "zaya_block.router.router_mlp.0"),
        ("mlp.gate.router_mlp.fc2", "zaya_block.router.router_mlp.2"),
        ("mlp.gate.router_mlp.out_proj", "zaya_block.router.router_mlp.4"),
        ("mlp.gate.", "zaya_block.router."),
    ]
    .iter()
    .fold(rest.to_owned(), |rest, (ours, zyphra)| rest.replace(ours, zyphra));
    format!("model.layers.{half}.{rest}")
}

/// `config.json` as released with ZAYA1-base, in the size of the fixture, with the same stale fields.
fn zyphra_config(config: &ZayaConfig) -> Value {
    let layers = config.num_hidden_layers as usize;
    let turns = |first: Value, second: Value| vec![[first, second]; layers].concat();
    json!({
        "architectures": ["ZayaForCausalLM"], "model_type": "zaya", "cca": true, "use_cache": true,
        "cca_num_q_heads": turns(config.num_attention_heads.into(), 0.into()),
        "num_query_groups_list": turns(config.num_key_value_heads.into(), 0.into()),
        "ffn_hidden_size_list": turns(0.into(), (2 * config.moe_intermediate_size).into()),
        "zaya_layers": turns("a".into(), config.num_experts.into()),
        "zaya_mlp_expansion": config.router_hidden_size,
        "num_hidden_layers": 120, "num_attention_heads": 16, "kv_channels": config.head_dim,
        "num_key_value_heads": config.num_key_value_heads, "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps, "rope_theta": config.rope_theta, "rope_scaling": false,
        "partial_rotary_factor": config.partial_rotary_factor, "moe_router_topk": 1,
        "activation_func": "swiglu", "normalization": "RMSNorm", "add_bias_linear": false,
        "gated_linear_unit": true, "clamp_temp": false, "residual_in_fp32": true,
        "scale_residual_merge": true, "zaya_high_prec": true, "zaya_use_eda": true, "zaya_use_mod": true,
        "tie_word_embeddings": true, "lm_head_bias": false, "attention_bias": false,
        "sliding_window": null, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    })
}

/// Writes the fixture's model as Zyphra did: experts one by one, the embedding in bf16.
fn write_zyphra(fixture: &Fixture, folder: &Path, leave_out: &str) {
    let config = &fixture.config;
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    let names = parameters(config).into_iter().map(|spec| spec.name);
    let weights = names.zip(fixture.params());
    let biases = (0..config.num_hidden_layers).map(balance_name).zip(fixture.balance());
    for (name, tensor) in weights.chain(biases) {
        let Some((at, part)) = name.split_once(".mlp.experts.") else {
            tensors.push((zyphra_name(&name, config.num_hidden_layers), tensor));
            continue;
        };
        let layer: i64 = at.rsplit('.').next().unwrap().parse().unwrap();
        let part = if part == "gate_up_proj" { "linear_fc1" } else { "linear_fc2" };
        for expert in 0..config.num_experts {
            let at = format!("model.layers.{}.zaya_block.experts", 2 * layer + 1);
            let name = format!("{at}.local_experts.{expert}.{part}.weight");
            tensors.push((name, tensor.get(expert)));
        }
    }
    tensors.retain(|(name, _)| name != leave_out);
    let bytes = |tensor: &Tensor, narrow: bool| {
        let kind = if narrow { Kind::BFloat16 } else { Kind::Float };
        let tensor = tensor.to_kind(kind).contiguous();
        let mut bytes = vec![0; tensor.numel() * if narrow { 2 } else { 4 }];
        tensor.copy_data_u8(&mut bytes, tensor.numel());
        bytes
    };
    let stored: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (name, tensor.size(), bytes(tensor, name.contains("embed"))))
        .collect();
    let views = stored.iter().map(|(name, size, bytes)| {
        let dtype = if name.contains("embed") { Dtype::BF16 } else { Dtype::F32 };
        let shape = size.iter().map(|&size| size as usize).collect();
        ((*name).clone(), TensorView::new(dtype, shape, bytes).unwrap())
    });
    fs::create_dir_all(folder).unwrap();
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    fs::write(folder.join("config.json"), zyphra_config(config).to_string()).unwrap();
}

#[test]
fn zyphras_layout_and_its_stale_numbers_are_understood() {
    for name in ["wide", "narrow"] {
        let (fixture, scratch) = (Fixture::read(name), tempfile::tempdir().unwrap());
        let source = scratch.path().join("base");
        write_zyphra(&fixture, &source, "");
        let imported = import(&source, &scratch.path().join("start")).unwrap();
        let (skip, logits_dtype) = (SkipOutput::Identity, LogitsDtype::F32);
        let wanted = ZayaConfig { skip, logits_dtype, ..fixture.config.clone() };
        assert_eq!(imported.start.config(), &wanted);
        assert_eq!(imported.layout, HfLayout::Zyphra);
        let notes = imported.notes.join("\n");
        assert!(
            notes.contains("num_hidden_layers says 120")
                && notes.contains("num_attention_heads says 16")
        );
        let mut expected = fixture.params();
        expected[0] = expected[0].to_kind(Kind::BFloat16).to_kind(Kind::Float);
        let (weights, _) = read(&imported.start);
        assert_eq!(weights, expected);
        // The embedding was rounded to bf16; with the original one, the logits are those of transformers.
        let config = ZayaConfig { skip: SkipOutput::Zero, ..imported.start.config().clone() };
        let whole: Vec<_> =
            fixture.params()[..1].iter().chain(&weights[1..]).map(Tensor::copy).collect();
        let found = logits(&config, &whole, &fixture.balance(), &fixture.arrays().input()).unwrap();
        let wanted = fixture.tensors["logits"].view([-1, config.vocab_size]);
        assert!(relative(&found, &wanted) < 1e-4);
    }
}

#[test]
fn a_part_of_a_model_is_refused_by_the_tensors_name() {
    let (fixture, scratch) = (Fixture::read("wide"), tempfile::tempdir().unwrap());
    let source = scratch.path().join("base");
    let target = scratch.path().join("start");
    for (lost, word) in [
        ("model.layers.3.zaya_block.experts.local_experts.2.linear_fc1.weight", "lacks an expert"),
        ("model.res_scale.residual_bias", "layers.2.post_mlp_residual_scale.residual_bias"),
        ("model.layers.1.zaya_block.router.balancing_biases", "layers.0.mlp.gate.balancing_biases"),
    ] {
        write_zyphra(&fixture, &source, lost);
        let fault = import(&source, &target).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(fault.to_string().contains(word), "{fault}");
        assert!(!target.exists(), "nothing is left of a start that failed");
    }
    // Tensors that are not in the index, some of them in two files.
    write_zyphra(&fixture, &source, "");
    let parts = ["a.safetensors", "b.safetensors"];
    for part in parts {
        fs::copy(source.join("model.safetensors"), source.join(part)).unwrap();
    }
    fs::remove_file(source.join("model.safetensors")).unwrap();
    let index = json!({"weight_map": {"one": parts[0], "other": parts[1]}}).to_string();
    fs::write(source.join("model.safetensors.index.json"), index).unwrap();
    let fault = import(&source, &target).unwrap_err().to_string();
    assert!(fault.contains("index and the files of this model disagree"), "{fault}");
    // More tensors than the configuration has layers for.
    let whole = scratch.path().join("whole");
    fs::create_dir(&whole).unwrap();
    write(&fixture, &whole);
    let smaller = ZayaConfig { num_hidden_layers: 2, ..fixture.config.clone() };
    fs::write(whole.join("config.json"), config::write(&smaller, &record()).to_string()).unwrap();
    let fault = import(&whole, &target).unwrap_err();
    assert!(fault.to_string().contains("no place for the tensor model.layers.2."), "{fault}");
}

/// Reads `config.json` with one field changed.
fn edited(mut value: Value, key: &str, to: Value) -> contract::Result<config::HfDescription> {
    value[key] = to;
    config::read(&value.to_string(), "config.json")
}

/// Zyphra counts the tokens before a query's own, for each half of a layer or for each attention.
#[test]
fn windows_of_zyphras_layout_are_read_or_refused_with_the_key() {
    let wide = Fixture::read("wide").config;
    let mut zyphra = zyphra_config(&wide);
    zyphra["swa_layers"] = json!([128, 0, 0, 0, 128, 0]);
    zyphra["swa_rotary_base"] = json!(20_000);
    let wanted = ZayaConfig {
        sliding_window: 129,
        layer_types: vec![Sliding, Full],
        sliding_rope_theta: 2e4,
        skip: SkipOutput::Identity,
        logits_dtype: LogitsDtype::F32,
        ..wide
    };
    for (key, to) in [
        ("sliding_window", json!(null)),
        ("sliding_window", json!(129)),
        ("swa_layers", json!([128, 0, 128])),
        ("rope_theta", json!(null)),
    ] {
        let found = edited(zyphra.clone(), key, to).unwrap().config;
        assert_eq!(found, ZayaConfig { rope_theta: found.rope_theta, ..wanted.clone() });
    }
    let none = edited(zyphra.clone(), "swa_layers", json!(vec![0; 6])).unwrap().config;
    assert_eq!((none.sliding_window, none.sliding_rope_theta), (0, 0.0));
    for (key, to) in [
        ("swa_layers", json!([128, 0, 0, 0])),
        ("swa_layers", json!([128, 0, 64, 0, 0, 0])),
        ("swa_layers", json!([128, -1, 0])),
        ("swa_layers", json!(128)),
        ("swa_rotary_base", json!(null)),
        ("sliding_window", json!(128)),
    ] {
        let fault = edited(zyphra.clone(), key, to).unwrap_err();
        assert_eq!(fault.class(), Class::Data);
        assert!(fault.to_string().contains(key), "{fault}");
    }
}

#[test]
fn a_model_that_is_computed_otherwise_is_refused_with_the_key() {
    let wide = Fixture::read("wide").config;
    let zyphra = zyphra_config(&wide);
    for (key, to) in [
        ("clamp_temp", json!(true)),
        ("zaya_use_mod", json!(false)),
        ("zaya_use_eda", json!(false)),
        ("zaya_layers", json!(["a", "a", 4, 4])),
        ("rope_scaling", json!({"type": "yarn"})),
        ("add_bias_linear", json!(true)),
    ] {
        let fault = edited(zyphra.clone(), key, to).unwrap_err();
        assert_eq!(fault.class(), Class::Data);
        assert!(fault.to_string().contains(key), "{fault}");
    }
    let ours = config::write(&wide, &record());
    let sliding =
        ZayaConfig { sliding_window: 9, layer_types: vec![Sliding, Full], ..wide.clone() };
    for theta in [0.0, 1e4] {
        let sliding = ZayaConfig { sliding_rope_theta: theta, ..sliding.clone() };
        let written = config::write(&sliding, &record());
        assert_eq!(written["layer_types"], json!(["hybrid_sliding", "hybrid", "hybrid_sliding"]));
        assert_eq!(config::read(&written.to_string(), "config.json").unwrap().config, sliding);
    }
    let mut written = config::write(&sliding, &record());
    written["rope_parameters"]["hybrid_sliding"]["partial_rotary_factor"] = json!(1.0);
    let fault = config::read(&written.to_string(), "config.json").unwrap_err();
    assert!(fault.to_string().contains("rope_parameters"), "{fault}");
    let mut bare = config::write(&sliding, &record());
    bare.as_object_mut().unwrap().remove("rope_parameters");
    let bare = config::read(&bare.to_string(), "config.json").unwrap().config;
    assert_eq!((bare.rope_theta, bare.sliding_rope_theta), (5e6, 1e4), "the class's own");
    for (key, to) in [
        ("model_type", json!("bloom")),
        ("layer_types", json!(["hybrid", "hybrid_sliding", "hybrid"])),
        ("rope_parameters", json!({"hybrid": {"rope_type": "yarn", "rope_theta": 1e4}})),
        ("num_experts_per_tok", json!(2)),
        ("hidden_act", json!("gelu")),
    ] {
        let fault = edited(ours.clone(), key, to).unwrap_err();
        assert!(fault.to_string().contains("config.json"), "{fault}");
    }
    // A released file has a `rope_type` next to the layer types, which means nothing; older files are flat.
    let mut slip = ours.clone();
    slip["rope_parameters"]["rope_type"] = "default".into();
    assert_eq!(config::read(&slip.to_string(), "config.json").unwrap().config, wide);
    let flat = json!({"rope_theta": wide.rope_theta, "partial_rotary_factor": 0.5, "rope_type": "default"});
    let found = edited(ours, "rope_parameters", flat).unwrap();
    assert_eq!(found.config, wide);
}
