//! The library's clients of each kind of server, made from the environment.

use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, S3CopyIfNotExists};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use store::location::{Address, UrlScheme};

use super::connector::{Connector, SILENT_TIMEOUTS, innermost};
use super::hub::Hub;
use crate::environment::Environment;

/// How often a request is repeated.
const RETRIES: usize = 11;

/// The longest wait between two requests.
const WAIT_MOST: Duration = Duration::from_secs(5);

/// What the names of the variables of a kind begin with.
const fn prefix(scheme: UrlScheme) -> &'static str {
    match scheme {
        UrlScheme::S3 => "AWS_",
        UrlScheme::Gs => "GOOGLE_",
        UrlScheme::Az => "AZURE_",
        UrlScheme::Https | UrlScheme::Http | UrlScheme::Hf => "HF_",
    }
}

/// A client of one bucket.
pub(super) type Bucket = Arc<dyn ObjectStore>;

/// Makes clients.
pub(super) struct Clouds {
    environment: Environment,
    /// How long a request may take.
    pub(super) timeout: Duration,
}

impl Clouds {
    pub(super) fn new(environment: Environment) -> Result<Self> {
        let timeout = environment.timeout()?;
        Ok(Clouds { environment, timeout })
    }

    /// The Hub of the environment.
    pub(super) fn hub(&self) -> Result<Arc<Hub>> {
        let plain_http = self.environment.plain_http(UrlScheme::Hf)?;
        let (endpoint, token) = self.environment.hub()?;
        Ok(Arc::new(Hub::new(endpoint, token, self.timeout, plain_http)))
    }

    /// A client of the bucket of an address, which is pinned if it is the Hub's.
    pub(super) fn bucket(&self, address: &Address) -> Result<Bucket> {
        let (name, connector) = (address.bucket(), Connector::of(address, self.timeout, None));
        let plain_http = self.environment.plain_http(address.scheme())?;
        let settings = self.environment.settings(prefix(address.scheme()));
        // The library's builders have these methods alike, and no trait for them.
        macro_rules! set {
            ($builder:ty) => {{
                let known = settings.filter_map(|(name, value)| Some((name.parse().ok()?, value)));
                known
                    .fold(<$builder>::new(), |set, (name, value)| set.with_config(name, value))
                    .with_client_options(self.options(plain_http))
                    .with_http_connector(connector)
                    .with_retry(self.retry())
            }};
        }
        let made = match address.scheme() {
            UrlScheme::S3 => {
                // A multipart copy, whose last request has a condition: S3 has none for a plain copy.
                let set = set!(AmazonS3Builder)
                    .with_copy_if_not_exists(S3CopyIfNotExists::Multipart)
                    .with_bucket_name(name);
                set.build().map(|made| Arc::new(made) as Bucket)
            }
            UrlScheme::Gs => {
                let mut set = set!(GoogleCloudStorageBuilder).with_bucket_name(name);
                if let Some(emulator) = self.environment.emulator()? {
                    let base = emulator.as_str().trim_end_matches('/');
                    set = set.with_base_url(base).with_bearer_token("emulator");
                }
                set.build().map(|made| Arc::new(made) as Bucket)
            }
            UrlScheme::Az => {
                let set = set!(MicrosoftAzureBuilder).with_container_name(name);
                set.build().map(|made| Arc::new(made) as Bucket)
            }
            UrlScheme::Https | UrlScheme::Http => {
                return self.web(&format!("{}{name}", address.scheme().prefix()), address, None);
            }
            UrlScheme::Hf => {
                let hub = self.hub()?;
                return self.web(&hub.files(address), address, Some(hub));
            }
        };
        made.map_err(|error| self.unusable(address, &error))
    }

    /// A client of what lies below a URL.
    pub(super) fn web(
        &self,
        url: &str,
        address: &Address,
        hub: Option<Arc<Hub>>,
    ) -> Result<Bucket> {
        let plain_http = self.environment.plain_http(address.scheme())?;
        let made = HttpBuilder::new()
            .with_url(url)
            .with_client_options(self.options(plain_http))
            .with_http_connector(Connector::of(address, self.timeout, hub))
            .with_retry(self.retry())
            .build();
        Ok(Arc::new(made.map_err(|error| self.unusable(address, &error))?))
    }

    fn options(&self, plain_http: bool) -> ClientOptions {
        ClientOptions::new()
            .with_allow_http(plain_http)
            .with_connect_timeout(self.timeout.min(Duration::from_secs(10)))
            .with_timeout(self.timeout)
    }

    fn retry(&self) -> RetryConfig {
        RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(200),
                max_backoff: WAIT_MOST,
                // A wait is sampled from the first one to this many times the last one: on average it doubles.
                base: 4.,
            },
            max_retries: RETRIES,
            retry_timeout: self.timeout.saturating_mul(SILENT_TIMEOUTS),
        }
    }

    /// No client can be made of these settings.
    fn unusable(&self, address: &Address, error: &object_store::Error) -> Error {
        let names: Vec<_> = self
            .environment
            .settings(prefix(address.scheme()))
            .map(|(name, _)| name.to_uppercase())
            .collect();
        let (names, cause) = (names.join(", "), innermost(error));
        let what = format!("no access to {address} by {names}: {cause}");
        Error::new(ErrorKind::InvalidInput, what)
    }
}
