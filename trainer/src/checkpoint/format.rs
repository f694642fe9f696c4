//! What a checkpoint holds, independent of the layout that wrote it. `trainer/README.md` draws the folder.

use std::borrow::Cow;
use std::collections::BTreeMap;

use contract::Digest;
use safetensors::tensor::{Dtype, View};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::model::ParamSpec;
use crate::state::State;

/// The version of the format.
pub(super) const FORMAT: u32 = 1;

/// A blob is closed before it grows beyond this, so that reading one never needs much memory beside the state.
pub(super) const BLOB_BYTES: u64 = 1 << 30;

/// `manifest.json`: a folder without it is no checkpoint. No time, device or path enters it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the format.
    pub format: u32,
    /// The step whose outcome this is.
    pub step: u64,
    /// The state digest, as in the ledger.
    pub state: Digest,
    /// The ledger's chain after this step: which run this belongs to.
    pub chain: Digest,
    /// The blobs.
    pub files: Vec<FileRecord>,
    /// The parameters in canonical order, with their shapes.
    pub parameters: Vec<ParameterRecord>,
}

/// One blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// xxh3-128 of its bytes.
    pub digest: Digest,
}

/// One parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterRecord {
    /// Its name, as in Hugging Face transformers.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
}

/// One tensor of a blob, whose bytes exist only while it is written.
pub(super) struct Entry<'a> {
    /// Which of the three sets: "weights", "first", "second".
    pub(super) set: &'static str,
    pub(super) name: String,
    shape: Vec<usize>,
    values: Values<'a>,
}

enum Values<'a> {
    Tensor(&'a Tensor),
    Slice(&'a [f32]),
}

/// The name of a layer's balancing biases.
pub(super) fn balance_name(layer: usize) -> String {
    format!("model.layers.{layer}.mlp.gate.balancing_biases")
}

/// Everything in a state, set by set.
pub(super) fn entries<'a>(state: &'a State, parameters: &[ParamSpec]) -> Vec<Entry<'a>> {
    let mut found = Vec::new();
    for set in ["weights", "first", "second"] {
        for (index, parameter) in parameters.iter().enumerate() {
            let tensor = match set {
                "weights" => Some(&state.weights[index]),
                "first" => Some(&state.first[index]),
                _ => state.second[index].as_ref(),
            };
            let shape = parameter.shape.iter().map(|length| *length as usize).collect();
            let name = parameter.name.clone();
            found.extend(tensor.map(|tensor| Entry {
                set,
                name,
                shape,
                values: Values::Tensor(tensor),
            }));
        }
        for (layer, balance) in state.balance.iter().enumerate() {
            let values = match set {
                "weights" => &balance.bias,
                "first" => &balance.first,
                _ => &balance.second,
            };
            let (name, shape) = (balance_name(layer), vec![values.len()]);
            found.push(Entry { set, name, shape, values: Values::Slice(values) });
        }
    }
    found
}

/// Entries as blobs: a new one begins with each set, and where the last would grow too large.
pub(super) fn blobs(entries: Vec<Entry<'_>>, limit: u64) -> Vec<(String, Vec<Entry<'_>>)> {
    let mut blobs: Vec<(String, Vec<Entry<'_>>)> = Vec::new();
    let (mut set, mut number, mut bytes) = ("", 0, 0);
    for entry in entries {
        let size = entry.data_len() as u64;
        if entry.set != set || bytes + size > limit {
            number = if entry.set == set { number + 1 } else { 0 };
            (set, bytes) = (entry.set, 0);
            blobs.push((format!("{set}-{number:05}.safetensors"), Vec::new()));
        }
        bytes += size;
        if let Some((_, last)) = blobs.last_mut() {
            last.push(entry);
        }
    }
    blobs
}

/// The number of the blob in which each tensor of a set lies: a function of the parameters alone.
pub(super) fn homes(
    state: &State,
    parameters: &[ParamSpec],
) -> BTreeMap<(&'static str, String), usize> {
    let blobs = blobs(entries(state, parameters), BLOB_BYTES);
    let numbered = blobs.into_iter().enumerate();
    let homes = numbered.flat_map(|(number, (_, entries))| {
        entries.into_iter().map(move |entry| ((entry.set, entry.name), number))
    });
    homes.collect()
}

impl View for &Entry<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(match self.values {
            Values::Slice(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Values::Tensor(tensor) => {
                let mut bytes = vec![0; self.data_len()];
                tensor.to_kind(Kind::Float).copy_data_u8(&mut bytes, tensor.numel());
                bytes
            }
        })
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * 4
    }
}

impl Entry<'_> {
    fn data_len(&self) -> usize {
        View::data_len(&self)
    }
}
