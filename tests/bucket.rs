//! Buckets of real server processes, each behind a proxy that refuses, stalls, cuts and drops answers.
//!
//! S3 is moto (`s3.py`, in its own Python). Google Cloud Storage speaks the language of S3 with other words in its
//! heads: the proxy translates them for moto. Azure Blob Storage is Azurite (`azurite.py`).

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use contract::{Key, Purpose, draw};

use crate::python::{provision, skipped, tests_folder};
use crate::support::{Ran, Scratch, free_port, zdata_command};

/// Whose bucket it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cloud {
    S3,
    Gs,
    Az,
}

impl Cloud {
    pub(crate) const ALL: [Cloud; 3] = [Cloud::S3, Cloud::Gs, Cloud::Az];

    /// The URL of an object or of a folder in the bucket.
    pub(crate) fn url(self, key: &str) -> String {
        let scheme = match self {
            Cloud::S3 => "s3",
            Cloud::Gs => "gs",
            Cloud::Az => "az",
        };
        format!("{scheme}://bucket/{key}")
    }
}

/// How the proxy treats a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Passes it on.
    None,
    /// Answers 503 without asking the server.
    Refuse,
    /// Does not answer for longer than any timeout.
    Stall,
    /// The server executes it, but the answer is lost.
    Forget,
    /// The server executes it, but half of the answer is lost.
    Cut,
}

/// How often each was applied.
#[derive(Default)]
pub(crate) struct Counts([AtomicU64; 5]);

/// A server with a proxy in front.
pub(crate) struct Bucket {
    child: Child,
    proxy: u16,
    counts: Arc<Counts>,
    pub(crate) cloud: Cloud,
    pub(crate) cache: std::path::PathBuf,
    /// Seconds that a command waits for an answer: enough for a busy machine, but not for a stalled request.
    timeout: &'static str,
}

impl Drop for Bucket {
    fn drop(&mut self) {
        // The server exits when its input closes; a failing test must not wait for that.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Bucket {
    /// Serves the files of `folder` in an S3, with trouble in `per_mille` of a thousand requests.
    pub(crate) fn serve(scratch: &Scratch, folder: &Path, per_mille: u64) -> Option<Bucket> {
        Bucket::of(Cloud::S3, scratch, folder, per_mille)
    }

    /// The same in any cloud.
    pub(crate) fn of(
        cloud: Cloud,
        scratch: &Scratch,
        folder: &Path,
        per_mille: u64,
    ) -> Option<Bucket> {
        let (python, program) = match cloud {
            Cloud::Az => (Ok("python3".into()), "azurite.py"),
            Cloud::S3 | Cloud::Gs => (provision("s3.txt"), "s3.py"),
        };
        let started = python.and_then(|python| {
            let mut command = Command::new(python);
            command.arg(tests_folder().join(program)).arg(folder).stderr(Stdio::null());
            if let Cloud::Az = cloud {
                command.arg(free_port().to_string());
            }
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            match line.trim().parse::<u16>() {
                Ok(port) => Ok((child, port)),
                Err(_) => match child.wait().unwrap().code() {
                    Some(77) => Err(format!("{program} --install was not run, or could not")),
                    code => panic!("{program} does not say its port: {line:?}, exit {code:?}"),
                },
            }
        });
        let (child, server) = match started {
            Ok(started) => started,
            Err(why) => {
                skipped(&format!("object storage ({cloud:?})"), &why);
                return None;
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = listener.local_addr().unwrap().port();
        let counts = Arc::new(Counts::default());
        let shared = Arc::clone(&counts);
        std::thread::spawn(move || {
            for (number, client) in (0u64..).zip(listener.incoming()) {
                let (Ok(client), shared) = (client, Arc::clone(&shared)) else { return };
                std::thread::spawn(move || {
                    let trouble = trouble(number, per_mille);
                    shared.0[trouble as usize].fetch_add(1, Ordering::Relaxed);
                    // Clients may give up: ignore errors.
                    let _ = relay(client, server, trouble, cloud);
                });
            }
        });
        let timeout = if per_mille == 0 { "60" } else { "4" };
        Some(Bucket { child, proxy, counts, cloud, cache: scratch.path("cache"), timeout })
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        self.reached_by(zdata_command(args))
    }

    /// A command with the server's address in its environment.
    pub(crate) fn reached_by(&self, mut command: Command) -> Command {
        let endpoint = format!("http://127.0.0.1:{}", self.proxy);
        match self.cloud {
            Cloud::S3 => command
                .env("AWS_ENDPOINT_URL", endpoint)
                .env("AWS_ACCESS_KEY_ID", "test")
                .env("AWS_SECRET_ACCESS_KEY", "test")
                .env("AWS_REGION", "us-east-1"),
            Cloud::Gs => command.env("STORAGE_EMULATOR_HOST", endpoint),
            Cloud::Az => command
                .env("AZURE_STORAGE_USE_EMULATOR", "true")
                .env("AZURITE_BLOB_STORAGE_URL", endpoint),
        };
        command.env("ZDATA_CACHE", &self.cache).env("ZDATA_TIMEOUT", self.timeout);
        command
    }

    /// The URL of an object or of a folder in it.
    pub(crate) fn url(&self, key: &str) -> String {
        self.cloud.url(key)
    }

    pub(crate) fn zdata(&self, args: &[&str]) -> Ran {
        self.command(args).output().unwrap().into()
    }

    /// The objects below `place`, by relative name, as the server itself lists them.
    pub(crate) fn objects(&self, place: &str) -> BTreeMap<String, Vec<u8>> {
        // Requests of a killed process may complete after its end: an object listed may then be removed, so try again.
        (0..100).find_map(|_| self.listed(place)).unwrap()
    }

    /// The same; `None` if an object is removed meanwhile.
    fn listed(&self, place: &str) -> Option<BTreeMap<String, Vec<u8>>> {
        let (bucket, query, whole, tag) = match self.cloud {
            Cloud::Az => {
                let bucket = "/devstoreaccount1/bucket";
                (bucket, "restype=container&comp=list", "<NextMarker/>", "Name")
            }
            _ => ("/bucket", "list-type=2", "<IsTruncated>false</IsTruncated>", "Key"),
        };
        let list = self.get(&format!("{bucket}?{query}&prefix={place}/"))?;
        let list = String::from_utf8(list).unwrap();
        assert!(list.contains(whole), "{list}");
        let begin = format!("<{tag}>");
        let keys = list.split(&begin).skip(1);
        let keys = keys.map(|rest| rest.split("</").next().unwrap());
        let read = |key: &str| {
            let name = key.strip_prefix(place).unwrap().trim_start_matches('/').to_owned();
            Some((name, self.get(&format!("{bucket}/{key}"))?))
        };
        keys.map(read).collect()
    }

    /// The body of the answer to a request, which the server accepts without checking the signature; `None` if nothing
    /// exists.
    fn get(&self, path: &str) -> Option<Vec<u8>> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.proxy)).unwrap();
        let name = match self.cloud {
            // Everybody may read there.
            Cloud::Az => "x-ms-version: 2021-08-06".to_owned(),
            _ => format!("authorization: {UNCHECKED}"),
        };
        let head = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{name}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        if answer.starts_with(b"HTTP/1.1 404 ") {
            return None;
        }
        assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        Some(answer.split_off(end + 4))
    }

