//! The recipes of a corpus as the build runs them: on the documents that the dedup scan, if any, did not remove.

use contract::{Fault, Result};

use crate::corpus::{Corpus, Source};
use crate::dedup::{Tools, contaminated, repeats};
use crate::dropped::List;
use crate::filters::{Effect, changed};
use crate::recipe::compare::Compare;
use crate::recipe::run::{NoText, Outcome, Passage};
use crate::recipe::{Recipe, Step};
use crate::source::Document;

/// What the steps did to a kept document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trace {
    /// Bytes of its text before the first step.
    pub(crate) read: u64,
    /// The steps that changed it: place in the recipe, bytes before and after.
    pub(crate) changes: Vec<(usize, u64, u64)>,
}

/// A document that was dropped.
#[derive(Debug)]
pub(crate) struct DroppedRecord {
    /// Why.
    pub(crate) reason: String,
    /// Bytes of its text before the first step.
    pub(crate) bytes: u64,
    /// The same as a fault, for a record without text.
    pub(crate) fault: Fault,
}

/// The recipes of a corpus, ready to run.
pub(crate) struct Prepared<'a> {
    corpus: &'a Corpus,
    tools: &'a Tools<'a>,
    /// What the scan removed, by source.
    lists: Vec<List>,
}

/// The recipe of one source, in one of its files.
pub(crate) struct InFile<'a> {
    recipe: &'a Recipe,
    tools: &'a Tools<'a>,
    /// What the scan removed; without one, every step filters, but documents are not compared with each other.
    list: Option<&'a List>,
    file: usize,
}

impl<'a> Prepared<'a> {
    /// Prepares the recipes, with the scan's lists of removed documents, one per source.
    pub(crate) fn new(corpus: &'a Corpus, tools: &'a Tools<'a>, lists: Vec<List>) -> Self {
        Prepared { corpus, tools, lists }
    }

    /// The recipe for this file of this source; `None` if there is nothing to do.
    pub(crate) fn in_file(&self, source: usize, file: usize) -> Option<InFile<'_>> {
        let (recipe, list) = (&self.corpus.sources[source].recipe, Some(&self.lists[source]));
        (!recipe.is_empty()).then_some(InFile { recipe, tools: self.tools, list, file })
    }
}

impl<'a> InFile<'a> {
    /// The recipe of a source without a scan; `None` if it is empty.
    pub(crate) fn unscanned(source: &'a Source, tools: &'a Tools<'a>) -> Option<Self> {
        let recipe = &source.recipe;
        (!recipe.is_empty()).then_some(InFile { recipe, tools, list: None, file: 0 })
    }

    /// Runs a document through the recipe.
    pub(crate) fn apply(
        &self,
        mut document: Document,
    ) -> std::result::Result<(Document, Trace), DroppedRecord> {
        let record = document.text.len() as u64;
        self.recipe.text(&mut document).map_err(|NoText { reason, fault }| DroppedRecord {
            reason: reason.to_owned(),
            bytes: record,
            fault,
        })?;
        let bytes = document.text.len() as u64;
        let dropped =
            |reason: &str, fault| DroppedRecord { reason: reason.to_owned(), bytes, fault };
        let reason = self.list.and_then(|l| l.reason(self.file, document.group, document.row));
        if let Some(reason) = reason {
            return Err(dropped(reason, Fault::data(reason)));
        }
        let steps = 0..self.recipe.steps.len();
        let trace = Trace { read: bytes, changes: Vec::new() };
        let mut tracing = Tracing { of: self, trace };
        match self.recipe.run(steps, &mut document, self.tools.count(), &mut tracing) {
            Ok(Outcome::Through) => Ok((document, tracing.trace)),
            Ok(Outcome::Dropped { dropped: why, .. }) => {
                Err(dropped(why.reason, Fault::data(why.reason).found(why.found)))
            }
            Ok(Outcome::Refused(fault)) => Err(dropped("refused by the tokenizer", fault)),
            Err(fault) => Err(dropped("refused by a step", fault)),
        }
    }
}

/// Records what changes a document. After a scan, only steps that change documents or come later run.
struct Tracing<'a> {
    of: &'a InFile<'a>,
    trace: Trace,
}

impl Passage for Tracing<'_> {
    fn wants(&self, place: usize, _: &Step) -> bool {
        self.of.list.is_none() || self.of.recipe.runs_again(place)
    }

    fn compare(&mut self, number: usize, step: &Compare, document: &Document) -> Result<Effect> {
        match step {
            Compare::Exact(_) | Compare::Near(_) => Ok(Effect::Kept),
            Compare::Decontaminate(_) => contaminated(self.of.tools, number, &document.text),
            Compare::Repeats(_) => {
                let rest = self.of.list.map_or(Ok(None), |l| l.rest(self.of.file, document))?;
                Ok(changed(rest, repeats::EMPTIED))
            }
        }
    }

    fn hear(&mut self, place: usize, document: &Document, effect: &Effect) {
        if let Effect::Changed(text) = effect {
            self.trace.changes.push((place, document.text.len() as u64, text.len() as u64));
        }
    }
}
