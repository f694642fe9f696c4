//! `manifest.json`: the one file that makes a folder a store.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{DocumentRecord, Split, names};
use contract::{Digest, Fault, Field, Framed, Hasher, Identity, Result};

/// What a store holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the format ([`crate::FORMAT`]).
    pub format: u32,
    /// SHA-256 over the logical content: see [`Manifest::identity`].
    pub digest: Identity,
    /// SHA-256 over what the build was asked to do (inputs' content, tokenizer bytes, preparation, format):
    /// the same request finds its store, another one is refused.
    pub request: Identity,
    /// What made the tokens.
    pub tokenizer: TokenizerRecord,
    /// Bytes of a stored token: 2 or 4, by the largest id.
    pub token_bytes: u32,
    /// Tokens in a unit.
    pub unit: u64,
    /// The share of documents in the validation split ("1/1000").
    pub validation: String,
    /// The sources, in the order of `corpus.toml`.
    pub sources: Vec<SourceRecord>,
}

/// The tokenizer and its policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerRecord {
    /// SHA-256 of `tokenizer.json`.
    pub sha256: Identity,
    /// One more than the largest id, added tokens included: the rows an embedding needs.
    pub vocab: u32,
    /// The id put before each document, if any.
    pub begin: Option<u32>,
    /// The id put after each document, if any.
    pub end: Option<u32>,
    /// Which encoder ran ("fastokens 0.3.5"): not part of the identity, since its ids are checked.
    pub encoder: String,
}

/// One source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceRecord {
    /// Its name, unique in the store; also its folder.
    pub name: String,
    /// The preparation steps as canonical text: part of the identity.
    pub preparation: String,
    /// The fields of a record that are kept with its provenance, as paths: part of the identity.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<String>,
    /// The input files in reading order.
    pub inputs: Vec<InputRecord>,
    /// The parts that they became, in order; a part's number is the name of its folder.
    pub parts: Vec<PartRecord>,
    /// The documents trained on.
    pub train: StreamRecord,
    /// The documents held out.
    pub validation: StreamRecord,
    /// What was read but not kept, by reason: documents read = train + validation + dropped.
    pub dropped: Vec<Dropped>,
    /// The list of what the comparison of documents removed, if a step compares them; in the source's folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed_file: Option<FileRecord>,
    /// What steps of preparation did, if there were any: a function of the rest, and so no part of the identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<PreparedRecord>,
}

impl SourceRecord {
    /// A source of which nothing was read yet.
    pub fn new(name: &str, preparation: &str) -> Self {
        SourceRecord {
            name: name.to_owned(),
            preparation: preparation.to_owned(),
            keep: Vec::new(),
            inputs: Vec::new(),
            train: StreamRecord::empty(),
            validation: StreamRecord::empty(),
            dropped: Vec::new(),
            parts: Vec::new(),
            removed_file: None,
            prepared: None,
        }
    }
}

/// One part of a source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartRecord {
    /// The input file that it begins with (index into [`SourceRecord::inputs`]), from which its files count theirs.
    pub first_file: u32,
    /// The row group or record batch of that file that it begins with; those before are of the part before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first_group: u32,
    /// The list of its dropped documents, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_file: Option<FileRecord>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// What steps of preparation did to a source:
/// bytes read + added - removed - dropped = bytes of text in train and validation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreparedRecord {
    /// Bytes of text (or, where there was none, of record) of all documents before the first step.
    pub read_bytes: u64,
    /// The steps that changed documents that were kept, in the order of the steps.
    pub changes: Vec<Change>,
    /// Lists that the steps left in the source's folder: matches with evaluation sets.
    pub files: Vec<FileRecord>,
}

/// What one step changed in documents that were kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// The step.
    pub step: String,
    /// How many it changed.
    pub documents: u64,
    /// Bytes by which texts grew.
    pub added: u64,
    /// Bytes by which texts shrank.
    pub removed: u64,
}

/// One input file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputRecord {
    /// Its path as found from `corpus.toml`: for users, not part of the identity.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes; of a Parquet or Arrow file, over those of its groups and of its footer.
    pub sha256: Identity,
    /// Documents read from it, dropped ones included.
    pub documents: u64,
    /// Its row groups (Parquet) or record batches (Arrow), empty ones included; otherwise 1.
    pub segments: u64,
}

/// Documents that were read but not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropped {
    /// Why ("empty", "malformed").
    pub reason: String,
    /// How many.
    pub documents: u64,
    /// Their bytes of text or, where there was none, of record.
    pub bytes: u64,
}

/// The documents of one source and split, in input order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamRecord {
    /// Tokens in all shards.
    pub tokens: u64,
    /// Documents in all shards.
    pub documents: u64,
    /// Bytes of text that became these tokens.
    pub text_bytes: u64,
    /// The digest of the documents' tokens and provenance ([`StreamDigest`]), independent of the shards.
    pub digest: Digest,
    /// The shards, in order.
    pub shards: Vec<ShardRecord>,
}

