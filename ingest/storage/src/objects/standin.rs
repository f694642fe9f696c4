//! A server that stands in for all kinds of places in tests: it speaks as much of S3, Google Cloud Storage, Azure Blob
//! Storage, plain HTTP and the Hugging Face Hub as our requests need, counts them, and fails as it is set to.
//!
//! It has one bucket, `b`, in memory. To the Hub's clients that is the data set `o/b`, with one commit.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use store::location::UrlScheme;

use super::tag;

/// The commit of the data set.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// An object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredObject {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its tag, in quotes.
    pub tag: String,
    /// The second of its time.
    pub second: u32,
}

/// A status, lines of the head, a body.
type Answer = (u16, String, Vec<u8>);

/// A request: its method, its path without escapes, its query, the lines of its head, its body.
struct Asked {
    method: String,
    path: String,
    query: String,
    head: Vec<String>,
    body: Vec<u8>,
}

impl Asked {
    fn head(&self, name: &str) -> Option<String> {
        let named = |line: &&String| line.to_lowercase().starts_with(&format!("{name}:"));
        self.head.iter().find(named).map(|line| line[name.len() + 1..].trim().to_owned())
    }

    fn asks(&self, part: &str) -> bool {
        self.query.split('&').any(|found| found == part || found.split('=').next() == Some(part))
    }

    /// Whether the object must not exist, in any of the dialects.
    fn creates(&self) -> bool {
        self.head("if-none-match").is_some_and(|it| it == "*")
            || self.head("x-goog-if-generation-match").is_some_and(|it| it == "0")
    }
}

/// The server's objects, the requests it got, and how it fails.
#[derive(Default)]
pub struct ServerState {
    /// The objects by their keys.
    pub objects: BTreeMap<String, StoredObject>,
    /// Parts of uploads that are not complete.
    parts: BTreeMap<String, Vec<u8>>,
    /// The first lines of requests, without the version of HTTP.
    pub asked: Vec<String>,
    /// How many GET answers with bytes of an object have a corrupted byte.
    pub spoil: usize,
    /// The server answers nothing.
    pub silent: bool,
    /// The server refuses parts.
    pub refuses_parts: bool,
    /// The answer to this one of the requests that change something, counted down, is lost after it took effect.
    pub forgets: usize,
    /// The server does not serve ranges.
    pub whole_only: bool,
    /// The server does not answer HEAD.
    pub no_head: bool,
    /// The server says 0 for the size in every answer to HEAD.
    pub no_size: bool,
    /// The server gives neither tag nor time.
    pub untagged: bool,
    /// The token without which the Hub refuses the data set, and which no other server may be sent.
    pub token: Option<String>,
}

/// The server.
#[derive(Clone)]
pub struct StandIn {
    state: Arc<Mutex<ServerState>>,
    port: u16,
}

