//! A local cache of objects, bounded in bytes.
//!
//! A copy is a file named by the digest of its object and version; a small file next to it holds the digest of its
//! bytes. Several processes, also on several hosts, may share the folder: a copy is filled under a random name, flushed
//! and then renamed. A process checks a copy's length at every use and its digest at the first use, so what a crash
//! left is fetched again and never served. Each user of a copy holds a shared lock on it; when the cache is over its
//! limit, copies that are not locked are removed, least recently used first.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{Error, ErrorKind, Result, Seek as _, Write};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use contract::Digest;
use store::disk::AtomicFile;
use store::location::LocalFile;
use store::{disk, regular};

use crate::environment::{Environment, cache_folder};

/// The prefix of names of incomplete copies.
const PART: &str = ".part-";

/// The number of random letters and digits after the prefix.
const DRAWN: usize = 6;

/// The suffix of files that hold the digests of copies.
const SUM: &str = ".sum";

/// The size of such a file: a digest in hexadecimal.
const SUM_BYTES: u64 = 32;

/// How often a copy is made before giving up: other processes may remove it, a failing disk may lose it.
const TRIES: usize = 8;

/// The age after which a copy in use is marked as used again, and an unlocked part counts as abandoned.
const HOUR: Duration = Duration::from_secs(60 * 60);

/// The copies of this machine.
pub(super) struct Cache {
    folder: PathBuf,
    limit: u64,
    known: Mutex<FolderState>,
}

/// What this process knows of the folder.
#[derive(Default)]
struct FolderState {
    /// Bytes in the folder, approximately: recounted when over the limit, or when a sixteenth of the limit was added.
    bytes: u64,
    /// Bytes added since the last count: other processes add copies too.
    new: u64,
    /// The copies whose digests were checked, by inode.
    checked: BTreeMap<PathBuf, u64>,
}

/// A copy that is not removed while this lives.
#[derive(Debug)]
pub(super) struct PinnedCopy {
    path: PathBuf,
    file: File,
}

impl PinnedCopy {
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

impl From<PinnedCopy> for LocalFile {
    fn from(PinnedCopy { path, file }: PinnedCopy) -> Self {
        LocalFile::copy(path, file)
    }
}

impl Cache {
    /// Opens the cache of a kind, of at most `limit` bytes; whole objects and blocks use the limit of the environment.
    pub(super) fn open(kind: &str, limit: Option<u64>) -> Result<Self> {
        let folder = cache_folder()?;
        let limit = limit.map_or_else(|| Environment::here().cache_bytes(), Ok)?;
        // This is about the cache folder, not the object to be read: never report a missing file.
        let unusable = |error: Error| {
            Error::other(format!("the cache folder {} (ZDATA_CACHE): {error}", folder.display()))
        };
        Cache::at(folder.join(kind), limit).map_err(unusable)
    }

    pub(super) fn at(folder: PathBuf, limit: u64) -> Result<Self> {
        fs::create_dir_all(&folder)?;
        let cache = Cache { folder, limit, known: Mutex::default() };
        cache.clear_parts()?;
        cache.known().bytes = cache.there()?.iter().map(|(_, bytes, _)| bytes).sum();
        Ok(cache)
    }

