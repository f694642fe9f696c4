//! Files that are computed from a store and kept next to it: packs, and the documents of a bucket.
//!
//! A file is `STORE.KIND/KEY.KIND`, where the key is a digest of all that decides its content. For a store in a bucket
//! or in a read-only folder, it is in the cache (`ZDATA_CACHE`). A file is only used if its digest matches, and is
//! recomputed if missing. So a lost file costs a moment, and ranks that write the same file concurrently write the same
//! bytes.
//!
//! ```text
//! body                                                                     any number of bytes
//! sums    xxh3-64 of each 16 KiB of the body                               u64 each
//! digest  xxh3-128 over the tag `KIND.file`, the body's size and the sums  u128
//! ```
//!
//! Opening a file reads the sums alone, a two-thousandth of the file. Each later read checks the pages that it touches.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use contract::digest::block_sum;
use contract::{Digest, Fault, Hasher, Result};
use store::disk::{self, AtomicFile};
use store::{Location, regular};

/// Bytes of the body that have one sum.
const PAGE_BYTES: usize = 1 << 14;

const SUM_BYTES: usize = 8;
const DIGEST_BYTES: usize = 16;

/// What such a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The packs of a source.
    Packs,
    /// The documents of a bucket.
    Bucket,
}

impl Kind {
    /// The name of its folder, and the extension of its files.
    fn name(self) -> &'static str {
        match self {
            Kind::Packs => "packs",
            Kind::Bucket => "buckets",
        }
    }

    /// What it is called in errors.
    fn title(self) -> &'static str {
        match self {
            Kind::Packs => "packs",
            Kind::Bucket => "a bucket",
        }
    }

    /// The name of the file with this key.
    pub(crate) fn file(self, key: Digest) -> String {
        format!("{key}.{}", self.name())
    }

    /// Where the files of a store may be, the preferred folder first.
    pub(crate) fn folders(self, store: &Location) -> Vec<PathBuf> {
        let beside = |path: &Path| {
            // A store named as `.` has no name to derive the folder from.
            let path = std::fs::canonicalize(path).ok()?;
            path.file_name()?;
            Some(disk::beside(&path, &format!(".{}", self.name())))
        };
        let beside = match store {
            Location::Local(path) => beside(path),
            Location::Object(_) => None,
        };
        beside.into_iter().chain(storage::kept(self.name())).collect()
    }

    /// The file of this name in one of these folders, from which partial files of crashed writers are removed.
    pub(crate) fn find(self, folders: &[PathBuf], name: &str) -> Option<PathBuf> {
        folders.iter().find_map(|folder| {
            clear(self, folder);
            let path = folder.join(name);
            // Not a link: it may lead anywhere.
            path.symlink_metadata().is_ok_and(|found| found.is_file()).then_some(path)
        })
    }

    /// What `write` makes in the first of these folders that takes files.
    pub(crate) fn first_writable<T>(
        self,
        folders: &[PathBuf],
        mut write: impl FnMut(&Path) -> Result<T>,
    ) -> Result<T> {
        let mut refused = None;
        for folder in folders {
            match write(folder) {
                Ok(written) => return Ok(written),
                Err(fault) => refused = refused.or(Some(fault)),
            }
        }
        let none = || Fault::machine(format!("no folder is known to keep {} in", self.title()));
        let fault = refused.unwrap_or_else(none);
        Err(fault
            .hint("make space next to the store, or name a folder that takes files as ZDATA_CACHE"))
    }
}

/// The digest of a file with these sums.
fn digest(kind: Kind, body: u64, sums: &[u64]) -> Digest {
    let mut hasher = Hasher::new();
    hasher.tag(&format!("{}.file", kind.name())).u64(body);
    sums.iter().for_each(|sum| {
        hasher.u64(*sum);
    });
    hasher.finish()
}

/// A file under construction, which appears atomically.
pub(crate) struct SealedWriter {
    kind: Kind,
    file: AtomicFile,
    path: PathBuf,
    /// Bytes of the body so far.
    pub(crate) body: u64,
    sums: Vec<u64>,
    /// The begun page.
    page: Vec<u8>,
    /// Writers share this lock, so that no cleanup removes a partial file. Without working locks there is no cleanup.
    _shared: io::Result<File>,
}

