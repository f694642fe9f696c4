//! Where a file or a folder is: on this machine, or in object storage.
//!
//! A path or URL that a user names becomes a [`Location`] where it is read (`storage::locate`) and stays one: a URL is
//! never turned into a path. This module has no network client. An object carries its reader, a [`Remote`], which only
//! `storage` and tests create.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use contract::{Class, Digest, Fault, Identity, Result};

use crate::{disk, regular};

mod address;

pub use address::{Address, UrlScheme};

/// What the identity of a file is taken from. Readers define what the groups of a format are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityKind {
    /// All its bytes.
    Whole,
    /// The row groups of a Parquet file.
    RowGroups,
    /// The record batches of an Arrow file.
    RecordBatches,
}

impl IdentityKind {
    /// Every kind.
    pub const ALL: [IdentityKind; 3] =
        [IdentityKind::Whole, IdentityKind::RowGroups, IdentityKind::RecordBatches];

    /// Its name in the key of a cache.
    pub fn name(self) -> &'static str {
        match self {
            IdentityKind::Whole => "whole",
            IdentityKind::RowGroups => "row groups, empty ones too",
            IdentityKind::RecordBatches => "record batches",
        }
    }
}

/// A file or a folder, local or remote.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// On this machine.
    Local(PathBuf),
    /// In object storage.
    Object(Object),
}

/// An address, with its reader.
#[derive(Clone)]
pub struct Object {
    address: Address,
    remote: Arc<dyn Remote>,
}

/// Size and digest of the bytes that came twice, of each object that did not read right: they are not doubted again.
#[derive(Default)]
pub struct Doubts(Mutex<BTreeMap<Address, Arc<Mutex<Known>>>>);

type Known = Option<(u64, Digest)>;

/// Reads and creates objects. Errors are those of files: a missing one is [`io::ErrorKind::NotFound`].
pub trait Remote: Send + Sync {
    /// The size of an object.
    fn size(&self, object: &Address) -> io::Result<u64>;

    /// Fills `buffer` from byte `offset` on.
    fn read_at(&self, object: &Address, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// A whole copy on this machine.
    fn fetch(&self, object: &Address) -> io::Result<LocalFile>;

    /// Size and identity of an object, which `find` takes from a copy in the way called `kind`.
    fn identity(
        &self,
        object: &Address,
        _kind: IdentityKind,
        find: &dyn Fn(&Path) -> io::Result<(u64, Identity)>,
    ) -> io::Result<(u64, Identity)> {
        find(self.fetch(object)?.path())
    }

    /// What distinguishes the object from one that replaces it; as this process first learned it.
    fn version(&self, object: &Address) -> io::Result<String>;

    /// Drops the local copies of an object that does not read right: the next use fetches it. Returns whether there
    /// were any.
    fn forget(&self, _object: &Address) -> bool {
        false
    }

    /// What is known of objects that did not read right.
    fn doubts(&self) -> &Doubts;

    /// Creates an object of these bytes atomically. An existing one with these bytes is a success; one with other bytes
    /// is left as it is, which is [`io::ErrorKind::AlreadyExists`].
    fn create(&self, object: &Address, bytes: &[u8]) -> io::Result<()>;

    /// The address that names the same object for ever: on a server with revisions, that of its revision now.
    fn pinned(&self, object: &Address) -> io::Result<Address> {
        Ok(object.clone())
    }

    /// The objects below a folder, by their keys in it, and their sizes.
    fn sizes(&self, folder: &Address) -> io::Result<BTreeMap<String, u64>>;

    /// Removes an object, if it is there.
    fn remove(&self, object: &Address) -> io::Result<()>;
}

/// A local file: the file itself, or a copy of an object that stays as long as this lives.
#[derive(Debug)]
pub struct LocalFile {
    path: PathBuf,
    hold: Option<File>,
}

impl LocalFile {
    /// A copy, which is not evicted while `hold` is open.
    pub fn copy(path: PathBuf, hold: File) -> Self {
        LocalFile { path, hold: Some(hold) }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size and digest of the open file, also of a copy that was evicted meanwhile.
    fn digest(&self) -> io::Result<(u64, Digest)> {
        match &self.hold {
            Some(held) => {
                let mut front: &File = held;
                front.rewind()?;
                regular::digest(front, &|_| ())
            }
            None => regular::digest(regular::open(&self.path)?, &|_| ()),
        }
    }
}

impl Object {
    /// The object at `address`, read by `remote`.
    pub fn new(address: Address, remote: Arc<dyn Remote>) -> Self {
        Object { address, remote }
    }

    /// Its name.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Fills `buffer` from byte `offset` on.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.remote.read_at(&self.address, buffer, offset)
    }

