//! Tests the object reader against a server with injected failures.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use contract::Identity;
use object_store::aws::AmazonS3Builder;
use store::location::Address;
use tempfile::TempDir;

use super::cache::Cache;
use super::client::{Client, PutOutcome, TransferError};
use super::environment::BucketAccess;
use super::{BLOCK_BYTES, Reader, tag};

/// An object: its bytes, its tag, the second of its time.
type Stored = (Vec<u8>, String, u32);

/// A status, lines of the head, a body.
type Answer = (u16, String, Vec<u8>);

/// The server's objects and the requests it got.
#[derive(Default)]
struct State {
    objects: BTreeMap<String, Stored>,
    parts: BTreeMap<String, Vec<u8>>,
    asked: Vec<String>,
    /// How many GET answers of this object have a corrupted byte.
    spoil: usize,
    /// The server answers nothing.
    silent: bool,
    /// The server refuses parts.
    refuses_parts: bool,
    /// The answer to the end of an upload is lost, once.
    forgets_end: bool,
}

/// One bucket, `b`.
#[derive(Clone)]
struct Server(Arc<Mutex<State>>);

impl Server {
    /// The server, and a client with this timeout.
    fn new(timeout: Duration) -> (Server, Client) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Server(Arc::default());
        let shared = server.clone();
        std::thread::spawn(move || {
            let mut silenced = Vec::new();
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                match shared.state(|state| (state.silent, state.asked.push("?".into())).0) {
                    true => silenced.push(stream),
                    // A client that gives up early is expected.
                    false => drop(shared.serve(stream)),
                }
            }
        });
        let access = BucketAccess { timeout, plain_http: true };
        let settings = AmazonS3Builder::new()
            .with_endpoint(format!("http://127.0.0.1:{port}"))
            .with_access_key_id("test")
            .with_secret_access_key("test");
        let client = Client::with(access, Arc::new(move || settings.clone())).unwrap();
        (server, client)
    }

    fn state<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, key: &str, bytes: &[u8], tag: &str, second: u32) {
        let stored = (bytes.to_vec(), format!("\"{tag}\""), second);
        self.state(|state| state.objects.insert(key.to_owned(), stored));
    }

    /// How many requests began like this since the last call.
    fn asked(&self, begin: &str) -> usize {
        let asked = self.state(|state| std::mem::take(&mut state.asked));
        asked.iter().filter(|line| line.starts_with(begin)).count()
    }

    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            // A client that gave up before it asked has no line.
            let ended = reader.read_line(&mut line)? == 0;
            match line.trim_end() {
                "" if ended => return Ok(()),
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let head = |name: &str| {
            let named = |line: &&String| line.to_lowercase().starts_with(name);
            lines.iter().find(named).map(|line| line[name.len()..].trim().to_owned())
        };
        let mut body = vec![0; head("content-length:").map_or(0, |it| it.parse().unwrap())];
        reader.read_exact(&mut body)?;
        let line = lines.first().cloned().unwrap_or_default();
        let line = line.trim_end_matches(" HTTP/1.1").to_owned();
        let answer = self.state(|state| {
            state.asked.push(line.clone());
            state.answer(&line, &head, body)
        });
        let Some((status, more, body)) = answer else { return Ok(()) };
        let length = body.len();
        let head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\n{more}");
        let length = if line.starts_with("HEAD") {
            String::new()
        } else {
            format!("content-length: {length}\r\n")
        };
        stream.write_all(format!("{head}{length}\r\n").as_bytes())?;
        stream.write_all(&body)
    }
}

impl State {
    fn answer(
        &mut self,
        line: &str,
        head: &dyn Fn(&str) -> Option<String>,
        body: Vec<u8>,
    ) -> Option<Answer> {
        let (method, target) = line.split_once(' ').unwrap();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let key = path.strip_prefix("/b").unwrap().trim_start_matches('/').to_owned();
        let plain = |status: u16| Some((status, String::new(), Vec::new()));
        let xml = |text: String| Some((200, String::new(), text.into_bytes()));
        match method {
            "GET" if key.is_empty() => xml(self.list()),
            "GET" | "HEAD" => Some(self.get(method, &key, head)),
            "POST" if query.starts_with("uploads") => {
                self.parts.clear();
                xml("<X><UploadId>u</UploadId></X>".to_owned())
            }
            "PUT" if query.contains("partNumber") && self.refuses_parts => plain(403),
            "PUT" if query.contains("partNumber") => {
                self.parts.insert(query.to_owned(), body);
                Some((200, "etag: \"p\"\r\n".to_owned(), Vec::new()))
            }
            "POST" if self.parts.is_empty() => plain(404),
            "POST" => {
                let bytes = std::mem::take(&mut self.parts).into_values().flatten().collect();
                self.objects.insert(key, (bytes, "\"t-2\"".to_owned(), 1));
                if std::mem::take(&mut self.forgets_end) {
                    return None;
                }
                xml("<X><ETag>\"t-2\"</ETag></X>".to_owned())
            }
            "PUT" if self.objects.contains_key(&key) => plain(412),
            "PUT" => {
                let mut sum = tag::Md5Sum::default();
                sum.add(&body);
                let tag = format!("\"{}\"", sum.digits());
                self.objects.insert(key, (body, tag.clone(), 1));
                Some((200, format!("etag: {tag}\r\n"), Vec::new()))
            }
            _ => plain(204),
        }
    }

