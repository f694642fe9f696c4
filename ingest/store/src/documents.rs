//! Provenance rows: read for explanations and by `verify`, never for a batch.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array as _, AsArray as _, RecordBatch};
use arrow::datatypes::{DataType, Field, Fields, UInt32Type, UInt64Type};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReaderBuilder, RowSelection};

use crate::folder::{StoreFile, damaged, missing};
use crate::pieces::Pieces;
use crate::write::{KEPT, document_schema};
use crate::{DocumentRecord, FileRecord, Location, ShardRecord, place_of_id, regular};
use contract::fault::tells_of_memory;
use contract::guard::quietly;
use contract::{Fault, Result};

/// The columns that every file has.
const OWN_COLUMNS: usize = 10;

/// Where `tokens` is among them.
const TOKENS_COLUMN: usize = 9;

/// Runs a decoder. A forger can make the digests of a file agree, and decoders use a file's own numbers as indices: a
/// panic is an error of the file, made by `strange`, unless memory ran out.
fn guarded<T>(
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

/// The rows of `documents-*.parquet` as they are stored: tokens are counted in the shard, files in the part.
pub struct Documents {
    keep: Vec<String>,
    batches: Batches,
    batch: Option<RecordBatch>,
    at: usize,
}

impl Documents {
    /// Opens one file.
    pub fn open(file: &StoreFile) -> Result<Self> {
        let (builder, pieces) = builder(file)?;
        let keep = kept(builder.schema().fields()).unwrap_or_default();
        let batches = batches(file.location(), pieces, builder.with_batch_size(4096))?;
        Ok(Documents { keep, batches, batch: None, at: 0 })
    }

    /// The kept columns that the file has.
    pub fn keep(&self) -> &[String] {
        &self.keep
    }
}

impl Iterator for Documents {
    type Item = Result<DocumentRecord>;

    fn next(&mut self) -> Option<Result<DocumentRecord>> {
        while self.batch.as_ref().is_none_or(|batch| self.at == batch.num_rows()) {
            match self.batches.next()? {
                Ok(batch) => (self.batch, self.at) = (Some(batch), 0),
                Err(fault) => return Some(Err(fault)),
            }
        }
        let row = row(self.batch.as_ref()?, self.at);
        self.at += 1;
        Some(Ok(row))
    }
}

/// Checks the file against its record, in pieces since it may be large.
pub(crate) fn check(file: &StoreFile, record: &FileRecord) -> Result<()> {
    let path = &file.location();
    path.reread(|| {
        let file = file.open().map_err(|error| missing(path, &error))?;
        let found = regular::digest(file, &|_| ());
        let (bytes, found) = found.map_err(|error| path.fault("read", &error))?;
        if (bytes, found) == (record.bytes, record.digest) {
            return Ok(());
        }
        Err(damaged(path, "provenance does not match its digest")
            .found(format!("{found}, {bytes} bytes"))
            .wanted(format!("{}, {} bytes", record.digest, record.bytes)))
    })
}

/// Appends the records of `rows` (ascending, disjoint), reading only the row groups that hold them.
pub(crate) fn read_rows(
    file: &StoreFile,
    shard: &ShardRecord,
    first_file: u32,
    rows: &[Range<u64>],
    out: &mut Vec<DocumentRecord>,
) -> Result<()> {
    let path = &file.location();
    let (builder, file) = builder(file)?;
    let (mut groups, mut ranges, mut at, mut kept) = (Vec::new(), Vec::new(), 0u64, 0u64);
    for (number, group) in builder.metadata().row_groups().iter().enumerate() {
        let count = u64::try_from(group.num_rows()).unwrap_or(0);
        let inside =
            |range: &Range<u64>| range.start.max(at)..range.end.min(at.saturating_add(count));
        let before = ranges.len();
        for part in rows.iter().map(inside).filter(|part| !part.is_empty()) {
            // Row numbers within the selected groups, as the reader counts.
            ranges.push((part.start - at + kept) as usize..(part.end - at + kept) as usize);
        }
        if ranges.len() > before {
            groups.push(number);
            kept += count;
        }
        at = at.saturating_add(count);
    }
    let selection = RowSelection::from_consecutive_ranges(ranges.into_iter(), kept as usize);
    let builder = builder.with_row_groups(groups).with_row_selection(selection);
    let before = out.len();
    for batch in batches(path.clone(), file, builder)? {
        let batch = batch?;
        out.extend((0..batch.num_rows()).map(|at| row(&batch, at)));
    }
    let wanted: u64 = rows.iter().map(|range| range.end - range.start).sum();
    if (out.len() - before) as u64 != wanted {
        return Err(strange(path));
    }
    // A record is checked against the shard before anything is read by it.
    for record in &mut out[before..] {
        let end = record.first_token.checked_add(record.tokens);
        if end.is_none_or(|end| end > shard.tokens) {
            return Err(damaged(path, "provenance contradicts the manifest")
                .found(format!("{} tokens from {} on", record.tokens, record.first_token))
                .wanted(format!("tokens within 0..{}", shard.tokens)));
        }
        record.first_token += shard.first_token;
        record.file = record.file.saturating_add(first_file);
    }
    Ok(())
}

/// The tokens of each document of a file, in order, and its value of a kept column.
pub(crate) fn kept_values(
    file: &StoreFile,
    shard: &ShardRecord,
    column: &str,
    mut each: impl FnMut(u64, Option<&str>) -> Result<()>,
) -> Result<()> {
    let path = &file.location();
    let (builder, file) = builder(file)?;
    let kept = format!("{KEPT}{column}");
    let at = builder.schema().fields().iter().position(|field| *field.name() == kept);
    let at = at.ok_or_else(|| strange(path))?;
    let mask = ProjectionMask::roots(builder.parquet_schema(), [TOKENS_COLUMN, at]);
    let (mut documents, mut tokens) = (0, 0u64);
    for batch in batches(path.clone(), file, builder.with_projection(mask))? {
        let batch = batch?;
        let (counts, values) =
            (batch.column(0).as_primitive::<UInt64Type>(), batch.column(1).as_string::<i32>());
        for (count, value) in counts.values().iter().zip(values.iter()) {
            tokens = tokens.saturating_add(*count);
            documents += 1;
            each(*count, value)?;
        }
    }
    if (documents, tokens) != (shard.documents, shard.tokens) {
        return Err(damaged(path, "provenance contradicts the manifest")
            .found(format!("{documents} documents of {tokens} tokens"))
            .wanted(format!("{} of {}", shard.documents, shard.tokens)));
    }
    Ok(())
}

/// The rows of a file with an id: by their own id, and those without one by the id that users are shown.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) own: Vec<u64>,
    pub(crate) shown: Vec<u64>,
}

