//! `removed.jsonl.zst`: what the dedup scan removed of a source, one line of JSON for each.
//!
//! ```text
//! {"file":0,"row":12,"reason":"near-duplicates: of an earlier document","kept":{"source":"web","file":0,"row":3}}
//! ```
//!
//! `file` counts the manifest's inputs, `row` and `group` are those of provenance. A line with `spans` is of a document
//! that stays without these bytes of its text, counted when the step comes to it.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::ops::Range;
use std::path::Path;

use contract::{Fault, Result};
use serde::{Deserialize, Serialize};
use store::Location;

use super::repeats::{self, Span};
use crate::source::Document;

/// The file's name in the source's folder.
pub(crate) const FILE: &str = "removed.jsonl.zst";

/// Rows of a group, at most.
const ROWS: u64 = 1 << 40;

/// Group and row as one number, in the order of the file.
pub(crate) fn address(group: Option<u32>, row: u64) -> Option<u64> {
    let group = group.map_or(0, |group| u64::from(group) + 1);
    (row < ROWS && group < 1 << 24).then(|| group * ROWS + row)
}

fn place(at: u64) -> (Option<u32>, u64) {
    ((at / ROWS).checked_sub(1).map(|group| group as u32), at % ROWS)
}

/// One document removed.
pub(crate) struct Removed<'a> {
    pub(crate) file: usize,
    pub(crate) at: u64,
    pub(crate) reason: &'a str,
    /// For duplicates: source, file and place of the document that was kept.
    pub(crate) kept: Option<(&'a str, usize, u64)>,
    /// If the document stays: what goes of it.
    pub(crate) spans: &'a [Span],
}

#[derive(Serialize, Deserialize)]
struct Line {
    file: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<u32>,
    row: u64,
    reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept: Option<Kept>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    spans: Vec<Span>,
}

/// The document that was kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub(crate) source: String,
    pub(crate) file: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<u32>,
    pub(crate) row: u64,
}

/// Writes the list.
pub(crate) struct Writer(zstd::Encoder<'static, Vec<u8>>);

impl Writer {
    pub(crate) fn new() -> Result<Self> {
        let encoder = zstd::Encoder::new(Vec::new(), 3);
        Ok(Writer(encoder.map_err(|error| Fault::io("write", Path::new(FILE), &error))?))
    }

    pub(crate) fn push(&mut self, removed: Removed<'_>) -> Result<()> {
        let (group, row) = place(removed.at);
        let kept = removed.kept.map(|(source, file, at)| {
            let (group, row) = place(at);
            Kept { source: source.to_owned(), file, group, row }
        });
        self.write(&Line {
            file: removed.file,
            group,
            row,
            reason: removed.reason.to_owned(),
            kept,
            spans: removed.spans.to_vec(),
        })
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        let written = serde_json::to_writer(&mut self.0, line);
        let written = written.map_err(std::io::Error::from).and_then(|()| self.0.write_all(b"\n"));
        written.map_err(|error| Fault::io("write", Path::new(FILE), &error))
    }

    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        self.0.finish().map_err(|error| Fault::io("write", Path::new(FILE), &error))
    }
}

/// The list as the build looks things up in it: 9 bytes for each document, by file,
/// and 8 for each piece of one that stays.
#[derive(Default)]
pub(crate) struct List {
    files: BTreeMap<usize, (Vec<u64>, Vec<u8>)>,
    reasons: Vec<String>,
    /// What goes of documents that stay.
    spans: BTreeMap<(usize, u64), Vec<Span>>,
}

impl List {
    /// Reads the list of a source.
    pub(crate) fn read(store: impl Into<Location>, source: &str) -> Result<Self> {
        List::read_file(store.into().join(source).join(FILE))
    }

