//! Tests the object reader against a server with injected failures, over every kind of server.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Mutex;

use contract::Identity;
use store::location::{Address, IdentityKind, UrlScheme};
use store::regular;
use tempfile::TempDir;

use super::cache::Cache;
use super::client::{Client, PutOutcome, TransferError};
use super::standin::{COMMIT, StandIn};
use super::{BLOCK_BYTES, FETCHING, Reader, tag};
use crate::environment::Environment;

/// The kinds at which objects are created.
const WRITTEN: [UrlScheme; 3] = [UrlScheme::S3, UrlScheme::Gs, UrlScheme::Az];

/// The kinds that the stand-in serves.
const READ: [UrlScheme; 5] =
    [UrlScheme::S3, UrlScheme::Gs, UrlScheme::Az, UrlScheme::Http, UrlScheme::Hf];

/// A reader of one server, and the names of the objects there.
struct Bench {
    folder: TempDir,
    server: StandIn,
    reader: Reader,
    scheme: UrlScheme,
}

impl Bench {
    /// Tests that count requests use a long timeout, so that a slow machine causes no retry.
    fn of(scheme: UrlScheme) -> Bench {
        Bench::with(scheme, &[("ZDATA_TIMEOUT", "120")])
    }

    fn with(scheme: UrlScheme, more: &[(&str, &str)]) -> Bench {
        Bench::at(StandIn::new().unwrap(), scheme, more)
    }

    /// A new client of a server.
    fn at(server: StandIn, scheme: UrlScheme, more: &[(&str, &str)]) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let variables = server.variables();
        let variables = variables.iter().map(|(name, value)| (*name, value.as_str()));
        let all: Vec<_> = variables.chain(more.iter().copied()).collect();
        let client = Client::with(Environment::of(&all)).unwrap();
        let cache = |name: &str| Cache::at(folder.path().join(name), 1 << 30).unwrap();
        let (cache, identities) = (cache("copies"), cache("identities"));
        let fetching = [const { Mutex::new(()) }; FETCHING];
        Bench { folder, server, reader: Reader { client, cache, identities, fetching }, scheme }
    }

    /// Size and SHA-256 of an object.
    fn content(&self, place: &Address) -> (u64, Identity) {
        let of_bytes = |path: &Path| regular::open(path).and_then(regular::identity);
        self.reader.identity(place, IdentityKind::Whole, &of_bytes).unwrap()
    }

    fn place(&self, key: &str) -> Address {
        Address::parse(&self.server.url(self.scheme, key)).unwrap()
    }

    /// The bytes of an object as commands read it: whole, and block by block.
    fn read(&self, key: &str) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
        let place = self.place(key);
        let about = self.reader.client.about(&place)?;
        let whole = std::fs::read(self.reader.fetch(&place, &about)?.path())?;
        let mut blocks = vec![0; about.bytes as usize];
        self.reader.read_at(&place, &mut blocks, 0)?;
        Ok((whole, blocks))
    }
}

fn md5(bytes: &[u8]) -> String {
    let mut sum = tag::Md5Sum::default();
    sum.add(bytes);
    sum.digits()
}

#[test]
fn an_object_with_the_tag_of_another_is_read_anew() {
    for scheme in [UrlScheme::S3, UrlScheme::Gs, UrlScheme::Az, UrlScheme::Http] {
        let bench = Bench::of(scheme);
        let server = &bench.server;
        for (text, second) in [("one", 1), ("two", 2), ("three", 2)] {
            server.put("k", text.as_bytes(), "same", second);
            let bytes = text.as_bytes().to_vec();
            assert_eq!(bench.read("k").unwrap(), (bytes.clone(), bytes.clone()));
            server.asked("");
            assert_eq!(bench.read("k").unwrap(), (bytes.clone(), bytes));
            assert_eq!(server.asked("GET /b/k"), 0, "a copy is there");
        }
        // Replaced while it is read.
        let (client, place) = (&bench.reader.client, bench.place("k"));
        let about = client.about(&place).unwrap();
        for tag in ["same", "other"] {
            server.put("k", b"fours", tag, 3);
            let error = client.range(&place, &about, 0..5).unwrap_err();
            assert!(error.to_string().contains("changed while it was read"), "{error}");
        }
    }
}