    fn known(&self) -> MutexGuard<'_, FolderState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes parts that killed processes left: a process still at work holds a lock on its part, where locks work.
    fn clear_parts(&self) -> Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if !is_part(&entry.file_name().to_string_lossy()) {
                continue;
            }
            // Another process may have removed it.
            let Ok(file) = regular::open(&entry.path()) else { continue };
            let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
            if age > HOUR && is_free(&file) {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    /// The copy of `key`, of this many bytes, made by `fill` if there is none; its file name ends in `name`.
    pub(super) fn get(
        &self,
        key: &str,
        name: &str,
        bytes: u64,
        fill: impl Fn(&mut dyn Write) -> Result<()>,
    ) -> Result<PinnedCopy> {
        let path = self.path(key, name);
        for _ in 0..TRIES {
            match self.take(&path, bytes)? {
                Some(copy) => return Ok(copy),
                None => self.make(&path, bytes, &fill).map_err(|error| self.full(error))?,
            }
        }
        let what = format!("{} is lost or damaged as often as it is made", path.display());
        Err(Error::other(what))
    }

    /// Removes the copy of `key` whose file name ends in `name`: the next use makes it again.
    pub(super) fn drop(&self, key: &str, name: &str) {
        self.remove(&self.path(key, name));
    }

    fn path(&self, key: &str, name: &str) -> PathBuf {
        // File systems limit the length of a name; its end is the most informative part.
        let start = (0..name.len()).find(|at| name.len() - at <= 100 && name.is_char_boundary(*at));
        let name = &name[start.unwrap_or_default()..];
        self.folder.join(format!("{}-{name}", Digest::of_bytes(key.as_bytes())))
    }

    /// A full disk is reported for the cache, not for the object.
    fn full(&self, error: Error) -> Error {
        let full = [ErrorKind::StorageFull, ErrorKind::QuotaExceeded, ErrorKind::FileTooLarge];
        match full.contains(&error.kind()) {
            true => {
                let folder = self.folder.display();
                Error::new(
                    error.kind(),
                    format!("{error}, in the cache folder {folder} (ZDATA_CACHE)"),
                )
            }
            false => error,
        }
    }

    /// The existing copy, if it is whole.
    fn take(&self, path: &Path, bytes: u64) -> Result<Option<PinnedCopy>> {
        let file = match regular::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file.map_err(|error| unusable(path, &error))?,
        };
        match file.lock_shared() {
            Err(error) if !disk::is_lockless(&error) => return Err(error),
            _ => {}
        }
        // An evicting process removes the file before it releases the lock.
        if !path.exists() {
            return Ok(None);
        }
        if !self.is_whole(path, &file, bytes)? {
            self.remove(path);
            return Ok(None);
        }
        Ok(Some(PinnedCopy { path: path.to_owned(), file }))
    }

    fn is_whole(&self, path: &Path, file: &File, bytes: u64) -> Result<bool> {
        let about = file.metadata()?;
        if about.len() != bytes {
            return Ok(false);
        }
        if self.known().checked.get(path) == Some(&about.ino()) {
            return Ok(true);
        }
        let sum = sum_of(path);
        let wanted = match regular::read(&sum) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            wanted => wanted.map_err(|error| unusable(&sum, &error))?,
        };
        let mut front = file;
        let (_, found) = regular::digest(front, &|_| ())?;
        if found.to_string().as_bytes() != wanted {
            return Ok(false);
        }
        front.rewind()?;
        if about.modified()?.elapsed().is_ok_and(|age| age > HOUR) {
            // The time decides only the order of eviction, and another user's copy cannot be marked.
            let _ = file.set_modified(today());
        }
        self.known().checked.insert(path.to_owned(), about.ino());
        Ok(true)
    }

    fn make(
        &self,
        path: &Path,
        bytes: u64,
        fill: &impl Fn(&mut dyn Write) -> Result<()>,
    ) -> Result<()> {
        let (mut copy, inode) = self.begin(path)?;
        fill(&mut copy)?;
        // Before any rename: a full disk is found here, and leaves nothing behind.
        copy.finish()?;
        self.make_room(bytes + SUM_BYTES)?;
        // The digest file first, so that no copy exists without one. A crash may lose both names, which only costs a
        // new fetch.
        let (mut sum, _) = self.begin(&sum_of(path))?;
        sum.write_all(copy.digest().to_string().as_bytes())?;
        sum.place()?;
        copy.place()?;
        self.known().checked.insert(path.to_owned(), inode);
        Ok(())
    }