    fn list(&self) -> String {
        let entry = |(key, (bytes, tag, second)): (&String, &Stored)| {
            format!(
                "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:{second:02}.000Z</LastModified>\
                 <ETag>{tag}</ETag><Size>{}</Size></Contents>",
                bytes.len()
            )
        };
        let entries: String = self.objects.iter().map(entry).collect();
        format!("<ListBucketResult>{entries}</ListBucketResult>")
    }

    fn get(&mut self, method: &str, key: &str, head: &dyn Fn(&str) -> Option<String>) -> Answer {
        let plain = |status: u16| (status, String::new(), Vec::new());
        let Some((bytes, tag, second)) = self.objects.get(key) else { return plain(404) };
        if head("if-match:").is_some_and(|wanted| wanted != *tag) {
            return plain(412);
        }
        let mut more =
            format!("etag: {tag}\r\nlast-modified: Thu, 01 Jan 2026 00:00:{second:02} GMT\r\n");
        let all = bytes.len();
        let (mut bytes, mut status) = (bytes.clone(), 200);
        if let Some(range) = head("range:") {
            let (from, to) = range["bytes=".len()..].split_once('-').unwrap();
            let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
            (bytes, status) = (bytes[from..=to].to_vec(), 206);
            more += &format!("content-range: bytes {from}-{to}/{all}\r\n");
        }
        if method == "HEAD" {
            return (200, more + &format!("content-length: {all}\r\n"), Vec::new());
        }
        if self.spoil > 0 {
            self.spoil -= 1;
            bytes[0] ^= 1 << self.spoil;
        }
        (status, more, bytes)
    }
}

/// Tests that count requests use a long timeout, so that a slow machine causes no retry.
fn reader() -> (TempDir, Server, Reader) {
    patient(Duration::from_secs(120))
}

fn patient(timeout: Duration) -> (TempDir, Server, Reader) {
    let (folder, (server, client)) = (tempfile::tempdir().unwrap(), Server::new(timeout));
    let cache = |name: &str| Cache::at(folder.path().join(name), 1 << 30).unwrap();
    let (cache, identities) = (cache("copies"), cache("identities"));
    (folder, server, Reader { client, cache, identities })
}

fn place(key: &str) -> Address {
    Address::parse(&format!("s3://b/{key}")).unwrap()
}

/// The bytes of an object as commands read it: whole, and block by block.
fn read(reader: &Reader, key: &str) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
    let place = place(key);
    let about = reader.client.about(&place)?;
    let whole = std::fs::read(reader.fetch(&place, &about)?.path())?;
    let mut blocks = vec![0; about.bytes as usize];
    reader.read_at(&place, &mut blocks, 0)?;
    Ok((whole, blocks))
}

fn md5(bytes: &[u8]) -> String {
    let mut sum = tag::Md5Sum::default();
    sum.add(bytes);
    sum.digits()
}

#[test]
fn an_object_with_the_tag_of_another_is_read_anew() {
    let (_folder, server, reader) = reader();
    for (text, second) in [("one", 1), ("two", 2), ("three", 2)] {
        server.put("k", text.as_bytes(), "same", second);
        let bytes = text.as_bytes().to_vec();
        assert_eq!(read(&reader, "k").unwrap(), (bytes.clone(), bytes.clone()));
        server.asked("");
        assert_eq!(read(&reader, "k").unwrap(), (bytes.clone(), bytes));
        assert_eq!(server.asked("GET /b/k"), 0, "a copy is there");
    }
    // Replaced while it is read.
    let about = reader.client.about(&place("k")).unwrap();
    server.put("k", b"fours", "same", 3);
    let error = reader.client.range(&place("k"), &about, 0..5).unwrap_err();
    assert!(error.to_string().contains("changed while it was read"), "{error}");
}

