//! Requests, each asked again until it is answered or the patience ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::future::Future;
use std::io::{Error, ErrorKind, Read, Result};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::TryStreamExt as _;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3CopyIfNotExists};
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, ClientOptions, GetOptions, ObjectStore, ObjectStoreExt as _, PutMode,
    PutOptions, PutPayload, RetryConfig, WriteMultipart,
};
use store::location::Address;
use tokio::runtime::Runtime;

use crate::environment::{self, Access};

/// How often a request is made in all, beyond what the library repeats by itself.
const TRIES: u32 = 6;

/// Where a machine of a cloud asks for its credentials: the library's last resort, which elsewhere never answers.
const METADATA: &str = "//169.254.169.254/";

/// What is compared at a time.
const COMPARED_BYTES: u64 = 16 << 20;

/// The library's name of an object.
fn key_of(address: &Address) -> Result<Key> {
    Key::parse(address.key())
        .map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))
}

/// What is known of an object.
#[derive(Clone, Debug)]
pub(super) struct About {
    pub(super) bytes: u64,
    /// Its entity tag: another content has another one.
    pub(super) version: String,
    tag: Option<String>,
}

/// What became of a conditional put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// The object is new.
    Created,
    /// There is one: it was left as it is.
    Taken,
}

/// What failed where bytes of this machine go to an object, or are held against it.
#[derive(Debug)]
pub(super) enum Failed {
    /// What is read here, which asking the server again does not mend.
    Here(Error),
    /// The object.
    There(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed::There(error)
    }
}

/// One way to all buckets that the environment gives access to.
pub(super) struct Client {
    access: Access,
    buckets: Mutex<BTreeMap<String, Arc<AmazonS3>>>,
    known: Mutex<BTreeMap<Address, About>>,
}

/// The runtime that requests run on. Threads that wait for an answer are the caller's.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<std::result::Result<Runtime, String>> = OnceLock::new();
    let made = RUNTIME.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).thread_name("s3").enable_all().build().map_err(|e| e.to_string())
    });
    made.as_ref().map_err(|error| Error::other(error.clone()))
}

/// An error of the library as one of a file.
fn plain(error: object_store::Error) -> Error {
    let text = error.to_string();
    // The library has no kind for these, and asking again makes neither a bucket nor credentials.
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
        _ => ErrorKind::Other,
    };
    Error::new(kind, text)
}

/// Whether asking again may help.
fn may_pass(error: &Error) -> bool {
    error.kind() == ErrorKind::Other
}

impl Client {
    pub(super) fn new() -> Result<Self> {
        let access = Access::of(&environment::here)?;
        runtime()?;
        // No TLS without: libraries here bring none of their own. An error says that there is one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(Client { access, buckets: Mutex::default(), known: Mutex::default() })
    }

