//! An imported model: the weights that a run begins with instead of random ones.
//!
//! ```text
//! start.json    configuration, digests of weights and content, each file's size and digest; written last
//! config.json, model.safetensors, tokenizer.json    as `transformers` reads them
//! ```
//!
//! A curriculum's `init_from` names such a folder. The content digest (configuration, weights, biases) is part of the
//! run's identity; the folder's path is not. A run keeps a copy of `start.json`, which is all it needs once it has
//! checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use contract::{Digest, Digestible as _, Fault, Hasher, Identity, Result};
use kernels::checksum;
use serde::{Deserialize, Serialize};
use store::manifest::TokenizerRecord;
use store::{disk, regular};
use tch::Tensor;

use super::export;
use super::files::{self, WrittenFile};
use crate::model::{self, ZayaConfig};
use crate::optim::balance::RouterBalance;
use crate::refusal::refused;

/// The version of the format.
const FORMAT: u32 = 3;

/// Its manifest.
const MANIFEST: &str = "start.json";

/// The run's copy of the manifest.
const KEPT: &str = "start.kept.json";

/// An imported model on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct InitialModel {
    folder: PathBuf,
    manifest: InitialManifest,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InitialManifest {
    format: u32,
    /// Over configuration and `weights`.
    content: Digest,
    /// Over weights and biases.
    weights: Digest,
    /// SHA-256 of the tokenizer in the folder, if there is one.
    tokenizer: Option<Identity>,
    config: ZayaConfig,
    files: Vec<WrittenFile>,
}

impl InitialModel {
    /// Opens the model in `folder`; [`InitialModel::read`] reads and checks the weights.
    pub fn open(folder: &Path) -> Result<InitialModel> {
        let path = folder.join(MANIFEST);
        if !folder.exists() {
            return Err(gone(folder));
        }
        if !path.exists() {
            return Err(Fault::usage("this folder is not an imported model: it has no start.json")
                .at(folder.display().to_string())
                .hint("make one with `ztrain import HF_DIR --out FOLDER`"));
        }
        InitialModel::described(&path, folder)
    }

    /// The model by the run's copy of its manifest, if `folder` no longer exists; `None` if there is no need or no
    /// copy.
    pub(crate) fn kept(run: &Path, folder: &Path) -> Result<Option<InitialModel>> {
        let path = run.join(KEPT);
        match !folder.join(MANIFEST).exists() && path.exists() {
            true => InitialModel::described(&path, folder).map(Some),
            false => Ok(None),
        }
    }

    /// Copies its manifest into a run's folder.
    pub(crate) fn keep(&self, run: &Path) -> Result<()> {
        files::text(run, KEPT, &self.manifest.value()?)
    }

    fn described(path: &Path, folder: &Path) -> Result<InitialModel> {
        let text =
            regular::read_to_string(path).map_err(|error| Fault::io("read", path, &error))?;
        let manifest: InitialManifest = serde_json::from_str(&text)
            .map_err(|error| damaged(path, &format!("its manifest cannot be read: {error}")))?;
        if manifest.format != FORMAT {
            return Err(damaged(path, "its format is another version's"));
        }
        if let Some(file) = manifest.files.iter().find(|file| !files::is_name(&file.name)) {
            let fault = damaged(path, "it names a file outside of its folder");
            return Err(fault.found(format!("{:?}", file.name)));
        }
        let wanted = content(&manifest.config, manifest.weights);
        if wanted != manifest.content {
            let fault = damaged(path, "its configuration is not that of its content digest");
            return Err(fault.found(wanted).wanted(manifest.content));
        }
        Ok(InitialModel { folder: folder.to_owned(), manifest })
    }

