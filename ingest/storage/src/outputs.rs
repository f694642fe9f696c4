//! The files of an output: their names, their sizes, and the record of those that were put.

use std::fs;
use std::path::Path;

use contract::{Fault, Result};
use store::{Manifest, disk};

/// The suffix of the record of an upload, next to the folder of its store.
pub(crate) const RECORD: &str = ".uploads";

/// The file names of a store, the manifest last.
pub fn files(manifest: &Manifest) -> Vec<String> {
    manifest.files().into_iter().map(|file| file.path).collect()
}

/// The total size of some files of a folder.
pub fn bytes(folder: &Path, names: &[String]) -> Result<u64> {
    let size = |name: &String| {
        let file = folder.join(name);
        Ok(fs::metadata(&file).map_err(|error| Fault::io("read", &file, &error))?.len())
    };
    names.iter().map(size).sum()
}

/// Forgets the upload of the store that was built in `folder`, which has ended.
pub fn forget(folder: &Path) -> Result<()> {
    disk::remove(&disk::beside(folder, RECORD))
}
