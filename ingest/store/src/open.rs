//! Commits a folder as a store, and checks that one is a store.
//!
//! Invariant: `manifest.json` is renamed into place last, so a folder that has it holds everything it names.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::check;
use crate::folder::StoreFile;
pub use crate::names::{BUILD_FOLDER, MANIFEST, MANIFEST_SUM, TOKENIZER};
use crate::{FORMAT, Location, Manifest, disk, names};
use contract::{Digest, Fault, Result, json};

/// The folder of a part of a source.
pub fn part_folder(store: &Path, source: &str, part: u32) -> PathBuf {
    store.join(source).join(names::part(part))
}

/// A file of a part.
pub fn part_file(store: impl Into<Location>, source: &str, part: u32, name: &str) -> StoreFile {
    StoreFile::new(store, &[source, &names::part(part), name])
}

/// Commits `store`. Everything the manifest names must be synced already.
pub fn commit(store: &Path, manifest: &Manifest) -> Result<()> {
    let bytes = json::pretty(manifest, "a manifest")?;
    let sum = format!("{}\n", Digest::of_bytes(&bytes));
    disk::write_atomic(&store.join(MANIFEST_SUM), sum.as_bytes())?;
    disk::write_atomic(&store.join(MANIFEST), &bytes).map(drop)
}

/// Removes the build folder from a store, also after a run that was killed between the commit and this call.
pub fn finish(store: &Path) -> Result<()> {
    let folder = store.join(BUILD_FOLDER);
    if !folder.exists() {
        return Ok(());
    }
    disk::remove(&folder)?;
    disk::sync_folder(store)
}

/// Reads the manifest of the store at `store` and checks that it is complete, of this format and possible. Every reader
/// of a store uses this function.
pub fn manifest(store: impl Into<Location>) -> Result<Manifest> {
    let store = &store.into();
    // If the two copies do not match, both are fetched once more.
    store.join(MANIFEST).reread(|| store.join(MANIFEST_SUM).reread(|| read_manifest(store)))
}

fn read_manifest(store: &Location) -> Result<Manifest> {
    let path = store.join(MANIFEST);
    let bytes = match StoreFile::new(store, &[MANIFEST]).read() {
        Ok(bytes) => bytes,
        Err(error) if is_absent(store, &error) => return Err(no_store(store)),
        Err(error) => return Err(path.fault("read", &error)),
    };
    let place = path.to_string();
    let damaged = |what: String| {
        Fault::data(what)
            .at(place.clone())
            .hint("restore the file, or remove the folder and build the store again")
    };
    check_sum(store, &bytes)?;
    let value: serde_json::Value = serde_json::from_slice(&bytes)
        .map_err(|error| damaged(format!("it is not a manifest: {error}")))?;
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        found => return Err(other_format(store, found)),
    }
    let manifest: Manifest = serde_json::from_value(value)
        .map_err(|error| damaged(format!("it is not a manifest: {error}")))?;
    let identity = manifest.identity();
    if identity != manifest.digest {
        return Err(damaged("the manifest does not agree with its own digest".to_owned())
            .found(identity)
            .wanted(manifest.digest));
    }
    match check::flaw(&manifest) {
        Some(what) => Err(damaged(format!("the manifest contradicts itself: {what}"))),
        None => Ok(manifest),
    }
}

/// Whether the manifest is missing: no file of that name, or a file where a folder should be.
fn is_absent(store: &Location, error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || store.local().is_some_and(Path::is_file)
}

fn check_sum(store: &Location, bytes: &[u8]) -> Result<()> {
    let path = store.join(MANIFEST_SUM);
    let text = StoreFile::new(store, &[MANIFEST_SUM]).read();
    let hint = "restore both files, or remove the folder and build the store again";
    let text = text.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Fault::data(format!("{MANIFEST} has no digest file next to it"))
            .at(path.to_string())
            .hint(hint),
        _ => path.fault("read", &error),
    })?;
    let wanted = format!("{}\n", Digest::of_bytes(bytes));
    if text == wanted.as_bytes() {
        return Ok(());
    }
    Err(Fault::data(format!("{MANIFEST} or its sum is damaged"))
        .at(path.to_string())
        .found(String::from_utf8_lossy(&text).trim_end())
        .wanted(wanted.trim_end())
        .hint(hint))
}

/// The fault for a store of another format: it can be rebuilt from its inputs.
fn other_format(store: &Location, found: Option<u64>) -> Fault {
    let newer = found.is_some_and(|format| format > u64::from(FORMAT));
    Fault::data("this store has another format than this release reads")
        .at(store.join(MANIFEST).to_string())
        .found(found.map_or("no format".to_owned(), |format| format!("format {format}")))
        .wanted(format!("format {FORMAT}"))
        .hint(if newer {
            "use the release of zdata that wrote it"
        } else {
            "build it again from its corpus file: zdata build CORPUS --out ANOTHER_FOLDER (or zdata import, as it was made)"
        })
}

fn no_store(store: &Location) -> Fault {
    let place = store.to_string();
    let Some(store) = store.local().filter(|store| store.exists()) else {
        return Fault::data("this store does not exist")
            .at(place)
            .hint("build it with `zdata build`");
    };
    if store.join(BUILD_FOLDER).is_dir() {
        return Fault::data("this store is half built")
            .at(place)
            .hint("run the same `zdata build` again: it continues where it stopped");
    }
    if store.is_file() {
        return Fault::usage("this is a file, and a store is a folder").at(place).hint(
            "name the folder that `zdata build --out` made; \
             `zdata build` takes a corpus file, `zdata plan` a curriculum",
        );
    }
    Fault::data(format!("this folder is not a store: it has no {MANIFEST}"))
        .at(place)
        .hint("name the folder that `zdata build --out` wrote")
}
