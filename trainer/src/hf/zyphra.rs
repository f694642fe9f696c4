//! `config.json` of Zyphra's first releases, in which attention and experts are alternating layers.

use std::collections::BTreeSet;

use contract::Result;
use serde_json::{Value, json};

use super::config::{Found, Reader, shortest};
use crate::model::{LayerType, LogitsDtype};

impl Reader<'_> {
    pub(super) fn zyphra(&mut self) -> Result<Found> {
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
        self.past_windows(layers, &mut found)?;
        if let Some(eps) = self.get("norm_epsilon") {
            found.insert("rms_norm_eps".to_owned(), eps.clone());
        }
        if self.get("zaya_high_prec") == Some(&json!(true)) {
            found.insert("logits_dtype".to_owned(), json!(LogitsDtype::F32.name()));
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

    /// The windows of its layers. `swa_layers` has, for each attention or for each half of a layer, the number of
    /// earlier tokens that a query sees, and 0 for all: transformers' converter of these files and Zyphra's vLLM add
    /// the query's own token. They differ where `swa_rotary_base` is left out (1e4, `rope_theta`).
    fn past_windows(&self, layers: i64, found: &mut Found) -> Result<()> {
        let Some(value) = self.get("swa_layers") else { return Ok(()) };
        let tokens = |value: &Value| value.as_i64().filter(|tokens| *tokens >= 0);
        let list = value.as_array().and_then(|list| list.iter().map(tokens).collect());
        let list: Vec<i64> = list.unwrap_or_default();
        let halves = [1, 2].into_iter().find(|halves| list.len() as i64 == halves * layers);
        let Some(halves) = halves.filter(|_| !list.is_empty()) else {
            let wanted = format!("{layers} or {} numbers of tokens, 0 for no window", 2 * layers);
            return Err(self.refuse("swa_layers", &wanted, "its windows are not known"));
        };
        let windows: Vec<i64> = list.into_iter().step_by(halves as usize).collect();
        let sizes: BTreeSet<i64> = windows.iter().copied().filter(|tokens| *tokens > 0).collect();
        let Some(tokens) = sizes.first() else { return Ok(()) };
        if sizes.len() > 1 {
            let why = "its layers have windows of several sizes";
            return Err(self.refuse("swa_layers", "one size, or 0, for each layer", why));
        }
        let window = tokens + 1;
        let why = "swa_layers, which does not count a query's own token, has another window";
        self.only("sliding_window", &json!(window), why)?;
        let theta =
            self.get("swa_rotary_base").filter(|theta| theta.is_number()).ok_or_else(|| {
                let why = "the rotary frequencies of its layers with a window are not known";
                self.refuse("swa_rotary_base", "the base of their frequencies, a number", why)
            })?;
        let types = [LayerType::Full, LayerType::Sliding];
        let types = windows.iter().map(|tokens| types[usize::from(*tokens > 0)]).collect();
        found.extend([
            ("sliding_window".to_owned(), window.into()),
            ("layer_types".to_owned(), json!(shortest(types))),
            ("sliding_rope_theta".to_owned(), theta.clone()),
        ]);
        Ok(())
    }
}
