//! The shape of a ZAYA1 model: every number that decides what a forward pass computes.

use std::collections::BTreeMap;

use contract::fault::nearest;
use contract::{Fault, Result};
use kernels::ops::linear_router::TopK;
use schemars::{JsonSchema, Schema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::kinds::{
    Attention, BalanceKind, FeedForward, LayerType, LogitsDtype, ResidualKind, RouterKind, unfit,
};

mod digest;
mod window;

/// What the router's class without an expert contributes to the stream: ZAYA1's 17th.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SkipOutput {
    /// Nothing: the meaning of Hugging Face's implementation.
    Zero,
    /// Its probability times the layer's normed input: Zyphra's meaning.
    Identity,
    /// There is no such class: every class has an expert.
    None,
}

impl SkipOutput {
    /// Its name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            SkipOutput::Zero => "zero",
            SkipOutput::Identity => "identity",
            SkipOutput::None => "none",
        }
    }
}

/// What the state of linear attention loses at each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Nothing.
    None,
    /// By key head, as in retention: a factor of `1 - 2^(-5-h)` per token (Sun et al. 2023, arXiv 2307.08621,
    /// equation 8).
    Retention,
}

impl Decay {
    /// The factor by which a token scales the state, for key head `head`.
    pub fn rate(self, head: u32) -> f64 {
        match self {
            Decay::None => 1.0,
            // For larger exponents, an f64 near 1 cannot represent the difference.
            Decay::Retention => 1.0 - 1.0 / (1u64 << (5 + head).min(62)) as f64,
        }
    }
}

/// A ZAYA1 model. Names are those of Hugging Face's `ZayaConfig` where it has the field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ZayaConfig {
    /// Rows of the embedding and of the output head.
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Layers, each an attention and a feed-forward.
    pub num_hidden_layers: i64,
    /// Query heads.
    pub num_attention_heads: i64,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// Width of an expert, and of a plain feed-forward, per side of its gated unit.
    pub moe_intermediate_size: i64,
    /// Experts; the router has one class more, unless `skip` is `none`.
    pub num_experts: i64,
    /// Experts per token, 1 to 8; 1 with the router `mlp`.
    pub num_experts_per_tok: i64,
    /// Width of the router's state.
    pub router_hidden_size: i64,
    /// Kernel of the depthwise convolution: always 2.
    pub cca_time0: i64,
    /// Kernel of the grouped convolution: always 2.
    pub cca_time1: i64,
    /// Activation of the experts: always `silu`.
    pub hidden_act: String,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Longest sequence.
    pub max_position_embeddings: i64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Part of each head that is rotated.
    pub partial_rotary_factor: f64,
    /// Whether head and embedding are one matrix; otherwise the head has its own.
    pub tie_word_embeddings: bool,
    /// Biases in the attention projections: never.
    pub attention_bias: bool,
    /// A bias in the head: never.
    pub lm_head_bias: bool,
    /// What the skip class contributes, or `none` without such a class.
    pub skip: SkipOutput,
    /// Whether attention, convolutions and the value shift stop at document boundaries. The reference
    /// implementation does not (`false`): there only rows separate.
    pub document_mask: bool,
    /// Tokens whose logits exist at the same time; without a word about it, by the vocabulary. Decides bits: the
    /// gradient of the head is summed chunk by chunk.
    pub loss_chunk: i64,
    /// Kinds of attention, first layer to last; where there are more layers they come again. ZAYA1 has `["cca"]`.
    pub layers: Vec<Attention>,
    /// Tokens whose keys a query of a sliding layer sees, its own included; earlier ones of its document are hidden.
    /// 0: no layer slides.
    pub sliding_window: i64,
    /// Which layers slide, likewise a list that repeats. Not written: all but those of linear attention, which has no
    /// window, if there is a `sliding_window`.
    pub layer_types: Vec<LayerType>,
    /// `rope_theta` of the layers that slide; 0: the same.
    pub sliding_rope_theta: f64,
    /// Kinds of feed-forward, likewise. ZAYA1 has `["moe"]`.
    pub feed_forward: Vec<FeedForward>,
    /// Of linear attention.
    pub linear_decay: Decay,
    /// Whether grouped-query attention norms each query and key head before their rotation, as in Qwen3.
    pub qk_norm: bool,
    /// How a sublayer's output joins the residual.
    pub residual: ResidualKind,
    /// How a token's experts are chosen.
    pub router: RouterKind,
    /// Whether the probabilities of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Experts of every token next to those of the router, each as wide as one: DeepSeekMoE's, without a gate.
    pub num_shared_experts: i64,
    /// What keeps the load of the experts even.
    pub balance: BalanceKind,
    /// In which dtype the head multiplies.
    pub logits_dtype: LogitsDtype,
    /// The coefficient of z-loss, 0 to 1: the gradient is that of `loss + z_loss x log(Z)^2` for each label, with Z the
    /// sum of the exponentials of its logits (PaLM, arXiv 2204.02311, section 5: 1e-4). Losses are shown without it.
    pub z_loss: f64,
}

