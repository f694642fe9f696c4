//! `config.json`: two layouts of ZAYA1, and the errors of released files; and the fields of `llama`, `qwen3`, `mixtral`
//! and `qwen3_moe`.

use std::collections::BTreeMap;

use contract::{Fault, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use store::manifest::TokenizerRecord;

use super::family::HfModel;
use crate::model::{
    Attention, BalanceKind, FeedForward, LayerType, ResidualKind, RouterKind, SkipOutput,
    ZayaConfig,
};

/// The software that wrote a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HfLayout {
    /// `transformers`: a layer is an attention and its experts.
    Transformers,
    /// Zyphra's first releases (ZAYA1-base): attention and experts are alternating layers.
    Zyphra,
}

impl HfLayout {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            HfLayout::Transformers => "transformers",
            HfLayout::Zyphra => "Zyphra's first releases",
        }
    }
}

/// What a `config.json` describes.
#[derive(Clone, Debug, PartialEq)]
pub struct HfDescription {
    /// The model.
    pub config: ZayaConfig,
    /// The layout of its tensors.
    pub layout: HfLayout,
    /// Fields that were not taken literally, and why.
    pub notes: Vec<String>,
}

/// Fields with the same name and meaning as ours, in every family.
const SHARED: [&str; 12] = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
];

/// The same, that only ZAYA1 has.
const OWN: [&str; 7] = [
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "router_hidden_size",
    "cca_time0",
    "cca_time1",
    "lm_head_bias",
];

/// The same, of `qwen3_moe`.
const QWEN3_MOE: [&str; 4] =
    ["moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"];

/// Keys that only Zyphra's layout has.
const ZYPHRA: [&str; 5] =
    ["zaya_layers", "cca", "zaya_mlp_expansion", "ffn_hidden_size", "ffn_hidden_size_list"];

