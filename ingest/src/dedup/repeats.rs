//! Repeated substrings: long runs of bytes that occurred before, in the same document or in an earlier one.
//!
//! MinHash removes documents that are alike as a whole; this finds a licence, a menu or a quoted page inside documents
//! that otherwise differ. Of each run of `min_bytes` bytes that occurs more than once, the first occurrence in the
//! order of the store is kept whole. Every byte of a later occurrence is removed, unless it belongs to the first
//! occurrence of another run: so no run of this length vanishes from the corpus.
//!
//! The gap between two removed pieces ("bookends") is removed too if the pieces make up at least `bookend` of the range
//! from the start of the first to the end of the second, and if no byte of the gap belongs to the first occurrence of a
//! run. Such gaps are the remains of a page whose menu was removed.
//!
//! How: texts are joined with a NUL between them and their suffixes are sorted, which makes equal runs neighbours. (So
//! a run that contains a NUL is never compared: `clean` removes NULs.) The texts of a partition are sorted together, in
//! about 12 bytes of memory per byte of text: memory is bounded by `partition_bytes`, or by one longer document,
//! whatever the size of the corpus. Runs are compared only within a partition. Partitions are filled in the order of
//! the store, independently of workers or tasks. The texts and the removed pieces are on disk meanwhile.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write as _};
use std::path::PathBuf;

use contract::{Fault, Ratio, Result};
use store::disk::OutputFile;
use suffix::SuffixTable;

use super::Doc;
use super::sorter::{Scratch, Writer};
use crate::recipe::compare::Repeats;
use crate::spans::Span;

/// Why bytes are removed.
pub(crate) const REASON: &str = "repeated-substrings: of an earlier place";

/// Why a document is removed of which nothing is left.
pub(crate) const EMPTIED: &str = "repeated-substrings: nothing left";

/// Bytes of memory per byte of the texts that are compared at a time.
pub(super) const FACTOR: u64 = 12;

/// Separates texts.
const BETWEEN: char = '\0';

/// Bytes of which neighbouring suffixes are compared first.
const HEAD_BYTES: usize = 32;

/// The texts that reach the step, on disk.
pub(super) struct Texts {
    path: PathBuf,
    file: BufWriter<OutputFile>,
    /// Each document with the size of its text.
    documents: Writer<3>,
}

impl Texts {
    /// No texts yet.
    pub(super) fn create(scratch: &Scratch) -> Result<Self> {
        let path = scratch.path();
        let file = BufWriter::new(OutputFile::create(&path)?);
        Ok(Texts { path, file, documents: scratch.writer()? })
    }

    /// The next document's text.
    pub(super) fn push(&mut self, [place, at]: Doc, text: &str) -> Result<()> {
        let bytes = text.len() as u64;
        if bytes >= i32::MAX as u64 {
            return Err(Fault::usage("a document is too long for `repeated-substrings`")
                .found(format!("{bytes} bytes"))
                .wanted("less than 2 GiB: set `max_document_bytes`"));
        }
        self.documents.push([place, at, bytes])?;
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|error| Fault::io("write", &self.path, &error))
    }

    /// Calls `found` with the removed spans, by document. `own` gives the group of a document if it is a candidate:
    /// documents are compared within a group.
    pub(super) fn decide(
        self,
        step: &Repeats,
        mut own: impl FnMut(Doc) -> Result<Option<usize>>,
        mut found: impl FnMut(Doc, Span) -> Result<()>,
    ) -> Result<()> {
        let Texts { path, file, documents } = self;
        file.into_inner().map_err(|error| Fault::io("write", &path, error.error()))?;
        let file = File::open(&path).map_err(|error| Fault::io("read", &path, &error))?;
        let (mut reader, mut documents) = (BufReader::new(file), documents.finish()?.read()?);
        let (mut partition, mut of) = (Partition::default(), None);
        while let Some([place, at, bytes]) = documents.next()? {
            let mut text = vec![0; bytes as usize];
            reader.read_exact(&mut text).map_err(|error| Fault::io("read", &path, &error))?;
            let text =
                String::from_utf8(text).map_err(|_| Fault::bug("a text changed on the disk"))?;
            let Some(group) = own([place, at])? else { continue };
            let full = (partition.text.len() + text.len()) as u64 > step.partition_bytes;
            if full || of.is_some_and(|of| of != group) {
                std::mem::take(&mut partition).decide(step, &mut found)?;
            }
            of = Some(group);
            partition.push([place, at], &text);
        }
        partition.decide(step, &mut found)
    }
}

/// Texts that are compared with each other.
#[derive(Default)]
struct Partition {
    text: String,
    /// Each document with the range of its text.
    documents: Vec<(Doc, std::ops::Range<usize>)>,
}

impl Partition {
    fn push(&mut self, document: Doc, text: &str) {
        let start = self.text.len();
        self.text.push_str(text);
        self.documents.push((document, start..self.text.len()));
        self.text.push(BETWEEN);
    }

