//! `zdata verify`: the whole store, its streams side by side.

use std::path::Path;
use std::sync::Mutex;

use contract::{Digest, Result};
use rayon::prelude::*;
use store::far;
use store::verify::{self, Damage, unread};
use store::{FileRecord, Manifest, SourceRecord, Split, open};

use crate::progress::Progress;
use crate::request;

/// What was found.
#[derive(Debug)]
pub struct Report {
    /// The manifest, which is whole: without it nothing else can be said.
    pub manifest: Manifest,
    /// Bytes read.
    pub bytes: u64,
    /// Files read.
    pub files: u64,
    /// What is damaged, in the order of the store.
    pub damages: Vec<Damage>,
}

/// Checks every byte of a store.
pub fn verify(store: &Path, quiet: bool) -> Result<Report> {
    let manifest = open::manifest(store)?;
    let streams: Vec<_> = manifest
        .sources
        .iter()
        .flat_map(|source| Split::ALL.map(|split| (source, split)))
        .collect();
    let files = manifest.files();
    let bytes = files.iter().filter_map(|file| file.record).map(|record| record.bytes).sum();
    let progress = Mutex::new(Progress::new(bytes, 0, quiet));
    let passed = |bytes| {
        if let Ok(mut progress) = progress.lock() {
            progress.file(bytes);
            progress.tick();
        }
    };
    let mut damages = verify::verify_tokenizer(store, &manifest)?;
    if request::identity(&manifest) != manifest.request {
        damages.push(Damage {
            file: open::MANIFEST.to_owned(),
            what: "the request it names is not the one it was built from".to_owned(),
            block: None,
            documents: None,
        });
    }
    let found: Vec<Vec<Damage>> = streams
        .par_iter()
        .map(|(source, split)| verify::verify_stream(store, &manifest, source, *split, &passed))
        .collect::<Result<_>>()?;
    damages.extend(found.into_iter().flatten());
    for source in &manifest.sources {
        damages.extend(damaged_lists(store, source)?);
        source.lists().iter().for_each(|list| passed(list.bytes));
    }
    Ok(Report { bytes, files: files.len() as u64, damages, manifest })
}

/// What is damaged of the lists that steps left in a source's folder.
fn damaged_lists(store: &Path, source: &SourceRecord) -> Result<Vec<Damage>> {
    let damage = |file: &FileRecord| {
        let path = store.join(&source.name).join(&file.name);
        let what = match far::read(&path) {
            Err(error) => unread(&path, &error)?,
            Ok(bytes) if Digest::of_bytes(&bytes) == file.digest => return Ok(None),
            Ok(_) => "its digest is not the manifest's".to_owned(),
        };
        let file = format!("{}/{}", source.name, file.name);
        Ok(Some(Damage { file, what, block: None, documents: None }))
    };
    source.lists().iter().filter_map(|file| damage(file).transpose()).collect()
}

#[cfg(test)]
mod tests;
