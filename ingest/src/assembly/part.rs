//! A part of a source under construction: kept documents are written to its two streams, dropped ones to its list.
//!
//! Invariant: nothing in the files of a part, or in its output, depends on what is before it in its source: files and
//! tokens are counted from the begin of the part.

use std::path::Path;

use contract::{Digest, Fault, Identity, Result};
use serde::{Deserialize, Serialize};
use store::manifest::chain;
use store::write::{ShardWriter, StreamHead};
use store::{
    DocumentRecord, Dropped, FileRecord, InputRecord, Manifest, SHARD_TOKENS, ShardRecord, Split,
};

use crate::dropped::{Line, Listing};
use crate::source::{Content, GroupHashes, Row};

/// What a part became.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartOutput {
    /// Its input files, in order.
    pub(crate) inputs: Vec<InputOutput>,
    /// Its documents by split; shards are counted from the begin of the part.
    pub(crate) streams: [StreamOutput; 2],
    /// The dropped records by reason, in the order of the reasons.
    pub(crate) dropped: Vec<Dropped>,
    /// The list of these, if there are any.
    pub(crate) dropped_file: Option<FileRecord>,
    /// What the steps did to its texts, if there are steps.
    pub(crate) changes: Changes,
    /// Whether a record has its own id.
    pub(crate) named: bool,
    /// Whether a document has a value, by kept column.
    pub(crate) kept: Vec<bool>,
    /// The first record at which a build with `on_error = "stop"` stops.
    pub(crate) stop: Option<Stop>,
}

/// An input file, or the groups of one that belong to the part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InputOutput {
    /// Its size.
    pub(crate) bytes: u64,
    /// Its identity.
    pub(crate) sha256: Identity,
    /// Records, dropped ones included.
    pub(crate) documents: u64,
    /// The chains of its segments, by split.
    pub(crate) segments: Vec<[Digest; 2]>,
    /// The hashes of its groups, if it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hashes: Option<GroupHashes>,
}

impl InputOutput {
    /// An input whose documents were not looked at.
    pub(crate) fn unread(input: &InputRecord) -> Self {
        let InputRecord { path: _, bytes, sha256, documents, segments: _ } = *input;
        InputOutput { bytes, sha256, documents, segments: Vec::new(), hashes: None }
    }
}

/// The documents of a split.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StreamOutput {
    /// Bytes of text that became its tokens.
    pub(crate) text_bytes: u64,
    /// Its shards.
    pub(crate) shards: Vec<ShardRecord>,
}

/// What steps did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Changes {
    /// Bytes of text (or, where there was none, of record) of all documents before the first step.
    pub(crate) read_bytes: u64,
    /// By step, counted among the steps that run here: documents changed, bytes added, bytes removed.
    pub(crate) steps: Vec<[u64; 3]>,
}

impl Changes {
    /// Counts that a step changed a document of `before` bytes to one of `after`.
    pub(crate) fn count(&mut self, step: usize, before: u64, after: u64) {
        if self.steps.len() <= step {
            self.steps.resize(step + 1, [0; 3]);
        }
        let [documents, added, removed] = &mut self.steps[step];
        *documents += 1;
        *added += after.saturating_sub(before);
        *removed += before.saturating_sub(after);
    }
}

/// A record that stops a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stop {
    /// Its file, counted in the part.
    pub(crate) file: usize,
    /// Its position in the file, as messages append it to the file's name.
    pub(crate) place: String,
    /// Why it is not a document.
    pub(crate) reason: String,
}

/// A part under construction.
pub(crate) struct PartBuilder {
    pub(crate) output: PartOutput,
    streams: [StreamWriter; 2],
    listing: Listing,
    /// Records of the open file so far.
    documents: u64,
}

impl PartBuilder {
    /// Begins a part of the source `name`, which keeps the columns `keep`, in `folder`, which must exist, for a store
    /// like `manifest`. `decided` is the scan's list for the files of the part, `first_group` the first one that is
    /// read of its first file.
    pub(crate) fn new(
        folder: &Path,
        name: &str,
        keep: &[String],
        manifest: &Manifest,
        decided: Option<&Path>,
        first_group: u32,
    ) -> Result<Self> {
        let stream = |split| StreamWriter {
            head: StreamHead {
                folder: folder.to_owned(),
                source: name.to_owned(),
                split,
                token_bytes: manifest.token_bytes,
                vocab: manifest.tokenizer.vocab,
                keep: keep.to_vec(),
            },
            output: StreamOutput::default(),
            first_segment: first_group as usize,
            chains: Vec::new(),
            tokens: 0,
            documents: 0,
            open: None,
        };
        Ok(PartBuilder {
            output: PartOutput { kept: vec![false; keep.len()], ..PartOutput::default() },
            streams: Split::ALL.map(stream),
            listing: Listing::new(folder.to_owned(), decided)?,
            documents: 0,
        })
    }

