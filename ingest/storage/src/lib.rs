//! Locations: local paths, and objects at `s3://bucket/key` on any S3-compatible server.
//!
//! A path or URL that a user names becomes a [`Location`] here, by [`locate`] or, in a file that names another one, by
//! [`resolve`]. This is the only crate with a network client and an async runtime: the other crates read and create
//! objects through what a location carries, or write folders, which [`publish`] uploads to a bucket.
//!
//! Invariant: objects are only created, never replaced. An existing object is compared, and other content is an error
//! that leaves both as they are. (An object of more than 5 GiB is created after a look, without a condition: of two
//! simultaneous publishers the last one wins.) Only checkpoints are removed. The manifest is put last, so a prefix that
//! has one holds everything it names.
//! Invariant: a request whose answer was lost is repeated; a look tells whether a failed request took effect.
//!
//! Access is configured by the environment: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`,
//! `AWS_ENDPOINT_URL` and the other variables of `object_store`; `ZDATA_S3_TIMEOUT` (seconds for a request, 60),
//! `ZDATA_CACHE` (a folder) and `ZDATA_CACHE_BYTES` (16 GiB).

#![forbid(unsafe_code)]

pub mod apart;
mod cache;
mod client;
pub mod copies;
#[cfg(any(test, feature = "crash"))]
pub mod crash;
mod environment;
mod listing;
mod process;
pub mod publish;
pub mod staging;
mod tag;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use contract::fault::again;
use contract::{Fault, Identity, Result};
pub use store::Location;
use store::location::{Address, LocalFile, Object, Remote, SCHEME};
use store::regular;

use self::cache::Cache;
use self::client::{Client, ObjectInfo, PutOutcome, TransferError};
use self::process::OncePerProcess;

/// Bytes read at a time where a range of a file is wanted, and cached.
const BLOCK_BYTES: u64 = 1 << 20;

/// The cache key of a whole object.
const WHOLE: &str = "whole";

/// The limit of cached identities: those of half a million objects.
const IDENTITIES: u64 = 64 << 20;

/// The location that a user typed: `s3://bucket/key`, or a path.
pub fn locate(text: &str) -> Result<Location> {
    if text.contains('\0') {
        let fault = Fault::usage("a place cannot have a zero byte in its name");
        return Err(fault.found(format!("{text:?}")));
    }
    if text.starts_with(SCHEME) {
        return Ok(Location::Object(Object::new(Address::parse(text)?, s3())));
    }
    let wanted = "a path, or s3://bucket/key";
    if text.is_empty() {
        return Err(Fault::usage("no place is named").found("an empty name").wanted(wanted));
    }
    match text.split_once("://") {
        Some((scheme, _)) if is_scheme(scheme) => {
            Err(Fault::usage(format!("places of the kind {scheme}:// are not known"))
                .found(text)
                .wanted(wanted)
                .hint(format!("for a path of this machine write \"./{text}\"")))
        }
        _ => Ok(Location::Local(PathBuf::from(text))),
    }
}

/// The folder in which this machine caches data of this kind that can be made again; `None` where no folder is known.
pub fn kept(kind: &str) -> Option<PathBuf> {
    Some(cache::folder().ok()?.join(kind))
}

/// The location of an argument, which need not be UTF-8.
pub fn locate_argument(text: &OsStr) -> Result<Location> {
    match text.to_str() {
        Some(text) => locate(text),
        None => Ok(Location::Local(PathBuf::from(text))),
    }
}

/// A location as bytes, for [`locate_written`]; its name need not be UTF-8.
pub fn written(place: &Location) -> Vec<u8> {
    match place {
        Location::Local(path) => path.as_os_str().as_bytes().to_vec(),
        object => object.to_string().into_bytes(),
    }
}

/// The place that was [`written`].
pub fn locate_written(bytes: &[u8]) -> Result<Location> {
    locate_argument(OsStr::from_bytes(bytes))
}

/// The path of an argument that must be local; `otherwise` is the hint where it is not.
pub fn local_argument(text: &OsStr, otherwise: &str) -> Result<PathBuf> {
    match locate_argument(text)? {
        Location::Local(path) => Ok(path),
        Location::Object(_) => Err(Fault::usage("this place has to be on this machine")
            .found("a place in object storage")
            .wanted("a path")
            .hint(otherwise)),
    }
}

fn is_scheme(text: &str) -> bool {
    let tail = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(tail)
}

/// The location that a file in `folder` calls `name`: relative to `folder`, unless `name` is a URL or an absolute path.
pub fn resolve(folder: &Location, name: &str) -> Result<Location> {
    match locate(name)? {
        Location::Local(_) => folder.resolve(name),
        object => Ok(object),
    }
}

/// All of a bucket, as a folder.
pub fn bucket(name: &str) -> Location {
    Location::Object(Object::new(Address::of_bucket(name), s3()))
}

/// The S3 of the environment: one for a process, so that connections and copies are shared.
fn s3() -> Arc<dyn Remote> {
    static S3: OncePerProcess<Arc<S3>> = OncePerProcess::new();
    Arc::clone(S3.get(Arc::default)) as Arc<dyn Remote>
}

/// Object storage, connected at the first request: most runs are local.
#[derive(Default)]
struct S3(OnceLock<io::Result<Reader>>);

/// Reads objects through a cache on this machine.
struct Reader {
    client: Client,
    cache: Cache,
    /// The digests of whole objects, which outlive their copies: a resumed build needs them again.
    identities: Cache,
}

