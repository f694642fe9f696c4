//! A stream of a store under construction: documents in order; the caller cuts it into shards.

use std::path::Path;

use contract::Result;
use store::manifest::chain;
use store::write::{ShardWriter, StreamHead};
use store::{DocumentRecord, SourceRecord, Split, StreamRecord, disk, open};

/// One stream, with its open shard.
pub(crate) struct Stream {
    head: StreamHead,
    pub(crate) record: StreamRecord,
    open: Option<ShardWriter>,
}

impl Stream {
    /// Both streams of a source, with their records so far.
    pub(crate) fn both(
        store: &Path,
        source: &SourceRecord,
        token_bytes: u32,
        vocab: u32,
    ) -> [Stream; 2] {
        Split::ALL.map(|split| Stream {
            head: StreamHead {
                folder: open::stream_folder(store, &source.name, split),
                source: source.name.clone(),
                split,
                token_bytes,
                vocab,
            },
            record: source.stream(split).clone(),
            open: None,
        })
    }

    /// Whether the open shard holds `tokens` or more.
    pub(crate) fn is_full(&self, tokens: u64) -> bool {
        self.open.as_ref().is_some_and(|shard| shard.tokens() >= tokens)
    }

    /// The next document.
    pub(crate) fn push(
        &mut self,
        tokens: &[u32],
        record: &DocumentRecord,
        text_bytes: u64,
    ) -> Result<()> {
        let total = &mut self.record;
        let open = match &mut self.open {
            Some(open) => open,
            none => {
                let folder = &self.head.folder;
                disk::create_folder(folder)?;
                let (head, index) = (self.head.clone(), total.shards.len());
                none.insert(ShardWriter::create(head, index, total.tokens, total.documents)?)
            }
        };
        open.push(tokens, record)?;
        total.tokens += record.tokens;
        total.documents += 1;
        total.text_bytes += text_bytes;
        total.digest = chain(total.digest, tokens, record);
        Ok(())
    }

    /// Commits the open shard, if there is one.
    pub(crate) fn commit(&mut self) -> Result<()> {
        if let Some(open) = self.open.take() {
            self.record.shards.push(open.finish()?);
        }
        Ok(())
    }
}
