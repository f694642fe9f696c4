//! The committer: documents in input order become shards.
//!
//! Train and validation are cut together, at the document that fills either: the cut is a function of the documents
//! alone, whoever tells them: the pipeline, or parts that were made before.

use std::path::{Path, PathBuf};

use contract::{Fault, Result, note};
use store::{DocumentRecord, Dropped, InputRecord, Manifest, PreparedRecord, SourceRecord};

use super::pipeline::{self, Encoded, Item, Step};
use super::request;
use super::stream::Stream;
use crate::corpus::{Corpus, stops};
use crate::dropped::{Line, Listing};
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::source::Row;

/// Everything that grows while a store is made.
pub(crate) struct Committer<'a> {
    corpus: &'a Corpus,
    store: &'a Path,
    token_bytes: u32,
    vocab: u32,
    progress: &'a mut Progress,
    pub(crate) sources: Vec<SourceRecord>,
    /// The open source.
    source: usize,
    /// The open file of it.
    file: usize,
    /// Records of that file so far.
    documents: u64,
    /// Whether a record of that source has its own id.
    named: bool,
    streams: [Stream; 2],
    /// By source, the list of what a scan removed of it.
    scanned: Vec<Option<PathBuf>>,
    listing: Listing,
}

impl<'a> Committer<'a> {
    /// Begins a store in the empty folder `store`; `scanned` are, by source, the lists of what a scan removed.
    pub(crate) fn new(
        corpus: &'a Corpus,
        store: &'a Path,
        empty: &Manifest,
        scanned: Vec<Option<PathBuf>>,
        progress: &'a mut Progress,
    ) -> Result<Self> {
        let sources = empty.sources.clone();
        let (token_bytes, vocab) = (empty.token_bytes, empty.tokenizer.vocab);
        let streams = Stream::both(store, &sources[0], token_bytes, vocab);
        let (source, file, documents) = (0, 0, 0);
        let listing = Listing::new(store.join(&sources[0].name), scanned[0].as_deref())?;
        Ok(Committer {
            corpus,
            store,
            token_bytes,
            vocab,
            progress,
            sources,
            source,
            file,
            documents,
            named: false,
            streams,
            scanned,
            listing,
        })
    }

    /// Takes the next step in input order.
    pub(crate) fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Slab { items, raw_bytes } => {
                self.progress.within(raw_bytes);
                items.into_iter().try_for_each(|item| self.item(item))?;
            }
            Step::FileEnd(input) => self.file_end(input),
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
                let (file, reason) = (self.file, reason.into_owned());
                let (bytes, kept, spans) = (Some(bytes), None, Vec::new());
                self.dropped(Line { file, group, row, id, reason, bytes, kept, spans }, fault)
            }
        }
    }

    fn dropped(&mut self, line: Line, fault: Fault) -> Result<()> {
        let (reason, bytes) = (line.reason.as_str(), line.bytes.unwrap_or_default());
        if stops(self.corpus, reason) {
            let file = &self.corpus.sources[self.source].files[self.file];
            return Err(fault.or_at(|| file.shown.clone()));
        }
        self.prepared(|prepared, _| prepared.read_bytes += bytes);
        let dropped = &mut self.sources[self.source].dropped;
        let slot = match dropped.iter().position(|dropped| dropped.reason == reason) {
            Some(index) => &mut dropped[index],
            None => {
                dropped.push(Dropped { reason: reason.to_owned(), documents: 0, bytes: 0 });
                dropped.sort_by(|a, b| a.reason.cmp(&b.reason));
                let index = dropped.iter().position(|dropped| dropped.reason == reason);
                &mut dropped[index.unwrap_or_default()]
            }
        };
        slot.documents += 1;
        slot.bytes += bytes;
        self.listing.dropped(line)
    }

    fn document(&mut self, document: Encoded) -> Result<()> {
        let Encoded { id, row, group, bytes, text_bytes, trace, split, tokens, .. } = document;
        if let Some(trace) = trace {
            self.prepared(|prepared, recipe| {
                prepared.read_bytes += trace.read;
                trace.changes.iter().for_each(|change| recipe.count(*change, prepared));
            });
        }
        let file = self.file;
        let source = &self.corpus.sources[self.source];
        let kept = self.listing.kept(file, Row { group, row });
        kept.map_err(|fault| fault.or_at(|| source.files[file].shown.clone()))?;
        let stream = &mut self.streams[split as usize];
        let record = DocumentRecord {
            id: id.unwrap_or_else(|| anonymous(file, group, row)),
            file: u32::try_from(file).map_err(|_| Fault::usage("a source has too many files"))?,
            row,
            group,
            bytes,
            first_token: stream.record.tokens,
            tokens: tokens.len() as u64,
        };
        stream.push(&tokens, &record, text_bytes)?;
        self.progress.document(text_bytes, tokens.len() as u64);
        let full = |stream: &Stream| stream.is_full(self.corpus.shard_tokens);
        if self.streams.iter().any(full) { self.cut() } else { Ok(()) }
    }

    /// Counts what steps did, if the open source has any.
    fn prepared(&mut self, count: impl FnOnce(&mut PreparedRecord, &Recipe)) {
        let recipe = &self.corpus.sources[self.source].recipe;
        if !recipe.is_empty() {
            count(self.sources[self.source].prepared.get_or_insert_default(), recipe);
        }
    }

    fn file_end(&mut self, mut input: InputRecord) {
        input.documents = std::mem::take(&mut self.documents);
        self.progress.file(input.bytes);
        self.sources[self.source].inputs.push(input);
        self.file += 1;
    }

    fn source_end(&mut self) -> Result<()> {
        self.cut()?;
        let (listing, files) =
            (std::mem::take(&mut self.listing), &self.corpus.sources[self.source].files);
        let awaited = listing.awaited().and_then(|file| files.get(file));
        let place = || awaited.map(|file| file.shown.clone()).unwrap_or_default();
        self.tell_of_ids();
        let record = &mut self.sources[self.source];
        record.dropped_file = listing.finish().map_err(|fault| fault.or_at(place))?;
        record.train = self.streams[0].record.clone();
        record.validation = self.streams[1].record.clone();
        (self.source, self.file) = (self.source + 1, 0);
        if let Some(next) = self.sources.get(self.source) {
            self.streams = Stream::both(self.store, next, self.token_bytes, self.vocab);
            let scanned = self.scanned[self.source].as_deref();
            self.listing = Listing::new(self.store.join(&next.name), scanned)?;
        }
        Ok(())
    }

    /// Says of the source that ends if its records have ids of their own only in its settings.
    fn tell_of_ids(&mut self) {
        let (source, record) = (&self.corpus.sources[self.source], &self.sources[self.source]);
        let read = record.inputs.iter().any(|input| input.documents > 0);
        if let (Some(id), false, true) = (&source.fields.id, self.named, read) {
            self.progress.aside(|| note!("{}", request::nameless(&source.name, id)));
        }
        self.named = false;
    }

    /// Commits the open shards.
    fn cut(&mut self) -> Result<()> {
        self.streams.iter_mut().try_for_each(Stream::commit)
    }
}

/// The id of a document whose corpus has none: which input, and where in it. No path, since paths decide nothing.
fn anonymous(file: usize, group: Option<u32>, row: u64) -> String {
    match group {
        Some(group) => format!("{file}#{group}.{row}"),
        None => format!("{file}#{row}"),
    }
}
