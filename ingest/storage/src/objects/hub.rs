//! Data sets of the Hugging Face Hub, by its plain files: lists from its tree, bytes by its redirects.
//!
//! A revision is resolved to its commit once, and everything is asked of that commit. Large files lie on other servers,
//! to which the Hub redirects; a token is sent to the Hub alone. A file is identified by the commit, whose files never
//! change, not by the tags of the servers that have its bytes.

use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::time::Duration;

use object_store::client::{HttpClient, HttpError, HttpRequest, HttpResponse};
use serde::Deserialize;
use store::location::Address;
use url::Url;

use super::listing;

/// Redirects that are followed for a file.
const HOPS: usize = 8;

/// The Hub as the environment names it.
pub(super) struct Hub {
    endpoint: String,
    token: Option<String>,
    timeout: Duration,
    plain_http: bool,
}

/// An entry of a tree.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
}

/// What the Hub says of a revision.
#[derive(Deserialize)]
struct Revision {
    sha: String,
}

impl fmt::Debug for Hub {
    /// Without the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Hub {
    pub(super) fn new(
        endpoint: String,
        token: Option<&str>,
        timeout: Duration,
        plain_http: bool,
    ) -> Self {
        Hub { endpoint, token: token.map(str::to_owned), timeout, plain_http }
    }

    /// A client that follows no redirect by itself.
    pub(super) fn client(&self) -> object_store::Result<HttpClient> {
        let built = reqwest::Client::builder()
            .user_agent(concat!("zdata/", env!("CARGO_PKG_VERSION")))
            .https_only(!self.plain_http)
            .http1_only()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(self.timeout.min(Duration::from_secs(10)))
            .timeout(self.timeout)
            .build();
        let refused =
            |error| object_store::Error::Generic { store: "Hub", source: Box::new(error) };
        Ok(HttpClient::new(built.map_err(refused)?))
    }

    /// Where the files of a data set are, at a commit.
    pub(super) fn files(&self, pinned: &Address) -> String {
        let (name, commit) = parts(pinned);
        format!("{}/{name}/resolve/{commit}", self.endpoint)
    }

    /// Where a revision is resolved, unless it is a commit already.
    pub(super) fn revision(&self, address: &Address) -> Option<String> {
        let (name, revision) = parts(address);
        let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        let is_commit = revision.len() == 40 && revision.chars().all(is_digit);
        (!is_commit).then(|| format!("{}/api/{name}/revision/{revision}", self.endpoint))
    }

    /// The address at the commit that the Hub gave for its revision.
    pub(super) fn pinned(address: &Address, answer: &[u8]) -> Result<Address> {
        let Revision { sha } = serde_json::from_slice(answer).map_err(not_json)?;
        let pinned = address.with_bucket(format!("{}@{sha}", parts(address).0));
        // The commit becomes part of addresses, so it must be one.
        match sha.len() == 40 && sha.chars().all(|c| c.is_ascii_hexdigit()) {
            true => Ok(pinned),
            false => Err(not_json(format!("{sha:?} is not a commit"))),
        }
    }

    /// Where the tree below a folder is listed.
    pub(super) fn tree(&self, folder: &Address) -> Result<String> {
        let (name, commit) = parts(folder);
        let url = format!("{}/api/{name}/tree/{commit}", self.endpoint);
        let mut url = Url::parse(&url).map_err(not_json)?;
        if let (Ok(mut path), false) = (url.path_segments_mut(), folder.key().is_empty()) {
            path.extend(folder.key().split('/'));
        }
        url.set_query(Some("recursive=true"));
        Ok(url.into())
    }

    /// The files of one page of a tree, with their sizes, but those that no address names.
    pub(super) fn page(answer: &[u8]) -> Result<Vec<(String, u64)>> {
        let entries: Vec<Entry> = serde_json::from_slice(answer).map_err(not_json)?;
        let files = entries.into_iter();
        let files = files.filter(|entry| entry.kind == "file" && listing::is_named(&entry.path));
        Ok(files.map(|entry| (entry.path, entry.size)).collect())
    }

