//! Writing a shard: four files, each under a temporary name until it is complete and on the disk.
//!
//! Memory is flat in tokens and documents: one open block of each column and one row group of provenance.
//! Invariant: equal documents in equal order give equal bytes; clock, threads and paths of the machine have no
//! influence.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray, UInt16Array, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::ipc::writer::{FileWriter, IpcWriteOptions};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use crate::disk::{AtomicFile, sync_folder};
use crate::{
    BLOCK_STARTS, BLOCK_TOKENS, DocumentRecord, FileRecord, HEAD_BYTES, ShardRecord, Split,
};
use contract::digest::block_sum;
use contract::fault::io_cause;
use contract::{Fault, Result};

/// Rows in a row group of `documents-*.parquet`.
pub const ROW_GROUP_DOCUMENTS: usize = 65_536;

/// Rows passed to the Parquet writer at once.
const ROWS_AT_ONCE: usize = 4_096;

/// Bytes of kept values after which rows are passed on earlier.
const KEPT_AT_ONCE: usize = 1 << 20;

/// What a shard writer needs to know about its stream.
#[derive(Clone, Debug)]
pub struct StreamHead {
    /// The folder of the part.
    pub folder: PathBuf,
    /// The source's name.
    pub source: String,
    /// Train or validation.
    pub split: Split,
    /// Bytes of a stored token: 2 or 4.
    pub token_bytes: u32,
    /// One more than the largest id that may be written.
    pub vocab: u32,
    /// The columns that are kept of its documents ([`crate::SourceRecord::keep`]).
    pub keep: Vec<String>,
}

/// Writes one shard.
pub struct ShardWriter {
    head: StreamHead,
    first_token: u64,
    first_document: u64,
    tokens: TokenFile,
    starts: StartFile,
    documents: DocumentFile,
}

impl ShardWriter {
    /// Begins shard number `index` of a stream of a part, in the part's folder, which must exist. Records count tokens
    /// from where the stream of the part begins, the shard's files from `first_token`.
    pub fn create(
        head: StreamHead,
        index: usize,
        first_token: u64,
        first_document: u64,
    ) -> Result<Self> {
        let path = |kind: &str, ending: &str| {
            let split = head.split.name();
            head.folder.join(format!("{kind}-{split}-{index:05}.{ending}"))
        };
        Ok(ShardWriter {
            tokens: TokenFile::create(
                &path("tokens", "arrow"),
                &path("tokens", "sums"),
                head.token_bytes,
            )?,
            starts: StartFile::create(&path("starts", "arrow"))?,
            documents: DocumentFile::create(&path("documents", "parquet"), &head)?,
            head,
            first_token,
            first_document,
        })
    }

    /// Tokens so far.
    pub fn tokens(&self) -> u64 {
        self.tokens.written
    }

    /// Adds the next document.
    pub fn push(&mut self, tokens: &[u32], record: &DocumentRecord) -> Result<()> {
        // Without a branch per id: an id that is too large sets the highest bit, by itself or by the difference.
        let last = self.head.vocab.wrapping_sub(1);
        let beyond = tokens.iter().fold(0, |all, id| all | id | last.wrapping_sub(*id)) >> 31 != 0;
        let largest = if beyond { tokens.iter().copied().max() } else { None };
        if let Some(id) = largest.filter(|&id| id >= self.head.vocab) {
            return Err(Fault::mismatch("the tokenizer gave an id that its vocabulary lacks")
                .at(format!("document {}", record.shown_id()))
                .found(id)
                .wanted(format!("ids below {}", self.head.vocab))
                .hint("the tokenizer.json contradicts itself: repair it, or use another one"));
        }
        let next = self.first_token + self.tokens.written;
        if record.first_token != next || record.tokens != tokens.len() as u64 || tokens.is_empty() {
            return Err(Fault::bug("a document's record does not agree with its tokens")
                .at(format!("document {}", record.shown_id())));
        }
        if record.kept.len() != self.head.keep.len() {
            return Err(Fault::bug("a document has other kept values than its source has columns")
                .at(format!("document {}", record.shown_id())));
        }
        self.tokens.push(tokens)?;
        let first_token = record.first_token - self.first_token;
        self.starts.push(first_token)?;
        self.documents.push(DocumentRecord { first_token, ..record.clone() })
    }

    /// Renames the four files to their names. The record is that of a store whose only part this is.
    pub fn finish(self) -> Result<ShardRecord> {
        let (tokens, documents) = (self.tokens.written, self.starts.written);
        let (token_file, sum_file) = self.tokens.finish()?;
        let start_file = self.starts.finish()?;
        let document_file = self.documents.finish()?;
        sync_folder(&self.head.folder)?;
        Ok(ShardRecord {
            part: 0,
            first_token: self.first_token,
            tokens,
            first_document: self.first_document,
            documents,
            token_file,
            sum_file,
            start_file,
            document_file,
        })
    }
}

