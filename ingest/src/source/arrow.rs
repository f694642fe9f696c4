//! Arrow IPC, as a stream or as a file: a string column, nested or not, record batch by record batch.
//!
//! An IPC file holds an IPC stream between its magic and its footer, so both are read from front to end in one pass
//! that also takes the identity. A stream without its end marker is taken for cut short: the format would allow it,
//! but then nothing would tell a whole file from one that lost its last batches.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StructArray};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamReader;
use contract::{Fault, Identity, Result};

use super::columns::{Column, Rows, guarded, no_column, wrong_column};
use super::decompress::Tee;
use super::{Fields, Input, Limits, Records, Slab};

const MAGIC: &[u8; 6] = b"ARROW1";

/// What may follow the stream: a footer, with 24 bytes for each record batch.
const REST_BYTES_MAX: u64 = 1 << 30;

/// Rows of a slab, at most.
const ROWS_MAX: usize = 4096;

/// Reads the record batches of a file in order.
pub(super) struct Reader {
    path: Arc<Path>,
    limits: Limits,
    stream: StreamReader<Source>,
    is_file: bool,
    text: String,
    id: Option<String>,
    groups: u32,
    slabs: VecDeque<Slab>,
    ended: bool,
}

/// The raw bytes, which remember whether the decoder ever asked for more than there are.
struct Source {
    head: io::Cursor<Vec<u8>>,
    raw: BufReader<Tee>,
    starved: bool,
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = match self.head.read(buffer)? {
            0 => self.raw.read(buffer)?,
            got => got,
        };
        self.starved |= got == 0 && !buffer.is_empty();
        Ok(got)
    }
}

impl Reader {
    pub(super) fn open(path: &Path, fields: &Fields, limits: Limits) -> Result<Self> {
        let mut raw = BufReader::with_capacity(256 << 10, Tee::open(path)?);
        let mut head = Vec::new();
        let io = |error: io::Error| Fault::io("read", path, &error);
        raw.by_ref().take(8).read_to_end(&mut head).map_err(io)?;
        let is_file = head.starts_with(MAGIC);
        if is_file {
            head.clear();
        }
        let source = Source { head: io::Cursor::new(head), raw, starved: false };
        let stream = guarded(path, "Arrow", || StreamReader::try_new(source, None))?;
        let schema = stream.schema();
        check(path, &schema, &fields.text, "strings", is_text)?;
        if let Some(id) = &fields.id {
            check(path, &schema, id, "strings or integers", |kind| {
                is_text(kind) || is_integer(kind)
            })?;
        }
        let (text, id) = (fields.text.clone(), fields.id.clone());
        let (path, slabs) = (path.into(), VecDeque::new());
        Ok(Reader { path, limits, stream, is_file, text, id, groups: 0, slabs, ended: false })
    }

    /// Cuts a batch into slabs; the pieces share its memory.
    fn cut(&mut self, batch: &RecordBatch) -> Result<()> {
        let group = self.groups;
        self.groups = group.checked_add(1).ok_or_else(|| self.cut_short("too many batches"))?;
        let text = column(batch, &self.text).ok_or_else(|| self.cut_short("a column is gone"))?;
        let id = match &self.id {
            Some(id) => Some(column(batch, id).ok_or_else(|| self.cut_short("a column is gone"))?),
            None => None,
        };
        let bytes = text.0.to_data().get_slice_memory_size().unwrap_or_default();
        let each = bytes / batch.num_rows().max(1);
        let step = (self.limits.slab_bytes / each.max(1)).clamp(1, ROWS_MAX);
        let piece = |(array, nulls): &(ArrayRef, Option<NullBuffer>), first, rows| {
            let nulls = nulls.as_ref().map(|nulls| nulls.slice(first, rows));
            Column::Array(array.slice(first, rows), nulls)
        };
        for first in (0..batch.num_rows()).step_by(step) {
            let rows = step.min(batch.num_rows() - first);
            self.slabs.push_back(Slab(Records::Rows(Rows {
                path: self.path.clone(),
                kind: "record batch",
                group,
                first: first as u64,
                rows,
                text: piece(&text, first, rows),
                id: id.as_ref().map(|id| piece(id, first, rows)),
                bytes_max: self.limits.max_document_bytes,
            })));
        }
        Ok(())
    }

