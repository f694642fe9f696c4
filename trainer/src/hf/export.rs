//! Exports a model as a folder that `transformers` opens as `ZayaForCausalLM`.
//!
//! ```text
//! config.json   generation_config.json   model.safetensors (or parts with an index), f32
//! tokenizer.json   tokenizer_config.json     the store's tokenizer, unchanged
//! ```

use std::path::Path;

use contract::{Fault, Result};
use serde_json::{Value, json};
use store::disk;
use store::manifest::TokenizerRecord;
use tch::Tensor;

use super::files::{self, NamedTensor, WrittenFile};
use super::{config, files::commit};
use crate::model::{self, ParamSpec, SkipOutput, ZayaConfig};
use crate::optim::balance::RouterBalance;

/// The files that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfExport {
    /// Tensors, balancing biases included.
    pub tensors: usize,
    /// Total size of the weight files.
    pub bytes: u64,
}

/// A model without its weights.
pub(crate) struct Model<'a> {
    pub(crate) config: &'a ZayaConfig,
    pub(crate) parameters: &'a [ParamSpec],
    pub(crate) balance: &'a [RouterBalance],
    pub(crate) record: &'a TokenizerRecord,
    /// The tokenizer file.
    pub(crate) tokenizer: &'a [u8],
}

/// Writes a model into the folder `target`, if `transformers` can express it.
pub(crate) fn write(
    target: &Path,
    model: &Model<'_>,
    weights: impl FnOnce() -> Result<Vec<Tensor>>,
) -> Result<HfExport> {
    let Model { config, parameters, balance, record, tokenizer } = *model;
    refuse_foreign(config)?;
    commit(target, |folder| {
        let tensors = named(parameters, &weights()?, balance);
        let written = model_files(folder, config, record, &tensors)?;
        disk::write_whole(&folder.join("tokenizer.json"), tokenizer)?;
        let text = tokenizer_config(tokenizer, record, config.max_position_embeddings);
        files::text(folder, "tokenizer_config.json", &text)?;
        Ok(HfExport { tensors: tensors.len(), bytes: written.iter().map(|file| file.bytes).sum() })
    })
}

/// In `transformers`, the skip class always outputs zeros, and all layers are those of ZAYA1. Another model would
/// compute something else there.
fn refuse_foreign(config: &ZayaConfig) -> Result<()> {
    let fault = |key: &str| {
        Fault::usage("transformers cannot express this model").at(format!("[model] {key}"))
    };
    if let Some((key, kind)) = config.foreign() {
        return Err(fault(key)
            .found(format!("{kind:?} among the layers"))
            .wanted("layers = [\"cca\"] and feed_forward = [\"moe\"], all that its zaya has")
            .hint("such a model stays here: replay, fork and validate it with ztrain"));
    }
    match config.skip {
        SkipOutput::Zero => Ok(()),
        SkipOutput::Identity => Err(fault("skip")
            .found("\"identity\": a skipped token keeps p times its input")
            .wanted("\"zero\", its only meaning there")),
    }
}

/// Weights and balancing biases under their names, in canonical order.
pub(super) fn named(
    parameters: &[ParamSpec],
    weights: &[Tensor],
    balance: &[RouterBalance],
) -> Vec<NamedTensor> {
    let weights = parameters.iter().zip(weights);
    let weights = weights.map(|(spec, tensor)| NamedTensor::new(spec.name.clone(), tensor));
    let biases = (0i64..).zip(balance);
    let biases = biases.map(|(layer, balance)| {
        NamedTensor::new(model::balance_name(layer), &Tensor::from_slice(&balance.bias))
    });
    weights.chain(biases).collect()
}

/// Writes the weights and both configurations.
pub(super) fn model_files(
    folder: &Path,
    config: &ZayaConfig,
    tokenizer: &TokenizerRecord,
    tensors: &[NamedTensor],
) -> Result<Vec<WrittenFile>> {
    files::text(folder, "config.json", &config::write(config, tokenizer))?;
    let generation = json!({"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end});
    files::text(folder, "generation_config.json", &generation)?;
    files::write(folder, tensors)
}

/// The `tokenizer_config.json` that `AutoTokenizer` needs.
fn tokenizer_config(tokenizer: &[u8], record: &TokenizerRecord, length: i64) -> Value {
    let tokenizer: Value = serde_json::from_slice(tokenizer).unwrap_or_default();
    let text = |id: Option<u32>| {
        let added = tokenizer["added_tokens"].as_array()?;
        let token = added.iter().find(|token| token["id"].as_u64() == id.map(u64::from))?;
        token["content"].as_str().map(str::to_owned)
    };
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length,
        "bos_token": text(record.begin), "eos_token": text(record.end),
        "clean_up_tokenization_spaces": false,
    })
}
