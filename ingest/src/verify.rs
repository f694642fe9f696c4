//! `zdata verify`: checks the whole store, several parts of its streams in parallel.

use std::path::Path;

use contract::Result;
use rayon::prelude::*;
use store::folder::StoreFile;
use store::verify::{self, Damage, StreamCheck, flaw};
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
            let check = StreamCheck::new(store, &manifest, source, *split);
            let parts = check.parts().into_par_iter().map(|shards| check.part(shards, passed));
            check.damages(parts.collect::<Result<_>>()?)
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
    passed: &(dyn Fn(u64) + Sync),
) -> Result<Vec<Damage>> {
    let of_parts = (0..).zip(&source.parts).filter_map(|(part, record)| {
        let record = record.dropped_file.as_ref()?;
        let path = open::part_folder(Path::new(""), &source.name, part).join(&record.name);
        Some((path.display().to_string(), record))
    });
    let others = source.lists().map(|record| (format!("{}/{}", source.name, record.name), record));
    let lists: Vec<(String, &FileRecord)> = of_parts.chain(others).collect();
    let damage = |(file, record): (String, &FileRecord)| {
        let what = flaw(&StoreFile::new(store, &[&file]), record, passed)?;
        Ok(what.map(|what| Damage { file, what, block: None, documents: None }))
    };
    let found = lists.into_par_iter().map(damage).collect::<Result<Vec<_>>>()?;
    Ok(found.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests;
