//! The messages of an Arrow IPC stream or file, in order; the bytes are hashed on the way.
//!
//! An IPC file contains an IPC stream between its magic and its footer, so both are read as streams. The framing is
//! read here, and only messages are decoded by the library, for two reasons. A stream without its end marker is
//! refused: the format allows it, but then a complete file looks like one that lost its last batches. And each
//! message claims the decompressed size of its buffers: the library allocates that much before it reads the data, so
//! the claim is checked first.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::buffer::Buffer;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::try_fb_to_schema;
use arrow::ipc::reader::{read_dictionary, read_record_batch};
use arrow::ipc::{self, CompressionType, root_as_footer, root_as_message};
use contract::{Fault, Result, counted};
use zstd::zstd_safe::get_frame_content_size;

use super::columns::{guarded, in_group};
use super::decompress::Tee;
use super::groups::{ARROW as MAGIC, Cut, Groups, Layout};
use super::{Content, kinds};
use crate::disk::Disk;

const CONTINUATION: [u8; 4] = [0xff; 4];

/// What may follow the stream: a footer, with 24 bytes for each record batch.
const REST_BYTES_MAX: u64 = 1 << 30;

/// Memory allocated for a message before its bytes arrive; for a longer one it grows with the bytes.
const TRUSTED_BYTES: usize = 64 << 20;

/// LZ4 expands a byte to at most 255; zstd can expand more, but then states the size of its content.
const LZ4_RATIO_MAX: u64 = 255;

/// Bytes read at a time.
const RAW_BYTES: usize = 256 << 10;

/// A file of messages.
pub(super) struct Messages {
    raw: BufReader<Tee>,
    path: PathBuf,
    groups: Groups,
    is_file: bool,
    schema: SchemaRef,
    projection: Option<Vec<usize>>,
    #[expect(
        clippy::disallowed_types,
        reason = "the library's interface; only ever looked up by id"
    )]
    dictionaries: std::collections::HashMap<i64, ArrayRef>,
    /// The number of the next batch.
    batches: usize,
}

struct Message {
    head: Vec<u8>,
    body: Buffer,
}

impl Messages {
    /// Opens `path` and reads its schema.
    pub(super) fn open(disk: &dyn Disk, path: &Path, cut: Option<&Cut>) -> Result<Self> {
        let pieces = disk.pieces(path).map_err(|error| Fault::io("open", path, &error))?;
        let groups = Groups::new(path, Layout::of_arrow(path, &pieces)?, 0, cut)?;
        let (tee, first) = (groups.tee(disk, path)?, groups.range.start);
        // The schema is at the begin of the file.
        let (tee, rest) = match first {
            0 => (tee, None),
            _ => (Tee::open(disk, path)?, Some(tee)),
        };
        let mut messages = Messages {
            raw: BufReader::with_capacity(RAW_BYTES, tee),
            path: path.to_owned(),
            groups,
            is_file: false,
            schema: Arc::new(Schema::empty()),
            projection: None,
            dictionaries: Default::default(),
            batches: first,
        };
        let mut first = messages.exactly(8)?;
        messages.is_file = first.starts_with(MAGIC);
        if let Some(fault) = kinds::misnamed(path, &first).filter(|_| !messages.is_file) {
            return Err(fault);
        }
        if messages.is_file {
            // Zeros align the stream, as many as the writer chose; a stream itself never begins with zeros.
            first = messages.exactly(8)?;
            while first == [0; 8] {
                first = messages.exactly(8)?;
            }
        }
        let schema = messages.message(&first)?;
        let Some(message) = schema else { return Err(messages.damaged("no schema")) };
        messages.schema = guarded(path, "Arrow", || {
            let schema =
                parsed(&message.head)?.header_as_schema().ok_or_else(|| unfit("no schema"))?;
            try_fb_to_schema(schema).map(Arc::new)
        })?;
        if let Some(rest) = rest {
            messages.raw = BufReader::with_capacity(RAW_BYTES, rest);
        }
        Ok(messages)
    }

    pub(super) fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Restricts decoding to these top-level columns.
    pub(super) fn project(&mut self, columns: Vec<usize>) {
        self.projection = Some(columns);
    }

    /// The number of the next batch.
    pub(super) fn batches(&self) -> usize {
        self.batches
    }

    /// The number of raw bytes read so far.
    pub(super) fn raw_bytes(&self) -> u64 {
        self.raw.get_ref().bytes()
    }

    /// What was read, once there are no more batches.
    pub(super) fn content(&self) -> Content {
        let read = self.batches - self.groups.range.start;
        self.groups.content(self.raw.get_ref(), read as u64)
    }