#[test]
fn what_comes_otherwise_than_its_md5_is_fetched_once_more() {
    for scheme in READ.into_iter().filter(|scheme| *scheme != UrlScheme::Hf) {
        let bench = Bench::of(scheme);
        let (server, reader) = (&bench.server, &bench.reader);
        let bytes = b"the bytes of an object";
        server.put("k", bytes, &md5(bytes), 1);
        let whole = |key: &str| {
            let about = reader.client.about(&bench.place(key))?;
            std::fs::read(reader.fetch(&bench.place(key), &about)?.path())
        };
        server.state(|state| state.spoil = 1);
        assert_eq!(whole("k").unwrap(), bytes);
        // Two different answers: that is damage, and nothing is cached.
        reader.forget(&bench.place("k"), &reader.client.about(&bench.place("k")).unwrap());
        server.state(|state| state.spoil = 2);
        assert_eq!(whole("k").unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(whole("k").unwrap(), bytes);
        // A tag that only looks like one.
        server.put("other", bytes, &md5(b"other"), 1);
        assert_eq!(whole("other").unwrap(), bytes);
    }
}

#[test]
fn what_is_forgotten_is_fetched_again() {
    for scheme in READ {
        let bench = Bench::of(scheme);
        let bytes = vec![7; BLOCK_BYTES as usize + 5];
        bench.server.put("k", &bytes, "no-md5", 1);
        bench.server.state(|state| state.spoil = 2);
        let (whole, blocks) = bench.read("k").unwrap();
        assert!(whole != bytes && blocks != bytes);
        let (place, reader) = (bench.place("k"), &bench.reader);
        reader.forget(&place, &reader.client.seen(&place).unwrap());
        assert_eq!(bench.read("k").unwrap(), (bytes.clone(), bytes));
    }
}

/// A resumed build asks again for the digests of its inputs, whose copies may have been evicted.
#[test]
fn an_objects_identity_is_kept_longer_than_its_copy() {
    for scheme in READ {
        let bench = Bench::of(scheme);
        let (server, place) = (&bench.server, bench.place("k"));
        server.put("k", b"bytes", "tag", 1);
        let wanted = (5, Identity::of_bytes(b"bytes"));
        assert_eq!(bench.content(&place), wanted);
        // What is taken from its groups is another identity.
        let groups = Identity::of_bytes(b"groups");
        let of_groups = |_: &Path| Ok((5, groups));
        let found = bench.reader.identity(&place, IdentityKind::RowGroups, &of_groups);
        assert_eq!(found.unwrap(), (5, groups));
        assert_eq!(bench.content(&place), wanted);
        std::fs::remove_dir_all(bench.folder.path().join("copies")).unwrap();
        server.asked("");
        assert_eq!(bench.content(&place), wanted);
        assert_eq!(server.asked("GET /b/k"), 0);
        // A commit's files never change.
        if scheme == UrlScheme::Hf {
            continue;
        }
        server.put("k", b"other", "tag-2", 2);
        std::fs::create_dir(bench.folder.path().join("copies")).unwrap();
        assert_eq!(bench.content(&place).1, Identity::of_bytes(b"other"));
    }
}

/// One list names the objects and says what they are: no object is asked about by itself before it is read.
#[test]
fn a_list_has_what_addresses_name() {
    for scheme in READ.into_iter().filter(|scheme| scheme.lists()) {
        let bench = Bench::of(scheme);
        let (server, client) = (&bench.server, &bench.reader.client);
        let other = if scheme == UrlScheme::Hf { "raw/b" } else { "raw//b" };
        for key in ["raw/a", other, "raw/", "raw/c/../d", "raw/e f", "rawer", "raw/g%20h"] {
            server.put(key, key.as_bytes(), &md5(key.as_bytes()), 1);
        }
        let found = client.list(&bench.place("raw")).unwrap();
        let mut names: Vec<_> = found.iter().map(|(key, _)| key.as_str()).collect();
        names.retain(|name| *name != "raw/b");
        assert_eq!(names, ["raw/a", "raw/e f", "raw/g%20h"], "{scheme:?}");
        // Of the Hub: the revision, and pages of two files.
        let lists = if scheme == UrlScheme::Hf { 4 } else { 1 };
        assert_eq!(server.asked("GET"), lists, "{scheme:?}");
        for (key, size) in &found {
            assert_eq!(client.about(&bench.place(key)).unwrap().bytes, *size);
        }
        assert_eq!(server.asked("HEAD"), 0, "{scheme:?}");
        for (key, _) in &found {
            let bytes = key.as_bytes().to_vec();
            assert_eq!(bench.read(key).unwrap(), (bytes.clone(), bytes), "{scheme:?}");
        }
        // Every later look asks again.
        assert_eq!(server.asked("HEAD"), found.len());
        assert!(client.list(&bench.place("none")).unwrap().is_empty());
    }
}

/// Takes three seconds: no shorter timeout can be set.
#[test]
fn a_silent_server_is_given_up_after_a_few_requests() {
    std::thread::scope(|scope| {
        for scheme in READ {
            scope.spawn(move || {
                let bench = Bench::with(scheme, &[("ZDATA_TIMEOUT", "1")]);
                bench.server.state(|state| state.silent = true);
                let error = bench.reader.client.about(&bench.place("k")).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::TimedOut);
                assert!(error.to_string().contains("requests failed"), "{error}");
                assert!(bench.server.asked("?") <= 3);
            });
        }
    });
}

