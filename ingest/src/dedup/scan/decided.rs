//! The decisions of the comparing steps, in order, and the lists of them.
//!
//! Each step sorts what it compares, on disk as far as it has to. What it decides
//! is written in the order of documents, and the next step reads it next to its own candidates.

use std::path::Path;

use contract::{Fault, Result};
use store::FileRecord;
use store::disk::{self, AtomicFile};

use super::marks::Marks;
use crate::corpus::Corpus;
use crate::dedup::components::Components;
use crate::dedup::repeats::{self, Texts};
use crate::dedup::sorter::{MEMORY, Merge, Records, Scratch, Writer};
use crate::dedup::{Doc, exact, minhash, normal};
use crate::dropped::{self, Kept, Line, REMOVED};
use crate::recipe::compare::{Compare, Repeats};
use crate::spans::Span;

/// A document, its step (with the reason in the low half), and the document that is kept instead, or a removed span.
/// The first of a document's decisions counts, and spans come last.
type Decision = [u64; 5];

/// In place of a step: a removed span.
const SPAN: u64 = u64::MAX;

/// The decision of step `number` to remove a document; `kept` is the same one if no other is kept instead.
pub(super) fn decision(document: Doc, number: usize, reason: usize, kept: Doc) -> Decision {
    let ([place, at], [kept_place, kept_at]) = (document, kept);
    [place, at, (number as u64) << 32 | reason as u64, kept_place, kept_at]
}

fn source_of([place, _]: Doc) -> usize {
    (place >> 32) as usize
}

fn file_of([place, _]: Doc) -> usize {
    place as u32 as usize
}

/// About the most bytes that a step needs on disk for so many documents: each is a candidate, joined to another one in
/// every band, and removed.
pub(crate) fn disk_bytes(step: &Compare, documents: u64, text_bytes: u64) -> u64 {
    let word = 8;
    let words = match step {
        // Each is seen, sorted, paired and removed.
        Compare::Exact(_) => 4 + 4 + 4 + 5,
        Compare::Near(near) => 2 + near.bands + 3 + 4 * near.bands + 5,
        Compare::Repeats(_) => 3 + 5,
        Compare::Decontaminate(_) => return 0,
    };
    let texts = if matches!(step, Compare::Repeats(_)) { text_bytes } else { 0 };
    documents.saturating_mul(words * word).saturating_add(texts)
}

/// The most bytes that a step holds in memory while it is decided.
pub(crate) fn memory_bytes(step: &Compare) -> u64 {
    match step {
        Compare::Repeats(step) => MEMORY.max(repeats::FACTOR.saturating_mul(step.partition_bytes)),
        Compare::Exact(_) | Compare::Near(_) => MEMORY,
        Compare::Decontaminate(_) => 0,
    }
}

/// What is decided.
pub(super) struct Decided {
    scratch: Scratch,
    /// What steps drop on their own.
    dropped: Records<5>,
    /// What each comparing step decided.
    compared: Vec<Records<5>>,
    reasons: Vec<&'static str>,
}

impl Decided {
    pub(super) fn new(scratch: Scratch, dropped: Records<5>, reasons: Vec<&'static str>) -> Self {
        Decided { scratch, dropped, compared: Vec::new(), reasons }
    }

    /// Decides a step. Those before it are decided.
    pub(super) fn decide(&mut self, number: usize, marks: Marks, step: &Compare) -> Result<()> {
        let decided = match (marks, step) {
            (Marks::Exact(texts), Compare::Exact(step)) => {
                let reason = reason(&mut self.reasons, exact::REASON);
                self.removed(self.exact(texts, step.across)?, number, reason)?
            }
            (Marks::Near { documents, bands }, Compare::Near(step)) => {
                let reason = reason(&mut self.reasons, minhash::REASON);
                self.removed(self.near(documents, bands, step.across)?, number, reason)?
            }
            (Marks::Texts(texts), Compare::Repeats(step)) => self.repeats(texts, step)?,
            _ => return Err(Fault::bug("marks of another step")),
        };
        self.compared.push(decided);
        Ok(())
    }

    /// Writes documents that step `number` removes, each with one that is kept.
    fn removed(&self, mut pairs: Merge<'_, 4>, number: usize, reason: usize) -> Result<Records<5>> {
        let mut removed = self.scratch.writer()?;
        while let Some([a, b, c, d]) = pairs.next()? {
            removed.push(decision([a, b], number, reason, [c, d]))?;
        }
        removed.finish()
    }

