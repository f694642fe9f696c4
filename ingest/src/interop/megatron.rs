//! Megatron's `.bin` and `.idx`, little-endian.
//!
//! ```text
//! .bin   tokens, one after the other
//! .idx   0  "MMIDIDX\0\0"    9  u64 version, 1    17  u8 type of a token    18  u64 S    26  u64 D
//!        34        S x i32   tokens of each sequence
//!        34 + 4S   S x i64   byte of each sequence in .bin: the sum of those before
//!        34 + 12S  D x i64   sequences before each document, and S at the end; the first is 0
//! ```
//!
//! A document of several sequences is read as one. We write one sequence for a document, as `preprocess_data.py` does,
//! and choose the type of a token as Megatron's own writer does.

use std::ffi::OsString;
use std::io::{BufReader, Read as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use contract::{Fault, Result, counted};
use store::disk::AtomicFile;
use store::pieces::{Onward, Pieces};
use store::{FileRecord, InputRecord};

use super::tokens::{Hashing, TokenFile, put};
use super::{Documents, Hints, NextDocument, Width, Writer, begin, damaged, end};
use crate::disk::Disk;

const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
const HEAD: u64 = 34;

/// Megatron's writer uses two bytes per token for a vocabulary below this size.
const SMALL_VOCAB: u32 = 65_500;

/// The codes of widths.
const CODES: [(u8, Width); 6] = [
    (1, Width::U8),
    (2, Width::I8),
    (3, Width::I16),
    (4, Width::I32),
    (5, Width::I64),
    (8, Width::U16),
];

/// The two files for a path, which may be either of them or their common stem.
pub(super) fn pair(path: &Path) -> (PathBuf, PathBuf) {
    // As bytes, since the name need not be UTF-8.
    let name = path.as_os_str().as_bytes();
    let stem = name.strip_suffix(b".bin").or(name.strip_suffix(b".idx")).unwrap_or(name);
    let with = |ending: &[u8]| PathBuf::from(OsString::from_vec([stem, ending].concat()));
    (with(b".bin"), with(b".idx"))
}

/// One section of the index, read sequentially.
struct Section<const N: usize> {
    path: PathBuf,
    reader: BufReader<Onward>,
    left: u64,
}

impl<const N: usize> Section<N> {
    fn new(path: &Path, index: &Pieces, offset: u64, count: u64) -> Self {
        let reader = BufReader::with_capacity(64 << 10, index.onward(offset));
        Section { path: path.to_owned(), reader, left: count }
    }

    fn next(&mut self) -> Result<Option<[u8; N]>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let mut word = [0; N];
        let read = self.reader.read_exact(&mut word);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        Ok(Some(word))
    }
}

/// The header of an index.
struct Head {
    width: Width,
    sequences: u64,
    entries: u64,
}

