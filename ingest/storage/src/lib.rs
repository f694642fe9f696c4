//! Object storage: inputs and stores at `s3://bucket/key`, on anything that speaks S3.
//!
//! This is the only room that knows a network and an asynchronous runtime; the rest of the house reads and makes far
//! files through [`store::far`] (a run its checkpoints), or writes folders, which [`publish`] puts into a bucket.
//!
//! Invariant: an object is only ever created, never replaced: what is there already is compared, and other content is a
//! refusal that leaves both. Only checkpoints are removed. The manifest is put last, so a prefix that has one holds
//! everything it names.
//! Invariant: an answer that was lost is asked for again; whether a request that failed took effect is found by looking.
//!
//! The environment says where and who: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL` and
//! the rest of what `object_store` knows; `ZDATA_S3_TIMEOUT` (seconds for a request, 60), `ZDATA_CACHE` (a folder) and
//! `ZDATA_CACHE_BYTES` (16 GiB).

#![forbid(unsafe_code)]

mod cache;
mod client;
pub mod crash;
pub mod publish;
pub mod staging;

use std::path::Path;

use contract::{Fault, Result};
use globset::GlobBuilder;
use store::far::{self, Far, Near};

use self::cache::Cache;
use self::client::{Client, Put};

/// What is read at a time where a part of a file is wanted, and kept in the cache.
const BLOCK_BYTES: u64 = 1 << 20;

/// Reads far files through a cache on this machine.
struct Reader {
    client: Client,
    cache: Cache,
}

/// Lets this process read and make `s3://` paths.
pub fn install() {
    far::install(Box::new(Lazy(std::sync::OnceLock::new())));
}

/// A reader that is made when first asked: most runs never leave the machine.
struct Lazy(std::sync::OnceLock<std::result::Result<Reader, String>>);

impl Lazy {
    fn reader(&self) -> std::io::Result<&Reader> {
        let made = self.0.get_or_init(|| {
            let cache = Cache::open().map_err(|error| error.to_string())?;
            let client = Client::new().map_err(|error| error.to_string())?;
            Ok(Reader { client, cache })
        });
        made.as_ref().map_err(|error| std::io::Error::other(error.clone()))
    }
}

impl Far for Lazy {
    fn size(&self, path: &Path) -> std::io::Result<u64> {
        Ok(self.reader()?.client.about(&client::Place::of(path)?)?.bytes)
    }

    fn read_at(&self, path: &Path, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.reader()?.read_at(path, buffer, offset)
    }

    fn fetch(&self, path: &Path) -> std::io::Result<Near> {
        self.reader()?.fetch(path)
    }

    fn create(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        let (client, place) = (&self.reader()?.client, client::Place::of(path)?);
        match client.create(&place, bytes)? {
            Put::Created => Ok(()),
            // An answer that was lost, or somebody else: the bytes tell.
            Put::Taken => match client.holds(&place, bytes.len() as u64, bytes)? {
                true => Ok(()),
                false => Err(std::io::ErrorKind::AlreadyExists.into()),
            },
        }
    }

    fn list(&self, folder: &Path) -> std::io::Result<Vec<String>> {
        let place = client::Place::of(folder)?;
        let below = format!("{}/", place.key);
        let keys = self.reader()?.client.list(&place.bucket, &place.key)?;
        let mut files: Vec<String> =
            keys.iter().filter_map(|key| key.strip_prefix(&below).map(str::to_owned)).collect();
        files.sort();
        Ok(files)
    }

    fn remove(&self, path: &Path) -> std::io::Result<()> {
        self.reader()?.client.remove(&client::Place::of(path)?)
    }
}

impl Reader {
    /// From the cache's blocks, which are named by the object's version, so that none is ever stale.
    fn read_at(&self, path: &Path, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        let place = client::Place::of(path)?;
        let about = self.client.known(&place)?;
        let end = offset.saturating_add(buffer.len() as u64);
        if end > about.bytes {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        while at < end {
            let block = at / BLOCK_BYTES;
            let first = block * BLOCK_BYTES;
            let range = first..about.bytes.min(first + BLOCK_BYTES);
            let stop = end.min(range.end);
            let key = format!("{} {} block {block}", place.url(), about.version);
            let copy = self.cache.get(&key, "block", range.end - range.start, |file| {
                file.write_all(&self.client.range(&place, &about, range.clone())?)
            })?;
            let into = &mut buffer[(at - offset) as usize..(stop - offset) as usize];
            use std::os::unix::fs::FileExt as _;
            copy.file().read_exact_at(into, at - first)?;
            at = stop;
        }
        Ok(())
    }

    /// The whole object, block by block.
    fn fetch(&self, path: &Path) -> std::io::Result<Near> {
        let place = client::Place::of(path)?;
        let about = self.client.about(&place)?;
        let key = format!("{} {} whole", place.url(), about.version);
        let name = place.key.rsplit('/').next().unwrap_or("object").to_owned();
        let copy = self.cache.get(&key, &name, about.bytes, |file| {
            let mut at = 0;
            while at < about.bytes {
                let end = about.bytes.min(at + 8 * BLOCK_BYTES);
                file.write_all(&self.client.range(&place, &about, at..end)?)?;
                at = end;
            }
            Ok(())
        })?;
        Ok(copy.into())
    }
}

/// The objects that a pattern names (`s3://bucket/raw/*.jsonl.zst`), sorted; a pattern without wildcards names itself.
pub fn find(pattern: &str, place: &str) -> Result<Vec<String>> {
    let refused = |error: std::io::Error| {
        Fault::io("list", Path::new(pattern), &error).at(format!("{place}: {pattern}")).hint(
            "check the bucket's name, AWS_ENDPOINT_URL and the credentials in the environment",
        )
    };
    let target = client::Place::of(Path::new(pattern)).map_err(refused)?;
    let client = Client::new().map_err(refused)?;
    let wild = target.key.find(['*', '?', '[', '{']);
    let Some(wild) = wild else {
        client.about(&target).map_err(refused)?;
        return Ok(vec![target.url()]);
    };
    let matcher = GlobBuilder::new(&target.key).literal_separator(true).build();
    let matcher = matcher
        .map_err(|error| {
            Fault::usage(format!("{pattern:?} is not a pattern: {}", error.kind()))
                .at(place.to_owned())
        })?
        .compile_matcher();
    let folder = target.key[..wild].rfind('/').map_or("", |slash| &target.key[..slash]);
    let mut keys = client.list(&target.bucket, folder).map_err(refused)?;
    keys.retain(|key| matcher.is_match(key));
    keys.sort();
    Ok(keys.into_iter().map(|key| format!("{}{}/{key}", far::SCHEME, target.bucket)).collect())
}