    fn decide(self, step: &Repeats, found: &mut impl FnMut(Doc, Span) -> Result<()>) -> Result<()> {
        let least = step.min_bytes as usize;
        let places = places(&self.text, least);
        for (document, range) in self.documents {
            let pieces = pieces(&self.text[range.clone()], &places[range], least);
            let spans = match step.bookend {
                Some(share) => joined(pieces, share),
                None => pieces.into_iter().map(|piece| (piece.start, piece.end)).collect(),
            };
            for (start, end) in spans {
                found(document, (start as u32, end as u32))?;
            }
        }
        Ok(())
    }
}

/// The state of the run of bytes that begins at an offset.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It occurs only here, or extends past the end of the text.
    Only,
    /// It occurs again later.
    First,
    /// It occurred before.
    Later,
}

/// The state of the runs of `least` bytes at every offset of joined texts, in linear time.
fn places(text: &str, least: usize) -> Vec<Place> {
    let sorted = SuffixTable::new(text);
    let (sorted, mut places) = (sorted.table(), repeated(text.as_bytes(), sorted.table(), least));
    let mut begin = 0;
    for end in 1..=sorted.len() {
        if sorted.get(end).is_some_and(|at| places[*at as usize] == Place::Later) {
            continue;
        }
        // From `begin` to `end`, all runs are equal.
        let same = &sorted[begin..end];
        let first = same.iter().min().filter(|_| same.len() > 1);
        if let Some(first) = first {
            same.iter().for_each(|at| places[*at as usize] = Place::Later);
            places[*first as usize] = Place::First;
        }
        begin = end;
    }
    places
}

/// [`Place::Later`] where the run of `least` bytes is that of the suffix that is sorted before; a run that holds the
/// separator is none. Suffixes are taken in the order of the text: of the bytes that the one from `at` shares with its
/// neighbour, the one from `at + 1` shares all but the first with its own (Kasai et al. 2001), so that few bytes are
/// compared again.
fn repeated(text: &[u8], sorted: &[u32], least: usize) -> Vec<Place> {
    // Most suffixes share less with their neighbour: only the places of the others are looked at once more.
    let head = |at: u32| text.get(at as usize..at as usize + least.min(HEAD_BYTES));
    // One more than the place of the neighbour, or 0.
    let mut before = vec![0; text.len()];
    for pair in sorted.windows(2) {
        if head(pair[0]).is_some() && head(pair[0]) == head(pair[1]) {
            before[pair[1] as usize] = pair[0] + 1;
        }
    }
    let mut shared = 0;
    let place = |(at, before): (usize, u32)| {
        let Some(before) = (before as usize).checked_sub(1) else {
            shared = 0;
            return Place::Only;
        };
        let alike = |shared: usize| {
            let byte = text.get(at + shared);
            byte == text.get(before + shared) && byte.is_some_and(|byte| *byte != BETWEEN as u8)
        };
        while shared < least && alike(shared) {
            shared += 1;
        }
        let is_shared = shared >= least;
        shared = shared.saturating_sub(1);
        if is_shared { Place::Later } else { Place::Only }
    };
    before.into_iter().enumerate().map(place).collect()
}

/// A piece of a text that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: usize,
    end: usize,
    /// Whether the gap before it holds bytes of a run's first occurrence.
    needed: bool,
    /// Its repeated bytes: all, until gaps are joined to it.
    repeated: usize,
}

/// The bytes of a text that belong to a run's later occurrence and to no run's first one, cut at character boundaries.
fn pieces(text: &str, places: &[Place], least: usize) -> Vec<Piece> {
    let (mut pieces, mut first, mut later, mut needed) = (Vec::<Piece>::new(), 0, 0, false);
    let mut open: Option<usize> = None;
    let mut close = |start: usize, end: usize, needed: &mut bool| {
        let inside = |at: &usize| text.is_char_boundary(*at);
        let start = (start..=end).find(inside).unwrap_or(end);
        let end = (start..=end).rev().find(inside).unwrap_or(start);
        if start < end {
            pieces.push(Piece { start, end, needed: *needed, repeated: end - start });
            *needed = false;
        }
    };
    for (at, place) in places.iter().enumerate() {
        match place {
            Place::Only => {}
            Place::First => first = at + least,
            Place::Later => later = at + least,
        }
        match (at < later && at >= first, open) {
            (true, None) => open = Some(at),
            (false, Some(start)) => {
                close(start, at, &mut needed);
                open = None;
            }
            _ => {}
        }
        needed |= at < first;
    }
    if let Some(start) = open {
        close(start, text.len(), &mut needed);
    }
    pieces
}

/// Joins pieces over gaps, where the pieces make up at least `share` of the joined range.
fn joined(pieces: Vec<Piece>, share: Ratio) -> Vec<(usize, usize)> {
    let mut joined: Vec<Piece> = Vec::new();
    for mut piece in pieces {
        while let Some(before) = joined.last()
            && !piece.needed
            && (before.repeated + piece.repeated) as u128 * u128::from(share.den())
                >= u128::from(share.num()) * (piece.end - before.start) as u128
        {
            let repeated = before.repeated + piece.repeated;
            piece = Piece { start: before.start, needed: before.needed, repeated, ..piece };
            joined.pop();
        }
        joined.push(piece);
    }
    joined.into_iter().map(|piece| (piece.start, piece.end)).collect()
}

#[cfg(test)]
mod tests;