    /// The first of its files that has changed; reads every byte.
    pub(crate) fn changed(&self) -> Result<Option<PathBuf>> {
        for file in &self.manifest.files {
            let path = self.folder.join(&file.name);
            let same = regular::size(&path).ok() == Some(file.bytes) && {
                let bytes = regular::read(&path);
                let bytes = bytes.map_err(|error| Fault::io("read", &path, &error))?;
                Digest::of_bytes(&bytes) == file.digest
            };
            if !same {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// The configuration of the model.
    pub fn config(&self) -> &ZayaConfig {
        &self.manifest.config
    }

    /// The digest of configuration, weights and biases.
    pub fn content(&self) -> Digest {
        self.manifest.content
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Passes every weight to `take`, with its index in canonical order, and returns the biases by layer. Only one
    /// weight and one file are in memory at a time, since a rank keeps only what it owns. The digest of all weights is
    /// checked after the last one was passed.
    pub fn read(
        &self,
        mut take: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Vec<Vec<f32>>> {
        let config = &self.manifest.config;
        let parameters = model::parameters(config);
        let places: BTreeMap<&str, usize> = parameters
            .iter()
            .enumerate()
            .map(|(place, spec)| (spec.name.as_str(), place))
            .collect();
        let (mut sums, mut others) = (vec![None; parameters.len()], BTreeMap::new());
        for file in &self.manifest.files {
            let path = self.folder.join(&file.name);
            if !self.folder.exists() {
                return Err(gone(&self.folder));
            }
            let bytes = regular::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
            if bytes.len() as u64 != file.bytes || Digest::of_bytes(&bytes) != file.digest {
                return Err(damaged(&path, "its bytes changed since it was written"));
            }
            files::read(&path, &bytes, |name, tensor| {
                let Some(&place) = places.get(name) else {
                    others.insert(name.to_owned(), tensor);
                    return Ok(());
                };
                sums[place] = Some(sum(place, &tensor)?);
                take(place, &tensor)
            })?;
        }
        let lacks = |name: &str| damaged(&self.folder, &format!("it lacks {name}"));
        let sums = sums.into_iter().zip(&parameters);
        let sums = sums.map(|(sum, spec)| sum.ok_or_else(|| lacks(&spec.name)));
        let sums = sums.collect::<Result<Vec<u64>>>()?;
        let biases = (0..).zip(model::balance_sizes(config)).map(|(layer, biases)| {
            let name = model::balance_name(layer);
            if biases == 0 {
                return Ok(Vec::new());
            }
            let odd = |error| damaged(&self.folder, &format!("{name} cannot be read: {error}"));
            Vec::<f32>::try_from(others.get(&name).ok_or_else(|| lacks(&name))?).map_err(odd)
        });
        let biases = biases.collect::<Result<Vec<_>>>()?;
        let weights = weights_digest(&sums, &biases);
        if weights != self.manifest.weights {
            let fault = damaged(&self.folder, "its weights are not those of its digest");
            return Err(fault.found(weights).wanted(self.manifest.weights));
        }
        Ok(biases)
    }

    /// Refuses a model whose tokens differ in meaning from the store's.
    pub(crate) fn compare_tokenizer(
        &self,
        stores: &[u8],
        place: impl Fn() -> String,
    ) -> Result<()> {
        let path = self.folder.join("tokenizer.json");
        if self.manifest.tokenizer.is_none() {
            return Err(Fault::usage("the imported model came without a tokenizer: nothing says what its tokens mean")
                .at(place())
                .found(self.folder.display().to_string())
                .hint("put the tokenizer.json of the model into its folder, and run `ztrain import` on it again"));
        }
        let own = regular::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
        if Some(Identity::of_bytes(&own)) != self.manifest.tokenizer {
            return Err(damaged(&path, "its bytes changed since it was written"));
        }
        if own == stores || Vocabulary::of(&own).is_that_of(&Vocabulary::of(stores)) {
            return Ok(());
        }
        Err(Fault::usage(
            "the imported model was trained with another vocabulary than the store was built with",
        )
        .at(place())
        .found(path.display().to_string())
        .hint("build the store with the imported model's tokenizer.json"))
    }
}

/// The tokens of a `tokenizer.json`, as far as two files can be compared.
struct Vocabulary {
    model: serde_json::Value,
    /// Added tokens, by id.
    added: BTreeMap<u64, String>,
}

impl Vocabulary {
    fn of(bytes: &[u8]) -> Vocabulary {
        let all: serde_json::Value = serde_json::from_slice(bytes).unwrap_or_default();
        let model = all.get("model").and_then(|model| model.get("vocab"));
        let added = all.get("added_tokens").and_then(|added| added.as_array());
        let token = |one: &serde_json::Value| {
            Some((one.get("id")?.as_u64()?, one.get("content")?.as_str()?.to_owned()))
        };
        let added = added.into_iter().flatten().filter_map(token).collect();
        Vocabulary { model: model.cloned().unwrap_or_default(), added }
    }

    /// Whether no id has another meaning in `other`. Added tokens that `other` lacks do not occur in its text.
    fn is_that_of(&self, other: &Vocabulary) -> bool {
        let same = |(id, text): (&u64, &String)| other.added.get(id).is_none_or(|it| it == text);
        self.model == other.model && self.added.iter().all(same)
    }
}

impl InitialManifest {
    fn value(&self) -> Result<serde_json::Value> {
        let value = serde_json::to_value(self);
        value.map_err(|error| Fault::bug(format!("the manifest cannot be written: {error}")))
    }
}

/// Writes a folder of initial weights.
pub(super) fn write(
    target: &Path,
    config: &ZayaConfig,
    weights: &[Tensor],
    biases: &[Vec<f32>],
    tokenizer: Option<&[u8]>,
) -> Result<InitialModel> {
    let manifest = files::commit(target, |folder| {
        // The meaning of the tokens is unknown here, only their number.
        let record = TokenizerRecord {
            sha256: Identity::of_bytes(tokenizer.unwrap_or_default()),
            vocab: config.vocab_size as u32,
            begin: None,
            end: None,
            encoder: String::new(),
        };
        let like =
            |bias: &Vec<f32>| RouterBalance { bias: bias.clone(), first: vec![], second: vec![] };
        let balance: Vec<RouterBalance> = biases.iter().map(like).collect();
        let tensors = export::named(&model::parameters(config), weights, &balance);
        let written = export::model_files(folder, config, &record, &tensors)?;
        let sums = weights.iter().enumerate().map(|(place, weight)| sum(place, weight));
        let sums = sums.collect::<Result<Vec<_>>>()?;
        if let Some(bytes) = tokenizer {
            disk::write_atomic(&folder.join("tokenizer.json"), bytes)?;
        }
        let weights = weights_digest(&sums, biases);
        let manifest = InitialManifest {
            format: FORMAT,
            content: content(config, weights),
            weights,
            tokenizer: tokenizer.map(Identity::of_bytes),
            config: config.clone(),
            files: written,
        };
        files::text(folder, MANIFEST, &manifest.value()?)?;
        Ok(manifest)
    })?;
    Ok(InitialModel { folder: target.to_owned(), manifest })
}

/// The checksum of a weight at an index in canonical order, as it enters the weights' digest.
fn sum(place: usize, weight: &Tensor) -> Result<u64> {
    checksum::tensor(weight, place as u64).map_err(refused)
}

/// The content digest. It follows from the manifest alone, so an edited configuration is found without reading weights.
fn content(config: &ZayaConfig, weights: Digest) -> Digest {
    let mut hasher = Hasher::new();
    hasher.tag("start.v2");
    config.feed(&mut hasher);
    hasher.digest(weights);
    hasher.finish()
}

fn weights_digest(sums: &[u64], biases: &[Vec<f32>]) -> Digest {
    let mut hasher = Hasher::new();
    hasher.tag("weights.v1").u64(sums.len() as u64);
    for sum in sums {
        hasher.u64(*sum);
    }
    for bias in biases {
        hasher.u32s(&bias.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
    }
    hasher.finish()
}

fn gone(folder: &Path) -> Fault {
    Fault::data("the initial weights do not exist").at(folder.display().to_string()).hint(
        "put the folder back, or name its new place by `init_from` in the curriculum: only its digest belongs to the run",
    )
}

fn damaged(path: &Path, what: &str) -> Fault {
    Fault::data(format!("these initial weights are damaged: {what}"))
        .at(path.display().to_string())
        .hint("restore the file from a backup, or make the folder anew with `ztrain import`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_beside_the_models_have_to_mean_the_same_and_nonsense_means_nothing() {
        let of = |vocabulary: &str, id: u64, added: &str| {
            let added = serde_json::json!([{"id": id, "content": added}]);
            let model = serde_json::json!({"vocab": {vocabulary: 0}});
            let all = serde_json::json!({"model": model, "added_tokens": added});
            Vocabulary::of(all.to_string().as_bytes())
        };
        let own = of("a", 1, "<end>");
        assert!(own.is_that_of(&of("a", 1, "<end>")));
        assert!(own.is_that_of(&of("a", 2, "<pad>")), "the other has one more");
        assert!(!own.is_that_of(&of("a", 1, "<begin>")) && !own.is_that_of(&of("b", 1, "<end>")));
        for odd in ["[]", "7", "\"x\"", "{\"model\": []}", "{\"added_tokens\": 3}", "nonsense"] {
            assert!(!own.is_that_of(&Vocabulary::of(odd.as_bytes())), "{odd}");
        }
    }
}