/// The one column of `tokens-*.arrow`.
pub fn token_schema(token_bytes: u32) -> SchemaRef {
    let kind = if token_bytes == 2 { DataType::UInt16 } else { DataType::UInt32 };
    Arc::new(Schema::new(vec![Field::new("token", kind, false)]))
}

/// The one column of `starts-*.arrow`.
pub fn start_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("start", DataType::UInt64, false)]))
}

/// What the name of a kept column begins with.
pub(crate) const KEPT: &str = "keep.";

/// The columns of `documents-*.parquet` in a source that keeps these.
pub fn document_schema(keep: &[String]) -> SchemaRef {
    let field = |name: &str, kind: DataType| Field::new(name, kind, false);
    let mut fields = vec![
        Field::new("id", DataType::Utf8, true),
        field("source", DataType::Utf8),
        field("split", DataType::Utf8),
        field("file", DataType::UInt32),
        field("row", DataType::UInt64),
        Field::new("group", DataType::UInt32, true),
        Field::new("first_byte", DataType::UInt64, true),
        Field::new("end_byte", DataType::UInt64, true),
        field("first_token", DataType::UInt64),
        field("tokens", DataType::UInt64),
    ];
    fields
        .extend(keep.iter().map(|name| Field::new(format!("{KEPT}{name}"), DataType::Utf8, true)));
    Arc::new(Schema::new(fields))
}