    /// The number of the open file in the part.
    pub(crate) fn file(&self) -> usize {
        self.output.inputs.len()
    }

    /// The next document of `split`; its file and first token are set here.
    pub(crate) fn document(
        &mut self,
        split: Split,
        tokens: &[u32],
        mut record: DocumentRecord,
        text_bytes: u64,
    ) -> Result<()> {
        let file = self.file();
        self.listing.kept(file, Row { group: record.group, row: record.row })?;
        record.file =
            u32::try_from(file).map_err(|_| Fault::usage("a source has too many files"))?;
        self.documents += 1;
        self.output.named |= record.id.is_some();
        let kept = self.output.kept.iter_mut().zip(&record.kept);
        kept.for_each(|(any, value)| *any |= value.is_some());
        self.streams[split as usize].push(tokens, record, text_bytes)
    }

    /// A record that is not kept, of the open file.
    pub(crate) fn dropped(&mut self, line: Line) -> Result<()> {
        self.documents += 1;
        self.output.named |= line.id.is_some();
        let bytes = line.bytes.unwrap_or_default();
        count_dropped(&mut self.output.dropped, &line.reason, 1, bytes);
        self.listing.dropped(line)
    }

    /// Ends the open file, which has this content.
    pub(crate) fn file_end(&mut self, content: Content) {
        let Content { bytes, sha256, segments, hashes } = content;
        let [train, validation] = self.streams.each_mut().map(|stream| stream.file_end(segments));
        let segments = train.into_iter().zip(validation).map(<[Digest; 2]>::from).collect();
        let documents = std::mem::take(&mut self.documents);
        self.output.inputs.push(InputOutput { bytes, sha256, documents, segments, hashes });
    }

    /// The file of the scan's next record, if one was not reached: that file has changed.
    pub(crate) fn awaited(&self) -> Option<usize> {
        self.listing.awaited()
    }

    /// Completes the part: its files are on the disk, their names once its folder is synced.
    pub(crate) fn finish(self) -> Result<PartOutput> {
        let [train, validation] = self.streams;
        let streams = [train.finish()?, validation.finish()?];
        let dropped_file = self.listing.finish()?;
        Ok(PartOutput { streams, dropped_file, ..self.output })
    }
}

/// Adds dropped records to the counts by reason.
pub(crate) fn count_dropped(all: &mut Vec<Dropped>, reason: &str, documents: u64, bytes: u64) {
    let at = all.binary_search_by(|dropped| dropped.reason.as_str().cmp(reason));
    let at = at.unwrap_or_else(|at| {
        all.insert(at, Dropped { reason: reason.to_owned(), documents: 0, bytes: 0 });
        at
    });
    all[at].documents += documents;
    all[at].bytes += bytes;
}

/// A stream of the part.
struct StreamWriter {
    head: StreamHead,
    output: StreamOutput,
    /// The first segment of the open file that is read.
    first_segment: usize,
    /// The chains of its segments from there on, so far.
    chains: Vec<Digest>,
    tokens: u64,
    documents: u64,
    open: Option<ShardWriter>,
}

impl StreamWriter {
    fn push(&mut self, tokens: &[u32], mut record: DocumentRecord, text_bytes: u64) -> Result<()> {
        record.first_token = self.tokens;
        let open = match &mut self.open {
            Some(open) => open,
            none => {
                let (head, index) = (self.head.clone(), self.output.shards.len());
                none.insert(ShardWriter::create(head, index, self.tokens, self.documents)?)
            }
        };
        open.push(tokens, &record)?;
        let segment = (record.segment() as usize).checked_sub(self.first_segment);
        let is_open = |segment: &usize| self.chains.len() <= segment + 1;
        let segment = segment.filter(is_open);
        let segment =
            segment.ok_or_else(|| Fault::bug("a document of a segment that has ended"))?;
        self.chains.resize(segment + 1, Digest::default());
        self.chains[segment] = chain(self.chains[segment], tokens, &record);
        self.tokens += record.tokens;
        self.documents += 1;
        self.output.text_bytes += text_bytes;
        if open.tokens() >= SHARD_TOKENS { self.commit() } else { Ok(()) }
    }

    fn file_end(&mut self, segments: u64) -> Vec<Digest> {
        let mut chains = std::mem::take(&mut self.chains);
        chains.resize(segments as usize, Digest::default());
        chains
    }

    fn commit(&mut self) -> Result<()> {
        if let Some(open) = self.open.take() {
            self.output.shards.push(open.finish()?);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<StreamOutput> {
        self.commit()?;
        Ok(self.output)
    }
}
