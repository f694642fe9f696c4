//! Reading a store: any range of tokens, any document, from any number of threads; all bytes are checked.
//!
//! - Reads are positional (`pread`): no mapping that a network file system could refuse, no cursor to share.
//! - A block of 16,384 tokens is checked against its sum when this process first reads it, then trusted; the sums and
//!   the document starts are checked against their digests in the manifest, the manifest against the store's identity.
//! - Open files and indexes are in LRU caches that all streams share.

mod cache;
mod column;
mod open;
mod starts;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use self::cache::Lru;
use self::column::ColumnFile;
use self::starts::StartIndex;
use crate::documents;
use crate::folder::{StoreFile, damaged};
use crate::open::part_file;
use crate::rows::{WIDTH, words};
use crate::whole;
use crate::write::block_offset;
use crate::{
    BLOCK_TOKENS, DocumentRecord, FileRecord, Location, Manifest, SourceRecord, Split, StreamRecord,
};
use contract::digest::{Digest, block_sum};
use contract::{Fault, Result};

/// Memory for the indexes of document starts, in bytes.
const INDEX_BYTES: u64 = 64 << 20;

/// Memory for the document starts that were used last, in bytes: those of some four billion tokens.
const PAGE_BYTES: u64 = 32 << 20;

/// What all streams of a process share: open files and indexes, both bounded.
pub struct ReadCache {
    tokens: Lru<Arc<TokenFile>>,
    starts: Lru<Arc<ColumnFile>>,
    indexes: Lru<Arc<StartIndex>>,
    /// By stream, shard and first row.
    pages: Lru<Arc<[u64]>, (u64, usize, u64)>,
    streams: AtomicU64,
}

impl ReadCache {
    /// A cache of about `files` open files (busy threads may hold a few more for a moment).
    pub fn new(files: u64) -> Arc<Self> {
        let (tokens, starts) = (Lru::new(files.div_ceil(2).max(1)), Lru::new((files / 2).max(1)));
        let (indexes, pages) = (Lru::new(INDEX_BYTES), Lru::new(PAGE_BYTES));
        Arc::new(ReadCache { tokens, starts, indexes, pages, streams: AtomicU64::new(0) })
    }

    /// A cache of half of the process's file handles.
    pub fn sized_by_the_process() -> Arc<Self> {
        ReadCache::new((open::file_limit() / 2).clamp(2, 1024))
    }
}

/// An open store.
pub struct Store {
    root: Location,
    manifest: Arc<Manifest>,
    cache: Arc<ReadCache>,
}

impl Store {
    /// Opens the store in `root` with a cache of its own.
    pub fn open(root: impl Into<Location>) -> Result<Self> {
        Store::open_with(root, ReadCache::sized_by_the_process())
    }

    /// Opens the store in `root`, whose files must exist, with a cache that other stores may share.
    pub fn open_with(root: impl Into<Location>, cache: Arc<ReadCache>) -> Result<Self> {
        let root = root.into();
        let manifest = Arc::new(whole::opened(&root)?);
        Ok(Store { root, manifest, cache })
    }

    /// What the store holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its folder.
    pub fn root(&self) -> &Location {
        &self.root
    }

    /// The stream of a source (index into [`Manifest::sources`]) and split.
    ///
    /// # Panics
    /// If there is no such source.
    pub fn stream(&self, source: usize, split: Split) -> StreamReader {
        let manifest = Arc::clone(&self.manifest);
        let record = &manifest.sources[source];
        let shards = record.stream(split).shards.iter().map(|_| ShardState::default()).collect();
        let number = self.cache.streams.fetch_add(1, Ordering::Relaxed);
        let cache = Arc::clone(&self.cache);
        StreamReader { root: self.root.clone(), manifest, source, split, cache, number, shards }
    }

    /// The bytes of `tokenizer.json`, checked.
    pub fn tokenizer(&self) -> Result<Vec<u8>> {
        open::tokenizer(&self.root, &self.manifest)
    }
}

/// Reads one stream. Methods take `&self`: share it between threads.
pub struct StreamReader {
    root: Location,
    manifest: Arc<Manifest>,
    source: usize,
    split: Split,
    cache: Arc<ReadCache>,
    number: u64,
    shards: Vec<ShardState>,
}

/// The permanent state of a shard: 80 bytes, and a bit per block once one is read.
#[derive(Default)]
struct ShardState {
    checked: OnceLock<Box<[AtomicU64]>>,
    documents_checked: AtomicBool,
}

/// An open token file and, while blocks remain to be checked, its sums.
struct TokenFile {
    file: ColumnFile,
    sums: OnceLock<Vec<u64>>,
}

