//! Names of objects and of folders of objects.

use std::fmt;

use contract::{Fault, Result};

/// The kinds of servers that hold objects, by the scheme of their URLs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UrlScheme {
    /// Amazon S3, and every server that speaks it.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
    /// Any web server: single files, to read.
    Https,
    /// A web server on this machine, without encryption.
    Http,
    /// Data sets of the Hugging Face Hub, to read.
    Hf,
}

/// Bytes of a key, at most: URLs longer than this are refused by the programs on the way.
const KEY_BYTES_MAX: usize = 4096;

/// The name of an object, or of a folder of objects: a bucket and a key, which is empty for the whole bucket.
///
/// What Azure calls a container, a web server its host, and the Hub a data set at a revision, is the bucket. A key is
/// taken as it is written: a percent sign or a space in it means itself, but on a web server, where it is part of the
/// URL. Its parts, between slashes, are never empty and never `.` or `..`, so that no two addresses name one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    scheme: UrlScheme,
    bucket: String,
    key: String,
}

impl UrlScheme {
    /// All of them.
    pub const ALL: [UrlScheme; 6] = [
        UrlScheme::S3,
        UrlScheme::Gs,
        UrlScheme::Az,
        UrlScheme::Https,
        UrlScheme::Http,
        UrlScheme::Hf,
    ];

    /// The kind of server that a URL names.
    pub fn of(url: &str) -> Option<Self> {
        UrlScheme::ALL.into_iter().find(|scheme| url.starts_with(scheme.prefix()))
    }

    /// What its URLs begin with.
    pub const fn prefix(self) -> &'static str {
        match self {
            UrlScheme::S3 => "s3://",
            UrlScheme::Gs => "gs://",
            UrlScheme::Az => "az://",
            UrlScheme::Https => "https://",
            UrlScheme::Http => "http://",
            UrlScheme::Hf => "hf://",
        }
    }

    /// What its buckets are called there.
    pub const fn bucket_word(self) -> &'static str {
        match self {
            UrlScheme::S3 | UrlScheme::Gs => "bucket",
            UrlScheme::Az => "container",
            UrlScheme::Https | UrlScheme::Http => "host",
            UrlScheme::Hf => "data set",
        }
    }

    /// The form of its URLs, with an example.
    const fn form(self) -> &'static str {
        match self {
            UrlScheme::S3 => "s3://bucket/key, as in s3://corpora/web/part-1.jsonl.zst",
            UrlScheme::Gs => "gs://bucket/key, as in gs://corpora/web/part-1.jsonl.zst",
            UrlScheme::Az => "az://container/key, as in az://corpora/web/part-1.jsonl.zst",
            UrlScheme::Https => "https://host/path, as in https://example.org/part-1.jsonl.zst",
            UrlScheme::Http => "http://localhost:port/path; https:// for another machine",
            UrlScheme::Hf => {
                "hf://datasets/owner/name@revision/path, as in hf://datasets/o/n@main/*.parquet"
            }
        }
    }

    /// Whether the objects below a folder can be listed.
    pub const fn lists(self) -> bool {
        !matches!(self, UrlScheme::Https | UrlScheme::Http)
    }

    /// Whether objects can be created and removed.
    pub const fn writes(self) -> bool {
        matches!(self, UrlScheme::S3 | UrlScheme::Gs | UrlScheme::Az)
    }

    /// What to look at where an object is missing or refused.
    pub const fn hint(self) -> &'static str {
        match self {
            UrlScheme::S3 => {
                "check the bucket's name, AWS_ENDPOINT_URL and the credentials in the environment"
            }
            UrlScheme::Gs => "check the bucket's name and GOOGLE_APPLICATION_CREDENTIALS",
            UrlScheme::Az => {
                "check the container's name, AZURE_STORAGE_ACCOUNT_NAME and the credentials in the environment"
            }
            UrlScheme::Https | UrlScheme::Http => "check the address in a browser",
            UrlScheme::Hf => "check the data set's name, its revision, the path and HF_TOKEN",
        }
    }

    /// Splits what follows the prefix into bucket and key.
    fn split(self, rest: &str) -> Option<(&str, &str)> {
        if self != UrlScheme::Hf {
            return rest.split_once('/');
        }
        // A name without an owner is known by its revision.
        let mut slashes = rest.match_indices('/').map(|(at, _)| at).skip(1);
        let first = slashes.next()?;
        let at = if rest[..first].contains('@') { first } else { slashes.next()? };
        Some((&rest[..at], &rest[at + 1..]))
    }

    /// Why this cannot be a key of a web server, or part of one: it is part of a URL, of which one form alone is taken,
    /// so that a file has one name.
    fn flaw_of_key(self, key: &str) -> Option<&'static str> {
        if self.lists() {
            None
        } else if key.contains(['?', '#', '*']) {
            Some(
                "a web server has no list for patterns, and a query may hold a secret, which would be recorded",
            )
        } else if key.to_ascii_lowercase().contains("%2f") {
            Some("a slash that is written %2F is not supported")
        } else if !key.chars().all(|c| c.is_ascii_graphic()) {
            Some("write spaces and other letters as a URL has them, as %20")
        } else {
            None
        }
    }

    /// Why this cannot be a bucket: it may become part of a host name or of a URL's path.
    fn flaw_of_bucket(self, name: &str) -> Option<&'static str> {
        let made_of = |text: &str, others: &str| {
            !text.is_empty()
                && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
        };
        match self {
            UrlScheme::S3 | UrlScheme::Gs | UrlScheme::Az if is_bucket(name) => None,
            UrlScheme::S3 | UrlScheme::Gs => {
                Some("a bucket's name is made of letters, digits, `-`, `_` and dots")
            }
            UrlScheme::Az => {
                Some("a container's name is made of letters, digits, `-`, `_` and dots")
            }
            UrlScheme::Https if name.ends_with(":443") => {
                Some("443 is the port of every https:// address")
            }
            UrlScheme::Https if made_of(name, "-.:[]") && !name.contains(char::is_uppercase) => {
                None
            }
            UrlScheme::Http if ["localhost", "127.0.0.1", "[::1]"].contains(&host(name)) => None,
            UrlScheme::Http => {
                Some("without encryption only this machine is read: write https:// for another one")
            }
            UrlScheme::Https => Some("a host is made of small letters, digits, `-` and dots"),
            UrlScheme::Hf => {
                let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
                let names = name.split('/').skip(1);
                let plain = |name: &str| made_of(name, "-_.") && flaw(name).is_none();
                if !name.starts_with("datasets/") {
                    Some("of the Hub only data sets are read")
                } else if !names.clone().all(plain) || names.count() > 2 {
                    Some("a data set is named owner/name")
                } else if !made_of(revision, "-_.%")
                    || flaw(&revision.to_ascii_lowercase().replace("%2e", ".")).is_some()
                {
                    Some("a revision is a branch, a tag or a commit, with %2F for a slash")
                } else {
                    None
                }
            }
        }
    }
}

