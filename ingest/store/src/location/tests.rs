//! Addresses and names against their rules, and objects against files, in an in-memory bucket.

use contract::Class;
use proptest::prelude::*;

use super::memory::Memory;
use super::*;

/// The location of a URL in a new bucket.
fn object(url: &str) -> Location {
    Memory::default().holding(url)
}

#[test]
fn an_address_has_one_spelling() {
    for (url, bucket, key) in [
        ("s3://b/key", "b", "key"),
        ("s3://Old_b.1-2/key", "Old_b.1-2", "key"),
        ("s3://b/a/b c/100%/d%20e.jsonl", "b", "a/b c/100%/d%20e.jsonl"),
        ("s3://b/folder/", "b", "folder"),
        ("s3://b/..a/.b/c..", "b", "..a/.b/c.."),
        ("gs://Old_b.1-2/key", "Old_b.1-2", "key"),
        ("az://b/a/b c/", "b", "a/b c"),
        ("https://example.org:8443/a%20b/c.gz", "example.org:8443", "a%20b/c.gz"),
        ("http://127.0.0.1:9000/a", "127.0.0.1:9000", "a"),
        ("http://[::1]/a", "[::1]", "a"),
        ("hf://datasets/o/n/a/b c", "datasets/o/n", "a/b c"),
        ("hf://datasets/o/n@v1.0/a", "datasets/o/n@v1.0", "a"),
        ("hf://datasets/squad@refs%2Fpr%2F1/a/b", "datasets/squad@refs%2Fpr%2F1", "a/b"),
    ] {
        let address = Address::parse(url).unwrap();
        assert_eq!((address.bucket(), address.key()), (bucket, key), "{url}");
        assert_eq!(Address::parse(&address.to_string()).unwrap(), address);
    }
    for url in [
        "",
        "s3:",
        "s3://",
        "s3:///",
        "s3:///key",
        "s3://b",
        "s3://b/",
        "s3://b//",
        "s3://b//key",
        "s3://b/a//c",
        "s3://b/a//",
        "s3://b/./c",
        "s3://b/a/../c",
        "s3://b/..",
        "s3://b/a\nb",
        "S3://b/key",
        "/b/key",
        "s3://my bucket/x",
        "s3://../x",
        "s3://a?b/x",
        "s3://user@host:80/x",
        "s3://-b/x",
        "s3://b\u{e9}/x",
    ] {
        let fault = Address::parse(url).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{url}");
        assert!(fault.to_string().contains("wanted: s3://bucket/key"), "{url}: {fault}");
    }
}

#[test]
fn a_wrong_address_is_refused_with_the_form_of_its_kind() {
    for (url, wanted) in [
        ("gs://", "gs://bucket/key"),
        ("gs://b", "gs://bucket/key"),
        ("gs://b/a//c", "gs://bucket/key"),
        ("az://my container/x", "az://container/key"),
        ("az://c/../x", "az://container/key"),
        ("https://", "https://host/path"),
        ("https://host", "https://host/path"),
        ("https://user@host/x", "https://host/path"),
        ("https://host/x?token=1", "https://host/path"),
        ("https://host/x#y", "https://host/path"),
        ("https://host/*.gz", "https://host/path"),
        ("http://host/x", "https://"),
        ("http://localhost.evil.org/x", "https://"),
        ("hf://models/o/n/x", "hf://datasets/owner/name"),
        ("hf://datasets/o", "hf://datasets/owner/name"),
        ("hf://datasets/o/n", "hf://datasets/owner/name"),
        ("hf://datasets/o/n@/x", "hf://datasets/owner/name"),
        ("hf://datasets/o/n@a b/x", "hf://datasets/owner/name"),
        ("hf://datasets/../n@main/x", "hf://datasets/owner/name"),
        ("hf://datasets//n@main/x", "hf://datasets/owner/name"),
    ] {
        let fault = Address::parse(url).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{url}");
        let told = fault.to_string();
        assert!(told.contains("wanted: ") && told.contains(wanted), "{url}: {told}");
    }
}

