//! A store in a bucket is opened by its list of objects, or by the objects themselves where the list is not enough.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;

use super::*;
use crate::location::memory::Memory;
use crate::location::{Address, Doubts, LocalFile, Object, Remote};

/// How a bucket answers a list request.
#[derive(Clone, Copy, Debug)]
enum List {
    Whole,
    /// A list without the newest objects.
    Late,
    Refused,
    Broken,
}

struct Bucket(Memory, List);

impl Remote for Bucket {
    fn size(&self, object: &Address) -> io::Result<u64> {
        self.0.size(object)
    }

    fn read_at(&self, object: &Address, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_at(object, buffer, offset)
    }

    fn fetch(&self, object: &Address) -> io::Result<LocalFile> {
        self.0.fetch(object)
    }

    fn version(&self, object: &Address) -> io::Result<String> {
        self.0.version(object)
    }

    fn doubts(&self) -> &Doubts {
        self.0.doubts()
    }

    fn create(&self, object: &Address, bytes: &[u8]) -> io::Result<()> {
        self.0.create(object, bytes)
    }

    fn sizes(&self, folder: &Address) -> io::Result<BTreeMap<String, u64>> {
        match self.1 {
            List::Whole => self.0.sizes(folder),
            List::Late => Ok(BTreeMap::new()),
            List::Refused => Err(ErrorKind::PermissionDenied.into()),
            List::Broken => Err(ErrorKind::TimedOut.into()),
        }
    }

    fn remove(&self, object: &Address) -> io::Result<()> {
        self.0.remove(object)
    }
}

#[test]
fn a_store_in_a_bucket_is_whole_or_said_not_to_be_whatever_the_bucket_lists() {
    let (folder, manifest) = store(2, &[3, 2], 9);
    for list in [List::Whole, List::Late, List::Refused, List::Broken] {
        let remote: Arc<dyn Remote> = Arc::new(Bucket(Memory::default(), list));
        let place = Object::new(Address::parse("s3://b/store").unwrap(), remote);
        for file in manifest.files() {
            let bytes = fs::read(folder.path().join(&file.path)).unwrap();
            place.join(&file.path).create(&bytes).unwrap();
        }
        place.join("web/00000/notes.txt").create(b"mine").unwrap();
        let opened = whole::opened(Location::Object(place.clone()));
        if let List::Broken = list {
            assert_eq!(opened.unwrap_err().class(), Class::Machine);
            continue;
        }
        assert_eq!(opened.unwrap(), manifest);
        let name = "web/00000/starts-train-00001.arrow";
        place.join(name).remove().unwrap();
        for (bytes, word) in [(None, "missing"), (Some(b"cut"), "truncated")] {
            if let Some(bytes) = bytes {
                place.join(name).create(bytes).unwrap();
            }
            let fault = whole::opened(Location::Object(place.clone())).unwrap_err();
            assert_eq!(fault.class(), Class::Data, "{fault}");
            let told = fault.to_string();
            assert!(told.contains(name) && told.contains(word), "{list:?}: {told}");
        }
    }
}

#[test]
fn a_spoiled_copy_is_made_once_more_before_it_is_damage() {
    let (folder, manifest) = store(2, &[3, 2], 9);
    // Whichever operation comes first.
    let uses: [fn(&Location, &Manifest); 4] = [
        |place, _| drop(Store::open(place).unwrap().tokenizer().unwrap()),
        |place, manifest| {
            let source = &manifest.sources[0];
            assert_eq!(verified(place, manifest, source, Split::Train), []);
        },
        |place, manifest| {
            let stream = Store::open(place).unwrap().stream(0, Split::Train);
            let (mut tokens, mut starts) = (Vec::new(), Vec::new());
            stream.read_tokens(0..manifest.sources[0].train.tokens, &mut tokens).unwrap();
            stream.starts_in(0..tokens.len() as u64, &mut starts).unwrap();
            assert_eq!((starts.len(), &tokens[..9]), (5, &document(0, 9, 65_536)[..]));
        },
        |place, _| {
            let stream = Store::open(place).unwrap().stream(0, Split::Train);
            assert_eq!(stream.find("doc-4").unwrap(), [4]);
            assert_eq!(stream.document(1).unwrap().shown_id(), "doc-1");
        },
    ];
    for used in uses {
        let place = Memory::spoiled().holding("s3://b/store");
        for file in manifest.files() {
            let bytes = fs::read(folder.path().join(&file.path)).unwrap();
            place.join(&file.path).write(&bytes).unwrap();
        }
        used(&place, &manifest);
    }
}

/// Many files are checked in parallel, and reported in order.
#[test]
fn every_file_of_many_is_looked_at() {
    let (folder, manifest) = store(2, &[1; 200], 1);
    assert_eq!(whole::opened(folder.path()).unwrap(), manifest);
    let gone = ["tokens-train-00003.sums", "tokens-train-00199.arrow"];
    for name in gone {
        fs::remove_file(folder.path().join("web/00000").join(name)).unwrap();
    }
    let told = whole::opened(folder.path()).unwrap_err().to_string();
    let [first, last] = gone.map(|name| told.find(&format!("{name}: it is missing")).unwrap());
    assert!(first < last && told.contains("2 places"), "{told}");
    // Not all of them, if there are many.
    fs::remove_dir_all(folder.path().join("web")).unwrap();
    let told = whole::opened(folder.path()).unwrap_err().to_string();
    assert!(told.contains("800 places") && told.contains("and 792 more"), "{told}");
    assert!(told.lines().count() < 16, "{told}");
}
