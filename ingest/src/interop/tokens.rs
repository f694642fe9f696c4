//! A file of bare tokens, read sequentially and hashed on the way; counts never make it read past the real end.

use std::fs;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use contract::{Fault, Result, counted};
use store::InputRecord;
use store::disk::AtomicFile;

use super::damaged;
use crate::disk::Disk;
use crate::source::decompress::Tee;

/// Tokens decoded at a time, which bounds memory if a count is wrong.
const PIECE_TOKENS: u64 = 1 << 16;

/// How a token is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One byte.
    U8,
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
    /// Eight bytes.
    U64,
    /// One byte, signed.
    I8,
    /// Two bytes, signed.
    I16,
    /// Four bytes, signed.
    I32,
    /// Eight bytes, signed.
    I64,
}

impl Width {
    /// Every width.
    pub const ALL: [Width; 8] = [
        Width::U8,
        Width::U16,
        Width::U32,
        Width::U64,
        Width::I8,
        Width::I16,
        Width::I32,
        Width::I64,
    ];

    /// The name that NumPy and `--dtype` use.
    pub const fn name(self) -> &'static str {
        match self {
            Width::U8 => "uint8",
            Width::U16 => "uint16",
            Width::U32 => "uint32",
            Width::U64 => "uint64",
            Width::I8 => "int8",
            Width::I16 => "int16",
            Width::I32 => "int32",
            Width::I64 => "int64",
        }
    }

    /// The width of that name.
    pub fn from_name(name: &str) -> Option<Width> {
        Width::ALL.into_iter().find(|width| width.name() == name)
    }

    /// Bytes of a token.
    pub const fn bytes(self) -> u64 {
        match self {
            Width::U8 | Width::I8 => 1,
            Width::U16 | Width::I16 => 2,
            Width::U32 | Width::I32 => 4,
            Width::U64 | Width::I64 => 8,
        }
    }

    /// Appends the tokens in `bytes`, which must be whole ones; or returns the first that is not an id below `vocab`.
    pub(super) fn decode(
        self,
        bytes: &[u8],
        vocab: u32,
        out: &mut Vec<u32>,
    ) -> std::result::Result<(), (usize, i128)> {
        fn each<const N: usize>(
            bytes: &[u8],
            vocab: u32,
            out: &mut Vec<u32>,
            value: impl Fn([u8; N]) -> i128,
        ) -> std::result::Result<(), (usize, i128)> {
            for (index, word) in bytes.as_chunks().0.iter().enumerate() {
                let value = value(*word);
                match u32::try_from(value) {
                    Ok(id) if id < vocab => out.push(id),
                    _ => return Err((index, value)),
                }
            }
            Ok(())
        }
        match self {
            Width::U8 => each(bytes, vocab, out, |word| u8::from_le_bytes(word).into()),
            Width::U16 => each(bytes, vocab, out, |word| u16::from_le_bytes(word).into()),
            Width::U32 => each(bytes, vocab, out, |word| u32::from_le_bytes(word).into()),
            Width::U64 => each(bytes, vocab, out, |word| u64::from_le_bytes(word).into()),
            Width::I8 => each(bytes, vocab, out, |word| i8::from_le_bytes(word).into()),
            Width::I16 => each(bytes, vocab, out, |word| i16::from_le_bytes(word).into()),
            Width::I32 => each(bytes, vocab, out, |word| i32::from_le_bytes(word).into()),
            Width::I64 => each(bytes, vocab, out, |word| i64::from_le_bytes(word).into()),
        }
    }

    /// The unsigned width of `size` bytes.
    pub(super) fn of_size(size: u64) -> Option<Width> {
        [Width::U8, Width::U16, Width::U32, Width::U64].into_iter().find(|w| w.bytes() == size)
    }
}