    fn exact(&self, texts: Writer<4>, across: bool) -> Result<Merge<'_, 4>> {
        let texts = texts.finish()?;
        let (mut texts, mut pairs) = (texts.read()?, self.scratch.sorter());
        let equal = |[a, b]: Doc, [c, d]: Doc| pairs.push([a, b, c, d]);
        self.alike(across, || texts.next(), equal)?;
        pairs.finish()
    }

    fn near(
        &self,
        documents: Writer<2>,
        bands: Vec<Writer<1>>,
        across: bool,
    ) -> Result<Merge<'_, 4>> {
        let documents = documents.finish()?;
        let mut components = Components::new(&self.scratch);
        for band in bands {
            let band = band.finish()?;
            let (mut documents, mut keys) = (documents.read()?, band.read()?);
            let entry = || {
                let (document, key) = (documents.next()?, keys.next()?);
                Ok(document.zip(key).map(|([place, at], [key])| [key, place, at]))
            };
            self.alike(across, entry, |document, first| components.join(document, first))?;
        }
        components.least()
    }

    /// Calls `found` with every candidate whose entry is that of an earlier one but for the document, which it ends
    /// with, and with the first of these.
    fn alike<const N: usize>(
        &self,
        across: bool,
        mut entry: impl FnMut() -> Result<Option<[u64; N]>>,
        mut found: impl FnMut(Doc, Doc) -> Result<()>,
    ) -> Result<()> {
        let document_of = |entry: &[u64; N]| [entry[N - 2], entry[N - 1]];
        let (mut sorter, mut removed) = (self.scratch.sorter(), Removed::by(&self.compared)?);
        while let Some(mut entry) = entry()? {
            let document = document_of(&entry);
            if removed.holds(document)? {
                continue;
            }
            if !across {
                entry[0] ^= normal::mixed(1 + source_of(document) as u64);
            }
            sorter.push(entry)?;
        }
        let (mut sorted, mut first) = (sorter.finish()?, None::<[u64; N]>);
        while let Some(entry) = sorted.next()? {
            match first {
                Some(first) if entry[..N - 2] == first[..N - 2] => {
                    found(document_of(&entry), document_of(&first))?;
                }
                _ => first = Some(entry),
            }
        }
        Ok(())
    }

    fn repeats(&self, texts: Texts, step: &Repeats) -> Result<Records<5>> {
        let (mut removed, mut spans) = (Removed::by(&self.compared)?, self.scratch.writer()?);
        let group = |document| if step.across { 0 } else { source_of(document) };
        let own = |document| Ok((!removed.holds(document)?).then(|| group(document)));
        let span = |[place, at]: Doc, (start, end): Span| {
            spans.push([place, at, SPAN, u64::from(start), u64::from(end)])
        };
        texts.decide(step, own, span)?;
        spans.finish()
    }

    /// Writes the list of removed documents of each source.
    pub(super) fn write(&self, corpus: &Corpus, store: &Path) -> Result<Vec<Vec<FileRecord>>> {
        let mut decisions = Merge::of([&self.dropped].into_iter().chain(&self.compared))?;
        let mut files = Vec::new();
        for (number, source) in corpus.sources.iter().enumerate() {
            if source.recipe.scanned() == 0 {
                files.push(Vec::new());
                continue;
            }
            let folder = store.join(&source.name);
            disk::create_folder(&folder)?;
            let mut writer = dropped::Writer::new(AtomicFile::create(&folder.join(REMOVED))?)?;
            while let Some([place, at, ..]) = decisions.peek()
                && source_of([place, at]) == number
            {
                writer.push(&self.line(corpus, &mut decisions, [place, at])?)?;
            }
            files.push(vec![writer.finish()?.commit()?]);
            disk::sync_folder(&folder)?;
        }
        Ok(files)
    }

    /// The line of a document, from its decisions.
    fn line(&self, corpus: &Corpus, decisions: &mut Merge<'_, 5>, document: Doc) -> Result<Line> {
        let (mut removed, mut spans) = (None, Vec::new());
        while let Some([place, at, step, a, b]) = decisions.peek()
            && document == [place, at]
        {
            decisions.next()?;
            match step {
                SPAN => spans.push((a as u32, b as u32)),
                _ if removed.is_none() => removed = Some((step as u32 as usize, [a, b])),
                _ => {}
            }
        }
        let (reason, kept) = match removed {
            None => (repeats::REASON, None),
            Some((reason, kept)) => (self.reasons[reason], (kept != document).then_some(kept)),
        };
        let kept = kept
            .map(|kept| Kept::at(&corpus.sources[source_of(kept)].name, file_of(kept), kept[1]));
        Ok(Line::of_scan(file_of(document), document[1], reason, kept, &spans))
    }
}

/// The documents that steps removed, looked up in ascending order.
struct Removed<'a>(Merge<'a, 5>);

impl Removed<'_> {
    fn by(steps: &[Records<5>]) -> Result<Self> {
        Merge::of(steps).map(Removed)
    }

    fn holds(&mut self, document: Doc) -> Result<bool> {
        while let Some([place, at, ..]) = self.0.peek()
            && [place, at] < document
        {
            self.0.next()?;
        }
        let removed = |[place, at, step, ..]: Decision| [place, at] == document && step != SPAN;
        Ok(self.0.peek().is_some_and(removed))
    }
}

/// The number of a reason.
pub(super) fn reason(reasons: &mut Vec<&'static str>, reason: &'static str) -> usize {
    let known = reasons.iter().position(|known| *known == reason);
    known.unwrap_or_else(|| {
        reasons.push(reason);
        reasons.len() - 1
    })
}

#[cfg(test)]
mod tests;
