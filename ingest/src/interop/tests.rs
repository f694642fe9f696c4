//! Tests against golden vectors of the formats' authors, a naive writer, and random damage.
//!
//! The golden vectors were made by the reference packages: documents [1, 2, 3] and [4, 5] as u16.

mod faults;
mod refusals;

use std::fs;
use std::path::{Path, PathBuf};

use contract::{Class, Identity, Ratio, Result};
use proptest::prelude::*;
use serde_json::Value;
use store::{Split, Store};
use tempfile::TempDir;

use super::export::{Export, Exported, export};
use super::import::{Import, Imported, Part, import};
use super::units::read_through;
use super::{Hints, Peer, Width};
use crate::disk::Real;
use crate::testing::bytes_tokenizer;

const GOLDEN_IDX: &str = "4d4d494449445800000100000000000000080200000000000000030000000000000003000000020000000000\
                          000000000000060000000000000000000000000000000100000000000000020000000000000000";
const GOLDEN_IDX_SHA256: &str = "416ba3f8d9601192c5b0c9424ce7e61d6ac2d9d464dba8e5ee55deb8247de3aa";
const GOLDEN_DS_INDEX_SHA256: &str =
    "a9928084ac1eb58388ddd0cb77f713f1fe657aa31d596e0dc5d1a13baf987f71";
const GOLDEN_MDS_SHA256: &str = "89747921c45f7742e273b3db9543aabf220029d7001fde942be529d3a85e8350";

/// A document as a test sees it.
type Doc = (Option<String>, Vec<u32>);

struct Bench(TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Bench(tempfile::tempdir().unwrap());
        fs::write(bench.path("tokenizer.json"), bytes_tokenizer(|_| ())).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes `.ds` and `.ds.index` in the simplest way.
    fn datatrove(&self, name: &str, docs: &[Vec<u32>]) -> PathBuf {
        let path = self.path(name);
        let tokens = docs.iter().flatten().flat_map(|id| (*id as u16).to_le_bytes());
        fs::write(&path, tokens.collect::<Vec<u8>>()).unwrap();
        let mut end = 0u64;
        let ends = docs.iter().flat_map(|doc| {
            end += doc.len() as u64;
            end.to_le_bytes()
        });
        fs::write(self.path(&format!("{name}.index")), ends.collect::<Vec<u8>>()).unwrap();
        path
    }

    fn import(&self, peer: Peer, store: &str, parts: &[(&Path, bool)]) -> Import {
        let part = |(path, held_out): &(&Path, bool)| Part {
            source: "web".to_owned(),
            path: path.to_path_buf().into(),
            held_out: *held_out,
        };
        Import {
            store: self.path(store),
            peer,
            tokenizer: self.path("tokenizer.json").into(),
            parts: parts.iter().map(part).collect(),
            width: None,
            begin: None,
            end: None,
            column: None,
            validation: Ratio::new(0, 1),
            unit: 64,
            part_bytes: 100,
            quiet: true,
        }
    }

    fn export(&self, peer: Peer, store: &str, out: &str) -> Export {
        let (store, out) = (self.path(store), self.path(out));
        Export {
            store: store.into(),
            out: out.into(),
            peer,
            source: None,
            split: None,
            quiet: true,
        }
    }

    /// The path of an exported stream, for an import.
    fn stream(&self, out: &str, split: &str) -> PathBuf {
        self.path(out).join("web").join(split)
    }
}

/// The documents of a stream.
fn docs(store: &Path, split: Split) -> Vec<Doc> {
    let store = Store::open(store).unwrap();
    let stream = store.stream(0, split);
    let all = stream.documents(std::slice::from_ref(&(0..stream.record().documents))).unwrap();
    let doc = |record: store::DocumentRecord| {
        let mut tokens = Vec::new();
        let range = record.first_token..record.first_token + record.tokens;
        stream.read_tokens(range, &mut tokens).unwrap();
        (Some(record.shown_id().into_owned()), tokens)
    };
    all.into_iter().map(doc).collect()
}

fn hints() -> Hints {
    Hints { width: None, end: None, column: "tokens".to_owned(), vocab: 258 }
}

