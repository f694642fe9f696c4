//! A file that grows in place, line by line.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::{Act, admit, note, synced};
use crate::regular;

/// A file that is only appended to and truncated. Another process that appends to it writes after the existing bytes.
#[derive(Debug)]
pub struct AppendFile {
    file: File,
    path: PathBuf,
}

impl AppendFile {
    /// Opens or creates the file at `path`. Its name is durable once its folder is synced.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).append(true);
        let file = match options.clone().create_new(true).open(path) {
            Ok(file) => {
                note(|| Act::Create(path.to_owned()));
                file
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                regular::size(path)?;
                options.open(path)?
            }
            Err(error) => return Err(error),
        };
        Ok(AppendFile { file, path: path.to_owned() })
    }

    /// Opens an existing file for reading.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(AppendFile { file: regular::open(path)?, path: path.to_owned() })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Appends `bytes`.
    pub fn append(&self, bytes: &[u8]) -> io::Result<()> {
        admit(&self.path, bytes)?;
        (&self.file).write_all(bytes)?;
        note(|| {
            let end = self.file.metadata().map_or(0, |about| about.len());
            Act::Write(self.path.clone(), end.saturating_sub(bytes.len() as u64), bytes.to_vec())
        });
        Ok(())
    }

    /// Truncates it to its first `length` bytes.
    pub fn cut(&self, length: u64) -> io::Result<()> {
        if self.file.metadata()?.len() != length {
            self.file.set_len(length)?;
            note(|| Act::SetLength(self.path.clone(), length));
        }
        Ok(())
    }

    /// Makes its content durable.
    pub fn sync(&self) -> io::Result<()> {
        synced(&self.file, || Act::Sync(self.path.clone()))
    }
}