impl SealedWriter {
    /// Begins the file that will be called `name` in `folder`.
    pub(crate) fn create(kind: Kind, folder: &Path, name: &str) -> Result<Self> {
        disk::create_folder(folder)?;
        let _shared = File::open(folder).inspect(|folder| drop(folder.lock_shared()));
        // Another rank may write the same file. Each writes its own, and renames it over equal bytes.
        let file = AtomicFile::create(&folder.join(format!("{name}.{:016x}", chance())))?;
        let (path, sums, page) = (folder.join(name), Vec::new(), Vec::with_capacity(PAGE_BYTES));
        Ok(SealedWriter { kind, file, path, body: 0, sums, page, _shared })
    }

    /// Appends `bytes`.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.body += bytes.len() as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(PAGE_BYTES - self.page.len()));
            self.page.extend_from_slice(now);
            rest = later;
            if self.page.len() == PAGE_BYTES {
                self.sums.push(block_sum(&self.page));
                self.page.clear();
            }
        }
        self.file.put(bytes)
    }

    /// Appends a list of words.
    pub(crate) fn put_words(&mut self, words: &[u64]) -> Result<()> {
        words.iter().try_for_each(|word| self.put(&word.to_le_bytes()))
    }

    /// Appends the sums and the digest, and gives the file its name; returns its path.
    pub(crate) fn commit(self) -> Result<PathBuf> {
        let SealedWriter { kind, mut file, path, body, mut sums, page, _shared } = self;
        if !page.is_empty() {
            sums.push(block_sum(&page));
        }
        for sum in &sums {
            file.put(&sum.to_le_bytes())?;
        }
        file.put(&digest(kind, body, &sums).0.to_le_bytes())?;
        let own = file.path().to_owned();
        file.commit()?;
        disk::rename(&own, &path).map_err(|error| Fault::io("rename", &path, &error))?;
        disk::sync_folder(disk::folder_of(&path))?;
        Ok(path)
    }
}

/// An open file whose sums match its digest.
#[derive(Debug)]
pub(crate) struct SealedFile {
    kind: Kind,
    path: PathBuf,
    file: File,
    pub(crate) digest: Digest,
    /// Bytes of the body.
    pub(crate) body: u64,
    sums: Vec<u64>,
}

impl SealedFile {
    /// Opens a file and checks its sums against its digest.
    pub(crate) fn open(kind: Kind, path: &Path) -> Result<Self> {
        let unread = |error: &io::Error| Fault::io("read", path, error);
        let file = regular::open(path).map_err(|error| unread(&error))?;
        let bytes = file.metadata().map_err(|error| unread(&error))?.len();
        let (path, digest) = (path.to_owned(), Digest(0));
        let mut opened = SealedFile { kind, path, file, digest, body: 0, sums: Vec::new() };
        let (pages, body) =
            sizes(bytes).ok_or_else(|| opened.damaged("it ends within its sums"))?;
        let mut end = vec![0; pages * SUM_BYTES + DIGEST_BYTES];
        opened.read(&mut end, body)?;
        let (sums, last) = end.as_chunks();
        let (sums, digits) = sums.split_at(pages);
        let word = |bytes: &[u8; SUM_BYTES]| u64::from_le_bytes(*bytes);
        let (low, high) = (word(&digits[0]), word(&digits[1]));
        debug_assert!(last.is_empty(), "a digest is two words");
        opened.body = body;
        opened.sums = sums.iter().map(word).collect();
        opened.digest = self::digest(kind, body, &opened.sums);
        let found = Digest(u128::from(low) | u128::from(high) << 64);
        if found != opened.digest {
            let fault = opened.damaged("its bytes do not match their digest");
            return Err(fault.found(opened.digest).wanted(found));
        }
        Ok(opened)
    }

    /// The error for content that cannot be right.
    pub(crate) fn damaged(&self, what: &str) -> Fault {
        Fault::data(format!("this file of {} is damaged: {what}", self.kind.title()))
            .at(self.path.display().to_string())
            .hint("remove it: it is made again from the store")
    }

    fn read(&self, bytes: &mut [u8], from: u64) -> Result<()> {
        let read = self.file.read_exact_at(bytes, from);
        read.map_err(|error| Fault::io("read", &self.path, &error))
    }

    /// `N` bytes of the body from an offset on.
    pub(crate) fn at<const N: usize>(&self, from: u64) -> Result<[u8; N]> {
        let bytes = self.bytes(from, N)?;
        bytes.try_into().map_err(|_| Fault::bug("another number of bytes was read"))
    }

