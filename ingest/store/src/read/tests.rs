//! The reader against plain vectors, and against every flipped bit.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::manifest::TokenizerRecord;
use crate::open::{commit, part_folder};
use crate::write::{ShardWriter, StreamHead};
use crate::{FORMAT, HEAD_BYTES, InputRecord, PartRecord, SourceRecord};
use contract::Class;
use contract::{Identity, Key, Purpose, draw};

/// What a test store should hold.
struct Text {
    documents: Vec<Vec<u32>>,
    starts: Vec<u64>,
    shard_tokens: u64,
    token_bytes: u32,
}

impl Text {
    fn generate(seed: u64, lengths: &[u64], shard_tokens: u64, token_bytes: u32) -> Self {
        let limit = if token_bytes == 2 { 1 << 16 } else { 1 << 20 };
        let key = Key::from_seed(seed);
        let document = |(number, length): (usize, &u64)| {
            let key = key.nth(number as u64);
            (0..*length).map(|i| (draw(key, Purpose::Generate, i) % limit) as u32).collect()
        };
        let documents = lengths.iter().enumerate().map(document).collect();
        let ends = lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        let starts = [0].into_iter().chain(ends).take(lengths.len()).collect();
        Text { documents, starts, shard_tokens, token_bytes }
    }

    fn tokens(&self) -> Vec<u32> {
        self.documents.concat()
    }

    /// Some documents have no id, and some have one that looks like the one shown for the next document.
    fn record(&self, number: usize) -> DocumentRecord {
        let id = match number % 10 {
            4 | 9 => None,
            8 if number + 1 < self.documents.len() => {
                Some(self.record(number + 1).shown_id().into_owned())
            }
            _ => Some(format!("doc-{number}")),
        };
        DocumentRecord {
            id,
            file: number as u32 % 3,
            row: number as u64 + 1,
            group: number.is_multiple_of(2).then_some(7),
            bytes: (!number.is_multiple_of(2))
                .then_some((number as u64 * 10, number as u64 * 10 + 9)),
            first_token: self.starts[number],
            tokens: self.documents[number].len() as u64,
            kept: Vec::new(),
        }
    }

    /// Writes the text as the training split of source "web" and commits the store.
    fn write(&self) -> TempDir {
        let dir = scratch();
        let folder = part_folder(dir.path(), "web", 0);
        fs::create_dir_all(&folder).unwrap();
        let head = StreamHead {
            folder,
            source: "web".to_owned(),
            split: Split::Train,
            token_bytes: self.token_bytes,
            vocab: if self.token_bytes == 2 { 1 << 16 } else { 1 << 20 },
            keep: Vec::new(),
        };
        let mut train = StreamRecord::empty();
        let mut writer: Option<ShardWriter> = None;
        for (number, tokens) in self.documents.iter().enumerate() {
            let record = self.record(number);
            let shard = writer.get_or_insert_with(|| {
                let index = train.shards.len();
                ShardWriter::create(head.clone(), index, record.first_token, number as u64).unwrap()
            });
            shard.push(tokens, &record).unwrap();
            train.tokens += record.tokens;
            train.documents += 1;
            if shard.tokens() >= self.shard_tokens {
                train.shards.push(writer.take().unwrap().finish().unwrap());
            }
        }
        train.shards.extend(writer.map(|shard| shard.finish().unwrap()));
        commit_store(dir.path(), train, self.token_bytes, head.vocab);
        dir
    }
}

fn commit_store(dir: &Path, train: StreamRecord, token_bytes: u32, vocab: u32) {
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    let mut manifest = Manifest {
        format: FORMAT,
        digest: Identity([0; 32]),
        request: Identity([0; 32]),
        tokenizer: TokenizerRecord {
            sha256: Identity::of_bytes(b"{}"),
            vocab,
            begin: None,
            end: None,
            encoder: "none".to_owned(),
        },
        token_bytes,
        unit: 1024,
        validation: "0".to_owned(),
        sources: vec![SourceRecord {
            name: "web".to_owned(),
            preparation: String::new(),
            inputs: (0..3).map(|number| input(number, &train)).collect(),
            train,
            validation: StreamRecord::empty(),
            dropped: Vec::new(),
            prepared: None,
            removed_file: None,
            keep: Vec::new(),
            parts: vec![PartRecord::default()],
        }],
    };
    manifest.digest = manifest.identity();
    commit(dir, &manifest).unwrap();
}