    /// Asks the Hub, and the servers that it sends us to.
    pub(super) async fn answer(
        &self,
        client: &HttpClient,
        mut request: HttpRequest,
    ) -> std::result::Result<HttpResponse, HttpError> {
        let is_head = request.method() == "HEAD";
        let commit = self.commit_of(&request.uri().to_string());
        // The other servers have tags of their own.
        request.headers_mut().remove("if-match");
        let mut hops = 0;
        loop {
            let mut hop = request.clone();
            let at = hop.uri().to_string();
            if let (true, Some(token)) = (self.is_own(&at), &self.token)
                && let Ok(value) = format!("Bearer {token}").parse()
            {
                hop.headers_mut().insert("authorization", value);
            }
            let mut answer = client.execute(hop).await?;
            if !answer.status().is_redirection() {
                return Ok(match answer.status().is_success() {
                    true => stamped(answer, commit),
                    false => explained(answer),
                });
            }
            let linked = answer.headers().get("x-linked-size").cloned();
            if let (true, Some(size), Ok(fine)) = (is_head, linked, 200u16.try_into()) {
                answer.headers_mut().insert("content-length", size);
                *answer.status_mut() = fine;
                return Ok(stamped(answer, commit));
            }
            let to = answer.headers().get("location").and_then(|to| to.to_str().ok());
            let to = to.and_then(|to| Url::parse(&at).ok()?.join(to).ok());
            let to = to.filter(|_| hops < HOPS).and_then(|to| to.as_str().parse().ok());
            let Some(to) = to else { return Ok(answer) };
            *request.uri_mut() = to;
            hops += 1;
        }
    }

    /// The commit in the URL of a file; `None` of the API's.
    fn commit_of(&self, url: &str) -> Option<String> {
        let path = url.strip_prefix(&self.endpoint)?;
        let mut names = path.strip_prefix("/datasets/")?.split('/');
        // One name or two, of which the second may be any word.
        let [_, second, third] = [names.next()?, names.next()?, names.next()?];
        let fourth = names.next();
        let commit =
            if third == "resolve" { fourth? } else { (second == "resolve").then_some(third)? };
        Some(commit.to_owned())
    }

    /// Whether a URL is the Hub's own.
    fn is_own(&self, url: &str) -> bool {
        let origin = |url: &str| Url::parse(url).ok().map(|url| url.origin());
        origin(url).is_some_and(|found| Some(found) == origin(&self.endpoint))
    }
}

/// The data set, as `datasets/owner/name`, and its revision.
fn parts(address: &Address) -> (&str, &str) {
    address.bucket().split_once('@').unwrap_or((address.bucket(), "main"))
}

/// The commit of a data set, of a pinned address.
pub(super) fn commit(pinned: &Address) -> &str {
    parts(pinned).1
}

/// An answer with the commit as its tag; of a page of the API, with the URL of the next one.
fn stamped(mut answer: HttpResponse, commit: Option<String>) -> HttpResponse {
    let headers = answer.headers_mut();
    let link = headers.get_all("link").iter().find_map(|link| next(link.to_str().ok()?));
    headers.remove("last-modified");
    headers.remove("etag");
    if let Some(tag) = commit.or(link).and_then(|tag| tag.parse().ok()) {
        headers.insert("etag", tag);
    }
    answer
}

/// The next page of a list, as its answer links to it.
fn next(links: &str) -> Option<String> {
    // A URL may have commas and anything but angle brackets in it.
    let (before, _) = links.split_once("rel=\"next\"")?;
    Some(before.rsplit_once('<')?.1.split_once('>')?.0.to_owned())
}

