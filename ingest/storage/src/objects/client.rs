//! Requests to the servers, which the library repeats until they are answered or the limit is reached.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::future::Future;
use std::io::{Error, ErrorKind, Read, Result};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use contract::Digest;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path as Key;
use object_store::{
    GetOptions, MultipartUpload, ObjectMeta, ObjectStoreExt as _, PutMode, PutOptions, PutPayload,
};
use store::location::{Address, UrlScheme};
use store::regular;
use tokio::runtime::Runtime;

use super::clouds::{Bucket, Clouds};
use super::connector::{METADATA, Unanswered, innermost};
use super::hub::{self, Hub};
use super::once::OncePerProcess;
use super::tag;
use crate::environment::Environment;

/// How often an object is created that others create and remove meanwhile, and the wait in between.
const TRIES: u32 = 12;
const WAIT: Duration = Duration::from_millis(500);

/// Parts of an upload that are under way at the same time.
const PARTS: usize = 3;

/// How long the parts of a failed upload are removed.
const ABORT: Duration = Duration::from_secs(10);

/// How long a list is believed.
const LISTED: Duration = Duration::from_secs(600);

/// The message for an object that was replaced since it was looked up.
const CHANGED: &str = "the object changed while it was read";

/// The message for an object that does not exist.
const NO_OBJECT: &str = "the object does not exist";

/// Bytes compared at a time.
const COMPARED_BYTES: u64 = 16 << 20;

/// The library's name of an object. On a web server the key is part of a URL, which the library encodes again.
fn key_of(address: &Address) -> Result<Key> {
    let key = match address.scheme() {
        UrlScheme::Https | UrlScheme::Http => Key::from_url_path(address.key()),
        _ => Key::parse(address.key()),
    };
    key.map_err(|error| Error::new(ErrorKind::Unsupported, error.to_string()))
}

/// The size and version of an object.
#[derive(Clone, Debug)]
pub(super) struct ObjectInfo {
    pub(super) bytes: u64,
    /// Its tag, size and time. A tag alone may repeat with other bytes, where a server does not make it from the
    /// content.
    pub(super) version: String,
    /// Its tag in quotes, if the server promises other bytes another one.
    pub(super) tag: Option<String>,
}

impl ObjectInfo {
    /// What a server says of an object. Lists and answers give it with and without quotes, and parts of a second.
    fn of(meta: &ObjectMeta) -> Self {
        let bytes = meta.size;
        let shown = meta.e_tag.as_deref().map(|tag| tag.trim_matches('"'));
        let (second, tag) = (meta.last_modified.timestamp(), shown.filter(|tag| !is_weak(tag)));
        ObjectInfo {
            bytes,
            version: format!("{} {bytes} {second}", shown.unwrap_or("no tag")),
            tag: tag.map(|tag| format!("\"{tag}\"")),
        }
    }

    /// What the Hub says of a file of a commit.
    fn of_commit(bytes: u64, commit: &str) -> Self {
        let tag = Some(format!("\"{commit}\""));
        ObjectInfo { bytes, version: format!("{commit} {bytes} 0"), tag }
    }
}

/// Whether a tag only promises the same meaning.
fn is_weak(tag: &str) -> bool {
    tag.starts_with("W/")
}

/// The outcome of a conditional put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PutOutcome {
    /// The object was created.
    Created,
    /// The object existed and was left as it is.
    Taken,
}

/// Which side failed while local bytes were uploaded or compared with an object.
#[derive(Debug)]
pub(super) enum TransferError {
    /// The local side, where a retry of the request does not help.
    Here(Error),
    /// The object's side.
    There(Error),
}

impl From<Error> for TransferError {
    fn from(error: Error) -> Self {
        TransferError::There(error)
    }
}

/// One client for all buckets that the environment gives access to.
pub(super) struct Client {
    clouds: Clouds,
    buckets: Mutex<BTreeMap<Address, Bucket>>,
    /// The commits of the Hub's revisions, as this process first learned them.
    commits: Mutex<BTreeMap<Address, Address>>,
    known: Mutex<BTreeMap<Address, ObjectInfo>>,
    /// What lists said of objects, and when, for the first look at each.
    listed: Mutex<BTreeMap<Address, (Instant, ObjectInfo)>>,
}

