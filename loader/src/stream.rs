//! The text of a source: a stream of its store, or the part of one that a bucket selects.
//!
//! Tokens and documents of a bucket are counted in the bucket: it is the concatenation of its documents in the order of
//! the store. So everything that reads a source reads a bucket, too.

use std::ops::Range;
use std::sync::Arc;

use contract::{Digest, Fault, Result};
use store::{BLOCK_TOKENS, DocumentRecord, SourceRecord, StreamReader, StreamRecord};

use crate::selection::{Run, Selection};

/// Reads the text of one source and split. Methods take `&self`: share it between threads.
pub struct SourceStream {
    reader: Arc<StreamReader>,
    selection: Option<Selection>,
}

impl SourceStream {
    pub(crate) fn whole(reader: StreamReader) -> Self {
        SourceStream { reader: Arc::new(reader), selection: None }
    }

    /// The documents of this whole stream that `selection` has.
    pub(crate) fn selected(&self, selection: Selection) -> Self {
        SourceStream { reader: Arc::clone(&self.reader), selection: Some(selection) }
    }

    /// The stream of the store.
    pub(crate) fn reader(&self) -> &StreamReader {
        &self.reader
    }

    /// Tokens.
    pub fn tokens(&self) -> u64 {
        self.selection.as_ref().map_or(self.reader.record().tokens, |selection| selection.tokens)
    }

    /// The digest of its content.
    pub fn digest(&self) -> Digest {
        self.selection.as_ref().map_or(self.reader.record().digest, Selection::digest)
    }

    /// The source's record in the manifest of its store; of a bucket, the source that it is cut from.
    pub fn source(&self) -> &SourceRecord {
        self.reader.source()
    }

    /// The record of the whole stream in the manifest of its store, also of a bucket.
    pub fn whole_record(&self) -> &StreamRecord {
        self.reader.record()
    }

    /// Tokens of all blocks of the store that have text of this stream: what a pass over it reads at least.
    pub fn block_tokens(&self) -> Result<u64> {
        let Some(selection) = &self.selection else { return Ok(self.tokens()) };
        let (mut found, mut after) = (0, 0);
        selection.runs_from(
            |run| run.token,
            0,
            |run, next| {
                let end = run.store_token + (next.token - run.token);
                let mut at = run.store_token.max(after);
                while at < end {
                    // Blocks are counted from the start of their shard.
                    let record = self.reader.record();
                    let shard = record.shard_of_token(at).map(|shard| &record.shards[shard]);
                    let shard = shard.ok_or_else(|| outside(&(at..end), record.tokens))?;
                    let block = (at - shard.first_token) / BLOCK_TOKENS * BLOCK_TOKENS;
                    let stop = (block + BLOCK_TOKENS).min(shard.tokens);
                    found += stop - block;
                    after = shard.first_token + stop;
                    at = after;
                }
                Ok(true)
            },
        )?;
        Ok(found)
    }

    /// Appends the tokens of `range` to `out`.
    pub fn read_tokens(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        self.each(range, |part, _| self.reader.read_tokens(part, out))
    }

    /// The same as signed numbers, which is how tensors hold them.
    pub fn read_ids(&self, range: Range<u64>, out: &mut Vec<i32>) -> Result<()> {
        self.each(range, |part, _| self.reader.read_ids(part, out))
    }

    /// Appends to `out` the document starts within `range`; its end may be past the stream's end.
    pub fn starts_in(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()> {
        if self.selection.is_none() {
            return self.reader.starts_in(range, out);
        }
        let range = range.start..range.end.min(self.tokens());
        let mut found = Vec::new();
        self.each(range, |part, here| {
            found.clear();
            let first = part.start;
            self.reader.starts_in(part, &mut found)?;
            out.extend(found.iter().map(|start| start - first + here));
            Ok(())
        })
    }

    /// Calls `each` with the parts of `range` as the store counts tokens, each with its first token as counted here.
    fn each(
        &self,
        range: Range<u64>,
        mut each: impl FnMut(Range<u64>, u64) -> Result<()>,
    ) -> Result<()> {
        let Some(selection) = &self.selection else {
            let first = range.start;
            return each(range, first);
        };
        if range.end > selection.tokens {
            return Err(outside(&range, selection.tokens));
        }
        if range.is_empty() {
            return Ok(());
        }
        selection.runs_from(
            |run| run.token,
            range.start,
            |run, next| {
                let part = range.start.max(run.token)..range.end.min(next.token);
                let there = part.start - run.token + run.store_token;
                each(there..there + (part.end - part.start), part.start)?;
                Ok(next.token < range.end)
            },
        )
    }

    /// The document that token `token` belongs to, counted in the stream.
    pub fn document_of_token(&self, token: u64) -> Result<u64> {
        let Some(selection) = &self.selection else { return self.reader.document_of_token(token) };
        if token >= selection.tokens {
            return Err(outside(&(token..token + 1), selection.tokens));
        }
        let mut run = Run::default();
        selection.runs_from(
            |run| run.token,
            token,
            |found, _| {
                run = *found;
                Ok(false)
            },
        )?;
        let document = self.reader.document_of_token(token - run.token + run.store_token)?;
        Ok(document - run.store_document + run.document)
    }

    /// A document's provenance.
    pub fn document(&self, index: u64) -> Result<DocumentRecord> {
        let mut found = self.documents(std::slice::from_ref(&(index..index + 1)))?;
        found.pop().ok_or_else(|| Fault::bug(format!("document {index} has no provenance")))
    }

    /// The provenance of ranges of documents, which are ascending and disjoint. The first token of each is counted in
    /// this stream.
    pub fn documents(&self, ranges: &[Range<u64>]) -> Result<Vec<DocumentRecord>> {
        let Some(selection) = &self.selection else { return self.reader.documents(ranges) };
        let mut wanted: Vec<(Range<u64>, Run)> = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            if range.end > selection.documents {
                return Err(outside(range, selection.documents));
            }
            selection.runs_from(
                |run| run.document,
                range.start,
                |run, next| {
                    let part = range.start.max(run.document)..range.end.min(next.document);
                    let there = part.start - run.document + run.store_document;
                    wanted.push((there..there + (part.end - part.start), *run));
                    Ok(next.document < range.end)
                },
            )?;
        }
        let there: Vec<_> = wanted.iter().map(|(range, _)| range.clone()).collect();
        let mut records = self.reader.documents(&there)?;
        let runs = wanted.iter().flat_map(|(range, run)| range.clone().map(move |_| run));
        for (record, run) in records.iter_mut().zip(runs) {
            record.first_token = record.first_token - run.store_token + run.token;
        }
        Ok(records)
    }

    /// The indexes of all documents with this id. Reads every id of the stream.
    pub fn find(&self, id: &str) -> Result<Vec<u64>> {
        self.own(&self.reader.find(id)?)
    }

    /// Those of these documents of the store that are here, as counted here.
    pub(crate) fn own(&self, documents: &[u64]) -> Result<Vec<u64>> {
        let Some(selection) = &self.selection else { return Ok(documents.to_vec()) };
        let mut found = Vec::new();
        for &document in documents {
            selection.runs_from(
                |run| run.store_document,
                document,
                |run, next| {
                    // Before the first run, and behind the last document of one, are those of other buckets.
                    let inside = document.checked_sub(run.store_document);
                    let here = inside.map(|inside| run.document + inside);
                    found.extend(here.filter(|here| *here < next.document));
                    Ok(false)
                },
            )?;
        }
        Ok(found)
    }
}

fn outside(range: &Range<u64>, all: u64) -> Fault {
    Fault::bug(format!("{range:?} was asked of a bucket of {all}"))
}
