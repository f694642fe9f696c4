//! Documents that are tokens already become the streams of a store.
//!
//! Train and validation are cut together, as a build cuts them: the cut is a function of the documents alone.

use std::path::Path;

use contract::Result;
use store::{DocumentRecord, Dropped, Manifest, SourceRecord, Split, StreamRecord};

use crate::assembly::stream::Stream;
use crate::dropped::{Line, Listing};

/// One source under construction.
pub(super) struct Filling {
    pub(super) record: SourceRecord,
    streams: [Stream; 2],
    listing: Listing,
    shard_tokens: u64,
}

impl Filling {
    pub(super) fn new(
        store: &Path,
        manifest: &Manifest,
        (name, preparation): (&str, String),
        shard_tokens: u64,
    ) -> Result<Self> {
        let record = SourceRecord {
            prepared: None,
            dropped_file: None,
            name: name.to_owned(),
            preparation,
            inputs: Vec::new(),
            train: StreamRecord::empty(),
            validation: StreamRecord::empty(),
            dropped: Vec::new(),
        };
        let (token_bytes, vocab) = (manifest.token_bytes, manifest.tokenizer.vocab);
        let streams = Stream::both(store, &record, token_bytes, vocab);
        let listing = Listing::new(store.join(name), None)?;
        Ok(Filling { record, streams, listing, shard_tokens })
    }

    /// The next document of `split`; its record's first token is set here.
    pub(super) fn push(
        &mut self,
        split: Split,
        tokens: &[u32],
        mut record: DocumentRecord,
    ) -> Result<()> {
        let stream = &mut self.streams[split as usize];
        record.first_token = stream.record.tokens;
        stream.push(tokens, &record, 0)?;
        let full = |stream: &Stream| stream.is_full(self.shard_tokens);
        if self.streams.iter().any(full) { self.cut() } else { Ok(()) }
    }

    /// A document that is not kept.
    pub(super) fn dropped(&mut self, line: Line) -> Result<()> {
        let dropped = &mut self.record.dropped;
        let bytes = line.bytes.unwrap_or_default();
        match dropped.iter_mut().find(|dropped| dropped.reason == line.reason) {
            Some(dropped) => {
                (dropped.documents, dropped.bytes) = (dropped.documents + 1, dropped.bytes + bytes)
            }
            None => dropped.push(Dropped { reason: line.reason.clone(), documents: 1, bytes }),
        }
        self.listing.dropped(line)
    }

    fn cut(&mut self) -> Result<()> {
        self.streams.iter_mut().try_for_each(Stream::commit)
    }

    /// Ends the source.
    pub(super) fn finish(mut self) -> Result<SourceRecord> {
        self.cut()?;
        let [train, validation] = self.streams.map(|stream| stream.record);
        let dropped_file = self.listing.finish()?;
        Ok(SourceRecord { train, validation, dropped_file, ..self.record })
    }
}
