//! The dedup scan's view of one document: how far it gets, and what the comparing steps need to know about it.

use contract::{Digest, Fault, Result};

use super::matches::{self, Matched};
use super::tools::Tools;
use super::{decontaminate, normal};
use crate::corpus::{Corpus, Source, count_or_stop};
use crate::dropped;
use crate::filters::{Dropped, Effect};
use crate::recipe::compare::Compare;
use crate::recipe::run::{Outcome, Passage};
use crate::source::{Document, Parsed, Slab};

/// What a comparing step needs to know of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The digest of its text.
    Content(Digest),
    /// The keys of its bands.
    Bands(Vec<u64>),
    /// Its text.
    Text(String),
}

/// One document as seen by the scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Observed {
    /// Its position in its file.
    pub(crate) at: u64,
    /// Bytes of its text.
    pub(crate) bytes: u64,
    /// The step that drops it, and why, if the document alone determines that.
    pub(crate) dropped: Option<(u8, &'static str)>,
    /// What the comparing steps up to there need.
    pub(crate) marks: Vec<(usize, Mark)>,
    /// What it shares with evaluation sets.
    pub(crate) matches: Vec<Matched>,
}

impl Observed {
    /// Renames its steps; `None` if one has no new name.
    pub(crate) fn renamed(&mut self, name: impl Fn(usize) -> Option<usize>) -> Option<()> {
        if let Some((step, _)) = &mut self.dropped {
            *step = name(usize::from(*step))? as u8;
        }
        for (step, _) in &mut self.marks {
            *step = name(*step)?;
        }
        Some(())
    }
}

/// Analyzes documents, on any thread.
pub(super) struct Observer<'a> {
    pub(super) corpus: &'a Corpus,
    pub(super) tools: &'a Tools<'a>,
}

impl Observer<'_> {
    /// Analyzes the documents of a slab. Bad records are counted by the build, not here; but where the build would stop
    /// at one, so does the scan, which reads it first.
    pub(super) fn slab(&self, slab: &Slab, source: usize, file: usize) -> Result<Vec<Observed>> {
        let source = &self.corpus.sources[source];
        let mut observed = Vec::new();
        for parsed in slab.parse(&source.fields)? {
            match parsed {
                Parsed::Document(document) => {
                    observed.extend(self.document(document, source, file)?);
                }
                Parsed::Dropped { reason, fault, .. } => count_or_stop(self.corpus, reason, fault)?,
            }
        }
        Ok(observed)
    }

    fn document(
        &self,
        mut document: Document,
        source: &Source,
        file: usize,
    ) -> Result<Option<Observed>> {
        let shown = &source.files[file].shown;
        if let Err(none) = source.recipe.text(&mut document) {
            let fault = none.fault.or_at(|| document.place(shown));
            return count_or_stop(self.corpus, none.reason, fault).map(|()| None);
        }
        let at = dropped::address(document.group, document.row).ok_or_else(|| {
            Fault::usage("a file has too many rows to compare its documents").at(shown.clone())
        })?;
        let bytes = document.text.len() as u64;
        let mut marking = Marking { tools: self.tools, marks: Vec::new(), matches: Vec::new() };
        let steps = 0..source.recipe.scanned();
        let outcome = source.recipe.run(steps, &mut document, self.tools.count(), &mut marking)?;
        let Marking { marks, matches, .. } = marking;
        let dropped = match outcome {
            Outcome::Through => None,
            Outcome::Dropped { number, dropped, .. } => Some((number as u8, dropped.reason)),
            Outcome::Refused(fault) => {
                let fault = fault.or_at(|| document.place(shown));
                return count_or_stop(self.corpus, "refused by the tokenizer", fault)
                    .map(|()| None);
            }
        };
        Ok(Some(Observed { at, bytes, dropped, marks, matches }))
    }
}

/// Collects what the comparing steps need. Only evaluation sets can drop a document on its own.
struct Marking<'a> {
    tools: &'a Tools<'a>,
    marks: Vec<(usize, Mark)>,
    matches: Vec<Matched>,
}

impl Passage for Marking<'_> {
    fn compare(&mut self, number: usize, step: &Compare, document: &Document) -> Result<Effect> {
        match step {
            Compare::Exact(_) => {
                let content = Digest::of_bytes(document.text.as_bytes());
                self.marks.push((number, Mark::Content(content)));
            }
            Compare::Near(_) => {
                let functions = self.tools.functions(number)?;
                let bands = functions.bands(&normal::words(&document.text));
                self.marks.extend(bands.map(|bands| (number, Mark::Bands(bands))));
            }
            Compare::Repeats(_) => {
                self.marks.push((number, Mark::Text(document.text.clone())));
            }
            Compare::Decontaminate(_) => {
                let found = self.tools.index(number)?.matches(&document.text);
                if !found.is_empty() {
                    self.matches.extend(matches::told(document, &found));
                    return Ok(Effect::Dropped(Dropped::new(decontaminate::REASON, found.len())));
                }
            }
        }
        Ok(Effect::Kept)
    }
}

/// The decontamination result for a document that no scan has seen.
pub(crate) fn contaminated(tools: &Tools<'_>, number: usize, text: &str) -> Result<Effect> {
    let found = tools.index(number)?.matches(text);
    Ok(found.first().map_or(Effect::Kept, |first| {
        let found = format!("{} item {}: {:?}", first.set, first.line, first.text);
        Effect::Dropped(Dropped::new(decontaminate::REASON, found))
    }))
}
