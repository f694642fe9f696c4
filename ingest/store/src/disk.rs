//! All writes of the data side: every file and folder that it creates, moves or removes.
//!
//! After a power loss, only what was synced is left: the bytes of a synced file, and the names in a synced folder. So a
//! folder made here is synced into its parent at once, and a file gets its name when it is complete ([`AtomicFile`]).
//! Callers that remove or rename something call [`sync_folder`] when that must be durable.
//!
//! Tests (feature `crash`) watch a folder: they record every act below it, derive what a crash may leave, and can
//! simulate a full disk.

mod append;
mod atomic;
mod direct;
mod held;
mod lock;
#[cfg(any(test, feature = "crash"))]
mod watch;

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Once;

use contract::{Fault, Result, note};

pub use self::append::AppendFile;
pub use self::atomic::{AtomicFile, PART, write_atomic, write_atomic_if};
pub use self::held::{Held, Writing, draw_group};
pub use self::lock::{Lock, hold, is_lockless, lock};
#[cfg(any(test, feature = "crash"))]
pub use self::watch::{Watch, watch};
#[cfg(any(test, feature = "crash"))]
use self::watch::{admit, note};

/// One act on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// A new, empty folder.
    CreateFolder(PathBuf),
    /// A file is created, or truncated to empty.
    Create(PathBuf),
    /// Bytes at an offset of a file.
    Write(PathBuf, u64, Vec<u8>),
    /// A file gets a length.
    SetLength(PathBuf, u64),
    /// The bytes of a file are made durable.
    Sync(PathBuf),
    /// The names in a folder are made durable.
    SyncFolder(PathBuf),
    /// A file or folder gets another name.
    Rename(PathBuf, PathBuf),
    /// A file gets a second name.
    Link(PathBuf, PathBuf),
    /// A file loses a name.
    Remove(PathBuf),
    /// An empty folder is removed.
    RemoveFolder(PathBuf),
}

/// A file that is written under its own name.
pub struct OutputFile {
    file: fs::File,
    path: PathBuf,
    at: u64,
}

impl OutputFile {
    /// Creates a file, or truncates it.
    pub fn create(path: &Path) -> Result<Self> {
        let file = fs::File::create(path).map_err(|error| Fault::io("create", path, &error))?;
        note(|| Act::Create(path.to_owned()));
        Ok(OutputFile { file, path: path.to_owned(), at: 0 })
    }

    /// Makes the bytes so far durable.
    pub fn sync(&self) -> io::Result<()> {
        synced(&self.file, || Act::Sync(self.path.clone()))
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        admit(&self.path, bytes)?;
        let taken = self.file.write(bytes)?;
        note(|| Act::Write(self.path.clone(), self.at, bytes[..taken].to_vec()));
        self.at += taken as u64;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Creates a folder and its missing parents durably.
pub fn create_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = folder_of(path);
    if above != path {
        create_folder(above)?;
    }
    match fs::create_dir(path) {
        Ok(()) => {
            note(|| Act::CreateFolder(path.to_owned()));
        }
        // Another process was faster.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
        // The parent exists: this is not a mistyped path, so it is not reported as missing data.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Fault::usage(format!("this folder cannot be made here: {error}"))
                .at(path.display().to_string())
                .hint("name another folder; the current one may have been removed"));
        }
        Err(error) => return Err(Fault::io("create", path, &error)),
    }
    sync_folder(above)
}

/// The folder that holds the name of `path`.
pub fn folder_of(path: &Path) -> &Path {
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    above.unwrap_or(Path::new(if path.has_root() { "/" } else { "." }))
}

/// Makes the names in `folder` durable, where the file system can.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let open = fs::File::open(folder);
    let sync = open.and_then(|open| synced(&open, || Act::SyncFolder(folder.to_owned())));
    match sync {
        Err(error) if lock::is_unsupported(&error) => {
            static NOTED: Once = Once::new();
            let folder = folder.display();
            NOTED.call_once(|| {
                note!(
                    "note: {folder}: this file system cannot sync folders ({error}): after a loss of power a command may find \
                     what was there before, and makes it again"
                );
            });
            Ok(())
        }
        sync => sync.map_err(|error| Fault::io("write", folder, &error)),
    }
}

/// Makes the names in `folder` and all folders below durable.
pub fn sync_folders(folder: &Path) -> Result<()> {
    folders(folder)?.iter().try_for_each(|folder| sync_folder(folder))
}

/// `folder` and all folders below, children first.
pub fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in entries(folder)? {
        if path.is_dir() && !path.is_symlink() {
            found.extend(folders(&path)?);
        }
    }
    found.push(folder.to_owned());
    Ok(found)
}

/// The path with `ending` appended to its name, in the same folder; a trailing slash is ignored.
pub fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.components().as_path().as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// The paths of what a folder holds, sorted.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    };
    let mut paths = list().map_err(|error| Fault::io("list", folder, &error))?;
    paths.sort();
    Ok(paths)
}

/// The folders above `path` that are missing, the nearest first.
pub fn missing_above(path: &Path) -> Vec<PathBuf> {
    let above = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    above.take_while(|above| !above.exists()).map(Path::to_owned).collect()
}

/// Renames a file or folder; an existing file or empty folder at `to` is replaced.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    note(|| Act::Rename(from.to_owned(), to.to_owned()));
    Ok(())
}

/// Gives a file a second name, which must not exist.
pub fn link(from: &Path, to: &Path) -> io::Result<()> {
    fs::hard_link(from, to)?;
    note(|| Act::Link(from.to_owned(), to.to_owned()));
    Ok(())
}

/// Renames a file to a new name; an existing one is [`ErrorKind::AlreadyExists`].
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match link(from, to) {
        Ok(()) => {
            fs::remove_file(from)?;
            note(|| Act::Remove(from.to_owned()));
            Ok(())
        }
        Err(error) if lock::is_linkless(&error) => {
            let _alone = lock::wait_for_lease(to)?;
            if to.exists() { Err(ErrorKind::AlreadyExists.into()) } else { rename(from, to) }
        }
        Err(error) => Err(error),
    }
}

/// Removes a file, or a folder with all its content; a missing one is not an error.
pub fn remove(path: &Path) -> Result<()> {
    let fault = |error: &io::Error| Fault::io("remove", path, error);
    let removed = match fs::symlink_metadata(path) {
        Ok(about) if about.is_dir() => {
            entries(path)?.iter().try_for_each(|entry| remove(entry))?;
            fs::remove_dir(path).map(|()| note(|| Act::RemoveFolder(path.to_owned())))
        }
        Ok(_) => fs::remove_file(path).map(|()| note(|| Act::Remove(path.to_owned()))),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(fault(&error)),
        _ => Ok(()),
    }
}

/// Removes an empty folder; one that is not empty, or missing, is left as it is.
pub fn remove_if_empty(folder: &Path) {
    if fs::remove_dir(folder).is_ok() {
        note(|| Act::RemoveFolder(folder.to_owned()));
    }
}

/// Syncs an open file; if a test watches, only records it.
fn synced(open: &fs::File, act: impl FnOnce() -> Act) -> io::Result<()> {
    if note(act) { Ok(()) } else { open.sync_all() }
}

/// Only tests watch.
#[cfg(not(any(test, feature = "crash")))]
fn note(_: impl FnOnce() -> Act) -> bool {
    false
}

#[cfg(not(any(test, feature = "crash")))]
fn admit(_: &Path, _: &[u8]) -> io::Result<()> {
    Ok(())
}
