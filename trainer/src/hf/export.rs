//! Exports a model as a folder that `transformers` opens.
//!
//! ```text
//! config.json   generation_config.json   model.safetensors (or parts with an index), f32
//! tokenizer.json   tokenizer_config.json     the store's tokenizer, unchanged
//! ```

use std::path::Path;

use contract::Result;
use serde_json::{Value, json};
use store::disk;
use store::manifest::TokenizerRecord;
use tch::Tensor;

use super::config::{self, HfLayout};
use super::family::HfModel;
use super::files::{self, NamedTensor, WrittenFile, commit};
use super::names::{are_parts, part_names};
use crate::model::{self, ParamSpec, ZayaConfig};
use crate::optim::balance::RouterBalance;
use crate::refusal::refused;

/// The files that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfExport {
    /// Parameters, and balancing biases of layers.
    pub tensors: usize,
    /// Total size of the weight files.
    pub bytes: u64,
}

/// A model without its weights.
pub struct Model<'a> {
    /// Its configuration.
    pub config: &'a ZayaConfig,
    /// Its parameters in canonical order.
    pub parameters: &'a [ParamSpec],
    /// The balancing biases of each layer.
    pub balance: &'a [RouterBalance],
    /// Which tokenizer its text has.
    pub record: &'a TokenizerRecord,
    /// The tokenizer file.
    pub tokenizer: &'a [u8],
}

/// Writes a model into the folder `target`, if `transformers` can express it.
pub fn write(
    target: &Path,
    model: &Model<'_>,
    weights: impl FnOnce() -> Result<Vec<Tensor>>,
) -> Result<HfExport> {
    let Model { config, parameters, balance, record, tokenizer } = *model;
    HfModel::of(config)?;
    commit(target, |folder| {
        let tensors = named(parameters, &weights()?, balance);
        let count = tensors.len();
        let tensors = in_parts(config, parameters, tensors).map_err(refused)?;
        let written = model_files(folder, config, record, &tensors)?;
        disk::write_atomic(&folder.join("tokenizer.json"), tokenizer)?;
        let text = tokenizer_config(tokenizer, record, config.max_position_embeddings);
        files::text(folder, "tokenizer_config.json", &text)?;
        Ok(HfExport { tensors: count, bytes: written.iter().map(|file| file.bytes).sum() })
    })
}

/// Weights and balancing biases under our names, in canonical order.
pub(super) fn named(
    parameters: &[ParamSpec],
    weights: &[Tensor],
    balance: &[RouterBalance],
) -> Vec<NamedTensor> {
    let weights = parameters.iter().zip(weights);
    let weights = weights.map(|(spec, tensor)| NamedTensor::new(spec.name.clone(), tensor));
    let biases = (0i64..).zip(balance).filter(|(_, balance)| !balance.bias.is_empty());
    let biases = biases.map(|(layer, balance)| {
        NamedTensor::new(model::balance_name(layer), &Tensor::from_slice(&balance.bias))
    });
    weights.chain(biases).collect()
}

/// The same as the model of `transformers` stores them; the parameters come first.
pub(super) fn in_parts(
    config: &ZayaConfig,
    parameters: &[ParamSpec],
    named: Vec<NamedTensor>,
) -> kernels::Result<Vec<NamedTensor>> {
    let (mut found, mut named) = (Vec::new(), named.into_iter());
    for (spec, NamedTensor { tensor, .. }) in parameters.iter().zip(named.by_ref()) {
        let names = part_names(config, HfLayout::Transformers, spec);
        let parts = if are_parts(spec, &names) {
            let columns = tensor.size()[tensor.dim() - 1];
            tensor.f_reshape([names.len() as i64, -1, columns])?.f_unbind(0)?
        } else {
            vec![tensor]
        };
        let parts = names.into_iter().zip(&parts);
        found.extend(parts.map(|(name, part)| NamedTensor::new(name, part)));
    }
    found.extend(named);
    Ok(found)
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