/// The JSON Schema of a curriculum with the keys of `[model]`, and by name (`presets`) what each preset gives them.
pub fn curriculum_schema() -> Result<Schema> {
    let bug = |what: &str| Fault::bug(format!("the schema of a model has no {what}"));
    let mut model = schema_for!(ZayaConfig).to_value();
    let kinds = model.as_object_mut().and_then(|model| model.remove("$defs"));
    let model_object = model.as_object_mut().ok_or_else(|| bug("object"))?;
    for key in ["$schema", "title", "required"] {
        model_object.remove(key);
    }
    let fields = model_object.get_mut("properties").and_then(Value::as_object_mut);
    let fields = fields.ok_or_else(|| bug("properties"))?;
    for field in fields.values_mut().filter_map(Value::as_object_mut) {
        field.remove("default");
    }
    fields.insert(
        "preset".to_owned(),
        json!({
            "description": "The model whose values every key has that is not written here.",
            "enum": PRESETS,
            "default": PRESETS[0],
        }),
    );
    let preset =
        |name: &str| Some((name.to_owned(), serde_json::to_value(ZayaConfig::preset(name)?).ok()?));
    model_object
        .insert("presets".to_owned(), PRESETS.iter().filter_map(|name| preset(name)).collect());
    let mut whole = curriculum::schema().to_value();
    let all =
        whole.get_mut("$defs").and_then(Value::as_object_mut).ok_or_else(|| bug("definitions"))?;
    all.insert("Model".to_owned(), model);
    all.extend(kinds.as_ref().and_then(Value::as_object).cloned().unwrap_or_default());
    whole.try_into().map_err(|error: serde_json::Error| Fault::bug(error.to_string()))
}

/// Names of the presets, smallest first.
pub const PRESETS: [&str; 4] = ["zaya1-nano", "zaya1-20m", "zaya1-1b", "zaya1-8b"];

impl ZayaConfig {
    /// The preset of that name.
    pub fn preset(name: &str) -> Option<ZayaConfig> {
        match name {
            "zaya1-nano" => Some(nano()),
            "zaya1-20m" => Some(twenty_million()),
            "zaya1-1b" => Some(one_billion()),
            "zaya1-8b" => Some(eight_billion()),
            _ => None,
        }
    }

    /// The preset (by default `zaya1-nano`) with the keys of a curriculum's `[model]` applied, checked.
    pub fn resolve(preset: Option<&str>, fields: &BTreeMap<String, Value>) -> Result<ZayaConfig> {
        ZayaConfig::resolve_at(preset, fields, |key| format!("[model] {key}"))
    }

    /// The same, where `place` names the location of a key for error messages.
    pub(crate) fn resolve_at(
        preset: Option<&str>,
        fields: &BTreeMap<String, Value>,
        place: impl Fn(&str) -> String,
    ) -> Result<ZayaConfig> {
        let name = preset.unwrap_or("zaya1-nano");
        let base = ZayaConfig::preset(name).ok_or_else(|| {
            let fault = Fault::usage("unknown preset").at(place("preset"));
            let fault = fault.found(format!("{name:?}")).wanted(PRESETS.join(", "));
            match nearest(name, PRESETS) {
                Some(near) => fault.hint(format!("did you mean {near:?}?")),
                None => fault,
            }
        })?;
        let mut config = base.with_fields(fields, &place)?;
        if !fields.contains_key("loss_chunk") {
            config.loss_chunk = loss_chunk(config.vocab_size);
        }
        if config.sliding_window > 0 && !fields.contains_key("layer_types") {
            config.layer_types = window::all_sliding(&config.layers);
        }
        config.validate(&place)?;
        Ok(config)
    }

