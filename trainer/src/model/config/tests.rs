//! Valid configurations, and the errors of invalid ones.

use contract::{Digestible as _, Hasher};

use super::*;
use serde_json::json;

fn fields(pairs: &[(&str, Value)]) -> BTreeMap<String, Value> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

#[test]
fn logits_that_exist_at_once_are_bounded_by_the_vocabulary() {
    for (vocabulary, wanted) in [(300, 4096), (50_257, 4096), (131_072, 2048), (262_272, 1024)] {
        let fields = BTreeMap::from([("vocab_size".to_owned(), vocabulary.into())]);
        assert_eq!(ZayaConfig::resolve(None, &fields).unwrap().loss_chunk, wanted);
    }
    assert_eq!(loss_chunk(1 << 31), 1);
    let fields = BTreeMap::from([("loss_chunk".to_owned(), 512.into())]);
    assert_eq!(ZayaConfig::resolve(None, &fields).unwrap().loss_chunk, 512, "as it is named");
}

#[test]
fn presets_are_valid_and_survive_text() {
    for name in PRESETS {
        let config = ZayaConfig::preset(name).unwrap();
        config.validate(str::to_owned).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ZayaConfig>(&text).unwrap(), config);
    }
    assert_eq!(ZayaConfig::preset("zaya1-80b"), None);
}

#[test]
fn what_is_no_number_is_called_so() {
    let config = ZayaConfig::preset("zaya1-nano").unwrap();
    let fields = fields(&[("initializer_range", json!(f64::NAN))]);
    let fault = config.with_fields(&fields, str::to_owned).unwrap_err().to_string();
    for word in ["initializer_range", "not a finite number", "nan"] {
        assert!(fault.contains(word), "{fault}");
    }
    assert!(!fault.contains("null"), "{fault}");
}

#[test]
fn fields_replace_those_of_the_preset() {
    let (skip, loss_chunk) = (SkipOutput::Identity, 4096);
    let wanted = ZayaConfig { vocab_size: 5000, skip, loss_chunk, ..nano() };
    let given = fields(&[("vocab_size", json!(5000)), ("skip", json!("identity"))]);
    assert_eq!(ZayaConfig::resolve(None, &given).unwrap(), wanted);
    assert_eq!(ZayaConfig::resolve(Some("zaya1-8b"), &fields(&[])).unwrap(), eight_billion());
}

#[test]
fn what_cannot_be_names_the_field() {
    let refused = |preset, key: &str, value: Value| {
        ZayaConfig::resolve(preset, &fields(&[(key, value)])).unwrap_err().to_string()
    };
    let cases = [
        (refused(Some("zaya2"), "skip", json!("zero")), "zaya1-nano, zaya1-20m"),
        (refused(None, "hiden_size", json!(1)), "did you mean `hidden_size`?"),
        (refused(None, "vocab_size", json!("many")), "[model] vocab_size"),
        (refused(None, "skip", json!("half")), "[model] skip"),
        (refused(None, "num_hidden_layers", json!(0)), "[model] num_hidden_layers"),
        (refused(None, "num_attention_heads", json!(3)), "multiple of num_key_value_heads"),
        (refused(None, "partial_rotary_factor", json!(0.3)), "even number"),
        (refused(None, "num_experts_per_tok", json!(2)), "1, the only value with router"),
        (refused(None, "num_experts_per_tok", json!(0)), "1, the only value with router"),
        (refused(None, "norm_topk_prob", json!(true)), "[model] norm_topk_prob"),
        (refused(None, "skip", json!("none")), "\"zero\" or \"identity\", the only value"),
        (refused(None, "balance", json!("none")), "\"bias\", the only value"),
        (refused(None, "balance", json!("loss")), "`bias` or `none`"),
        (refused(None, "num_shared_experts", json!(-1)), "0 to 4096"),
        (refused(None, "hidden_act", json!("gelu")), "silu"),
        (refused(None, "rms_norm_eps", json!(0.0)), "a positive number"),
        (refused(None, "layers", json!(["cca", "lin"])), "[model] layers"),
        (refused(None, "layers", json!([])), "one to num_hidden_layers (6) kinds"),
        (refused(None, "feed_forward", json!(["moe", "mpl"])), "[model] feed_forward"),
        (refused(None, "feed_forward", json!(["mpl"])), "wanted: `moe` or `mlp`"),
        (refused(None, "feed_forward", json!([])), "one to num_hidden_layers (6) kinds"),
    ];
    for (message, part) in cases {
        assert!(message.contains(part), "{message}");
    }
    let sliding = |others: &[(&str, Value)]| {
        let given = [&[("sliding_window", json!(64))], others].concat();
        ZayaConfig::resolve(None, &fields(&given)).map_err(|fault| fault.to_string())
    };
    let windows = |others: &[(&str, Value)]| sliding(others).unwrap().windows().collect::<Vec<_>>();
    assert_eq!(windows(&[]), [Some(64); 6]);
    let types = json!(["full_attention", "sliding_attention"]);
    assert_eq!(windows(&[("layer_types", types.clone())]), [None, Some(64)].repeat(3));
    let linear = [("layers", json!(["linear", "cca"])), ("layer_types", types.clone())];
    assert_eq!(windows(&linear), [None, Some(64)].repeat(3));
    assert_eq!(windows(&linear[..1]), [None, Some(64)].repeat(3));
    let (first, odd) = (json!(["cca", "linear"]), json!(["full_attention"]));
    for (given, part) in [
        (&[("layers", first), ("layer_types", types)][..], "[model] layer_types"),
        (&[("layer_types", odd)], "[model] sliding_window"),
        (&[("sliding_window", json!(-1))], "[model] sliding_window"),
        (&[("layer_types", json!(["sliding"]))], "`full_attention` or `sliding_attention`"),
        (&[("sliding_rope_theta", json!(0.5))], "[model] sliding_rope_theta"),
    ] {
        let message = sliding(given).unwrap_err();
        assert!(message.contains(part), "{message}");
    }
    let alone = refused(None, "sliding_rope_theta", json!(1e6));
    assert!(alone.contains("a layer that slides"), "{alone}");
    let alone = refused(None, "layer_types", json!(["sliding_attention"]));
    assert!(alone.contains("[model] sliding_window"), "{alone}");
    let linear = |count: i64, experts: i64| {
        let given = [("router", json!("linear")), ("num_experts", json!(experts))];
        let given = [&given[..], &[("num_experts_per_tok", json!(count))]].concat();
        ZayaConfig::resolve(None, &fields(&given)).map_err(|fault| fault.to_string())
    };
    for (count, experts, most) in [(9, 16, 8), (0, 16, 8), (4, 3, 3)] {
        assert!(linear(count, experts).unwrap_err().contains(&format!("1 to {most}")));
    }
    assert_eq!(linear(8, 16).unwrap().num_experts_per_tok, 8);
}

