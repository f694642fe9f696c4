//! Settings of buckets and of the cache from the environment, checked before use: the library that signs requests does
//! not validate its settings, and a mistake in one ends the process there.

use std::ffi::OsString;
use std::io::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::time::Duration;

use store::location::SCHEME;
use url::Url;

/// Seconds that a request may take, unless `ZDATA_S3_TIMEOUT` says otherwise.
const TIMEOUT_SECONDS: u64 = 60;

/// The limit of the cache, unless `ZDATA_CACHE_BYTES` says otherwise.
const CACHE_BYTES: u64 = 16 << 30;

/// The variables that the library takes an endpoint from.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

/// The variables that are sent in request headers. Their values are secrets and are never shown.
const KEYS: [&str; 3] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];

/// The variables that become part of a host name.
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// The variables of a process, or those of a test.
pub(super) type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The variables of this process.
pub(super) fn here(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// How buckets are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BucketAccess {
    /// How long a request may take.
    pub(super) timeout: Duration,
    /// Whether requests go out unencrypted, because the endpoint says so.
    pub(super) plain_http: bool,
}

impl BucketAccess {
    /// Reads the variables. A wrong one is [`ErrorKind::InvalidInput`], by its name.
    pub(super) fn of(variables: Variables<'_>) -> Result<Self> {
        let mut plain_http = false;
        for name in ENDPOINTS {
            if let Some(value) = text(variables, name)? {
                plain_http |= endpoint(name, &value)?.scheme() == "http";
            }
        }
        for name in KEYS {
            if let Some(value) = text(variables, name)?
                && (value.is_empty() || !value.chars().all(|c| c.is_ascii_graphic()))
            {
                let what = format!("{name} is empty, or has a space or a line break in it");
                return Err(refused(what));
            }
        }
        if let [Some(_), None] = [variables(KEYS[0]), variables(KEYS[1])] {
            return Err(refused(format!("{} is set and {} is not", KEYS[0], KEYS[1])));
        }
        for name in REGIONS {
            let letter = |c: char| c.is_ascii_alphanumeric() || c == '-';
            if let Some(value) = text(variables, name)?
                && (value.is_empty() || !value.chars().all(letter))
            {
                return Err(wrong(name, &value, "a region, as in us-east-1"));
            }
        }
        let wanted = "seconds, 1 or more";
        let seconds = number(variables, "ZDATA_S3_TIMEOUT", wanted)?.unwrap_or(TIMEOUT_SECONDS);
        if seconds == 0 {
            return Err(wrong("ZDATA_S3_TIMEOUT", "0", wanted));
        }
        Ok(BucketAccess { timeout: Duration::from_secs(seconds), plain_http })
    }
}