/// The runtime that requests run on. The caller's threads wait for the answers.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OncePerProcess<std::result::Result<Runtime, String>> = OncePerProcess::new();
    let made = RUNTIME.get(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let builder = builder.worker_threads(2).thread_name("objects").enable_all();
        builder.build().map_err(|error| error.to_string())
    });
    made.as_ref().map_err(|error| Error::other(error.clone()))
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns a library error into a file error. Not every request of the library has kinds for its errors, so their text
/// is read too.
fn plain(scheme: UrlScheme, error: &object_store::Error) -> Error {
    let (text, cause) = (error.to_string(), innermost(error));
    let has = |part: &str| text.contains(part) || cause.contains(part);
    let refused = |status: &str| has(&format!("status code: {status} "));
    if has("<Code>NoSuchBucket</Code>") || has("ContainerNotFound") {
        let what = format!("the {} does not exist", scheme.bucket_word());
        return Error::new(ErrorKind::NotFound, what);
    }
    if METADATA.iter().any(|host| has(host)) || cause == Unanswered.to_string() {
        let wanted = match scheme {
            UrlScheme::Gs => "GOOGLE_APPLICATION_CREDENTIALS is not set",
            UrlScheme::Az => "neither AZURE_STORAGE_ACCOUNT_KEY nor AZURE_STORAGE_SAS_TOKEN is set",
            _ => "AWS_ACCESS_KEY_ID is not set",
        };
        let what = format!("{wanted}, and {Unanswered}");
        return Error::new(ErrorKind::InvalidInput, what);
    }
    if scheme == UrlScheme::Hf
        && let Some((kind, what)) = hub::meaning(&cause)
    {
        return Error::new(kind, what);
    }
    let kind = match error {
        object_store::Error::NotSupported { .. } if !scheme.writes() => {
            let what = "the server does not send parts of files: fetch the file, and name the copy";
            return Error::new(ErrorKind::Unsupported, what);
        }
        object_store::Error::AlreadyExists { .. } => ErrorKind::AlreadyExists,
        object_store::Error::Precondition { .. } => ErrorKind::StaleNetworkFileHandle,
        object_store::Error::PermissionDenied { .. }
        | object_store::Error::Unauthenticated { .. } => ErrorKind::PermissionDenied,
        object_store::Error::InvalidPath { .. } => ErrorKind::InvalidInput,
        object_store::Error::NotFound { .. } => ErrorKind::NotFound,
        _ if refused("404") => ErrorKind::NotFound,
        _ if refused("401") || refused("403") => ErrorKind::PermissionDenied,
        _ => ErrorKind::TimedOut,
    };
    let what = match kind {
        ErrorKind::NotFound => NO_OBJECT.to_owned(),
        ErrorKind::TimedOut => match requests(&text) {
            Some(number) => format!("{number} requests failed, the last one by: {cause}"),
            None => cause,
        },
        _ => cause,
    };
    Error::new(kind, what)
}

/// How many requests failed, by the library's text.
fn requests(text: &str) -> Option<usize> {
    let (_, rest) = text.split_once(", after ")?;
    Some(rest.split_once(" retries")?.0.parse::<usize>().ok()? + 1)
}

impl Client {
    pub(super) fn new() -> Result<Self> {
        Client::with(Environment::here())
    }