/// What ZAYA1's code and the others' call a layer without a window, and one with it.
const ZAYA_TYPES: [&str; 2] = ["hybrid", "hybrid_sliding"];
const TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// The type of each layer, by these names.
fn listed(config: &ZayaConfig, names: [&'static str; 2]) -> Vec<&'static str> {
    config.windows().map(|window| names[usize::from(window.is_some())]).collect()
}

/// `config.json` of a model, as `transformers` reads it.
pub fn write(config: &ZayaConfig, tokenizer: &TokenizerRecord) -> Value {
    let (mut fields, model) = (Map::new(), HfModel::like(config));
    let own = serde_json::to_value(config).unwrap_or_default();
    let own_names = match model {
        HfModel::Zaya => &OWN[..],
        HfModel::Qwen3Moe => &QWEN3_MOE,
        HfModel::Llama | HfModel::Qwen3 | HfModel::Mixtral => &[],
    };
    for name in SHARED.iter().chain(own_names) {
        fields.insert((*name).to_owned(), own[*name].clone());
    }
    let rest = json!({
        "architectures": [model.class()], "model_type": model.name(), "dtype": "float32",
        "attention_dropout": 0.0, "use_cache": true,
        // A padding row of the embedding would get no gradient there; none of our tokens is padding.
        "pad_token_id": null, "bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end,
    });
    let window = config.windows().flatten().next();
    let special = match model {
        HfModel::Zaya => {
            let rope = |slides| {
                json!({
                    "rope_type": "default", "rope_theta": config.theta(slides),
                    "partial_rotary_factor": config.partial_rotary_factor,
                })
            };
            json!({
                "rope_parameters": {"hybrid": rope(false), "hybrid_sliding": rope(true)},
                "layer_types": listed(config, ZAYA_TYPES), "sliding_window": window,
            })
        }
        _ => json!({
            "intermediate_size": config.moe_intermediate_size,
            // Releases before 5 read the base at the top level, and take their default without it.
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }),
    };
    let experts = match model {
        HfModel::Mixtral => json!({
            "num_local_experts": config.num_experts, "sliding_window": window,
            "num_experts_per_tok": config.num_experts_per_tok,
        }),
        HfModel::Qwen3Moe => json!({
            "decoder_sparse_step": 1, "mlp_only_layers": [],
            "use_sliding_window": window.is_some(),
        }),
        _ => json!({}),
    };
    let sliding = match model {
        HfModel::Qwen3 if window.is_some() => json!({
            "use_sliding_window": true, "sliding_window": window,
            "layer_types": listed(config, TYPES),
            // Releases that do not read the list.
            "max_window_layers": config.windows().take_while(Option::is_none).count(),
        }),
        HfModel::Qwen3Moe if window.is_some() => json!({ "sliding_window": window }),
        _ => json!({}),
    };
    for part in [rest, special, experts, sliding] {
        fields.extend(part.as_object().cloned().unwrap_or_default());
    }
    Value::Object(fields)
}

/// Parses the text of a `config.json`; `place` names it in errors.
pub fn read(text: &str, place: &str) -> Result<HfDescription> {
    let fields: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| Fault::data(format!("this is not a JSON object: {error}")).at(place))?;
    let mut reader = Reader { fields: &fields, place, notes: Vec::new() };
    let kind = reader.text("model_type")?.unwrap_or_else(|| "zaya".to_owned());
    let Some(model) = HfModel::ALL.into_iter().find(|model| model.name() == kind) else {
        let why = "only these models are known here";
        let names = HfModel::ALL.map(|model| format!("{:?}", model.name())).join(", ");
        return Err(reader.refuse("model_type", &format!("one of {names}"), why));
    };
    if model != HfModel::Zaya {
        let found = reader.baseline(model)?;
        let config = ZayaConfig::resolve(Some("zaya1-8b"), &found);
        let config = config.map_err(|fault| fault.at(place))?;
        let layout = HfLayout::Transformers;
        return Ok(HfDescription { config, layout, notes: reader.notes });
    }
    let layout = match ZYPHRA.iter().any(|key| fields.contains_key(*key)) {
        true => HfLayout::Zyphra,
        false => HfLayout::Transformers,
    };
    let mut found = match layout {
        HfLayout::Transformers => reader.transformers()?,
        HfLayout::Zyphra => reader.zyphra()?,
    };
    reader.rope(&mut found)?;
    let skip = match layout {
        HfLayout::Transformers => SkipOutput::Zero,
        HfLayout::Zyphra => SkipOutput::Identity,
    };
    let config = ZayaConfig::resolve(Some("zaya1-8b"), &found).map_err(|fault| fault.at(place))?;
    Ok(HfDescription { config: ZayaConfig { skip, ..config }, layout, notes: reader.notes })
}

pub(super) type Found = BTreeMap<String, Value>;

pub(super) struct Reader<'a> {
    fields: &'a Map<String, Value>,
    place: &'a str,
    notes: Vec<String>,
}