/// Reads a header and checks its counts against the file's size.
fn head(path: &Path, index: &mut Hashing) -> Result<Head> {
    let mut raw = [0; HEAD as usize];
    if index.bytes < HEAD {
        return Err(damaged(path, "this is not an index: it is too short for its header")
            .found(counted(index.bytes, "byte"))
            .wanted(format!("at least {HEAD}")));
    }
    index.read_exact(&mut raw).map_err(|error| Fault::io("read", path, &error))?;
    if raw[..9] != MAGIC {
        return Err(damaged(path, "this is not an index: it does not begin with MMIDIDX"));
    }
    let word = |at: usize| raw[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    if word(9) != 1 {
        return Err(damaged(path, "this index is of another version").found(word(9)).wanted(1));
    }
    let Some((_, width)) = CODES.iter().find(|(code, _)| *code == raw[17]) else {
        return Err(damaged(path, "its tokens are of a type that no token has")
            .found(format!("code {}", raw[17]))
            .wanted("1 to 5 or 8: whole numbers (6 and 7 mean fractions)"));
    };
    let (sequences, entries) = (word(18), word(26));
    let size = u128::from(HEAD) + 12 * u128::from(sequences) + 8 * u128::from(entries);
    let bytes = u128::from(index.bytes);
    if sequences > 0 && bytes == size + u128::from(sequences) {
        return Err(damaged(path, "it holds a mode for each sequence: this is not text alone")
            .hint("export the text without modes"));
    }
    if bytes != size || entries == 0 {
        return Err(damaged(path, "its counts do not fit its size")
            .found(format!("{bytes} bytes for {sequences} sequences and {entries} boundaries"))
            .wanted(format!("{size} bytes, and at least one boundary")));
    }
    Ok(Head { width: *width, sequences, entries })
}

/// Reads a pair.
pub(super) struct Reader {
    tokens: TokenFile,
    index: InputRecord,
    lengths: Section<4>,
    pointers: Section<8>,
    boundaries: Section<8>,
    path: PathBuf,
    sequences: u64,
    sequence: u64,
}

impl Reader {
    pub(super) fn open(disk: &dyn Disk, path: &Path, hints: &Hints) -> Result<Self> {
        let (bin, idx) = pair(path);
        let mut index = Hashing::open(disk, &idx)?;
        let Head { width, sequences, entries } = head(&idx, &mut index)?;
        index.drain()?;
        if let Some(stated) = hints.width.filter(|stated| *stated != width) {
            return Err(Fault::usage("--dtype differs from the index")
                .at(idx.display().to_string())
                .found(stated.name())
                .wanted(width.name()));
        }
        let pieces = disk.pieces(&idx).map_err(|error| Fault::io("read", &idx, &error))?;
        let mut boundaries = Section::new(&idx, &pieces, HEAD + 12 * sequences, entries);
        let first = boundaries.next()?.map_or(0, i64::from_le_bytes);
        if first != 0 {
            return Err(
                damaged(&idx, "its first document does not begin at sequence 0").found(first)
            );
        }
        Ok(Reader {
            tokens: TokenFile::open(disk, &bin, width, hints.vocab)?,
            index: index.record(0),
            lengths: Section::new(&idx, &pieces, HEAD, sequences),
            pointers: Section::new(&idx, &pieces, HEAD + 4 * sequences, sequences),
            boundaries,
            path: idx,
            sequences,
            sequence: 0,
        })
    }

    /// Appends one sequence.
    fn sequence(&mut self, out: &mut Vec<u32>) -> Result<()> {
        let (length, pointer) = (self.lengths.next()?, self.pointers.next()?);
        let length = length.map_or(0, i32::from_le_bytes);
        let pointer = pointer.map_or(0, i64::from_le_bytes);
        let place = || format!("{}: sequence {}", self.path.display(), self.sequence);
        let Ok(count) = u64::try_from(length) else {
            return Err(damaged(&self.path, "a sequence has a length below zero")
                .at(place())
                .found(length));
        };
        let wanted = self.tokens.byte();
        if u64::try_from(pointer) != Ok(wanted) {
            return Err(damaged(
                &self.path,
                "a sequence does not begin where the one before it ends",
            )
            .at(place())
            .found(format!("byte {pointer}"))
            .wanted(format!("byte {wanted}")));
        }
        self.sequence += 1;
        self.tokens.take(count, out)
    }
}

impl Documents for Reader {
    fn next(&mut self, tokens: &mut Vec<u32>) -> Result<Option<NextDocument>> {
        tokens.clear();
        let Some(word) = self.boundaries.next()? else {
            if self.sequence != self.sequences {
                return Err(damaged(&self.path, "its last document ends before the last sequence")
                    .found(self.sequence)
                    .wanted(self.sequences));
            }
            self.tokens.finish()?;
            return Ok(None);
        };
        let end = i64::from_le_bytes(word);
        let end =
            u64::try_from(end).ok().filter(|end| (self.sequence..=self.sequences).contains(end));
        let end = end.ok_or_else(|| {
            damaged(&self.path, "a document ends before it begins or after the last sequence")
                .found(format!("sequence {}", i64::from_le_bytes(word)))
                .wanted(format!("{} to {}", self.sequence, self.sequences))
        })?;
        let first = self.tokens.at;
        while self.sequence < end {
            self.sequence(tokens)?;
        }
        Ok(Some(NextDocument { id: None, bytes: self.tokens.range(first) }))
    }

    fn inputs(&self) -> Vec<InputRecord> {
        vec![self.tokens.record(), self.index.clone()]
    }
}

/// Writes a pair.
pub(super) struct Files {
    bin: AtomicFile,
    idx: AtomicFile,
    width: Width,
    documents: u64,
    left: u64,
    raw: Vec<u8>,
}

impl Files {
    /// Begins `stem.bin` and `stem.idx` for this many documents.
    pub(super) fn create(stem: &Path, vocab: u32, documents: u64) -> Result<Self> {
        let (bin, idx) = pair(stem);
        let width = if vocab < SMALL_VOCAB { Width::U16 } else { Width::I32 };
        let mut idx = begin(&idx)?;
        idx.put(&MAGIC)?;
        idx.put(&1u64.to_le_bytes())?;
        idx.put(&CODES.iter().find(|(_, w)| *w == width).map_or([0], |(code, _)| [*code]))?;
        idx.put(&documents.to_le_bytes())?;
        idx.put(&(documents + 1).to_le_bytes())?;
        Ok(Files { bin: begin(&bin)?, idx, width, documents, left: documents, raw: Vec::new() })
    }
}

impl Writer for Files {
    fn document(&mut self, tokens: &[u32], id: &str, _src: &str, _row: u64) -> Result<()> {
        let length = i32::try_from(tokens.len()).map_err(|_| {
            Fault::usage("a document is too long for Megatron's index")
                .at(format!("document {id}"))
                .found(counted(tokens.len(), "token"))
                .wanted(format!("at most {}", i32::MAX))
        })?;
        self.left =
            self.left.checked_sub(1).ok_or_else(|| Fault::bug("more documents than counted"))?;
        put(&mut self.bin, tokens, self.width.bytes(), &mut self.raw)?;
        self.idx.put(&length.to_le_bytes())
    }

    /// The lengths are on disk: the other two sections are computed from them, in little memory.
    fn finish(mut self: Box<Self>) -> Result<Vec<FileRecord>> {
        if self.left > 0 {
            return Err(Fault::bug("fewer documents than counted"));
        }
        let path = self.idx.path().to_owned();
        let lengths = self.idx.written()?;
        let (mut at, mut byte) = (0, 0u64);
        let mut raw = vec![0; 64 << 10];
        while at < self.documents {
            let count = (self.documents - at).min(raw.len() as u64 / 4);
            let part = &mut raw[..(count * 4) as usize];
            let read = lengths.read_exact_at(part, HEAD + 4 * at);
            read.map_err(|error| Fault::io("read", &path, &error))?;
            for word in part.as_chunks().0 {
                self.idx.put(&byte.to_le_bytes())?;
                byte += u64::from(u32::from_le_bytes(*word)) * self.width.bytes();
            }
            at += count;
        }
        for sequence in 0..=self.documents {
            self.idx.put(&sequence.to_le_bytes())?;
        }
        let Files { bin, idx, .. } = *self;
        Ok(vec![end(bin)?, end(idx)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_means_its_two_files_whatever_its_bytes() {
        let path = |bytes: &[u8]| PathBuf::from(OsString::from_vec(bytes.to_vec()));
        for named in [&b"a\xff/b.c"[..], b"a\xff/b.c.bin", b"a\xff/b.c.idx"] {
            let wanted = (path(b"a\xff/b.c.bin"), path(b"a\xff/b.c.idx"));
            assert_eq!(pair(&path(named)), wanted);
        }
    }
}
