//! A file that appears atomically, with its size and digest.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};
use xxhash_rust::xxh3::Xxh3;

use super::direct::DirectFile;
use super::{folder_of, remove, rename, sync_folder};
use crate::FileRecord;

/// A file under construction: under a temporary name until all its bytes are on the disk.
pub struct AtomicFile {
    path: PathBuf,
    file: DirectFile,
    hash: Box<Xxh3>,
    bytes: u64,
    committed: bool,
}

impl AtomicFile {
    /// Begins the file that will be called `path`; its folder must exist. Fails if another run is writing it.
    pub fn create(path: &Path) -> Result<Self> {
        let temporary = temporary(path);
        let file =
            DirectFile::create(&temporary).map_err(|e| Fault::io("create", &temporary, &e))?;
        Ok(AtomicFile::of(file, path))
    }

    /// Begins it in a new, empty, open file, which is called `temporary` until the commit. The handle stays open with
    /// its locks. The page cache is used, since the bytes are soon read again.
    pub fn within(file: fs::File, temporary: &Path, path: &Path) -> Self {
        AtomicFile::of(DirectFile::usual(file, temporary), path)
    }

    fn of(file: DirectFile, path: &Path) -> Self {
        let (path, hash) = (path.to_owned(), Box::new(Xxh3::new()));
        AtomicFile { path, file, hash, bytes: 0, committed: false }
    }

    /// The final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// xxh3-128 of the bytes so far.
    pub fn digest(&self) -> Digest {
        Digest(self.hash.digest128())
    }

    /// Appends `bytes`.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_all(bytes).map_err(|error| self.fault(&error))
    }

    /// The fault for an error while the file is written.
    pub fn fault(&self, error: &io::Error) -> Fault {
        Fault::io("write", self.file.path(), error)
    }

    /// Opens what was written so far for reading.
    pub fn written(&mut self) -> Result<fs::File> {
        self.file.settle().map_err(|error| self.fault(&error))?;
        let path = self.file.path();
        fs::File::open(path).map_err(|error| Fault::io("read", path, &error))
    }

    /// Completes the file and reads it back: fails unless the disk returns what was written.
    pub fn prove(&mut self) -> Result<()> {
        let mut back = Xxh3::new();
        self.file.finish().map_err(|error| self.fault(&error))?;
        let read = self.file.read_back(|piece| back.update(piece));
        read.map_err(|error| Fault::io("verify", &self.path, &error))?;
        if Digest(back.digest128()) == self.digest() {
            return Ok(());
        }
        Err(Fault::machine("the disk gives back other bytes than were written")
            .at(self.path.display().to_string())
            .hint("check the disk before you go on"))
    }

    /// Renames the file to its path once its bytes are on the disk, with the mode of the file it replaces. The name is
    /// durable once its folder is synced.
    pub fn commit(mut self) -> Result<FileRecord> {
        self.place().map_err(|error| self.fault(&error))?;
        let digest = self.digest();
        let name = self.path.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.ok_or_else(|| Fault::bug("a file without a name was written"))?;
        Ok(FileRecord { name, bytes: self.bytes, digest })
    }

    /// Completes the file; its bytes are on the disk, but not yet under its name.
    pub fn finish(&mut self) -> io::Result<()> {
        self.file.finish()
    }

    /// Does the work of [`AtomicFile::commit`], with the system's own error.
    pub fn place(&mut self) -> io::Result<()> {
        if let Ok(there) = fs::metadata(&self.path) {
            // Some file systems have one mode for all files, and refuse to change it.
            let _ = fs::set_permissions(self.file.path(), there.permissions());
        }
        self.finish()?;
        rename(self.file.path(), &self.path)?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            // The original fault is more useful than one about this file, which the next run replaces.
            let _ = remove(self.file.path());
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.write_all(buffer)?;
        Ok(buffer.len())
    }

    fn write_all(&mut self, buffer: &[u8]) -> io::Result<()> {
        self.file.write_all(buffer)?;
        self.hash.update(buffer);
        self.bytes += buffer.len() as u64;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes `bytes` to `path` atomically and durably.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<FileRecord> {
    let mut file = AtomicFile::create(path)?;
    file.put(bytes)?;
    let record = file.commit()?;
    sync_folder(folder_of(path))?;
    Ok(record)
}

/// The same if `fits` accepts the current content, while no other run writes it. Returns whether it was written.
pub fn write_atomic_if(
    path: &Path,
    bytes: &[u8],
    fits: impl FnOnce() -> Result<bool>,
) -> Result<bool> {
    let mut file = AtomicFile::create(path)?;
    if !fits()? {
        return Ok(false);
    }
    file.put(bytes)?;
    file.commit()?;
    sync_folder(folder_of(path))?;
    Ok(true)
}

/// The suffix of incomplete files. Users may have their own `.tmp` files next to any of them.
pub const PART: &str = ".zdata.tmp";

/// The name of an incomplete file.
fn temporary(path: &Path) -> PathBuf {
    super::beside(path, PART)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    /// A folder that cannot be created is not missing data.
    #[test]
    fn a_folder_that_cannot_be_made_is_wrong_use() {
        let fault = crate::disk::create_folder(Path::new("/proc/nope/store")).unwrap_err();
        assert_eq!(fault.class(), contract::Class::Usage, "{fault}");
        assert!(fault.to_string().starts_with("/proc/nope: "), "{fault}");
    }

    #[test]
    fn what_a_person_has_beside_a_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        let own = super::super::beside(&path, ".tmp");
        fs::write(&own, "mine").unwrap();
        assert!(write_atomic_if(&path, b"new", || Ok(true)).unwrap());
        assert!(!write_atomic_if(&path, b"newer", || Ok(false)).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        write_atomic(&path, b"newest").unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), fs::read(&own).unwrap()),
            (b"newest".into(), b"mine".into())
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    /// Two writers of one file: the second is refused, and the first one's bytes stay intact.
    #[test]
    fn a_file_has_one_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(temporary(&path), "what a kill left").unwrap();
        // Small files, and those that use a second handle for direct I/O.
        for size in [7, 3 << 20] {
            let mut first = AtomicFile::create(&path).unwrap();
            first.put(&vec![1; size]).unwrap();
            let refused = AtomicFile::create(&path).map(drop).unwrap_err();
            assert!(refused.to_string().contains("another run is writing it"), "{refused}");
            assert_eq!(refused.class(), contract::Class::Machine);
            first.put(&[2]).unwrap();
            first.commit().unwrap();
            let found = fs::read(&path).unwrap();
            assert!(found.len() == size + 1 && found[..size].iter().all(|byte| *byte == 1));
            let mut second = AtomicFile::create(&path).unwrap();
            second.put(b"second").unwrap();
            second.commit().unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"second");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing half stays");
    }

    #[test]
    fn a_disk_that_gives_back_other_bytes_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (size, lies) in [(3 << 20, true), (3 << 20, false), (77, false), (0, false)] {
            let mut file = AtomicFile::create(&path).unwrap();
            file.put(&vec![7; size]).unwrap();
            if lies {
                let there = fs::OpenOptions::new().write(true).open(temporary(&path)).unwrap();
                there.write_all_at(&[8], 4097).unwrap();
            }
            let proven = file.prove();
            assert_eq!(proven.is_err(), lies);
            if let Err(fault) = proven {
                assert!(fault.to_string().contains("the disk gives back other bytes"), "{fault}");
                continue;
            }
            let record = file.commit().unwrap();
            let found = fs::read(&path).unwrap();
            assert_eq!((record.bytes, record.digest), (size as u64, Digest::of_bytes(&found)));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing half stays");
    }
}