/// The rows whose id is `id`, in a file of a part that begins with input `first_file`.
pub(crate) fn find(file: &StoreFile, id: &str, first_file: u32) -> Result<Found> {
    let path = &file.location();
    let (builder, file) = builder(file)?;
    let wanted = place_of_id(id);
    let columns: &[&str] = if wanted.is_some() { &["id", "file", "row", "group"] } else { &["id"] };
    let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().copied());
    let builder = builder.with_projection(mask);
    let (mut found, mut number) = (Found::default(), 0);
    for batch in batches(path.clone(), file, builder)? {
        let batch = batch?;
        for (at, own) in batch.column(0).as_string::<i32>().iter().enumerate() {
            let place = || {
                let small = |column: usize| batch.column(column).as_primitive::<UInt32Type>();
                let row = batch.column(2).as_primitive::<UInt64Type>().value(at);
                let group = small(3).is_valid(at).then(|| small(3).value(at));
                (small(1).value(at).saturating_add(first_file), group, row)
            };
            match own {
                Some(own) if own == id => found.own.push(number),
                None if wanted.is_some_and(|wanted| wanted == place()) => found.shown.push(number),
                _ => {}
            }
            number += 1;
        }
    }
    Ok(found)
}

/// Opens a file and checks that it has the columns of this format.
fn builder(file: &StoreFile) -> Result<(ParquetRecordBatchReaderBuilder<Pieces>, Pieces)> {
    let path = &file.location();
    let file = file.open().and_then(Pieces::of_file).map_err(|error| missing(path, &error))?;
    let wrong = |error: &str| {
        file.or_machine(path, damaged(path, "provenance is not a Parquet file").found(error))
    };
    let open = || {
        let builder = ParquetRecordBatchReaderBuilder::try_new(file.clone());
        builder.map_err(|error| wrong(&error.to_string()))
    };
    let builder = guarded(path, open, wrong)?;
    let known = kept(builder.schema().fields()).is_some();
    if known { Ok((builder, file)) } else { Err(strange(path)) }
}

/// The kept columns of a file with these columns, if they are those of this format.
fn kept(fields: &Fields) -> Option<Vec<String>> {
    let own = document_schema(&[]);
    let (first, rest) = fields.split_at_checked(OWN_COLUMNS)?;
    let name = |field: &Arc<Field>| {
        let fits = *field.data_type() == DataType::Utf8 && field.is_nullable();
        field.name().strip_prefix(KEPT).filter(|_| fits).map(str::to_owned)
    };
    if first == &own.fields()[..] { rest.iter().map(name).collect() } else { None }
}

/// The batches of a file.
type Batches = Box<dyn Iterator<Item = Result<RecordBatch>>>;

fn batches(
    path: Location,
    file: Pieces,
    builder: ParquetRecordBatchReaderBuilder<Pieces>,
) -> Result<Batches> {
    let place = path.clone();
    let unreadable = move |error: &str| {
        file.or_machine(&place, damaged(&place, "provenance is unreadable").found(error))
    };
    let build = || builder.build().map_err(|error| unreadable(&error.to_string()));
    let mut reader = guarded(&path, build, &unreadable)?;
    Ok(Box::new(std::iter::from_fn(move || {
        let next = || reader.next().transpose().map_err(|error| unreadable(&error.to_string()));
        guarded(&path, next, &unreadable).transpose()
    })))
}

fn strange(path: &Location) -> Fault {
    damaged(path, "provenance has other columns or rows than this format")
}

/// Row `at` of a batch of documents, whose schema was checked.
fn row(batch: &RecordBatch, at: usize) -> DocumentRecord {
    let word = |column: usize| {
        let column = batch.column(column).as_primitive::<UInt64Type>();
        column.is_valid(at).then(|| column.value(at))
    };
    let small = |column: usize| {
        let column = batch.column(column).as_primitive::<UInt32Type>();
        column.is_valid(at).then(|| column.value(at))
    };
    let text = |column: usize| {
        let column = batch.column(column).as_string::<i32>();
        column.is_valid(at).then(|| column.value(at).to_owned())
    };
    DocumentRecord {
        id: text(0),
        file: small(3).unwrap_or_default(),
        row: word(4).unwrap_or_default(),
        group: small(5),
        bytes: word(6).zip(word(7)),
        first_token: word(8).unwrap_or_default(),
        tokens: word(9).unwrap_or_default(),
        kept: (OWN_COLUMNS..batch.num_columns()).map(text).collect(),
    }
}
