//! Reads a ledger from its first step to its end, and follows it as it grows: each line once, in order, its chain and
//! numbers checked.
//!
//! Only one line is in memory, so a ledger of a million steps needs no more than one of ten.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::file::{LedgerFile, broken, empty, of_one, opened, said};
use super::index::LedgerLine;
use super::record::{LedgerHead, StepFields};
use contract::{Fault, Result, chain};
use store::disk::AppendFile;
use store::regular;

/// Bytes read at a time.
const BUFFER: usize = 1 << 18;

/// A position in a ledger that may still grow.
pub struct Follower {
    path: PathBuf,
    reader: BufReader<File>,
    last: LedgerLine,
    step: u64,
    text: Vec<u8>,
}

impl Follower {
    /// Opens the ledger at `path` before its first step.
    pub fn open(path: &Path) -> Result<(LedgerHead, Follower)> {
        let open = || regular::open(path).map_err(|error| Fault::io("open", path, &error));
        let log = AppendFile::read(path).map_err(|error| Fault::io("open", path, &error))?;
        let (head, last) = LedgerFile::new(log).head()?.ok_or_else(|| empty(path))?;
        let mut reader = BufReader::with_capacity(BUFFER, open()?);
        reader.seek(SeekFrom::Start(last.end)).map_err(|error| Fault::io("read", path, &error))?;
        Ok((head, Follower { path: path.to_owned(), reader, last, step: 0, text: Vec::new() }))
    }

    /// Whether the file was replaced, or cut below what has been read. An error if it does not exist any more.
    pub fn replaced(&self) -> Result<bool> {
        let fault = |error| Fault::io("look at", &self.path, &error);
        let now = fs::metadata(&self.path).map_err(fault)?;
        let held = self.reader.get_ref().metadata().map_err(fault)?;
        Ok(!of_one(&now, &held) || now.len() < self.last.end)
    }

    /// The last step read; 0 before the first.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The fields of `T` in the next line. `None` at the end, also if the last line is still being written: a later
    /// call returns it.
    pub fn next_step<T: StepFields>(&mut self) -> Result<Option<T>> {
        let Follower { path, reader, last, step, text } = self;
        let fault = |error| Fault::io("read", path, &error);
        text.clear();
        let read = reader.read_until(b'\n', text).map_err(fault)?;
        let Some(line) = chain::whole(text) else {
            if read > 0 {
                reader.seek(SeekFrom::Start(last.end)).map_err(fault)?;
            }
            return Ok(None);
        };
        let number = *step as usize + 1;
        let (body, chain) =
            opened(last.chain, line).ok_or_else(|| broken(path, number, "its chain is broken"))?;
        let said = said(path, number, &body)?;
        *last = LedgerLine { end: last.end + read as u64, chain };
        *step += 1;
        Ok(Some(said))
    }
}