impl S3 {
    fn reader(&self) -> io::Result<&Reader> {
        let made = || {
            let (client, cache) = (Client::new()?, Cache::open("copies", None)?);
            Ok(Reader { client, cache, identities: Cache::open("identities", Some(IDENTITIES))? })
        };
        self.0.get_or_init(made).as_ref().map_err(again)
    }
}

impl Remote for S3 {
    fn size(&self, object: &Address) -> io::Result<u64> {
        Ok(self.reader()?.client.about(object)?.bytes)
    }

    fn read_at(&self, object: &Address, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.reader()?.read_at(object, buffer, offset)
    }

    fn fetch(&self, object: &Address) -> io::Result<LocalFile> {
        let reader = self.reader()?;
        reader.fetch(object, &reader.client.about(object)?)
    }

    fn content(&self, object: &Address) -> io::Result<(u64, Identity)> {
        self.reader()?.content(object)
    }

    fn forget(&self, object: &Address) -> bool {
        // Without a reader there is no copy.
        let Ok(reader) = self.reader() else { return false };
        let seen = reader.client.seen(object);
        seen.inspect(|about| reader.forget(object, about)).is_some()
    }

    fn create(&self, object: &Address, bytes: &[u8]) -> io::Result<()> {
        let client = &self.reader()?.client;
        match client.create(object, bytes)? {
            PutOutcome::Created => Ok(()),
            // The answer was lost, or another client created it: the bytes tell.
            PutOutcome::Taken => match client.holds(object, bytes.len() as u64, || Ok(bytes)) {
                Ok(true) => Ok(()),
                Ok(false) => Err(io::ErrorKind::AlreadyExists.into()),
                Err(TransferError::Here(error) | TransferError::There(error)) => Err(error),
            },
        }
    }

    fn sizes(&self, folder: &Address) -> io::Result<BTreeMap<String, u64>> {
        let keys = self.reader()?.client.list(folder)?;
        let below =
            if folder.key().is_empty() { String::new() } else { format!("{}/", folder.key()) };
        let named = keys.into_iter();
        Ok(named
            .filter_map(|(key, size)| Some((key.strip_prefix(&below)?.to_owned(), size)))
            .collect())
    }

    fn remove(&self, object: &Address) -> io::Result<()> {
        self.reader()?.client.remove(object)
    }
}

impl Reader {
    /// Reads cached blocks, which are named by the object's version, so none is ever stale.
    fn read_at(&self, place: &Address, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let about = self.client.known(place)?;
        let end = offset.saturating_add(buffer.len() as u64);
        if end > about.bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        while at < end {
            let block = at / BLOCK_BYTES;
            let first = block * BLOCK_BYTES;
            let range = first..about.bytes.min(first + BLOCK_BYTES);
            let stop = end.min(range.end);
            let key = key(place, &about, &format!("block {block}"));
            let copy = self.cache.get(&key, "block", range.end - range.start, |file| {
                file.write_all(&self.client.range(place, &about, range.clone())?)
            })?;
            let into = &mut buffer[(at - offset) as usize..(stop - offset) as usize];
            use std::os::unix::fs::FileExt as _;
            copy.file().read_exact_at(into, at - first)?;
            at = stop;
        }
        Ok(())
    }

    /// Fetches the whole object, block by block. If the bytes do not match its tag they are fetched once more: the same
    /// bytes twice are those of the object, whose tag is then not an MD5.
    fn fetch(&self, place: &Address, about: &ObjectInfo) -> io::Result<LocalFile> {
        let tag = about.tag.as_deref().and_then(tag::md5_of);
        let before = RefCell::new(None);
        let copy = || {
            self.cache.get(&key(place, about, WHOLE), place.name(), about.bytes, |file| {
                let (mut at, mut sum) = (0, tag::Md5Sum::default());
                while at < about.bytes {
                    let end = about.bytes.min(at + 8 * BLOCK_BYTES);
                    let piece = self.client.range(place, about, at..end)?;
                    if tag.is_some() {
                        sum.add(&piece);
                    }
                    file.write_all(&piece)?;
                    at = end;
                }
                let found = tag.is_some().then(|| sum.digits());
                if found.as_deref() == tag || before.replace(found.clone()) == found {
                    return Ok(());
                }
                let what = "the object does not come as the MD5 says that is its tag";
                Err(io::Error::new(io::ErrorKind::InvalidData, what))
            })
        };
        match copy() {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(copy()?.into()),
            copy => Ok(copy?.into()),
        }
    }

    /// Size and SHA-256 of an object.
    fn content(&self, place: &Address) -> io::Result<(u64, Identity)> {
        let about = self.client.about(place)?;
        let copy = self.identities.get(&key(place, &about, WHOLE), "sha256", 64, |file| {
            let (_, found) = regular::identity(regular::open(self.fetch(place, &about)?.path())?)?;
            file.write_all(found.to_string().as_bytes())
        })?;
        let found = Identity::try_from(io::read_to_string(copy.file())?);
        let found = found.map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))?;
        Ok((about.bytes, found))
    }

    /// Removes the cached data of an object.
    fn forget(&self, place: &Address, about: &ObjectInfo) {
        for block in 0..about.bytes.div_ceil(BLOCK_BYTES) {
            self.cache.drop(&key(place, about, &format!("block {block}")), "block");
        }
        self.cache.drop(&key(place, about, WHOLE), place.name());
        self.identities.drop(&key(place, about, WHOLE), "sha256");
    }
}

/// The cache key of a part of an object.
fn key(place: &Address, about: &ObjectInfo, part: &str) -> String {
    format!("{place} {} {part}", about.version)
}

#[cfg(test)]
mod places;
#[cfg(test)]
mod tests;
