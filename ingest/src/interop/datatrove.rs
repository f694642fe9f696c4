//! datatrove's `.ds`: only tokens; document ends are in a separate file next to it.
//!
//! ```text
//! X.ds            tokens, u16 or u32 (u16 up to a vocabulary of 65,536)
//! X.ds.index      u64 for each document: where it ends, in tokens
//! X.ds.metadata   "NAME|WIDTH", tokens, tokens in readable form: a line each
//! X.ds.loss       one byte a token, which a store cannot keep: refused
//! ```

use std::io::{BufReader, Read as _};
use std::path::{Path, PathBuf};

use contract::{Fault, Result, counted};
use store::disk::{AtomicFile, beside};
use store::{FileRecord, InputRecord};

use super::tokens::{Hashing, TokenFile, fitting, put};
use super::{Documents, Hints, NextDocument, Width, Writer, begin, damaged, end};
use crate::disk::Disk;

/// The largest `.metadata` that is read.
const METADATA_BYTES: u64 = 1 << 16;

/// What `.metadata` states.
struct Stated {
    width: Width,
    /// `None` if its second line is no number.
    tokens: Option<u64>,
    record: InputRecord,
}

/// What `.metadata` states, if the file exists.
fn stated(disk: &dyn Disk, path: &Path) -> Result<Option<Stated>> {
    let path = beside(path, ".metadata");
    if !path.exists() {
        return Ok(None);
    }
    let (bytes, record) = Hashing::whole(disk, &path, METADATA_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    let line = lines.next().unwrap_or_default();
    let tokens = lines.next().and_then(|count| count.trim().parse().ok());
    let size = line.rsplit_once('|').and_then(|(_, size)| size.trim().parse().ok());
    match size.and_then(Width::of_size) {
        Some(width) => Ok(Some(Stated { width, tokens, record })),
        None => Err(damaged(&path, "it does not say how wide a token is")
            .found(format!("{:?}", line.chars().take(80).collect::<String>()))
            .wanted("NAME|2 or NAME|4")),
    }
}

/// Reads a `.ds` with its index.
pub(super) struct Reader {
    tokens: TokenFile,
    index: BufReader<Hashing>,
    path: PathBuf,
    stated: Option<Stated>,
    left: u64,
}

impl Reader {
    pub(super) fn open(disk: &dyn Disk, path: &Path, hints: &Hints) -> Result<Self> {
        let loss = beside(path, ".loss");
        if loss.exists() {
            return Err(Fault::usage("these tokens have a loss mask, which a store does not keep")
                .at(loss.display().to_string())
                .hint("remove the .loss file if every token shall be trained on"));
        }
        let index = beside(path, ".index");
        if !index.exists() {
            return Err(damaged(path, "it has no .index: nothing says where its documents end")
                .hint("write it with save_index=True"));
        }
        let index = Hashing::open(disk, &index)?;
        let index_path = beside(path, ".index");
        if !index.bytes.is_multiple_of(8) {
            return Err(damaged(&index_path, "the index ends within a number")
                .found(counted(index.bytes, "byte"))
                .wanted("a multiple of 8"));
        }
        let stated = stated(disk, path)?;
        let width = match (hints.width, stated.as_ref().map(|stated| stated.width)) {
            (Some(hint), Some(stated)) if hint.bytes() != stated.bytes() => {
                return Err(Fault::usage("--dtype differs from .metadata")
                    .at(path.display().to_string())
                    .found(hint.name())
                    .wanted(stated.name()));
            }
            (Some(width), _) | (None, Some(width)) => width,
            (None, None) => measured(disk, path, &index_path, index.bytes, hints.vocab)?,
        };
        let left = index.bytes / 8;
        Ok(Reader {
            tokens: TokenFile::open(disk, path, width, hints.vocab)?,
            index: BufReader::with_capacity(64 << 10, index),
            path: index_path,
            stated,
            left,
        })
    }
}

impl Reader {
    /// Refuses files that have fewer or more tokens than `.metadata` states.
    fn agrees(&self) -> Result<()> {
        match self.stated.as_ref().and_then(|stated| stated.tokens) {
            Some(stated) if stated != self.tokens.at => {
                let path = self.path.with_extension("metadata");
                let fault =
                    damaged(&path, "it states another number of tokens than its files have");
                Err(fault.found(stated).wanted(self.tokens.at))
            }
            _ => Ok(()),
        }
    }
}

/// The width on which the last document end and the file size agree.
fn measured(
    disk: &dyn Disk,
    path: &Path,
    index: &Path,
    index_bytes: u64,
    vocab: u32,
) -> Result<Width> {
    let size = Hashing::open(disk, path)?.bytes;
    if index_bytes == 0 {
        return Ok(Width::U16);
    }
    let fault = |error: &std::io::Error| Fault::io("read", index, error);
    let file = disk.pieces(index).map_err(|error| fault(&error))?;
    let mut last = [0; 8];
    file.onward(index_bytes - 8).read_exact(&mut last).map_err(|error| fault(&error))?;
    let last = u64::from_le_bytes(last);
    fitting(disk, path, size, last, vocab, "its size does not fit its index")
}

impl Documents for Reader {
    fn next(&mut self, tokens: &mut Vec<u32>) -> Result<Option<NextDocument>> {
        tokens.clear();
        if self.left == 0 {
            self.tokens.finish()?;
            return self.agrees().map(|()| None);
        }
        self.left -= 1;
        let mut word = [0; 8];
        let read = self.index.read_exact(&mut word);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        let (first, end) = (self.tokens.at, u64::from_le_bytes(word));
        let count = end.checked_sub(first).ok_or_else(|| {
            damaged(&self.path, "a document ends before it begins")
                .at(format!("{}: document {}", self.path.display(), self.tokens.documents))
                .found(end)
                .wanted(format!("at least {first}"))
        })?;
        self.tokens.take(count, tokens)?;
        Ok(Some(NextDocument { id: None, bytes: self.tokens.range(first) }))
    }

    fn inputs(&self) -> Vec<InputRecord> {
        let index = self.index.get_ref().record(0);
        let stated = self.stated.as_ref().map(|stated| stated.record.clone());
        [self.tokens.record(), index].into_iter().chain(stated).collect()
    }
}

/// Writes one `.ds`.
pub(super) struct Files {
    tokens: AtomicFile,
    index: AtomicFile,
    metadata: AtomicFile,
    width: u64,
    name: String,
    at: u64,
    raw: Vec<u8>,
}

impl Files {
    /// Begins a file; `name` is the tokenizer's.
    pub(super) fn create(path: &Path, vocab: u32, name: &str) -> Result<Self> {
        Ok(Files {
            tokens: begin(path)?,
            index: begin(&beside(path, ".index"))?,
            metadata: begin(&beside(path, ".metadata"))?,
            width: if vocab <= 1 << 16 { 2 } else { 4 },
            name: name.to_owned(),
            at: 0,
            raw: Vec::new(),
        })
    }
}

/// A token count in the readable form that datatrove writes.
fn for_people(tokens: u64) -> String {
    let mut value = tokens as f64;
    for unit in ["", "K", "M", "B", "T"] {
        if value < 1000.0 {
            return format!("{value:.2} {unit}").trim_end().to_owned();
        }
        value /= 1000.0;
    }
    format!("{value:.2} P")
}

impl Writer for Files {
    fn document(&mut self, tokens: &[u32], _id: &str, _src: &str, _row: u64) -> Result<()> {
        put(&mut self.tokens, tokens, self.width, &mut self.raw)?;
        self.at += tokens.len() as u64;
        self.index.put(&self.at.to_le_bytes())
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<FileRecord>> {
        let text = format!("{}|{}\n{}\n{}", self.name, self.width, self.at, for_people(self.at));
        self.metadata.put(text.as_bytes())?;
        let Files { tokens, index, metadata, .. } = *self;
        Ok(vec![end(tokens)?, end(index)?, end(metadata)?])
    }
}
