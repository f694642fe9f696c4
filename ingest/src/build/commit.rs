//! The committer: documents in input order become shards, and every shard a checkpoint.
//!
//! Train and validation are cut together, at the document that fills either: so a checkpoint is a point in the input,
//! no document has to be read twice, and the cut is a function of the documents alone.

use std::fs;
use std::path::Path;

use contract::{Fault, Result};
use store::{
    DocumentRecord, Dropped, InputRecord, Manifest, PreparedRecord, SourceRecord, Split,
    StreamRecord, disk, open,
};

use super::journal::{Checkpoint, Journal, Position, Totals};
use super::pipeline::{Auditor, Encoded, Item, Step};
use super::request::always_counted;
use super::stream::Stream;
use crate::corpus::{Corpus, OnError};
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::takeover::Taken;
use crate::tokenize::audit::{Audit, Wanted};

/// Everything that grows while a build runs.
pub(crate) struct Committer<'a> {
    corpus: &'a Corpus,
    store: &'a Path,
    token_bytes: u32,
    vocab: u32,
    journal: Journal,
    wanted: &'a Wanted,
    progress: &'a mut Progress,
    pub(crate) audit: Audit,
    pub(crate) sources: Vec<SourceRecord>,
    position: Position,
    streams: [Stream; 2],
    /// Inputs of the open source that are in the journal already.
    journaled: usize,
}

impl<'a> Committer<'a> {
    /// Goes on after `checkpoints`, or begins where there are none.
    pub(crate) fn new(
        corpus: &'a Corpus,
        store: &'a Path,
        empty: &Manifest,
        (journal, checkpoints): (Journal, Vec<Checkpoint>),
        wanted: &'a Wanted,
        progress: &'a mut Progress,
    ) -> Result<Self> {
        let mut sources = empty.sources.clone();
        let mut position = Position::start(0, 0);
        let mut audit = Audit::default();
        for checkpoint in checkpoints {
            replay(&mut sources[checkpoint.source], &checkpoint);
            (position, audit) = (checkpoint.position, checkpoint.audit);
        }
        audit.restore_floor(journal.floor()?, wanted);
        for source in &sources {
            clear(store, source)?;
        }
        let (token_bytes, vocab) = (empty.token_bytes, empty.tokenizer.vocab);
        let at = position.source.min(sources.len().saturating_sub(1));
        let streams = Stream::both(store, &sources[at], token_bytes, vocab);
        let journaled = sources[at].inputs.len();
        Ok(Committer {
            corpus,
            store,
            token_bytes,
            vocab,
            journal,
            wanted,
            progress,
            audit,
            sources,
            position,
            streams,
            journaled,
        })
    }

    /// Where the inputs have to go on.
    pub(crate) fn position(&self) -> Position {
        self.position.clone()
    }

    /// Takes the next step in input order; asks `go_on` before each document.
    pub(crate) fn step(
        &mut self,
        step: Step,
        auditor: &Auditor,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        match step {
            Step::Slab { items, raw_bytes } => {
                self.progress.within(raw_bytes);
                for item in items {
                    go_on()?;
                    self.item(item, auditor)?;
                }
            }
            Step::FileEnd(input) => self.file_end(input),
            Step::SourceEnd => self.source_end()?,
        }
        self.progress.tick();
        Ok(())
    }

    fn item(&mut self, item: Item, auditor: &Auditor) -> Result<()> {
        match item {
            Item::Document(document) => {
                self.position.pass(document.consumed);
                self.document(*document, auditor)
            }
            Item::Dropped { reason, bytes, content, fault } => {
                self.position.pass(content);
                self.dropped(&reason, bytes, fault)
            }
        }
    }

    fn dropped(&mut self, reason: &str, bytes: u64, fault: Fault) -> Result<()> {
        if self.corpus.on_error == OnError::Stop && !always_counted(reason) {
            let file = &self.corpus.sources[self.position.source].files[self.position.file];
            return Err(fault.or_at(|| file.shown.clone()));
        }
        self.prepared(|prepared, _| prepared.read_bytes += bytes);
        let dropped = &mut self.sources[self.position.source].dropped;
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
        Ok(())
    }

    fn document(&mut self, document: Encoded, auditor: &Auditor) -> Result<()> {
        let Encoded { id, row, group, bytes, text_bytes, consumed: _, content, .. } = document;
        let Encoded { trace, split, tokens, sample, .. } = document;
        if let Some(trace) = trace {
            self.prepared(|prepared, recipe| {
                prepared.read_bytes += trace.read;
                trace.changes.iter().for_each(|change| recipe.count(*change, prepared));
            });
        }
        if let Some(sample) = self.audit.offer(content.0, text_bytes, sample, self.wanted) {
            auditor.check(sample);
        }
        let file = self.position.file;
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
        let recipe = &self.corpus.sources[self.position.source].recipe;
        if !recipe.is_empty() {
            count(self.sources[self.position.source].prepared.get_or_insert_default(), recipe);
        }
    }

    fn file_end(&mut self, mut input: InputRecord) {
        input.documents = self.position.documents;
        self.progress.file(input.bytes);
        self.sources[self.position.source].inputs.push(input);
        self.position = Position::start(self.position.source, self.position.file + 1);
    }