    /// Creates the file that becomes `path`, under a unique name; also returns its inode.
    fn begin(&self, path: &Path) -> Result<(AtomicFile, u64)> {
        let readable = Permissions::from_mode(0o666);
        let mut named = tempfile::Builder::new();
        let part = named.prefix(PART).rand_bytes(DRAWN).permissions(readable);
        let part = part.tempfile_in(&self.folder)?;
        match disk::hold(part.as_file()) {
            Err(error) if !disk::is_lockless(&error) => return Err(error),
            _ => {}
        }
        let inode = part.as_file().metadata()?.ino();
        let (file, name) = part.keep().map_err(|error| error.error)?;
        Ok((AtomicFile::within(file, &name, path), inode))
    }

    /// Adds `more` bytes to the count. Over the limit, evicts copies down to three quarters of the limit, so that the
    /// folder is not listed again for the next copy.
    fn make_room(&self, more: u64) -> Result<()> {
        let mut known = self.known();
        known.bytes += more;
        known.new += more;
        if known.bytes <= self.limit && known.new <= self.limit / 16 {
            return Ok(());
        }
        let mut there = self.there()?;
        let mut sum = more + there.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
        if sum > self.limit {
            there.sort();
            for (_, bytes, path) in there {
                if sum <= self.limit / 4 * 3 {
                    break;
                }
                let Ok(file) = regular::open(&path) else { continue };
                if is_free(&file) {
                    known.checked.remove(&path);
                    remove(&path);
                    sum -= bytes;
                }
            }
        }
        (known.bytes, known.new) = (sum, 0);
        Ok(())
    }

    fn remove(&self, path: &Path) {
        self.known().checked.remove(path);
        remove(path);
    }

    /// Every copy: last use, size including its digest file, path.
    fn there(&self) -> Result<Vec<(SystemTime, u64, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // Another process may have evicted it.
            let Ok(about) = entry.metadata() else { continue };
            if about.is_file() && is_copy(&name) {
                found.push((about.modified()?, about.len() + SUM_BYTES, entry.path()));
            }
        }
        Ok(found)
    }
}

/// Something at a copy's path is not a copy: an error of the cache, not of the object.
fn unusable(path: &Path, error: &Error) -> Error {
    Error::other(format!("{} in the cache: {error}; remove it", path.display()))
}

/// Removes a copy; another process may have done so already.
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    let _ = fs::remove_file(sum_of(path));
}

/// Locks a copy if no other process uses it. Where locks do not work, those who use it keep their open files.
fn is_free(file: &File) -> bool {
    disk::hold(file).unwrap_or_else(|error| disk::is_lockless(&error))
}

/// The path of the digest file; no copy has such a name.
fn sum_of(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    path.with_file_name(name.split('-').next().unwrap_or_default().to_owned() + SUM)
}

/// Whether a name is that of a copy, as [`Cache::path`] makes it: other files in the folder are not counted and stay.
fn is_copy(name: &str) -> bool {
    let Some((start, _)) = name.split_once('-') else { return false };
    start.parse().is_ok_and(|digest: Digest| digest.to_string() == start)
}

