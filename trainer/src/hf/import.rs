//! Imports a Hugging Face folder as the initial weights of a run: every tensor must be there, and no other.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use contract::{Fault, Result};
use tch::Tensor;

use super::config::{self, HfDescription, HfLayout};
use super::files;
use super::names::{NameMeaning, TensorNames};
use super::start::{self, InitialModel};
use crate::model::{self, ZayaConfig};
use crate::refusal::values;

/// The result of an import.
#[derive(Clone, Debug)]
pub struct HfImport {
    /// The model that was written.
    pub start: InitialModel,
    /// The layout of the folder.
    pub layout: HfLayout,
    /// Fields that were not taken literally.
    pub notes: Vec<String>,
    /// Tensors, balancing biases included.
    pub tensors: usize,
}

/// Reads the model in `source` and writes it to the folder `target`.
pub fn import(source: &Path, target: &Path) -> Result<HfImport> {
    let path = source.join("config.json");
    let text = fs::read_to_string(&path).map_err(|error| Fault::io("read", &path, &error))?;
    let described = config::read(&text, &path.display().to_string())?;
    let found = tensors(source, &described)?;
    let HfDescription { config, layout, notes } = described;
    let (weights, balance) = assemble(source, &config, found)?;
    let tokenizer = source.join("tokenizer.json");
    let tokenizer = tokenizer.exists().then(|| fs::read(&tokenizer)).transpose();
    let tokenizer =
        tokenizer.map_err(|error| Fault::io("read", &source.join("tokenizer.json"), &error))?;
    let tensors = weights.len() + balance.len();
    let start = start::write(target, &config, &weights, &balance, tokenizer.as_deref())?;
    Ok(HfImport { start, layout, notes, tensors })
}

/// All tensors of the folder by our names.
fn tensors(source: &Path, described: &HfDescription) -> Result<BTreeMap<String, Tensor>> {
    let places = TensorNames::new(&described.config);
    let mut found = BTreeMap::new();
    let mut experts: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (part, mut listed) in files::parts(source)? {
        let path = source.join(&part);
        let bytes = fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Fault::data("a part of the model is missing")
                .at(path.display().to_string())
                .hint("the index names it: fetch the folder again"),
            _ => Fault::io("read", &path, &error),
        })?;
        files::read(&path, &bytes, |name, tensor| {
            if listed.as_mut().is_some_and(|listed| !listed.remove(name)) {
                return Err(not_as_listed(&path, &format!("{name} is not in the index")));
            }
            files::refuse_non_finite(&path, name, &tensor)?;
            let place = match described.layout {
                HfLayout::Transformers => Some(NameMeaning::Whole(name.to_owned())),
                HfLayout::Zyphra if name == HEAD => Some(NameMeaning::Whole(name.to_owned())),
                HfLayout::Zyphra => places.of(name),
            };
            let before = match place {
                Some(NameMeaning::Whole(name)) => found.insert(name, tensor),
                Some(NameMeaning::Expert(name, expert)) => {
                    experts.entry(name).or_default().insert(expert, tensor)
                }
                None => return Err(unknown(&path, name)),
            };
            match before {
                None => Ok(()),
                Some(_) => Err(Fault::data(format!("{name} comes a second time"))
                    .at(path.display().to_string())
                    .wanted("each tensor once, in one of the model's files")),
            }
        })?;
        if let Some(name) = listed.iter().flatten().next() {
            return Err(not_as_listed(&path, &format!("{name} is not here, where the index says")));
        }
    }
    let count = described.config.num_experts as usize;
    for (name, parts) in experts {
        if !parts.keys().copied().eq(0..count) {
            return Err(Fault::data(format!("{name} lacks an expert, or has one too many"))
                .at(source.display().to_string())
                .found(format!("experts {:?}", parts.keys().collect::<Vec<_>>()))
                .wanted(format!("0 to {}", count - 1)));
        }
        let parts: Vec<Tensor> = parts.into_values().collect();
        let whole = Tensor::f_stack(&parts, 0).map_err(|error| {
            Fault::data(format!("the experts of {name} differ in shape: {error}"))
                .at(source.display().to_string())
        })?;
        found.insert(name, whole);
    }
    Ok(found)
}

/// The output head, which some folders store even if it is tied to the embedding.
const HEAD: &str = "lm_head.weight";

/// Weights in canonical order, and biases by layer.
fn assemble(
    source: &Path,
    config: &ZayaConfig,
    mut found: BTreeMap<String, Tensor>,
) -> Result<(Vec<Tensor>, Vec<Vec<f32>>)> {
    let mut take = |name: &str, shape: &[i64]| {
        let wrong = |tensor: Option<&Tensor>| {
            Fault::data(format!("the folder lacks {name} in the shape of its configuration"))
                .at(source.display().to_string())
                .found(
                    tensor.map_or_else(|| "nothing".to_owned(), |one| format!("{:?}", one.size())),
                )
                .wanted(format!("{shape:?}"))
        };
        let tensor = found.remove(name).ok_or_else(|| wrong(None))?;
        if tensor.size() == shape { Ok(tensor) } else { Err(wrong(Some(&tensor))) }
    };
    let mut weights = Vec::new();
    for spec in model::parameters(config) {
        weights.push(take(&spec.name, &spec.shape)?);
    }
    let mut balance = Vec::new();
    for layer in 0..config.num_hidden_layers {
        let tensor = take(&model::balance_name(layer), &[config.router_classes()])?;
        balance.push(values(&tensor)?);
    }
    if let Some(head) = found.remove(HEAD)
        && head != weights[0]
    {
        return Err(Fault::data(
            "the head is not the embedding, and this model has one matrix for both",
        )
        .at(format!("{}: {HEAD}", source.display())));
    }
    match found.keys().next() {
        None => Ok((weights, balance)),
        Some(name) => Err(unknown(source, name)),
    }
}

/// The error for a file that does not hold what its index lists.
fn not_as_listed(path: &Path, what: &str) -> Fault {
    Fault::data(format!("the index and the files of this model disagree: {what}"))
        .at(path.display().to_string())
        .hint("they are of two models, or one of them is older: fetch the folder again")
}

fn unknown(path: &Path, name: &str) -> Fault {
    Fault::data(format!("this model has no place for the tensor {name}"))
        .at(path.display().to_string())
        .hint(
            "only what was read to the last tensor is taken over: part of a model is another model",
        )
}
