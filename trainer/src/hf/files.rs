//! The tensors of a folder: safetensors, in one file or in parts with an index.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Component, Path};

use contract::{Digest, Fault, Result};
use safetensors::tensor::{Dtype, TensorView, View};
use safetensors::{SafeTensorError, SafeTensors};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use storage::staging::Staging;
use store::{disk, regular};
use tch::{Kind, Tensor};

use crate::refusal::refused;

/// The maximum size of a part, as in `transformers`.
const PART_BYTES: u64 = 5_000_000_000;

/// A written file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) digest: Digest,
}

/// A named tensor, f32.
pub(super) struct NamedTensor {
    pub(super) name: String,
    pub(super) tensor: Tensor,
    shape: Vec<usize>,
}

impl NamedTensor {
    pub(super) fn new(name: String, tensor: &Tensor) -> NamedTensor {
        let shape = tensor.size().iter().map(|length| *length as usize).collect();
        NamedTensor { name, tensor: tensor.to_kind(Kind::Float), shape }
    }

    fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * 4
    }
}

impl View for &NamedTensor {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.bytes() as usize];
        self.tensor.contiguous().copy_data_u8(&mut bytes, self.tensor.numel());
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes() as usize
    }
}

/// Writes tensors as `model.safetensors`, or as parts with an index.
pub(super) fn write(folder: &Path, tensors: &[NamedTensor]) -> Result<Vec<WrittenFile>> {
    write_parts(folder, tensors, PART_BYTES)
}

pub(super) fn write_parts(
    folder: &Path,
    tensors: &[NamedTensor],
    limit: u64,
) -> Result<Vec<WrittenFile>> {
    let mut parts: Vec<(u64, Vec<&NamedTensor>)> = Vec::new();
    for tensor in tensors {
        match parts.last_mut() {
            Some((bytes, part)) if *bytes + tensor.bytes() <= limit => {
                *bytes += tensor.bytes();
                part.push(tensor);
            }
            _ => parts.push((tensor.bytes(), vec![tensor])),
        }
    }
    let (count, mut written, mut index) = (parts.len(), Vec::new(), BTreeMap::new());
    for (number, (_, part)) in (1..).zip(&parts) {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{number:05}-of-{count:05}.safetensors"),
        };
        index.extend(part.iter().map(|tensor| (tensor.name.clone(), name.clone())));
        written.push(write_one(folder, name, part)?);
    }
    if count > 1 {
        let total: u64 = tensors.iter().map(NamedTensor::bytes).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": index});
        text(folder, "model.safetensors.index.json", &index)?;
    }
    Ok(written)
}

#[expect(
    clippy::disallowed_types,
    reason = "the library takes metadata so; with one entry it has one order"
)]
fn write_one(folder: &Path, name: String, part: &[&NamedTensor]) -> Result<WrittenFile> {
    let path = folder.join(&name);
    // The library restricts the file to its owner; it gets the permissions of the files next to it.
    let plain = File::create(&path).and_then(|file| file.metadata());
    let plain = plain.map_err(|error| Fault::io("create", &path, &error))?.permissions();
    let named = part.iter().map(|tensor| (tensor.name.as_str(), *tensor));
    // `transformers` requires this entry: torch's layout.
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(named, Some(metadata), &path).map_err(|error| match error {
        SafeTensorError::IoError(error) => Fault::io("write", &path, &error),
        other => Fault::bug(format!("tensors cannot be written: {other}")),
    })?;
    fs::set_permissions(&path, plain).map_err(|error| Fault::io("open up", &path, &error))?;
    sync(&path)?;
    let bytes = fs::read(&path).map_err(|error| Fault::io("read back", &path, &error))?;
    Ok(WrittenFile { name, bytes: bytes.len() as u64, digest: Digest::of_bytes(&bytes) })
}

/// Writes a JSON file.
pub(super) fn text(folder: &Path, name: &str, value: &Value) -> Result<()> {
    let path = folder.join(name);
    let text = format!("{value:#}\n");
    disk::write_atomic(&path, text.as_bytes()).map(drop)
}

fn sync(path: &Path) -> Result<()> {
    regular::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|error| Fault::io("flush", path, &error))
}