/// A host without its port.
fn host(name: &str) -> &str {
    match name.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.chars().all(|c| c.is_ascii_digit()) => host,
        _ => name,
    }
}

impl Address {
    /// Parses an address of the form `s3://bucket/key`; a trailing slash is allowed, as for folders.
    ///
    /// # Errors
    ///
    /// If the scheme is not known, or the bucket or the key is not valid.
    pub fn parse(url: &str) -> Result<Self> {
        let scheme = UrlScheme::of(url);
        let refused = |why: &str| {
            Fault::usage(format!("this is not an address in object storage: {why}"))
                .found(format!("{:?}", without_secrets(url)))
                .wanted(scheme.unwrap_or(UrlScheme::S3).form())
        };
        let scheme = scheme.ok_or_else(|| refused("it begins otherwise"))?;
        let rest = &url[scheme.prefix().len()..];
        let word = scheme.bucket_word();
        let (bucket, key) = scheme.split(rest).ok_or_else(|| refused("it has no key"))?;
        if bucket.is_empty() {
            return Err(refused(&format!("it has no {word}")));
        }
        if let Some(why) = scheme.flaw_of_bucket(bucket) {
            return Err(refused(why));
        }
        let key = key.strip_suffix('/').unwrap_or(key);
        if key.is_empty() {
            return Err(refused("it has no key"));
        }
        if key.len() > KEY_BYTES_MAX {
            return Err(refused("its key is longer than any server takes"));
        }
        match key.split('/').find_map(flaw).or_else(|| scheme.flaw_of_key(key)) {
            Some(why) => Err(refused(why)),
            None => Ok(Address { scheme, bucket: bucket.to_owned(), key: key.to_owned() }),
        }
    }

    /// The whole bucket.
    pub fn root(&self) -> Self {
        Address { key: String::new(), ..self.clone() }
    }

    /// The kind of server.
    pub fn scheme(&self) -> UrlScheme {
        self.scheme
    }

    /// The bucket's name.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The same key in another bucket of the same kind.
    pub fn with_bucket(&self, bucket: String) -> Self {
        Address { bucket, ..self.clone() }
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
        Address { key, ..self.clone() }
    }

    /// The folder that holds it.
    pub fn folder(&self) -> Self {
        let key = self.key.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        Address { key, ..self.clone() }
    }

    /// Resolves a name that a file in this folder uses. Object storage has no links, so `..` is the parent folder.
    ///
    /// # Errors
    ///
    /// If the name leaves the bucket or no address can have it.
    pub(super) fn resolve(&self, name: &str) -> Result<Self> {
        let refused = |why: &str| {
            Fault::usage(format!("this name leads to no object: {why}"))
                .at(self.to_string())
                .found(format!("{name:?}"))
                .wanted("a name relative to this folder, or a URL, as s3://bucket/key")
        };
        let mut at = self.clone();
        if let Some(why) = self.scheme.flaw_of_key(name) {
            return Err(refused(why));
        }
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

/// A URL as a message shows it: what is before an `@` of its host or after a `?` may be a secret.
fn without_secrets(url: &str) -> String {
    let (shown, query) = url.split_once('?').map_or((url, ""), |(shown, _)| (shown, "?..."));
    let Some((scheme, rest)) = shown.split_once("://").filter(|_| !shown.starts_with("hf://"))
    else {
        return format!("{shown}{query}");
    };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    match host.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://...@{host}{path}{query}"),
        None => format!("{shown}{query}"),
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
        write!(f, "{}{}/{}", self.scheme.prefix(), self.bucket, self.key)
    }
}
