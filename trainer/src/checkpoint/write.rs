//! Writing a checkpoint: blobs, their sums, the manifest, and one rename that makes it all true at once.

use std::fs::{self, File};
use std::path::Path;

use contract::{Digest, Fault, Result};
use safetensors::SafeTensorError;

use super::format::{self, Entry, FileRecord, Manifest, ParameterRecord};
use crate::model::ParamSpec;
use crate::state::State;

/// Writes those blobs of `state` that are `mine`, by number, into the folder `scratch`. Nothing else of the state is read.
pub(super) fn part(
    scratch: &Path,
    state: &State,
    parameters: &[ParamSpec],
    mine: impl Fn(usize) -> bool,
) -> Result<Vec<FileRecord>> {
    fs::create_dir_all(scratch).map_err(|error| Fault::io("create", scratch, &error))?;
    let blobs = format::blobs(format::entries(state, parameters), format::BLOB_BYTES);
    let mine = blobs.iter().enumerate().filter(|(number, _)| mine(*number));
    mine.map(|(_, (name, entries))| blob(scratch, name, entries)).collect()
}

/// Makes the folder `scratch`, whose blobs are `files`, the checkpoint `target`.
pub(super) fn commit(
    scratch: &Path,
    target: &Path,
    parameters: &[ParamSpec],
    (step, state, chain): (u64, Digest, Digest),
    files: Vec<FileRecord>,
) -> Result<()> {
    let named = |parameter: &ParamSpec| ParameterRecord {
        name: parameter.name.clone(),
        shape: parameter.shape.clone(),
    };
    let parameters = parameters.iter().map(named).collect();
    let manifest = Manifest { format: format::FORMAT, step, state, chain, files, parameters };
    let text = serde_json::to_string_pretty(&manifest).map_err(|error| {
        Fault::bug(format!("a checkpoint's manifest cannot be written: {error}"))
    })?;
    let path = scratch.join("manifest.json");
    fs::write(&path, text + "\n").map_err(|error| Fault::io("write", &path, &error))?;
    sync(&path)?;
    sync(scratch)?;
    // A folder of that name can only be a checkpoint found damaged, or the same state computed again.
    remove(target)?;
    fs::rename(scratch, target).map_err(|error| Fault::io("rename to", target, &error))?;
    target.parent().map_or(Ok(()), sync)
}

/// Writes one blob and reads it back for its sum, so that the sum speaks of what was written.
fn blob(folder: &Path, name: &str, entries: &[Entry<'_>]) -> Result<FileRecord> {
    let path = folder.join(name);
    let named = entries.iter().map(|entry| (entry.name.as_str(), entry));
    safetensors::serialize_to_file(named, None, &path).map_err(|error| match error {
        SafeTensorError::IoError(error) => Fault::io("write", &path, &error),
        other => {
            Fault::bug(format!("a blob cannot be written: {other}")).at(path.display().to_string())
        }
    })?;
    sync(&path)?;
    let bytes = fs::read(&path).map_err(|error| Fault::io("read back", &path, &error))?;
    Ok(FileRecord {
        name: name.to_owned(),
        bytes: bytes.len() as u64,
        digest: Digest::of_bytes(&bytes),
    })
}

/// Waits until a file or folder is on the disk.
fn sync(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|error| Fault::io("flush", path, &error))
}

/// Removes a folder, if there is one.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Fault::io("remove", path, &error))
        }
        _ => Ok(()),
    }
}