/// Reads files with an importer, without a store.
fn read(peer: Peer, path: &Path) -> Result<Vec<Doc>> {
    read_through(&Real, peer, path, &hints())
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks_exact(2).map(byte).collect()
}

fn sha256(path: &Path) -> String {
    Identity::of_bytes(&fs::read(path).unwrap()).to_string()
}

fn golden_docs() -> Vec<Vec<u32>> {
    vec![vec![1, 2, 3], vec![4, 5]]
}

fn plain(docs: Vec<Doc>) -> Vec<Vec<u32>> {
    docs.into_iter().map(|(_, tokens)| tokens).collect()
}

#[test]
fn golden_vectors_are_written() {
    let bench = Bench::new();
    let ds = bench.datatrove("a.ds", &golden_docs());
    import(&bench.import(Peer::Datatrove, "store", &[(&ds, false)])).unwrap();
    for peer in [Peer::Megatron, Peer::Datatrove, Peer::Olmo] {
        export(&bench.export(peer, "store", peer.name())).unwrap();
    }
    let bytes = hex("01000200030004000500");
    let megatron = bench.path("megatron/web");
    assert_eq!(fs::read(megatron.join("train.bin")).unwrap(), bytes);
    assert_eq!(sha256(&megatron.join("train.idx")), GOLDEN_IDX_SHA256);
    let datatrove = bench.stream("datatrove", "train").join("00000_unshuffled.ds");
    assert_eq!(fs::read(&datatrove).unwrap(), bytes);
    assert_eq!(sha256(&datatrove.with_extension("ds.index")), GOLDEN_DS_INDEX_SHA256);
    assert_eq!(fs::read(bench.stream("olmo", "train").join("part-0-00000.npy")).unwrap(), bytes);
}

/// The golden MDS data set.
fn golden_mds(folder: &Path) {
    let config = "{\"column_encodings\": [\"ndarray:uint16\"], \"column_names\": [\"tokens\"], \"column_sizes\": [null], \
                  \"compression\": null, \"format\": \"mds\", \"hashes\": [], \"size_limit\": 67108864, \"version\": 2}";
    let mut shard = hex("02000000 c6000000 d2000000 dc000000");
    shard.extend(config.as_bytes());
    shard.extend(hex("08000000 04 03 010002000300 06000000 04 02 04000500"));
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("shard.00000.mds"), &shard).unwrap();
    assert_eq!(sha256(&folder.join("shard.00000.mds")), GOLDEN_MDS_SHA256);
    let mut entry: Value = serde_json::from_str(config).unwrap();
    entry["samples"] = 2.into();
    entry["zip_data"] = Value::Null;
    entry["raw_data"] =
        serde_json::json!({"basename": "shard.00000.mds", "bytes": shard.len(), "hashes": {}});
    let index = serde_json::json!({"version": 2, "shards": [entry]});
    fs::write(folder.join("index.json"), index.to_string()).unwrap();
}

#[test]
fn golden_vectors_are_read() {
    let bench = Bench::new();
    let bytes = hex("01000200030004000500");
    fs::write(bench.path("m.bin"), &bytes).unwrap();
    fs::write(bench.path("m.idx"), &hex(GOLDEN_IDX)[..82]).unwrap();
    assert_eq!(sha256(&bench.path("m.idx")), GOLDEN_IDX_SHA256);
    assert_eq!(plain(read(Peer::Megatron, &bench.path("m")).unwrap()), golden_docs());
    golden_mds(&bench.path("mds"));
    assert_eq!(plain(read(Peer::Mds, &bench.path("mds")).unwrap()), golden_docs());
    fs::write(bench.path("o.npy"), &bytes).unwrap();
    write_gzip(&bench.path("o.csv.gz"), b"0,3,\"a,b\",src,1\r\n3,5,c,src,2\r\n");
    let found = read(Peer::Olmo, &bench.path("o.npy")).unwrap();
    assert_eq!(found, [(Some("a,b".into()), vec![1, 2, 3]), (Some("c".into()), vec![4, 5])]);
}