/// The width at which a file of `size` bytes holds `last` tokens, as its index counts them; `what` is the message if
/// there is none. Widths that the vocabulary rules out are not considered: no writer uses them, and a wider file that
/// was truncated could pass for one.
pub(super) fn fitting(
    disk: &dyn Disk,
    path: &Path,
    size: u64,
    last: u64,
    vocab: u32,
    what: &str,
) -> Result<Width> {
    let fits = |width: &&Width| last.checked_mul(width.bytes()) == Some(size);
    let (likely, told): (&[Width], _) =
        if vocab <= 1 << 16 { (&[Width::U16, Width::U32], "2 or 4") } else { (&[Width::U32], "4") };
    let Some(width) = likely.iter().find(fits).copied() else {
        let all = format!("{told} for each of {last} tokens, of a vocabulary of {vocab}");
        let fault = damaged(path, what).found(counted(size, "byte")).wanted(all);
        return Err(match Width::ALL.iter().find(fits) {
            Some(other) => fault.hint(format!(
                "export the file again, if it was cut; give --dtype {} if it was made so",
                other.name()
            )),
            None => fault,
        });
    };
    if width == Width::U16 {
        refuse_halved(disk, path)?;
    }
    Ok(width)
}

/// Refuses a u16 file, known only by its size, that may be the first half of a u32 file: then every second number is 0.
fn refuse_halved(disk: &dyn Disk, path: &Path) -> Result<()> {
    let file = Hashing::open(disk, path)?;
    let (pairs, mut pair) = (file.bytes / 4, [0; 4]);
    let mut reader = BufReader::with_capacity(64 << 10, file);
    for _ in 0..pairs {
        reader.read_exact(&mut pair).map_err(|error| Fault::io("read", path, &error))?;
        if pair[2..] != [0, 0] {
            return Ok(());
        }
    }
    if pairs == 0 {
        return Ok(());
    }
    Err(Fault::usage("this may be a file of uint16 or the first half of one of uint32: as uint16, every second token is 0")
        .at(path.display().to_string())
        .wanted("--dtype uint16, if it is whole")
        .hint("make the file again, if it was cut"))
}

/// Appends tokens as `width` bytes each; every id of a store fits, since the width is chosen for the largest.
pub(super) fn put(
    file: &mut AtomicFile,
    tokens: &[u32],
    width: u64,
    raw: &mut Vec<u8>,
) -> Result<()> {
    raw.clear();
    append(tokens, width, raw);
    file.put(raw)
}

/// The same, appended to `bytes`.
pub(super) fn append(tokens: &[u32], width: u64, bytes: &mut Vec<u8>) {
    if width == 2 {
        bytes.extend(tokens.iter().flat_map(|id| (*id as u16).to_le_bytes()));
    } else {
        bytes.extend(tokens.iter().flat_map(|id| id.to_le_bytes()));
    }
}

/// The fault for a token that the named tokenizer cannot have made.
pub(super) fn beyond(path: &Path, token: u64, value: i128, vocab: u32) -> Fault {
    Fault::data("a token is not an id of the tokenizer")
        .at(format!("{}: token {token}", path.display()))
        .found(value)
        .wanted(format!("ids from 0 to {}", vocab.saturating_sub(1)))
        .hint("name the tokenizer.json that made the tokens, or the right --dtype")
}

/// A file whose bytes are hashed as they are read.
pub(super) struct Hashing {
    path: PathBuf,
    tee: Tee,
    /// Its size when it was opened.
    pub(super) bytes: u64,
}

impl Hashing {
    pub(super) fn open(disk: &dyn Disk, path: &Path) -> Result<Self> {
        let about = fs::metadata(path).map_err(|error| Fault::io("read", path, &error))?;
        if !about.is_file() {
            return Err(damaged(path, "this is not a file").hint("name a file"));
        }
        let tee = Tee::open(disk, path)?;
        Ok(Hashing { path: path.to_owned(), tee, bytes: about.len() })
    }

    /// Reads the whole file, of at most `limit` bytes.
    pub(super) fn whole(
        disk: &dyn Disk,
        path: &Path,
        limit: u64,
    ) -> Result<(Vec<u8>, InputRecord)> {
        let mut file = Hashing::open(disk, path)?;
        if file.bytes > limit {
            return Err(damaged(path, "this file is too large for what it should be")
                .found(counted(file.bytes, "byte"))
                .wanted(format!("at most {limit}")));
        }
        let mut bytes = Vec::new();
        let read = (&mut file).take(limit).read_to_end(&mut bytes);
        read.map_err(|error| Fault::io("read", path, &error))?;
        Ok((bytes, file.record(0)))
    }