/// One of three inputs, whose documents alternate.
fn input(number: u64, stream: &StreamRecord) -> InputRecord {
    InputRecord {
        path: format!("{number}.jsonl"),
        bytes: 1 << 20,
        sha256: Identity([1; 32]),
        documents: (stream.documents + 2 - number) / 3,
        segments: 8,
    }
}

fn open(dir: &Path) -> Result<StreamReader> {
    Ok(Store::open(dir)?.stream(0, Split::Train))
}

/// All that a store returns: tokens, starts, provenance, tokenizer.
type Everything = (Vec<u32>, Vec<u64>, Vec<DocumentRecord>, Vec<u8>);

fn read_everything(dir: &Path) -> Result<Everything> {
    let store = Store::open(dir)?;
    let stream = store.stream(0, Split::Train);
    let (mut tokens, mut starts) = (Vec::new(), Vec::new());
    stream.read_tokens(0..stream.record().tokens, &mut tokens)?;
    stream.starts_in(0..stream.record().tokens, &mut starts)?;
    let documents = stream.documents(std::slice::from_ref(&(0..stream.record().documents)))?;
    Ok((tokens, starts, documents, store.tokenizer()?))
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { all.push(path) }
        }
    }
    all.sort();
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Random ranges of random stores, read in random order and in parallel, compared with plain vectors.
    #[test]
    fn ranges_are_those_of_the_text(
        seed: u64,
        wide: bool,
        lengths in prop::collection::vec(prop_oneof![1u64..40, 1u64..40, 1u64..30_000], 1..20),
        shard_tokens in prop_oneof![Just(1u64), 1u64..60_000],
        asks in prop::collection::vec((any::<prop::sample::Index>(), 0u64..40_000), 1..20),
    ) {
        let text = Text::generate(seed, &lengths, shard_tokens, if wide { 4 } else { 2 });
        let (tokens, starts) = (text.tokens(), text.starts.clone());
        let dir = text.write();
        let stream = open(dir.path()).unwrap();
        let count = tokens.len() as u64;
        for (place, length) in asks {
            let from = place.index(tokens.len()) as u64;
            let to = (from + length).min(count);
            let (mut found, mut ids, mut begins) = (Vec::new(), Vec::new(), Vec::new());
            stream.read_tokens(from..to, &mut found).unwrap();
            prop_assert_eq!(&found, &tokens[from as usize..to as usize]);
            stream.read_ids(from..to, &mut ids).unwrap();
            prop_assert!(ids.iter().zip(&found).all(|(id, token)| id.cast_unsigned() == *token));
            stream.starts_in(from..from + length, &mut begins).unwrap();
            let wanted: Vec<u64> =
                starts.iter().copied().filter(|s| (from..from + length).contains(s)).collect();
            prop_assert_eq!(begins, wanted);
            let document = stream.document_of_token(from).unwrap();
            prop_assert_eq!(document, starts.partition_point(|s| *s <= from) as u64 - 1);
            prop_assert_eq!(stream.document(document).unwrap(), text.record(document as usize));
        }
        let records: Vec<_> = (0..text.documents.len()).map(|number| text.record(number)).collect();
        for id in records.iter().map(|record| record.shown_id()) {
            let at = |is: &dyn Fn(&DocumentRecord) -> bool| -> Vec<u64> {
                (0..).zip(&records).filter(|(_, record)| is(record)).map(|(at, _)| at).collect()
            };
            let own = at(&|record| record.id.as_deref() == Some(&id));
            let shown = at(&|record| record.id.is_none() && record.shown_id() == id);
            prop_assert_eq!(stream.find(&id).unwrap(), if own.is_empty() { shown } else { own });
        }
        prop_assert_eq!(stream.find("doc-x").unwrap(), Vec::<u64>::new());
        let past = stream.read_tokens(0..count + 1, &mut Vec::new());
        prop_assert_eq!(past.unwrap_err().class(), Class::Bug);
    }
}

