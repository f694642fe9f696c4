//! The files of a store, opened so that nothing outside its folder is ever read.
//!
//! The names come from a manifest, which is untrusted. Each part of a name is opened relative to the folder before it,
//! links are not followed, and only regular files are read: neither `..` nor a link leads out of the store, and a pipe
//! in place of a file cannot block a command. Only the store's folder itself may be a link, since a user names it.

use std::fs::File;
use std::io::{Error, ErrorKind, Read as _, Result};
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use crate::Location;
use contract::Fault;

/// A file of a store: the store's folder, and a name below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFile {
    root: Location,
    name: String,
}

impl StoreFile {
    /// The file that these parts of a name lead to from the folder `root`.
    pub fn new(root: impl Into<Location>, parts: &[&str]) -> Self {
        StoreFile { root: root.into(), name: parts.join("/") }
    }

    /// Its location.
    pub fn location(&self) -> Location {
        self.root.join(&self.name)
    }

    /// Opens it.
    pub fn open(&self) -> Result<File> {
        let name = Path::new(&self.name);
        if !name.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(outside("its name leads out of the store"));
        }
        let root = match &self.root {
            Location::Local(root) => root,
            Location::Object(_) => return self.location().open(),
        };
        let mut at = open_root(root)?;
        let mut parts = name.components().peekable();
        while let Some(part) = parts.next() {
            let last = parts.peek().is_none();
            // Opening a pipe would wait for its writer.
            let kind = if last { OFlags::NONBLOCK } else { OFlags::DIRECTORY };
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | kind;
            at = openat(&at, part.as_os_str(), flags, Mode::empty()).map_err(
                |error| match error {
                    Errno::LOOP => outside("it is a link, which leads out of the store"),
                    // A path through a non-folder, or through a link to a folder, ends here too.
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
        match &self.root {
            Location::Local(_) => Ok(self.open()?.metadata()?.len()),
            Location::Object(_) => self.location().size(),
        }
    }

    /// Its bytes.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open()?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// A local folder of a store, to look at many of its files.
pub(crate) struct StoreFolder(OwnedFd);

impl StoreFolder {
    /// Opens the folder `name` below `root`, with the same checks as for files.
    pub(crate) fn open(root: &Path, name: &str) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::DIRECTORY;
        let mut at = open_root(root)?;
        for part in Path::new(name).components() {
            at = openat(&at, part.as_os_str(), flags, Mode::empty())?;
        }
        Ok(StoreFolder(at))
    }

    /// The size of the file `name`, if it is a regular file and not a link.
    pub(crate) fn size(&self, name: &str) -> Option<u64> {
        let about = statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let is_file = FileType::from_raw_mode(about.st_mode) == FileType::RegularFile;
        u64::try_from(about.st_size).ok().filter(|_| is_file)
    }
}

fn open_root(root: &Path) -> Result<OwnedFd> {
    let folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, root, folder, Mode::empty())?)
}

/// The entry is not a file of the store: a data error, not one of the machine.
fn outside(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// Damaged data in `file`.
pub(crate) fn damaged(file: &Location, what: &str) -> Fault {
    Fault::data(what).at(file.to_string()).hint(
        "restore this file from a copy, or remove the folder and build the store again; `zdata verify STORE` lists all \
         that is damaged",
    )
}

/// A file of the store that could not be opened.
pub(crate) fn missing(file: &Location, error: &std::io::Error) -> Fault {
    if error.kind() == std::io::ErrorKind::NotFound {
        damaged(file, "a file of the store is missing")
    } else {
        file.fault("open", error)
    }
}