impl StandIn {
    /// A new server without objects.
    ///
    /// # Errors
    ///
    /// If the machine has no port for it.
    pub fn new() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let server = StandIn { state: Arc::default(), port };
        let shared = server.clone();
        std::thread::spawn(move || {
            let mut silenced = Vec::new();
            for stream in listener.incoming().flatten() {
                match shared.state(|state| (state.silent, state.asked.push("?".into())).0) {
                    true => silenced.push(stream),
                    false => {
                        let shared = shared.clone();
                        // A client that gives up early is expected.
                        std::thread::spawn(move || drop(shared.serve(stream)));
                    }
                }
            }
        });
        Ok(server)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The variables by which its clients find it.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let url = format!("http://127.0.0.1:{}", self.port);
        vec![
            ("AWS_ENDPOINT_URL", url.clone()),
            ("AWS_ACCESS_KEY_ID", "test".into()),
            ("AWS_SECRET_ACCESS_KEY", "test".into()),
            ("AWS_REGION", "us-east-1".into()),
            ("STORAGE_EMULATOR_HOST", url.clone()),
            ("AZURE_STORAGE_ACCOUNT_NAME", "test".into()),
            ("AZURE_STORAGE_ACCOUNT_KEY", "dGVzdA==".into()),
            ("AZURE_STORAGE_ENDPOINT", url.clone()),
            ("HF_ENDPOINT", url),
        ]
    }

    /// The URL of an object for clients of a kind.
    pub fn url(&self, scheme: UrlScheme, key: &str) -> String {
        let prefix = scheme.prefix();
        match scheme {
            UrlScheme::Hf => format!("{prefix}datasets/o/b/{key}"),
            UrlScheme::Http | UrlScheme::Https => {
                format!("{prefix}127.0.0.1:{}/b/{key}", self.port)
            }
            UrlScheme::S3 | UrlScheme::Gs | UrlScheme::Az => format!("{prefix}b/{key}"),
        }
    }

    /// Reads or changes its state.
    pub fn state<T>(&self, act: impl FnOnce(&mut ServerState) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts an object.
    pub fn put(&self, key: &str, bytes: &[u8], tag: &str, second: u32) {
        let object = StoredObject { bytes: bytes.to_vec(), tag: format!("\"{tag}\""), second };
        self.state(|state| state.objects.insert(key.to_owned(), object));
    }

    /// How many requests began like this since the last call.
    pub fn asked(&self, begin: &str) -> usize {
        let asked = self.state(|state| std::mem::take(&mut state.asked));
        asked.iter().filter(|line| line.starts_with(begin)).count()
    }

    fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            // A client that gave up before it asked has no line.
            let ended = reader.read_line(&mut line)? == 0;
            match line.trim_end() {
                "" if ended => return Ok(()),
                "" => break,
                line => head.push(line.to_owned()),
            }
        }
        let first = if head.is_empty() { String::new() } else { head.remove(0) };
        let first = first.trim_end_matches(" HTTP/1.1").to_owned();
        let (method, target) = first.split_once(' ').unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut asked = Asked {
            method: method.to_owned(),
            path: unescaped(path),
            query: query.to_owned(),
            head,
            body: Vec::new(),
        };
        let length = asked.head("content-length").and_then(|it| it.parse().ok());
        asked.body.resize(length.unwrap_or(0), 0);
        reader.read_exact(&mut asked.body)?;
        let answer = self.state(|state| {
            state.asked.push(format!("{method} {}", unescaped(target)));
            let answer = state.answer(&asked);
            let changes = !matches!(method, "GET" | "HEAD");
            let forgets = changes && state.forgets == 1;
            state.forgets = state.forgets.saturating_sub(usize::from(changes));
            (!forgets).then_some(answer)
        });
        let Some((status, mut more, body)) = answer else { return Ok(()) };
        if method != "HEAD" {
            let _ = write!(more, "content-length: {}\r\n", body.len());
        }
        let head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\n{more}\r\n");
        stream.write_all(head.as_bytes())?;
        stream.write_all(if method == "HEAD" { &[] } else { &body })
    }
}

impl ServerState {
    fn answer(&mut self, asked: &Asked) -> Answer {
        let path = asked.path.strip_prefix('/').unwrap_or_default();
        if let Some(api) = path.strip_prefix("api/datasets/o/b/") {
            return self.hub(asked, api);
        }
        if let Some(file) = path.strip_prefix("datasets/o/b/resolve/") {
            return self.redirect(asked, file);
        }
        let Some(key) = path.strip_prefix('b') else { return empty(404) };
        if self.token.is_some() && asked.head("authorization").is_some() {
            return empty(400);
        }
        let key = key.trim_start_matches('/').to_owned();
        if asked.head("x-ms-version").is_some()
            && let Some(answer) = self.azure(asked, &key)
        {
            return answer;
        }
        self.s3(asked, key)
    }

