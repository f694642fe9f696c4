//! Imports a Hugging Face folder as the initial weights of a run: every tensor must be there, and no other.

use std::collections::BTreeMap;
use std::path::Path;

use contract::{Fault, Result};
use store::regular;
use tch::Tensor;

use super::config::{self, HfDescription, HfLayout};
use super::files;
use super::names::{NameMeaning, TensorNames, part_names};
use super::start::{self, InitialModel};
use crate::model::{self, HEAD, ZayaConfig};
use crate::refusal::{refused, values};

/// The result of an import.
#[derive(Clone, Debug)]
pub struct HfImport {
    /// The model that was written.
    pub start: InitialModel,
    /// The layout of the folder.
    pub layout: HfLayout,
    /// Fields that were not taken literally.
    pub notes: Vec<String>,
    /// Parameters, and balancing biases of layers.
    pub tensors: usize,
}

/// Reads the model in `source` and writes it to the folder `target`.
pub fn import(source: &Path, target: &Path) -> Result<HfImport> {
    let path = source.join("config.json");
    let text = regular::read_to_string(&path).map_err(|error| Fault::io("read", &path, &error))?;
    let described = config::read(&text, &path.display().to_string())?;
    let found = tensors(source, &described)?;
    let HfDescription { config, layout, notes } = described;
    let (weights, balance) = assemble(source, &config, found)?;
    let tokenizer = source.join("tokenizer.json");
    let tokenizer = tokenizer.exists().then(|| regular::read(&tokenizer)).transpose();
    let tokenizer =
        tokenizer.map_err(|error| Fault::io("read", &source.join("tokenizer.json"), &error))?;
    let routers = balance.iter().filter(|biases| !biases.is_empty());
    let tensors = weights.len() + routers.count();
    let start = start::write(target, &config, &weights, &balance, tokenizer.as_deref())?;
    Ok(HfImport { start, layout, notes, tensors })
}

/// All tensors of the folder by our names.
fn tensors(source: &Path, described: &HfDescription) -> Result<BTreeMap<String, Tensor>> {
    let places = TensorNames::new(&described.config, described.layout);
    let mut found = BTreeMap::new();
    let mut parts: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (part, mut listed) in files::parts(source)? {
        let path = source.join(&part);
        let bytes = regular::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Fault::data("a part of the model is missing")
                .at(path.display().to_string())
                .hint("the index names it: fetch the folder again"),
            _ => Fault::io("read", &path, &error),
        })?;
        files::read(&path, &bytes, |name, tensor| {
            if listed.as_mut().is_some_and(|listed| !listed.remove(name)) {
                return Err(not_as_listed(&path, &format!("{name} is not in the index")));
            }
            // Older llama files have the rotary frequencies, which follow from the configuration.
            if name.ends_with(".rotary_emb.inv_freq") {
                return Ok(());
            }
            files::refuse_non_finite(&path, name, &tensor)?;
            let place = match described.layout {
                // transformers' names in memory are ours.
                HfLayout::Transformers => {
                    Some(places.of(name).unwrap_or_else(|| NameMeaning::Whole(name.to_owned())))
                }
                HfLayout::Zyphra if name == HEAD => Some(NameMeaning::Whole(name.to_owned())),
                HfLayout::Zyphra => places.of(name),
            };
            let before = match place {
                Some(NameMeaning::Whole(name)) => found.insert(name, tensor),
                Some(NameMeaning::Part(name, part)) => {
                    parts.entry(name).or_default().insert(part, tensor)
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
    join(source, described, parts, &mut found)?;
    Ok(found)
}

/// Joins the parts of parameters that the folder does not store whole.
fn join(
    source: &Path,
    described: &HfDescription,
    mut parts: BTreeMap<String, BTreeMap<usize, Tensor>>,
    found: &mut BTreeMap<String, Tensor>,
) -> Result<()> {
    for spec in model::parameters(&described.config) {
        let Some(parts) = parts.remove(&spec.name) else { continue };
        let (name, names) = (&spec.name, part_names(&described.config, described.layout, &spec));
        if parts.len() < names.len() {
            let missing = (0..).zip(&names).find(|(part, _)| !parts.contains_key(part));
            return Err(Fault::data(format!("{name} lacks an expert"))
                .at(source.display().to_string())
                .found(format!("{} of its {} tensors", parts.len(), names.len()))
                .wanted(missing.map_or("", |(_, name)| name)));
        }
        let parts: Vec<Tensor> = parts.into_values().collect();
        let rows: i64 = spec.shape[..spec.shape.len() - 1].iter().product();
        let shape = [rows / names.len() as i64, spec.shape[spec.shape.len() - 1]];
        if let Some((part, name)) = parts.iter().zip(&names).find(|(part, _)| part.size() != shape)
        {
            return Err(Fault::data(format!(
                "the folder lacks {name} in the shape of its configuration"
            ))
            .at(source.display().to_string())
            .found(format!("{:?}", part.size()))
            .wanted(format!("{shape:?}")));
        }
        let whole = Tensor::f_cat(&parts, 0).and_then(|rows| rows.f_reshape(spec.shape.as_slice()));
        let whole = whole.map_err(refused)?;
        if found.insert(name.clone(), whole).is_some() {
            return Err(Fault::data(format!("{name} is stored both whole and by expert"))
                .at(source.display().to_string())
                .wanted("each tensor once"));
        }
    }
    Ok(())
}

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
    for (layer, biases) in (0..).zip(model::balance_sizes(config)) {
        balance.push(match biases {
            0 => Vec::new(),
            biases => values(&take(&model::balance_name(layer), &[biases as i64])?)?,
        });
    }
    // Some folders store the head even if it is tied to the embedding.
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
