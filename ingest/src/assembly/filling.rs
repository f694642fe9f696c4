//! A source of a store under construction: kept documents are written to its two streams, dropped ones to its list.
//!
//! Train and validation shards are cut together, at the document that fills either of them. So the cut depends only on
//! the documents, whether they come from the pipeline, from existing parts or from token files.

use std::path::Path;

use contract::Result;
use store::{DocumentRecord, Dropped, Manifest, SourceRecord, Split};

use super::stream::Stream;
use crate::dropped::{Line, Listing};

/// One source under construction.
pub(crate) struct Filling {
    pub(crate) record: SourceRecord,
    streams: [Stream; 2],
    pub(crate) listing: Listing,
    shard_tokens: u64,
}

impl Filling {
    /// Begins the source `record` of the store described by `manifest`; `scanned` is the list of what a scan removed.
    pub(crate) fn new(
        store: &Path,
        manifest: &Manifest,
        record: SourceRecord,
        scanned: Option<&Path>,
        shard_tokens: u64,
    ) -> Result<Self> {
        let (token_bytes, vocab) = (manifest.token_bytes, manifest.tokenizer.vocab);
        let streams = Stream::both(store, &record, token_bytes, vocab);
        let listing = Listing::new(store.join(&record.name), scanned)?;
        Ok(Filling { record, streams, listing, shard_tokens })
    }

    /// The next document of `split`; its record's first token is set here.
    pub(crate) fn push(
        &mut self,
        split: Split,
        tokens: &[u32],
        mut record: DocumentRecord,
        text_bytes: u64,
    ) -> Result<()> {
        let stream = &mut self.streams[split as usize];
        record.first_token = stream.record.tokens;
        stream.push(tokens, &record, text_bytes)?;
        let full = |stream: &Stream| stream.is_full(self.shard_tokens);
        if self.streams.iter().any(full) { self.cut() } else { Ok(()) }
    }

    /// A record that is not kept.
    pub(crate) fn dropped(&mut self, line: Line) -> Result<()> {
        let (dropped, bytes) = (&mut self.record.dropped, line.bytes.unwrap_or_default());
        let at = dropped.binary_search_by(|dropped| dropped.reason.cmp(&line.reason));
        let at = at.unwrap_or_else(|at| {
            dropped.insert(at, Dropped { reason: line.reason.clone(), documents: 0, bytes: 0 });
            at
        });
        dropped[at].documents += 1;
        dropped[at].bytes += bytes;
        self.listing.dropped(line)
    }

    /// Commits the open shards.
    fn cut(&mut self) -> Result<()> {
        self.streams.iter_mut().try_for_each(Stream::commit)
    }

    /// Ends the source.
    pub(crate) fn finish(mut self) -> Result<SourceRecord> {
        self.cut()?;
        let [train, validation] = self.streams.map(|stream| stream.record);
        let dropped_file = self.listing.finish()?;
        Ok(SourceRecord { train, validation, dropped_file, ..self.record })
    }
}