impl Reader<'_> {
    /// A field, if it is there and not null.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn refuse(&self, key: &str, wanted: &str, why: &str) -> Fault {
        let found = self.fields.get(key).map_or_else(|| "nothing".to_owned(), Value::to_string);
        Fault::data(format!("this model cannot be taken over: {why}"))
            .at(format!("{}: {key}", self.place))
            .found(found)
            .wanted(wanted)
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = value.as_str().map(str::to_owned);
        text.map(Some).ok_or_else(|| self.refuse(key, "text", "the field has the wrong kind"))
    }

    /// A number, or the largest of a list: per-layer lists hold 0 for layers that lack the thing.
    pub(super) fn largest(&self, key: &str) -> Result<Option<i64>> {
        let largest = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_i64).max(),
            Some(value) => value.as_i64(),
        };
        let fault =
            || self.refuse(key, "a number, or one by layer", "the field has the wrong kind");
        largest.map(Some).ok_or_else(fault)
    }

    pub(super) fn only(&self, key: &str, wanted: &Value, why: &str) -> Result<()> {
        match self.get(key) {
            Some(value) if value != wanted => Err(self.refuse(key, &wanted.to_string(), why)),
            _ => Ok(()),
        }
    }

    fn transformers(&mut self) -> Result<Found> {
        let mut found = self.shared();
        if let Some(Value::Array(kinds)) = self.get("layer_types")
            && !kinds.is_empty()
        {
            found.insert("num_hidden_layers".to_owned(), kinds.len().into());
        }
        self.windows(HfModel::Zaya, &mut found)?;
        Ok(found)
    }

    /// The keys of a model with grouped-query attention and a plain residual. A file leaves out what has the default of
    /// `transformers`.
    fn baseline(&mut self, model: HfModel) -> Result<Found> {
        self.only("mlp_bias", &json!(false), "its feed-forwards have biases")?;
        let mut found: Found =
            defaults(model).as_object().cloned().unwrap_or_default().into_iter().collect();
        if self.fields.get("num_key_value_heads").is_some_and(Value::is_null) {
            found.remove("num_key_value_heads");
        }
        found.extend(self.named(SHARED.iter()));
        self.windows(model, &mut found)?;
        self.rope(&mut found)?;
        if found.get("partial_rotary_factor").is_some_and(|factor| factor.as_f64() != Some(1.0)) {
            let why = "a part of each head is rotated, which transformers' code for it does not do";
            return Err(self.refuse("partial_rotary_factor", "1.0", why));
        }
        let number = |key: &str| found.get(key).and_then(Value::as_i64).unwrap_or(1).max(1);
        let (heads, width) = (number("num_attention_heads"), number("hidden_size"));
        found.entry("num_key_value_heads".to_owned()).or_insert_with(|| heads.into());
        found.entry("head_dim".to_owned()).or_insert_with(|| (width / heads).into());
        if model.has_experts() {
            self.routed(model, &mut found)?;
        } else if let Some(inner) = self.largest("intermediate_size")? {
            found.insert("moe_intermediate_size".to_owned(), inner.into());
        }
        let kind = if model.has_experts() { FeedForward::Moe } else { FeedForward::Mlp };
        found.extend([
            ("partial_rotary_factor".to_owned(), json!(1.0)),
            ("layers".to_owned(), json!([Attention::Gqa])),
            ("feed_forward".to_owned(), json!([kind])),
            ("residual".to_owned(), json!(ResidualKind::Plain)),
            ("qk_norm".to_owned(), model.has_qk_norm().into()),
        ]);
        Ok(found)
    }

    /// Which layers slide over how many tokens, as transformers' code for the model decides it.
    fn windows(&self, model: HfModel, found: &mut Found) -> Result<()> {
        let qwen = model.has_qk_norm();
        let window = match self.fields.get("sliding_window") {
            None if qwen => Some(json!(4096)),
            given => given.filter(|window| !window.is_null()).cloned(),
        };
        let given = self.get("use_sliding_window") == Some(&json!(true));
        let (on, listed) = (given && window.is_some(), self.listed(model)?);
        let layers = found.get("num_hidden_layers").and_then(Value::as_i64).unwrap_or(1);
        let all = |slides: bool| vec![slides; layers.clamp(1, 1 << 12) as usize];
        let slides = match (model, &listed) {
            (HfModel::Zaya | HfModel::Qwen3, Some(listed)) => listed.clone(),
            (HfModel::Qwen3, None) => {
                let first = self.largest("max_window_layers")?.unwrap_or(28);
                (0..).zip(all(on)).map(|(layer, on)| on && layer >= first).collect()
            }
            (HfModel::Mixtral, _) => all(window.is_some()),
            (HfModel::Qwen3Moe, _) => all(on),
            (HfModel::Zaya | HfModel::Llama, _) => all(false),
        };
        if listed.is_some_and(|listed| listed != slides || listed.len() as i64 != layers) {
            let why = "its list of layers is not what transformers' code for it computes";
            let wanted = match model {
                HfModel::Zaya | HfModel::Qwen3 => format!("{layers} types"),
                _ => format!("{layers} times {:?}", TYPES[usize::from(slides.contains(&true))]),
            };
            return Err(self.refuse("layer_types", &wanted, why));
        }
        let sliding = slides.contains(&true);
        if (given && model == HfModel::Llama) || (sliding && qwen && !on) {
            let why = "its layers attend to a window, which transformers' code for it does not do";
            return Err(self.refuse("use_sliding_window", &(!given).to_string(), why));
        }
        if sliding {
            let tokens = window.filter(|window| window.as_i64().is_some_and(|tokens| tokens > 0));
            let wanted = "a number of tokens, at least 1";
            let why = "its layers attend to a window";
            let tokens = tokens.ok_or_else(|| self.refuse("sliding_window", wanted, why))?;
            let types = [LayerType::Full, LayerType::Sliding];
            let types =
                shortest(slides.into_iter().map(|slides| types[usize::from(slides)]).collect());
            found.insert("sliding_window".to_owned(), tokens);
            found.insert("layer_types".to_owned(), json!(types));
        }
        Ok(())
    }

    /// Which layers its list says slide.
    fn listed(&self, model: HfModel) -> Result<Option<Vec<bool>>> {
        let names = if model == HfModel::Zaya { ZAYA_TYPES } else { TYPES };
        let slides = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Some(false),
            Some(name) => names.iter().position(|one| *one == name).map(|place| place > 0),
            None => None,
        };
        let Some(Value::Array(kinds)) = self.get("layer_types") else { return Ok(None) };
        let all: Option<Vec<bool>> = kinds.iter().map(slides).collect();
        let wanted = || format!("{:?} or {:?} for each layer", names[0], names[1]);
        let why = "its layers are of other types";
        let all = all.ok_or_else(|| self.refuse("layer_types", &wanted(), why))?;
        Ok(Some(all).filter(|all| !all.is_empty()))
    }

    /// The keys of a router of one matrix and its experts.
    fn routed(&self, model: HfModel, found: &mut Found) -> Result<()> {
        self.only("decoder_sparse_step", &json!(1), "some of its layers have no experts")?;
        self.only("mlp_only_layers", &json!([]), "some of its layers have no experts")?;
        let width = match model {
            HfModel::Mixtral => "intermediate_size",
            _ => "moe_intermediate_size",
        };
        // transformers takes either name for the number of experts.
        for (key, ours) in [
            (width, "moe_intermediate_size"),
            ("num_experts", "num_experts"),
            ("num_local_experts", "num_experts"),
            ("num_experts_per_tok", "num_experts_per_tok"),
        ] {
            if let Some(value) = self.largest(key)? {
                found.insert(ours.to_owned(), value.into());
            }
        }
        if let (HfModel::Qwen3Moe, Some(value)) = (model, self.get("norm_topk_prob")) {
            found.insert("norm_topk_prob".to_owned(), value.clone());
        }
        found.extend([
            ("router".to_owned(), json!(RouterKind::Linear)),
            ("skip".to_owned(), json!(SkipOutput::None)),
            ("balance".to_owned(), json!(BalanceKind::None)),
        ]);
        Ok(())
    }

    pub(super) fn shared(&self) -> Found {
        self.named(SHARED.iter().chain(&OWN))
    }

    /// The values of those of these keys that the file has.
    fn named<'k>(&self, keys: impl Iterator<Item = &'k &'k str>) -> Found {
        keys.filter_map(|key| Some(((*key).to_owned(), self.get(key)?.clone()))).collect()
    }

    /// Notes that one field overrides another.
    pub(super) fn note(&mut self, stale: &str, believed: &str, value: i64) {
        if let Some(other) = self.get(stale).filter(|other| other.as_i64() != Some(value)) {
            self.notes
                .push(format!("{stale} says {other}, {believed} says {value}: the latter holds"));
        }
    }

    /// Rotary embedding parameters: by layer type, in one object, or at the top level. A `rope_type` next to the layer
    /// types is a mistake of released files and is ignored.
    fn rope(&mut self, found: &mut Found) -> Result<()> {
        let nested = self.get("rope_parameters").and_then(Value::as_object);
        let inner = nested.map(|all| {
            let by_type = all.get("hybrid").or(all.get("full_attention"));
            let by_type = by_type.or(all.get("hybrid_sliding"));
            by_type.and_then(Value::as_object).unwrap_or(all)
        });
        if self.get("rope_scaling").is_some_and(|scaling| *scaling != json!(false)) {
            let why = "its rotary embedding is scaled";
            return Err(self.refuse("rope_scaling", "nothing", why));
        }
        let kind = inner.and_then(|inner| inner.get("rope_type")).and_then(Value::as_str);
        if kind.is_some_and(|kind| kind != "default") {
            let why = "its rotary embedding is scaled";
            return Err(self.refuse("rope_parameters", "rope_type \"default\"", why));
        }
        for key in ["rope_theta", "partial_rotary_factor"] {
            let value = inner.and_then(|inner| inner.get(key)).or(self.get(key));
            if let Some(value) = value {
                found.insert(key.to_owned(), value.clone());
            }
        }
        match (inner, nested.and_then(|all| all.get("hybrid_sliding"))) {
            _ if !found.contains_key("sliding_window") => Ok(()),
            (Some(inner), Some(sliding)) => self.sliding_rope(inner, sliding, found),
            (None, _) if !found.contains_key("rope_theta") => {
                // The class's own.
                found.entry("sliding_rope_theta".to_owned()).or_insert_with(|| json!(1e4));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The rotary embedding of layers that slide, next to that of the others.
    fn sliding_rope(
        &self,
        full: &Map<String, Value>,
        sliding: &Value,
        found: &mut Found,
    ) -> Result<()> {
        let kind = sliding.get("rope_type").and_then(Value::as_str);
        let parts = [full.get("partial_rotary_factor"), sliding.get("partial_rotary_factor")];
        if kind.is_some_and(|kind| kind != "default") || parts[0] != parts[1] {
            let why =
                "the rotary embedding of its layers with a window is scaled or has another size";
            let wanted = "rope_type \"default\" and one partial_rotary_factor";
            return Err(self.refuse("rope_parameters", wanted, why));
        }
        if let Some(theta) =
            sliding.get("rope_theta").filter(|theta| found.get("rope_theta") != Some(theta))
        {
            found.insert("sliding_rope_theta".to_owned(), theta.clone());
        }
        Ok(())
    }
}

/// The shortest list that repeats as `types`.
pub(super) fn shortest(mut types: Vec<LayerType>) -> Vec<LayerType> {
    let repeats = |length: &usize| types.iter().zip(types[*length..].iter()).all(|(a, b)| a == b);
    let length = (1..types.len()).find(repeats).unwrap_or(types.len());
    types.truncate(length);
    types
}

/// What the classes of `transformers` take for a field that a file leaves out.
fn defaults(model: HfModel) -> Value {
    let mut all = json!({
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "initializer_range": 0.02, "tie_word_embeddings": false, "max_position_embeddings": 2048,
        "rope_theta": 1e4, "moe_intermediate_size": 11_008,
    });
    let own = match model {
        HfModel::Zaya | HfModel::Llama => json!({}),
        HfModel::Qwen3 => json!({
            "vocab_size": 151_936, "max_position_embeddings": 32_768, "head_dim": 128,
            "moe_intermediate_size": 22_016,
        }),
        HfModel::Mixtral => json!({
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
            "rope_theta": 1e6, "moe_intermediate_size": 14_336, "num_experts": 8,
            "num_experts_per_tok": 2, "norm_topk_prob": true,
        }),
        HfModel::Qwen3Moe => json!({
            "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24,
            "num_key_value_heads": 4, "max_position_embeddings": 32_768,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": false,
        }),
    };
    if let (Some(all), Some(own)) = (all.as_object_mut(), own.as_object()) {
        all.extend(own.clone());
    }
    all
}