/// More documents in a shard than an index keeps whole, so that starts are read from the file.
#[test]
fn sparse_indexes_find_every_start() {
    let lengths: Vec<u64> = (0..30_000).map(|i| 1 + i * i % 7).collect();
    let text = Text::generate(5, &lengths, 60_000, 2);
    let (dir, starts) = (text.write(), &text.starts);
    let stream = open(dir.path()).unwrap();
    assert!(stream.record().shards.len() > 1 && stream.record().shards[0].documents > 8192 + 4096);
    let mut found = Vec::new();
    stream.starts_in(0..u64::MAX, &mut found).unwrap();
    assert_eq!(&found, starts);
    for from in (0..stream.record().tokens).step_by(997) {
        let to = from + from % 3000;
        let mut found = Vec::new();
        stream.starts_in(from..to, &mut found).unwrap();
        let first = starts.partition_point(|s| *s < from);
        assert_eq!(found, starts[first..starts.partition_point(|s| *s < to).max(first)]);
        let document = stream.document_of_token(from).unwrap() as usize;
        assert!(starts[document] <= from && starts.get(document + 1).is_none_or(|s| *s > from));
    }
}

/// Provenance from several shards and row groups, by ranges.
#[test]
fn ranges_of_documents_come_in_order() {
    let text = Text::generate(8, &vec![1; 70_000], 69_000, 2);
    let dir = text.write();
    let stream = open(dir.path()).unwrap();
    let ranges = [0..2, 5..5, 65_530..65_540, 68_999..69_001, 69_999..70_000];
    let found = stream.documents(&ranges).unwrap();
    let wanted: Vec<_> = ranges.into_iter().flatten().map(|i| text.record(i as usize)).collect();
    assert_eq!(found, wanted);
    let reversed = [5..6, 0..2];
    assert_eq!(stream.documents(&reversed).unwrap_err().class(), Class::Bug);
    assert_eq!(stream.document(70_000).unwrap_err().class(), Class::Bug);
}

/// Every bit of every file of a small store, flipped: reported as a data error with a file of this store as its place,
/// or without effect on anything that is read.
#[test]
fn no_flipped_bit_reaches_a_reader() {
    let text = Text::generate(9, &[50, 1, 120, 30], 100, 2);
    let dir = text.write();
    let wanted = read_everything(dir.path()).unwrap();
    assert_eq!(wanted.0, text.tokens());
    let mut named = 0;
    let wanted_tokens = [171, 30];
    for path in files(dir.path()) {
        let bytes = fs::read(&path).unwrap();
        let tokens = path.to_string_lossy().contains("tokens-")
            && path.extension().is_some_and(|e| e == "arrow");
        let shard = usize::from(path.to_string_lossy().contains("-00001."));
        let values_end = 2 * HEAD_BYTES as usize + 2 * wanted_tokens[shard];
        let file = fs::File::options().write(true).open(&path).unwrap();
        for at in 0..bytes.len() {
            let flipped = bytes[at] ^ 1 << ((at * 7 + at / 8) % 8);
            file.write_all_at(&[flipped], at as u64).unwrap();
            match read_everything(dir.path()) {
                Err(fault) => {
                    if tokens && (2 * HEAD_BYTES as usize..values_end).contains(&at) {
                        let whose = "documents 0 (\"doc-0\") to 2 (\"doc-2\")";
                        let whose = if shard == 0 { whose } else { "documents 3 (\"doc-3\")" };
                        assert!(fault.to_string().contains(whose), "byte {at}: {fault}");
                        named += 1;
                    }
                    assert_eq!(fault.class(), Class::Data, "{} byte {at}: {fault}", path.display());
                    let place = dir.path().display().to_string();
                    assert!(fault.to_string().starts_with(&place), "{fault}");
                }
                Ok(read) => {
                    // The container around the tokens, which the reader skips.
                    let frame = tokens && !(2 * HEAD_BYTES as usize..values_end).contains(&at);
                    assert!(frame, "{} byte {at} was not noticed", path.display());
                    assert_eq!(read, wanted, "{} byte {at} changed what was read", path.display());
                }
            }
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
        }
    }
    assert_eq!(
        named,
        2 * (171 + 30),
        "every byte of every token, and none of the sums, names its text"
    );
    read_everything(dir.path()).unwrap();
}

