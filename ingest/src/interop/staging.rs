//! A folder that appears whole or not at all: it is made beside its place and renamed there.
//!
//! `OUT.partial` carries a mark, so that clearing what a killed run left never clears what somebody else put there; it
//! is locked, so that two runs for one place do not meet.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use store::{open, write};

/// The file in [`open::BUILD_FOLDER`] that says whose folder this is.
const MARK: &str = "staging";

/// A folder under construction.
pub(crate) struct Staging {
    target: PathBuf,
    path: PathBuf,
    _lock: File,
}

impl Staging {
    /// Begins `target`, which must not exist or be an empty folder.
    pub(crate) fn begin(target: &Path) -> Result<Self> {
        refuse_taken(target)?;
        let name = target.file_name().ok_or_else(|| {
            Fault::usage("this is no name of a new folder").at(target.display().to_string())
        })?;
        let mut name = name.to_owned();
        name.push(".partial");
        let path = target.with_file_name(name);
        fs::create_dir_all(&path).map_err(|error| Fault::io("create", &path, &error))?;
        let lock = lock(&path)?;
        clear(&path)?;
        let mark = path.join(open::BUILD_FOLDER);
        fs::create_dir_all(&mark).map_err(|error| Fault::io("create", &mark, &error))?;
        write::write_whole(&mark.join(MARK), b"zdata\n")?;
        Ok(Staging { target: target.to_owned(), path, _lock: lock })
    }

    /// Where to write.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the folder in its place. Every file in it must be on the disk.
    pub(crate) fn commit(self) -> Result<()> {
        sync_folders(&self.path)?;
        refuse_taken(&self.target)?;
        fs::rename(&self.path, &self.target)
            .map_err(|error| Fault::io("create", &self.target, &error))?;
        finish(&self.target)?;
        let parent = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        write::sync_folder(parent.unwrap_or(Path::new(".")))
    }
}

/// Removes the mark, also where a run was killed between its last two acts.
pub(super) fn finish(target: &Path) -> Result<()> {
    let mark = target.join(open::BUILD_FOLDER);
    match fs::remove_dir_all(&mark) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Fault::io("remove", &mark, &error))
        }
        _ => Ok(()),
    }
}

fn refuse_taken(target: &Path) -> Result<()> {
    let mut entries = match fs::read_dir(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Fault::io("list", target, &error)),
        Ok(entries) => entries,
    };
    let Some(entry) = entries.next() else { return Ok(()) };
    let entry = entry.map_err(|error| Fault::io("list", target, &error))?;
    Err(Fault::usage("this folder holds something else")
        .at(target.display().to_string())
        .found(entry.file_name().to_string_lossy())
        .wanted("a new or empty folder")
        .hint("name another folder"))
}

/// Holds the folder until it is dropped, or the process dies.
fn lock(path: &Path) -> Result<File> {
    let busy = || {
        Fault::machine("another run is writing this folder")
            .at(path.display().to_string())
            .hint("wait for it, or name another folder")
    };
    let folder = File::open(path).map_err(|error| Fault::io("open", path, &error))?;
    match folder.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(busy()),
        Err(TryLockError::Error(error)) => return Err(Fault::io("lock", path, &error)),
    }
    // The one before may have renamed it between our opening it and locking it.
    let held = folder.metadata().map_err(|error| Fault::io("read", path, &error))?;
    match fs::metadata(path) {
        Ok(there) if (there.ino(), there.dev()) == (held.ino(), held.dev()) => Ok(folder),
        _ => Err(busy()),
    }
}

/// Empties a folder that a killed run left; one without our mark must be empty.
fn clear(path: &Path) -> Result<()> {
    let fault = |error: &io::Error| Fault::io("clear", path, error);
    let ours = path.join(open::BUILD_FOLDER).join(MARK).is_file();
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(|error| fault(&error))? {
        names.push(entry.map_err(|error| fault(&error))?.file_name());
    }
    // Killed while it wrote the mark: then nothing else is there.
    let ours = ours || names.iter().all(|name| name == open::BUILD_FOLDER);
    if !ours {
        return Err(Fault::usage("this folder is in the way, and is none of ours")
            .at(path.display().to_string())
            .hint("move it, or name another folder"));
    }
    // The mark goes last, so that a kill here leaves a folder that is still known.
    names.sort_by_key(|name| name == open::BUILD_FOLDER);
    for name in names {
        let entry = path.join(name);
        let kind = fs::symlink_metadata(&entry).map_err(|error| fault(&error))?;
        let removed =
            if kind.is_dir() { fs::remove_dir_all(&entry) } else { fs::remove_file(&entry) };
        removed.map_err(|error| fault(&error))?;
    }
    Ok(())
}

/// Makes the names in `folder` and below survive a power cut.
fn sync_folders(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(|error| Fault::io("list", folder, &error))? {
        let path = entry.map_err(|error| Fault::io("list", folder, &error))?.path();
        if path.is_dir() {
            sync_folders(&path)?;
        }
    }
    write::sync_folder(folder)
}
