//! A store is written, checked and damaged in every way; its bytes are compared with the tables of
//! `ingest/docs/format.md`.

mod forged;
mod listed;
mod long;

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tempfile::TempDir;

use super::manifest::StreamDigest;
use super::verify::{Damage, StreamCheck, verify_tokenizer};
use super::write::{ROW_GROUP_DOCUMENTS, ShardWriter, StreamHead, block_offset};
use super::*;
use contract::digest::block_sum;
use contract::{Class, Digest, Identity, Key, Purpose, draw};

/// A store of one source, its train stream in shards of `cuts` documents.
fn store(token_bytes: u32, cuts: &[u64], document_tokens: u64) -> (TempDir, Manifest) {
    parted(token_bytes, &[cuts], document_tokens)
}

/// The same in parts.
fn parted(token_bytes: u32, parts: &[&[u64]], document_tokens: u64) -> (TempDir, Manifest) {
    let folder = tempfile::tempdir().unwrap();
    let vocab = if token_bytes == 2 { 65_536 } else { 200_000 };
    let (mut stream, mut digest) = (StreamRecord::empty(), StreamDigest::default());
    let mut records = Vec::new();
    for (part, cuts) in (0..).zip(parts) {
        let head = StreamHead {
            folder: open::part_folder(folder.path(), "web", part),
            source: "web".to_owned(),
            split: Split::Train,
            token_bytes,
            vocab,
            keep: Vec::new(),
        };
        fs::create_dir_all(&head.folder).unwrap();
        let DocumentRecord { file: first_file, group, .. } = record(stream.documents, 0, 1);
        let first_group = group.unwrap_or_default();
        records.push(PartRecord { first_file, first_group, dropped_file: None });
        for (index, documents) in cuts.iter().enumerate() {
            let (tokens, first) = (stream.tokens, stream.documents);
            let mut writer = ShardWriter::create(head.clone(), index, tokens, first).unwrap();
            for number in first..first + documents {
                let mut record = record(number, stream.tokens, document_tokens + number % 5);
                let tokens = document(number, record.tokens, vocab);
                if number == PLAIN {
                    digest.end_file(1);
                }
                digest.document(&tokens, &record).unwrap();
                record.file -= first_file;
                writer.push(&tokens, &record).unwrap();
                stream.tokens += record.tokens;
                stream.documents += 1;
            }
            stream.shards.push(ShardRecord { part, ..writer.finish().unwrap() });
        }
    }
    fs::write(folder.path().join(open::TOKENIZER), "{}").unwrap();
    let plain = stream.documents.min(PLAIN);
    let input = |path: &str, documents: u64, segments: u64| InputRecord {
        path: path.to_owned(),
        bytes: 1 << 20,
        sha256: Identity([1; 32]),
        documents,
        segments,
    };
    // Row groups without documents, too.
    let segments = stream.documents + 3;
    let inputs =
        vec![input("a.jsonl", plain, 1), input("b.parquet", stream.documents - plain, segments)];
    let open = &inputs[usize::from(stream.documents > PLAIN)..];
    open.iter().for_each(|input| digest.end_file(input.segments));
    stream.digest = digest.finish();
    let manifest = committed(folder.path(), stream, inputs, records, token_bytes, vocab);
    (folder, manifest)
}

/// Commits a store whose only stream is `train`.
fn committed(
    folder: &Path,
    train: StreamRecord,
    inputs: Vec<InputRecord>,
    parts: Vec<PartRecord>,
    token_bytes: u32,
    vocab: u32,
) -> Manifest {
    let mut manifest = Manifest {
        format: FORMAT,
        digest: Identity([0; 32]),
        request: Identity([0; 32]),
        tokenizer: TokenizerRecord {
            sha256: Identity::of_bytes(b"{}"),
            vocab,
            begin: None,
            end: Some(0),
            encoder: "none".to_owned(),
        },
        token_bytes,
        unit: UNIT_TOKENS,
        validation: "0".to_owned(),
        sources: vec![SourceRecord {
            name: "web".to_owned(),
            preparation: String::new(),
            validation: StreamRecord::without_documents(&inputs),
            inputs,
            train,
            dropped: Vec::new(),
            prepared: None,
            removed_file: None,
            keep: Vec::new(),
            parts,
        }],
    };
    manifest.digest = manifest.identity();
    open::commit(folder, &manifest).unwrap();
    manifest
}