    /// The next record batch; none after the end marker, once everything after it was checked.
    pub(super) fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        if self.batches == self.groups.range.end && !self.groups.are_last() {
            return Ok(None);
        }
        loop {
            let message = self.next_message();
            let message = message.map_err(in_group(&self.path, "record batch", self.batches))?;
            let Some(message) = message else { return self.finish().map(|()| None) };
            let (schema, projection) = (self.schema.clone(), self.projection.as_deref());
            let dictionaries = &mut self.dictionaries;
            let batch = guarded(&self.path, "Arrow", || {
                let head = parsed(&message.head)?;
                if let Some(batch) = head.header_as_record_batch() {
                    check_lengths(&batch, &message.body)?;
                    let version = head.version();
                    read_record_batch(
                        &message.body,
                        batch,
                        schema,
                        dictionaries,
                        projection,
                        &version,
                    )
                    .map(Some)
                } else if let Some(dictionary) = head.header_as_dictionary_batch() {
                    let data = dictionary.data().ok_or_else(|| unfit("an empty dictionary"))?;
                    check_lengths(&data, &message.body)?;
                    let version = head.version();
                    read_dictionary(&message.body, dictionary, &schema, dictionaries, &version)?;
                    Ok(None)
                } else {
                    Err(unfit("a message that is neither a record batch nor a dictionary"))
                }
            })
            .map_err(in_group(&self.path, "record batch", self.batches))?;
            if batch.is_some() {
                self.check_place()?;
                self.batches += 1;
                return Ok(batch);
            }
        }
    }

    /// Checks that a batch ends where the footer says so: another part of a build may begin there.
    fn check_place(&self) -> Result<()> {
        let at = self.raw.get_ref().at() - self.raw.buffer().len() as u64;
        match self.groups.end(self.batches) {
            Some(end) if end != at => Err(self.damaged(&format!(
                "record batch {} ends at byte {at}, by the footer at {end}",
                self.batches
            ))),
            _ => Ok(()),
        }
    }

    /// The next message; none at the end marker.
    fn next_message(&mut self) -> Result<Option<Message>> {
        let first = self.exactly(4)?;
        let first = if first == CONTINUATION { [first, self.exactly(4)?].concat() } else { first };
        self.message(&first)
    }

    /// Reads the message that begins with `first`: its marker and length, or its length alone.
    fn message(&mut self, first: &[u8]) -> Result<Option<Message>> {
        let marked = first.strip_prefix(&CONTINUATION);
        let Some((length, rest)) = marked.unwrap_or(first).split_first_chunk::<4>() else {
            return Err(self.damaged("no length of a message"));
        };
        let length = match u64::try_from(i32::from_le_bytes(*length)) {
            Ok(0) => return Ok(None),
            Ok(length) if length >= rest.len() as u64 => length,
            _ => return Err(self.damaged("an impossible length of a message")),
        };
        let head = [rest, &self.exactly(length - rest.len() as u64)?].concat();
        let length = guarded(&self.path, "Arrow", || {
            let length = parsed(&head)?.bodyLength();
            u64::try_from(length).map_err(|_| unfit("a message with a body of negative length"))
        })?;
        let body = Buffer::from_vec(self.exactly(length)?);
        Ok(Some(Message { head, body }))
    }

    /// Reads exactly `length` bytes, allocating memory only as they arrive.
    fn exactly(&mut self, length: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(length.min(TRUSTED_BYTES as u64) as usize);
        let read = self.raw.by_ref().take(length).read_to_end(&mut bytes);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        match length - bytes.len() as u64 {
            0 => Ok(bytes),
            missing => Err(self
                .damaged(&format!("the end of the file, {} too soon", counted(missing, "byte")))),
        }
    }

    /// Checks what follows the end marker: nothing, or a footer that lists as many batches as were read.
    fn finish(&mut self) -> Result<()> {
        let mut rest = Vec::new();
        let read = self.raw.by_ref().take(REST_BYTES_MAX).read_to_end(&mut rest);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        if !self.is_file {
            return match rest.len() {
                0 => Ok(()),
                _ => Err(self.damaged("something after the end marker")),
            };
        }
        let footer = rest.strip_suffix(MAGIC).and_then(|rest| rest.split_last_chunk::<4>());
        let footer = footer.and_then(|(footer, length)| {
            let length = usize::try_from(i32::from_le_bytes(*length)).ok()?;
            footer.get(footer.len().checked_sub(length)?..)
        });
        let Some(footer) = footer else { return Err(self.damaged("no footer at the end")) };
        let listed = guarded(&self.path, "Arrow", || {
            let footer = root_as_footer(footer).map_err(|error| unfit(&error.to_string()))?;
            Ok::<_, ArrowError>(footer.recordBatches().map_or(0, |batches| batches.len()))
        })?;
        if listed != self.batches {
            let read = self.batches;
            return Err(
                self.damaged(&format!("{read} record batches where the footer lists {listed}"))
            );
        }
        Ok(())
    }

    fn damaged(&self, found: &str) -> Fault {
        Fault::data("the Arrow file is damaged or cut short")
            .at(self.path.display().to_string())
            .found(found)
            .hint("fetch or write the file again")
    }
}

fn parsed(head: &[u8]) -> std::result::Result<ipc::Message<'_>, ArrowError> {
    root_as_message(head).map_err(|error| unfit(&error.to_string()))
}

fn unfit(what: &str) -> ArrowError {
    ArrowError::ParseError(what.to_owned())
}

/// Checks the claimed sizes of a compressed message's buffers against the compressed bytes.
fn check_lengths(batch: &ipc::RecordBatch<'_>, body: &[u8]) -> std::result::Result<(), ArrowError> {
    let Some(compression) = batch.compression() else { return Ok(()) };
    for buffer in batch.buffers().iter().flatten() {
        let range =
            usize::try_from(buffer.offset()).ok().zip(usize::try_from(buffer.length()).ok());
        let end = range.and_then(|(start, length)| start.checked_add(length));
        let bytes = range.zip(end).and_then(|((start, _), end)| body.get(start..end));
        let bytes = bytes.ok_or_else(|| unfit("a buffer outside its message"))?;
        // An empty buffer has no size, and -1 marks one that is not compressed.
        let Some((claimed, packed)) = bytes.split_first_chunk::<8>() else { continue };
        let claimed = i64::from_le_bytes(*claimed);
        let ratio = packed.len() as u64 * LZ4_RATIO_MAX;
        let possible = match compression.codec() {
            _ if claimed <= 0 => true,
            CompressionType::ZSTD => match get_frame_content_size(packed) {
                Ok(Some(content)) => claimed as u64 == content,
                Ok(None) => claimed as u64 <= ratio,
                Err(_) => false,
            },
            _ => claimed as u64 <= ratio,
        };
        if !possible {
            return Err(unfit(&format!("a buffer that claims {claimed} bytes")));
        }
    }
    Ok(())
}