/// Creates `target` atomically: `fill` writes into a temporary folder next to it, which is then renamed.
pub(super) fn commit<T>(target: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    if target.exists() {
        return Err(Fault::usage("there is something at this place already")
            .at(target.display().to_string())
            .hint("name a folder that does not exist yet, or remove this one"));
    }
    let staging = Staging::begin(target)?;
    let made = fill(staging.path())?;
    staging.commit()?;
    Ok(made)
}

/// The files that hold a folder's tensors, each with the names of its tensors in the index; a single file has no index.
pub(super) fn parts(folder: &Path) -> Result<BTreeMap<String, Option<BTreeSet<String>>>> {
    let whole = folder.join("model.safetensors");
    let path = folder.join("model.safetensors.index.json");
    if whole.exists() {
        return Ok([("model.safetensors".to_owned(), None)].into());
    }
    if !path.exists() {
        return Err(Fault::data("this folder holds no weights that can be read")
            .at(folder.display().to_string())
            .wanted("model.safetensors, or model.safetensors.index.json and its parts"));
    }
    let text = regular::read_to_string(&path).map_err(|error| Fault::io("read", &path, &error))?;
    let damaged = |what: String| Fault::data(what).at(path.display().to_string());
    let index: Value = serde_json::from_str(&text)
        .map_err(|error| damaged(format!("the index cannot be read: {error}")))?;
    let map = index["weight_map"].as_object();
    let map = map.ok_or_else(|| damaged("the index has no weight_map".to_owned()))?;
    let mut parts = BTreeMap::<String, Option<BTreeSet<String>>>::new();
    for (tensor, part) in map {
        let part = part.as_str().ok_or_else(|| damaged(format!("{tensor} is in no file")))?;
        if !is_name(part) {
            return Err(damaged(format!("the index places {tensor} outside of its folder"))
                .found(format!("{part:?}"))
                .wanted("the name of a file in the folder of the index"));
        }
        parts.entry(part.to_owned()).or_default().get_or_insert_default().insert(tensor.clone());
    }
    Ok(parts)
}

/// Whether this is a plain file name, which cannot lead to another folder.
pub(super) fn is_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let first = parts.next();
    let plain = matches!(first, Some(Component::Normal(part)) if part == name);
    plain && parts.next().is_none() && !name.contains(['\\', '\0'])
}

/// Refuses tensors with values that are not finite: they cannot be trained from.
pub(super) fn refuse_non_finite(path: &Path, name: &str, tensor: &Tensor) -> Result<()> {
    let finite = tensor.f_isfinite().and_then(|finite| finite.f_all());
    let finite = finite.map_err(refused)?;
    if finite.int64_value(&[]) == 1 {
        return Ok(());
    }
    Err(Fault::data(format!("{name} has numbers that are not finite"))
        .at(path.display().to_string())
        .wanted("weights that are numbers")
        .hint("the model was written after it had diverged, or its file is damaged: take an earlier one"))
}

/// Passes every tensor of one file to `take`, as f32.
pub(super) fn read(
    path: &Path,
    bytes: &[u8],
    mut take: impl FnMut(&str, Tensor) -> Result<()>,
) -> Result<()> {
    let damaged = |what: String| {
        let fault = Fault::data(what).at(path.display().to_string());
        fault.hint("a copy that was cut short looks so: fetch the file again")
    };
    let file = SafeTensors::deserialize(bytes)
        .map_err(|error| damaged(format!("this is not a safetensors file: {error}")))?;
    for (name, view) in file.iter() {
        take(name, tensor(&view).map_err(|what| damaged(format!("{name}: {what}")))?)?;
    }
    Ok(())
}

fn tensor(view: &TensorView<'_>) -> std::result::Result<Tensor, String> {
    let kind = match view.dtype() {
        Dtype::F32 => Kind::Float,
        Dtype::BF16 => Kind::BFloat16,
        Dtype::F16 => Kind::Half,
        other => return Err(format!("a tensor of {other:?}, where f32, bf16 or f16 is read")),
    };
    let shape: Vec<i64> = view.shape().iter().map(|length| *length as i64).collect();
    let tensor = Tensor::f_from_data_size(view.data(), &shape, kind);
    tensor.map(|tensor| tensor.to_kind(Kind::Float)).map_err(|error| error.to_string())
}