/// Code for ZAYA1 alone learns the key that is not ZAYA1's.
#[test]
fn what_is_not_zaya1s_is_named() {
    assert_eq!(nano().foreign(), None);
    let of = |key: &str, kinds| nano().with_fields(&fields(&[(key, kinds)]), str::to_owned);
    for (key, kinds) in [("layers", ["cca", "linear"]), ("feed_forward", ["moe", "mlp"])] {
        assert_eq!(of(key, json!(kinds)).unwrap().foreign(), Some((key, kinds[1])));
    }
    for (key, value) in [("residual", "plain"), ("router", "linear")] {
        assert_eq!(of(key, json!(value)).unwrap().foreign(), Some((key, value)));
    }
    let head = of("tie_word_embeddings", json!(false)).unwrap();
    assert_eq!(head.foreign(), Some(("tie_word_embeddings", "false")));
    let shared = of("num_shared_experts", json!(1)).unwrap();
    assert_eq!(shared.foreign().unwrap().0, "num_shared_experts");
}

#[test]
fn every_field_reaches_the_digest() {
    let digest = |config: &ZayaConfig| {
        let mut hasher = Hasher::new();
        config.feed(&mut hasher);
        hasher.finish()
    };
    let base = nano();
    let Value::Object(all) = serde_json::to_value(&base).unwrap() else { panic!("an object") };
    for (key, value) in &all {
        let other = match value {
            Value::Bool(flag) => json!(!flag),
            Value::String(text) if text == "zero" => json!("identity"),
            Value::String(text) if text == "retention" => json!("none"),
            Value::String(text) if text == "scaled" => json!("plain"),
            Value::String(text) if text == "mlp" => json!("linear"),
            Value::String(text) if text == "bias" => json!("none"),
            Value::String(text) if text == "model" => json!("f32"),
            Value::Array(_) if key == "feed_forward" => json!(["moe", "mlp"]),
            Value::Array(_) if key == "layer_types" => json!(["sliding_attention"]),
            Value::Array(_) => json!(["cca", "linear"]),
            Value::String(text) => json!(format!("{text}x")),
            Value::Number(number) if number.is_i64() => json!(number.as_i64().unwrap() + 1),
            _ => json!(value.as_f64().unwrap() + 1.0),
        };
        let changed = base.with_fields(&fields(&[(key, other)]), str::to_owned).unwrap();
        assert_ne!(digest(&changed), digest(&base), "{key}");
    }
}