impl StreamReader {
    /// The stream's record in the manifest.
    pub fn record(&self) -> &StreamRecord {
        self.source().stream(self.split)
    }

    /// The source's record in the manifest.
    pub fn source(&self) -> &SourceRecord {
        &self.manifest.sources[self.source]
    }

    /// Appends the tokens of `range`, as they are, to `out`.
    pub fn read_tokens(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<()> {
        self.read_as(range, out, u32::from, |word| word)
    }

    /// Appends the tokens of `range` to `out` as signed numbers, which is how tensors hold them (a vocabulary above
    /// 2^31 is refused when the store is opened).
    pub fn read_ids(&self, range: Range<u64>, out: &mut Vec<i32>) -> Result<()> {
        self.read_as(range, out, i32::from, |word| word as i32)
    }

    fn read_as<T>(
        &self,
        range: Range<u64>,
        out: &mut Vec<T>,
        narrow: impl Fn(u16) -> T,
        wide: impl Fn(u32) -> T,
    ) -> Result<()> {
        if self.manifest.token_bytes == 2 {
            self.visit(range, |bytes| {
                let words = bytes.as_chunks().0.iter();
                out.extend(words.map(|word| narrow(u16::from_le_bytes(*word))));
            })
        } else {
            self.visit(range, |bytes| {
                let words = bytes.as_chunks().0.iter();
                out.extend(words.map(|word| wide(u32::from_le_bytes(*word))));
            })
        }
    }

    /// Calls `each` with the checked bytes of `range`, block by block.
    fn visit(&self, range: Range<u64>, mut each: impl FnMut(&[u8])) -> Result<()> {
        self.within(&range)?;
        let mut buffer = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let shard = self.shard_of(at)?;
            let record = &self.record().shards[shard];
            let file = self.token_file(shard)?;
            let end = range.end.min(record.first_token + record.tokens);
            while at < end {
                let local = at - record.first_token;
                let block = local / BLOCK_TOKENS;
                let stop = end.min(record.first_token + (block + 1) * BLOCK_TOKENS);
                let inner = local % BLOCK_TOKENS..local % BLOCK_TOKENS + (stop - at);
                each(self.read_block(shard, block, inner, &file, &mut buffer)?);
                at = stop;
            }
        }
        Ok(())
    }

    /// The bytes of tokens `inner` of one block, which is checked at its first use.
    fn read_block<'a>(
        &self,
        shard: usize,
        block: u64,
        inner: Range<u64>,
        file: &TokenFile,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let record = &self.record().shards[shard];
        let width = u64::from(self.manifest.token_bytes);
        let blocks = record.tokens.div_ceil(BLOCK_TOKENS);
        let offset = block_offset(BLOCK_TOKENS * width, block);
        let checked = self.shards[shard]
            .checked
            .get_or_init(|| (0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect());
        let (word, bit) = (&checked[(block / 64) as usize], 1u64 << (block % 64));
        if word.load(Ordering::Acquire) & bit != 0 {
            buffer.resize(((inner.end - inner.start) * width) as usize, 0);
            file.file.read(buffer, offset + inner.start * width)?;
            return Ok(buffer);
        }
        let rows = BLOCK_TOKENS.min(record.tokens - block * BLOCK_TOKENS);
        buffer.resize((rows * width) as usize, 0);
        file.file.read(buffer, offset)?;
        let (mut found, wanted) = (block_sum(buffer), self.sums(shard, file)?[block as usize]);
        if found != wanted && file.file.location().forget() {
            file.file.read(buffer, offset)?;
            found = block_sum(buffer);
        }
        if found != wanted {
            return Err(self.block_fault(shard, block, file.file.location(), found, wanted));
        }
        word.fetch_or(bit, Ordering::Release);
        Ok(&buffer[(inner.start * width) as usize..(inner.end * width) as usize])
    }

    fn token_file(&self, shard: usize) -> Result<Arc<TokenFile>> {
        let slot = (self.number, shard);
        if let Some(file) = self.cache.tokens.get(slot) {
            return Ok(file);
        }
        let record = &self.record().shards[shard].token_file;
        let file = ColumnFile::open(&self.file(shard, record), record.bytes)?;
        let file = Arc::new(TokenFile { file, sums: OnceLock::new() });
        self.cache.tokens.put(slot, 1, Arc::clone(&file));
        Ok(file)
    }