/// A refusal with the Hub's word for it, which an answer to HEAD has in its head alone.
fn explained(answer: HttpResponse) -> HttpResponse {
    let text = |name: &str| answer.headers().get(name).and_then(|text| text.to_str().ok());
    let Some(code) = text("x-error-code") else { return answer };
    let told = format!("{code}: {}", text("x-error-message").unwrap_or_default());
    let (head, _) = answer.into_parts();
    HttpResponse::from_parts(head, told.into_bytes().into())
}

/// What the Hub's word for a refusal means.
pub(super) fn meaning(refusal: &str) -> Option<(ErrorKind, &'static str)> {
    let has = |code: &str| refusal.contains(code);
    if has("GatedRepo") {
        let what = "the data set is gated: ask for access on its page, then set HF_TOKEN to a token that has it";
        return Some((ErrorKind::PermissionDenied, what));
    }
    if has("RepoNotFound") {
        let what = "the data set does not exist, or is private and HF_TOKEN does not open it";
        return Some((ErrorKind::NotFound, what));
    }
    if has("RevisionNotFound") {
        return Some((ErrorKind::NotFound, "the data set has no such revision"));
    }
    if has("401 Unauthorized") {
        let what = "the Hub does not accept HF_TOKEN, or wants one for this data set";
        return Some((ErrorKind::PermissionDenied, what));
    }
    None
}

fn not_json(error: impl ToString) -> Error {
    let what = format!("the Hub's answer is not what its API gives: {}", error.to_string());
    Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(url: &str) -> Address {
        Address::parse(url).unwrap()
    }

    #[test]
    fn a_revision_is_part_of_every_url() {
        let hub = Hub::new("https://hub".into(), None, Duration::from_secs(1), false);
        let commit = "0123456789abcdef0123456789abcdef01234567";
        for (url, name, revision) in [
            ("hf://datasets/o/n/a b", "datasets/o/n", "main"),
            ("hf://datasets/o/n@v1/a b", "datasets/o/n", "v1"),
            (
                "hf://datasets/squad@refs%2Fconvert%2Fparquet/a b",
                "datasets/squad",
                "refs%2Fconvert%2Fparquet",
            ),
        ] {
            let file = format!("https://hub/{name}/resolve/{commit}/data/api/resolve/x");
            assert_eq!(hub.commit_of(&file).as_deref(), Some(commit));
            let asked = format!("https://hub/api/{name}/revision/{revision}");
            assert_eq!(hub.commit_of(&asked), None);
            assert_eq!(hub.revision(&at(url)), Some(asked));
            let pinned =
                Hub::pinned(&at(url), format!("{{\"sha\": {commit:?}}}").as_bytes()).unwrap();
            assert_eq!(pinned.to_string(), format!("hf://{name}@{commit}/a b"));
            assert_eq!(hub.revision(&pinned), None);
            assert_eq!(hub.files(&pinned), format!("https://hub/{name}/resolve/{commit}"));
            let tree = format!("https://hub/api/{name}/tree/{commit}");
            assert_eq!(hub.tree(&pinned).unwrap(), format!("{tree}/a%20b?recursive=true"));
            assert_eq!(hub.tree(&pinned.root()).unwrap(), format!("{tree}?recursive=true"));
        }
        for answer in ["", "{}", "{\"sha\": \"main\"}", "{\"sha\": \"../../x\"}"] {
            assert!(Hub::pinned(&at("hf://datasets/o/n/a"), answer.as_bytes()).is_err());
        }
    }

    #[test]
    fn a_page_names_the_next_one() {
        assert_eq!(
            next("<https://hub/x?a=1&b=2>; rel=\"next\""),
            Some("https://hub/x?a=1&b=2".into())
        );
        assert_eq!(next("<p>; rel=\"prev\", <n>; rel=\"next\""), Some("n".into()));
        assert_eq!(next("<p?a,b>; rel=\"prev\", <n?a=1,2>; rel=\"next\""), Some("n?a=1,2".into()));
        assert_eq!(next("<p>; rel=\"prev\""), None);
    }
}