/// One shard: four files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardRecord {
    /// Its part (index into [`SourceRecord::parts`]), in whose folder its files are.
    pub part: u32,
    /// The stream's token that this shard begins with.
    pub first_token: u64,
    /// Tokens here.
    pub tokens: u64,
    /// The stream's document that this shard begins with.
    pub first_document: u64,
    /// Documents here.
    pub documents: u64,
    /// `tokens-*.arrow`.
    pub token_file: FileRecord,
    /// `tokens-*.sums`.
    pub sum_file: FileRecord,
    /// `starts-*.arrow`.
    pub start_file: FileRecord,
    /// `documents-*.parquet`.
    pub document_file: FileRecord,
}

/// One file of the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its name in the folder of its part or source.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// xxh3-128 of its bytes.
    pub digest: Digest,
}

/// A file of a store, as [`Manifest::files`] lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEntry<'a> {
    /// Its path in the store's folder, with `/` between the parts.
    pub path: String,
    /// Its size and digest; none for the tokenizer, whose SHA-256 the manifest has, and for the manifest and its sum,
    /// which check each other.
    pub record: Option<&'a FileRecord>,
}

impl<'a> FileEntry<'a> {
    fn of(folder: &str, record: &'a FileRecord) -> Self {
        FileEntry { path: format!("{folder}/{}", record.name), record: Some(record) }
    }
}

impl Manifest {
    /// The store digest covers logical content, not container bytes, so that a new release of a file-format library
    /// does not invalidate a store. Paths, encoder names and shard cuts are not included.
    pub fn identity(&self) -> Identity {
        // No `..`: a new field must be handled here.
        let Manifest {
            format,
            digest: _,
            request: _,
            tokenizer,
            token_bytes: _,
            unit,
            validation,
            sources,
        } = self;
        let TokenizerRecord { sha256, vocab, begin, end, encoder: _ } = tokenizer;
        let mut framed = Framed::new("zdata store", *format);
        framed.field(sha256).field(vocab).field(begin).field(end);
        framed.field(unit).field(validation).count(sources.len());
        for source in sources {
            let SourceRecord {
                name,
                preparation,
                keep,
                inputs,
                parts: _,
                train,
                validation,
                dropped: _,
                removed_file: _,
                prepared: _,
            } = source;
            framed.field(name).field(preparation).field(keep).field(inputs);
            for StreamRecord { tokens, documents, text_bytes: _, digest, shards: _ } in
                [train, validation]
            {
                framed.field(tokens).field(documents).field(digest);
            }
        }
        framed.finish()
    }

    /// Every file of the store in upload order: the manifest, which makes the folder a store, is last.
    pub fn files(&self) -> Vec<FileEntry<'_>> {
        let unrecorded = |name: &str| FileEntry { path: name.to_owned(), record: None };
        let mut files = vec![unrecorded(names::TOKENIZER)];
        for source in &self.sources {
            let folder = |part: u32| format!("{}/{}", source.name, names::part(part));
            for shard in Split::ALL.into_iter().flat_map(|split| &source.stream(split).shards) {
                let records = shard.files().into_iter();
                files.extend(records.map(|record| FileEntry::of(&folder(shard.part), record)));
            }
            for (part, record) in (0..).zip(&source.parts) {
                let list = record.dropped_file.iter();
                files.extend(list.map(|record| FileEntry::of(&folder(part), record)));
            }
            let lists = source.lists();
            files.extend(lists.map(|record| FileEntry::of(&source.name, record)));
        }
        files.extend([names::MANIFEST_SUM, names::MANIFEST].map(unrecorded));
        files
    }

    /// The source of that name.
    pub fn source(&self, name: &str) -> Option<&SourceRecord> {
        self.sources.iter().find(|source| source.name == name)
    }
}

/// An input enters an identity by its content, never by its path.
impl Field for InputRecord {
    fn feed(&self, framed: &mut Framed) {
        let InputRecord { path: _, bytes, sha256, documents: _, segments: _ } = self;
        framed.field(bytes).field(sha256);
    }
}

impl SourceRecord {
    /// The stream of that split.
    pub fn stream(&self, split: Split) -> &StreamRecord {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        }
    }

    /// The kept values of one of its documents, by column; those that are null have none.
    pub fn kept(&self, record: &DocumentRecord) -> BTreeMap<String, String> {
        let columns = self.keep.iter().zip(&record.kept);
        columns.filter_map(|(column, value)| Some((column.clone(), value.clone()?))).collect()
    }

    /// The lists in its folder, which the comparison of documents wrote.
    pub fn lists(&self) -> impl Iterator<Item = &FileRecord> {
        let steps = self.prepared.iter().flat_map(|prepared| &prepared.files);
        self.removed_file.iter().chain(steps)
    }

    /// The input file that a part begins with; the check of a manifest makes sure that there is one.
    pub fn first_file(&self, part: u32) -> u32 {
        self.parts.get(part as usize).map_or(0, |part| part.first_file)
    }
}

