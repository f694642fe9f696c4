//! Arrow IPC, as a stream or as a file: a string column, nested or not, or whole rows, record batch by record batch.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StructArray};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{DataType, Field, Schema};
use contract::{Fault, Result};

use super::columns::{Column, Rows, check_types};
use super::groups::Cut;
use super::ipc::Messages;
use super::{Content, Fields, Input, Limits, Records, Slab, names, records};
use crate::disk::Disk;

/// The limit of rows in a slab.
const ROWS_MAX: usize = 4096;

/// Reads the record batches of a file in order.
pub(super) struct Reader {
    path: Arc<Path>,
    limits: Limits,
    messages: Messages,
    /// Whether whole rows are parsed.
    whole: bool,
    text: String,
    id: Option<String>,
    slabs: VecDeque<Slab>,
    ended: bool,
}

impl Reader {
    pub(super) fn open(
        disk: &dyn Disk,
        path: &Path,
        fields: &Fields,
        limits: Limits,
        cut: Option<&Cut>,
    ) -> Result<Self> {
        let mut messages = Messages::open(disk, path, cut)?;
        let schema = messages.schema();
        if !fields.is_record() {
            check_types(path, schema, fields)?;
        }
        let columns = if fields.needs_rows() {
            let known: Vec<&str> = schema.fields().iter().map(|f| f.name().as_str()).collect();
            records::roots(path, &known, fields)?
        } else {
            Self::columns(schema, fields)
        };
        messages.project(columns);
        let (text, id) = (fields.path().to_owned(), fields.id.clone());
        let whole = fields.needs_rows();
        let (path, slabs) = (path.into(), VecDeque::new());
        Ok(Reader { path, limits, messages, whole, text, id, slabs, ended: false })
    }

    /// The top-level columns that hold the text and the id.
    fn columns(schema: &Schema, fields: &Fields) -> Vec<usize> {
        let names = [Some(fields.path()), fields.id.as_deref()];
        let wanted =
            |field: &Field| names.iter().flatten().any(|name| leads_to(field.name(), name));
        let columns = schema.fields().iter().enumerate().filter(|(_, field)| wanted(field));
        columns.map(|(index, _)| index).collect()
    }

    /// Cuts a batch of this number into slabs, which share its memory.
    fn cut(&mut self, batch: &RecordBatch, number: usize) -> Result<()> {
        let group = u32::try_from(number).map_err(|_| Fault::data("too many record batches"))?;
        if self.whole {
            self.cut_rows(batch, group);
            return Ok(());
        }
        self.cut_column(batch, group)
    }

    /// Cuts slabs of whole rows.
    fn cut_rows(&mut self, batch: &RecordBatch, group: u32) {
        let size = |column: &ArrayRef| column.to_data().get_slice_memory_size().unwrap_or_default();
        let bytes: usize = batch.columns().iter().map(size).sum();
        let step = self.step(bytes, batch.num_rows()).min(records::ROWS);
        for first in (0..batch.num_rows()).step_by(step) {
            self.slabs.push_back(Slab(Records::Objects(records::Rows {
                path: self.path.clone(),
                kind: "record batch",
                group,
                first: first as u64,
                batch: batch.slice(first, step.min(batch.num_rows() - first)),
                bytes_max: self.limits.max_document_bytes,
            })));
        }
    }

    /// Rows per slab, for a batch of this many bytes and rows.
    fn step(&self, bytes: usize, rows: usize) -> usize {
        let each = bytes / rows.max(1);
        (self.limits.slab_bytes / each.max(1)).clamp(1, ROWS_MAX)
    }

    /// Cuts slabs of the text and the id.
    fn cut_column(&mut self, batch: &RecordBatch, group: u32) -> Result<()> {
        let torn = || Fault::data("two columns share a name").at(self.path.display().to_string());
        let text = column(batch, &self.text).ok_or_else(torn)?;
        let id = self.id.as_ref().map(|id| column(batch, id).ok_or_else(torn)).transpose()?;
        let bytes = text.0.to_data().get_slice_memory_size().unwrap_or_default();
        let step = self.step(bytes, batch.num_rows());
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
            let number = self.messages.batches();
            match self.messages.next_batch()? {
                Some(batch) => self.cut(&batch, number)?,
                None => self.ended = true,
            }
        }
    }

    fn raw_bytes(&self) -> u64 {
        self.messages.raw_bytes()
    }

    fn content(&self) -> Content {
        self.messages.content()
    }
}

/// Whether a top-level column is `path` or holds it.
fn leads_to(column: &str, path: &str) -> bool {
    let path = names::joined(path);
    path.strip_prefix(column).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The array at a dotted path, and the nulls of the structs around it.
fn column(batch: &RecordBatch, name: &str) -> Option<(ArrayRef, Option<NullBuffer>)> {
    if let Some(array) = batch.column_by_name(&names::joined(name)) {
        return Some((array.clone(), None));
    }
    let mut at: ArrayRef = Arc::new(StructArray::from(batch.clone()));
    let mut nulls = None;
    for part in names::of(name) {
        // A path into a column without values leads to a column without values.
        if *at.data_type() == DataType::Null {
            break;
        }
        let parent = at.as_struct_opt()?;
        nulls = NullBuffer::union(nulls.as_ref(), parent.nulls());
        at = parent.column_by_name(&part)?.clone();
    }
    Some((at, nulls))
}
