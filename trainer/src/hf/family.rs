//! Which model of `transformers` computes the same as a configuration.

use contract::{Fault, Result};

use crate::model::{
    Attention, BalanceKind, FeedForward, LayerType, ResidualKind, RouterKind, SkipOutput,
    ZayaConfig,
};

/// A model of `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HfModel {
    /// ZAYA1.
    Zaya,
    /// Grouped-query attention and plain feed-forwards.
    Llama,
    /// The same with norms of queries and keys.
    Qwen3,
    /// Grouped-query attention, and experts that one matrix chooses, weighted by their share of the chosen probability.
    Mixtral,
    /// The same with norms of queries and keys; its experts may keep their probabilities.
    Qwen3Moe,
}

impl HfModel {
    /// All of them.
    pub const ALL: [HfModel; 5] =
        [HfModel::Zaya, HfModel::Llama, HfModel::Qwen3, HfModel::Mixtral, HfModel::Qwen3Moe];

    /// Its `model_type`.
    pub fn name(self) -> &'static str {
        match self {
            HfModel::Zaya => "zaya",
            HfModel::Llama => "llama",
            HfModel::Qwen3 => "qwen3",
            HfModel::Mixtral => "mixtral",
            HfModel::Qwen3Moe => "qwen3_moe",
        }
    }

    /// Its class.
    pub(super) fn class(self) -> &'static str {
        match self {
            HfModel::Zaya => "ZayaForCausalLM",
            HfModel::Llama => "LlamaForCausalLM",
            HfModel::Qwen3 => "Qwen3ForCausalLM",
            HfModel::Mixtral => "MixtralForCausalLM",
            HfModel::Qwen3Moe => "Qwen3MoeForCausalLM",
        }
    }

    /// Whether its feed-forwards are experts.
    pub(super) fn has_experts(self) -> bool {
        match self {
            HfModel::Llama | HfModel::Qwen3 => false,
            HfModel::Zaya | HfModel::Mixtral | HfModel::Qwen3Moe => true,
        }
    }

    /// Whether it norms queries and keys.
    pub(super) fn has_qk_norm(self) -> bool {
        matches!(self, HfModel::Qwen3 | HfModel::Qwen3Moe)
    }

    /// The model with the layers of `config`.
    pub(super) fn like(config: &ZayaConfig) -> HfModel {
        if !config.layers.contains(&Attention::Gqa) {
            return HfModel::Zaya;
        }
        match (config.feed_forward.contains(&FeedForward::Moe), config.qk_norm) {
            (false, false) => HfModel::Llama,
            (false, true) => HfModel::Qwen3,
            (true, false) => HfModel::Mixtral,
            (true, true) => HfModel::Qwen3Moe,
        }
    }

    /// The model that computes what `config` does; refuses a configuration of which there is none, with the key.
    pub fn of(config: &ZayaConfig) -> Result<HfModel> {
        let model = HfModel::like(config);
        let odd = match model {
            HfModel::Zaya => odd_for_zaya(config),
            HfModel::Llama | HfModel::Qwen3 => {
                odd_for_llama(config, FeedForward::Mlp).or_else(|| odd_window(config, model))
            }
            HfModel::Mixtral | HfModel::Qwen3Moe => {
                let odd = odd_for_llama(config, FeedForward::Moe);
                let odd = odd.or_else(|| odd_for_experts(config, model));
                odd.or_else(|| odd_window(config, model))
            }
        };
        match odd {
            None => Ok(model),
            Some((key, found, wanted)) => {
                Err(Fault::usage("transformers cannot express this model")
                    .at(format!("[model] {key}"))
                    .found(found)
                    .wanted(format!("{wanted}, as in its {}", model.name()))
                    .hint("such a model stays here: replay, fork and validate it with ztrain"))
            }
        }
    }
}

/// A key, its value, and what it has to be.
type OddKey = (&'static str, String, &'static str);

fn odd_for_zaya(config: &ZayaConfig) -> Option<OddKey> {
    if let Some((key, value)) = config.foreign() {
        let wanted = match key {
            "layers" => "[\"cca\"]",
            "feed_forward" => "[\"moe\"]",
            "residual" => "\"scaled\"",
            "router" => "\"mlp\"",
            "num_shared_experts" => "0",
            _ => "true",
        };
        return Some((key, format!("{value:?}"), wanted));
    }
    match config.skip {
        SkipOutput::Zero | SkipOutput::None => None,
        SkipOutput::Identity => {
            let found = "\"identity\": a skipped token keeps p times its input";
            Some(("skip", found.to_owned(), "\"zero\""))
        }
    }
}

/// In the attention, the residual, and the kind of feed-forward that every layer has.
fn odd_for_llama(config: &ZayaConfig, feed_forwards: FeedForward) -> Option<OddKey> {
    let attention = config.layers.iter().find(|kind| **kind != Attention::Gqa);
    let feed_forward = config.feed_forward.iter().find(|kind| **kind != feed_forwards);
    let wanted = match feed_forwards {
        FeedForward::Moe => "[\"moe\"]",
        FeedForward::Mlp => "[\"mlp\"]",
    };
    let quoted = |name: &str| format!("{name:?}");
    let (residual, factor) = (config.residual, config.partial_rotary_factor);
    attention
        .map(|kind| ("layers", quoted(kind.name()), "[\"gqa\"]"))
        .or(feed_forward.map(|kind| ("feed_forward", quoted(kind.name()), wanted)))
        .or((residual != ResidualKind::Plain)
            .then(|| ("residual", quoted(residual.name()), "\"plain\"")))
        .or((config.rotary_dim() != config.head_dim)
            .then(|| ("partial_rotary_factor", factor.to_string(), "1.0")))
}

/// In the layers with a window.
fn odd_window(config: &ZayaConfig, model: HfModel) -> Option<OddKey> {
    let (window, theta) = (config.sliding_window, config.sliding_rope_theta);
    let types: Vec<_> = config.layer_types.iter().map(|one| one.name()).collect();
    let mixed = config.windows().any(|window| window.is_none());
    let every = model != HfModel::Qwen3 && mixed;
    let other = theta > 0.0 && theta != config.rope_theta;
    if !config.layer_types.contains(&LayerType::Sliding) {
        return None;
    }
    (model == HfModel::Llama)
        .then(|| ("sliding_window", window.to_string(), "0"))
        .or(every.then(|| ("layer_types", format!("{types:?}"), "one type for every layer")))
        .or(other.then(|| ("sliding_rope_theta", theta.to_string(), "0")))
}

/// In the router and its experts.
fn odd_for_experts(config: &ZayaConfig, model: HfModel) -> Option<OddKey> {
    let quoted = |name: &str| format!("{name:?}");
    let (router, skip, balance) = (config.router, config.skip, config.balance);
    let whole = model == HfModel::Mixtral && !config.norm_topk_prob;
    let keys = [
        (router != RouterKind::Linear, ("router", quoted(router.name()), "\"linear\"")),
        (skip != SkipOutput::None, ("skip", quoted(skip.name()), "\"none\"")),
        (balance != BalanceKind::None, ("balance", quoted(balance.name()), "\"none\"")),
        (whole, ("norm_topk_prob", "false".to_owned(), "true")),
        (
            config.num_shared_experts > 0,
            ("num_shared_experts", config.num_shared_experts.to_string(), "0"),
        ),
    ];
    keys.into_iter().find(|(odd, _)| *odd).map(|(_, key)| key)
}
