//! Where checkpoint files are stored: a local folder, or a prefix in a bucket.
//!
//! Both guarantee that a file appears under its name only when complete, and is durable when [`Medium::put`] returns.
//! So putting the manifest last commits a checkpoint, and removing it first revokes it.

use std::fmt::Debug;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use contract::{Class, Digest, Fault, Result};
use store::disk::{self, AtomicFile};
use store::location::Object;
use store::{FileRecord, Location};

/// A storage for files named like `step-7/manifest.json`.
pub(super) trait Medium: Debug + Send + Sync {
    /// Writes a file, the concatenation of `parts`, and returns its record. A file with the same content may exist
    /// already.
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<FileRecord>;

    /// The bytes of a file.
    fn get(&self, name: &str) -> Result<Vec<u8>>;

    /// Lists all files, including incomplete ones.
    fn list(&self) -> Result<Vec<String>>;

    /// Removes a file, if it is there.
    fn remove(&self, name: &str) -> Result<()>;

    /// Renames a file; there must be no file of the new name.
    fn rename(&self, from: &str, to: &str) -> Result<()>;

    /// The location of a file, for people.
    fn location(&self, name: &str) -> Location;
}

/// The medium at `place`.
pub(super) fn at(place: Location) -> Box<dyn Medium> {
    match place {
        Location::Object(folder) => Box::new(Bucket(folder)),
        Location::Local(folder) => Box::new(Folder(folder)),
    }
}

/// A folder, which need not exist.
#[derive(Debug)]
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Medium for Folder {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<FileRecord> {
        let path = self.path(name);
        let folder = disk::folder_of(&path);
        if folder.symlink_metadata().is_ok_and(|found| !found.is_dir()) && !folder.is_dir() {
            return Err(Fault::usage("this file has the name of a checkpoint's folder")
                .at(folder.display().to_string())
                .hint("move it away, and run the same command again"));
        }
        disk::create_folder(folder)?;
        let mut file = AtomicFile::create(&path)?;
        parts.iter().try_for_each(|part| file.put(part))?;
        // Reads the file back: if the disk returns other bytes, the checkpoint is not committed.
        file.prove()?;
        let record = file.commit()?;
        disk::sync_folder(folder)?;
        Ok(record)
    }

    fn get(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.path(name);
        let fault = |error: &io::Error| Fault::io("read", &path, error);
        // Reading a pipe would block, and reading a device would never end.
        if !fs::metadata(&path).map_err(|error| fault(&error))?.is_file() {
            return Err(Fault::data(
                "this is not a regular file, as all files of a checkpoint are",
            )
            .at(path.display().to_string())
            .hint("move it away"));
        }
        fs::read(&path).map_err(|error| fault(&error))
    }

    fn list(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for step in entries(&self.0)? {
            // Other entries are not ours.
            let mut files = entries(&self.0.join(&step))?;
            files.retain(|file| self.0.join(&step).join(file).is_file());
            found.extend(files.into_iter().map(|file| format!("{step}/{file}")));
        }
        Ok(found)
    }

    fn remove(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        disk::remove(&path)?;
        disk::remove_if_empty(disk::folder_of(&path));
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (self.path(from), self.path(to));
        let folder = disk::folder_of(&to);
        disk::create_folder(folder)?;
        disk::rename(&from, &to).map_err(|error| Fault::io("rename", &from, &error))?;
        disk::sync_folder(folder)?;
        disk::remove_if_empty(disk::folder_of(&from));
        Ok(())
    }

    fn location(&self, name: &str) -> Location {
        Location::Local(self.path(name))
    }
}

/// The names in a folder; empty if it is not a folder.
fn entries(folder: &Path) -> Result<Vec<String>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let fault = |error| Fault::io("list", folder, &error);
    let name =
        |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    let names = fs::read_dir(folder).map_err(fault)?.map(name);
    let mut names = names.collect::<io::Result<Vec<_>>>().map_err(fault)?;
    names.sort();
    Ok(names)
}

/// A prefix in a bucket: objects appear complete or not at all, and are never overwritten.
#[derive(Debug)]
pub(super) struct Bucket(pub(super) Object);

impl Medium for Bucket {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<FileRecord> {
        let bytes = parts.concat();
        self.location(name).write(&bytes).map_err(|fault| match fault.class() {
            Class::Mismatch => fault.hint("give every run a place of its own with --checkpoints"),
            _ => fault,
        })?;
        let name = name.rsplit_once('/').map_or(name, |(_, file)| file).to_owned();
        Ok(FileRecord { name, bytes: bytes.len() as u64, digest: Digest::of_bytes(&bytes) })
    }

    fn get(&self, name: &str) -> Result<Vec<u8>> {
        let place = self.location(name);
        place.read().map_err(|error| place.fault("read", &error))
    }

    fn list(&self) -> Result<Vec<String>> {
        self.0.list().map_err(|error| self.location("").fault("list", &error))
    }

    fn remove(&self, name: &str) -> Result<()> {
        let removed = self.0.join(name).remove();
        removed.map_err(|error| self.location(name).fault("remove", &error))
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let bytes = self.get(from)?;
        self.put(to, &[&bytes])?;
        self.remove(from)
    }

    fn location(&self, name: &str) -> Location {
        Location::Object(self.0.join(name))
    }
}
