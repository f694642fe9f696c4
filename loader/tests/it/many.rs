//! Two thousand shards with 256 file handles for the whole process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use loader::{PrefetchOptions, Prefetcher, RankSlice, Stores};
use store::write::ShardWriter;
use store::{PartRecord, SourceRecord, Split, StreamRecord};

use crate::support::{PhaseText, commit_store, curriculum, head, plan, record, scratch};

const SHARDS: u64 = 2_000;
/// Tokens of a shard; one document each.
const TOKENS: u64 = 8;
const STORE: &str = "LOADER_TEST_MANY_SHARDS";

/// The token at a position of the stream, so that a reader can check it without a list.
fn token(place: u64) -> u32 {
    (place.wrapping_mul(0x9e37_79b9) >> 7 & 0xffff) as u32
}

/// Runs this test again under the limit, with the store's folder in its environment.
#[test]
fn thousands_of_shards_need_few_files() {
    if let Some(store) = std::env::var_os(STORE) {
        return read_all(&PathBuf::from(store));
    }
    let dir = scratch();
    write(dir.path());
    let name = "many::thousands_of_shards_need_few_files";
    let limited = format!("ulimit -n 256 && exec \"$0\" --exact {name} --nocapture");
    let program = std::env::current_exe().unwrap();
    let run =
        Command::new("sh").args(["-c", &limited]).arg(program).env(STORE, dir.path()).output();
    let run = run.unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(run.status.success(), "{said}{}", String::from_utf8_lossy(&run.stderr));
    assert!(said.contains("read under 256 files"), "the limited run did not read: {said}");
}

fn write(dir: &Path) {
    let head = head(dir, "web", Split::Train, 2);
    let mut train = StreamRecord::empty();
    for number in 0..SHARDS {
        let first = number * TOKENS;
        let mut shard = ShardWriter::create(head.clone(), number as usize, first, number).unwrap();
        let tokens: Vec<u32> = (first..first + TOKENS).map(token).collect();
        shard.push(&tokens, &record("web", number, first, TOKENS)).unwrap();
        train.shards.push(shard.finish().unwrap());
    }
    (train.tokens, train.documents) = (SHARDS * TOKENS, SHARDS);
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
    commit_store(dir, vec![web], 2, 1024);
}

/// Reads the whole stream twice through several threads and compares every token.
fn read_all(store: &Path) {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().nth(3), Some("256"), "the limit is not in force");
    let stores = Arc::new(Stores::open(&[store]).unwrap());
    let steps = SHARDS * TOKENS / (64 * 32) * 2;
    let text = curriculum(&[store], &["web"], &[PhaseText(steps, 64, 32, 1, "web = 1")]);
    let plan = Arc::new(plan(&text, &stores));
    let options = PrefetchOptions { threads: 4, depth: 4 };
    let stream = Prefetcher::start(plan, stores, 1..steps + 1, RankSlice::WHOLE, options, Ok);
    let mut seen = 0;
    for batch in stream.unwrap() {
        let batch = batch.unwrap();
        for (row, sample) in (0..).zip(&batch.samples) {
            let tokens = batch.row(batch.columns().tokens, row);
            let places = sample.spans.iter().flat_map(|s| s.start..s.start + u64::from(s.tokens));
            for (found, place) in tokens.iter().zip(places) {
                assert_eq!(*found, token(place) as i32, "token {place}");
                seen += 1;
            }
        }
    }
    assert!(seen > SHARDS * TOKENS * 3 / 2, "only {seen} tokens were read");
    println!("read under 256 files");
}