    /// Reads to the end, for the identity only.
    pub(super) fn drain(&mut self) -> Result<()> {
        self.tee.read_to(u64::MAX, &self.path)
    }

    /// The I/O error, if one occurred.
    pub(super) fn failed(&self) -> Option<Fault> {
        self.tee.failed(&self.path)
    }

    pub(super) fn record(&self, documents: u64) -> InputRecord {
        let (bytes, sha256) = self.tee.content();
        let path = self.path.display().to_string();
        InputRecord { path, bytes, sha256, documents, segments: 1 }
    }
}

impl Read for Hashing {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.tee.read(buffer)
    }
}

/// A file of only tokens.
pub(super) struct TokenFile {
    path: PathBuf,
    reader: BufReader<Hashing>,
    width: Width,
    vocab: u32,
    /// Tokens in the file.
    pub(super) tokens: u64,
    /// Tokens read.
    pub(super) at: u64,
    /// Documents read.
    pub(super) documents: u64,
    raw: Vec<u8>,
}

impl TokenFile {
    pub(super) fn open(disk: &dyn Disk, path: &Path, width: Width, vocab: u32) -> Result<Self> {
        let file = Hashing::open(disk, path)?;
        if !file.bytes.is_multiple_of(width.bytes()) {
            return Err(damaged(path, "the file ends within a token")
                .found(counted(file.bytes, "byte"))
                .wanted(format!("a multiple of {} ({})", width.bytes(), width.name())));
        }
        let tokens = file.bytes / width.bytes();
        let reader = BufReader::with_capacity(256 << 10, file);
        let path = path.to_owned();
        Ok(TokenFile { path, reader, width, vocab, tokens, at: 0, documents: 0, raw: Vec::new() })
    }

    /// Bytes read.
    pub(super) fn byte(&self) -> u64 {
        self.at * self.width.bytes()
    }

    /// The next `count` tokens, as one document (or as part of one, if `out` is not cleared in between).
    pub(super) fn take(&mut self, count: u64, out: &mut Vec<u32>) -> Result<()> {
        if count > self.tokens - self.at {
            return Err(damaged(&self.path, "the index ends behind the last token")
                .found(counted(self.tokens, "token"))
                .wanted(format!("at least {}", u128::from(self.at) + u128::from(count))));
        }
        let end = self.at + count;
        while self.at < end {
            let piece = (end - self.at).min(PIECE_TOKENS);
            self.raw.resize((piece * self.width.bytes()) as usize, 0);
            let read = self.reader.read_exact(&mut self.raw);
            read.map_err(|error| Fault::io("read", &self.path, &error))?;
            if let Err((index, value)) = self.width.decode(&self.raw, self.vocab, out) {
                return Err(beyond(&self.path, self.at + index as u64, value, self.vocab));
            }
            self.at += piece;
        }
        Ok(())
    }

    /// The tokens up to and including the next `end`; `false` if none are left.
    pub(super) fn take_through(&mut self, end: u32, out: &mut Vec<u32>) -> Result<bool> {
        if self.at == self.tokens {
            return Ok(false);
        }
        while self.at < self.tokens {
            self.take(1, out)?;
            if out.last() == Some(&end) {
                return Ok(true);
            }
        }
        Err(damaged(&self.path, "the last document does not end")
            .found(format!("no token {end} at the end"))
            .hint("leave --end out only if the file has an index; or name the token that ends each document"))
    }

    /// The byte range of a document that began at token `first`; counts it.
    pub(super) fn range(&mut self, first: u64) -> (u64, u64) {
        self.documents += 1;
        (first * self.width.bytes(), self.at * self.width.bytes())
    }

    /// Refuses tokens that belong to no document.
    pub(super) fn finish(&self) -> Result<()> {
        if self.at == self.tokens {
            return Ok(());
        }
        Err(damaged(&self.path, "there are tokens that no document has")
            .found(counted(self.tokens, "token"))
            .wanted(format!("{}, as the index says", self.at)))
    }

    /// Reads the rest, for the identity only.
    pub(super) fn drain(&mut self) -> Result<()> {
        self.reader.get_mut().drain()
    }

    /// The file as an input.
    pub(super) fn record(&self) -> InputRecord {
        self.reader.get_ref().record(self.documents)
    }
}