    /// What distinguishes it from an object that replaces it; see [`Remote::version`].
    pub fn version(&self) -> io::Result<String> {
        self.remote.version(&self.address)
    }

    /// Its size.
    pub fn size(&self) -> io::Result<u64> {
        self.remote.size(&self.address)
    }

    /// Makes the object; see [`Remote::create`].
    pub fn create(&self, bytes: &[u8]) -> io::Result<()> {
        self.remote.create(&self.address, bytes)
    }

    /// The objects below, by their keys from here on, sorted.
    pub fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.sizes()?.into_keys().collect())
    }

    /// The same with their sizes.
    pub fn sizes(&self) -> io::Result<BTreeMap<String, u64>> {
        self.remote.sizes(&self.address)
    }

    /// Removes the object, if it is there.
    pub fn remove(&self) -> io::Result<()> {
        self.remote.remove(&self.address)
    }

    /// The same object at an address that names it for ever; see [`Remote::pinned`].
    pub fn pinned(&self) -> io::Result<Self> {
        Ok(self.at(self.remote.pinned(&self.address)?))
    }

    /// All of its bucket, as a folder.
    pub fn root(&self) -> Self {
        self.at(self.address.root())
    }

    /// The entry `name` of this folder; a name may have several parts.
    pub fn join(&self, name: &str) -> Self {
        self.at(self.address.join(name))
    }

    fn at(&self, address: Address) -> Self {
        Object { address, remote: Arc::clone(&self.remote) }
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
    }
}

impl Eq for Object {}

impl PartialOrd for Object {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Object {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.address.cmp(&other.address)
    }
}

impl Location {
    /// Its path, if it is local.
    pub fn local(&self) -> Option<&Path> {
        match self {
            Location::Local(path) => Some(path),
            Location::Object(_) => None,
        }
    }

    /// Whether it is in object storage.
    pub fn is_remote(&self) -> bool {
        self.local().is_none()
    }

    /// The entry `name` of this folder; a name may have several parts.
    pub fn join(&self, name: &str) -> Self {
        match self {
            Location::Local(path) => Location::Local(path.join(name)),
            Location::Object(object) => Location::Object(object.join(name)),
        }
    }

    /// The folder that holds it.
    pub fn folder(&self) -> Self {
        match self {
            Location::Local(path) => Location::Local(path.parent().unwrap_or(path).to_owned()),
            Location::Object(object) => Location::Object(object.at(object.address.folder())),
        }
    }

    /// The last part of its name.
    pub fn name(&self) -> String {
        match self {
            Location::Local(path) => {
                path.file_name().unwrap_or_default().to_string_lossy().into_owned()
            }
            Location::Object(object) => object.address.name().to_owned(),
        }
    }

    /// Resolves a name, not a URL, that a file in this folder uses. An absolute path is local.
    pub fn resolve(&self, name: &str) -> Result<Self> {
        match self {
            Location::Object(object) if !Path::new(name).has_root() => {
                Ok(Location::Object(object.at(object.address.resolve(name)?)))
            }
            Location::Object(_) => Ok(Location::Local(PathBuf::from(name))),
            Location::Local(folder) => Ok(Location::Local(folder.join(name))),
        }
    }

    /// The same as an absolute path.
    pub fn absolute(&self) -> Result<Self> {
        match self {
            Location::Local(path) => {
                let absolute = std::path::absolute(path);
                Ok(Location::Local(absolute.map_err(|error| Fault::io("resolve", path, &error))?))
            }
            Location::Object(_) => Ok(self.clone()),
        }
    }

    /// Whether it is a file, and not a folder or missing.
    pub fn is_file(&self) -> Result<bool> {
        match self {
            Location::Local(path) => Ok(path.is_file()),
            Location::Object(_) => match self.size() {
                Ok(_) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
                Err(error) => Err(self.fault("look for", &error)),
            },
        }
    }

    /// The file on this machine, fetched if it is an object.
    pub fn fetch(&self) -> io::Result<LocalFile> {
        match self {
            Location::Local(path) => Ok(LocalFile { path: path.clone(), hold: None }),
            Location::Object(object) => object.remote.fetch(&object.address),
        }
    }

    /// Opens the file.
    pub fn open(&self) -> io::Result<File> {
        match self.fetch()? {
            // The handle that holds the copy is at its start, and keeps the copy.
            LocalFile { hold: Some(file), .. } => Ok(file),
            LocalFile { path, hold: None } => regular::open(&path),
        }
    }

    /// Applies `read` to the file. If it reports damage and the file is a copy of an object, the copy may be at fault:
    /// it is dropped, and the object is fetched and read once more.
    pub fn reread<T>(&self, read: impl Fn() -> Result<T>) -> Result<T> {
        match read() {
            Err(fault) if fault.class() == Class::Data && self.forget() => read(),
            read => read,
        }
    }