    fn source_end(&mut self) -> Result<()> {
        let next = self.position.source + 1;
        let done = std::mem::replace(&mut self.position, Position::start(next, 0));
        match &self.corpus.sources[done.source].taken {
            Some(taken) => self.take_over(done.source, taken)?,
            None => self.checkpoint(done.source)?,
        }
        if let Some(source) = self.sources.get(next) {
            self.streams = Stream::both(self.store, source, self.token_bytes, self.vocab);
            self.journaled = 0;
        }
        Ok(())
    }

    /// Takes the files of an unchanged source over, then says so in the journal.
    fn take_over(&mut self, source: usize, taken: &Taken) -> Result<()> {
        taken.link(self.store)?;
        let record = taken.record.clone();
        for input in &record.inputs {
            self.progress.file(input.bytes);
        }
        let checkpoint = Checkpoint {
            position: self.position.clone(),
            source,
            inputs: record.inputs.clone(),
            shards: [None, None],
            streams: [totals(&record.train), totals(&record.validation)],
            dropped: record.dropped.clone(),
            prepared: record.prepared.clone(),
            audit: self.audit.counts(),
            taken: Some(Box::new(record.clone())),
        };
        self.sources[source] = record;
        self.journal.record(&checkpoint, None)
    }

    fn cut(&mut self) -> Result<()> {
        self.checkpoint(self.position.source)
    }

    /// Commits the open shards of source `source`, then says so in the journal.
    fn checkpoint(&mut self, source: usize) -> Result<()> {
        let mut shards = [None, None];
        for (stream, shard) in self.streams.iter_mut().zip(&mut shards) {
            *shard = stream.commit()?;
        }
        let record = &mut self.sources[source];
        record.train = self.streams[0].record.clone();
        record.validation = self.streams[1].record.clone();
        let checkpoint = Checkpoint {
            position: self.position.clone(),
            source,
            inputs: record.inputs[self.journaled..].to_vec(),
            shards,
            streams: [totals(&record.train), totals(&record.validation)],
            dropped: record.dropped.clone(),
            prepared: record.prepared.clone(),
            audit: self.audit.counts(),
            taken: None,
        };
        self.journaled = record.inputs.len();
        let floor = self.audit.floor_if_changed();
        self.journal.record(&checkpoint, floor)
    }
}

/// The id of a document whose corpus has none: which input, and where in it. No path, since paths decide nothing.
fn anonymous(file: usize, group: Option<u32>, row: u64) -> String {
    match group {
        Some(group) => format!("{file}#{group}.{row}"),
        None => format!("{file}#{row}"),
    }
}

fn totals(stream: &StreamRecord) -> Totals {
    let StreamRecord { tokens, documents, text_bytes, digest, shards: _ } = stream;
    Totals { tokens: *tokens, documents: *documents, text_bytes: *text_bytes, digest: *digest }
}

fn replay(source: &mut SourceRecord, checkpoint: &Checkpoint) {
    if let Some(taken) = &checkpoint.taken {
        source.clone_from(taken);
        return;
    }
    source.inputs.extend(checkpoint.inputs.iter().cloned());
    source.dropped.clone_from(&checkpoint.dropped);
    source.prepared.clone_from(&checkpoint.prepared);
    let streams = [&mut source.train, &mut source.validation];
    let news = checkpoint.shards.iter().zip(&checkpoint.streams);
    for (stream, (shard, totals)) in streams.into_iter().zip(news) {
        stream.shards.extend(shard.clone());
        let Totals { tokens, documents, text_bytes, digest } = totals.clone();
        (stream.tokens, stream.documents) = (tokens, documents);
        (stream.text_bytes, stream.digest) = (text_bytes, digest);
    }
}

/// Removes what a killed build wrote beyond its last checkpoint, and checks that the rest is there.
fn clear(store: &Path, source: &SourceRecord) -> Result<()> {
    for split in Split::ALL {
        let folder = open::stream_folder(store, &source.name, split);
        let files = source.stream(split).files();
        let mut named: std::collections::BTreeMap<_, _> =
            files.map(|file| (file.name.clone(), file.bytes)).collect();
        if !folder.is_dir() && named.is_empty() {
            continue;
        }
        let fault = |error: &std::io::Error| Fault::io("clear", &folder, error);
        for entry in fs::read_dir(&folder).map_err(|error| fault(&error))? {
            let entry = entry.map_err(|error| fault(&error))?;
            let bytes = entry.metadata().map_err(|error| fault(&error))?.len();
            let name = entry.file_name().to_string_lossy().into_owned();
            match named.remove(&name) {
                Some(wanted) if wanted == bytes => {}
                Some(wanted) => {
                    return Err(Fault::data("a committed file changed its size")
                        .at(entry.path().display().to_string())
                        .found(format!("{bytes} bytes"))
                        .wanted(format!("{wanted} bytes"))
                        .hint("delete the store's folder and build it again"));
                }
                None => disk::remove(&entry.path())?,
            }
        }
        if let Some((name, _)) = named.first_key_value() {
            return Err(Fault::data("a committed file is missing")
                .at(folder.join(name).display().to_string())
                .hint("delete the store's folder and build it again"));
        }
    }
    Ok(())
}