#[test]
fn names_resolve_beside_the_file_that_says_them() {
    let folder = object("s3://b/corpora/web/corpus.toml").folder();
    for (name, wanted) in [
        ("tokenizer.json", "s3://b/corpora/web/tokenizer.json"),
        ("./raw/a b.jsonl", "s3://b/corpora/web/raw/a b.jsonl"),
        ("../other/x%20y", "s3://b/corpora/other/x%20y"),
        ("../../x", "s3://b/x"),
        ("raw/", "s3://b/corpora/web/raw"),
        ("/here/tokenizer.json", "/here/tokenizer.json"),
    ] {
        assert_eq!(folder.resolve(name).unwrap().to_string(), wanted, "{name}");
    }
    for name in ["", "a//b", "../../../x", "../../../../x", "a\u{7}"] {
        let fault = folder.resolve(name).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{name}");
        assert!(fault.to_string().contains("s3://b/corpora/web"), "{name}: {fault}");
    }
    let local = Location::from(Path::new("a/b"));
    assert_eq!(local.resolve("../c").unwrap().to_string(), "a/b/../c");
}

#[test]
fn an_object_is_made_once_and_read_as_a_file_is() {
    let place = object("s3://b/a b/100%.json");
    assert!(!place.is_file().unwrap());
    let fault = place.fault("read", &place.read().unwrap_err());
    assert_eq!((fault.class(), fault.place()), (Class::Data, Some("s3://b/a b/100%.json")));
    place.write(b"bytes").unwrap();
    place.write(b"bytes").unwrap();
    assert_eq!(place.write(b"other").unwrap_err().class(), Class::Mismatch);
    let folder = tempfile::tempdir().unwrap();
    let file = Location::from(&folder.path().join("file"));
    file.write(b"bytes").unwrap();
    for place in [&place, &file] {
        assert!(place.is_file().unwrap() && !place.folder().is_file().unwrap());
        assert_eq!((place.read().unwrap(), place.size().unwrap()), (b"bytes".to_vec(), 5));
        assert_eq!(place.content().unwrap(), (5, Identity::of_bytes(b"bytes")));
    }
    assert!(!place.join("below").is_file().unwrap());
}

proptest! {
    /// Whatever name a file in a bucket uses: resolving gives an error, or an address that has one spelling.
    #[test]
    fn a_name_never_makes_an_address_that_is_none(name in "[a-c%. /]{0,12}") {
        let folder = object("s3://b/x/y/z").folder();
        if let Ok(Location::Object(found)) = folder.resolve(&name)
            && !found.address().key().is_empty()
        {
            let found = found.address();
            prop_assert_eq!(found, &Address::parse(&found.to_string()).unwrap());
        }
    }

    /// `join` and `folder` undo each other.
    #[test]
    fn a_folder_holds_what_is_joined_to_it(parts in prop::collection::vec("[a-c%. ]{1,4}[a-c]", 1..5)) {
        let mut at = Address::parse("s3://b/x").unwrap().root();
        for part in &parts {
            let below = at.join(part);
            prop_assert_eq!(&below.folder(), &at);
            prop_assert_eq!(below.name(), part);
            at = below;
        }
        prop_assert_eq!(at, Address::parse(&format!("s3://b/{}", parts.join("/"))).unwrap());
    }
}

/// Parts of a file have copies of their own, but its bytes are fetched again for one of them.
#[test]
fn bytes_that_came_twice_are_not_doubted_again() {
    let place = Memory::spoiled().holding("s3://b/x");
    let Location::Object(object) = &place else { unreachable!() };
    let fault = Fault::data("a damaged row");
    object.create(b"nonsense").unwrap();
    let spoiled = place.fetch().unwrap();
    assert_eq!(place.doubt(&spoiled, fault.clone()).class(), Class::Machine);
    let parts: Vec<_> = (0..3).map(|_| place.fetch().unwrap()).collect();
    assert_eq!(place.doubt(&parts[0], fault.clone()), fault);
    object.remove().unwrap();
    object.create(b"another").unwrap();
    for part in &parts {
        assert_eq!(place.clone().doubt(part, fault.clone()), fault);
    }
    // Other bytes are.
    let other = place.fetch().unwrap();
    assert_eq!(place.doubt(&other, fault.clone()), fault);
    assert_eq!(place.doubt(&parts[0], fault).class(), Class::Machine);
}