    /// The sums of a shard's blocks, checked by their digest.
    fn sums<'a>(&self, shard: usize, file: &'a TokenFile) -> Result<&'a [u64]> {
        if let Some(sums) = file.sums.get() {
            return Ok(sums);
        }
        let record = &self.record().shards[shard];
        let sums = ColumnFile::open(&self.file(shard, &record.sum_file), record.sum_file.bytes)?;
        if record.sum_file.bytes != record.tokens.div_ceil(BLOCK_TOKENS) * 8 {
            return Err(damaged(sums.location(), "block sums do not cover the shard"));
        }
        let bytes = sums.location().reread(|| {
            let bytes = sums.read_all()?;
            let found = Digest::of_bytes(&bytes);
            match found == record.sum_file.digest {
                true => Ok(bytes),
                false => Err(damaged(sums.location(), "block sums do not match their digest")
                    .found(found)
                    .wanted(record.sum_file.digest)),
            }
        })?;
        Ok(file.sums.get_or_init(|| words(&bytes).collect()))
    }

    /// Appends to `out` the document starts within `range`; its end may be past the stream's end.
    pub fn starts_in(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()> {
        let range = range.start..range.end.min(self.record().tokens);
        let mut at = range.start;
        while at < range.end {
            let shard = self.shard_of(at)?;
            let record = &self.record().shards[shard];
            let (base, end) =
                (record.first_token, range.end.min(record.first_token + record.tokens));
            let part = at - base..end - base;
            let index = self.start_index(shard)?;
            index.visit(
                index.rows_near(&part),
                |rows| self.start_page(shard, rows),
                |starts| {
                    let first = starts.partition_point(|start| *start < part.start);
                    let inside = starts[first..].iter().take_while(|start| **start < part.end);
                    out.extend(inside.map(|start| base + start));
                },
            )?;
            at = end;
        }
        Ok(())
    }

    /// The document that token `token` belongs to, counted in the stream.
    pub fn document_of_token(&self, token: u64) -> Result<u64> {
        self.within(&(token..token + 1))?;
        let shard = self.shard_of(token)?;
        let (index, record) = (self.start_index(shard)?, &self.record().shards[shard]);
        let inner = token - record.first_token;
        let rows = index.rows_near(&(inner..inner + 1));
        let mut after = rows.start;
        index.visit(
            rows,
            |rows| self.start_page(shard, rows),
            |starts| after += starts.partition_point(|start| *start <= inner) as u64,
        )?;
        (record.first_document + after)
            .checked_sub(1)
            .ok_or_else(|| Fault::bug(format!("token {token} stands before the first document")))
    }

    /// A document's provenance, for explanations.
    pub fn document(&self, index: u64) -> Result<DocumentRecord> {
        let mut found = self.documents(std::slice::from_ref(&(index..index + 1)))?;
        found.pop().ok_or_else(|| Fault::bug(format!("document {index} has no provenance")))
    }

    /// The provenance of ranges of documents, which are ascending and disjoint: each file is read once.
    pub fn documents(&self, ranges: &[Range<u64>]) -> Result<Vec<DocumentRecord>> {
        let end = ranges.last().map_or(0, |range| range.end);
        if end > self.record().documents || ranges.windows(2).any(|two| two[0].end > two[1].start) {
            let count = self.record().documents;
            return Err(Fault::bug(format!(
                "documents {ranges:?} were asked of a stream of {count}"
            )));
        }
        let mut out = Vec::new();
        for (shard, record) in self.record().shards.iter().enumerate() {
            let (first, end) = (record.first_document, record.first_document + record.documents);
            let inside = |range: &Range<u64>| range.start.max(first)..range.end.min(end);
            let parts = ranges.iter().map(inside).filter(|part| !part.is_empty());
            let rows: Vec<_> = parts.map(|part| part.start - first..part.end - first).collect();
            if !rows.is_empty() {
                let file = self.document_file(shard)?;
                let first_file = self.source().first_file(record.part);
                documents::read_rows(&file, record, first_file, &rows, &mut out)?;
            }
        }
        Ok(out)
    }

    /// Calls `each` with the tokens of every document, in order, and its value of `column`, which is one of
    /// [`SourceRecord::keep`].
    pub fn kept_values(
        &self,
        column: &str,
        mut each: impl FnMut(u64, Option<&str>) -> Result<()>,
    ) -> Result<()> {
        for (shard, record) in self.record().shards.iter().enumerate() {
            documents::kept_values(&self.document_file(shard)?, record, column, &mut each)?;
        }
        Ok(())
    }

    /// The indexes of all documents with this id: one, unless the corpus repeats ids. An own id wins over an equal
    /// `FILE#ROW` of a document without one. Reads every id of the stream.
    pub fn find(&self, id: &str) -> Result<Vec<u64>> {
        let (mut own, mut shown) = (Vec::new(), Vec::new());
        for (shard, record) in self.record().shards.iter().enumerate() {
            let first_file = self.source().first_file(record.part);
            let rows = documents::find(&self.document_file(shard)?, id, first_file)?;
            own.extend(rows.own.into_iter().map(|row| record.first_document + row));
            shown.extend(rows.shown.into_iter().map(|row| record.first_document + row));
        }
        Ok(if own.is_empty() { shown } else { own })
    }

    fn start_index(&self, shard: usize) -> Result<Arc<StartIndex>> {
        let slot = (self.number, shard);
        if let Some(index) = self.cache.indexes.get(slot) {
            return Ok(index);
        }
        let (file, record) = (self.start_file(shard)?, &self.record().shards[shard]);
        let index = Arc::new(file.location().reread(|| StartIndex::load(&file, record))?);
        self.cache.indexes.put(slot, index.weight(), Arc::clone(&index));
        Ok(index)
    }

    /// The starts of `rows`, which are one page of an index.
    fn start_page(&self, shard: usize, rows: Range<u64>) -> Result<Arc<[u64]>> {
        let slot = (self.number, shard, rows.start);
        if let Some(page) = self.cache.pages.get(slot) {
            return Ok(page);
        }
        let file = self.start_file(shard)?;
        let page = starts::read_rows(&file, rows)?;
        self.cache.pages.put(slot, page.len() as u64 * WIDTH, Arc::clone(&page));
        Ok(page)
    }

    fn start_file(&self, shard: usize) -> Result<Arc<ColumnFile>> {
        let slot = (self.number, shard);
        if let Some(file) = self.cache.starts.get(slot) {
            return Ok(file);
        }
        let record = &self.record().shards[shard].start_file;
        let file = Arc::new(ColumnFile::open(&self.file(shard, record), record.bytes)?);
        self.cache.starts.put(slot, 1, Arc::clone(&file));
        Ok(file)
    }

    /// A shard's provenance file, checked by its digest once.
    fn document_file(&self, shard: usize) -> Result<StoreFile> {
        let record = &self.record().shards[shard].document_file;
        let file = self.file(shard, record);
        if !self.shards[shard].documents_checked.load(Ordering::Acquire) {
            documents::check(&file, record)?;
            self.shards[shard].documents_checked.store(true, Ordering::Release);
        }
        Ok(file)
    }

    /// A file of a shard.
    fn file(&self, shard: usize, record: &FileRecord) -> StoreFile {
        let part = self.record().shards[shard].part;
        part_file(&self.root, &self.source().name, part, &record.name)
    }

    fn shard_of(&self, token: u64) -> Result<usize> {
        self.record().shard_of_token(token).ok_or_else(|| {
            Fault::bug(format!("token {token} was asked of a stream of {}", self.record().tokens))
        })
    }

    fn within(&self, range: &Range<u64>) -> Result<()> {
        if range.start <= range.end && range.end <= self.record().tokens {
            return Ok(());
        }
        let tokens = self.record().tokens;
        Err(Fault::bug(format!("tokens {range:?} were asked of a stream of {tokens}")))
    }

    /// The fault for a damaged block: which one, and whose text is lost.
    fn block_fault(
        &self,
        shard: usize,
        block: u64,
        file: &Location,
        found: u64,
        wanted: u64,
    ) -> Fault {
        let record = &self.record().shards[shard];
        let first = record.first_token + block * BLOCK_TOKENS;
        let last = (first + BLOCK_TOKENS).min(record.first_token + record.tokens) - 1;
        let blocks = record.tokens.div_ceil(BLOCK_TOKENS);
        damaged(file, &format!("block {block} of {blocks} is damaged: {}", self.whose(first, last)))
            .found(format!("sum {found:016x}"))
            .wanted(format!("sum {wanted:016x}"))
    }

    /// The documents of a range of tokens, as far as the other files are readable.
    fn whose(&self, first: u64, last: u64) -> String {
        let name = format!("source {:?}, {}", self.source().name, self.split.name());
        let bounds =
            self.document_of_token(first).and_then(|a| Ok((a, self.document_of_token(last)?)));
        let Ok((from, to)) = bounds else {
            return format!("tokens {first} to {last} of {name}");
        };
        match (self.document(from), self.document(to)) {
            (Ok(a), Ok(b)) => {
                let (a, b) = (a.shown_id(), b.shown_id());
                format!("documents {from} ({a:?}) to {to} ({b:?}) of {name}")
            }
            _ => format!("documents {from} to {to} of {name}"),
        }
    }
}
