//! `zdata verify`: checks the whole store, several streams in parallel.

use std::path::Path;

use contract::Result;
use rayon::prelude::*;
use store::folder::StoreFile;
use store::verify::{self, Damage, flaw};
use store::{FileRecord, Location, Manifest, SourceRecord, Split, open};

use crate::assembly::request;
use crate::parallel;
use crate::progress::{Measure, Progress};

/// The findings.
#[derive(Debug)]
pub struct Report {
    /// The manifest, which is intact: otherwise nothing else can be checked.
    pub manifest: Manifest,
    /// Bytes read.
    pub bytes: u64,
    /// Files read.
    pub files: u64,
    /// All damage, in the order of the store.
    pub damages: Vec<Damage>,
}

/// Checks every byte of a store.
pub fn verify(store: impl Into<Location>, quiet: bool) -> Result<Report> {
    parallel::start_shared()?;
    let store = &store.into();
    let manifest = open::manifest(store)?;
    let streams: Vec<_> = manifest
        .sources
        .iter()
        .flat_map(|source| Split::ALL.map(|split| (source, split)))
        .collect();
    let files = manifest.files();
    let bytes = files.iter().filter_map(|file| file.record).map(|record| record.bytes).sum();
    let progress = Progress::new("verify", Measure::Bytes, bytes, quiet);
    let mut damages = verify::verify_tokenizer(store, &manifest)?;
    if request::identity(&manifest) != manifest.request {
        damages.push(Damage {
            file: open::MANIFEST.to_owned(),
            what: "the request it names is not the one it was built from".to_owned(),
            block: None,
            documents: None,
        });
    }
    let found: Vec<Vec<Damage>> = progress.during(|passed| {
        let check = |(source, split): &(&SourceRecord, Split)| {
            verify::verify_stream(store, &manifest, source, *split, passed)
        };
        let found = streams.par_iter().map(check).collect::<Result<Vec<_>>>()?;
        let lists = manifest.sources.iter().map(|source| damaged_lists(store, source, passed));
        found.into_iter().map(Ok).chain(lists).collect::<Result<_>>()
    })?;
    damages.extend(found.into_iter().flatten());
    Ok(Report { bytes, files: files.len() as u64, damages, manifest })
}

/// Damage of the lists of a source: of its parts, and those that steps wrote in its folder.
fn damaged_lists(
    store: &Location,
    source: &SourceRecord,
    passed: &dyn Fn(u64),
) -> Result<Vec<Damage>> {
    let damage = |file: StoreFile, path: String, record: &FileRecord| {
        let what = flaw(&file, record, passed)?;
        Ok(what.map(|what| Damage { file: path, what, block: None, documents: None }))
    };
    let of_parts = (0..).zip(&source.parts).filter_map(|(part, record)| {
        let record = record.dropped_file.as_ref()?;
        let file = open::part_file(store, &source.name, part, &record.name);
        let path = open::part_folder(Path::new(""), &source.name, part).join(&record.name);
        damage(file, path.display().to_string(), record).transpose()
    });
    let others = source.lists().filter_map(|record| {
        let file = StoreFile::new(store, &[&source.name, &record.name]);
        damage(file, format!("{}/{}", source.name, record.name), record).transpose()
    });
    of_parts.chain(others).collect()
}

#[cfg(test)]
mod tests;