    fn with_fields(
        &self,
        fields: &BTreeMap<String, Value>,
        place: impl Fn(&str) -> String,
    ) -> Result<ZayaConfig> {
        let whole = serde_json::to_value(self)
            .map_err(|error| Fault::bug(format!("a configuration is not valid JSON: {error}")))?;
        let Value::Object(mut all) = whole else {
            return Err(Fault::bug("a configuration is not a JSON object"));
        };
        for (key, value) in fields {
            if !all.contains_key(key) {
                let known = || all.keys().map(String::as_str).chain(["preset", "balance_lr"]);
                return Err(Fault::usage(format!("unknown key `{key}` of the model"))
                    .at(place(key))
                    .hint(match nearest(key, known()) {
                        Some(near) => format!("did you mean `{near}`?"),
                        None => format!("known here: {}", known().collect::<Vec<_>>().join(", ")),
                    }));
            }
            // Nan and inf are the only curriculum values that JSON lacks.
            if value.is_null() {
                return Err(Fault::usage(format!("`{key}` is not a finite number"))
                    .at(place(key))
                    .found("nan or inf")
                    .wanted("a finite number"));
            }
            let mut one = all.clone();
            one.insert(key.clone(), value.clone());
            // One field at a time, so that the message can name the wrong one.
            serde_json::from_value::<ZayaConfig>(Value::Object(one))
                .map_err(|error| unfit(key, &all[key], value, &error).at(place(key)))?;
            all.insert(key.clone(), value.clone());
        }
        serde_json::from_value(Value::Object(all))
            .map_err(|error| Fault::bug(format!("fields that fit alone but not together: {error}")))
    }

    /// Refuses a shape that this model cannot have; the error names the field.
    fn validate(&self, place: impl Fn(&str) -> String) -> Result<()> {
        self.validate_sizes(&place)?;
        self.validate_fixed(&place)?;
        self.validate_experts(&place)?;
        self.validate_window(&place)?;
        let field = |name: &str, ok: bool, found: String, wanted: &str| {
            if ok { Ok(()) } else { Err(wrong(name, place(name), found, wanted)) }
        };
        field(
            "num_attention_heads",
            self.num_attention_heads % self.num_key_value_heads == 0,
            self.num_attention_heads.to_string(),
            &format!("a multiple of num_key_value_heads ({})", self.num_key_value_heads),
        )?;
        let factor = self.partial_rotary_factor;
        let rotary = self.head_dim as f64 * factor;
        field(
            "partial_rotary_factor",
            (0.0..=1.0).contains(&factor) && rotary >= 2.0 && rotary % 2.0 == 0.0,
            factor.to_string(),
            "a part of head_dim that is an even number of dimensions, at least 2",
        )?;
        field(
            "head_dim",
            self.num_key_value_heads * self.head_dim % 2 == 0,
            self.head_dim.to_string(),
            "num_key_value_heads x head_dim even: half of the value channels are delayed",
        )?;
        let lists = [
            ("layers", self.layers.len()),
            ("layer_types", self.layer_types.len()),
            ("feed_forward", self.feed_forward.len()),
        ];
        for (name, count) in lists {
            field(
                name,
                (1..=self.num_hidden_layers).contains(&(count as i64)),
                format!("{count} kinds"),
                &format!("one to num_hidden_layers ({}) kinds", self.num_hidden_layers),
            )?;
        }
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let eps = self.rms_norm_eps;
        field("rms_norm_eps", positive(eps), eps.to_string(), "a positive number")?;
        let range = self.initializer_range;
        field("initializer_range", positive(range), range.to_string(), "a positive number")?;
        let z_loss = self.z_loss;
        field("z_loss", (0.0..=1.0).contains(&z_loss), z_loss.to_string(), "a number from 0 to 1")?;
        let theta = self.rope_theta;
        field("rope_theta", positive(theta) && theta >= 1.0, theta.to_string(), "1 or more")
    }