#[test]
fn an_upload_that_fails_leaves_no_parts() {
    for scheme in WRITTEN {
        let bench = Bench::of(scheme);
        let (server, place) = (&bench.server, bench.place("k"));
        let file = bench.folder.path().join("file");
        std::fs::write(&file, [vec![1; 10], vec![2; 10], vec![3; 5]].concat()).unwrap();
        let upload = |part| bench.reader.client.upload(&place, &file, part, &|_| ());
        // Azure forgets parts by itself.
        let aborted = usize::from(scheme != UrlScheme::Az);
        server.state(|state| state.refuses_parts = true);
        assert!(matches!(upload(10), Err(TransferError::There(_))));
        assert_eq!(server.asked("DELETE /b/k?uploadId=u"), aborted, "{scheme:?}");
        server.state(|state| state.refuses_parts = false);
        // Any answer may be lost, from that to the beginning to that to the end: the upload is complete.
        for forgets in 1..=5 {
            server.state(|state| state.objects.clear());
            server.state(|state| state.forgets = forgets);
            upload(10).unwrap();
            server.state(|state| state.forgets = 0);
            let found = server.state(|state| state.objects["k"].bytes.clone());
            assert_eq!(found, std::fs::read(&file).unwrap(), "{scheme:?}");
            assert_eq!(server.asked("DELETE"), 0);
        }
        std::fs::remove_file(&file).unwrap();
        assert!(matches!(upload(10), Err(TransferError::Here(_))));
        assert_eq!(server.asked(""), 0);
    }
}

#[test]
fn what_is_there_already_is_told_from_its_tag() {
    for scheme in WRITTEN {
        let bench = Bench::of(scheme);
        let (server, client, place) = (&bench.server, &bench.reader.client, bench.place("k"));
        assert_eq!(client.create(&place, b"bytes").unwrap(), PutOutcome::Created);
        assert_eq!(client.create(&place, b"bytes").unwrap(), PutOutcome::Taken);
        assert_eq!(client.create(&place, b"other").unwrap(), PutOutcome::Taken);
        let holds = |bytes: &'static [u8]| client.holds(&place, 5, || Ok(bytes)).unwrap();
        server.asked("");
        assert!(holds(b"bytes"));
        // Azure's tags are not made of the content.
        assert_eq!(server.asked("GET"), usize::from(scheme == UrlScheme::Az), "{scheme:?}");
        assert!(!holds(b"other"));
        server.asked("");
        // Where the tag proves nothing, the bytes are compared.
        server.put("k", b"bytes", "no-md5", 2);
        assert!(holds(b"bytes") && !holds(b"other"));
        assert_eq!(server.asked("GET"), 2);
    }
}

