//! Files that are computed from a store and kept next to it: packs, and the documents of a bucket.
//!
//! A file is `STORE.KIND/KEY.KIND`, where the key is a digest of all that decides its content. For a store in a bucket
//! or in a read-only folder, it is in the cache (`ZDATA_CACHE`). A file is only used if its digest matches, and is
//! recomputed if missing. So a lost file costs a moment, and ranks that write the same file concurrently write the same
//! bytes. Its last 16 bytes are the digest: xxh3-128 over the tag `KIND.file` and the xxh3-64 of each MiB before.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use contract::digest::block_sum;
use contract::{Digest, Fault, Hasher, Result};
use store::disk::{self, AtomicFile};
use store::{Location, regular};

/// Bytes per block of the digest.
const BLOCK_BYTES: usize = 1 << 20;

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

/// Computes the digest of a file written in arbitrary parts.
struct Summed {
    hasher: Hasher,
    block: Vec<u8>,
}

impl Summed {
    fn new(kind: Kind) -> Self {
        let mut hasher = Hasher::new();
        hasher.tag(&format!("{}.file", kind.name()));
        Summed { hasher, block: Vec::new() }
    }

    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.block.len()));
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() == BLOCK_BYTES {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        self.hasher.u64(block_sum(&self.block));
        self.block.clear();
    }

    fn finish(mut self) -> Digest {
        self.end_block();
        self.hasher.finish()
    }
}

/// A file under construction, which appears atomically.
pub(crate) struct SealedWriter {
    file: AtomicFile,
    summed: Summed,
    path: PathBuf,
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
        Ok(SealedWriter { file, summed: Summed::new(kind), path: folder.join(name), _shared })
    }

    /// Appends `bytes`.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.summed.add(bytes);
        self.file.put(bytes)
    }

    /// Appends the digest and gives the file its name; returns its path.
    pub(crate) fn commit(self) -> Result<PathBuf> {
        let SealedWriter { mut file, summed, path, _shared } = self;
        file.put(&summed.finish().0.to_le_bytes())?;
        let own = file.path().to_owned();
        file.commit()?;
        disk::rename(&own, &path).map_err(|error| Fault::io("rename", &path, &error))?;
        disk::sync_folder(disk::folder_of(&path))?;
        Ok(path)
    }
}

/// An open file whose digest matched.
#[derive(Debug)]
pub(crate) struct SealedFile {
    kind: Kind,
    path: PathBuf,
    file: File,
    pub(crate) digest: Digest,
    /// Bytes before the digest.
    pub(crate) body: u64,
}

impl SealedFile {
    /// Opens a file and checks its digest.
    pub(crate) fn open(kind: Kind, path: &Path) -> Result<Self> {
        let unread = |error: &io::Error| Fault::io("read", path, error);
        let file = regular::open(path).map_err(|error| unread(&error))?;
        let bytes = file.metadata().map_err(|error| unread(&error))?.len();
        let body = bytes.checked_sub(DIGEST_BYTES as u64);
        let digest = Digest(0);
        let mut opened =
            SealedFile { kind, path: path.to_owned(), file, digest, body: body.unwrap_or(0) };
        body.ok_or_else(|| opened.damaged("it ends early"))?;
        opened.digest = opened.summed().map_err(|error| unread(&error))?;
        let found = Digest(u128::from_le_bytes(opened.at(opened.body)?));
        if found != opened.digest {
            let fault = opened.damaged("its bytes do not match their digest");
            return Err(fault.found(opened.digest).wanted(found));
        }
        Ok(opened)
    }

    fn summed(&self) -> io::Result<Digest> {
        let (mut summed, mut buffer, mut at) = (Summed::new(self.kind), vec![0; BLOCK_BYTES], 0);
        while at < self.body {
            let part = (self.body - at).min(BLOCK_BYTES as u64) as usize;
            self.file.read_exact_at(&mut buffer[..part], at)?;
            summed.add(&buffer[..part]);
            at += part as u64;
        }
        Ok(summed.finish())
    }

    /// The error for content that cannot be right.
    pub(crate) fn damaged(&self, what: &str) -> Fault {
        Fault::data(format!("this file of {} is damaged: {what}", self.kind.title()))
            .at(self.path.display().to_string())
            .hint("remove it: it is made again from the store")
    }

    /// `N` bytes from an offset on.
    pub(crate) fn at<const N: usize>(&self, from: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let read = self.file.read_exact_at(&mut bytes, from);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        Ok(bytes)
    }

    /// `count` bytes from an offset on.
    pub(crate) fn bytes(&self, from: u64, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        let read = self.file.read_exact_at(&mut bytes, from);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        Ok(bytes)
    }

    /// `count` words from an offset on.
    pub(crate) fn words(&self, from: u64, count: usize) -> Result<Vec<u64>> {
        let bytes = self.bytes(from, count * 8)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
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
