//! What the scan saw of every document, on disk, in the order of the store.

use std::collections::BTreeMap;

use contract::{Fault, Result};

use super::decided::{Decided, decision, reason};
use super::marks::Marks;
use crate::corpus::Corpus;
use crate::dedup::Doc;
use crate::dedup::observe::Observed;
use crate::dedup::sorter::{Scratch, Writer};
use crate::recipe::Step;

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
            if let Step::Compare(step) = step
                && !marks.contains_key(number)
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
                .hint("delete this part and run its task again"));
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
