//! `contaminated.jsonl`: the matches of a source's documents with evaluation items, one line of JSON for each.
//!
//! ```text
//! {"file":0,"group":null,"id":"d1","item":7,"row":12,"runs":3,"set":"eval/test.jsonl","text":"how many apples"}
//! ```
//!
//! Lines stand in the order of the documents, those of one document in the order of the items. They are written to the
//! disk as they are found. Of one document at most [`MATCHES_MAX`] matches are told, each with at most [`TEXT_MAX`]
//! bytes of text, so that memory does not grow with what a corpus shares with its evaluation sets.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};
use serde::{Deserialize, Serialize};
use store::{FileRecord, write};
use xxhash_rust::xxh3::Xxh3;

use super::decontaminate::Match;
use crate::corpus::{Corpus, Source};
use crate::recipe::Step;
use crate::recipe::compare::Compare;
use crate::source::Document;

/// The file's name in the source's folder.
const FILE: &str = "contaminated.jsonl";

/// Matches of one document that are told.
pub(crate) const MATCHES_MAX: usize = 100;

/// Bytes of the shared text that are told.
pub(crate) const TEXT_MAX: usize = 2000;

/// One match of a document, without its file: that is for whoever knows its place in the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Matched {
    group: Option<u32>,
    id: Option<String>,
    item: u64,
    row: u64,
    runs: usize,
    set: String,
    text: String,
}

/// What is told of a document's matches.
pub(super) fn told(document: &Document, matches: &[Match<'_>]) -> Vec<Matched> {
    let told = |found: &Match<'_>| Matched {
        group: document.group,
        id: document.id.clone(),
        item: found.line,
        row: document.row,
        runs: found.runs,
        set: found.set.to_owned(),
        text: found.text[..found.text.floor_char_boundary(TEXT_MAX)].to_owned(),
    };
    matches.iter().take(MATCHES_MAX).map(told).collect()
}

#[derive(Serialize)]
struct Line<'a> {
    file: usize,
    #[serde(flatten)]
    matched: &'a Matched,
}

/// The list of one source while it is written, in a scratch folder.
struct List {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Box<Xxh3>,
    bytes: u64,
}

impl List {
    fn create(path: PathBuf) -> Result<Self> {
        let file = File::create(&path).map_err(|error| Fault::io("create", &path, &error))?;
        Ok(List { path, file: BufWriter::new(file), hash: Box::new(Xxh3::new()), bytes: 0 })
    }

    fn push(&mut self, line: &Line<'_>) -> Result<()> {
        let mut line = serde_json::to_vec(line)
            .map_err(|error| Fault::bug(format!("a match cannot be written: {error}")))?;
        line.push(b'\n');
        self.hash.update(&line);
        self.bytes += line.len() as u64;
        self.file.write_all(&line).map_err(|error| Fault::io("write", &self.path, &error))
    }

    /// Moves the list to its place; it is on the disk before it has its name.
    fn finish(self, folder: &Path) -> Result<FileRecord> {
        let List { path, file, hash, bytes } = self;
        let write = |error: &std::io::Error| Fault::io("write", &path, error);
        let file = file.into_inner().map_err(|error| write(error.error()))?;
        file.sync_all().map_err(|error| write(&error))?;
        fs::create_dir_all(folder).map_err(|error| Fault::io("create", folder, &error))?;
        let into = folder.join(FILE);
        fs::rename(&path, &into).map_err(|error| Fault::io("create", &into, &error))?;
        write::sync_folder(folder)?;
        Ok(FileRecord { name: FILE.to_owned(), bytes, digest: Digest(hash.digest128()) })
    }
}

/// The lists of the sources that are decontaminated.
pub(super) struct Writer(Vec<Option<List>>);

impl Writer {
    /// Begins them in a scratch folder.
    pub(super) fn new(corpus: &Corpus, scratch: &Path) -> Result<Self> {
        let list = |(number, source): (usize, &Source)| {
            let is_ours = |(_, step): &(usize, Step)| {
                matches!(step, Step::Compare(Compare::Decontaminate(_)))
            };
            let decontaminated = source.recipe.steps.iter().any(is_ours);
            decontaminated
                .then(|| List::create(scratch.join(format!("matches-{number}"))))
                .transpose()
        };
        Ok(Writer(corpus.sources.iter().enumerate().map(list).collect::<Result<_>>()?))
    }

    /// Adds the matches of the next document.
    pub(super) fn push(&mut self, source: usize, file: usize, matches: &[Matched]) -> Result<()> {
        let Some(list) = &mut self.0[source] else { return Ok(()) };
        matches.iter().try_for_each(|matched| list.push(&Line { file, matched }))
    }

    /// Puts the lists into the folders of their sources.
    pub(super) fn finish(self, corpus: &Corpus, store: &Path) -> Result<Vec<Option<FileRecord>>> {
        let finish = |(list, source): (Option<List>, &Source)| {
            list.map(|list| list.finish(&store.join(&source.name))).transpose()
        };
        self.0.into_iter().zip(&corpus.sources).map(finish).collect()
    }
}
