//! `contaminated.jsonl`: the matches of a source's documents with evaluation items, one line of JSON for each.
//!
//! ```text
//! {"file":0,"group":null,"id":"d1","item":7,"row":12,"runs":3,"set":"eval/test.jsonl","text":"how many apples"}
//! ```
//!
//! Lines are in document order, those of one document in item order. They are written to disk as they are found. At
//! most [`MATCHES_MAX`] matches per document are reported, each with at most [`TEXT_MAX`] bytes of text, so that memory
//! does not grow with what a corpus shares with its evaluation sets.

use std::path::Path;

use contract::{Result, json};
use serde::{Deserialize, Serialize};
use store::FileRecord;
use store::disk::{self, AtomicFile};

use super::decontaminate::Match;
use crate::corpus::{Corpus, Source};
use crate::recipe::Step;
use crate::recipe::compare::Compare;
use crate::source::Document;

/// The file's name in the source's folder.
pub(crate) const FILE: &str = "contaminated.jsonl";

/// Matches reported per document.
pub(crate) const MATCHES_MAX: usize = 100;

/// Bytes of shared text reported per match.
pub(crate) const TEXT_MAX: usize = 2000;

/// One match of a document, without its file, which the writer adds.
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

/// The reported matches of a document.
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

/// The lists of the decontaminated sources.
pub(super) struct Writer(Vec<Option<AtomicFile>>);

impl Writer {
    /// Creates them in the folders of their sources.
    pub(super) fn new(corpus: &Corpus, store: &Path) -> Result<Self> {
        let list = |source: &Source| {
            let is_ours = |(_, step): &(usize, Step)| {
                matches!(step, Step::Compare(Compare::Decontaminate(_)))
            };
            if !source.recipe.steps.iter().any(is_ours) {
                return Ok(None);
            }
            let folder = store.join(&source.name);
            disk::create_folder(&folder)?;
            AtomicFile::create(&folder.join(FILE)).map(Some)
        };
        Ok(Writer(corpus.sources.iter().map(list).collect::<Result<_>>()?))
    }

    /// Adds the matches of the next document.
    pub(super) fn push(&mut self, source: usize, file: usize, matches: &[Matched]) -> Result<()> {
        let Some(list) = &mut self.0[source] else { return Ok(()) };
        for matched in matches {
            list.put(&json::line(&Line { file, matched }, "a match")?)?;
        }
        Ok(())
    }

    /// Renames the lists to their final names.
    pub(super) fn finish(self) -> Result<Vec<Option<FileRecord>>> {
        let finish = |list: AtomicFile| {
            let folder = disk::folder_of(list.path()).to_owned();
            let record = list.commit()?;
            disk::sync_folder(&folder)?;
            Ok(record)
        };
        self.0.into_iter().map(|list| list.map(finish).transpose()).collect()
    }
}