/// Every byte of the values themselves is found, and the fault says whose text is lost.
#[test]
fn a_flipped_token_names_its_block_and_documents() {
    let text = Text::generate(2, &[20_000, 10, 10, 30_000], u64::MAX, 2);
    let dir = text.write();
    let path = part_folder(dir.path(), "web", 0).join("tokens-train-00000.arrow");
    let mut bytes = fs::read(&path).unwrap();
    let needle: Vec<u8> =
        text.tokens()[20_005..20_009].iter().flat_map(|t| (*t as u16).to_le_bytes()).collect();
    let at = bytes.windows(8).position(|window| window == needle).unwrap();
    bytes[at] ^= 4;
    fs::write(&path, &bytes).unwrap();
    let stream = open(dir.path()).unwrap();
    let fault = stream.read_tokens(17_000..17_001, &mut Vec::new()).unwrap_err();
    assert_eq!(fault.class(), Class::Data);
    let message = fault.to_string();
    for part in [
        "tokens-train-00000.arrow",
        "block 1 of 4",
        "documents 0 (\"doc-0\") to 3 (\"doc-3\")",
        "source \"web\", train",
    ] {
        assert!(message.contains(part), "{message}");
    }
    // The other blocks are still readable, and the damaged one is still refused.
    stream.read_tokens(0..16_384, &mut Vec::new()).unwrap();
    stream.read_tokens(32_768..50_020, &mut Vec::new()).unwrap();
    assert!(stream.read_tokens(16_384..16_385, &mut Vec::new()).is_err());
}

#[test]
fn short_long_and_missing_files_are_named() {
    let text = Text::generate(3, &[500, 600], 500, 4);
    let dir = text.write();
    for path in files(dir.path()) {
        let bytes = fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        let cut = (0..bytes.len()).step_by((bytes.len() / 24).max(1)).chain([bytes.len() - 1]);
        let cut = cut.map(|length| bytes[..length].to_vec());
        for damaged in cut.chain([[&bytes[..], b"x"].concat()]) {
            fs::write(&path, damaged).unwrap();
            let fault = read_everything(dir.path()).expect_err(name);
            assert_eq!(fault.class(), Class::Data, "{fault}");
            assert!(fault.to_string().contains(name) || name.starts_with("manifest"), "{fault}");
        }
        fs::remove_file(&path).unwrap();
        let fault = read_everything(dir.path()).expect_err(name);
        assert_eq!(fault.class(), Class::Data, "{fault}");
        fs::write(&path, bytes).unwrap();
    }
    read_everything(dir.path()).unwrap();
}

#[test]
fn what_is_no_store_is_refused_with_a_reason() {
    let dir = scratch();
    let refusal = |path: &Path| {
        let fault = Store::open(path).err().unwrap();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        fault.to_string()
    };
    assert!(refusal(&dir.path().join("nowhere")).contains("does not exist"));
    assert!(refusal(dir.path()).contains("no manifest.json"));
    let text = Text::generate(4, &[10], 10, 2);
    let store = text.write();
    // A complete manifest of this format, but with a gap between its shards.
    let mut manifest = Store::open(store.path()).unwrap().manifest().clone();
    manifest.sources[0].train.shards[0].first_token = 1;
    commit(store.path(), &manifest).unwrap();
    assert!(refusal(store.path()).contains("does not begin where the one before it ends"));
    manifest.format += 1;
    commit(store.path(), &manifest).unwrap();
    assert!(refusal(store.path()).contains("format"));
}

/// Many threads read one stream with a limit of two open files: the same tokens, and few handles.
#[test]
fn threads_share_few_files() {
    let lengths = vec![700; 40];
    let text = Text::generate(6, &lengths, 700, 2);
    let (dir, tokens) = (text.write(), text.tokens());
    let store = Store::open_with(dir.path(), ReadCache::new(2)).unwrap();
    let stream = store.stream(0, Split::Train);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (stream, tokens) = (&stream, &tokens);
            scope.spawn(move || {
                for turn in 0..200 {
                    let from = draw(Key::from_seed(thread), Purpose::Generate, turn) % 26_000;
                    let (mut found, mut starts) = (Vec::new(), Vec::new());
                    stream.read_tokens(from..from + 2000, &mut found).unwrap();
                    assert_eq!(found, tokens[from as usize..from as usize + 2000]);
                    stream.starts_in(from..from + 2000, &mut starts).unwrap();
                    assert!(starts.iter().all(|start| start % 700 == 0));
                }
            });
        }
    });
    let prefix = dir.path().canonicalize().unwrap();
    let held = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let held =
        held.filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.starts_with(&prefix)));
    assert!(held.count() <= 2);
}

/// A scratch folder in memory where possible: the writer syncs every file, which is slow on a disk.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}