    /// What S3 and Google Cloud Storage have in common, and the reading of objects everywhere.
    fn s3(&mut self, asked: &Asked, key: String) -> Answer {
        match asked.method.as_str() {
            "GET" if key.is_empty() => (200, String::new(), self.list(asked).into_bytes()),
            "HEAD" if self.no_head => empty(405),
            "GET" | "HEAD" => self.get(asked, &key),
            "POST" if asked.asks("uploads") => {
                self.parts.clear();
                (200, String::new(), b"<X><UploadId>u</UploadId></X>".to_vec())
            }
            "PUT" if asked.asks("partNumber") => self.put_part(asked.query.clone(), asked),
            "POST" if asked.asks("uploadId") && self.parts.is_empty() => empty(404),
            "POST" if asked.asks("uploadId") => {
                if asked.creates() && self.objects.contains_key(&key) {
                    return empty(412);
                }
                let bytes = std::mem::take(&mut self.parts).into_values().flatten().collect();
                self.insert(&key, bytes, "t-2");
                (200, String::new(), b"<X><ETag>\"t-2\"</ETag></X>".to_vec())
            }
            "PUT" if asked.creates() && self.objects.contains_key(&key) => empty(412),
            "PUT" => {
                let from = asked.head("x-goog-copy-source").map(|from| unescaped(&from));
                let from = from.map(|from| from.trim_start_matches("b/").to_owned());
                let bytes = match from.map(|from| self.objects.get(&from).cloned()) {
                    Some(None) => return empty(404),
                    Some(Some(object)) => object.bytes,
                    None => asked.body.clone(),
                };
                self.insert(&key, bytes, "")
            }
            "POST" if asked.asks("delete") => {
                let named = String::from_utf8_lossy(&asked.body).into_owned();
                let keys = named.split("<Key>").skip(1).filter_map(|it| it.split("</Key>").next());
                let removed = |key| {
                    self.objects.remove(key);
                    format!("<Deleted><Key>{key}</Key></Deleted>")
                };
                let removed: String = keys.map(removed).collect();
                (200, String::new(), format!("<DeleteResult>{removed}</DeleteResult>").into_bytes())
            }
            "DELETE" if asked.asks("uploadId") => empty(204),
            "DELETE" if self.objects.remove(&key).is_none() => empty(404),
            _ => empty(204),
        }
    }

    /// What Azure does otherwise.
    fn azure(&mut self, asked: &Asked, key: &str) -> Option<Answer> {
        let taken = |state: &ServerState| asked.creates() && state.objects.contains_key(key);
        Some(match asked.method.as_str() {
            "PUT" if asked.asks("comp=block") => {
                let id = asked.query.split('&').find_map(|part| part.strip_prefix("blockid="));
                self.put_part(unescaped(id?), asked)
            }
            "PUT" if asked.asks("comp=blocklist") => {
                let list = String::from_utf8_lossy(&asked.body).into_owned();
                let ids = list.split("<Uncommitted>").skip(1).filter_map(|it| it.split('<').next());
                let parts: Option<Vec<_>> = ids.map(|id| self.parts.remove(id)).collect();
                match parts {
                    Some(parts) => self.insert(key, parts.concat(), "0x8D"),
                    None => (400, String::new(), b"<Code>InvalidBlockList</Code>".to_vec()),
                }
            }
            "PUT" if taken(self) => {
                (409, String::new(), b"<Code>BlobAlreadyExists</Code>".to_vec())
            }
            "PUT" => {
                let source = asked.head("x-ms-copy-source").map(|source| unescaped(&source));
                let source = source.map(|it| it.split_once("/b/").unwrap_or_default().1.to_owned());
                let bytes = match source.map(|source| self.objects.get(&source).cloned()) {
                    Some(None) => return Some(empty(404)),
                    Some(Some(object)) => object.bytes,
                    None => asked.body.clone(),
                };
                self.insert(key, bytes, "0x8D")
            }
            "POST" if asked.asks("comp=batch") => {
                let lines = String::from_utf8_lossy(&asked.body).into_owned();
                let deleted = lines.lines().find_map(|line| line.strip_prefix("DELETE "));
                let path = unescaped(deleted?.split(' ').next()?);
                let key = path.trim_start_matches('/').trim_start_matches("b/");
                let status = if self.objects.remove(key).is_some() { 202 } else { 404 };
                let body = format!(
                    "--x\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 {status} x\r\n\r\n\r\n--x--\r\n"
                );
                (202, "content-type: multipart/mixed; boundary=x\r\n".into(), body.into_bytes())
            }
            _ => return None,
        })
    }

