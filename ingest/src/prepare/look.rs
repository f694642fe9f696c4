//! What the survey learns from one document: how far it gets, and what the comparing steps need to know of it.

use contract::{Digest, Fault, Result};
use serde_json::{Value, json};

use super::run::{self, Done, Tools};
use super::words::Text;
use super::{Step, decontaminate, normal, removed};
use crate::corpus::{Corpus, OnError, Source};
use crate::request::always_counted;
use crate::source::{Document, Parsed, Slab};

/// What a comparing step needs to know of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The digest of its text.
    Content(Digest),
    /// The keys of its bands.
    Bands(Vec<u64>),
}

/// One document, looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Looked {
    /// Where it stands in its file.
    pub(crate) at: u64,
    /// Bytes of its text.
    pub(crate) bytes: u64,
    /// The step at which it goes, and why, if that could be told from it alone.
    pub(crate) gone: Option<(u8, &'static str)>,
    /// What the comparing steps before need.
    pub(crate) marks: Vec<(usize, Mark)>,
    /// Hits of evaluation sets; their `file` is for whoever knows its place in the source.
    pub(crate) hits: Vec<Value>,
}

/// Looks at documents, on any thread.
pub(crate) struct Surveyor<'a> {
    pub(crate) corpus: &'a Corpus,
    pub(crate) tools: &'a Tools<'a>,
}

impl Surveyor<'_> {
    /// Looks at the documents of a slab. Records that are none are the build's to count; where it would stop at one, so
    /// does the survey, which comes there first.
    pub(crate) fn look(&self, slab: &Slab, source: usize, file: usize) -> Result<Vec<Looked>> {
        let source = &self.corpus.sources[source];
        let mut looked = Vec::new();
        for parsed in slab.parse(&source.fields)? {
            match parsed {
                Parsed::Document(document) => looked.extend(self.document(document, source, file)?),
                Parsed::Lost { reason, fault, .. } => self.stop(reason, fault)?,
            }
        }
        Ok(looked)
    }

    fn document(
        &self,
        mut document: Document,
        source: &Source,
        file: usize,
    ) -> Result<Option<Looked>> {
        if let Some(mapping) = &source.recipe.mapping {
            match mapping.text(&document.text) {
                Ok(text) if !text.is_empty() => document.text = text,
                Ok(_) => return Ok(None),
                Err(fault) => {
                    let (shown, row) = (&source.files[file].shown, document.row);
                    let place = || match document.group {
                        Some(group) => format!("{shown}: row {row} of group {group}"),
                        None => format!("{shown}:{row}"),
                    };
                    return self.stop("missing text", fault.or_at(place)).map(|()| None);
                }
            }
        }
        let at = removed::address(document.group, document.row).ok_or_else(|| {
            Fault::usage("a file has too many rows to compare its documents")
                .at(source.files[file].shown.clone())
        })?;
        let bytes = document.text.len() as u64;
        let mut looked = Looked { at, bytes, gone: None, marks: Vec::new(), hits: Vec::new() };
        let mut words = None;
        for (number, step) in &source.recipe.steps[..source.recipe.surveyed()] {
            match step {
                Step::Exact(_) => {
                    let content = Digest::of_bytes(document.text.as_bytes());
                    looked.marks.push((*number, Mark::Content(content)));
                    continue;
                }
                Step::Near(_) => {
                    let functions = self.tools.functions(*number)?;
                    let bands = functions.bands(&normal::words(&document.text));
                    looked.marks.extend(bands.map(|bands| (*number, Mark::Bands(bands))));
                    continue;
                }
                Step::Decontaminate(_) => {
                    self.hits(*number, &document, &mut looked)?;
                    if looked.hits.is_empty() {
                        continue;
                    }
                    looked.gone = Some((*number as u8, decontaminate::REASON));
                    break;
                }
                _ => {}
            }
            let text = Text::with_words(&document.text, words.take());
            match run::run(step, *number, &text, self.tools)? {
                Err(drop) => {
                    looked.gone = Some((*number as u8, drop.reason));
                    break;
                }
                Ok(Done::Nothing) => words = text.into_words(),
                Ok(Done::Changed(changed)) => document.text = changed,
            }
        }
        Ok(Some(looked))
    }

    fn stop(&self, reason: &str, fault: Fault) -> Result<()> {
        let counted = self.corpus.on_error == OnError::Skip || always_counted(reason);
        if counted { Ok(()) } else { Err(fault) }
    }

    fn hits(&self, number: usize, document: &Document, looked: &mut Looked) -> Result<()> {
        for hit in self.tools.index(number)?.hits(&document.text) {
            looked.hits.push(json!({
                "file": null, "group": document.group, "row": document.row, "id": document.id,
                "set": hit.set, "item": hit.line, "runs": hit.runs, "text": hit.text,
            }));
        }
        Ok(())
    }
}
