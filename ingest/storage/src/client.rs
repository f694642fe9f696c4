//! Requests, with our own retries until they are answered or the limit is reached; the library's retries are off.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::future::Future;
use std::io::{Error, ErrorKind, Read, Result};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use contract::note;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::aws::{AmazonS3, AmazonS3Builder, S3CopyIfNotExists};
use object_store::list::{PaginatedListOptions, PaginatedListStore as _};
use object_store::multipart::{MultipartStore as _, PartId};
use object_store::path::Path as Key;
use object_store::{
    ClientOptions, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, RetryConfig,
};
use store::location::Address;
use tokio::runtime::Runtime;

use crate::environment::{self, BucketAccess};
use crate::listing::Connector;
use crate::process::OncePerProcess;
use crate::tag;

/// How often a request is made in total.
const TRIES: u32 = 12;

/// Requests without an answer may take this many timeouts in total: a silent server rarely recovers.
const SILENT_TIMEOUTS: u32 = 3;

/// The longest wait between two requests.
const WAIT_MOST: Duration = Duration::from_secs(5);

/// Parts of an upload that are under way at the same time.
const PARTS: usize = 3;

/// Where a cloud machine asks for its credentials: the library's last resort, which never answers elsewhere.
const METADATA: &str = "//169.254.169.254/";

/// The message for an object that was replaced since it was looked up.
const CHANGED: &str = "the object changed while it was read";

/// Bytes compared at a time.
const COMPARED_BYTES: u64 = 16 << 20;

/// The library's name of an object.
fn key_of(address: &Address) -> Result<Key> {
    Key::parse(address.key())
        .map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))
}

/// The size and version of an object.
#[derive(Clone, Debug)]
pub(super) struct ObjectInfo {
    pub(super) bytes: u64,
    /// Its tag, size and time. A tag alone may repeat with other bytes, where a server does not make it from the
    /// content.
    pub(super) version: String,
    pub(super) tag: Option<String>,
}

impl ObjectInfo {
    fn of(meta: ObjectMeta) -> Self {
        let (tag, bytes) = (meta.e_tag, meta.size);
        let shown = tag.as_deref().unwrap_or("no tag");
        let version = format!("{shown} {bytes} {}", meta.last_modified.to_rfc3339());
        ObjectInfo { bytes, version, tag }
    }
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

/// Starts the configuration of a client for a bucket.
pub(super) type BuilderSource = Arc<dyn Fn() -> AmazonS3Builder + Send + Sync>;

/// One client for all buckets that the environment gives access to.
pub(super) struct Client {
    access: BucketAccess,
    /// The settings of a client before its bucket is known.
    settings: BuilderSource,
    buckets: Mutex<BTreeMap<String, Arc<AmazonS3>>>,
    known: Mutex<BTreeMap<Address, ObjectInfo>>,
}

/// The runtime that requests run on. The caller's threads wait for the answers.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OncePerProcess<std::result::Result<Runtime, String>> = OncePerProcess::new();
    let made = RUNTIME.get(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).thread_name("s3").enable_all().build().map_err(|e| e.to_string())
    });
    made.as_ref().map_err(|error| Error::other(error.clone()))
}

/// Turns a library error into a file error.
fn plain(error: object_store::Error) -> Error {
    let text = error.to_string();
    // The library has no kind for these, and retries create neither a bucket nor credentials.
    if text.contains("<Code>NoSuchBucket</Code>") {
        return Error::new(ErrorKind::NotFound, "the bucket does not exist");
    }
    if text.contains(METADATA) {
        let what = "AWS_ACCESS_KEY_ID is not set, and the machine itself gives no credentials";
        return Error::new(ErrorKind::InvalidInput, what);
    }
    let kind = match &error {
        object_store::Error::NotFound { .. } => {
            return Error::new(ErrorKind::NotFound, "the object does not exist");
        }
        object_store::Error::AlreadyExists { .. } => ErrorKind::AlreadyExists,
        object_store::Error::Precondition { .. } => ErrorKind::StaleNetworkFileHandle,
        object_store::Error::PermissionDenied { .. }
        | object_store::Error::Unauthenticated { .. } => ErrorKind::PermissionDenied,
        object_store::Error::InvalidPath { .. } => ErrorKind::InvalidInput,
        _ => return Error::other(cause(&error)),
    };
    Error::new(kind, text)
}

