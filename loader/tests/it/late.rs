//! A source of more than 2^33 tokens, of which only the end exists: it can be planned, searched and read.

use contract::{Class, Digest};
use loader::explain::pieces;
use loader::{RankSlice, Stores, batch};
use store::write::ShardWriter;
use store::{BLOCK_TOKENS, FileRecord, PartRecord, ShardRecord, SourceRecord, Split, StreamRecord};

use crate::support::{PhaseText, commit_store, curriculum, head, plan, record, scratch};

/// Tokens of the first document, which is missing.
const FIRST: u64 = (1 << 33) + 77;
const UNIT: u64 = 1 << 16;
const LENGTHS: [u64; 4] = [50_000, 1, 20_000, 200_000];
const SEQ_LEN: u32 = 256;

fn token(place: u64) -> u32 {
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40 & 0xffff) as u32
}

/// The record of a shard that does not exist: one document of `FIRST` tokens, in empty files of the right sizes.
fn claimed(folder: &std::path::Path) -> ShardRecord {
    let file = |name: &str, bytes| {
        std::fs::File::create(folder.join(name)).unwrap().set_len(bytes).unwrap();
        FileRecord { name: name.to_owned(), bytes, digest: Digest(7) }
    };
    ShardRecord {
        part: 0,
        first_token: 0,
        tokens: FIRST,
        first_document: 0,
        documents: 1,
        token_file: file("tokens-train-00000.arrow", 1 << 36),
        sum_file: file("tokens-train-00000.sums", FIRST.div_ceil(BLOCK_TOKENS) * 8),
        start_file: file("starts-train-00000.arrow", 1 << 16),
        document_file: file("documents-train-00000.parquet", 7),
    }
}

fn write(dir: &std::path::Path) {
    let head = head(dir, "web", Split::Train, 2);
    let claimed = claimed(&head.folder);
    let mut shard = ShardWriter::create(head, 1, FIRST, 1).unwrap();
    let mut at = FIRST;
    for (number, length) in (1..).zip(LENGTHS) {
        let tokens: Vec<u32> = (at..at + length).map(token).collect();
        shard.push(&tokens, &record("web", number, at, length)).unwrap();
        at += length;
    }
    let shards = vec![claimed, shard.finish().unwrap()];
    let (tokens, documents) = (at, 1 + LENGTHS.len() as u64);
    let train = StreamRecord { tokens, documents, text_bytes: 0, digest: Digest(0), shards };
    let (validation, dropped, inputs) = (StreamRecord::empty(), Vec::new(), Vec::new());
    let (name, preparation) = ("web".to_owned(), String::new());
    let web = SourceRecord {
        name,
        preparation,
        inputs,
        train,
        validation,
        dropped,
        prepared: None,
        removed_file: None,
        keep: Vec::new(),
        parts: vec![PartRecord::default()],
    };
    commit_store(dir, vec![web], 2, UNIT);
}

#[test]
fn text_beyond_32_bits_is_found_and_read_where_the_plan_says() {
    let dir = scratch();
    write(dir.path());
    let stores = Stores::open(&[dir.path()]).unwrap();
    let end = FIRST + LENGTHS.iter().sum::<u64>();
    assert_eq!(stores.facts()[0].tokens, end);
    // One epoch, one sequence per step, so that a step exists if its sequence exists.
    let steps = end / u64::from(SEQ_LEN);
    let text = curriculum(&[dir.path()], &["web"], &[PhaseText(steps, SEQ_LEN, 1, 1, "web = 1")]);
    let plan = plan(&text, &stores);
    let visits = plan.visits(0, FIRST..end).unwrap();
    let mut seen = vec![0u32; (end - FIRST) as usize];
    let starts: Vec<u64> = LENGTHS
        .iter()
        .scan(FIRST, |at, length| Some(std::mem::replace(at, *at + length)))
        .collect();
    let mut read = 0;
    for visit in &visits {
        let sample = plan.sample(visit.sample).unwrap();
        if sample.spans.iter().any(|span| span.start < FIRST) {
            continue;
        }
        let step = plan.step_of(visit.sample).unwrap();
        let found = batch(&plan, &stores, step, RankSlice::WHOLE).unwrap();
        let row: &[i32] = found.columns().tokens;
        for at in 0..visit.tokens as usize {
            let (place, slot) = (visit.token + at as u64, visit.offset_in_sequence as usize + at);
            assert_eq!(row[slot], token(place) as i32, "token {place}");
            let ends = starts.contains(&(place + 1)) || place + 1 == end;
            if found.columns().mask[slot] == 1 {
                assert!(!ends);
                assert_eq!(
                    found.columns().labels[slot],
                    token(place + 1) as i32,
                    "label of {place}"
                );
            }
            let begins = found.boundaries[0].contains(&(slot as u32));
            assert_eq!(begins, found.columns().positions[slot] == 0, "position of {place}");
            assert!(begins || !starts.contains(&place), "a document begins at {place}");
            seen[(place - FIRST) as usize] += 1;
        }
        for piece in pieces(&plan, &stores, &[sample]).unwrap().remove(0) {
            let owner = starts.partition_point(|start| *start <= piece.tokens.start);
            assert_eq!(piece.document, owner as u64);
            assert_eq!(piece.record.shown_id(), format!("web-{owner}"));
            assert!(piece.in_document().end <= LENGTHS[owner - 1]);
        }
        read += 1;
    }
    assert!(read > 900, "only {read} of {} sequences were whole", visits.len());
    assert!(seen.iter().all(|count| *count <= 1), "a token was seen twice in one epoch");
    let there = seen.iter().filter(|count| **count == 1).count();
    assert!(there as u64 > (end - FIRST) * 9 / 10, "{there} tokens were seen");
    // Reading missing text is an error that names the file, wherever in 2^33 tokens it is.
    let far = plan.visits(0, (1 << 32) + 5..(1 << 32) + 6).unwrap()[0];
    let step = plan.step_of(far.sample).unwrap();
    let fault = batch(&plan, &stores, step, RankSlice::WHOLE).unwrap_err();
    assert!(fault.class() == Class::Data && fault.to_string().contains("-00000."), "{fault}");
}