    /// The fault to report where `copy`, of this file, does not read right (`fault`). If it is damage of an object, the
    /// object is fetched once more, but not again for the same bytes: if other bytes arrive, the copy was at fault, but
    /// its bytes may have been used already.
    pub fn doubt(&self, copy: &LocalFile, fault: Fault) -> Fault {
        let Location::Object(object) = self else { return fault };
        if fault.class() != Class::Data {
            return fault;
        }
        let Doubts(all) = object.remote.doubts();
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        let known = Arc::clone(all.entry(object.address.clone()).or_default());
        drop(all);
        // Parts of a file that are read at the same time wait here for the first of them.
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_its_own = copy.digest().and_then(|found| {
            if *known == Some(found) || !self.forget() {
                return Ok(true);
            }
            let same = self.fetch()?.digest()? == found;
            *known = same.then_some(found);
            Ok(same)
        });
        match is_its_own {
            Ok(true) => fault,
            Ok(false) => Fault::machine("this object came with other bytes than it has")
                .at(self.to_string())
                .found(fault.to_string().lines().next().unwrap_or_default())
                .hint("run the same command again: it was fetched anew"),
            Err(error) => self.fault("fetch", &error),
        }
    }

    /// Drops the local copies of an object; returns whether there were any, so that another read may give other bytes.
    pub fn forget(&self) -> bool {
        matches!(self, Location::Object(object) if object.remote.forget(&object.address))
    }

    /// The bytes of the file.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        regular::read(self.fetch()?.path())
    }

    /// The size of the file.
    pub fn size(&self) -> io::Result<u64> {
        match self {
            Location::Local(path) => regular::size(path),
            Location::Object(object) => object.size(),
        }
    }

    /// Size and SHA-256 of the file.
    pub fn content(&self) -> Result<(u64, Identity)> {
        let of_bytes = |path: &Path| {
            let found = regular::open(path).and_then(regular::identity);
            found.map_err(|error| self.fault("read", &error))
        };
        self.identity(IdentityKind::Whole, of_bytes)
    }

    /// Size and identity of the file, which `find` takes from it as `kind` says.
    pub fn identity(
        &self,
        kind: IdentityKind,
        find: impl Fn(&Path) -> Result<(u64, Identity)>,
    ) -> Result<(u64, Identity)> {
        let object = match self {
            Location::Local(path) => return find(path),
            Location::Object(object) => object,
        };
        let failed = RefCell::new(None);
        let find = |path: &Path| {
            find(path).map_err(|fault| {
                let error = io::Error::other(fault.to_string());
                failed.replace(Some(fault));
                error
            })
        };
        let found = object.remote.identity(&object.address, kind, &find);
        found.map_err(|error| failed.take().unwrap_or_else(|| self.fault("read", &error)))
    }

    /// Writes a file atomically. A local file is replaced; an object never is, and an existing one with other bytes is
    /// a mismatch.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        match self {
            Location::Local(path) => disk::write_atomic(path, bytes).map(drop),
            Location::Object(object) => object.create(bytes).map_err(|error| self.taken(&error)),
        }
    }

    /// The fault for an object that could not be created.
    pub fn taken(&self, error: &io::Error) -> Fault {
        match error.kind() {
            io::ErrorKind::AlreadyExists => Fault::mismatch("something else is there already")
                .at(self.to_string())
                .hint("name another place; an object is never replaced"),
            _ => self.fault("write", error),
        }
    }

    /// The fault for an I/O error here while trying to do `what`; see [`Fault::io`].
    pub fn fault(&self, what: &str, error: &io::Error) -> Fault {
        match self {
            Location::Local(path) => Fault::io(what, path, error),
            Location::Object(object) => {
                let fault = Fault::io(what, Path::new(""), error).at(self.to_string());
                match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                        fault.hint(object.address.scheme().hint())
                    }
                    io::ErrorKind::InvalidInput => fault.hint("correct this in the environment"),
                    io::ErrorKind::Unsupported => {
                        Fault::usage(format!("cannot {what} it: {error}")).at(self.to_string())
                    }
                    _ => fault,
                }
            }
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Local(path) => path.display().fmt(f),
            Location::Object(object) => object.address.fmt(f),
        }
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        Location::Local(path)
    }
}

impl From<&PathBuf> for Location {
    fn from(path: &PathBuf) -> Self {
        Location::Local(path.clone())
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        Location::Local(path.to_owned())
    }
}

impl From<&Location> for Location {
    fn from(location: &Location) -> Self {
        location.clone()
    }
}

#[cfg(any(test, feature = "crash"))]
pub mod memory;
#[cfg(test)]
mod tests;
