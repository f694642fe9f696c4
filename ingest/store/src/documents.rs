//! Reading the two lists of documents of a shard from front to back: starts and provenance.

use std::error::Error;
use std::fs::File;
use std::io::ErrorKind;

use arrow::array::{Array as _, AsArray as _, RecordBatch};
use arrow::datatypes::{UInt32Type, UInt64Type};
use arrow::ipc::reader::FileReader;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use crate::folder::StoreFile;
use crate::pieces::Pieces;
use crate::write::{document_schema, start_schema};
use crate::{DocumentRecord, Location};
use contract::fault::{io_cause, is_of_the_moment, tells_of_memory};
use contract::guard::quietly;
use contract::{Fault, Result};

/// The fault of a file that another writer must have written, or that changed after its digest was checked.
fn strange(path: &Location, what: impl ToString) -> Fault {
    Fault::data(format!("it cannot be read: {}", what.to_string()))
        .at(path.to_string())
        .hint("check the store with `zdata verify`")
}

/// The fault behind a library's error: the machine's, if it is of the moment.
fn unreadable(path: &Location, error: &(dyn Error + 'static)) -> Fault {
    match io_cause(error) {
        Some(error) if is_of_the_moment(error) => path.fault("read", error),
        _ => strange(path, error),
    }
}

/// Runs a decoder. Digests vouch for the bytes of a file, but a forger can make them agree, and decoders index into what a
/// file says of itself: a panic is an error of the file, told by `strange`, unless it is for want of memory.
pub(super) fn guarded<T>(
    path: &Location,
    decode: impl FnOnce() -> Result<T>,
    strange: impl FnOnce(&str) -> Fault,
) -> Result<T> {
    quietly(decode).unwrap_or_else(|panic| {
        Err(match tells_of_memory(&panic) {
            true => path.fault("read", &ErrorKind::OutOfMemory.into()),
            false => strange("bytes that the decoder could not make sense of"),
        })
    })
}

/// The starts in `starts-*.arrow`.
pub struct Starts {
    path: Location,
    reader: FileReader<File>,
    batch: Option<RecordBatch>,
    at: usize,
}

impl Starts {
    /// Opens one file.
    pub fn open(file: &StoreFile) -> Result<Self> {
        let path = file.location();
        let file = file.open().map_err(|error| path.fault("read", &error))?;
        let open = || FileReader::try_new(file, None).map_err(|error| unreadable(&path, &error));
        let reader = guarded(&path, open, |what| strange(&path, what))?;
        if reader.schema() != start_schema() {
            return Err(strange(&path, "its schema is not that of starts"));
        }
        Ok(Starts { path, reader, batch: None, at: 0 })
    }
}

impl Iterator for Starts {
    type Item = Result<u64>;

    fn next(&mut self) -> Option<Result<u64>> {
        while self.batch.as_ref().is_none_or(|batch| self.at == batch.num_rows()) {
            let Starts { path, reader, .. } = self;
            let next = || reader.next().transpose().map_err(|error| unreadable(path, &error));
            match guarded(path, next, |what| strange(path, what)).transpose()? {
                Ok(batch) => (self.batch, self.at) = (Some(batch), 0),
                Err(fault) => return Some(Err(fault)),
            }
        }
        let start = self.batch.as_ref()?.column(0).as_primitive::<UInt64Type>().value(self.at);
        self.at += 1;
        Some(Ok(start))
    }
}

/// The rows of `documents-*.parquet`.
pub struct Documents {
    path: Location,
    file: Pieces,
    reader: ParquetRecordBatchReader,
    batch: Option<RecordBatch>,
    at: usize,
}

impl Documents {
    /// Opens one file.
    pub fn open(file: &StoreFile) -> Result<Self> {
        let path = file.location();
        let file = file.open().and_then(Pieces::of_file);
        let file = file.map_err(|error| path.fault("read", &error))?;
        let fault = |error: String| file.or_machine(&path, strange(&path, error));
        let open = || {
            let builder = ParquetRecordBatchReaderBuilder::try_new(file.clone());
            let builder = builder.map_err(|e| fault(e.to_string()))?;
            if builder.schema().fields() != document_schema().fields() {
                return Err(strange(&path, "its schema is not that of documents"));
            }
            builder.with_batch_size(4096).build().map_err(|e| fault(e.to_string()))
        };
        let reader = guarded(&path, open, |what| strange(&path, what))?;
        Ok(Documents { path, file, reader, batch: None, at: 0 })
    }
}

impl Iterator for Documents {
    type Item = Result<DocumentRecord>;

    fn next(&mut self) -> Option<Result<DocumentRecord>> {
        while self.batch.as_ref().is_none_or(|batch| self.at == batch.num_rows()) {
            let Documents { path, file, reader, .. } = self;
            let fault = |error| file.or_machine(&*path, strange(path, error));
            let next = || reader.next().transpose().map_err(fault);
            match guarded(path, next, |what| strange(path, what)).transpose()? {
                Ok(batch) => (self.batch, self.at) = (Some(batch), 0),
                Err(fault) => return Some(Err(fault)),
            }
        }
        let row = row(self.batch.as_ref()?, self.at);
        self.at += 1;
        Some(Ok(row))
    }
}

/// Row `at` of a batch of documents, whose schema was checked.
pub(super) fn row(batch: &RecordBatch, at: usize) -> DocumentRecord {
    let word = |column: usize| {
        let column = batch.column(column).as_primitive::<UInt64Type>();
        column.is_valid(at).then(|| column.value(at))
    };
    let small = |column: usize| {
        let column = batch.column(column).as_primitive::<UInt32Type>();
        column.is_valid(at).then(|| column.value(at))
    };
    DocumentRecord {
        id: batch.column(0).as_string::<i32>().value(at).to_owned(),
        file: small(3).unwrap_or_default(),
        row: word(4).unwrap_or_default(),
        group: small(5),
        bytes: word(6).zip(word(7)),
        first_token: word(8).unwrap_or_default(),
        tokens: word(9).unwrap_or_default(),
    }
}