/// The fault for an error of a format library: the machine's, if its root is an I/O error.
fn library_fault(path: &Path, error: &(dyn Error + 'static)) -> Fault {
    match io_cause(error) {
        Some(error) => Fault::io("write", path, error),
        None => Fault::bug(format!("cannot write it: {error}")).at(path.display().to_string()),
    }
}

/// An Arrow IPC file whose block offsets are computed by multiplication.
struct BlockFile {
    writer: FileWriter<AtomicFile>,
    schema: SchemaRef,
    block_bytes: u64,
    blocks: u64,
}

impl BlockFile {
    fn create(path: &Path, schema: SchemaRef, block_bytes: u64) -> Result<Self> {
        // Version 5 messages, aligned to 64 bytes, uncompressed.
        let options = IpcWriteOptions::default();
        let writer = FileWriter::try_new_with_options(AtomicFile::create(path)?, &schema, options)
            .map_err(|error| library_fault(path, &error))?;
        Ok(BlockFile { writer, schema, block_bytes, blocks: 0 })
    }

    fn write(&mut self, column: ArrayRef) -> Result<()> {
        let sink = self.writer.get_ref();
        let (path, wanted) = (sink.path().to_owned(), block_offset(self.block_bytes, self.blocks));
        if sink.bytes() + HEAD_BYTES != wanted {
            return Err(Fault::bug("a block does not lie where division finds it")
                .at(path.display().to_string())
                .found(sink.bytes())
                .wanted(wanted - HEAD_BYTES));
        }
        let batch = RecordBatch::try_new(self.schema.clone(), vec![column]);
        batch
            .and_then(|batch| self.writer.write(&batch))
            .map_err(|error| library_fault(&path, &error))?;
        self.blocks += 1;
        Ok(())
    }

    fn commit(mut self) -> Result<FileRecord> {
        let path = self.writer.get_ref().path().to_owned();
        self.writer.finish().map_err(|error| library_fault(&path, &error))?;
        self.writer.into_inner().map_err(|error| library_fault(&path, &error))?.commit()
    }
}

/// The offset of a block's values in an Arrow file whose full blocks hold `block_bytes` bytes of values.
pub const fn block_offset(block_bytes: u64, block: u64) -> u64 {
    2 * HEAD_BYTES + block * (HEAD_BYTES + block_bytes.next_multiple_of(64))
}

struct TokenFile {
    file: BlockFile,
    sums: AtomicFile,
    open: Vec<u32>,
    token_bytes: u32,
    written: u64,
}

impl TokenFile {
    fn create(path: &Path, sums: &Path, token_bytes: u32) -> Result<Self> {
        let block_bytes = BLOCK_TOKENS * u64::from(token_bytes);
        Ok(TokenFile {
            file: BlockFile::create(path, token_schema(token_bytes), block_bytes)?,
            sums: AtomicFile::create(sums)?,
            open: Vec::with_capacity(BLOCK_TOKENS as usize),
            token_bytes,
            written: 0,
        })
    }

    fn push(&mut self, mut tokens: &[u32]) -> Result<()> {
        self.written += tokens.len() as u64;
        while !tokens.is_empty() {
            let room = BLOCK_TOKENS as usize - self.open.len();
            let (now, later) = tokens.split_at(room.min(tokens.len()));
            self.open.extend_from_slice(now);
            tokens = later;
            if self.open.len() == BLOCK_TOKENS as usize {
                self.write_block()?;
            }
        }
        Ok(())
    }

    fn write_block(&mut self) -> Result<()> {
        let (column, sum): (ArrayRef, u64) = if self.token_bytes == 2 {
            // Check all of them first, so that neither loop has a branch.
            if self.open.iter().fold(0, |all, id| all | id) > u32::from(u16::MAX) {
                return Err(Fault::bug("an id does not fit its column"));
            }
            let column = UInt16Array::from_iter_values(self.open.drain(..).map(|id| id as u16));
            let sum = block_sum(column.values().inner());
            (Arc::new(column), sum)
        } else {
            let room = Vec::with_capacity(BLOCK_TOKENS as usize);
            let column = UInt32Array::from(std::mem::replace(&mut self.open, room));
            let sum = block_sum(column.values().inner());
            (Arc::new(column), sum)
        };
        self.file.write(column)?;
        self.sums.put(&sum.to_le_bytes())
    }

    fn finish(mut self) -> Result<(FileRecord, FileRecord)> {
        if !self.open.is_empty() {
            self.write_block()?;
        }
        Ok((self.file.commit()?, self.sums.commit()?))
    }
}

struct StartFile {
    file: BlockFile,
    open: Vec<u64>,
    written: u64,
}

impl StartFile {
    fn create(path: &Path) -> Result<Self> {
        let file = BlockFile::create(path, start_schema(), BLOCK_STARTS * 8)?;
        Ok(StartFile { file, open: Vec::new(), written: 0 })
    }

    fn push(&mut self, start: u64) -> Result<()> {
        self.open.push(start);
        self.written += 1;
        if self.open.len() as u64 == BLOCK_STARTS { self.write_block() } else { Ok(()) }
    }

    fn write_block(&mut self) -> Result<()> {
        let column = UInt64Array::from_iter_values(self.open.drain(..));
        self.file.write(Arc::new(column))
    }

    fn finish(mut self) -> Result<FileRecord> {
        if !self.open.is_empty() {
            self.write_block()?;
        }
        self.file.commit()
    }
}

struct DocumentFile {
    writer: ArrowWriter<AtomicFile>,
    schema: SchemaRef,
    path: PathBuf,
    source: String,
    split: Split,
    open: Vec<DocumentRecord>,
    /// Bytes of the kept values in `open`.
    kept_bytes: usize,
}

impl DocumentFile {
    fn create(path: &Path, head: &StreamHead) -> Result<Self> {
        let level = ZstdLevel::try_new(1).map_err(|error| library_fault(path, &error))?;
        let properties = WriterProperties::builder()
            .set_created_by("zdata".to_owned())
            .set_compression(Compression::ZSTD(level))
            .set_max_row_group_row_count(Some(ROW_GROUP_DOCUMENTS))
            .build();
        let schema = document_schema(&head.keep);
        let writer =
            ArrowWriter::try_new(AtomicFile::create(path)?, schema.clone(), Some(properties))
                .map_err(|error| library_fault(path, &error))?;
        Ok(DocumentFile {
            writer,
            schema,
            path: path.to_owned(),
            source: head.source.clone(),
            split: head.split,
            open: Vec::new(),
            kept_bytes: 0,
        })
    }

    fn push(&mut self, record: DocumentRecord) -> Result<()> {
        self.kept_bytes += record.kept.iter().flatten().map(String::len).sum::<usize>();
        self.open.push(record);
        let is_full = self.open.len() == ROWS_AT_ONCE || self.kept_bytes >= KEPT_AT_ONCE;
        if is_full { self.write_rows() } else { Ok(()) }
    }

    fn write_rows(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.open);
        self.kept_bytes = 0;
        let text = |values: Vec<&str>| Arc::new(StringArray::from(values)) as ArrayRef;
        let words = |value: fn(&DocumentRecord) -> Option<u64>| {
            Arc::new(rows.iter().map(value).collect::<UInt64Array>()) as ArrayRef
        };
        let mut columns = vec![
            Arc::new(rows.iter().map(|row| row.id.as_deref()).collect::<StringArray>()) as ArrayRef,
            text(vec![&self.source; rows.len()]),
            text(vec![self.split.name(); rows.len()]),
            Arc::new(UInt32Array::from_iter_values(rows.iter().map(|row| row.file))),
            words(|row| Some(row.row)),
            Arc::new(rows.iter().map(|row| row.group).collect::<UInt32Array>()),
            words(|row| row.bytes.map(|(first, _)| first)),
            words(|row| row.bytes.map(|(_, end)| end)),
            words(|row| Some(row.first_token)),
            words(|row| Some(row.tokens)),
        ];
        for at in 0..self.schema.fields().len() - columns.len() {
            let kept = rows.iter().map(|row| row.kept.get(at).and_then(Option::as_deref));
            columns.push(Arc::new(kept.collect::<StringArray>()));
        }
        let batch = RecordBatch::try_new(self.schema.clone(), columns)
            .map_err(|error| library_fault(&self.path, &error))?;
        self.writer.write(&batch).map_err(|error| library_fault(&self.path, &error))
    }

    fn finish(mut self) -> Result<FileRecord> {
        if !self.open.is_empty() {
            self.write_rows()?;
        }
        let path = self.path;
        self.writer.into_inner().map_err(|error| library_fault(&path, &error))?.commit()
    }
}