    fn validate_sizes(&self, place: impl Fn(&str) -> String) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 31),
            ("hidden_size", self.hidden_size, 1 << 20),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 12),
            ("num_attention_heads", self.num_attention_heads, 1 << 12),
            ("num_key_value_heads", self.num_key_value_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 12),
            ("moe_intermediate_size", self.moe_intermediate_size, 1 << 20),
            ("num_experts", self.num_experts, 1 << 12),
            ("router_hidden_size", self.router_hidden_size, 1 << 16),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 31),
            ("loss_chunk", self.loss_chunk, 1 << 24),
        ];
        for (name, found, limit) in sizes {
            if !(1..=limit).contains(&found) {
                return Err(wrong(name, place(name), found.to_string(), &format!("1 to {limit}")));
            }
        }
        Ok(())
    }

    /// Checks fields that exist only so that Hugging Face's configurations can be read: each has one supported value.
    fn validate_fixed(&self, place: impl Fn(&str) -> String) -> Result<()> {
        let fixed = [
            ("cca_time0", self.cca_time0.to_string(), "2"),
            ("cca_time1", self.cca_time1.to_string(), "2"),
            ("hidden_act", self.hidden_act.clone(), "silu"),
            ("attention_bias", self.attention_bias.to_string(), "false"),
            ("lm_head_bias", self.lm_head_bias.to_string(), "false"),
        ];
        for (name, found, wanted) in fixed {
            if found != wanted {
                return Err(wrong(
                    name,
                    place(name),
                    found,
                    &format!("{wanted}, the only value so far"),
                ));
            }
        }
        Ok(())
    }

    /// Checks what a router and its experts require of each other.
    fn validate_experts(&self, place: impl Fn(&str) -> String) -> Result<()> {
        let (classes, shared) = (self.num_experts_per_tok, self.num_shared_experts);
        let most = MOST_CLASSES.min(self.num_experts);
        let by_network = self.router == RouterKind::Mlp;
        let only = |value: &str| {
            format!(
                "{value}, the only value with router = \"mlp\", which is ZAYA1's; or router = \"linear\""
            )
        };
        let checks = [
            (
                "num_experts_per_tok",
                by_network && classes != 1,
                classes.to_string(),
                only("1"),
            ),
            (
                "num_experts_per_tok",
                !(1..=most).contains(&classes),
                classes.to_string(),
                format!("1 to {most}, at most {MOST_CLASSES} and num_experts"),
            ),
            (
                "norm_topk_prob",
                self.norm_topk_prob && classes == 1,
                "true".to_owned(),
                "false with num_experts_per_tok = 1: a probability over itself is 1, and its router learns nothing"
                    .to_owned(),
            ),
            (
                "skip",
                by_network && self.skip == SkipOutput::None,
                "\"none\"".to_owned(),
                only("\"zero\" or \"identity\""),
            ),
            (
                "balance",
                by_network && self.balance == BalanceKind::None,
                "\"none\"".to_owned(),
                only("\"bias\""),
            ),
            (
                "num_shared_experts",
                !(0..=1 << 12).contains(&shared),
                shared.to_string(),
                format!("0 to {}", 1 << 12),
            ),
        ];
        match checks.into_iter().find(|(_, odd, ..)| *odd) {
            None => Ok(()),
            Some((name, _, found, wanted)) => Err(wrong(name, place(name), found, &wanted)),
        }
    }

    /// The first key whose value is not ZAYA1's, with the value: code for ZAYA1 alone refuses it by name.
    pub fn foreign(&self) -> Option<(&'static str, &'static str)> {
        let attention = self.layers.iter().find(|kind| **kind != Attention::Cca);
        let feed_forward = self.feed_forward.iter().find(|kind| **kind != FeedForward::Moe);
        let attention = attention.map(|kind| ("layers", kind.name()));
        let scaled = self.residual == ResidualKind::Scaled;
        let by_network = self.router == RouterKind::Mlp;
        attention
            .or(feed_forward.map(|kind| ("feed_forward", kind.name())))
            .or((!scaled).then(|| ("residual", self.residual.name())))
            .or((!by_network).then(|| ("router", self.router.name())))
            .or((!self.tie_word_embeddings).then_some(("tie_word_embeddings", "false")))
            .or((self.num_shared_experts > 0).then_some(("num_shared_experts", "more than 0")))
    }

    /// The attention and the feed-forward of each layer: each list repeats where it ends.
    pub fn kinds(&self) -> impl Iterator<Item = (Attention, FeedForward)> + '_ {
        let kinds =
            self.layers.iter().copied().cycle().zip(self.feed_forward.iter().copied().cycle());
        kinds.take(self.num_hidden_layers as usize)
    }

    /// Width of all query heads together.
    pub fn query_size(&self) -> i64 {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads together, and of all value heads.
    pub fn key_size(&self) -> i64 {
        self.num_key_value_heads * self.head_dim
    }

    /// Channels of the two convolutions: queries, then keys.
    pub fn conv_size(&self) -> i64 {
        self.query_size() + self.key_size()
    }

    /// Query heads that share a key head.
    pub fn group(&self) -> i64 {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Rotated dimensions of a head.
    pub(crate) fn rotary_dim(&self) -> i64 {
        (self.head_dim as f64 * self.partial_rotary_factor) as i64
    }

    /// Classes of the router: the experts, then the skip, if there is one.
    pub fn router_classes(&self) -> i64 {
        self.num_experts + i64::from(self.skip != SkipOutput::None)
    }

    /// The experts of a token.
    pub(crate) fn top_k(&self) -> TopK {
        TopK { count: self.num_experts_per_tok, normalized: self.norm_topk_prob }
    }
}

/// The most experts of a token.
const MOST_CLASSES: i64 = 8;

fn wrong(key: &str, place: String, found: String, wanted: &str) -> Fault {
    let what = format!("the model cannot have this `{key}`");
    Fault::usage(what).at(place).found(found).wanted(wanted)
}

/// Trains in minutes on a CPU.
fn nano() -> ZayaConfig {
    ZayaConfig {
        vocab_size: 8192,
        hidden_size: 256,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        head_dim: 64,
        moe_intermediate_size: 256,
        num_experts: 8,
        router_hidden_size: 64,
        max_position_embeddings: 4096,
        rope_theta: 1e4,
        ..eight_billion()
    }
}

/// Twenty million active weights per token outside the embedding, of 108 million: small enough to measure on a CPU.
fn twenty_million() -> ZayaConfig {
    ZayaConfig { hidden_size: 512, num_hidden_layers: 16, moe_intermediate_size: 512, ..nano() }
}

/// Ours: the proportions of ZAYA1-8B (queries half the width, keys an eighth, 16 experts) at about a billion
/// weights outside the embedding.
fn one_billion() -> ZayaConfig {
    ZayaConfig {
        hidden_size: 1024,
        num_hidden_layers: 26,
        num_attention_heads: 8,
        head_dim: 64,
        moe_intermediate_size: 768,
        router_hidden_size: 128,
        max_position_embeddings: 32_768,
        rope_theta: 1e4,
        ..eight_billion()
    }
}

/// Tokens whose logits exist at the same time, for a vocabulary: 4,096, whose matmuls fill a GPU, or the largest power
/// of two whose logits are about 2^28 numbers.
fn loss_chunk(vocabulary: i64) -> i64 {
    let most = (5 << 26) / vocabulary.max(1);
    (1i64 << most.max(1).ilog2()).min(4096)
}

/// ZAYA1-8B as released.
fn eight_billion() -> ZayaConfig {
    ZayaConfig {
        vocab_size: 262_272,
        hidden_size: 2048,
        num_hidden_layers: 40,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 128,
        moe_intermediate_size: 2048,
        num_experts: 16,
        num_experts_per_tok: 1,
        router_hidden_size: 256,
        cca_time0: 2,
        cca_time1: 2,
        hidden_act: "silu".to_owned(),
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        max_position_embeddings: 131_072,
        rope_theta: 5e6,
        partial_rotary_factor: 0.5,
        tie_word_embeddings: true,
        attention_bias: false,
        lm_head_bias: false,
        skip: SkipOutput::Zero,
        document_mask: true,
        loss_chunk: loss_chunk(262_272),
        layers: vec![Attention::Cca],
        sliding_window: 0,
        layer_types: vec![LayerType::Full],
        sliding_rope_theta: 0.0,
        feed_forward: vec![FeedForward::Moe],
        linear_decay: Decay::Retention,
        qk_norm: false,
        residual: ResidualKind::Scaled,
        router: RouterKind::Mlp,
        norm_topk_prob: false,
        num_shared_experts: 0,
        balance: BalanceKind::Bias,
        logits_dtype: LogitsDtype::Model,
        z_loss: 0.0,
    }
}

#[cfg(test)]
mod tests;
