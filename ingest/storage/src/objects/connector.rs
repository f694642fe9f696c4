//! What is done to every answer of a server before the library reads it.
//!
//! An answer is taken whole, and one that is lost on its way is reported as a request that was not sent: the library
//! asks again for it, whatever the request. All our requests may be repeated (see the invariants of this crate). A list
//! is cleaned of keys that no address names.

use std::collections::BTreeSet;
use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use contract::note;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use store::location::{Address, UrlScheme};

use super::hub::Hub;
use super::listing::{self, Entries};

/// Hosts at which a cloud's machine asks for its credentials: the library's last resort, which never answers elsewhere.
pub(super) const METADATA: [&str; 2] = ["169.254.169.254", "metadata.google.internal"];

/// Requests without an answer may take this many timeouts in total: a silent server rarely recovers.
pub(super) const SILENT_TIMEOUTS: u32 = 3;

/// Makes clients of one bucket.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    bucket: Address,
    timeout: Duration,
    hub: Option<Arc<Hub>>,
    told: Arc<Mutex<BTreeSet<String>>>,
}

impl Connector {
    /// Those of the bucket of `address`; `hub` if it is the Hub's.
    pub(super) fn of(address: &Address, timeout: Duration, hub: Option<Arc<Hub>>) -> Self {
        Connector { bucket: address.root(), timeout, hub, told: Arc::default() }
    }

    /// Reports a skipped key.
    fn tell(&self, key: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.insert(key.to_owned()) {
            let bucket = &self.bucket;
            note!(
                "note: {bucket}{key}: this object is passed by, because no address names it: give it a name \
                 without an empty part, `.`, `..` and control characters"
            );
        }
    }

    /// The answer of the server, however it is asked.
    async fn answer(
        &self,
        client: &HttpClient,
        request: HttpRequest,
    ) -> Result<HttpResponse, HttpError> {
        match (&self.hub, self.bucket.scheme()) {
            (Some(hub), _) => hub.answer(client, request).await,
            (None, UrlScheme::Https | UrlScheme::Http) => web(client, request).await,
            _ => client.execute(request).await,
        }
    }

    /// What the library does with a failed request.
    fn failed(&self, request: &HttpRequest, error: HttpError) -> HttpError {
        let is_metadata = request.uri().host().is_some_and(|host| METADATA.contains(&host));
        if is_metadata {
            return HttpError::new(HttpErrorKind::Unknown, Unanswered);
        }
        if error.kind() == HttpErrorKind::Timeout {
            let (waited, most) =
                (self.timeout.as_secs(), self.timeout.saturating_mul(SILENT_TIMEOUTS).as_secs());
            let bucket = &self.bucket;
            note!("note: {bucket}: no answer in {waited} s; asking again for up to {most} s");
        }
        HttpError::new(HttpErrorKind::Request, Lost(innermost(&error)))
    }
}

/// The machine gives no credentials.
#[derive(Debug)]
pub(super) struct Unanswered;

impl Error for Unanswered {}

impl std::fmt::Display for Unanswered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the machine itself gives no credentials")
    }
}

/// A request without an answer, and why.
#[derive(Debug)]
struct Lost(String);

impl Error for Lost {}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The message of an error's first cause.
pub(super) fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = match &self.hub {
            Some(hub) => hub.client()?,
            None => ReqwestConnector::default().connect(options)?,
        };
        Ok(HttpClient::new(Answers { inner, of: self.clone() }))
    }
}

#[derive(Debug)]
struct Answers {
    inner: HttpClient,
    of: Connector,
}

impl Answers {
    async fn whole(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let failed = |error| self.of.failed(&request, error);
        let answer = self.of.answer(&self.inner, request.clone()).await.map_err(failed)?;
        let is_range = request.headers().contains_key("range");
        if request.method() == "HEAD" && !answer.status().is_success() {
            return Ok(answer);
        }
        if request.method() == "HEAD" {
            return Ok(copied(answer));
        }
        // More than was asked for, and refused.
        if is_range && answer.status().as_u16() == 200 {
            return Ok(answer);
        }
        let (mut head, body) = answer.into_parts();
        let mut body = body.bytes().await.map_err(failed)?;
        let entries = Entries::of(self.of.bucket.scheme(), request.uri().query());
        if let (Some(entries), true) = (entries, head.status.is_success()) {
            let kept = std::str::from_utf8(&body)
                .map(|text| listing::readable(text, entries, |key| self.of.tell(key)));
            body = kept.map_or(body.clone(), Into::into);
        }
        // A server that sends pieces does not say how many bytes they are in total.
        head.headers.insert("content-length", body.len().into());
        Ok(HttpResponse::from_parts(head, body.into()))
    }
}

impl HttpService for Answers {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.whole(request))
    }
}

/// An answer about an object that Azure is still copying there, or has failed to: not yet, as if the server were busy.
fn copied(mut answer: HttpResponse) -> HttpResponse {
    if answer.headers().get("x-ms-copy-status").is_some_and(|status| status != "success")
        && let Ok(busy) = 503u16.try_into()
    {
        *answer.status_mut() = busy;
    }
    answer
}

/// Asks a web server. Where it does not say the size of a file, one byte is asked for: with it comes the size.
async fn web(client: &HttpClient, request: HttpRequest) -> Result<HttpResponse, HttpError> {
    let answer = client.execute(request.clone()).await?;
    let (status, headers) = (answer.status(), answer.headers());
    // Programs that make their answers anew say 0 where they mean that they do not know.
    let is_told = status.is_success() && headers.get("content-length").is_some_and(|it| it != "0");
    // Addresses that are signed are signed for one method.
    let is_other = !status.is_success() && !matches!(status.as_u16(), 403 | 405 | 501);
    if request.method() != "HEAD" || is_told || is_other {
        return Ok(answer);
    }
    let mut ranged = request;
    if let (Ok(get), Ok(range)) = ("GET".parse(), "bytes=0-0".parse()) {
        *ranged.method_mut() = get;
        ranged.headers_mut().insert("range", range);
    }
    let mut answer = client.execute(ranged).await?;
    let range = answer.headers().get("content-range").and_then(|it| it.to_str().ok());
    let size = range.and_then(|range| range.rsplit_once('/')?.1.parse::<u64>().ok());
    // An empty file has no first byte, and its size comes with the refusal.
    if let (Some(size), 206 | 416, Ok(fine)) = (size, answer.status().as_u16(), 200u16.try_into()) {
        answer.headers_mut().insert("content-length", size.into());
        *answer.status_mut() = fine;
    }
    Ok(answer)
}
