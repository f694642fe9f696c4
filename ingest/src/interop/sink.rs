//! A file of an export, which knows its size and digest.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Its path from the export's folder, with `/` between parts.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// xxh3-128 of its bytes.
    pub digest: Digest,
}

/// A file being written.
pub(super) struct Sink {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Box<Xxh3>,
    pub(super) bytes: u64,
}

impl Sink {
    /// Begins a file, making its folder.
    pub(super) fn create(path: &Path) -> Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|error| Fault::io("create", folder, &error))?;
        }
        let file = File::create(path).map_err(|error| Fault::io("create", path, &error))?;
        let file = BufWriter::with_capacity(256 << 10, file);
        Ok(Sink { path: path.to_owned(), file, hash: Box::new(Xxh3::new()), bytes: 0 })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_all(bytes).map_err(|error| Fault::io("write", &self.path, &error))
    }

    /// Appends tokens as `width` bytes each; every id of a store fits, since its widths go by the largest.
    pub(super) fn tokens(&mut self, tokens: &[u32], width: u64, raw: &mut Vec<u8>) -> Result<()> {
        raw.clear();
        if width == 2 {
            raw.extend(tokens.iter().flat_map(|id| (*id as u16).to_le_bytes()));
        } else {
            raw.extend(tokens.iter().flat_map(|id| id.to_le_bytes()));
        }
        self.put(raw)
    }

    /// What the operating system holds of the file so far, complete.
    pub(super) fn flushed(&mut self) -> Result<&File> {
        self.file.flush().map_err(|error| Fault::io("write", &self.path, &error))?;
        Ok(self.file.get_ref())
    }

    /// Ends the file, on the disk.
    pub(super) fn finish(self) -> Result<Written> {
        let fault = |error: &io::Error| Fault::io("write", &self.path, error);
        let file = self.file.into_inner().map_err(|error| fault(error.error()))?;
        file.sync_all().map_err(|error| fault(&error))?;
        let name = self.path.display().to_string();
        Ok(Written { name, bytes: self.bytes, digest: Digest(self.hash.digest128()) })
    }
}

impl Write for Sink {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.file.write_all(buffer)?;
        self.hash.update(buffer);
        self.bytes += buffer.len() as u64;
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