/// Whether a name is that of a part.
fn is_part(name: &str) -> bool {
    let drawn = name.strip_prefix(PART).unwrap_or_default();
    drawn.len() == DRAWN && drawn.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// The current time, at which a copy is used.
#[expect(
    clippy::disallowed_methods,
    reason = "the age of copies decides which go first, and no bit"
)]
fn today() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Read as _;
    use std::process::Command;

    use tempfile::TempDir;

    use super::*;

    fn cache(limit: u64) -> (TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("copies"), limit).unwrap();
        (folder, cache)
    }

    /// The bytes of the copy of `key`, and how often it was filled.
    fn get(cache: &Cache, key: &str, bytes: &[u8]) -> (Vec<u8>, usize) {
        let made = Cell::new(0);
        let copy = cache.get(key, "x.jsonl", bytes.len() as u64, |file| {
            made.set(made.get() + 1);
            file.write_all(bytes)
        });
        let mut found = Vec::new();
        copy.unwrap().file().read_to_end(&mut found).unwrap();
        (found, made.get())
    }

    fn copies(cache: &Cache) -> Vec<PathBuf> {
        cache.there().unwrap().into_iter().map(|(_, _, path)| path).collect()
    }

    #[test]
    fn a_full_disk_is_that_of_the_copies() {
        let (_folder, cache) = cache(1000);
        let full = cache.get("a", "x", 1, |_| Err(ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::StorageFull);
        let told = full.to_string();
        let folder = cache.folder.display().to_string();
        assert!(told.contains(&folder) && told.contains("ZDATA_CACHE"), "{told}");
        let other = cache.get("a", "x", 1, |_| Err(ErrorKind::Other.into())).unwrap_err();
        assert!(!other.to_string().contains("ZDATA_CACHE"), "{other}");
    }

    #[test]
    fn a_copy_is_made_once_and_then_used_by_every_process() {
        let (_folder, first) = cache(1000);
        assert_eq!(get(&first, "a", b"bytes"), (b"bytes".to_vec(), 1));
        assert_eq!(get(&first, "a", b"bytes"), (b"bytes".to_vec(), 0));
        let second = Cache::at(first.folder.clone(), 1000).unwrap();
        assert_eq!(get(&second, "a", b"bytes"), (b"bytes".to_vec(), 0));
        assert_eq!(get(&second, "b", b"others"), (b"others".to_vec(), 1));
        let name = "n".repeat(300);
        assert!(second.get("c", &name, 0, |_| Ok(())).is_ok(), "a name of any length will do");
    }

    /// What a crash may leave of a copy: truncated, empty, filled with zeros, without its digest file or with half a
    /// digest.
    #[test]
    fn a_short_or_torn_copy_is_never_served() {
        let spoils: [fn(&Path); 6] = [
            |path| fs::write(path, b"byt").unwrap(),
            |path| fs::write(path, b"").unwrap(),
            |path| fs::write(path, [0; 5]).unwrap(),
            |path| fs::remove_file(sum_of(path)).unwrap(),
            |path| fs::write(sum_of(path), [0; 32]).unwrap(),
            |path| fs::write(sum_of(path), b"\xff\xfe").unwrap(),
        ];
        for spoil in spoils {
            let (_folder, before) = cache(1000);
            get(&before, "a", b"bytes");
            spoil(&copies(&before)[0]);
            // After a power loss, another process finds it.
            let after = Cache::at(before.folder.clone(), 1000).unwrap();
            assert_eq!(get(&after, "a", b"bytes"), (b"bytes".to_vec(), 1));
            assert_eq!(get(&after, "a", b"bytes"), (b"bytes".to_vec(), 0));
        }
    }

    /// A FIFO does not block the cache, and neither it nor a folder is served as the object.
    #[test]
    fn what_is_no_file_in_a_copys_place_is_the_caches_trouble() {
        let spoils: [fn(&Path); 4] = [
            |path| fs::create_dir(path).unwrap(),
            |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            |path| {
                fs::write(path, b"bytes").unwrap();
                fs::create_dir(sum_of(path)).unwrap();
            },
            |path| {
                fs::write(path, b"bytes").unwrap();
                assert!(Command::new("mkfifo").arg(sum_of(path)).status().unwrap().success());
            },
        ];
        for spoil in spoils {
            let (_folder, cache) = cache(1000);
            get(&cache, "a", b"bytes");
            let path = copies(&cache).remove(0);
            remove(&path);
            spoil(&path);
            let part = cache.folder.join(".part-xxxxxx");
            assert!(Command::new("mkfifo").arg(part).status().unwrap().success());
            let after = Cache::at(cache.folder.clone(), 1000).unwrap();
            let error = after.get("a", "x.jsonl", 5, |_| Ok(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Other);
            assert!(error.to_string().contains("in the cache"), "{error}");
        }
    }

    #[test]
    fn what_fails_leaves_nothing() {
        let (_folder, cache) = cache(1000);
        let failed = cache.get("a", "x", 9, |file| {
            file.write_all(b"half")?;
            Err(ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 0);
        // A server that always sends too little.
        let failed = cache.get("a", "x", 9, |file| file.write_all(b"half"));
        assert!(failed.unwrap_err().to_string().contains("lost or damaged"));
    }

    #[test]
    fn the_oldest_copies_that_nobody_uses_go_when_there_are_too_many_bytes() {
        let (_folder, cache) = cache(10 * (100 + SUM_BYTES));
        let held = cache.get("held", "x", 100, |file| file.write_all(&[7; 100])).unwrap();
        let old = today() - 100 * HOUR;
        held.file.set_modified(old).unwrap();
        let mut seen = copies(&cache);
        for key in 0..40 {
            get(&cache, &key.to_string(), &[key; 100]);
            // One an hour: the clock may be too coarse to tell them apart otherwise.
            let new: Vec<_> = copies(&cache).into_iter().filter(|it| !seen.contains(it)).collect();
            for path in new {
                let made = old + u32::from(key + 1) * HOUR;
                File::open(&path).unwrap().set_modified(made).unwrap();
                seen.push(path);
            }
            let (count, bytes) = (copies(&cache).len(), cache.known().bytes);
            assert_eq!(bytes, count as u64 * (100 + SUM_BYTES), "after {key}");
            assert!(bytes <= cache.limit);
            assert!(held.path.exists());
        }
        let sums = fs::read_dir(&cache.folder).unwrap().count() - copies(&cache).len();
        assert_eq!(sums, copies(&cache).len());
        assert_eq!(get(&cache, "39", &[39; 100]).1, 0, "the youngest one is there");
        assert_eq!(get(&cache, "0", &[0; 100]).1, 1, "the oldest one is not");
    }

    /// A user's files in the folder are neither counted nor removed, and no object's name makes a copy look like one of
    /// them.
    #[test]
    fn only_what_is_called_as_copies_are_is_counted() {
        let (_folder, cache) = cache(1000);
        let long_ago = today() - 9000 * HOUR;
        let mine = [
            "notes",
            "a-b",
            "x.sum",
            ".part-of-me",
            ".part-",
            "0123456789abcdef-x",
            "zz.sum",
            ".part-ab.txt",
        ];
        for name in mine {
            fs::write(cache.folder.join(name), [7; 900]).unwrap();
            let file = File::options().write(true).open(cache.folder.join(name)).unwrap();
            file.set_modified(long_ago).unwrap();
        }
        let after = Cache::at(cache.folder.clone(), 1000).unwrap();
        assert_eq!(after.known().bytes, 0);
        for key in 0..20 {
            let name = if key % 2 == 0 { "of.sum" } else { "a-b.sum" };
            after.get(&key.to_string(), name, 100, |file| file.write_all(&[key; 100])).unwrap();
            assert!(after.known().bytes <= 1000);
        }
        let there = copies(&after).len();
        assert!((1..=7).contains(&there), "{there}");
        assert!(mine.iter().all(|name| after.folder.join(name).exists()));
        assert_eq!(fs::read_dir(&after.folder).unwrap().count(), 2 * there + mine.len());
    }

    /// Far below the limit the folder is listed only a few times, not for every copy.
    #[test]
    fn the_folder_is_not_listed_for_every_copy() {
        let (_folder, cache) = cache(1 << 20);
        for key in 0..100 {
            get(&cache, &key.to_string(), &[0; 100]);
        }
        assert_eq!(cache.known().new, 100 * (100 + SUM_BYTES));
    }

    #[test]
    fn parts_of_others_stay_unless_they_were_left_long_ago() {
        let (_folder, first) = cache(1000);
        let (young, old) = (first.folder.join(".part-aaaaaa"), first.folder.join(".part-bbbbbb"));
        let (_held, _) = first.begin(&first.folder.join("c")).unwrap();
        let locked = fs::read_dir(&first.folder).unwrap().next().unwrap().unwrap().path();
        for path in [&young, &old] {
            fs::write(path, b"").unwrap();
        }
        let long_ago = today() - 2 * HOUR;
        for path in [&old, &locked] {
            File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
        }
        Cache::at(first.folder.clone(), 1000).unwrap();
        assert!(young.exists() && !old.exists() && locked.exists());
    }
}
