//! Files that do not lie on this machine: `s3://bucket/key`.
//!
//! This room knows no network. Whoever does says here how far files are read and made (`ingest::remote`); all that reads
//! inputs and stores opens files here, near ones as ever, far ones as a copy on this machine. A path is far if it begins
//! with `s3://`.

use std::fs::File;
use std::io::{Error, ErrorKind, Read as _, Result};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use contract::{Fault, Identity};
use sha2::{Digest as _, Sha256};

use crate::regular;

/// What far paths begin with.
pub const SCHEME: &str = "s3://";

/// How far files are read and made. Errors are those of files: a missing one is [`ErrorKind::NotFound`].
pub trait Far: Send + Sync {
    /// The size of a file.
    fn size(&self, path: &Path) -> Result<u64>;

    /// Fills `buffer` from byte `offset` on.
    fn read_at(&self, path: &Path, buffer: &mut [u8], offset: u64) -> Result<()>;

    /// A whole copy on this machine.
    fn fetch(&self, path: &Path) -> Result<Near>;

    /// Makes a file of these bytes; it appears whole. One that has them is as good as made; one with other bytes is left
    /// as it is, which is [`ErrorKind::AlreadyExists`].
    fn create(&self, path: &Path, bytes: &[u8]) -> Result<()>;

    /// The files below a folder, by their paths in it.
    fn list(&self, folder: &Path) -> Result<Vec<String>>;

    /// Removes a file, if it is there.
    fn remove(&self, path: &Path) -> Result<()>;
}

static FAR: OnceLock<Box<dyn Far>> = OnceLock::new();

/// Says how far files are read, once for a process.
pub fn install(far: Box<dyn Far>) {
    // The first one stays: a program installs one at its start.
    let _ = FAR.set(far);
}

/// Whether a path is far.
pub fn is_far(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().starts_with(SCHEME.as_bytes())
}

/// Where the file lies that another one in `folder` calls `name`: from that folder on, unless it is far.
pub fn placed(folder: &Path, name: &str) -> PathBuf {
    if is_far(Path::new(name)) { PathBuf::from(name) } else { folder.join(name) }
}

/// What reads `path`, if it is far.
pub fn reader(path: &Path) -> Result<Option<&'static dyn Far>> {
    if !is_far(path) {
        return Ok(None);
    }
    match FAR.get() {
        Some(far) => Ok(Some(far.as_ref())),
        None => Err(Error::new(ErrorKind::Unsupported, "this program reads no object storage")),
    }
}

/// A file on this machine: the file itself, or a copy of a far one that stays as long as this lives.
#[derive(Debug)]
pub struct Near {
    path: PathBuf,
    hold: Option<File>,
}

impl Near {
    /// A copy, which is not cleared away while `hold` is open.
    pub fn copy(path: PathBuf, hold: File) -> Self {
        Near { path, hold: Some(hold) }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// `path` on this machine.
pub fn near(path: &Path) -> Result<Near> {
    match reader(path)? {
        Some(far) => far.fetch(path),
        None => Ok(Near { path: path.to_owned(), hold: None }),
    }
}

/// Opens a file, far or near.
pub fn open(path: &Path) -> Result<File> {
    match near(path)? {
        // The handle that holds a copy is at its beginning, and keeps it.
        Near { hold: Some(file), .. } => Ok(file),
        Near { path, hold: None } => regular::open(&path),
    }
}

/// The bytes of a file, far or near.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    regular::read(near(path)?.path())
}

/// The size of a file, far or near.
pub fn size(path: &Path) -> Result<u64> {
    match reader(path)? {
        Some(far) => far.size(path),
        None => regular::size(path),
    }
}

/// Size and SHA-256 of a file.
pub fn content(path: &Path) -> contract::Result<(u64, Identity)> {
    let fault = |error| Fault::io("read", path, &error);
    let mut file = open(path).map_err(fault)?;
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).map_err(fault)?;
        if count == 0 {
            return Ok((bytes, Identity(hash.finalize().into())));
        }
        hash.update(&buffer[..count]);
        bytes += count as u64;
    }
}
