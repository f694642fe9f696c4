//! A file of the store of which pieces are read, any number of them at once.
//!
//! Where a piece lies is arithmetic (`block_offset`); that its bytes are the right ones, their sums say.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::far;
use crate::folder::StoreFile;
use contract::{Fault, Result};

/// An open column file of known length.
pub(super) struct ColumnFile {
    /// The file, unless it is far: then blocks are fetched one by one.
    file: Option<File>,
    path: PathBuf,
    bytes: u64,
}

impl ColumnFile {
    /// Opens the file, which must have exactly `bytes` bytes.
    pub(super) fn open(file: &StoreFile, bytes: u64) -> Result<Self> {
        let path = file.path();
        let (file, found) = if file.is_far() {
            (None, file.size().map_err(|error| missing(&path, &error))?)
        } else {
            let file = file.open().map_err(|error| missing(&path, &error))?;
            let about = file.metadata().map_err(|error| Fault::io("examine", &path, &error))?;
            (Some(file), about.len())
        };
        if found != bytes {
            return Err(damaged(&path, "the file has the wrong size")
                .found(format!("{found} bytes"))
                .wanted(format!("{bytes} bytes")));
        }
        Ok(ColumnFile { file, path, bytes })
    }

    /// The file's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `buffer` from `offset` on, moving no cursor: any number of threads may read at once.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let read = match &self.file {
            Some(file) => file.read_exact_at(buffer, offset),
            None => far::reader(&self.path).and_then(|far| match far {
                Some(far) => far.read_at(&self.path, buffer, offset),
                None => Err(std::io::ErrorKind::Unsupported.into()),
            }),
        };
        read.map_err(|error| Fault::io("read", &self.path, &error))
    }

    /// The whole file.
    pub(super) fn read_all(&self) -> Result<Vec<u8>> {
        let length = usize::try_from(self.bytes)
            .map_err(|_| damaged(&self.path, "the file is larger than memory can be"))?;
        let mut bytes = vec![0; length];
        self.read(&mut bytes, 0)?;
        Ok(bytes)
    }
}

/// Damaged data in `path`.
pub(super) fn damaged(path: &Path, what: &str) -> Fault {
    Fault::data(what).at(path.display().to_string()).hint(
        "restore this file from a copy or build the store again; `zdata verify STORE` lists all that is damaged",
    )
}

/// A file of the store that could not be opened.
pub(super) fn missing(path: &Path, error: &std::io::Error) -> Fault {
    if error.kind() == std::io::ErrorKind::NotFound {
        damaged(path, "a file of the store is missing")
    } else {
        Fault::io("open", path, error)
    }
}
