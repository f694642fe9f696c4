//! `dropped.jsonl.zst`: every record of a part that was read and not kept, one line of JSON for each, in order.
//!
//! ```text
//! {"file":0,"row":12,"id":"d12","reason":"exact-duplicates: of an earlier document","bytes":840}
//! ```
//!
//! `file` counts the inputs of the part, `row` and `group` are as in the provenance, `bytes` as in the accounting. A
//! line with `spans` lists bytes that a step removed from a document's text, as offsets in the text before that step;
//! it does not say whether the document was kept.
//!
//! The dedup scan writes a list of the same form for a whole source, without ids and bytes: `removed.jsonl.zst`, with
//! the index of the manifest's input as `file`, and with the document that was `kept` instead. Encoding tasks read the
//! lines about their files; readers of a store get both lists as one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Write};
use std::iter::Peekable;
use std::path::{Path, PathBuf};

use contract::{Fault, Result, json};
use serde::{Deserialize, Serialize};
use store::disk::AtomicFile;
use store::folder::StoreFile;
use store::open::part_file;
use store::verify::flaw;
use store::{FileRecord, Location, Manifest, SourceRecord, regular};

use crate::corpus::PartInputs;
use crate::source::{Document, Row};
use crate::spans::{Span, without};

/// The list's name in the part's folder.
pub(crate) const FILE: &str = "dropped.jsonl.zst";

/// The name of the scan's list, in the source's folder.
pub(crate) const REMOVED: &str = "removed.jsonl.zst";

/// The limit on rows in a group.
const ROWS: u64 = 1 << 40;

/// Group and row as one number, in the order of the file.
pub(crate) fn address(group: Option<u32>, row: u64) -> Option<u64> {
    let group = group.map_or(0, |group| u64::from(group) + 1);
    (row < ROWS && group < 1 << 24).then(|| group * ROWS + row)
}

fn place(at: u64) -> (Option<u32>, u64) {
    ((at / ROWS).checked_sub(1).map(|group| group as u32), at % ROWS)
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// The index of the source's input; in the list of a part, counted in the part.
    pub file: usize,
    /// Row group (Parquet) or record batch (Arrow).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Line, or row in its group.
    pub row: u64,
    /// Its own id, where it could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Why it was not kept, or why bytes were removed.
    pub reason: String,
    /// Its bytes, as the accounting counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// For a duplicate, the document that was kept at that step; a later step may have dropped it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
    /// The removed spans, if not the whole record was removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(u32, u32)>,
}

/// The document that a step kept instead of its duplicates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Its source.
    pub source: String,
    /// The index of that source's input.
    pub file: usize,
    /// Row group or record batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Line, or row in its group.
    pub row: u64,
}

impl Kept {
    /// The document at this address in a file.
    pub(crate) fn at(source: &str, file: usize, at: u64) -> Self {
        let (group, row) = place(at);
        Kept { source: source.to_owned(), file, group, row }
    }
}

impl Line {
    /// A line of the scan.
    pub(crate) fn of_scan(
        file: usize,
        at: u64,
        reason: &str,
        kept: Option<Kept>,
        spans: &[Span],
    ) -> Self {
        let ((group, row), reason, spans) = (place(at), reason.to_owned(), spans.to_vec());
        Line { file, group, row, id: None, reason, bytes: None, kept, spans }
    }

    fn is_of(&self, file: usize, row: Row) -> bool {
        (self.file, self.group, self.row) == (file, row.group, row.row)
    }
}