    /// Reads a list, or the part of one that [`cut`] made.
    pub(crate) fn read_file(path: impl Into<Location>) -> Result<Self> {
        let mut list = List::default();
        each(&path.into(), |line| {
            if !line.spans.is_empty() {
                let at = address(line.group, line.row);
                list.spans.extend(at.map(|at| ((line.file, at), line.spans)));
                return Ok(());
            }
            let reason = match list.reasons.iter().position(|known| *known == line.reason) {
                Some(known) => known,
                None => {
                    list.reasons.push(line.reason);
                    list.reasons.len() - 1
                }
            };
            let (at, reasons) = list.files.entry(line.file).or_default();
            at.extend(address(line.group, line.row));
            reasons.push(reason as u8);
            Ok(())
        })?;
        Ok(list)
    }

    /// The text of a document without what the scan removed of it; nothing if it stays as it is.
    pub(crate) fn rest(&self, file: usize, document: &Document) -> Result<Option<String>> {
        let at = address(document.group, document.row);
        let Some(spans) = at.and_then(|at| self.spans.get(&(file, at))) else { return Ok(None) };
        repeats::without(&document.text, spans).map(Some).ok_or_else(|| {
            Fault::mismatch("this document changed between scan and build")
                .hint("delete the store's folder and build it again")
        })
    }

    /// Why a document was removed, if it was.
    pub(crate) fn reason(&self, file: usize, group: Option<u32>, row: u64) -> Option<&str> {
        let (at, reasons) = self.files.get(&file)?;
        let found = at.binary_search(&address(group, row)?).ok()?;
        Some(&self.reasons[usize::from(reasons[found])])
    }
}

/// By file, group and row of a duplicate, the document that was kept.
pub(crate) type Firsts = BTreeMap<(usize, Option<u32>, u64), Kept>;

/// The documents that duplicates were removed for.
pub(crate) fn kept(store: &Location, source: &str) -> Result<Firsts> {
    let mut found = BTreeMap::new();
    each(&store.join(source).join(FILE), |line| {
        if let Some(kept) = line.kept {
            found.insert((line.file, line.group, line.row), kept);
        }
        Ok(())
    })?;
    Ok(found)
}

/// The list at `path`, cut into those of consecutive ranges of files, which count files from the first of the range. They do
/// not say which document was kept: nothing that is encoded depends on it.
pub(crate) fn cut(path: &Path, ranges: &[Range<usize>]) -> Result<Vec<Vec<u8>>> {
    let mut cut: Vec<Writer> = ranges.iter().map(|_| Writer::new()).collect::<Result<_>>()?;
    each(&path.into(), |line| {
        let number = ranges.partition_point(|range| range.end <= line.file);
        let (Some(range), Some(writer)) = (ranges.get(number), cut.get_mut(number)) else {
            return Err(Fault::bug("a list names a file that is not there"));
        };
        writer.write(&Line { file: line.file - range.start, kept: None, ..line })
    })?;
    cut.into_iter().map(Writer::finish).collect()
}

fn each(path: &Location, mut take: impl FnMut(Line) -> Result<()>) -> Result<()> {
    let damaged = |why: String| {
        Fault::data(format!("the list of removed documents is damaged: {why}"))
            .at(path.to_string())
            .hint("delete the store's folder and build it again")
    };
    let file = path.open().map_err(|error| path.fault("read", &error))?;
    let decoder = zstd::Decoder::new(file).map_err(|error| damaged(error.to_string()))?;
    for line in BufReader::new(decoder).lines() {
        let line = line.map_err(|error| damaged(error.to_string()))?;
        take(serde_json::from_str(&line).map_err(|error| damaged(error.to_string()))?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn places_survive(group in prop::option::of(0u32..(1 << 24) - 1), row in 0u64..ROWS) {
            prop_assert_eq!(place(address(group, row).unwrap()), (group, row));
        }
    }

    #[test]
    fn addresses_have_the_order_of_the_file() {
        let order = [(None, 1), (None, 9), (Some(0), 0), (Some(0), 7), (Some(1), 3)];
        let at: Vec<u64> =
            order.iter().map(|(group, row)| address(*group, *row).unwrap()).collect();
        assert!(at.is_sorted());
        assert_eq!(address(None, ROWS), None);
        assert_eq!(address(Some(u32::MAX), 0), None);
    }
}