/// Documents of the first file; those of the second one are in row groups.
const PLAIN: u64 = 3;

fn record(number: u64, first_token: u64, tokens: u64) -> DocumentRecord {
    DocumentRecord {
        id: Some(format!("doc-{number}")),
        file: u32::from(number >= PLAIN),
        row: number,
        group: (number >= PLAIN).then_some((number / 3) as u32),
        bytes: (number.is_multiple_of(3)).then_some((number, number + 7)),
        first_token,
        tokens,
        kept: Vec::new(),
    }
}

fn document(number: u64, tokens: u64, vocab: u32) -> Vec<u32> {
    let key = Key::from_seed(2).nth(number);
    (0..tokens).map(|i| (draw(key, Purpose::Generate, i) % u64::from(vocab)) as u32).collect()
}

/// Every damage of the store as text, including that of the manifest.
fn damages(store: &Path) -> Vec<String> {
    let manifest = match open::manifest(store) {
        Ok(manifest) => manifest,
        Err(fault) => {
            assert_eq!(fault.class(), Class::Data);
            return vec![fault.to_string()];
        }
    };
    let mut found = verify_tokenizer(store, &manifest).unwrap();
    for source in &manifest.sources {
        for split in Split::ALL {
            found.extend(verified(store, &manifest, source, split));
        }
    }
    found.iter().map(ToString::to_string).collect()
}

/// The damages of a stream: the same ones, by parts or if all its shards are checked one after the other.
fn verified(
    store: impl Into<Location>,
    manifest: &Manifest,
    source: &SourceRecord,
    split: Split,
) -> Vec<Damage> {
    let check = StreamCheck::new(store, manifest, source, split);
    let of = |parts: Vec<_>| {
        let parts = parts.into_iter().map(|shards| check.part(shards, &|_| ()));
        check.damages(parts.collect::<Result<_, _>>().unwrap()).unwrap()
    };
    let found = of(check.parts());
    assert_eq!(found, of(vec![&source.stream(split).shards[..]]));
    found
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

#[test]
fn a_store_as_written_is_whole() {
    for token_bytes in [2, 4] {
        let (folder, manifest) = store(token_bytes, &[90, 1, 200], 700);
        assert_eq!(damages(folder.path()), Vec::<String>::new());
        assert_eq!(open::manifest(folder.path()).unwrap(), manifest);
        assert_eq!(files(folder.path()).len(), 3 + 3 * 4);
    }
}

/// Shards of each part; the last parts begin within a segment, where no build cuts.
const PARTS: [&[&[u64]]; 3] =
    [&[&[40, 30]], &[&[2], &[1], &[30, 9], &[28]], &[&[1], &[3, 36], &[30]]];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn a_flipped_bit_anywhere_is_found_and_its_file_named(
        parts in prop::sample::select(&PARTS[..]),
        file: prop::sample::Index,
        bit: prop::sample::Index,
    ) {
        let (folder, _) = parted(2, parts, 900);
        prop_assert_eq!(damages(folder.path()), Vec::<String>::new());
        let files = files(folder.path());
        let path = &files[file.index(files.len())];
        let mut bytes = fs::read(path).unwrap();
        let at = bit.index(8 * bytes.len());
        bytes[at / 8] ^= 1 << (at % 8);
        fs::write(path, bytes).unwrap();
        let found = damages(folder.path());
        prop_assert!(found.len() == 1 && found[0].contains(name(path)), "{:?}", found);
    }
}

#[test]
fn a_damaged_block_is_named_with_its_documents() {
    let (folder, manifest) = store(4, &[10, 60], 1000);
    let shard = &manifest.sources[0].train.shards[1];
    let path = open::part_folder(folder.path(), "web", 0).join(&shard.token_file.name);
    let mut bytes = fs::read(&path).unwrap();
    // The first token of block 2, which by brute force belongs to the document below.
    let at = block_offset(BLOCK_TOKENS * 4, 2) as usize;
    let token = shard.first_token + 2 * BLOCK_TOKENS;
    let (mut owner, mut end) = (0, 0);
    while end <= token {
        end += 1000 + owner % 5;
        owner += 1;
    }
    bytes[at] ^= 1;
    fs::write(&path, bytes).unwrap();
    let found = damages(folder.path());
    let owner = format!("doc-{}", owner - 1);
    assert!(
        found.len() == 1 && found[0].contains("block 2") && found[0].contains(&owner),
        "{found:?} {owner}"
    );
    // Without the provenance, the starts still show which documents they are.
    let documents = path.with_file_name(&shard.document_file.name);
    fs::remove_file(documents).unwrap();
    let found = damages(folder.path());
    let number = owner.replace("doc-", "number ");
    assert!(
        found.len() == 2 && found.iter().any(|line| line.contains(&number)),
        "{found:?} {number}"
    );
}