    /// `count` bytes of the body from an offset on, of pages that match their sums.
    pub(crate) fn bytes(&self, from: u64, count: usize) -> Result<Vec<u8>> {
        let end = from.checked_add(count as u64).filter(|end| *end <= self.body);
        let end = end.ok_or_else(|| self.damaged("its columns extend beyond its end"))?;
        let first = from / PAGE_BYTES as u64;
        let begin = first * PAGE_BYTES as u64;
        let mut pages =
            vec![0; (self.body.min(end.next_multiple_of(PAGE_BYTES as u64)) - begin) as usize];
        self.read(&mut pages, begin)?;
        let sums = &self.sums[first as usize..];
        if pages.chunks(PAGE_BYTES).zip(sums).any(|(page, sum)| block_sum(page) != *sum) {
            return Err(self.damaged("its bytes do not match their sums"));
        }
        pages.truncate((end - begin) as usize);
        pages.drain(..(from - begin) as usize);
        Ok(pages)
    }

    /// `count` words from an offset on.
    pub(crate) fn words(&self, from: u64, count: usize) -> Result<Vec<u64>> {
        let bytes = self.bytes(from, count * 8)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
}

/// Pages and bytes of the body of a file of `bytes` bytes.
fn sizes(bytes: u64) -> Option<(usize, u64)> {
    let both = bytes.checked_sub(DIGEST_BYTES as u64)?;
    let pages = both.div_ceil((PAGE_BYTES + SUM_BYTES) as u64);
    let body = both.checked_sub(pages * SUM_BYTES as u64)?;
    Some((usize::try_from(pages).ok()?, body))
}

/// Removes partial files that crashes left, unless a writer is active. If that fails, they stay and do no harm.
pub(crate) fn clear(kind: Kind, folder: &Path) {
    let Ok(there) = disk::entries(folder) else { return };
    let pieces: Vec<_> = there.into_iter().filter(|path| is_piece(kind, path)).collect();
    if pieces.is_empty() {
        return;
    }
    // Writers share this lock: if it can be taken exclusively, the files listed before have no writer any more.
    let Ok(alone) = File::open(folder) else { return };
    if !disk::hold(&alone).unwrap_or(false) {
        return;
    }
    for piece in pieces {
        let _ = disk::remove(&piece);
    }
}

/// Whether a file is named like a partial file of a [`SealedWriter`].
fn is_piece(kind: Kind, path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let name = name.strip_suffix(disk::PART).unwrap_or(name);
    let is_random =
        |random: &str| random.len() == 16 && random.bytes().all(|it| it.is_ascii_hexdigit());
    let ends = format!(".{}", kind.name());
    name.rsplit_once('.').is_some_and(|(whole, random)| whole.ends_with(&ends) && is_random(random))
}

/// 64 random bits, unique to this process, for the name of a partial file.
fn chance() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Any part of a file is read as it was written, and a flipped bit is found by the reads that touch its page
        /// and by no other.
        #[test]
        fn reads_check_what_they_touch(
            parts in prop::collection::vec(0usize..40_000, 0..6),
            part in any::<[prop::sample::Index; 2]>(),
            flipped: prop::sample::Index,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let mut writer = SealedWriter::create(Kind::Packs, folder.path(), "a.packs").unwrap();
            let mut all = Vec::new();
            for (number, size) in parts.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..size).map(|at| (at * 7 + number) as u8).collect();
                writer.put(&bytes).unwrap();
                all.extend(bytes);
            }
            let path = writer.commit().unwrap();
            let open = || SealedFile::open(Kind::Packs, &path);
            let file = open().unwrap();
            prop_assert_eq!(file.body, all.len() as u64);
            let [a, b] = part.map(|index| index.index(all.len() + 1));
            let (from, end) = (a.min(b), a.max(b));
            prop_assert_eq!(file.bytes(from as u64, end - from).unwrap(), &all[from..end]);
            prop_assert!(file.bytes(from as u64, all.len() + 1).is_err());
            let mut damaged = fs::read(&path).unwrap();
            let at = flipped.index(damaged.len());
            damaged[at] ^= 16;
            fs::write(&path, damaged).unwrap();
            let found = open().and_then(|file| file.bytes(from as u64, end - from));
            let touched = end > from && (from / PAGE_BYTES..=(end - 1) / PAGE_BYTES).contains(&(at / PAGE_BYTES));
            prop_assert_eq!(found.is_err(), touched || at >= all.len());
        }
    }
}
