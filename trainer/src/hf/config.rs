//! `config.json`: two layouts, and the errors of released files.

use std::collections::BTreeMap;

use contract::{Fault, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use store::manifest::TokenizerRecord;

use crate::model::{SkipOutput, ZayaConfig};

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

/// Fields with the same name and meaning as ours.
const SHARED: [&str; 18] = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "router_hidden_size",
    "cca_time0",
    "cca_time1",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "tie_word_embeddings",
    "lm_head_bias",
];

/// Keys that only Zyphra's layout has.
const ZYPHRA: [&str; 5] =
    ["zaya_layers", "cca", "zaya_mlp_expansion", "ffn_hidden_size", "ffn_hidden_size_list"];

/// `config.json` of a model, as `transformers` reads it.
pub fn write(config: &ZayaConfig, tokenizer: &TokenizerRecord) -> Value {
    let mut fields = Map::new();
    let own = serde_json::to_value(config).unwrap_or_default();
    for name in SHARED.into_iter().chain(["attention_bias"]) {
        fields.insert(name.to_owned(), own[name].clone());
    }
    let rope = json!({
        "rope_type": "default", "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    });
    let rest = json!({
        "architectures": ["ZayaForCausalLM"], "model_type": "zaya", "dtype": "float32",
        "rope_parameters": {"hybrid": rope, "hybrid_sliding": rope},
        "layer_types": vec!["hybrid"; config.num_hidden_layers as usize],
        "sliding_window": null, "attention_dropout": 0.0, "use_cache": true,
        // A padding row of the embedding would get no gradient there; none of our tokens is padding.
        "pad_token_id": null, "bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end,
    });
    if let Value::Object(rest) = rest {
        fields.extend(rest);
    }
    Value::Object(fields)
}

/// Parses the text of a `config.json`; `place` names it in errors.
pub fn read(text: &str, place: &str) -> Result<HfDescription> {
    let fields: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| Fault::data(format!("this is not a JSON object: {error}")).at(place))?;
    let mut reader = Reader { fields: &fields, place, notes: Vec::new() };
    let kind = reader.text("model_type")?.unwrap_or_else(|| "zaya".to_owned());
    if kind != "zaya" {
        return Err(reader.refuse("model_type", "\"zaya\"", "only ZAYA1 models are known here"));
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

type Found = BTreeMap<String, Value>;

struct Reader<'a> {
    fields: &'a Map<String, Value>,
    place: &'a str,
    notes: Vec<String>,
}

impl Reader<'_> {
    /// A field, if it is there and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn refuse(&self, key: &str, wanted: &str, why: &str) -> Fault {
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
    fn largest(&self, key: &str) -> Result<Option<i64>> {
        let largest = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_i64).max(),
            Some(value) => value.as_i64(),
        };
        let fault =
            || self.refuse(key, "a number, or one by layer", "the field has the wrong kind");
        largest.map(Some).ok_or_else(fault)
    }

    fn only(&self, key: &str, wanted: &Value, why: &str) -> Result<()> {
        match self.get(key) {
            Some(value) if value != wanted => Err(self.refuse(key, &wanted.to_string(), why)),
            _ => Ok(()),
        }
    }

    fn transformers(&mut self) -> Result<Found> {
        let mut found = self.shared();
        let full = |kind: &Value| matches!(kind.as_str(), Some("hybrid" | "full_attention"));
        match self.get("layer_types") {
            Some(Value::Array(kinds)) if !kinds.iter().all(full) => {
                let why = "its layers attend to a window, which this model does not";
                return Err(self.refuse("layer_types", "\"hybrid\" for every layer", why));
            }
            Some(Value::Array(kinds)) if !kinds.is_empty() => {
                found.insert("num_hidden_layers".to_owned(), kinds.len().into());
            }
            _ => {}
        }
        Ok(found)
    }

    fn shared(&self) -> Found {
        let named = SHARED.iter().chain(&["attention_bias"]);
        named.filter_map(|key| Some(((*key).to_owned(), self.get(key)?.clone()))).collect()
    }

    fn zyphra(&mut self) -> Result<Found> {
        let truth = [
            ("cca", "attention is not compressed and convolved"),
            ("zaya_use_mod", "it has no skip class"),
            ("zaya_use_eda", "its router states do not run through the layers"),
            ("scale_residual_merge", "it does not scale its residuals"),
            ("gated_linear_unit", "its experts are not gated"),
        ];
        for (key, why) in truth {
            self.only(key, &json!(true), why)?;
        }
        self.only("clamp_temp", &json!(false), "its key temperatures are exponents")?;
        self.only("add_bias_linear", &json!(false), "its experts have biases")?;
        self.only("activation_func", &json!("swiglu"), "its experts have another activation")?;
        self.only("normalization", &json!("RMSNorm"), "it has another norm")?;
        if self.largest("swa_layers")?.unwrap_or(0) > 0 {
            let why = "its layers attend to a window, which this model does not";
            return Err(self.refuse("swa_layers", "0 for every layer", why));
        }
        let mut found = self.shared();
        found.remove("hidden_act");
        let mut set = |key: &str, value: Option<i64>| {
            if let Some(value) = value {
                found.insert(key.to_owned(), value.into());
            }
        };
        let feed = match self.largest("ffn_hidden_size_list")? {
            Some(size) => Some(size),
            None => self.largest("ffn_hidden_size")?,
        };
        set("moe_intermediate_size", feed.map(|both| both / 2));
        set("router_hidden_size", self.largest("zaya_mlp_expansion")?);
        set("num_experts_per_tok", self.largest("moe_router_topk")?);
        set("head_dim", self.largest("head_dim")?.or(self.largest("kv_channels")?));
        let groups = self.largest("num_query_groups_list")?.or(self.largest("num_query_groups")?);
        set("num_key_value_heads", groups.or(self.largest("num_key_value_heads")?));
        let (layers, experts) = self.halves()?;
        set("num_hidden_layers", Some(layers));
        set("num_experts", experts);
        if let Some(heads) = self.largest("cca_num_q_heads")? {
            set("num_attention_heads", Some(heads));
            self.note("num_attention_heads", "cca_num_q_heads", heads);
        }
        if let Some(eps) = self.get("norm_epsilon") {
            found.insert("rms_norm_eps".to_owned(), eps.clone());
        }
        Ok(found)
    }

    /// The number of our layers (an attention and its experts) and of experts of each; `zaya_layers` overrides the
    /// other fields.
    fn halves(&mut self) -> Result<(i64, Option<i64>)> {
        let Some(value) = self.get("zaya_layers") else {
            let halves = self.largest("num_hidden_layers")?.unwrap_or(80);
            return Ok((halves / 2, self.largest("num_experts")?));
        };
        let list = value.as_array().cloned().unwrap_or_default();
        let pairs: Vec<_> = list.chunks(2).collect();
        let experts = self.largest("zaya_layers")?;
        let paired = |pair: &&[Value]| {
            pair.len() == 2 && pair[0].as_str() == Some("a") && pair[1].as_i64() == experts
        };
        if pairs.is_empty() || !pairs.iter().all(paired) {
            let why = "its layers do not take turns, attention first";
            return Err(self.refuse("zaya_layers", "[\"a\", 16, \"a\", 16, ...]", why));
        }
        let (layers, halves) = (pairs.len() as i64, list.len() as i64);
        self.note("num_hidden_layers", "zaya_layers", halves);
        Ok((layers, experts))
    }

    /// Notes that one field overrides another.
    fn note(&mut self, stale: &str, believed: &str, value: i64) {
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
        Ok(())
    }
}