#[test]
fn missing_short_long_and_swapped_files_are_named() {
    let (folder, _) = store(2, &[5, 5], 100);
    for path in files(folder.path()) {
        let bytes = fs::read(&path).unwrap();
        for damaged in
            [Some(&bytes[..bytes.len() - 1]), Some(&[&bytes[..], b"\0"].concat()[..]), None]
        {
            match damaged {
                Some(damaged) => fs::write(&path, damaged).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            let found = damages(folder.path());
            assert!(
                found.iter().any(|line| line.contains(name(&path))),
                "{}: {found:?}",
                path.display()
            );
        }
        fs::write(&path, bytes).unwrap();
    }
    let train = open::part_folder(folder.path(), "web", 0);
    let swap = |a: &str, b: &str| {
        let (left, right) = (fs::read(train.join(a)).unwrap(), fs::read(train.join(b)).unwrap());
        fs::write(train.join(a), right).unwrap();
        fs::write(train.join(b), left).unwrap();
    };
    swap("tokens-train-00000.arrow", "tokens-train-00001.arrow");
    assert!(damages(folder.path()).iter().any(|line| line.contains("tokens-train-00000.arrow")));
    swap("tokens-train-00000.arrow", "tokens-train-00001.arrow");
    assert_eq!(damages(folder.path()), Vec::<String>::new());
}

#[test]
fn lies_that_agree_with_the_digests_of_files_are_found() {
    let edited = |edit: fn(&mut Manifest)| {
        let (folder, mut manifest) = parted(2, &[&[20], &[20, 2], &[3]], 50);
        edit(&mut manifest);
        manifest.digest = manifest.identity();
        open::commit(folder.path(), &manifest).unwrap();
        damages(folder.path())
    };
    assert!(edited(|_| ()).is_empty());
    assert!(!edited(|manifest| manifest.tokenizer.vocab = 1000).is_empty());
    assert!(!edited(|manifest| manifest.sources[0].train.digest = Digest(1)).is_empty());
    assert!(!edited(|manifest| manifest.sources[0].train.tokens += 1).is_empty());
    assert!(!edited(|manifest| manifest.sources[0].train.shards.reverse()).is_empty());
    // A part returns to a file that has ended.
    let found = edited(|manifest| {
        let SourceRecord { parts, inputs, .. } = &mut manifest.sources[0];
        (parts[1].first_file, inputs[0].segments) = (0, 100);
    });
    assert!(found.len() == 2 && found[0].contains("has ended"), "{found:?}");
    assert!(!edited(|manifest| manifest.sources[0].inputs.clear()).is_empty());
    assert!(!edited(|manifest| manifest.sources[0].train.shards[0].documents -= 1).is_empty());
}

#[test]
fn a_shard_refuses_ids_beyond_the_vocabulary_and_records_that_lie() {
    let folder = tempfile::tempdir().unwrap();
    let head = StreamHead {
        folder: folder.path().to_owned(),
        source: "web".to_owned(),
        split: Split::Train,
        token_bytes: 2,
        vocab: 100,
        keep: Vec::new(),
    };
    let mut writer = ShardWriter::create(head, 0, 0, 0).unwrap();
    for id in [100, 127, 128, 1 << 31, (1 << 31) + 99, u32::MAX - 1, u32::MAX] {
        let fault = writer.push(&[99, id], &record(0, 0, 2)).unwrap_err();
        assert!(fault.class() == Class::Mismatch && fault.to_string().contains("doc-0"), "{fault}");
    }
    assert_eq!(writer.push(&[1, 2], &record(0, 0, 3)).unwrap_err().class(), Class::Bug);
    assert_eq!(writer.push(&[1, 2], &record(0, 5, 2)).unwrap_err().class(), Class::Bug);
}

#[test]
fn a_store_that_is_none_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let says = |path: &Path, word: &str| {
        let fault = open::manifest(path).unwrap_err();
        assert!(fault.class() == Class::Data && fault.to_string().contains(word), "{fault}");
    };
    says(&folder.path().join("nowhere"), "does not exist");
    says(folder.path(), "not a store");
    fs::create_dir(folder.path().join(open::BUILD_FOLDER)).unwrap();
    says(folder.path(), "half built");
    let (folder, mut manifest) = store(2, &[3], 10);
    for (format, next) in [(1, "zdata build CORPUS"), (FORMAT + 7, "use the release of zdata")] {
        manifest.format = format;
        manifest.digest = manifest.identity();
        open::commit(folder.path(), &manifest).unwrap();
        says(folder.path(), "another format");
        says(folder.path(), &format!("format {format}"));
        says(folder.path(), next);
    }
}

