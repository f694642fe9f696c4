//! What the scan saw of every document, on disk, in the order of the store.
//!
//! Bytes on disk: 40 of a document that a step drops, 32 of each for a step `exact-duplicates`, `16 + 8 * bands` for
//! `near-duplicates`, 24 and its text for `repeated-substrings`.

use std::collections::BTreeMap;

use contract::{Digest, Fault, Result};

use super::decided::{Decided, decision, reason};
use crate::corpus::Corpus;
use crate::dedup::Doc;
use crate::dedup::observe::{Mark, Observed};
use crate::dedup::repeats::Texts;
use crate::dedup::sorter::{Scratch, Writer};
use crate::recipe::Step;
use crate::recipe::compare::Compare;

/// What one comparing step needs of all documents that reached it.
pub(super) enum Marks {
    /// The digest of the text, and the document.
    Exact(Writer<4>),
    /// The documents, and their keys in each band.
    Near {
        documents: Writer<2>,
        bands: Vec<Writer<1>>,
    },
    Texts(Texts),
}

impl Marks {
    /// None yet; `None` if the step compares no documents with each other.
    fn new(step: &Step, scratch: &Scratch) -> Result<Option<Self>> {
        let Step::Compare(step) = step else { return Ok(None) };
        Ok(Some(match step {
            Compare::Exact(_) => Marks::Exact(scratch.writer()?),
            Compare::Near(near) => Marks::Near {
                documents: scratch.writer()?,
                bands: (0..near.bands).map(|_| scratch.writer()).collect::<Result<_>>()?,
            },
            Compare::Repeats(_) => Marks::Texts(Texts::create(scratch)?),
            Compare::Decontaminate(_) => return Ok(None),
        }))
    }

    fn push(&mut self, document: Doc, mark: Mark) -> Result<()> {
        let [place, at] = document;
        match (self, mark) {
            (Marks::Exact(texts), Mark::Content(Digest(content))) => {
                texts.push([(content >> 64) as u64, content as u64, place, at])
            }
            (Marks::Near { documents, bands }, Mark::Bands(keys)) => {
                documents.push(document)?;
                bands.iter_mut().zip(keys).try_for_each(|(band, key)| band.push([key]))
            }
            (Marks::Texts(texts), Mark::Text(text)) => texts.push(document, &text),
            _ => Err(Fault::bug("a mark of another step")),
        }
    }
}

/// What was seen of every record with a text.
pub(super) struct Table {
    scratch: Scratch,
    /// The documents that a step drops on its own.
    dropped: Writer<5>,
    reasons: Vec<&'static str>,
    marks: BTreeMap<usize, Marks>,
    last: Option<Doc>,
}

impl Table {
    pub(super) fn new(corpus: &Corpus, scratch: Scratch) -> Result<Self> {
        let mut marks = BTreeMap::new();
        for (number, step) in corpus.sources.iter().flat_map(|source| &source.recipe.steps) {
            if !marks.contains_key(number)
                && let Some(none) = Marks::new(step, &scratch)?
            {
                marks.insert(*number, none);
            }
        }
        let dropped = scratch.writer()?;
        Ok(Table { scratch, dropped, reasons: Vec::new(), marks, last: None })
    }

    /// The next document, in the order of the store.
    pub(super) fn push(&mut self, source: usize, file: usize, observed: Observed) -> Result<()> {
        let document = [(source as u64) << 32 | file as u64, observed.at];
        if self.last.replace(document).is_some_and(|last| last >= document) {
            return Err(Fault::data("the documents of a part are not in order")
                .found(format!("address {} of file {file}", observed.at))
                .hint("delete the parts of this build and run the same command again"));
        }
        if let Some((step, why)) = observed.dropped {
            let reason = reason(&mut self.reasons, why);
            self.dropped.push(decision(document, usize::from(step), reason, document))?;
        }
        for (number, mark) in observed.marks {
            let marks = self.marks.get_mut(&number);
            marks.ok_or_else(|| Fault::bug("a mark of no step"))?.push(document, mark)?;
        }
        Ok(())
    }

    /// Decides the comparing steps in order.
    pub(super) fn decide(self, corpus: &Corpus) -> Result<Decided> {
        let Table { scratch, dropped, reasons, marks, .. } = self;
        let mut decided = Decided::new(scratch, dropped.finish()?, reasons);
        for (number, marks) in marks {
            let mut steps = corpus.sources.iter().flat_map(|source| &source.recipe.steps);
            match steps.find(|(candidate, _)| *candidate == number) {
                Some((_, Step::Compare(step))) => decided.decide(number, marks, step)?,
                _ => return Err(Fault::bug("marks of no step")),
            }
        }
        Ok(decided)
    }
}
