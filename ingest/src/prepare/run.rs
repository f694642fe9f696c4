//! Running a recipe on one document.

use std::collections::BTreeMap;
use std::path::Path;

use contract::{Fault, Result};

use super::decontaminate::{self, Index};
use super::minhash::Functions;
use super::removed::List;
use super::words::Text;
use super::{Drop, Recipe, Step};
use crate::corpus::{Corpus, Source};
use crate::source::Document;
use crate::tokenize::Tokenizer;

/// What one document went through, if it came out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trace {
    /// Bytes of its text before the first step.
    pub(crate) read: u64,
    /// The steps that changed it: number in the recipe, bytes before and after.
    pub(crate) changes: Vec<(usize, u64, u64)>,
}

/// A document that does not come out.
#[derive(Debug)]
pub(crate) struct Lost {
    /// Why.
    pub(crate) reason: String,
    /// Bytes of its text before the first step.
    pub(crate) bytes: u64,
    /// The same as an error, for a record that has no text.
    pub(crate) fault: Fault,
}

/// What one step did.
pub(crate) enum Done {
    /// Looked, and found nothing wrong.
    Nothing,
    /// Another text.
    Changed(String),
}

/// What steps need beside a text, made once.
pub(crate) struct Tools<'a> {
    tokenizer: Option<(&'a Tokenizer, usize)>,
    indexes: BTreeMap<usize, Index>,
    functions: BTreeMap<usize, Functions>,
}

impl<'a> Tools<'a> {
    /// Makes what the steps of `corpus` need. `tokenizer` comes with the tokens put around each document; without one,
    /// steps that count tokens do nothing.
    pub(crate) fn new(corpus: &Corpus, tokenizer: Option<(&'a Tokenizer, usize)>) -> Result<Self> {
        let mut tools = Tools { tokenizer, indexes: BTreeMap::new(), functions: BTreeMap::new() };
        for (number, step) in corpus.sources.iter().flat_map(|source| &source.recipe.steps) {
            match step {
                Step::Near(near) => {
                    tools.functions.entry(*number).or_insert_with(|| Functions::new(near));
                }
                Step::Decontaminate(step) if !tools.indexes.contains_key(number) => {
                    tools.indexes.insert(*number, Index::read(step)?);
                }
                _ => {}
            }
        }
        Ok(tools)
    }

    /// The evaluation sets of a step.
    pub(crate) fn index(&self, number: usize) -> Result<&Index> {
        self.indexes.get(&number).ok_or_else(|| Fault::bug("a step without its sets"))
    }

    /// The random functions of a step.
    pub(crate) fn functions(&self, number: usize) -> Result<&Functions> {
        self.functions.get(&number).ok_or_else(|| Fault::bug("a step without its functions"))
    }

    /// Tells what evaluation items are too short to be found.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        let short = self.indexes.values().map(|index| index.short).filter(|(short, _)| *short > 0);
        short.map(|(short, all)| {
            format!("{short} of {all} evaluation items are shorter than a run of words and cannot be found")
        })
    }
}

/// The recipes of a corpus, ready to run.
pub(crate) struct Prepared<'a> {
    corpus: &'a Corpus,
    tools: &'a Tools<'a>,
    /// What the survey removed, by source.
    lists: Vec<List>,
}

/// The recipe of one source, in one of its files.
pub(crate) struct InFile<'a> {
    recipe: &'a Recipe,
    tools: &'a Tools<'a>,
    /// What the survey removed; without one every step judges, and none compares documents with each other.
    list: Option<&'a List>,
    file: usize,
}

impl<'a> Prepared<'a> {
    /// Gets everything ready; what the survey removed is read from `store`.
    pub(crate) fn new(corpus: &'a Corpus, tools: &'a Tools<'a>, store: &Path) -> Result<Self> {
        let list = |source: &Source| match source.recipe.surveyed() {
            0 => Ok(List::default()),
            _ => List::read(store, &source.name),
        };
        let lists = corpus.sources.iter().map(list).collect::<Result<_>>()?;
        Ok(Prepared { corpus, tools, lists })
    }

    /// Gets everything ready, with the lists of what the survey removed, one for each source.
    pub(crate) fn with(corpus: &'a Corpus, tools: &'a Tools<'a>, lists: Vec<List>) -> Self {
        Prepared { corpus, tools, lists }
    }

    /// What is to be done in this file of this source; `None` if nothing is.
    pub(crate) fn in_file(&self, source: &str, file: &str) -> Option<InFile<'_>> {
        let number = self.corpus.sources.iter().position(|candidate| candidate.name == source)?;
        let source = &self.corpus.sources[number];
        if source.recipe.is_empty() {
            return None;
        }
        // Files are sorted by the path that is shown.
        let file = source.files.binary_search_by(|found| found.shown.as_str().cmp(file));
        let file = file.expect("the reader names a file of the source");
        let list = Some(&self.lists[number]);
        Some(InFile { recipe: &source.recipe, tools: self.tools, list, file })
    }
}

