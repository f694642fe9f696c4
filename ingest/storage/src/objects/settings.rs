//! Settings of servers and of the cache from the environment, checked before use: the library that signs requests does
//! not validate its settings, and a mistake in one ends the process there.

use std::io::Result;
use std::time::Duration;

use store::location::UrlScheme;
use url::Url;

use crate::environment::{Environment, refused, wrong};

/// Seconds that a request may take, unless `ZDATA_TIMEOUT` says otherwise.
const TIMEOUT_SECONDS: u64 = 60;

/// The limit of the cache, unless `ZDATA_CACHE_BYTES` says otherwise.
const CACHE_BYTES: u64 = 16 << 30;

/// The Hub that everybody uses.
const HUB: &str = "https://huggingface.co";

/// The variables of one kind of server that are checked.
struct Checked {
    /// Those that give an endpoint.
    endpoints: &'static [&'static str],
    /// Those that are sent in headers or queries of requests. Their values are secrets and are never shown.
    secrets: &'static [&'static str],
    /// Those that become part of a host name, with an example.
    names: &'static [(&'static str, &'static str)],
}

/// The variables of each kind of server that are checked.
const fn checked(scheme: UrlScheme) -> Checked {
    match scheme {
        UrlScheme::S3 => Checked {
            endpoints: &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"],
            secrets: &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"],
            names: &[
                ("AWS_REGION", "a region, as in us-east-1"),
                ("AWS_DEFAULT_REGION", "a region, as in us-east-1"),
            ],
        },
        UrlScheme::Gs => Checked {
            endpoints: &["GOOGLE_BASE_URL"],
            secrets: &["GOOGLE_BEARER_TOKEN"],
            names: &[],
        },
        UrlScheme::Az => Checked {
            endpoints: &["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"],
            secrets: &[
                "AZURE_STORAGE_ACCOUNT_KEY",
                "AZURE_STORAGE_ACCESS_KEY",
                "AZURE_STORAGE_SAS_TOKEN",
                "AZURE_STORAGE_SAS_KEY",
                "AZURE_STORAGE_TOKEN",
            ],
            names: &[("AZURE_STORAGE_ACCOUNT_NAME", "the name of a storage account")],
        },
        UrlScheme::Hf => {
            Checked { endpoints: &["HF_ENDPOINT"], secrets: &["HF_TOKEN"], names: &[] }
        }
        UrlScheme::Https | UrlScheme::Http => Checked { endpoints: &[], secrets: &[], names: &[] },
    }
}

impl Environment {
    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn text(&self, name: &str) -> Result<Option<&str>> {
        let Some(value) = self.0.get(name) else { return Ok(None) };
        value.to_str().map(Some).ok_or_else(|| refused(format!("{name} is not UTF-8")))
    }

    fn number(&self, name: &str, wanted: &str) -> Result<Option<u64>> {
        let Some(value) = self.text(name)? else { return Ok(None) };
        value.parse().map(Some).map_err(|_| wrong(name, value, wanted))
    }

    /// The variables whose names begin with `prefix`, in small letters as the library knows them.
    pub(super) fn settings(&self, prefix: &str) -> impl Iterator<Item = (String, String)> {
        let named = self.0.iter().filter(move |(name, _)| name.starts_with(prefix));
        named.filter_map(|(name, value)| Some((name.to_lowercase(), value.to_str()?.to_owned())))
    }

    /// How long a request may take.
    pub(super) fn timeout(&self) -> Result<Duration> {
        let wanted = "seconds, 1 or more";
        match self.number("ZDATA_TIMEOUT", wanted)? {
            Some(0) => Err(wrong("ZDATA_TIMEOUT", "0", wanted)),
            seconds => Ok(Duration::from_secs(seconds.unwrap_or(TIMEOUT_SECONDS))),
        }
    }