    pub(crate) fn seen(&self, trouble: Trouble) -> u64 {
        self.counts.0[trouble as usize].load(Ordering::Relaxed)
    }
}

fn trouble(number: u64, per_mille: u64) -> Trouble {
    use Trouble::{Cut, Forget, None, Refuse, Stall};
    let kinds = [Refuse, Forget, Cut, Stall, Refuse, Forget, Cut, Refuse];
    let lot = draw(Key::from_seed(9), Purpose::Generate, number);
    if lot % 1000 < per_mille { kinds[(lot / 1000 % 8) as usize] } else { None }
}

/// What moto takes for a signature, which it does not check.
const UNCHECKED: &str = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";

/// A line of a head in Google's words, in those of S3.
fn translated(line: &str) -> String {
    let Some((name, value)) = line.split_once(':') else { return line.to_owned() };
    match name.to_lowercase().as_str() {
        "authorization" => format!("authorization: {UNCHECKED}\r\n"),
        "x-goog-if-generation-match" => "if-none-match: *\r\n".to_owned(),
        "x-goog-copy-source" => format!("x-amz-copy-source:{value}"),
        _ => line.to_owned(),
    }
}

/// Passes one request on and its answer back; every connection has one request.
fn relay(
    mut client: TcpStream,
    server: u16,
    trouble: Trouble,
    cloud: Cloud,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let (mut head, mut length, mut line) = (String::new(), 0, String::new());
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let lower = line.to_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if line == "\r\n" {
            break;
        }
        if !lower.starts_with("connection:") {
            head += &if cloud == Cloud::Gs { translated(&line) } else { line.clone() };
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    match trouble {
        Trouble::Refuse => {
            let answer = "HTTP/1.1 503 Slow Down\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
            return client.write_all(answer.as_bytes());
        }
        Trouble::Stall => {
            std::thread::sleep(Duration::from_millis(4500));
            return Ok(());
        }
        _ => {}
    }
    // S3 checks the condition of a completion and completes atomically; this server does other things in between. So it
    // gets one completion at a time.
    static COMPLETION: Mutex<()> = Mutex::new(());
    let completes = head.starts_with("POST ") && head.contains("uploadId=");
    let _one = completes.then(|| COMPLETION.lock().unwrap_or_else(PoisonError::into_inner));
    // Its copies have no condition, and Google's have.
    let copies = cloud == Cloud::Gs && head.contains("x-amz-copy-source:");
    let _copy = copies.then(|| COMPLETION.lock().unwrap_or_else(PoisonError::into_inner));
    if copies && head.contains("if-none-match:") && exists(&head, server)? {
        let answer = "HTTP/1.1 412 Taken\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        return client.write_all(answer.as_bytes());
    }
    let mut upstream = TcpStream::connect(("127.0.0.1", server))?;
    upstream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes())?;
    upstream.write_all(&body)?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    match trouble {
        Trouble::Forget => Ok(()),
        Trouble::Cut => client.write_all(&answer[..answer.len() / 2]),
        _ => client.write_all(&answer),
    }
}

/// Whether there is an object where this request puts one.
fn exists(head: &str, server: u16) -> std::io::Result<bool> {
    let path = head.split(' ').nth(1).unwrap_or_default();
    let mut upstream = TcpStream::connect(("127.0.0.1", server))?;
    let asked = format!(
        "HEAD {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: {UNCHECKED}\r\nconnection: close\r\n\r\n"
    );
    upstream.write_all(asked.as_bytes())?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    Ok(answer.starts_with(b"HTTP/1.1 200 "))
}