impl<'a> InFile<'a> {
    /// The recipe of a source where there was no survey; `None` if it is empty.
    pub(crate) fn unsurveyed(source: &'a Source, tools: &'a Tools<'a>) -> Option<Self> {
        let recipe = &source.recipe;
        (!recipe.is_empty()).then_some(InFile { recipe, tools, list: None, file: 0 })
    }

    /// Takes a document through.
    pub(crate) fn apply(
        &self,
        mut document: Document,
    ) -> std::result::Result<(Document, Trace), Lost> {
        if let Some(mapping) = &self.recipe.mapping {
            document.text = mapped(mapping, &document.text)?;
        }
        let bytes = document.text.len() as u64;
        let lost = |reason: &str, fault| Lost { reason: reason.to_owned(), bytes, fault };
        let reason = self.list.and_then(|l| l.reason(self.file, document.group, document.row));
        if let Some(reason) = reason {
            return Err(lost(reason, Fault::data(reason)));
        }
        let survey = self.list.is_some();
        let mut trace = Trace { read: bytes, changes: Vec::new() };
        let mut words = None;
        for (place, (number, step)) in self.recipe.steps.iter().enumerate() {
            if survey && !self.recipe.runs_again(place) {
                continue;
            }
            let text = Text::with_words(&document.text, words.take());
            match run(step, *number, &text, self.tools) {
                Err(fault) => return Err(lost("refused by the tokenizer", fault)),
                Ok(Err(drop)) => {
                    return Err(lost(drop.reason, Fault::data(drop.reason).found(drop.found)));
                }
                Ok(Ok(Done::Nothing)) => words = text.into_words(),
                Ok(Ok(Done::Changed(changed))) => {
                    let before = document.text.len() as u64;
                    document.text = changed;
                    trace.changes.push((place, before, document.text.len() as u64));
                }
            }
        }
        Ok((document, trace))
    }
}

/// The text of a record.
fn mapped(mapping: &super::record::Mapping, record: &str) -> std::result::Result<String, Lost> {
    let lost =
        |reason: &str, fault| Lost { reason: reason.to_owned(), bytes: record.len() as u64, fault };
    let text = mapping.text(record).map_err(|fault| {
        lost(
            "missing text",
            fault.hint("mend it, or set on_error = \"skip\" to count such records and go on"),
        )
    })?;
    if text.is_empty() {
        return Err(lost("empty", Fault::data("the document is empty")));
    }
    Ok(text)
}

/// Runs one step on one text. What compares documents with each other is the survey's, and does nothing here.
pub(crate) fn run(
    step: &Step,
    number: usize,
    text: &Text<'_>,
    tools: &Tools<'_>,
) -> Result<std::result::Result<Done, Drop>> {
    let judged = |drop: Option<Drop>| drop.map_or(Ok(Done::Nothing), Err);
    Ok(match step {
        Step::Clean(step) => changed(step.change(text.text), "clean: nothing left"),
        Step::Length(step) => judged(step.judge(text)),
        Step::GopherQuality(step) => judged(step.judge(text)),
        Step::GopherRepetition(step) => judged(step.judge(text)),
        Step::C4(step) => step
            .change(text.text)
            .and_then(|kept| changed((kept != text.text).then_some(kept), "c4: nothing left")),
        Step::FineWeb(step) => judged(step.judge(text)),
        Step::Exact(_) | Step::Near(_) => Ok(Done::Nothing),
        Step::Decontaminate(_) => {
            let hits = tools.index(number)?.hits(text.text);
            judged(hits.first().map(|hit| {
                Drop::new(
                    decontaminate::REASON,
                    format!("{} item {}: {:?}", hit.set, hit.line, hit.text),
                )
            }))
        }
        Step::Trim(step) => match tools.tokenizer {
            None => Ok(Done::Nothing),
            Some((tokenizer, around)) => {
                let count = |text: &str| Ok(tokenizer.encode(text)?.len() + around);
                step.change(text.text, &count)?.and_then(|kept| changed(kept, "trim: nothing left"))
            }
        },
    })
}

fn changed(text: Option<String>, emptied: &'static str) -> std::result::Result<Done, Drop> {
    match text {
        None => Ok(Done::Nothing),
        Some(text) if text.is_empty() => Err(Drop::new(emptied, 0)),
        Some(text) => Ok(Done::Changed(text)),
    }
}