    /// Checks the variables of a kind of server, and whether requests go out unencrypted because its endpoint says so.
    /// A wrong variable is [`ErrorKind::InvalidInput`], by its name.
    pub(super) fn plain_http(&self, scheme: UrlScheme) -> Result<bool> {
        let Checked { endpoints, secrets, names } = checked(scheme);
        let mut plain_http = scheme == UrlScheme::Http;
        for name in endpoints {
            if let Some(value) = self.text(name)? {
                plain_http |= endpoint(name, value)?.scheme() == "http";
            }
        }
        for name in secrets {
            if let Some(value) = self.text(name)?
                && (value.is_empty() || !value.chars().all(|c| c.is_ascii_graphic()))
            {
                let what = format!("{name} is empty, or has a space or a line break in it");
                return Err(refused(what));
            }
        }
        for (name, wanted) in names {
            let letter = |c: char| c.is_ascii_alphanumeric() || c == '-';
            if let Some(value) = self.text(name)?
                && (value.is_empty() || !value.chars().all(letter))
            {
                return Err(wrong(name, value, wanted));
            }
        }
        if scheme == UrlScheme::S3 && self.has(secrets[0]) && !self.has(secrets[1]) {
            return Err(refused(format!("{} is set and {} is not", secrets[0], secrets[1])));
        }
        if scheme == UrlScheme::Az
            && !self.has("AZURE_STORAGE_ACCOUNT_NAME")
            && !self.has("AZURE_STORAGE_USE_EMULATOR")
        {
            return Err(refused("AZURE_STORAGE_ACCOUNT_NAME is not set"));
        }
        Ok(plain_http || scheme == UrlScheme::Gs && self.emulator()?.is_some_and(is_plain))
    }

    /// The server that stands in for Google Cloud Storage, which needs no credentials.
    pub(super) fn emulator(&self) -> Result<Option<Url>> {
        let name = "STORAGE_EMULATOR_HOST";
        let Some(value) = self.text(name)? else { return Ok(None) };
        // Other clients take a host without a scheme too.
        let whole =
            if value.contains("://") { value.to_owned() } else { format!("http://{value}") };
        endpoint(name, &whole).map(Some)
    }

    /// The Hub's endpoint, without a slash at its end, and the token to send there.
    pub(super) fn hub(&self) -> Result<(String, Option<&str>)> {
        // As URLs of requests will have it, which are compared with it.
        let endpoint = endpoint("HF_ENDPOINT", self.text("HF_ENDPOINT")?.unwrap_or(HUB))?;
        Ok((endpoint.as_str().trim_end_matches('/').to_owned(), self.text("HF_TOKEN")?))
    }

    /// The limit of cached bytes.
    pub(super) fn cache_bytes(&self) -> Result<u64> {
        Ok(self.number("ZDATA_CACHE_BYTES", "a number of bytes")?.unwrap_or(CACHE_BYTES))
    }
}

fn is_plain(endpoint: Url) -> bool {
    endpoint.scheme() == "http"
}