/// The rows of the tables of `ingest/docs/format.md`, cells trimmed of blanks and backquotes.
fn table_rows() -> Vec<Vec<String>> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/format.md"))
        .unwrap();
    let cells =
        |line: &str| line.split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect();
    text.lines().filter(|line| line.starts_with('|')).map(cells).collect()
}

#[test]
fn the_page_of_the_format_describes_the_bytes() {
    let rows = table_rows();
    let constants = [
        ("FORMAT", u64::from(FORMAT)),
        ("BLOCK_TOKENS", BLOCK_TOKENS),
        ("BLOCK_STARTS", BLOCK_STARTS),
        ("HEAD_BYTES", HEAD_BYTES),
        ("ROW_GROUP_DOCUMENTS", ROW_GROUP_DOCUMENTS as u64),
    ];
    for (name, value) in constants {
        let row =
            rows.iter().find(|row| row[1] == name).unwrap_or_else(|| panic!("no row for {name}"));
        assert_eq!(row[2], value.to_string(), "{name}");
    }
    // The offsets of the second table, evaluated for block i, hold exactly the tokens that were written.
    let offset = |what: &str, i: u64, w: u64, b: u64| {
        let row =
            rows.iter().find(|row| row.get(3).is_some_and(|cell| cell.starts_with(what))).unwrap();
        let (first, rest) = row[1].split_once(" + i x (").unwrap();
        let (head, body) = rest.trim_end_matches(')').split_once(" + ").unwrap();
        assert_eq!(body, "B x w");
        first.parse::<u64>().unwrap() + i * (head.parse::<u64>().unwrap() + b * w)
    };
    for token_bytes in [2u64, 4] {
        let (folder, manifest) = store(token_bytes as u32, &[100], 600);
        let train = open::part_folder(folder.path(), "web", 0);
        let bytes = fs::read(train.join("tokens-train-00000.arrow")).unwrap();
        let sums = fs::read(train.join("tokens-train-00000.sums")).unwrap();
        assert!(bytes.starts_with(b"ARROW1") && bytes.ends_with(b"ARROW1"));
        let all: Vec<u8> = (0..100)
            .flat_map(|n| document(n, 600 + n % 5, manifest.tokenizer.vocab))
            .flat_map(|id| id.to_le_bytes()[..token_bytes as usize].to_vec())
            .collect();
        for (block, values) in (0u64..).zip(all.chunks((BLOCK_TOKENS * token_bytes) as usize)) {
            let at = offset("the values of block i", block, token_bytes, BLOCK_TOKENS) as usize;
            assert_eq!(
                at as u64,
                offset("the metadata of block i", block, token_bytes, BLOCK_TOKENS) + HEAD_BYTES
            );
            assert!(bytes[at..at + values.len()] == *values, "block {block}");
            let sum = &sums[8 * block as usize..][..8];
            assert_eq!(sum, block_sum(values).to_le_bytes());
        }
        assert_eq!(sums.len(), 8 * all.len().div_ceil((BLOCK_TOKENS * token_bytes) as usize));
    }
}

#[test]
fn starts_lie_where_the_page_says_in_every_block() {
    let (folder, _) = store(2, &[BLOCK_STARTS * 2 + 5], 1);
    let path = open::part_folder(folder.path(), "web", 0).join("starts-train-00000.arrow");
    let bytes = fs::read(path).unwrap();
    let mut start = 0;
    for number in 0..BLOCK_STARTS * 2 + 5 {
        let (block, index) = (number / BLOCK_STARTS, number % BLOCK_STARTS);
        let at = (block_offset(BLOCK_STARTS * 8, block) + 8 * index) as usize;
        assert_eq!(bytes[at..at + 8], u64::to_le_bytes(start), "document {number}");
        start += 1 + number % 5;
    }
}
