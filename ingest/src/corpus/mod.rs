//! `corpus.toml`: which files become a store, and how. `ingest/docs/corpus.md` has the schema.
//!
//! ```text
//! text --parse--> Spec (pure: no file access) --find--> Inventory (files, formats, sets identified) --> Corpus
//! ```
//!
//! The inventory is stored with the plan of a build, and its tasks read it from there: nothing is searched for twice.
//!
//! Every wrong key or value is refused with its place; an unknown key is answered with the nearest known one.

mod braces;
mod files;
mod parse;
mod resolve;
mod spec;
mod steps;

use std::collections::BTreeMap;
use std::ops::Range;

use contract::{Class, Fault, Ratio, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use settings::{File, Spanned, Value};
use store::Location;

pub(crate) use files::bracketed;
pub(crate) use parse::check_name;
pub use parse::{MAX_DOCUMENT_BYTES, PART_BYTES, schema};
pub(crate) use resolve::Inventory;
pub use spec::Spec;
#[cfg(test)]
pub(crate) use steps::STEPS;

use crate::progress::meanwhile;
use crate::recipe::{self, Recipe};
pub use crate::source::SourceFile;
use crate::source::{Cut, Fields};

/// What to do with a record that is not a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// Refuse the build, naming the record.
    #[default]
    Stop,
    /// Leave it out and count it.
    Skip,
}

/// A corpus, resolved: what a build reads.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// The corpus file.
    pub file: Location,
    /// Its text.
    pub(crate) text: String,
    /// The tokenizer; training one needs none.
    pub tokenizer: Option<Location>,
    /// Tokens in a unit.
    pub unit: u64,
    /// The share of documents that are held out.
    pub validation: Ratio,
    /// The token put before each document.
    pub begin: Option<String>,
    /// The token put after each document.
    pub end: Option<String>,
    /// Bytes of input files that a part of the store is made of: decides files, not content.
    pub part_bytes: u64,
    /// The largest document.
    pub max_document_bytes: u64,
    /// What to do with a record that is not a document.
    pub on_error: OnError,
    /// The sources, in order.
    pub sources: Vec<Source>,
}

/// One `[[source]]`.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its name, also its folder in the store.
    pub name: String,
    /// Its files, sorted.
    pub files: Vec<SourceFile>,
    /// The paths of text and id in a record.
    pub fields: Fields,
    /// The processing of its documents before they are encoded.
    pub recipe: Recipe,
}

/// The inputs of one part of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartInputs {
    /// Their source.
    pub(crate) source: usize,
    /// Its files.
    pub(crate) files: Range<usize>,
    /// The groups of the only file, if other parts have the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cut: Option<Cut>,
}

impl PartInputs {
    /// Whole files.
    pub(crate) fn files(source: usize, files: Range<usize>) -> Self {
        PartInputs { source, files, cut: None }
    }

    /// The first group that is read of the first file.
    pub(crate) fn first_group(&self) -> u32 {
        self.cut.as_ref().map_or(0, |cut| cut.groups.start)
    }

    /// Whether a record at this place of its source comes after these inputs.
    pub(crate) fn are_before(&self, file: usize, group: Option<u32>) -> bool {
        let ended = |cut: &Cut| file == self.files.start && group >= Some(cut.groups.end);
        self.files.end <= file || self.cut.as_ref().is_some_and(ended)
    }
}

impl Corpus {
    /// Reads a corpus file and finds its inputs.
    pub fn read(file: impl Into<Location>) -> Result<Corpus> {
        let place = file.into();
        if let Some(folder) = place.local().filter(|path| path.is_dir()) {
            let is_store = folder.join(store::open::MANIFEST).is_file();
            let what = if is_store { "a store" } else { "a folder" };
            return Err(Fault::usage(format!("this is {what}, and a corpus file is wanted here"))
                .at(place.to_string())
                .hint(
                    "name the TOML file that says which inputs, as in `zdata build corpus.toml`",
                ));
        }
        let bytes = place.read().map_err(|error| place.fault("read", &error))?;
        let file = File::from_bytes(place.to_string(), bytes)?;
        let spec = Spec::parse(&file)?;
        let found = meanwhile("corpus", "looking for inputs", || spec.find(&place))?;
        spec.resolve(place, file.text(), found)
    }

    /// The corpus of a text, with the inventory from when it was read: nothing is searched for.
    pub(crate) fn found(place: Location, text: &str, found: Inventory) -> Result<Corpus> {
        let file = File::from_bytes(place.to_string(), text.as_bytes().to_vec())?;
        Spec::parse(&file)?.resolve(place, text, found)
    }

    /// The place of a key of the corpus file itself.
    pub(crate) fn place_of(&self, key: &str) -> String {
        let file = File::new(self.file.to_string(), self.text.clone());
        let keys: BTreeMap<String, Spanned<Value>> = file.parse().unwrap_or_default();
        keys.get(key).map_or_else(|| self.file.to_string(), |value| file.place(value.span()))
    }

    /// The total size of its files.
    pub(crate) fn bytes(&self) -> Result<u64> {
        self.sources.iter().flat_map(|source| &source.files).map(SourceFile::size).sum()
    }

    /// The corpus with some inputs of one source.
    pub(crate) fn cut(&self, inputs: &PartInputs) -> Corpus {
        let Source { name, files, fields, recipe } = &self.sources[inputs.source];
        let mut files = files[inputs.files.clone()].to_vec();
        files.iter_mut().for_each(|file| file.cut.clone_from(&inputs.cut));
        let (name, fields, recipe) = (name.clone(), fields.clone(), recipe.clone());
        self.of(Source { name, files, fields, recipe })
    }

    /// The corpus with this source as its only one.
    fn of(&self, source: Source) -> Corpus {
        let Corpus { file, text: _, tokenizer, begin, end, sources: _, .. } = self;
        Corpus {
            file: file.clone(),
            text: String::new(),
            tokenizer: tokenizer.clone(),
            begin: begin.clone(),
            end: end.clone(),
            sources: vec![source],
            ..*self
        }
    }
}

/// Whether a build of `corpus` stops at a record that is not a document for this reason.
pub(crate) fn stops(corpus: &Corpus, reason: &str) -> bool {
    corpus.on_error == OnError::Stop && !always_counted(reason)
}

/// Whether a dropped record is counted even where others stop the build.
pub(crate) fn always_counted(reason: &str) -> bool {
    matches!(reason, "empty" | "no tokens") || recipe::is_reason(reason)
}

/// The fault that drops a record. Only data faults do, whatever the corpus says: a lack of memory, a changed file or a
/// bug of ours says nothing about the record.
pub(crate) fn drops(fault: Fault) -> Result<Fault> {
    if fault.class() == Class::Data { Ok(fault) } else { Err(fault) }
}

/// Counts a record that is not a document, or stops where the corpus says so.
pub(crate) fn count_or_stop(corpus: &Corpus, reason: &str, fault: Fault) -> Result<()> {
    let fault = drops(fault)?;
    if stops(corpus, reason) { Err(fault) } else { Ok(()) }
}
