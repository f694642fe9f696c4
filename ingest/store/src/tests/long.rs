//! Streams and documents beyond 2^31 and 2^32 tokens.
//!
//! The earlier shards are only claimed by the manifest and their files are holes, so the numbers are large and the
//! files small. `ZSTACK_LONG=2147500000` really writes a document of that many tokens (4.3 GB on disk).

use super::*;
use crate::read::{ReadCache, Store};

const FIRST_DOCUMENT: u64 = (1 << 32) + 9;

/// The token at an offset of the stream.
fn token(place: u64) -> u32 {
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40 & 0xffff) as u32
}

fn head(folder: &Path) -> StreamHead {
    let folder = open::part_folder(folder, "web", 0);
    fs::create_dir_all(&folder).unwrap();
    StreamHead {
        folder,
        source: "web".to_owned(),
        split: Split::Train,
        token_bytes: 2,
        vocab: 65_536,
        keep: Vec::new(),
    }
}

/// Commits a store of one stream with these shards.
fn commit(folder: &Path, shards: Vec<ShardRecord>, digest: Digest) -> Manifest {
    let (old, mut manifest) = store(2, &[1], 1);
    fs::copy(old.path().join(open::TOKENIZER), folder.join(open::TOKENIZER)).unwrap();
    let last = shards.last().unwrap();
    let (tokens, documents) =
        (last.first_token + last.tokens, last.first_document + last.documents);
    manifest.sources[0].inputs[1].documents = documents - manifest.sources[0].inputs[0].documents;
    manifest.sources[0].train = StreamRecord { tokens, documents, text_bytes: 0, digest, shards };
    manifest.digest = manifest.identity();
    open::commit(folder, &manifest).unwrap();
    manifest
}

fn verified(folder: &Path, manifest: &Manifest) -> Vec<Damage> {
    super::verified(folder, manifest, &manifest.sources[0], Split::Train)
}

/// A claimed shard: `tokens` tokens of `FIRST_DOCUMENT` documents, in empty files of the right sizes.
fn claimed(folder: &Path, tokens: u64) -> ShardRecord {
    let file = |name: &str, bytes| {
        fs::File::create(folder.join(name)).unwrap().set_len(bytes).unwrap();
        FileRecord { name: name.to_owned(), bytes, digest: Digest(7) }
    };
    ShardRecord {
        part: 0,
        first_token: 0,
        tokens,
        first_document: 0,
        documents: FIRST_DOCUMENT,
        token_file: file("tokens-train-00000.arrow", 1 << 43),
        sum_file: file("tokens-train-00000.sums", tokens.div_ceil(BLOCK_TOKENS) * 8),
        start_file: file("starts-train-00000.arrow", 1 << 43),
        document_file: file("documents-train-00000.parquet", 7),
    }
}

fn late_store(first: u64, lengths: &[u64]) -> (TempDir, Manifest, Vec<DocumentRecord>) {
    let folder = tempfile::tempdir().unwrap();
    let head = head(folder.path());
    let claimed = claimed(&head.folder, first);
    let mut writer = ShardWriter::create(head, 1, first, FIRST_DOCUMENT).unwrap();
    let (mut at, mut records) = (first, Vec::new());
    for (number, length) in (FIRST_DOCUMENT..).zip(lengths) {
        let mut record = record(number, at, *length);
        (record.row, record.group) = ((1 << 40) + number, Some(1));
        let tokens: Vec<u32> = (at..at + length).map(token).collect();
        writer.push(&tokens, &record).unwrap();
        at += length;
        records.push(record);
    }
    let shards = vec![claimed, writer.finish().unwrap()];
    let manifest = commit(folder.path(), shards, Digest(0));
    (folder, manifest, records)
}

