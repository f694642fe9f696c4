//! The files of a store, opened so that nothing outside its folder is ever read.
//!
//! The names come from a manifest, and so from whoever wrote it. Each part of a name is opened from the folder before
//! it, links are not followed, and only a regular file is read: neither `..` nor a link leads out of the store, and a
//! pipe in a file's place cannot make a command wait for ever. Only the folder itself may be reached by a link, since
//! a person names it.

use std::fs::File;
use std::io::{Error, ErrorKind, Read as _, Result};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::far;

/// A file of a store: the store's folder, and a name below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFile {
    root: PathBuf,
    name: PathBuf,
}

impl StoreFile {
    /// The file that these parts of a name lead to from the folder `root`.
    pub fn new(root: &Path, parts: &[&str]) -> Self {
        StoreFile { root: root.to_owned(), name: parts.iter().collect() }
    }

    /// Its path, for messages.
    pub fn path(&self) -> PathBuf {
        self.root.join(&self.name)
    }

    /// Whether it lies in object storage.
    pub(crate) fn is_far(&self) -> bool {
        far::is_far(&self.root)
    }

    /// Opens it.
    pub fn open(&self) -> Result<File> {
        if !self.name.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(outside("its name leads out of the store"));
        }
        if self.is_far() {
            return far::open(&self.path());
        }
        let folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = openat(CWD, &self.root, folder, Mode::empty())?;
        let mut parts = self.name.components().peekable();
        while let Some(part) = parts.next() {
            let last = parts.peek().is_none();
            // Opening a pipe would wait for its writer.
            let kind = if last { OFlags::NONBLOCK } else { OFlags::DIRECTORY };
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | kind;
            at = openat(&at, part.as_os_str(), flags, Mode::empty()).map_err(
                |error| match error {
                    Errno::LOOP => outside("it is a link, which leads out of the store"),
                    // What is not a folder is refused so too, and a link to one is none.
                    Errno::NOTDIR => outside("a folder of the store is a link or a file"),
                    Errno::NXIO => outside("it is not a regular file"),
                    error => error.into(),
                },
            )?;
        }
        let file = File::from(at);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(outside("it is not a regular file")),
        }
    }

    /// Its size.
    pub fn size(&self) -> Result<u64> {
        match self.is_far() {
            true => far::size(&self.path()),
            false => Ok(self.open()?.metadata()?.len()),
        }
    }

    /// Its bytes.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open()?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// What is there is not a file of the store: data that is wrong, not a machine that fails.
fn outside(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}
