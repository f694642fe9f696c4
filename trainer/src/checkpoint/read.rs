//! Reading a checkpoint: every byte is checked before a number of it is used, and the whole state after.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use contract::{Digest, Fault, Result};
use safetensors::SafeTensors;
use tch::{Device, Kind, Tensor};

use super::format::{self, FileRecord, Manifest, ParameterRecord};
use crate::lanes::Lanes;
use crate::model::ParamSpec;
use crate::optim::Rule;
use crate::optim::balance::Balance;
use crate::state::State;

/// What a state looks like: decided by the run, not by what is on the disk.
#[derive(Clone, Copy)]
pub struct Layout<'a> {
    /// The parameters in canonical order.
    pub parameters: &'a [ParamSpec],
    /// How each is updated, which decides what moments it has.
    pub rules: &'a [Rule],
    /// Balance before the first step, by layer: as large as it will always be.
    pub balance: &'a [Balance],
    /// Where tensors belong.
    pub device: Device,
}

/// The manifest of the checkpoint `folder`.
pub(super) fn manifest(folder: &Path) -> Result<Manifest> {
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidData => damaged(&path, "it is not UTF-8"),
        _ => Fault::io("read", &path, &error),
    })?;
    serde_json::from_str(&text).map_err(|error| damaged(&path, &error.to_string()))
}

/// The state in the checkpoint `folder`, after checking all of it.
pub(super) fn read(folder: &Path, layout: Layout<'_>, lanes: Lanes) -> Result<(State, Manifest)> {
    let manifest = manifest(folder)?;
    let wanted: Vec<_> = layout.parameters.iter().map(record).collect();
    if manifest.format != format::FORMAT || manifest.parameters != wanted {
        return Err(damaged(
            &folder.join("manifest.json"),
            "its format or its parameters are not this run's",
        ));
    }
    let mut sets: BTreeMap<(String, String), Tensor> = BTreeMap::new();
    for file in &manifest.files {
        let set = file.name.split('-').next().unwrap_or_default();
        for (name, tensor) in blob(folder, file)? {
            sets.insert((set.to_owned(), name), tensor);
        }
    }
    let state = assemble(folder, layout, manifest.step, sets)?;
    let found = state.sums(lanes)?.digest;
    if found != manifest.state {
        let fault = damaged(folder, "its state digest does not match");
        return Err(fault.found(found).wanted(manifest.state));
    }
    Ok((state, manifest))
}

fn record(parameter: &ParamSpec) -> ParameterRecord {
    ParameterRecord { name: parameter.name.clone(), shape: parameter.shape.clone() }
}

/// The tensors of one blob.
fn blob(folder: &Path, file: &FileRecord) -> Result<Vec<(String, Tensor)>> {
    let path = folder.join(&file.name);
    let bytes = fs::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
    let found = Digest::of_bytes(&bytes);
    if bytes.len() as u64 != file.bytes || found != file.digest {
        let found = format!("{} bytes, digest {found}", bytes.len());
        return Err(damaged(&path, "its bytes changed since it was written")
            .found(found)
            .wanted(format!("{} bytes, digest {}", file.bytes, file.digest)));
    }
    let tensors =
        SafeTensors::deserialize(&bytes).map_err(|error| damaged(&path, &error.to_string()))?;
    let tensor = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        let shape: Vec<i64> = view.shape().iter().map(|length| *length as i64).collect();
        let tensor = Tensor::f_from_data_size(view.data(), &shape, Kind::Float);
        let tensor = tensor.map_err(|error| damaged(&path, &error.to_string()))?;
        Ok((name.to_owned(), tensor))
    };
    tensors.iter().map(tensor).collect()
}

/// Puts each tensor in its place, and misses none.
fn assemble(
    folder: &Path,
    layout: Layout<'_>,
    step: u64,
    mut sets: BTreeMap<(String, String), Tensor>,
) -> Result<State> {
    let mut take = |set: &str, name: &str, shape: &[i64]| {
        let tensor = sets.remove(&(set.to_owned(), name.to_owned()));
        tensor.filter(|tensor| tensor.size() == shape).ok_or_else(|| {
            damaged(folder, &format!("it lacks {set} of {name} in the shape {shape:?}"))
        })
    };
    let (mut weights, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
    for (parameter, rule) in layout.parameters.iter().zip(layout.rules) {
        let mut place =
            |set: &str| Ok(take(set, &parameter.name, &parameter.shape)?.to_device(layout.device));
        weights.push(place("weights")?);
        first.push(place("first")?);
        second.push(if rule.has_second_moment() { Some(place("second")?) } else { None });
    }
    let mut balance = Vec::new();
    for (layer, like) in layout.balance.iter().enumerate() {
        let name = format::balance_name(layer);
        let mut values = |set: &str, length: usize| -> Result<Vec<f32>> {
            let tensor = take(set, &name, &[length as i64])?;
            Vec::try_from(tensor)
                .map_err(|error: tch::TchError| damaged(folder, &error.to_string()))
        };
        let (bias, first) =
            (values("weights", like.bias.len())?, values("first", like.first.len())?);
        balance.push(Balance { bias, first, second: values("second", like.second.len())? });
    }
    Ok(State { step, weights, first, second, balance })
}

fn damaged(path: &Path, what: &str) -> Fault {
    Fault::data(format!("this checkpoint is damaged: {what}")).at(path.display().to_string())
}