/// The cause of a library error, without the library's text about its own retries.
fn cause(error: &object_store::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// Whether a retry may help.
fn may_pass(error: &Error) -> bool {
    error.kind() == ErrorKind::Other
}

impl Client {
    pub(super) fn new() -> Result<Self> {
        Client::with(BucketAccess::of(&environment::here)?, Arc::new(AmazonS3Builder::from_env))
    }

    pub(super) fn with(access: BucketAccess, settings: BuilderSource) -> Result<Self> {
        runtime()?;
        // Required for TLS, since the libraries bring no provider. An error means that one is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(Client { access, settings, buckets: Mutex::default(), known: Mutex::default() })
    }

    fn bucket(&self, name: &str) -> Result<Arc<AmazonS3>> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bucket) = buckets.get(name) {
            return Ok(Arc::clone(bucket));
        }
        let BucketAccess { timeout, plain_http } = self.access;
        let options = ClientOptions::new()
            .with_allow_http(plain_http)
            .with_connect_timeout(timeout.min(Duration::from_secs(10)))
            .with_timeout(timeout);
        let bucket = (self.settings)()
            .with_bucket_name(name)
            .with_client_options(options)
            .with_http_connector(Connector::of(name))
            .with_retry(RetryConfig { max_retries: 0, ..Default::default() })
            // A multipart copy, whose last request has a condition: S3 has none for a plain copy.
            .with_copy_if_not_exists(S3CopyIfNotExists::Multipart)
            .build()
            .map_err(plain)?;
        Ok(Arc::clone(buckets.entry(name.to_owned()).or_insert(Arc::new(bucket))))
    }

    /// Retries until there is an answer that another try would not change.
    fn ask<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        place: &Address,
        request: impl Fn(Arc<AmazonS3>, Key) -> F,
    ) -> Result<T> {
        runtime()?.block_on(self.answer(place, TRIES, request))
    }

    async fn answer<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        place: &Address,
        tries: u32,
        request: impl Fn(Arc<AmazonS3>, Key) -> F,
    ) -> Result<T> {
        let (bucket, key) = (self.bucket(place.bucket())?, key_of(place)?);
        let (mut wait, mut lost) = (Duration::from_millis(100), Duration::ZERO);
        for number in 1.. {
            let asked = Instant::now();
            let answer = request(Arc::clone(&bucket), key.clone()).await.map_err(plain);
            let Err(error) = answer else { return answer };
            if !may_pass(&error) {
                return Err(error);
            }
            let took = asked.elapsed();
            lost += took;
            let patience = SILENT_TIMEOUTS * self.access.timeout;
            if number == tries || lost >= patience {
                let (times, seconds) = (contract::counted(number, "request"), lost.as_secs_f32());
                let what = format!("{times} failed in {seconds:.1} s, the last one by: {error}");
                return Err(Error::new(ErrorKind::TimedOut, what));
            }
            if took >= self.access.timeout {
                let (waited, most) = (took.as_secs(), patience.as_secs());
                note!("note: {place}: no answer in {waited} s; asking again for up to {most} s");
            }
            tokio::time::sleep(wait).await;
            wait = WAIT_MOST.min(2 * wait);
        }
        Err(ErrorKind::TimedOut.into())
    }

    /// Size and version of an object, now.
    pub(super) fn about(&self, place: &Address) -> Result<ObjectInfo> {
        let meta = self.ask(place, |bucket, key| async move { bucket.head(&key).await })?;
        let about = ObjectInfo::of(meta);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(place.clone(), about.clone());
        Ok(about)
    }

    /// The size and version, as this process first learned them.
    pub(super) fn known(&self, place: &Address) -> Result<ObjectInfo> {
        self.seen(place).map_or_else(|| self.about(place), Ok)
    }

    /// The size and version, if this process has learned them.
    pub(super) fn seen(&self, place: &Address) -> Option<ObjectInfo> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(place).cloned()
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
                let version = ObjectInfo::of(found.meta.clone()).version;
                let bytes = found.bytes().await?;
                // Fewer bytes than requested: the answer was cut.
                match version == about.version && bytes.len() < wanted {
                    true => {
                        let source = format!("{} of {wanted} bytes came", bytes.len()).into();
                        Err(object_store::Error::Generic { store: "S3", source })
                    }
                    false => Ok((version, bytes)),
                }
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

    /// The keys below a folder, and the sizes of their objects, listed page by page.
    pub(super) fn list(&self, folder: &Address) -> Result<Vec<(String, u64)>> {
        let prefix = (!folder.key().is_empty()).then(|| format!("{}/", folder.key()));
        let (mut found, mut page_token) = (Vec::new(), None);
        loop {
            let page = self.ask(folder, |bucket, _| {
                let page_token: Option<String> = page_token.clone();
                let options = PaginatedListOptions { page_token, ..Default::default() };
                let prefix = prefix.clone();
                async move { bucket.list_paginated(prefix.as_deref(), options).await }
            })?;
            let objects = page.result.objects.into_iter();
            found.extend(objects.map(|meta| (meta.location.to_string(), meta.size)));
            page_token = page.page_token;
            if page_token.is_none() {
                return Ok(found);
            }
        }
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
                PutOutcome::Taken if !self.is_there(place)? => std::thread::sleep(WAIT_MOST / 10),
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

    /// Removes an object, if it exists.
    pub(super) fn remove(&self, place: &Address) -> Result<()> {
        match self.ask(place, |bucket, key| async move { bucket.delete(&key).await }) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Copies the object at `from` to `to` within the server, unless `to` exists.
    pub(super) fn copy(&self, from: &Address, to: &Address) -> Result<PutOutcome> {
        let from = key_of(from)?;
        let copied = self.ask(to, |bucket, to| {
            let from = from.clone();
            async move { bucket.copy_if_not_exists(&from, &to).await }
        });
        put_or_taken(copied)
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
        let id =
            &self.ask(place, |bucket, key| async move { bucket.create_multipart(&key).await })?;
        let failed = Cell::new(None);
        let send = |number: u64| {
            let (file, failed) = (&file, &failed);
            async move {
                let from = number * part;
                let mut bytes = vec![0; part.min(size - from) as usize];
                if let Err(error) = file.read_exact_at(&mut bytes, from) {
                    let told = Error::new(error.kind(), "a file of this machine");
                    failed.set(Some(error));
                    return Err(told);
                }
                let (count, bytes) = (bytes.len() as u64, PutPayload::from(bytes));
                let put = self.answer(place, TRIES, |bucket, key| {
                    let bytes = bytes.clone();
                    async move { bucket.put_part(&key, id, number as usize, bytes).await }
                });
                let put = put.await?;
                passed(count);
                Ok(put)
            }
        };
        let parts = stream::iter(0..size.div_ceil(part).max(1)).map(send).buffered(PARTS);
        let sent = runtime()?.block_on(parts.try_collect::<Vec<PartId>>());
        let put = sent.and_then(|parts| {
            let completed = self.ask(place, |bucket, key| {
                let parts = parts.clone();
                async move { bucket.complete_multipart(&key, id, parts).await }
            });
            match completed {
                // The answer to an earlier request was lost: the upload has ended, and its object may exist.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let there = self.about(place).is_ok_and(|about| about.bytes == size);
                    if there { Ok(()) } else { Err(error) }
                }
                completed => completed.map(drop),
            }
        });
        put.map_err(|error| {
            // A server that timed out is asked once. The first error is more useful than that of this request.
            let tries = if error.kind() == ErrorKind::TimedOut { 1 } else { TRIES };
            let abort = self.answer(place, tries, |bucket, key| async move {
                bucket.abort_multipart(&key, id).await
            });
            let _ = runtime().and_then(|runtime| runtime.block_on(abort));
            failed.take().map_or(TransferError::There(error), TransferError::Here)
        })
    }
}

/// The outcome of creating an object that must not exist.
fn put_or_taken<T>(made: Result<T>) -> Result<PutOutcome> {
    match made {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(PutOutcome::Taken),
        made => made.map(|_| PutOutcome::Created),
    }
}