fn write_gzip(path: &Path, bytes: &[u8]) {
    use std::io::Write as _;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(bytes).unwrap();
    fs::write(path, gzip.finish().unwrap()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn an_export_comes_back_whole(
        train in proptest::collection::vec(proptest::collection::vec(0u32..258, 0..90), 1..30),
        held in proptest::collection::vec(proptest::collection::vec(0u32..258, 1..9), 1..5),
    ) {
        let bench = Bench::new();
        let (a, b) = (bench.datatrove("a.ds", &train), bench.datatrove("b.ds", &held));
        let request = bench.import(Peer::Datatrove, "store", &[(&a, false), (&b, true)]);
        let Imported::Done(manifest, _) = import(&request).unwrap() else { panic!("a new store") };
        let kept: Vec<_> = train.iter().filter(|doc| !doc.is_empty()).cloned().collect();
        let dropped: u64 = manifest.sources[0].dropped.iter().map(|dropped| dropped.documents).sum();
        prop_assert_eq!(dropped, (train.len() - kept.len()) as u64);
        let store = bench.path("store");
        prop_assert_eq!(&plain(docs(&store, Split::Train)), &kept);
        prop_assert_eq!(&plain(docs(&store, Split::Validation)), &held);
        prop_assume!(!kept.is_empty());
        for peer in Peer::ALL {
            let out = format!("out-{}", peer.name());
            export(&bench.export(peer, "store", &out)).unwrap();
            let back = format!("back-{}", peer.name());
            let parts = [(bench.stream(&out, "train"), false), (bench.stream(&out, "validation"), true)];
            let parts = parts.each_ref().map(|(path, held)| (path.as_path(), *held));
            let request = bench.import(peer, &back, &parts);
            import(&request).unwrap();
            let back = bench.path(&back);
            prop_assert!(crate::verify::verify(&back, true).unwrap().damages.is_empty());
            for split in Split::ALL {
                let (mut before, mut after) = (docs(&store, split), docs(&back, split));
                if matches!(peer, Peer::Megatron | Peer::Datatrove) {
                    // These formats have no ids.
                    before.iter_mut().chain(&mut after).for_each(|doc| doc.0 = None);
                }
                prop_assert_eq!(before, after, "{}", peer.name());
            }
            // The same import again is up to date; without its last file it is not.
            let again = matches!(import(&request).unwrap(), Imported::UpToDate(_));
            prop_assert!(again);
            let again = export(&bench.export(peer, "store", &out)).unwrap();
            prop_assert!(matches!(again, Exported::UpToDate(_)));
        }
    }
}

/// One way to damage bytes.
#[derive(Clone, Debug)]
enum Harm {
    Flip { at: usize, bit: u8 },
    Cut { at: usize },
    Add { bytes: Vec<u8> },
    Word { at: usize, value: u64, wide: bool },
    Drop { at: usize, count: usize },
}

fn harm() -> impl Strategy<Value = Harm> {
    let words = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(1 << 63),
        Just(u64::from(u32::MAX)),
        Just(1 << 31),
        Just(1 << 40),
        any::<u64>()
    ];
    prop_oneof![
        (any::<usize>(), 0u8..8).prop_map(|(at, bit)| Harm::Flip { at, bit }),
        any::<usize>().prop_map(|at| Harm::Cut { at }),
        proptest::collection::vec(any::<u8>(), 1..20).prop_map(|bytes| Harm::Add { bytes }),
        (any::<usize>(), words, any::<bool>()).prop_map(|(at, value, wide)| Harm::Word {
            at,
            value,
            wide
        }),
        (any::<usize>(), 1usize..20).prop_map(|(at, count)| Harm::Drop { at, count }),
    ]
}

fn harmed(mut bytes: Vec<u8>, harm: &Harm) -> Vec<u8> {
    let length = bytes.len().max(1);
    match harm {
        Harm::Flip { at, bit } => {
            if let Some(byte) = bytes.get_mut(at % length) {
                *byte ^= 1 << bit;
            }
        }
        Harm::Cut { at } => bytes.truncate(at % length),
        Harm::Add { bytes: more } => bytes.extend(more),
        Harm::Word { at, value, wide } => {
            let word = value.to_le_bytes();
            let from = at % length;
            let width = (if *wide { 8 } else { 4 }).min(bytes.len() - from.min(bytes.len()));
            bytes[from.min(length - 1)..][..width].copy_from_slice(&word[..width]);
        }
        Harm::Drop { at, count } => {
            let from = (at % length).min(bytes.len());
            bytes.drain(from..(from + count).min(bytes.len()));
        }
    }
    bytes
}