#[test]
fn places_beyond_32_bits_are_read_checked_and_named() {
    for first in [(1 << 31) - 3, (1 << 32) - 30_000, 1 << 32, (1 << 40) + 1] {
        let (folder, manifest, records) = late_store(first, &[20_000, 1, 40_000, 7]);
        let stream = Store::open_with(folder.path(), ReadCache::new(8)).unwrap();
        let stream = stream.stream(0, Split::Train);
        // Opening a store checks that all files exist; one that is removed later is noticed by its reader.
        for file in manifest.sources[0].train.shards[0].files() {
            fs::remove_file(head(folder.path()).folder.join(&file.name)).unwrap();
        }
        let end = first + 60_008;
        assert_eq!((stream.record().tokens, stream.record().documents), (end, FIRST_DOCUMENT + 4));
        for range in [first..end, first + 19_999..first + 20_002, end - 8..end] {
            let (mut ids, mut starts) = (Vec::new(), Vec::new());
            stream.read_tokens(range.clone(), &mut ids).unwrap();
            assert!(ids.iter().copied().eq(range.clone().map(token)), "{range:?}");
            stream.starts_in(range.clone(), &mut starts).unwrap();
            let wanted = records.iter().map(|record| record.first_token);
            assert_eq!(starts, wanted.filter(|s| range.contains(s)).collect::<Vec<_>>());
        }
        for (number, record) in (FIRST_DOCUMENT..).zip(&records) {
            assert_eq!(&stream.document(number).unwrap(), record);
            for token in [record.first_token, record.first_token + record.tokens - 1] {
                assert_eq!(stream.document_of_token(token).unwrap(), number);
            }
        }
        let fault = stream.read_tokens(first - 1..first + 1, &mut Vec::new()).unwrap_err();
        assert!(fault.to_string().contains("tokens-train-00000.arrow"), "{fault}");
        // Claimed files are missing; existing ones are intact, in bytes and in meaning.
        let missing: Vec<String> = verified(folder.path(), &manifest)
            .iter()
            .map(|damage| format!("{} {}", damage.file, damage.what))
            .collect();
        assert_eq!(missing.len(), 4, "{missing:?}");
        assert!(missing.iter().all(|m| m.contains("-00000.") && m.contains("missing")));
        // Damage is reported with its block and document.
        let path = head(folder.path()).folder.join("tokens-train-00001.arrow");
        let mut bytes = fs::read(&path).unwrap();
        bytes[block_offset(BLOCK_TOKENS * 2, 3) as usize] ^= 8;
        fs::write(&path, bytes).unwrap();
        let found = verified(folder.path(), &manifest).pop().unwrap();
        assert_eq!(found.block, Some(3));
        let owners = format!("doc-{}, doc-{}", FIRST_DOCUMENT + 2, FIRST_DOCUMENT + 3);
        assert!(found.documents.as_ref().is_some_and(|d| d.contains(&owners)), "{found}");
    }
}

#[test]
fn a_document_of_any_length_is_written_read_and_verified() {
    let wanted = std::env::var("ZSTACK_LONG").map_or(100_000, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut tokens = vec![0u32; wanted as usize];
    // Only a few offsets, so that the remaining memory stays untouched.
    let marks: Vec<u64> = [0, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, wanted / 2, wanted - 1]
        .into_iter()
        .filter(|place| *place < wanted)
        .collect();
    for place in &marks {
        tokens[*place as usize] = 1 + (*place % 999) as u32;
    }
    let records = [record(0, 0, wanted), record(1, wanted, 3)];
    let mut writer = ShardWriter::create(head(folder.path()), 0, 0, 0).unwrap();
    writer.push(&tokens, &records[0]).unwrap();
    writer.push(&[7, 8, 9], &records[1]).unwrap();
    let mut digest = StreamDigest::default();
    digest.document(&tokens, &records[0]).unwrap();
    digest.document(&[7, 8, 9], &records[1]).unwrap();
    [1, 1 + 3].into_iter().for_each(|segments| digest.end_file(segments));
    let digest = digest.finish();
    drop(tokens);
    let manifest = commit(folder.path(), vec![writer.finish().unwrap()], digest);
    assert_eq!(verified(folder.path(), &manifest), []);
    let store = Store::open(folder.path()).unwrap();
    let stream = store.stream(0, Split::Train);
    for place in &marks {
        let from = place.saturating_sub(1);
        let mut ids = Vec::new();
        stream.read_tokens(from..place + 1, &mut ids).unwrap();
        assert_eq!(ids.last(), Some(&(1 + (*place % 999) as u32)), "{place}");
        assert_eq!(stream.document_of_token(*place).unwrap(), 0);
    }
    let (mut ids, mut starts) = (Vec::new(), Vec::new());
    stream.read_tokens(wanted - 2..wanted + 3, &mut ids).unwrap();
    assert_eq!(ids[2..], [7, 8, 9]);
    stream.starts_in(1..u64::MAX, &mut starts).unwrap();
    assert_eq!(starts, [wanted]);
    assert_eq!(stream.document(0).unwrap(), records[0]);
    assert_eq!(stream.document_of_token(wanted).unwrap(), 1);
}