    fn bucket(&self, name: &str) -> Result<Arc<AmazonS3>> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bucket) = buckets.get(name) {
            return Ok(Arc::clone(bucket));
        }
        let Access { timeout, plain_http } = self.access;
        let options = ClientOptions::new()
            .with_allow_http(plain_http)
            .with_connect_timeout(timeout.min(Duration::from_secs(10)))
            .with_timeout(timeout);
        let backoff = BackoffConfig { max_backoff: Duration::from_secs(5), ..Default::default() };
        let retry = RetryConfig { backoff, max_retries: 5, retry_timeout: 4 * timeout };
        let bucket = AmazonS3Builder::from_env()
            .with_bucket_name(name)
            .with_client_options(options)
            .with_retry(retry)
            // By parts, of which the last request has a condition: S3 knows none for a plain copy.
            .with_copy_if_not_exists(S3CopyIfNotExists::Multipart)
            .build()
            .map_err(plain)?;
        Ok(Arc::clone(buckets.entry(name.to_owned()).or_insert(Arc::new(bucket))))
    }

    /// Asks until there is an answer that asking again would not change.
    fn ask<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        place: &Address,
        request: impl Fn(Arc<AmazonS3>, Key) -> F,
    ) -> Result<T> {
        let (bucket, key) = (self.bucket(place.bucket())?, key_of(place)?);
        let mut wait = Duration::from_millis(100);
        for left in (0..TRIES).rev() {
            let answer = runtime()?.block_on(request(Arc::clone(&bucket), key.clone()));
            match answer.map_err(plain) {
                Err(error) if left > 0 && may_pass(&error) => {
                    std::thread::sleep(wait);
                    wait *= 2;
                }
                answer => return answer,
            }
        }
        Err(ErrorKind::TimedOut.into())
    }

    /// Size and version of an object, now.
    pub(super) fn about(&self, place: &Address) -> Result<About> {
        let meta = self.ask(place, |bucket, key| async move { bucket.head(&key).await })?;
        let version = meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339());
        let about = About { bytes: meta.size, version, tag: meta.e_tag };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(place.clone(), about.clone());
        Ok(about)
    }

    /// The same, as this process learned it first.
    pub(super) fn known(&self, place: &Address) -> Result<About> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(place).cloned();
        known.map_or_else(|| self.about(place), Ok)
    }

    /// A part of an object, of that version and no other.
    pub(super) fn range(
        &self,
        place: &Address,
        about: &About,
        range: Range<u64>,
    ) -> Result<Vec<u8>> {
        let wanted = (range.end - range.start) as usize;
        let bytes = self.ask(place, |bucket, key| {
            let options = GetOptions {
                range: Some(range.clone().into()),
                if_match: about.tag.clone(),
                ..Default::default()
            };
            async move { bucket.get_opts(&key, options).await?.bytes().await }
        });
        let bytes = match bytes {
            Err(error) if error.kind() == ErrorKind::StaleNetworkFileHandle => {
                return Err(Error::new(error.kind(), "the object changed while it was read"));
            }
            bytes => bytes?,
        };
        if bytes.len() != wanted {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes.to_vec())
    }

    /// The keys below a folder, and the sizes of what they name.
    pub(super) fn list(&self, folder: &Address) -> Result<Vec<(String, u64)>> {
        self.ask(folder, |bucket, key| async move {
            let prefix = (!key.as_ref().is_empty()).then_some(key);
            let found: Vec<_> = bucket.list(prefix.as_ref()).try_collect().await?;
            Ok(found.into_iter().map(|meta| (meta.location.to_string(), meta.size)).collect())
        })
    }

    /// Creates an object unless there is one. A request whose answer is lost may have taken effect: then asking again
    /// finds one, and the caller compares.
    pub(super) fn create(&self, place: &Address, bytes: &[u8]) -> Result<Put> {
        let payload = PutPayload::from(bytes.to_vec());
        let put = self.ask(place, |bucket, key| {
            let options = PutOptions { mode: PutMode::Create, ..Default::default() };
            let payload = payload.clone();
            async move { bucket.put_opts(&key, payload, options).await }
        });
        put_or_taken(put)
    }

    /// Whether an object has these bytes, of which there are `size`.
    pub(super) fn holds(
        &self,
        place: &Address,
        size: u64,
        mut bytes: impl Read,
    ) -> std::result::Result<bool, Failed> {
        let about = self.about(place)?;
        if about.bytes != size {
            return Ok(false);
        }
        let (mut at, mut buffer) = (0, Vec::new());
        while at < size {
            let end = size.min(at + COMPARED_BYTES);
            buffer.resize((end - at) as usize, 0);
            bytes.read_exact(&mut buffer).map_err(Failed::Here)?;
            if self.range(place, &about, at..end)? != buffer {
                return Ok(false);
            }
            at = end;
        }
        Ok(true)
    }

    /// Removes an object, if there is one.
    pub(super) fn remove(&self, place: &Address) -> Result<()> {
        match self.ask(place, |bucket, key| async move { bucket.delete(&key).await }) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Gives the object at `from` to `to` as well, unless there is one; nothing leaves the server.
    pub(super) fn copy(&self, from: &Address, to: &Address) -> Result<Put> {
        let from = key_of(from)?;
        let copied = self.ask(to, |bucket, to| {
            let from = from.clone();
            async move { bucket.copy_if_not_exists(&from, &to).await }
        });
        put_or_taken(copied)
    }

    /// Puts a large file in parts, whatever was there: it appears whole when the last one is there. Calls `passed` with
    /// bytes as they go.
    pub(super) fn upload(
        &self,
        place: &Address,
        path: &Path,
        part: usize,
        passed: &dyn Fn(u64),
    ) -> std::result::Result<(), Failed> {
        let put = self.ask(place, |bucket, key| async move {
            let mut file = match File::open(path) {
                Ok(file) => file,
                Err(error) => return Ok(Err(error)),
            };
            let upload = bucket.put_multipart(&key).await?;
            let mut writer = WriteMultipart::new_with_chunk_size(upload, part);
            let mut buffer = Vec::with_capacity(part);
            loop {
                buffer.clear();
                match (&mut file).take(part as u64).read_to_end(&mut buffer) {
                    Ok(0) => return writer.finish().await.map(Ok),
                    Ok(_) => {}
                    Err(error) => {
                        // The first error says more than one about parts that nobody will put together.
                        let _ = writer.abort().await;
                        return Ok(Err(error));
                    }
                }
                writer.wait_for_capacity(2).await?;
                writer.write(&buffer);
                passed(buffer.len() as u64);
            }
        });
        put?.map(drop).map_err(Failed::Here)
    }
}

/// What became of an object that was to be made where there is none.
fn put_or_taken<T>(made: Result<T>) -> Result<Put> {
    match made {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(Put::Taken),
        made => made.map(|_| Put::Created),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_here_that_cannot_be_read_is_no_error_of_the_object() {
        let client = Client::new().unwrap();
        let place = Address::parse("s3://bucket/key").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let fault = client.upload(&place, &folder.path().join("none"), 1, &|_| ()).unwrap_err();
        assert!(
            matches!(&fault, Failed::Here(error) if error.kind() == ErrorKind::NotFound),
            "{fault:?}"
        );
    }
}