/// A few small files of a format, in a folder: their names and bytes, and the path to open.
fn sample(bench: &Bench, peer: Peer) -> (Vec<(PathBuf, Vec<u8>)>, PathBuf) {
    let folder = bench.path(&format!("fuzz-{}", peer.name()));
    fs::create_dir_all(&folder).unwrap();
    let all: Vec<Vec<u32>> =
        (1..8u32).map(|n| (0..n * 3).map(|i| (i * 7 + n) % 258).collect()).collect();
    let ds = bench.datatrove("a.ds", &all);
    let store = format!("store-{}", peer.name());
    import(&bench.import(Peer::Datatrove, &store, &[(&ds, false)])).unwrap();
    let out = format!("out-{}", peer.name());
    export(&bench.export(peer, &store, &out)).unwrap();
    let stream = bench.stream(&out, "train");
    let (folder, opened) = match peer {
        Peer::Megatron => (bench.path(&out).join("web"), stream),
        Peer::Mds => {
            // Sums would detect every flipped bit: remove them to test the later checks.
            let index = fs::read_to_string(stream.join("index.json")).unwrap();
            let mut index: Value = serde_json::from_str(&index).unwrap();
            index["shards"][0]["raw_data"]["hashes"] = serde_json::json!({});
            fs::write(stream.join("index.json"), index.to_string()).unwrap();
            (stream.clone(), stream)
        }
        _ => (stream.clone(), stream),
    };
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    (files.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect(), opened)
}

#[test]
fn whatever_a_file_holds_is_documents_or_one_clear_fault() {
    let bench = Bench::new();
    for peer in Peer::ALL {
        let (files, opened) = sample(&bench, peer);
        let good = read(peer, &opened).unwrap();
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(1500));
        let strategy = (any::<usize>(), proptest::collection::vec(harm(), 1..3), any::<bool>());
        let outcome = runner.run(&strategy, |(which, harms, inside)| {
            let (path, bytes) = &files[which % files.len()];
            let zipped = inside && path.extension().is_some_and(|ending| ending == "gz");
            let plain = if zipped { unzipped(bytes) } else { bytes.clone() };
            let bad = harms.iter().fold(plain, harmed);
            if zipped {
                write_gzip(path, &bad)
            } else {
                fs::write(path, &bad).unwrap()
            }
            let found = read(peer, &opened);
            fs::write(path, bytes).unwrap();
            match found {
                // A flipped bit of a token is another token: the formats have no sums.
                Ok(docs) => {
                    let tokens: usize = docs.iter().map(|doc| doc.1.len()).sum();
                    prop_assert!(tokens < 10_000);
                }
                Err(fault) => {
                    let told = fault.to_string();
                    prop_assert!(matches!(fault.class(), Class::Data | Class::Usage), "{}", told);
                    prop_assert!(
                        told.contains("fuzz") || told.contains("out-"),
                        "no place: {}",
                        told
                    );
                }
            }
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{}: {error}", peer.name()));
        assert_eq!(read(peer, &opened).unwrap(), good);
    }
}

fn unzipped(bytes: &[u8]) -> Vec<u8> {
    use std::io::Read as _;
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut plain).unwrap();
    plain
}

/// A golden `.idx` with some bytes replaced.
fn idx_with(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut idx = hex(GOLDEN_IDX)[..82].to_vec();
    idx[at..at + bytes.len()].copy_from_slice(bytes);
    idx
}

