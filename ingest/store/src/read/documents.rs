//! Provenance rows. Read for explanations only, never on the way to a batch.

use std::ops::Range;

use arrow::array::{AsArray, RecordBatch};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReaderBuilder, RowSelection};

use super::column::{damaged, missing};
use crate::documents::{guarded, row};
use crate::folder::StoreFile;
use crate::pieces::Pieces;
use crate::write::document_schema;
use crate::{DocumentRecord, FileRecord, ShardRecord};
use crate::{Location, regular};
use contract::{Fault, Result};

/// Holds the file against its record, in pieces: it may be large.
pub(super) fn check(file: &StoreFile, record: &FileRecord) -> Result<()> {
    let path = &file.location();
    let file = file.open().map_err(|error| missing(path, &error))?;
    let found = regular::digest(file, &|_| ());
    let (bytes, found) = found.map_err(|error| path.fault("read", &error))?;
    if (bytes, found) == (record.bytes, record.digest) {
        return Ok(());
    }
    Err(damaged(path, "provenance does not match its digest")
        .found(format!("{found}, {bytes} bytes"))
        .wanted(format!("{}, {} bytes", record.digest, record.bytes)))
}

/// Appends the records of `rows` (rising, apart), touching only the row groups that hold them.
pub(super) fn read_rows(
    file: &StoreFile,
    shard: &ShardRecord,
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
            // Counted in the groups that are kept, as the reader counts.
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
    for batch in batches(path, &file, builder)? {
        let batch = batch?;
        out.extend((0..batch.num_rows()).map(|at| row(&batch, at)));
    }
    let wanted: u64 = rows.iter().map(|range| range.end - range.start).sum();
    if (out.len() - before) as u64 != wanted {
        return Err(strange(path));
    }
    // What a record says is held against the shard before anything is read by it.
    let tokens = shard.first_token..shard.first_token + shard.tokens;
    let fits = |record: &DocumentRecord| {
        let end = record.first_token.checked_add(record.tokens);
        record.first_token >= tokens.start && end.is_some_and(|end| end <= tokens.end)
    };
    match out[before..].iter().find(|record| !fits(record)) {
        Some(record) => Err(damaged(path, "provenance contradicts the manifest")
            .found(format!("{} tokens from {} on", record.tokens, record.first_token))
            .wanted(format!("tokens within {}..{}", tokens.start, tokens.end))),
        None => Ok(()),
    }
}

/// The rows whose id is `id`.
pub(super) fn find(file: &StoreFile, id: &str) -> Result<Vec<u64>> {
    let path = &file.location();
    let (builder, file) = builder(file)?;
    let ids = ProjectionMask::columns(builder.parquet_schema(), ["id"]);
    let builder = builder.with_projection(ids);
    let (mut found, mut number) = (Vec::new(), 0);
    for batch in batches(path, &file, builder)? {
        let batch = batch?;
        for other in batch.column(0).as_string::<i32>() {
            if other == Some(id) {
                found.push(number);
            }
            number += 1;
        }
    }
    Ok(found)
}

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
    let known = builder.schema().fields() == document_schema().fields();
    if known { Ok((builder, file)) } else { Err(strange(path)) }
}

fn batches(
    path: &Location,
    file: &Pieces,
    builder: ParquetRecordBatchReaderBuilder<Pieces>,
) -> Result<impl Iterator<Item = Result<RecordBatch>>> {
    let unreadable = move |error: &str| {
        file.or_machine(path, damaged(path, "provenance is unreadable").found(error))
    };
    let build = || builder.build().map_err(|error| unreadable(&error.to_string()));
    let mut reader = guarded(path, build, unreadable)?;
    Ok(std::iter::from_fn(move || {
        let next = || reader.next().transpose().map_err(|error| unreadable(&error.to_string()));
        guarded(path, next, unreadable).transpose()
    }))
}

fn strange(path: &Location) -> Fault {
    damaged(path, "provenance has other columns or rows than this format")
}
