//! The only code with a network client and an async runtime: objects are read through a cache on this machine, and
//! folders are uploaded. Feature `clouds`.

mod cache;
mod client;
mod clouds;
mod connector;
mod hub;
mod listing;
mod once;
mod parts;
mod settings;
#[cfg(any(test, feature = "crash"))]
pub mod standin;
mod tag;
#[cfg(test)]
mod tests;
mod upload;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use contract::fault::again;
use contract::{Digest, Identity, Result};
use store::location::{Address, Doubts, IdentityKind, LocalFile, Remote, UrlScheme};

use self::cache::Cache;
use self::client::{Client, ObjectInfo, PutOutcome, TransferError};
use self::once::OncePerProcess;
pub use self::parts::Upload;
pub(super) use self::upload::upload;

/// Bytes read at a time where a range of a file is wanted, and cached.
const BLOCK_BYTES: u64 = 1 << 20;

/// Locks for objects that are fetched: enough for other objects to be fetched meanwhile.
const FETCHING: usize = 64;

/// The cache key of a whole object.
const WHOLE: &str = "whole";

/// The limit of cached identities: those of half a million objects.
const IDENTITIES: u64 = 64 << 20;

/// The servers of the environment: one set of clients for a process, so that connections and copies are shared.
pub(super) fn servers(_: &str) -> Result<Arc<dyn Remote>> {
    static SERVERS: OncePerProcess<Arc<Servers>> = OncePerProcess::new();
    Ok(Arc::clone(SERVERS.get(Arc::default)) as Arc<dyn Remote>)
}

/// Object storage, connected at the first request: most runs are local.
#[derive(Default)]
struct Servers {
    reader: OnceLock<io::Result<Reader>>,
    doubts: Doubts,
}

/// Reads objects through a cache on this machine.
struct Reader {
    client: Client,
    cache: Cache,
    /// The digests of whole objects, which outlive their copies: a resumed build needs them again.
    identities: Cache,
    /// Held while an object is fetched: threads that read parts of one share its copy.
    fetching: [Mutex<()>; FETCHING],
}

impl Servers {
    fn reader(&self) -> io::Result<&Reader> {
        let made = || {
            let (client, cache) = (Client::new()?, Cache::open("copies", None)?);
            let identities = Cache::open("identities", Some(IDENTITIES))?;
            Ok(Reader { client, cache, identities, fetching: [const { Mutex::new(()) }; FETCHING] })
        };
        self.reader.get_or_init(made).as_ref().map_err(again)
    }
}

impl Remote for Servers {
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

    fn identity(
        &self,
        object: &Address,
        kind: IdentityKind,
        find: &dyn Fn(&Path) -> io::Result<(u64, Identity)>,
    ) -> io::Result<(u64, Identity)> {
        self.reader()?.identity(object, kind, find)
    }

    fn version(&self, object: &Address) -> io::Result<String> {
        Ok(self.reader()?.client.known(object)?.version)
    }

    fn forget(&self, object: &Address) -> bool {
        // Without a reader there is no copy.
        let Ok(reader) = self.reader() else { return false };
        let seen = reader.client.seen(object);
        seen.inspect(|about| reader.forget(object, about)).is_some()
    }

    fn doubts(&self) -> &Doubts {
        &self.doubts
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

    fn pinned(&self, object: &Address) -> io::Result<Address> {
        match object.scheme() {
            UrlScheme::Hf => self.reader()?.client.pinned(object),
            _ => Ok(object.clone()),
        }
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
        let name = Digest::of_bytes(place.to_string().as_bytes());
        let fetching = &self.fetching[name.0 as usize % FETCHING];
        let _one_at_a_time = fetching.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Size and identity of an object; the identity outlives its copy.
    fn identity(
        &self,
        place: &Address,
        kind: IdentityKind,
        find: &dyn Fn(&Path) -> io::Result<(u64, Identity)>,
    ) -> io::Result<(u64, Identity)> {
        let about = self.client.about(place)?;
        let copy = self.identities.get(&key(place, &about, kind.name()), "sha256", 64, |file| {
            let (_, found) = find(self.fetch(place, &about)?.path())?;
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
        for kind in IdentityKind::ALL {
            self.identities.drop(&key(place, about, kind.name()), "sha256");
        }
    }
}

/// The cache key of a part of an object.
fn key(place: &Address, about: &ObjectInfo, part: &str) -> String {
    format!("{place} {} {part}", about.version)
}