/// Of an object that is created, copied or removed, and whose answer is lost, the end is the same.
#[test]
fn a_change_whose_answer_is_lost_is_made_once() {
    for scheme in WRITTEN {
        let bench = Bench::of(scheme);
        let (server, client) = (&bench.server, &bench.reader.client);
        let (one, two) = (bench.place("a b/1"), bench.place("a b/2"));
        let keys = || server.state(|state| state.objects.keys().cloned().collect::<Vec<_>>());
        server.state(|state| state.forgets = 1);
        assert_eq!(client.create(&one, b"bytes").unwrap(), PutOutcome::Taken);
        assert!(client.holds(&one, 5, || Ok(&b"bytes"[..])).unwrap());
        // A copy within S3 is an upload of one part, whose end is known by the absence of its parts.
        if scheme != UrlScheme::S3 {
            server.state(|state| state.forgets = 1);
            assert_eq!(client.copy(&one, &two).unwrap(), PutOutcome::Taken);
            assert!(client.holds(&two, 5, || Ok(&b"bytes"[..])).unwrap());
            assert_eq!(client.copy(&one, &two).unwrap(), PutOutcome::Taken);
            assert_eq!(keys(), ["a b/1", "a b/2"]);
            client.remove(&two).unwrap();
        }
        server.state(|state| state.forgets = 1);
        client.remove(&one).unwrap();
        client.remove(&one).unwrap();
        assert!(keys().is_empty(), "{scheme:?}");
    }
}

#[test]
fn a_web_server_without_ranges_or_head_is_read_or_refused() {
    let bench = Bench::of(UrlScheme::Http);
    let (server, client) = (&bench.server, &bench.reader.client);
    server.put("a b", b"bytes", "tag", 1);
    let wanted = (b"bytes".to_vec(), b"bytes".to_vec());
    assert_eq!(bench.read("a%20b").unwrap(), wanted);
    server.state(|state| state.no_head = true);
    let anew = Bench::at(server.clone(), UrlScheme::Http, &[]);
    assert_eq!(anew.read("a%20b").unwrap(), wanted);
    server.put("none", b"", "tag", 1);
    assert_eq!(bench.read("none").unwrap(), (Vec::new(), Vec::new()));
    let list = client.list(&bench.place("a")).unwrap_err();
    assert_eq!(list.kind(), ErrorKind::Unsupported);
    server.state(|state| (state.no_head, state.no_size) = (false, true));
    let anew = Bench::at(server.clone(), UrlScheme::Http, &[]);
    assert_eq!(anew.read("a%20b").unwrap(), wanted);
    assert_eq!(anew.read("none").unwrap(), (Vec::new(), Vec::new()));
    server.state(|state| (state.no_size, state.untagged) = (false, true));
    let error = Bench::at(server.clone(), UrlScheme::Http, &[]).read("a%20b").unwrap_err();
    assert!(error.to_string().contains("neither a tag nor a time"), "{error}");
    server.state(|state| (state.untagged, state.whole_only) = (false, true));
    server.put("whole", b"bytes", "W/x", 1);
    let error = bench.read("whole").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("does not send parts"), "{error}");
}

#[test]
fn the_hubs_refusals_say_what_to_do() {
    let bench = Bench::of(UrlScheme::Hf);
    bench.server.put("data/a", b"bytes", "tag", 1);
    let pinned = bench.reader.client.pinned(&bench.place("data/a")).unwrap();
    assert_eq!(pinned.to_string(), format!("hf://datasets/o/b@{COMMIT}/data/a"));
    assert_eq!(bench.reader.client.about(&pinned).unwrap().bytes, 5);
    let other = Address::parse("hf://datasets/o/b@v2/data/a").unwrap();
    let told = bench.reader.client.about(&other).unwrap_err().to_string();
    assert!(told.contains("no such revision"), "{told}");
    let none = bench.reader.client.about(&bench.place("data/none")).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::NotFound);
    bench.server.state(|state| state.token = Some("secret".into()));
    for (token, word) in [("", "HF_TOKEN does not open it"), ("wrong", "gated"), ("secret", "")] {
        let more: &[_] = if token.is_empty() { &[] } else { &[("HF_TOKEN", token)] };
        let Bench { reader, .. } = &Bench::at(bench.server.clone(), UrlScheme::Hf, more);
        for place in [bench.place("data/a"), pinned.clone()] {
            match reader.client.about(&place) {
                Ok(about) => {
                    assert_eq!((token, about.bytes), ("secret", 5));
                    assert_eq!(reader.client.range(&place, &about, 0..5).unwrap(), b"bytes");
                }
                Err(error) => {
                    assert!(!word.is_empty() && error.to_string().contains(word), "{error}");
                }
            }
        }
    }
}