#[test]
fn what_a_megatron_index_says_is_held_against_the_files() {
    let bench = Bench::new();
    let tokens = hex("01000200030004000500");
    let huge = (1u64 << 60).to_le_bytes();
    let cases: [(&str, Vec<u8>, &[u8]); 13] = [
        ("MMIDIDX", idx_with(0, b"X"), &tokens),
        ("version", idx_with(9, &[2]), &tokens),
        ("code 6", idx_with(17, &[6]), &tokens),
        ("code 7", idx_with(17, &[7]), &tokens),
        ("counts", idx_with(18, &huge), &tokens),
        ("counts", idx_with(26, &huge), &tokens),
        ("counts", hex(GOLDEN_IDX)[..81].to_vec(), &tokens),
        ("too short", hex(GOLDEN_IDX)[..20].to_vec(), &tokens),
        ("below zero", idx_with(34, &(-1i32).to_le_bytes()), &tokens),
        ("behind the last token", idx_with(34, &i32::MAX.to_le_bytes()), &tokens),
        ("begin where", idx_with(50, &[4]), &tokens),
        ("ends before it begins", idx_with(66, &[9]), &tokens),
        ("the index ends behind", idx_with(0, b"M"), &tokens[..8]),
    ];
    for (word, idx, bin) in cases {
        fs::write(bench.path("m.bin"), bin).unwrap();
        fs::write(bench.path("m.idx"), idx).unwrap();
        let fault = read(Peer::Megatron, &bench.path("m.idx")).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(fault.to_string().contains(word), "no {word:?} in {fault}");
    }
    fs::write(bench.path("m.bin"), [&tokens[..], &[0, 0]].concat()).unwrap();
    fs::write(bench.path("m.idx"), idx_with(0, b"M")).unwrap();
    let fault = read(Peer::Megatron, &bench.path("m")).unwrap_err().to_string();
    assert!(fault.contains("no document has"), "{fault}");
    fs::write(bench.path("m.bin"), hex("01000200030004000201")).unwrap();
    let fault = read(Peer::Megatron, &bench.path("m")).unwrap_err().to_string();
    assert!(fault.contains("258") && fault.contains("token 4"), "{fault}");
}

#[test]
fn what_no_store_can_keep_is_refused() {
    let bench = Bench::new();
    let ds = bench.datatrove("a.ds", &golden_docs());
    fs::write(bench.path("a.ds.loss"), [1; 5]).unwrap();
    let fault = read(Peer::Datatrove, &ds).unwrap_err().to_string();
    assert!(fault.contains("loss mask"), "{fault}");
    fs::remove_file(bench.path("a.ds.loss")).unwrap();
    let tokens: usize = golden_docs().iter().map(Vec::len).sum();
    for (text, word) in [
        (format!("t|2\n{tokens}\n5"), None),
        ("t|2\nno number".to_owned(), None),
        (format!("t|2\n{}\n5", tokens + 1), Some("another number of tokens")),
        ("t|two\n".to_owned(), Some("how wide")),
    ] {
        fs::write(bench.path("a.ds.metadata"), text).unwrap();
        let fault = read(Peer::Datatrove, &ds).err().map(|fault| fault.to_string());
        assert_eq!(fault.is_some(), word.is_some(), "{fault:?}");
        let told = fault.unwrap_or_default();
        assert!(told.contains(word.unwrap_or_default()), "{told}");
        assert!(word.is_none() || told.contains("a.ds.metadata"), "{told}");
    }
    fs::write(bench.path("n.npy"), b"\x93NUMPY\x01\x00").unwrap();
    let fault = read(Peer::Olmo, &bench.path("n.npy")).unwrap_err().to_string();
    assert!(fault.contains("NumPy"), "{fault}");
    golden_mds(&bench.path("mds"));
    let index = fs::read_to_string(bench.path("mds/index.json")).unwrap();
    for (from, to, word) in [
        ("ndarray:uint16", "pkl", "never run"),
        ("ndarray:uint16", "ndarray:float32", "whole numbers"),
        ("ndarray:uint16", "bytes", "--dtype"),
        ("shard.00000.mds", "../mds/shard.00000.mds", "outside"),
        ("\"samples\":2", "\"samples\":4294967295", "samples"),
        ("\"bytes\":220", "\"bytes\":18446744073709551615", "larger"),
        ("\"bytes\":220", "\"bytes\":219", "too large"),
        ("\"hashes\":{}", "\"hashes\":{\"xxh3_64\":\"00\"}", "xxh3_64"),
    ] {
        assert!(index.contains(from), "{index}");
        fs::write(bench.path("mds/index.json"), index.replace(from, to)).unwrap();
        let fault = read(Peer::Mds, &bench.path("mds")).unwrap_err().to_string();
        assert!(fault.contains(word), "no {word:?} in {fault}");
    }
}