    fn put_part(&mut self, name: String, asked: &Asked) -> Answer {
        if self.refuses_parts {
            return empty(403);
        }
        self.parts.insert(name, asked.body.clone());
        (201, "etag: \"p\"\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n".into(), Vec::new())
    }

    /// Puts an object; without a tag, that of its MD5.
    fn insert(&mut self, key: &str, bytes: Vec<u8>, tag: &str) -> Answer {
        let mut sum = tag::Md5Sum::default();
        sum.add(&bytes);
        let tag = if tag.is_empty() { sum.digits() } else { tag.to_owned() };
        let tag = format!("\"{tag}\"");
        let head = format!("etag: {tag}\r\nlast-modified: Thu, 01 Jan 2026 00:00:01 GMT\r\n");
        self.objects.insert(key.to_owned(), StoredObject { bytes, tag, second: 1 });
        (201, head, Vec::new())
    }

    fn list(&self, asked: &Asked) -> String {
        let prefix = asked.query.split('&').find_map(|part| part.strip_prefix("prefix="));
        let prefix = unescaped(prefix.unwrap_or_default());
        let mut list = String::new();
        for (key, object) in self.objects.iter().filter(|(key, _)| key.starts_with(&prefix)) {
            let (size, second, tag) = (object.bytes.len(), object.second, &object.tag);
            let _ = match asked.asks("comp=list") {
                // Tags have no quotes there.
                true => write!(
                    list,
                    "<Blob><Name>{key}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:{second:02} \
                     GMT</Last-Modified><Etag>{}</Etag><Content-Length>{size}</Content-Length>\
                     <Content-Type>x</Content-Type></Properties></Blob>",
                    tag.trim_matches('"')
                ),
                // Times have more digits than in answers there.
                false => write!(
                    list,
                    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:{second:02}.789Z</LastModified>\
                     <ETag>{tag}</ETag><Size>{size}</Size></Contents>"
                ),
            };
        }
        match asked.asks("comp=list") {
            true => format!("<X><Blobs>{list}</Blobs><NextMarker/></X>"),
            false => format!("<ListBucketResult>{list}</ListBucketResult>"),
        }
    }

    fn get(&mut self, asked: &Asked, key: &str) -> Answer {
        let Some(StoredObject { bytes, tag, second }) = self.objects.get(key) else {
            return empty(404);
        };
        if asked.head("if-match").is_some_and(|wanted| wanted != *tag) {
            return empty(412);
        }
        let mut more =
            format!("etag: {tag}\r\nlast-modified: Thu, 01 Jan 2026 00:00:{second:02} GMT\r\n");
        if self.untagged {
            more.clear();
        }
        let all = bytes.len();
        let (mut bytes, mut status) = (bytes.clone(), 200);
        if let Some(range) = asked.head("range").filter(|_| !self.whole_only) {
            let ends = range.trim_start_matches("bytes=").split_once('-').unwrap_or_default();
            let (Ok(from), Ok(to)) = (ends.0.parse::<usize>(), ends.1.parse::<usize>()) else {
                return empty(400);
            };
            let Some(piece) = bytes.get(from..=to) else {
                return (416, format!("content-range: bytes */{all}\r\n"), Vec::new());
            };
            (bytes, status) = (piece.to_vec(), 206);
            let _ = write!(more, "content-range: bytes {from}-{to}/{all}\r\n");
        }
        if asked.method == "HEAD" {
            let said = if self.no_size { 0 } else { all };
            return (200, more + &format!("content-length: {said}\r\n"), Vec::new());
        }
        if self.spoil > 0 {
            self.spoil -= 1;
            bytes[0] ^= 1 << self.spoil;
        }
        (status, more, bytes)
    }