    /// Checks that the stream ended where the file says, and reads what follows for the identity.
    fn finish(&mut self) -> Result<()> {
        if self.stream.get_ref().starved {
            return Err(self.cut_short("the end of the file before the end marker of the stream"));
        }
        let source = self.stream.get_mut();
        let mut rest = Vec::new();
        let outcome = source.take(REST_BYTES_MAX).read_to_end(&mut rest);
        outcome.map_err(|error| Fault::io("read", &self.path, &error))?;
        if !self.is_file {
            return match rest.len() {
                0 => Ok(()),
                more => Err(self.cut_short(&format!("{more} bytes after the end marker"))),
            };
        }
        let footer = rest.strip_suffix(MAGIC).and_then(|rest| rest.split_last_chunk::<4>());
        let Some((footer, length)) = footer else {
            return Err(self.cut_short("no footer at the end of the file"));
        };
        let length = u32::from_le_bytes(*length) as usize;
        let start =
            footer.len().checked_sub(length).ok_or_else(|| self.cut_short("a torn footer"))?;
        let batches = guarded(&self.path, "Arrow", || {
            let footer = arrow::ipc::root_as_footer(&footer[start..])
                .map_err(|error| ArrowError::ParseError(error.to_string()))?;
            Ok::<_, ArrowError>(footer.recordBatches().map_or(0, |batches| batches.len()))
        })?;
        if batches != self.groups as usize {
            let found = format!("{} record batches where the footer lists {batches}", self.groups);
            return Err(self.cut_short(&found));
        }
        Ok(())
    }

    fn cut_short(&self, found: &str) -> Fault {
        Fault::data("the Arrow file is damaged or cut short")
            .at(self.path.display().to_string())
            .found(found)
            .hint("fetch or write the file again")
    }
}

impl Input for Reader {
    fn next_slab(&mut self) -> Result<Option<Slab>> {
        loop {
            if let Some(slab) = self.slabs.pop_front() {
                return Ok(Some(slab));
            }
            if self.ended {
                return Ok(None);
            }
            let stream = &mut self.stream;
            let batch = guarded(&self.path, "Arrow", || stream.next().transpose())?;
            match batch {
                Some(batch) => self.cut(&batch)?,
                None => {
                    self.finish()?;
                    self.ended = true;
                }
            }
        }
    }

    fn content(&self) -> (u64, Identity) {
        self.stream.get_ref().raw.get_ref().content()
    }
}

/// The array at a dotted path, and the nulls of the structs on the way.
fn column(batch: &RecordBatch, name: &str) -> Option<(ArrayRef, Option<NullBuffer>)> {
    if let Some(array) = batch.column_by_name(name) {
        return Some((array.clone(), None));
    }
    let mut at: ArrayRef = Arc::new(StructArray::from(batch.clone()));
    let mut nulls = None;
    for part in name.split('.') {
        let parent = at.as_struct_opt()?;
        nulls = NullBuffer::union(nulls.as_ref(), parent.nulls());
        at = parent.column_by_name(part)?.clone();
    }
    Some((at, nulls))
}

/// Refuses a schema without a fitting column at a dotted path.
fn check(
    path: &Path,
    schema: &Schema,
    name: &str,
    wanted: &str,
    fits: impl Fn(&DataType) -> bool,
) -> Result<()> {
    let mut leaves = Vec::new();
    schema.fields().iter().for_each(|field| list_leaves(field, "", &mut leaves));
    match leaves.iter().find(|(leaf, _)| leaf == name) {
        Some((_, kind)) if fits(kind) => Ok(()),
        Some((_, kind)) => Err(wrong_column(path, name, kind, wanted)),
        None => Err(no_column(path, name, leaves.iter().map(|(leaf, _)| leaf.as_str()))),
    }
}

fn list_leaves(field: &Field, prefix: &str, leaves: &mut Vec<(String, DataType)>) {
    let name = format!("{prefix}{}", field.name());
    match field.data_type() {
        DataType::Struct(fields) => {
            fields.iter().for_each(|field| list_leaves(field, &format!("{name}."), leaves));
        }
        kind => leaves.push((name, kind.clone())),
    }
}

fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => is_text(values),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => true,
        _ => false,
    }
}

fn is_integer(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => values.is_integer(),
        kind => kind.is_integer(),
    }
}