#[test]
fn documents_are_found_by_their_last_token_where_nothing_else_says() {
    let bench = Bench::new();
    let path = bench.path("o.npy");
    fs::write(&path, hex("0100 0200 0001 0300 0001")).unwrap();
    let fault = read(Peer::Olmo, &path).unwrap_err().to_string();
    assert!(fault.contains("--dtype"), "{fault}");
    let hints = Hints { width: Some(Width::U16), end: Some(256), ..hints() };
    let found = read_through(&Real, Peer::Olmo, &path, &hints).unwrap();
    assert_eq!(plain(found), [vec![1, 2, 256], vec![3, 256]]);
    fs::write(&path, hex("0100 0001 0300")).unwrap();
    let fault = read_through(&Real, Peer::Olmo, &path, &hints).unwrap_err().to_string();
    assert!(fault.contains("does not end"), "{fault}");
}

#[test]
fn markers_and_other_requests_are_checked() {
    let bench = Bench::new();
    let ds = bench.datatrove("a.ds", &[vec![1, 256], vec![2, 256]]);
    let mut request = bench.import(Peer::Datatrove, "store", &[(&ds, false)]);
    request.begin = Some("<tab>".to_owned());
    let fault = import(&request).unwrap_err().to_string();
    assert!(fault.contains("--begin"), "{fault}");
    assert!(!bench.path("store").exists());
    (request.begin, request.column) = (None, Some("ids".to_owned()));
    let fault = import(&request).unwrap_err();
    assert_eq!(fault.class(), Class::Usage, "{fault}");
    assert!(fault.to_string().starts_with("--column: only files of MDS"), "{fault}");
    assert!(!bench.path("store").exists());
    (request.column, request.end) = (None, Some("<|end|>".to_owned()));
    let Imported::Done(manifest, _) = import(&request).unwrap() else { panic!("a new store") };
    assert_eq!(manifest.tokenizer.end, Some(256));
    assert!(!bench.path("store.partial").exists() && !bench.path("store/.build").exists());
    bench.datatrove("a.ds", &[vec![1, 256], vec![3, 256]]);
    let fault = import(&request).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch, "{fault}");
    export(&bench.export(Peer::Olmo, "store", "out")).unwrap();
    let fault = export(&bench.export(Peer::Mds, "store", "out")).unwrap_err();
    assert!(fault.to_string().contains("another export"), "{fault}");
    // Every difference is reported: here only the streams differ.
    let note = bench.path("out").join(super::export::NOTE);
    let text = fs::read_to_string(&note).unwrap();
    fs::write(&note, text.replace("\"train\"", "\"validation\"")).unwrap();
    let fault = export(&bench.export(Peer::Olmo, "store", "out")).unwrap_err().to_string();
    assert!(fault.contains(": web validation\n") && fault.contains(": web train\n"), "{fault}");
    let names = &serde_json::from_str::<serde_json::Value>(&text).unwrap()["streams"][0]["files"];
    let name = names[0]["name"].as_str().unwrap();
    fs::write(&note, text.replace(name, "../store/manifest.json")).unwrap();
    let fault = export(&bench.export(Peer::Olmo, "store", "out")).unwrap_err().to_string();
    assert!(fault.contains("a file called \"../store/manifest.json\""), "{fault}");
    fs::create_dir_all(bench.path("taken")).unwrap();
    fs::write(bench.path("taken/file"), "").unwrap();
    let fault = export(&bench.export(Peer::Mds, "store", "taken")).unwrap_err();
    assert!(fault.to_string().contains("something else"), "{fault}");
    fs::rename(bench.path("taken"), bench.path("free.partial")).unwrap();
    let fault = export(&bench.export(Peer::Mds, "store", "free")).unwrap_err();
    assert!(fault.to_string().contains("in the way"), "{fault}");
    assert!(bench.path("free.partial/file").exists());
}