    /// The Hub's API: a revision, and the tree of the commit in pages of two files.
    fn hub(&self, asked: &Asked, api: &str) -> Answer {
        if let Some(refusal) = self.closed(asked) {
            return refusal;
        }
        if let Some(revision) = api.strip_prefix("revision/") {
            return match revision {
                "main" | "v1" => {
                    (200, String::new(), format!("{{\"sha\": {COMMIT:?}}}").into_bytes())
                }
                _ => refused_by_hub(404, "RevisionNotFound"),
            };
        }
        let Some(folder) = api.strip_prefix(&format!("tree/{COMMIT}")) else { return empty(404) };
        let folder = folder.trim_start_matches('/');
        let within = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let found: Vec<_> =
            self.objects.iter().filter(|(key, _)| key.starts_with(&within)).collect();
        if found.is_empty() && !folder.is_empty() {
            return refused_by_hub(404, "EntryNotFound");
        }
        let at = asked.query.split('&').find_map(|part| part.strip_prefix("cursor=")?.parse().ok());
        let at: usize = at.unwrap_or(0);
        let entry = |(key, object): &(&String, &StoredObject)| {
            let (tag, size) = (object.tag.trim_matches('"'), object.bytes.len());
            format!("{{\"type\": \"file\", \"path\": {key:?}, \"size\": {size}, \"oid\": {tag:?}}}")
        };
        let mut entries =
            vec!["{\"type\": \"directory\", \"path\": \"x\", \"oid\": \"d\"}".to_owned()];
        entries.extend(found.iter().skip(at).take(2).map(entry));
        let mut more = String::new();
        if at + 2 < found.len() {
            let host = asked.head("host").unwrap_or_default();
            let next = format!("http://{host}{}?recursive=true&cursor={}", asked.path, at + 2);
            more = format!("link: <{next}>; rel=\"next\"\r\n");
        }
        (200, more, format!("[{}]", entries.join(", ")).into_bytes())
    }

    /// The Hub's file: a redirect to where its bytes are, which has tags of its own.
    fn redirect(&self, asked: &Asked, file: &str) -> Answer {
        if let Some(refusal) = self.closed(asked) {
            return refusal;
        }
        let Some(key) = file.strip_prefix(&format!("{COMMIT}/")) else {
            return refused_by_hub(404, "RevisionNotFound");
        };
        let Some(object) = self.objects.get(key) else {
            return refused_by_hub(404, "EntryNotFound");
        };
        // The other server is another host to clients, to which they send no token.
        let port = asked.head("host").unwrap_or_default().replace("127.0.0.1", "localhost");
        let (tag, size) = (&object.tag, object.bytes.len());
        let key = key.replace('%', "%25").replace(' ', "%20");
        let head = format!(
            "location: http://{port}/b/{key}\r\nx-linked-etag: {tag}\r\nx-linked-size: {size}\r\n"
        );
        (302, head, Vec::new())
    }

    /// The Hub's refusal of who has no token that it wants.
    fn closed(&self, asked: &Asked) -> Option<Answer> {
        let token = self.token.as_ref()?;
        let sent = asked.head("authorization");
        if sent == Some(format!("Bearer {token}")) {
            return None;
        }
        let (status, code) =
            if sent.is_some() { (403, "GatedRepo") } else { (401, "RepoNotFound") };
        Some(refused_by_hub(status, code))
    }
}

fn empty(status: u16) -> Answer {
    (status, String::new(), Vec::new())
}

fn refused_by_hub(status: u16, code: &str) -> Answer {
    (status, format!("x-error-code: {code}\r\nx-error-message: no\r\n"), Vec::new())
}

/// A path or a query without its percent escapes.
fn unescaped(text: &str) -> String {
    let (mut bytes, mut at) = (Vec::new(), 0);
    while at < text.len() {
        let code = text.get(at + 1..at + 3).and_then(|code| u8::from_str_radix(code, 16).ok());
        match (text.as_bytes()[at], code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                at += 3;
            }
            (byte, _) => {
                bytes.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
