//! Where a file or a folder is: on this machine, or in object storage.
//!
//! A path or URL that a user names becomes a [`Location`] where it is read (`storage::locate`) and stays one: a URL is
//! never turned into a path. This module has no network client. An object carries its reader, a [`Remote`], which only
//! `storage` and tests create.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::{Class, Digest, Fault, Identity, Result};

use crate::{disk, regular};

/// The prefix of the URL of an object.
pub const SCHEME: &str = "s3://";

/// A file or a folder, local or remote.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// On this machine.
    Local(PathBuf),
    /// In object storage.
    Object(Object),
}

/// The name of an object, or of a folder of objects: a bucket and a key, which is empty for the whole bucket.
///
/// A key is taken as it is written: a percent sign or a space in it means itself. Its parts, between slashes, are never
/// empty and never `.` or `..`, so that no two addresses name one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    bucket: String,
    key: String,
}

/// An address, with its reader.
#[derive(Clone)]
pub struct Object {
    address: Address,
    remote: Arc<dyn Remote>,
}

/// Reads and creates objects. Errors are those of files: a missing one is [`io::ErrorKind::NotFound`].
pub trait Remote: Send + Sync {
    /// The size of an object.
    fn size(&self, object: &Address) -> io::Result<u64>;

    /// Fills `buffer` from byte `offset` on.
    fn read_at(&self, object: &Address, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// A whole copy on this machine.
    fn fetch(&self, object: &Address) -> io::Result<LocalFile>;

    /// Size and SHA-256 of an object.
    fn content(&self, object: &Address) -> io::Result<(u64, Identity)> {
        regular::identity(regular::open(self.fetch(object)?.path())?)
    }

    /// Drops the local copies of an object that does not read right: the next use fetches it. Returns whether there
    /// were any.
    fn forget(&self, _object: &Address) -> bool {
        false
    }

    /// Creates an object of these bytes atomically. An existing one with these bytes is a success; one with other bytes
    /// is left as it is, which is [`io::ErrorKind::AlreadyExists`].
    fn create(&self, object: &Address, bytes: &[u8]) -> io::Result<()>;

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

impl Address {
    /// Parses an address of the form `s3://bucket/key`; a trailing slash is allowed, as for folders.
    pub fn parse(url: &str) -> Result<Self> {
        let refused = |why: &str| {
            Fault::usage(format!("this is not an address in object storage: {why}"))
                .found(format!("{url:?}"))
                .wanted("s3://bucket/key, as in s3://corpora/web/part-1.jsonl.zst")
        };
        let rest = url.strip_prefix(SCHEME).ok_or_else(|| refused("it begins otherwise"))?;
        let (bucket, key) = rest.split_once('/').ok_or_else(|| refused("it has no key"))?;
        if bucket.is_empty() {
            return Err(refused("it has no bucket"));
        }
        if !is_bucket(bucket) {
            return Err(refused("a bucket's name is made of letters, digits, `-`, `_` and dots"));
        }
        let key = key.strip_suffix('/').unwrap_or(key);
        if key.is_empty() {
            return Err(refused("it has no key"));
        }
        match key.split('/').find_map(flaw) {
            Some(why) => Err(refused(why)),
            None => Ok(Address { bucket: bucket.to_owned(), key: key.to_owned() }),
        }
    }

    /// The whole bucket.
    pub fn of_bucket(name: &str) -> Self {
        Address { bucket: name.to_owned(), key: String::new() }
    }

    /// The bucket's name.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The key; empty for the whole bucket.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The last part of the key.
    pub fn name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }

    /// The entry `name` of this folder; a name may have several parts.
    pub fn join(&self, name: &str) -> Self {
        let key = match (self.key.as_str(), name) {
            (key, "") => key.to_owned(),
            ("", name) => name.to_owned(),
            (key, name) => format!("{key}/{name}"),
        };
        Address { bucket: self.bucket.clone(), key }
    }

    /// The folder that holds it.
    pub fn folder(&self) -> Self {
        let key = self.key.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        Address { bucket: self.bucket.clone(), key }
    }

    /// Resolves a name that a file in this folder uses. Object storage has no links, so `..` is the parent folder.
    fn resolve(&self, name: &str) -> Result<Self> {
        let refused = |why: &str| {
            Fault::usage(format!("this name leads to no object: {why}"))
                .at(self.to_string())
                .found(format!("{name:?}"))
                .wanted("a name relative to this folder, or s3://bucket/key")
        };
        let mut at = self.clone();
        for part in name.strip_suffix('/').unwrap_or(name).split('/') {
            match part {
                "." => {}
                ".." if at.key.is_empty() => return Err(refused("it leaves the bucket")),
                ".." => at = at.folder(),
                part => match flaw(part) {
                    Some(why) => return Err(refused(why)),
                    None => at = at.join(part),
                },
            }
        }
        Ok(at)
    }
}

/// Whether a bucket name is valid. It may become part of a host name, so it must not contain URL delimiters.
fn is_bucket(name: &str) -> bool {
    let ends = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric());
    let letter = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    ends && name.len() <= 255 && name.chars().all(letter) && !name.contains("..")
}

/// Why a part of a key is not valid.
fn flaw(part: &str) -> Option<&'static str> {
    match part {
        "" => Some("a part between two slashes is empty"),
        "." | ".." => Some("`.` and `..` are not followed in a URL"),
        part if part.chars().any(char::is_control) => Some("it has a control character"),
        _ => None,
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.bucket, self.key)
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
    /// object is fetched once more: if other bytes arrive, the copy was at fault, but its bytes may have been used
    /// already.
    pub fn doubt(&self, copy: &LocalFile, fault: Fault) -> Fault {
        if fault.class() != Class::Data || !self.forget() {
            return fault;
        }
        let again = self.fetch().and_then(|again| Ok(again.digest()? != copy.digest()?));
        match again {
            Ok(false) => fault,
            Ok(true) => Fault::machine("this object came with other bytes than it has")
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
            Location::Object(object) => object.remote.size(&object.address),
        }
    }

    /// Size and SHA-256 of the file.
    pub fn content(&self) -> Result<(u64, Identity)> {
        let content = match self {
            Location::Local(path) => regular::open(path).and_then(regular::identity),
            Location::Object(object) => object.remote.content(&object.address),
        };
        content.map_err(|error| self.fault("read", &error))
    }

    /// Writes a file atomically. A local file is replaced; an object never is, and an existing one with other bytes is
    /// a mismatch.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        match self {
            Location::Local(path) => disk::write_whole(path, bytes).map(drop),
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
            Location::Object(_) => {
                let fault = Fault::io(what, Path::new(""), error).at(self.to_string());
                match error.kind() {
                    io::ErrorKind::NotFound => fault.hint("check the address and AWS_ENDPOINT_URL"),
                    io::ErrorKind::InvalidInput => fault.hint("mend this in the environment"),
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