impl ShardRecord {
    /// Its files, in the order in which they are listed.
    pub fn files(&self) -> [&FileRecord; 4] {
        [&self.token_file, &self.sum_file, &self.start_file, &self.document_file]
    }
}

impl StreamRecord {
    /// The files of all shards, in order.
    pub fn files(&self) -> impl Iterator<Item = &FileRecord> {
        self.shards.iter().flat_map(ShardRecord::files)
    }

    /// The total size of these files.
    pub fn bytes(&self) -> u64 {
        self.files().map(|file| file.bytes).sum()
    }

    /// A stream of which nothing was read yet.
    pub fn empty() -> Self {
        StreamRecord {
            tokens: 0,
            documents: 0,
            text_bytes: 0,
            digest: StreamDigest::default().finish(),
            shards: Vec::new(),
        }
    }

    /// A stream that none of the documents of these inputs belongs to.
    pub fn without_documents(inputs: &[InputRecord]) -> Self {
        let mut digest = StreamDigest::default();
        inputs.iter().for_each(|input| digest.end_file(input.segments));
        StreamRecord { digest: digest.finish(), ..StreamRecord::empty() }
    }

    /// The shard that holds token `index` of the stream.
    pub fn shard_of_token(&self, index: u64) -> Option<usize> {
        if index >= self.tokens {
            return None;
        }
        Some(self.shards.partition_point(|shard| shard.first_token <= index) - 1)
    }
}

/// One link of a segment's chain: the state after a document, from the state before it, the document's tokens and its
/// provenance, without the number of its file and without offsets: what comes before a segment has no effect on it.
pub fn chain(before: Digest, tokens: &[u32], record: &DocumentRecord) -> Digest {
    let mut link = Link::begin(before, tokens.len() as u64);
    link.tokens(tokens);
    link.end(record)
}

/// An incomplete link: a document's tokens need not be in memory at once.
pub struct Link(Hasher);

impl Link {
    /// Begins the link of a document of this many tokens.
    pub fn begin(before: Digest, tokens: u64) -> Self {
        let mut hasher = Hasher::new();
        hasher.tag("document.v3").digest(before).u64(tokens);
        Link(hasher)
    }

    /// Adds the next tokens.
    pub fn tokens(&mut self, tokens: &[u32]) {
        self.0.u32s_onward(tokens);
    }

    /// The state after the document.
    pub fn end(mut self, record: &DocumentRecord) -> Digest {
        let DocumentRecord { id, file: _, row, group, bytes, first_token: _, tokens: _, kept } =
            record;
        let hasher = &mut self.0;
        // Absence is hashed explicitly, so that no value has the same digest.
        hasher.u64(u64::from(id.is_some())).str(id.as_deref().unwrap_or_default()).u64(*row);
        hasher.u64(u64::from(group.is_some())).u64(u64::from(group.unwrap_or(0)));
        let (first_byte, end_byte) = bytes.unwrap_or((0, 0));
        hasher.u64(u64::from(bytes.is_some())).u64(first_byte).u64(end_byte).u64(kept.len() as u64);
        for value in kept {
            hasher.u64(u64::from(value.is_some())).str(value.as_deref().unwrap_or_default());
        }
        hasher.finish()
    }
}

/// The digest of a stream: a hash over the digests of its segments, in input order. A segment is an input file or, in
/// Parquet and Arrow, a row group or record batch; its digest is a chain over its documents that begins anew. One
/// without documents counts too.
pub struct StreamDigest {
    hasher: Hasher,
    /// The open segment's number in its file, and its chain so far.
    number: u64,
    open: Digest,
}

impl Default for StreamDigest {
    fn default() -> Self {
        let mut hasher = Hasher::new();
        hasher.tag("stream.v3");
        StreamDigest { hasher, number: 0, open: Digest::default() }
    }
}

impl StreamDigest {
    /// Adds the next document of the open file.
    pub fn document(&mut self, tokens: &[u32], record: &DocumentRecord) -> Result<()> {
        let segment = record.segment();
        if segment < self.number {
            return Err(Fault::bug("a document of a segment that has ended"));
        }
        self.skip_to(segment);
        self.open = chain(self.open, tokens, record);
        Ok(())
    }

    /// Adds the next segment of the open file, whose chain is known.
    pub fn segment(&mut self, chain: Digest) {
        self.open = chain;
        self.skip_to(self.number + 1);
    }

    /// Ends the open file, which has this many segments.
    pub fn end_file(&mut self, segments: u64) {
        self.skip_to(segments);
        self.hasher.u64(0);
        self.number = 0;
    }

    /// Ends the segments before this one of the open file.
    pub fn skip_to(&mut self, segment: u64) {
        while self.number < segment {
            self.hasher.u64(1).digest(std::mem::take(&mut self.open));
            self.number += 1;
        }
    }

    /// The digest, once every file has ended.
    pub fn finish(&self) -> Digest {
        self.hasher.finish()
    }
}

#[cfg(test)]
mod tests;