/// The folder of cached copies.
pub(super) fn cache_folder(variables: Variables<'_>) -> Result<PathBuf> {
    if let Some(folder) = variables("ZDATA_CACHE") {
        let shown = folder.to_string_lossy();
        if shown.is_empty() || shown.starts_with(SCHEME) {
            return Err(wrong("ZDATA_CACHE", &shown, "a folder of this machine"));
        }
        return Ok(PathBuf::from(folder));
    }
    let root = variables("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(PathBuf::from(variables("HOME")?).join(".cache"));
    let root = root.or_else(home).ok_or_else(|| refused("HOME is not set: set ZDATA_CACHE"))?;
    Ok(root.join("ztrain").join("s3"))
}

/// The limit of cached bytes.
pub(super) fn cache_bytes(variables: Variables<'_>) -> Result<u64> {
    let stated = number(variables, "ZDATA_CACHE_BYTES", "a number of bytes")?;
    Ok(stated.unwrap_or(CACHE_BYTES))
}

/// A usable endpoint.
fn endpoint(name: &str, value: &str) -> Result<Url> {
    let refused = || wrong(name, value, "http://host:port or https://host");
    // URL parsers accept these characters, and request signing does not.
    if !value.chars().all(|c| c.is_ascii_graphic() && !"\"<>\\^`{|}".contains(c)) {
        return Err(refused());
    }
    let url = Url::parse(value).map_err(|_| refused())?;
    let whole = matches!(url.scheme(), "http" | "https") && url.has_host();
    let plain = url.username().is_empty() && url.password().is_none();
    match whole && plain && url.query().is_none() && url.fragment().is_none() {
        true => Ok(url),
        false => Err(refused()),
    }
}

fn text(variables: Variables<'_>, name: &str) -> Result<Option<String>> {
    let value = variables(name).map(OsString::into_string).transpose();
    value.map_err(|_| refused(format!("{name} is not UTF-8")))
}

fn number(variables: Variables<'_>, name: &str, wanted: &str) -> Result<Option<u64>> {
    let Some(value) = text(variables, name)? else { return Ok(None) };
    value.parse().map(Some).map_err(|_| wrong(name, &value, wanted))
}

fn wrong(name: &str, value: &str, wanted: &str) -> Error {
    refused(format!("{name} is {value:?}, wanted {wanted}"))
}

fn refused(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(pairs: &[(&str, &str)]) -> Result<BucketAccess> {
        BucketAccess::of(&|name| {
            let found = pairs.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    fn one<T>(
        name: &str,
        value: &str,
        read: impl Fn(Variables<'_>) -> Result<T>,
    ) -> std::result::Result<T, String> {
        read(&|asked| (asked == name).then(|| OsString::from(value))).map_err(|error| {
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            error.to_string()
        })
    }

    #[test]
    fn a_setting_that_no_request_can_be_made_of_is_refused_by_its_name() {
        for (name, value) in [
            ("AWS_ENDPOINT_URL", "localhost:9000"),
            ("AWS_ENDPOINT_URL", ""),
            ("AWS_ENDPOINT_URL", "http://localhost:9000 "),
            ("AWS_ENDPOINT_URL", "http://"),
            ("AWS_ENDPOINT_URL", "http://localhost:99999"),
            ("AWS_ENDPOINT_URL", "http://user@localhost"),
            ("AWS_ENDPOINT_URL", "http://localhost?x"),
            ("AWS_ENDPOINT", "s3://localhost"),
            ("AWS_ENDPOINT_URL_S3", "http://a b"),
            ("AWS_ACCESS_KEY_ID", "key\n"),
            ("AWS_SECRET_ACCESS_KEY", ""),
            ("AWS_SESSION_TOKEN", "\u{e9}"),
            ("AWS_REGION", "us east"),
            ("ZDATA_S3_TIMEOUT", "xx"),
            ("ZDATA_S3_TIMEOUT", "0"),
            ("ZDATA_S3_TIMEOUT", "-1"),
        ] {
            let told = one(name, value, BucketAccess::of).unwrap_err();
            assert!(told.contains(name), "{name}={value:?}: {told}");
        }
        let told = one("AWS_ACCESS_KEY_ID", "key", BucketAccess::of).unwrap_err();
        assert!(told.contains("AWS_SECRET_ACCESS_KEY"), "{told}");
        let told = one("AWS_SECRET_ACCESS_KEY", "se cret", BucketAccess::of).unwrap_err();
        assert!(!told.contains("cret"), "a secret is never shown: {told}");
    }

    #[test]
    fn settings_that_work_are_taken() {
        let minute = Duration::from_secs(60);
        assert_eq!(access(&[]).unwrap(), BucketAccess { timeout: minute, plain_http: false });
        let found = access(&[
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "a+b/c="),
            ("AWS_REGION", "eu-central-1"),
            ("ZDATA_S3_TIMEOUT", "1"),
        ]);
        let wanted = BucketAccess { timeout: Duration::from_secs(1), plain_http: true };
        assert_eq!(found.unwrap(), wanted);
        let found = access(&[("AWS_ENDPOINT", "https://minio.example/s3/")]).unwrap();
        assert!(!found.plain_http);
    }

    #[test]
    fn the_cache_is_a_folder_of_this_machine_and_its_limit_a_number() {
        for folder in ["s3://bucket/c", ""] {
            assert!(one("ZDATA_CACHE", folder, cache_folder).unwrap_err().contains("ZDATA_CACHE"));
        }
        assert_eq!(one("ZDATA_CACHE", "/c", cache_folder).unwrap(), PathBuf::from("/c"));
        let found = one("HOME", "/home/me", cache_folder).unwrap();
        assert_eq!(found, PathBuf::from("/home/me/.cache/ztrain/s3"));
        let told = one("ZDATA_CACHE_BYTES", "abc", cache_bytes).unwrap_err();
        assert!(told.contains("ZDATA_CACHE_BYTES") && told.contains("abc"), "{told}");
        assert_eq!(one("ZDATA_CACHE_BYTES", "7", cache_bytes).unwrap(), 7);
    }
}