    pub(super) fn with(environment: Environment) -> Result<Self> {
        runtime()?;
        // Required for TLS, since the libraries bring no provider. An error means that one is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(Client {
            clouds: Clouds::new(environment)?,
            buckets: Mutex::default(),
            commits: Mutex::default(),
            known: Mutex::default(),
            listed: Mutex::default(),
        })
    }

    /// The client of the bucket of an address.
    fn bucket(&self, address: &Address) -> Result<Bucket> {
        let root = self.pinned(address)?.root();
        let mut buckets = locked(&self.buckets);
        if let Some(bucket) = buckets.get(&root) {
            return Ok(Arc::clone(bucket));
        }
        let bucket = self.clouds.bucket(&root)?;
        Ok(Arc::clone(buckets.entry(root).or_insert(bucket)))
    }

    /// Asks the server of an address.
    fn ask<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        place: &Address,
        request: impl FnOnce(Bucket, Key) -> F,
    ) -> Result<T> {
        let (bucket, key) = (self.bucket(place)?, key_of(place)?);
        let answer = runtime()?.block_on(request(bucket, key));
        answer.map_err(|error| plain(place.scheme(), &error))
    }

    /// The same address at the commit of its revision, on the Hub.
    pub(super) fn pinned(&self, address: &Address) -> Result<Address> {
        if address.scheme() != UrlScheme::Hf {
            return Ok(address.clone());
        }
        let root = address.root();
        let hub = self.clouds.hub()?;
        let Some(url) = hub.revision(&root) else { return Ok(address.clone()) };
        let known = locked(&self.commits).get(&root).cloned();
        let pinned = match known {
            Some(pinned) => pinned,
            None => {
                let (answer, _) = self.page(&root, &url, hub)?;
                let pinned = Hub::pinned(&root, &answer)?;
                locked(&self.commits).entry(root).or_insert(pinned).clone()
            }
        };
        Ok(address.with_bucket(pinned.bucket().to_owned()))
    }

    /// An answer of the Hub's API, and the URL of the next page.
    fn page(&self, place: &Address, url: &str, hub: Arc<Hub>) -> Result<(Vec<u8>, Option<String>)> {
        let web = self.clouds.web(url, place, Some(hub))?;
        let answer = runtime()?.block_on(async {
            let found = web.get(&Key::default()).await?;
            let next = found.meta.e_tag.clone();
            Ok((found.bytes().await?.to_vec(), next))
        });
        answer.map_err(|error| plain(place.scheme(), &error))
    }

    /// Size and version of an object, now; as a list gave them, at the first look after it.
    pub(super) fn about(&self, place: &Address) -> Result<ObjectInfo> {
        let listed = locked(&self.listed).remove(place);
        let about = match listed {
            Some((at, about)) if at.elapsed() < LISTED => about,
            _ => {
                let meta = self.ask(place, |bucket, key| async move { bucket.head(&key).await })?;
                // Only web servers may leave out both. What replaces an empty file has another size.
                let unknown = meta.e_tag.is_none() && meta.last_modified.timestamp() == 0;
                if unknown && meta.size > 0 {
                    let what = "the server gives neither a tag nor a time, by which a change would show: fetch the \
                                file and name the copy";
                    return Err(Error::new(ErrorKind::Unsupported, what));
                }
                ObjectInfo::of(&meta)
            }
        };
        locked(&self.known).insert(place.clone(), about.clone());
        Ok(about)
    }

    /// The size and version, as this process first learned them.
    pub(super) fn known(&self, place: &Address) -> Result<ObjectInfo> {
        self.seen(place).map_or_else(|| self.about(place), Ok)
    }

    /// The size and version, if this process has learned them.
    pub(super) fn seen(&self, place: &Address) -> Option<ObjectInfo> {
        locked(&self.known).get(place).cloned()
    }

    /// A range of an object, of exactly this version.
    pub(super) fn range(
        &self,
        place: &Address,
        about: &ObjectInfo,
        range: Range<u64>,
    ) -> Result<Vec<u8>> {
        let wanted = (range.end - range.start) as usize;
        let found = self.ask(place, |bucket, key| {
            let options = GetOptions {
                range: Some(range.clone().into()),
                if_match: about.tag.clone(),
                ..Default::default()
            };
            async move {
                let found = bucket.get_opts(&key, options).await?;
                let version = ObjectInfo::of(&found.meta).version;
                Ok((version, found.bytes().await?))
            }
        });
        let changed = || Error::new(ErrorKind::StaleNetworkFileHandle, CHANGED);
        match found {
            Err(error) if error.kind() == ErrorKind::StaleNetworkFileHandle => Err(changed()),
            Err(error) => Err(error),
            Ok((version, bytes)) if version == about.version && bytes.len() == wanted => {
                Ok(bytes.to_vec())
            }
            Ok(_) => Err(changed()),
        }
    }

    /// The keys below a folder, and the sizes of their objects.
    pub(super) fn list(&self, folder: &Address) -> Result<Vec<(String, u64)>> {
        let found = match folder.scheme() {
            UrlScheme::Hf => self.tree(folder)?,
            scheme if !scheme.lists() => {
                let what = format!("a place at {} has no list", scheme.prefix());
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            _ => {
                let objects = self.ask(folder, |bucket, key| async move {
                    let prefix = (!key.as_ref().is_empty()).then_some(&key);
                    bucket.list(prefix).try_collect::<Vec<ObjectMeta>>().await
                })?;
                let about = |meta: ObjectMeta| (meta.location.to_string(), ObjectInfo::of(&meta));
                objects.into_iter().map(about).collect()
            }
        };
        let (mut listed, now) = (locked(&self.listed), Instant::now());
        let sizes = found.into_iter().map(|(key, about)| {
            let bytes = about.bytes;
            listed.insert(folder.root().join(&key), (now, about));
            (key, bytes)
        });
        Ok(sizes.collect())
    }

    /// The files below a folder of a data set, page by page.
    fn tree(&self, folder: &Address) -> Result<Vec<(String, ObjectInfo)>> {
        let (pinned, hub) = (self.pinned(folder)?, self.clouds.hub()?);
        let (mut url, mut found) = (Some(hub.tree(&pinned)?), Vec::new());
        let mut asked = BTreeSet::new();
        while let Some(page) = url {
            if !asked.insert(page.clone()) {
                let what = "the Hub's list of files leads back to a page that it has left";
                return Err(Error::new(ErrorKind::InvalidData, what));
            }
            let answer = match self.page(folder, &page, Arc::clone(&hub)) {
                // A folder that does not exist has no files, as in a bucket.
                Err(error) if is_no_entry(&error) => return Ok(Vec::new()),
                answer => answer?,
            };
            let about = |(path, bytes)| (path, ObjectInfo::of_commit(bytes, hub::commit(&pinned)));
            found.extend(Hub::page(&answer.0)?.into_iter().map(about));
            url = answer.1;
        }
        Ok(found)
    }

    /// Creates an object unless it exists. A request whose answer is lost may have taken effect: the retry then finds
    /// an object, and the caller compares it.
    pub(super) fn create(&self, place: &Address, bytes: &[u8]) -> Result<PutOutcome> {
        let payload = PutPayload::from(bytes.to_vec());
        for _ in 0..TRIES {
            let put = self.ask(place, |bucket, key| {
                let options = PutOptions { mode: PutMode::Create, ..Default::default() };
                let payload = payload.clone();
                async move { bucket.put_opts(&key, payload, options).await }
            });
            // Another client may be creating it at this moment, and may fail.
            match put_or_taken(put)? {
                PutOutcome::Taken if !self.is_there(place)? => std::thread::sleep(WAIT),
                put => return Ok(put),
            }
        }
        Err(Error::other("somebody else creates this object again and again"))
    }

    /// Whether there is an object.
    pub(super) fn is_there(&self, place: &Address) -> Result<bool> {
        match self.about(place) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether an object has the `size` bytes that `open` gives. A tag that is their MD5 proves it; otherwise the
    /// object is fetched.
    pub(super) fn holds<R: Read>(
        &self,
        place: &Address,
        size: u64,
        open: impl Fn() -> Result<R>,
    ) -> std::result::Result<bool, TransferError> {
        let about = self.about(place)?;
        if about.bytes != size {
            return Ok(false);
        }
        let tag = about.tag.as_deref().unwrap_or_default();
        if tag::is_of(tag, size, &open).map_err(TransferError::Here)? {
            return Ok(true);
        }
        let (mut at, mut buffer, mut bytes) = (0, Vec::new(), open().map_err(TransferError::Here)?);
        while at < size {
            let end = size.min(at + COMPARED_BYTES);
            buffer.resize((end - at) as usize, 0);
            bytes.read_exact(&mut buffer).map_err(TransferError::Here)?;
            if self.range(place, &about, at..end)? != buffer {
                return Ok(false);
            }
            at = end;
        }
        Ok(true)
    }

    /// Size and xxh3-128 of an object, which is fetched.
    pub(super) fn digest(&self, place: &Address) -> Result<(u64, Digest)> {
        let about = self.about(place)?;
        regular::digest(ObjectReader { client: self, place, about, at: 0 }, &|_| ())
    }

    /// Removes an object, if it exists.
    pub(super) fn remove(&self, place: &Address) -> Result<()> {
        locked(&self.listed).remove(place);
        match self.ask(place, |bucket, key| async move { bucket.delete(&key).await }) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Copies the object at `from` to `to` within the server, unless `to` exists.
    pub(super) fn copy(&self, from: &Address, to: &Address) -> Result<PutOutcome> {
        let key = key_of(from)?;
        let copied =
            self.ask(to, |bucket, to| async move { bucket.copy_if_not_exists(&key, &to).await });
        let put = put_or_taken(copied)?;
        // Azure may still be copying after its answer: its object is not there before the copy is done.
        if to.scheme() == UrlScheme::Az {
            self.about(to)?;
        }
        Ok(put)
    }

    /// Puts a large file in parts of `part` bytes, replacing what was there: it appears whole after the last part.
    /// Calls `passed` with the bytes of each part. If it fails, the upload is aborted, since stored parts cost as much
    /// as objects.
    pub(super) fn upload(
        &self,
        place: &Address,
        path: &Path,
        part: u64,
        passed: &dyn Fn(u64),
    ) -> std::result::Result<(), TransferError> {
        let file = File::open(path).map_err(TransferError::Here)?;
        let size = file.metadata().map_err(TransferError::Here)?.len();
        let there =
            |error: object_store::Error| TransferError::There(plain(place.scheme(), &error));
        let (bucket, key) = (self.bucket(place)?, key_of(place)?);
        let runtime = runtime()?;
        let mut upload = runtime.block_on(bucket.put_multipart(&key)).map_err(there)?;
        let sent = runtime.block_on(send(&mut *upload, &file, size, part, passed, there));
        let put = sent.and_then(|()| match runtime.block_on(upload.complete()) {
            Ok(_) => Ok(()),
            // The answer to an earlier request may be lost: then the upload has ended, and its object exists.
            Err(error) => match self.about(place) {
                Ok(about) if about.bytes == size => Ok(()),
                _ => Err(there(error)),
            },
        });
        if put.is_err() {
            // A server that did not answer hardly answers this, and the first error is more useful.
            let _ = runtime.block_on(async { tokio::time::timeout(ABORT, upload.abort()).await });
        }
        put
    }
}

/// Reads an object from its begin.
struct ObjectReader<'a> {
    client: &'a Client,
    place: &'a Address,
    about: ObjectInfo,
    at: u64,
}

impl Read for ObjectReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let end = self.about.bytes.min(self.at.saturating_add(buffer.len() as u64));
        if self.at < end {
            let piece = self.client.range(self.place, &self.about, self.at..end)?;
            buffer[..piece.len()].copy_from_slice(&piece);
        }
        let got = end - self.at;
        self.at = end;
        Ok(got as usize)
    }
}

/// Sends the parts of a file, some at the same time.
async fn send(
    upload: &mut dyn MultipartUpload,
    file: &File,
    size: u64,
    part: u64,
    passed: &dyn Fn(u64),
    there: impl Fn(object_store::Error) -> TransferError,
) -> std::result::Result<(), TransferError> {
    let parts = stream::iter(0..size.div_ceil(part).max(1)).map(|number| {
        let from = number * part;
        let mut bytes = vec![0; part.min(size - from) as usize];
        let count = bytes.len() as u64;
        let read = file.read_exact_at(&mut bytes, from).map_err(TransferError::Here);
        let sending = read.map(|()| upload.put_part(bytes.into()));
        let there = &there;
        async move { sending?.await.map(|()| passed(count)).map_err(there) }
    });
    parts.buffered(PARTS).try_collect().await
}

/// Whether the Hub has the commit, but not the folder.
fn is_no_entry(error: &Error) -> bool {
    error.kind() == ErrorKind::NotFound && error.to_string() == NO_OBJECT
}

/// The outcome of creating an object that must not exist.
fn put_or_taken<T>(made: Result<T>) -> Result<PutOutcome> {
    match made {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(PutOutcome::Taken),
        made => made.map(|_| PutOutcome::Created),
    }
}