/// A usable endpoint.
fn endpoint(name: &str, value: &str) -> Result<Url> {
    // What is before an `@` or after a `?` may be a secret.
    let shown = value.split('?').next().unwrap_or_default();
    let shown = shown.rsplit_once('@').map_or(shown.to_owned(), |(_, host)| format!("...@{host}"));
    let refused = || wrong(name, &shown, "http://host:port or https://host");
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

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::path::PathBuf;

    use super::*;

    /// The setting by itself, next to what its kind cannot be without.
    fn told<T>(name: &str, value: &str, read: impl Fn(&Environment) -> Result<T>) -> String {
        let mut variables = vec![(name, value)];
        if name.starts_with("AZURE_STORAGE_") && name != "AZURE_STORAGE_ACCOUNT_NAME" {
            variables.push(("AZURE_STORAGE_ACCOUNT_NAME", "account"));
        }
        match read(&Environment::of(&variables)) {
            Ok(_) => panic!("{name}={value:?} is taken"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                error.to_string()
            }
        }
    }

    #[test]
    fn a_setting_that_no_request_can_be_made_of_is_refused_by_its_name() {
        use UrlScheme::{Az, Gs, Hf, S3};
        for (scheme, name, value) in [
            (S3, "AWS_ENDPOINT_URL", "localhost:9000"),
            (S3, "AWS_ENDPOINT_URL", ""),
            (S3, "AWS_ENDPOINT_URL", "http://localhost:9000 "),
            (S3, "AWS_ENDPOINT_URL", "http://"),
            (S3, "AWS_ENDPOINT_URL", "http://localhost:99999"),
            (S3, "AWS_ENDPOINT_URL", "http://user@localhost"),
            (S3, "AWS_ENDPOINT_URL", "http://localhost?x"),
            (S3, "AWS_ENDPOINT", "s3://localhost"),
            (S3, "AWS_ENDPOINT_URL_S3", "http://a b"),
            (S3, "AWS_ACCESS_KEY_ID", "key\n"),
            (S3, "AWS_SECRET_ACCESS_KEY", ""),
            (S3, "AWS_SESSION_TOKEN", "\u{e9}"),
            (S3, "AWS_REGION", "us east"),
            (Gs, "GOOGLE_BASE_URL", "storage.googleapis.com"),
            (Gs, "STORAGE_EMULATOR_HOST", "a b"),
            (Gs, "GOOGLE_BEARER_TOKEN", "a\nb"),
            (Az, "AZURE_STORAGE_ENDPOINT", "x"),
            (Az, "AZURITE_BLOB_STORAGE_URL", ""),
            (Az, "AZURE_STORAGE_ACCOUNT_NAME", "a.b"),
            (Az, "AZURE_STORAGE_SAS_TOKEN", "a b"),
            (Hf, "HF_ENDPOINT", "huggingface.co"),
            (Hf, "HF_TOKEN", "hf_x\n"),
        ] {
            let told = told(name, value, |variables| variables.plain_http(scheme));
            assert!(told.contains(name), "{name}={value:?}: {told}");
        }
        for value in ["xx", "0", "-1"] {
            assert!(told("ZDATA_TIMEOUT", value, Environment::timeout).contains("ZDATA_TIMEOUT"));
        }
        let alone = told("AWS_ACCESS_KEY_ID", "key", |variables| variables.plain_http(S3));
        assert!(alone.contains("AWS_SECRET_ACCESS_KEY"), "{alone}");
        let nameless = told("AZURE", "", |variables| variables.plain_http(Az));
        assert!(nameless.contains("AZURE_STORAGE_ACCOUNT_NAME"), "{nameless}");
        for (scheme, name) in [(S3, "AWS_SECRET_ACCESS_KEY"), (Hf, "HF_TOKEN")] {
            let told = told(name, "se cret", |variables| variables.plain_http(scheme));
            assert!(!told.contains("cret"), "a secret is never shown: {told}");
        }
    }

    #[test]
    fn settings_that_work_are_taken() {
        let nothing = Environment::of(&[]);
        assert_eq!(nothing.timeout().unwrap(), Duration::from_secs(60));
        for scheme in UrlScheme::ALL.into_iter().filter(|scheme| *scheme != UrlScheme::Az) {
            assert_eq!(nothing.plain_http(scheme).unwrap(), scheme == UrlScheme::Http);
        }
        let plain = Environment::of(&[
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "a+b/c="),
            ("AWS_REGION", "eu-central-1"),
            ("STORAGE_EMULATOR_HOST", "localhost:9023"),
            ("AZURE_STORAGE_USE_EMULATOR", "true"),
            ("AZURITE_BLOB_STORAGE_URL", "http://localhost:10000"),
            ("HF_ENDPOINT", "http://localhost:8000/"),
            ("ZDATA_TIMEOUT", "1"),
        ]);
        assert_eq!(plain.timeout().unwrap(), Duration::from_secs(1));
        assert_eq!(plain.hub().unwrap().0, "http://localhost:8000");
        for scheme in UrlScheme::ALL {
            assert_eq!(plain.plain_http(scheme).unwrap(), scheme != UrlScheme::Https, "{scheme:?}");
        }
        let sure = Environment::of(&[("AWS_ENDPOINT", "https://minio.example/s3/")]);
        assert!(!sure.plain_http(UrlScheme::S3).unwrap());
    }

    #[test]
    fn the_cache_is_a_folder_of_this_machine_and_its_limit_a_number() {
        for folder in ["s3://bucket/c", "gs://bucket/c", ""] {
            assert!(told("ZDATA_CACHE", folder, Environment::cache_folder).contains("ZDATA_CACHE"));
        }
        let folder = |name, value| Environment::of(&[(name, value)]).cache_folder().unwrap();
        assert_eq!(folder("ZDATA_CACHE", "/c"), PathBuf::from("/c"));
        let found = folder("HOME", "/home/me");
        assert_eq!(found, PathBuf::from("/home/me/.cache/ztrain/objects"));
        let told = told("ZDATA_CACHE_BYTES", "abc", Environment::cache_bytes);
        assert!(told.contains("ZDATA_CACHE_BYTES") && told.contains("abc"), "{told}");
        let few = Environment::of(&[("ZDATA_CACHE_BYTES", "7")]);
        assert_eq!(few.cache_bytes().unwrap(), 7);
    }
}
