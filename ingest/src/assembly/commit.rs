//! The committer: turns documents in input order into the sources of a store, one after the other.

use std::path::{Path, PathBuf};

use contract::{Fault, Result, note};
use store::{DocumentRecord, InputRecord, Manifest, PreparedRecord, SourceRecord};

use super::filling::Filling;
use super::pipeline::{self, Encoded, Item, Step};
use super::request;
use crate::corpus::{Corpus, Source, stops};
use crate::dropped::Line;
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::source::Row;

/// The state of a store under construction.
pub(crate) struct Committer<'a> {
    corpus: &'a Corpus,
    store: &'a Path,
    /// The store's manifest without sources.
    empty: &'a Manifest,
    progress: &'a mut Progress,
    /// The completed sources.
    pub(crate) sources: Vec<SourceRecord>,
    /// The open source; none after the last one.
    open: Option<Filling>,
    /// Records of its open file so far.
    documents: u64,
    /// Whether a record of that source has its own id.
    named: bool,
    /// For each source, the list of what a scan removed from it.
    scanned: Vec<Option<PathBuf>>,
}

impl<'a> Committer<'a> {
    /// Begins a store in the empty folder `store`; `scanned` holds, for each source, the list of what a scan removed.
    pub(crate) fn new(
        corpus: &'a Corpus,
        store: &'a Path,
        empty: &'a Manifest,
        scanned: Vec<Option<PathBuf>>,
        progress: &'a mut Progress,
    ) -> Result<Self> {
        let (sources, open, documents, named) = (Vec::new(), None, 0, false);
        let mut committer =
            Committer { corpus, store, empty, progress, sources, open, documents, named, scanned };
        committer.begin()?;
        Ok(committer)
    }

    /// Begins the next source, if there is one.
    fn begin(&mut self) -> Result<()> {
        let source = self.sources.len();
        let record = self.empty.sources.get(source).cloned();
        let begun = record.map(|record| {
            let scanned = self.scanned[source].as_deref();
            Filling::new(self.store, self.empty, record, scanned, self.corpus.shard_tokens)
        });
        self.open = begun.transpose()?;
        Ok(())
    }

    /// The open source.
    fn open(&mut self) -> Result<&mut Filling> {
        self.open.as_mut().ok_or_else(|| Fault::bug("a step behind the last source"))
    }

    fn source(&self) -> &'a Source {
        &self.corpus.sources[self.sources.len()]
    }

    /// The index of the source's open file.
    fn file(&mut self) -> Result<usize> {
        Ok(self.open()?.record.inputs.len())
    }

    /// Takes the next step in input order.
    pub(crate) fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Slab { items, raw_bytes } => {
                self.progress.within(raw_bytes);
                items.into_iter().try_for_each(|item| self.item(item))?;
            }
            Step::FileEnd(input) => self.file_end(input)?,
            Step::SourceEnd => self.source_end()?,
        }
        self.progress.tick();
        Ok(())
    }

    fn item(&mut self, item: Item) -> Result<()> {
        self.documents += 1;
        self.named |= match &item {
            Item::Document(document) => document.id.is_some(),
            Item::Dropped(dropped) => dropped.id.is_some(),
        };
        match item {
            Item::Document(document) => self.document(*document),
            Item::Dropped(dropped) => {
                let pipeline::Dropped { reason, row, id, bytes, fault } = *dropped;
                let Row { group, row } = row;
                let (file, reason) = (self.file()?, reason.into_owned());
                let (bytes, kept, spans) = (Some(bytes), None, Vec::new());
                self.dropped(Line { file, group, row, id, reason, bytes, kept, spans }, fault)
            }
        }
    }

    fn dropped(&mut self, line: Line, fault: Fault) -> Result<()> {
        let (reason, bytes) = (line.reason.as_str(), line.bytes.unwrap_or_default());
        if stops(self.corpus, reason) {
            let file = &self.source().files[line.file];
            return Err(fault.or_at(|| file.shown.clone()));
        }
        self.prepared(|prepared, _| prepared.read_bytes += bytes)?;
        self.open()?.dropped(line)
    }

    fn document(&mut self, document: Encoded) -> Result<()> {
        let Encoded { id, row, group, bytes, text_bytes, trace, split, tokens, .. } = document;
        if let Some(trace) = trace {
            self.prepared(|prepared, recipe| {
                prepared.read_bytes += trace.read;
                trace.changes.iter().for_each(|change| recipe.count(*change, prepared));
            })?;
        }
        let file = self.file()?;
        let source = self.source();
        let kept = self.open()?.listing.kept(file, Row { group, row });
        kept.map_err(|fault| fault.or_at(|| source.files[file].shown.clone()))?;
        let record = DocumentRecord {
            id: id.unwrap_or_else(|| anonymous(file, group, row)),
            file: u32::try_from(file).map_err(|_| Fault::usage("a source has too many files"))?,
            row,
            group,
            bytes,
            first_token: 0,
            tokens: tokens.len() as u64,
        };
        self.progress.document(text_bytes, tokens.len() as u64);
        self.open()?.push(split, &tokens, record, text_bytes)
    }

    /// Counts what preparation steps did, if the open source has any.
    fn prepared(&mut self, count: impl FnOnce(&mut PreparedRecord, &Recipe)) -> Result<()> {
        let recipe = &self.source().recipe;
        if !recipe.is_empty() {
            count(self.open()?.record.prepared.get_or_insert_default(), recipe);
        }
        Ok(())
    }

    fn file_end(&mut self, mut input: InputRecord) -> Result<()> {
        input.documents = std::mem::take(&mut self.documents);
        self.progress.file(input.bytes);
        self.open()?.record.inputs.push(input);
        Ok(())
    }

    fn source_end(&mut self) -> Result<()> {
        let source = self.source();
        let Some(open) = self.open.take() else {
            return Err(Fault::bug("a source ends that has not begun"));
        };
        self.tell_of_ids(&open.record);
        let awaited = open.listing.awaited().and_then(|file| source.files.get(file));
        let place = || awaited.map(|file| file.shown.clone()).unwrap_or_default();
        self.sources.push(open.finish().map_err(|fault| fault.or_at(place))?);
        self.begin()
    }

    /// Notes a source that ends whose records have their own ids although its settings name no id field.
    fn tell_of_ids(&mut self, record: &SourceRecord) {
        let source = self.source();
        let read = record.inputs.iter().any(|input| input.documents > 0);
        if let (Some(id), false, true) = (&source.fields.id, self.named, read) {
            self.progress.aside(|| note!("{}", request::nameless(&source.name, id)));
        }
        self.named = false;
    }
}

/// The id of a document without its own: the index of the input, and the position in it. Paths have no influence.
fn anonymous(file: usize, group: Option<u32>, row: u64) -> String {
    match group {
        Some(group) => format!("{file}#{group}.{row}"),
        None => format!("{file}#{row}"),
    }
}