#[test]
fn what_comes_otherwise_than_its_md5_is_fetched_once_more() {
    let (_folder, server, reader) = reader();
    let bytes = b"the bytes of an object";
    server.put("k", bytes, &md5(bytes), 1);
    let whole = |reader: &Reader, key: &str| {
        let about = reader.client.about(&place(key))?;
        std::fs::read(reader.fetch(&place(key), &about)?.path())
    };
    server.state(|state| state.spoil = 1);
    assert_eq!(whole(&reader, "k").unwrap(), bytes);
    // Two different answers: that is damage, and nothing is cached.
    reader.forget(&place("k"), &reader.client.about(&place("k")).unwrap());
    server.state(|state| state.spoil = 2);
    assert_eq!(whole(&reader, "k").unwrap_err().kind(), ErrorKind::InvalidData);
    assert_eq!(whole(&reader, "k").unwrap(), bytes);
    // A tag that only looks like one.
    server.put("other", bytes, &md5(b"other"), 1);
    assert_eq!(whole(&reader, "other").unwrap(), bytes);
}

#[test]
fn what_is_forgotten_is_fetched_again() {
    let (_folder, server, reader) = reader();
    let bytes = vec![7; BLOCK_BYTES as usize + 5];
    server.put("k", &bytes, "no-md5", 1);
    server.state(|state| state.spoil = 2);
    let (whole, blocks) = read(&reader, "k").unwrap();
    assert!(whole != bytes && blocks != bytes);
    reader.forget(&place("k"), &reader.client.seen(&place("k")).unwrap());
    assert_eq!(read(&reader, "k").unwrap(), (bytes.clone(), bytes));
}

/// A resumed build asks again for the digests of its inputs, whose copies may have been evicted.
#[test]
fn an_objects_identity_is_kept_longer_than_its_copy() {
    let (folder, server, reader) = reader();
    server.put("k", b"bytes", "tag", 1);
    let wanted = (5, Identity::of_bytes(b"bytes"));
    assert_eq!(reader.content(&place("k")).unwrap(), wanted);
    std::fs::remove_dir_all(folder.path().join("copies")).unwrap();
    server.asked("");
    assert_eq!(reader.content(&place("k")).unwrap(), wanted);
    assert_eq!(server.asked("GET"), 0);
    server.put("k", b"other", "tag", 2);
    std::fs::create_dir(folder.path().join("copies")).unwrap();
    assert_eq!(reader.content(&place("k")).unwrap().1, Identity::of_bytes(b"other"));
}

#[test]
fn a_list_has_what_addresses_name() {
    let (_folder, server, reader) = reader();
    for key in ["raw/a", "raw//b", "raw/", "raw/c/../d", "raw/e"] {
        server.put(key, b"", "tag", 1);
    }
    let found = reader.client.list(&place("raw")).unwrap();
    let names: Vec<_> = found.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(names, ["raw/a", "raw/e"]);
}

/// Takes three seconds: no shorter timeout can be set.
#[test]
fn a_silent_server_is_given_up_after_a_few_requests() {
    let (_folder, server, reader) = patient(Duration::from_secs(1));
    server.state(|state| state.silent = true);
    let error = reader.client.about(&place("k")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("requests failed"), "{error}");
    assert!(server.asked("?") <= 3);
}

#[test]
fn an_upload_that_fails_leaves_no_parts() {
    let (folder, server, reader) = reader();
    let (file, place) = (folder.path().join("file"), place("k"));
    std::fs::write(&file, [vec![1; 10], vec![2; 10], vec![3; 5]].concat()).unwrap();
    let upload = |part| reader.client.upload(&place, &file, part, &|_| ());
    server.state(|state| state.refuses_parts = true);
    assert!(matches!(upload(10), Err(TransferError::There(_))));
    assert_eq!(server.asked("DELETE /b/k?uploadId=u"), 1);
    server.state(|state| state.refuses_parts = false);
    // An upload whose completion answer is lost is complete.
    server.state(|state| state.forgets_end = true);
    upload(10).unwrap();
    assert_eq!(server.state(|state| state.objects["k"].0.clone()), std::fs::read(&file).unwrap());
    assert_eq!(server.asked("DELETE"), 0);
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(upload(10), Err(TransferError::Here(_))));
    assert_eq!(server.asked(""), 0);
}

#[test]
fn what_is_there_already_is_told_from_its_tag() {
    let (_folder, server, reader) = reader();
    let (client, place) = (&reader.client, place("k"));
    assert_eq!(client.create(&place, b"bytes").unwrap(), PutOutcome::Created);
    assert_eq!(client.create(&place, b"bytes").unwrap(), PutOutcome::Taken);
    let holds = |bytes: &'static [u8]| client.holds(&place, 5, || Ok(bytes)).unwrap();
    server.asked("");
    assert!(holds(b"bytes"));
    assert_eq!(server.asked("GET"), 0);
    assert!(!holds(b"other"));
    // Where the tag proves nothing, the bytes are compared.
    server.put("k", b"bytes", "no-md5", 2);
    assert!(holds(b"bytes") && !holds(b"other"));
    assert_eq!(server.asked("GET"), 3);
}