/// Writes a list.
pub(crate) struct Writer<W: Write = Vec<u8>>(zstd::Encoder<'static, W>);

impl<W: Write> Writer<W> {
    pub(crate) fn new(out: W) -> Result<Self> {
        zstd::Encoder::new(out, 3).map(Writer).map_err(unwritten)
    }

    pub(crate) fn push(&mut self, line: &Line) -> Result<()> {
        self.0.write_all(&json::line(line, "a line")?).map_err(unwritten)
    }

    pub(crate) fn finish(self) -> Result<W> {
        self.0.finish().map_err(unwritten)
    }
}

fn unwritten(error: io::Error) -> Fault {
    Fault::io("write", Path::new(FILE), &error)
}

/// Builds the list of a part: joins the scan's decisions with the records as they are processed.
#[derive(Default)]
pub(crate) struct Listing {
    folder: PathBuf,
    /// The scan's lines that were not reached yet.
    decided: Option<Lines>,
    next: Option<Line>,
    /// Created at the first line.
    out: Option<Writer<AtomicFile>>,
}

impl Listing {
    /// Begins the list of the part in `folder`; `decided` is the scan's for its files.
    pub(crate) fn new(folder: PathBuf, decided: Option<&Path>) -> Result<Self> {
        let mut decided = decided.map(Lines::open).transpose()?;
        let next = decided.as_mut().and_then(Iterator::next).transpose()?;
        Ok(Listing { folder, decided, next, out: None })
    }

    /// The record at this position is kept; the spans that the scan removed from it are listed.
    pub(crate) fn kept(&mut self, file: usize, row: Row) -> Result<()> {
        match self.said_of(file, row)? {
            None => Ok(()),
            Some(line) => Err(changed(&line)),
        }
    }

    /// The record of `line` is not kept.
    pub(crate) fn dropped(&mut self, line: Line) -> Result<()> {
        self.said_of(line.file, Row { group: line.group, row: line.row })?;
        self.push(&line)
    }

    /// Why the scan removed the record at this position, if it did. Spans that it removed from the record are listed.
    fn said_of(&mut self, file: usize, row: Row) -> Result<Option<Line>> {
        let Some(line) = self.next.take_if(|line| line.is_of(file, row)) else { return Ok(None) };
        self.next = self.decided.as_mut().and_then(Iterator::next).transpose()?;
        if line.spans.is_empty() {
            return Ok(Some(line));
        }
        self.push(&line).map(|()| None)
    }

    fn push(&mut self, line: &Line) -> Result<()> {
        let out = match &mut self.out {
            Some(out) => out,
            none => none.insert(Writer::new(AtomicFile::create(&self.folder.join(FILE))?)?),
        };
        out.push(line)
    }

    /// The file of the scan's next line, if one was not reached yet.
    pub(crate) fn awaited(&self) -> Option<usize> {
        self.next.as_ref().map(|line| line.file)
    }

    /// Completes the list; none if nothing was dropped.
    pub(crate) fn finish(self) -> Result<Option<FileRecord>> {
        if let Some(line) = self.next {
            return Err(changed(&line));
        }
        self.out.map(|out| out.finish()?.commit()).transpose()
    }
}

/// The hint for an input that changed. A plan of tasks has results of its earlier content.
pub(crate) const CHANGED_HINT: &str =
    "run `zdata build` again; of tasks, `zdata task plan` again, with another --cache-dir";

/// The fault if the scan removed a record that is kept or missing now.
fn changed(line: &Line) -> Fault {
    let place = line.group.map_or(String::new(), |group| format!(" of group {group}"));
    Fault::mismatch("this input changed between scan and build")
        .found(format!("row {}{place} is not what the scan saw", line.row))
        .hint(CHANGED_HINT)
}

/// The list in the build's memory: 9 bytes per document, by file, and 8 for each removed span of a kept document.
#[derive(Default)]
pub(crate) struct List {
    files: BTreeMap<usize, (Vec<u64>, Vec<u8>)>,
    reasons: Vec<String>,
    /// The removed spans of kept documents.
    spans: BTreeMap<(usize, u64), Vec<Span>>,
}

impl List {
    /// Reads a part of the scan's list, made by [`cut`].
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let mut list = List::default();
        Lines::open(path)?.try_for_each(|line| list.take(line?))?;
        Ok(list)
    }

    /// Reads a store's list of a source, and which documents were kept instead of duplicates.
    pub(crate) fn of(store: &Location, source: &SourceRecord) -> Result<(Self, Firsts)> {
        let (mut list, mut firsts) = (List::default(), Firsts::new());
        for line in Dropped::of(store, source)? {
            let mut line = line?;
            if let Some(kept) = line.kept.take() {
                firsts.insert((line.file, line.group, line.row), kept);
            }
            list.take(line)?;
        }
        Ok((list, firsts))
    }

    fn take(&mut self, line: Line) -> Result<()> {
        let at = address(line.group, line.row);
        let at =
            at.ok_or_else(|| Fault::data("a list names a row that no file has").found(line.row))?;
        if !line.spans.is_empty() {
            self.spans.insert((line.file, at), line.spans);
            return Ok(());
        }
        let reason = match self.reasons.iter().position(|known| *known == line.reason) {
            Some(known) => known,
            None => {
                self.reasons.push(line.reason);
                self.reasons.len() - 1
            }
        };
        let (places, reasons) = self.files.entry(line.file).or_default();
        places.push(at);
        reasons.push(reason as u8);
        Ok(())
    }

    /// The text of a document without the spans that the scan removed; none if it is unchanged.
    pub(crate) fn rest(&self, file: usize, document: &Document) -> Result<Option<String>> {
        let at = address(document.group, document.row);
        let Some(spans) = at.and_then(|at| self.spans.get(&(file, at))) else { return Ok(None) };
        without(&document.text, spans).map(Some).ok_or_else(|| {
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

/// Cuts the list at `path` by the inputs of consecutive parts, renumbered from the first file of each, into the files
/// that `create` begins for them. The results do not say which document was kept: no encoded byte depends on it.
pub(crate) fn cut(
    path: &Path,
    parts: &[&PartInputs],
    mut create: impl FnMut(usize) -> Result<AtomicFile>,
) -> Result<()> {
    let mut lines = Lines::open(path)?;
    let mut next = lines.next().transpose()?;
    for (number, part) in parts.iter().enumerate() {
        let mut writer = Writer::new(create(number)?)?;
        // No manifest has the digests of these lists, so each has a sum of its own.
        writer.0.include_checksum(true).map_err(unwritten)?;
        while let Some(line) = next.take_if(|line| !part.are_before(line.file, line.group)) {
            writer.push(&Line { file: line.file - part.files.start, kept: None, ..line })?;
            next = lines.next().transpose()?;
        }
        writer.finish()?.commit()?;
    }
    next.map_or(Ok(()), |_| Err(Fault::bug("a list names a file that is not there")))
}

/// Checks the sum in a list that [`cut`] made, of these bytes.
pub(crate) fn check_cut(path: &Path, bytes: &[u8]) -> Result<()> {
    zstd::stream::copy_decode(bytes, io::sink()).map_err(|why| {
        Fault::data(format!("a list of removed documents is damaged: {why}"))
            .at(path.display().to_string())
            .hint("delete its folder, then run `zdata task decide` or `zdata build` again")
    })
}

/// Calls `take` with every line of a store, and its source.
pub fn each_of(
    store: impl Into<Location>,
    manifest: &Manifest,
    mut take: impl FnMut(&SourceRecord, Line) -> Result<()>,
) -> Result<()> {
    let store = store.into();
    for source in &manifest.sources {
        for line in Dropped::of(&store, source)? {
            take(source, line?)?;
        }
    }
    Ok(())
}

/// The dropped records of a source of a store: the lists of its parts, with what the scan says of them.
struct Dropped<'a> {
    store: &'a Location,
    source: &'a SourceRecord,
    /// The next part, the open one's lines and its first file.
    part: u32,
    open: Option<(Lines, u32)>,
    removed: Option<Peekable<Lines>>,
}

impl<'a> Dropped<'a> {
    fn of(store: &'a Location, source: &'a SourceRecord) -> Result<Self> {
        let removed = source.removed_file.as_ref().map(|record| {
            Lines::of_store(&StoreFile::new(store, &[&source.name, &record.name]), record)
        });
        let removed = removed.transpose()?.map(Iterator::peekable);
        Ok(Dropped { store, source, part: 0, open: None, removed })
    }

    /// The next line of the parts' lists.
    fn line(&mut self) -> Option<Result<Line>> {
        loop {
            if let Some((lines, first_file)) = &mut self.open {
                let first_file = *first_file as usize;
                let numbered =
                    |line: Line| Line { file: line.file.saturating_add(first_file), ..line };
                if let Some(line) = lines.next() {
                    return Some(line.map(numbered));
                }
            }
            let part = self.source.parts.get(self.part as usize)?;
            let (store, name, number) = (self.store, &self.source.name, self.part);
            self.part += 1;
            let lines = part.dropped_file.as_ref().map(|record| {
                Lines::of_store(&part_file(store, name, number, &record.name), record)
            });
            self.open = match lines.transpose() {
                Err(fault) => return Some(Err(fault)),
                Ok(lines) => lines.map(|lines| (lines, part.first_file)),
            };
        }
    }

    /// The document that the scan kept instead of the one at this place.
    fn kept(&mut self, of: &Line) -> Result<Option<Kept>> {
        let Some(removed) = &mut self.removed else { return Ok(None) };
        let place = |line: &Line| (line.file, line.group, line.row);
        while let Some(line) =
            removed.next_if(|line| line.as_ref().map_or(true, |line| place(line) <= place(of)))
        {
            let line = line?;
            if place(&line) == place(of) && line.spans.is_empty() {
                return Ok(line.kept);
            }
        }
        Ok(None)
    }
}

impl Iterator for Dropped<'_> {
    type Item = Result<Line>;

    fn next(&mut self) -> Option<Result<Line>> {
        let line = self.line()?;
        Some(line.and_then(|line| {
            // A line about removed spans is the scan's own.
            let kept = if line.spans.is_empty() { self.kept(&line)? } else { None };
            Ok(Line { kept, ..line })
        }))
    }
}

/// The lines of a list, in order.
struct Lines {
    place: String,
    lines: io::Lines<BufReader<zstd::Decoder<'static, BufReader<File>>>>,
}

impl Lines {
    /// The list at `path`.
    fn open(path: &Path) -> Result<Self> {
        Lines::new(path.into(), regular::open(path))
    }

    /// A store's list, whose bytes must be those of its record: a line that is wrong is JSON as well.
    fn of_store(file: &StoreFile, record: &FileRecord) -> Result<Self> {
        match flaw(file, record, &|_| ())? {
            None => Lines::new(file.location(), file.open()),
            Some(why) => Err(damaged(&file.location().to_string(), why)),
        }
    }

    fn new(place: Location, file: io::Result<File>) -> Result<Self> {
        let file = file.map_err(|error| place.fault("read", &error))?;
        let place = place.to_string();
        let decoder = zstd::Decoder::new(file).map_err(|error| damaged(&place, error))?;
        let lines = BufReader::new(decoder).lines();
        Ok(Lines { place, lines })
    }
}

impl Iterator for Lines {
    type Item = Result<Line>;

    fn next(&mut self) -> Option<Result<Line>> {
        let line = self.lines.next()?.map_err(|error| damaged(&self.place, error));
        Some(line.and_then(|line| {
            serde_json::from_str(&line).map_err(|error| damaged(&self.place, error))
        }))
    }
}

fn damaged(place: &str, why: impl std::fmt::Display) -> Fault {
    Fault::data(format!("the list of dropped records is damaged: {why}"))
        .at(place)
        .hint("restore the file, or remove the store's folder and build it again")
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

    /// Any flipped bit, also one that makes another line.
    #[test]
    fn lists_are_held_against_their_sums() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| folder.path().join(name);
        let mut all = Writer::new(AtomicFile::create(&of(REMOVED)).unwrap()).unwrap();
        let line = |file, row| Line::of_scan(file, row, "exact-duplicates", None, &[]);
        [(0, 3), (1, 7)].into_iter().for_each(|(file, row)| all.push(&line(file, row)).unwrap());
        let record = all.finish().unwrap().commit().unwrap();
        let part = PartInputs { source: 0, files: 0..2, cut: None };
        cut(&of(REMOVED), &[&part], |_| AtomicFile::create(&of("part"))).unwrap();
        let store = Location::from(folder.path());
        let read = || Lines::of_store(&StoreFile::new(&store, &[REMOVED]), &record);
        assert_eq!(read().unwrap().count(), 2);
        let whole = |name: &str| std::fs::read(of(name)).unwrap();
        check_cut(&of("part"), &whole("part")).unwrap();
        for (name, bit) in ["part", REMOVED]
            .into_iter()
            .flat_map(|name| (0..8 * whole(name).len()).step_by(3).map(move |bit| (name, bit)))
        {
            let (good, mut bytes) = (whole(name), whole(name));
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(of(name), &bytes).unwrap();
            let found = match name {
                REMOVED => read().map(drop),
                _ => check_cut(&of(name), &bytes),
            };
            std::fs::write(of(name), &good).unwrap();
            let text = |bytes: &[u8]| zstd::decode_all(bytes).ok();
            // Some bits of a header change nothing.
            let same = name == "part" && text(&bytes) == text(&good);
            assert!(
                same || found.is_err_and(|it| it.class() == contract::Class::Data),
                "bit {bit} of {name}"
            );
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
