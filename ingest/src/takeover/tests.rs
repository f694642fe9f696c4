//! Builds from an earlier store: what is taken over, what is not, and that nobody can tell afterwards.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use contract::{Class, Fault, Result};
use proptest::prelude::*;
use store::{Location, Manifest};

use crate::build::{Outcome, build_from};
use crate::corpus::Corpus;
use crate::testing::{Workbench, json_lines, options, tree};

fn build(corpus: &Path, store: &Path, from: Option<&Path>) -> Result<Manifest> {
    match build_from(
        &Corpus::read(corpus).unwrap(),
        store,
        from.map(Location::from).as_ref(),
        options(2),
        || Ok(()),
    )? {
        Outcome::Built { manifest, .. } => Ok(manifest),
        Outcome::UpToDate(_) => panic!("there was a store already"),
    }
}

/// Builds from nothing and from `old`; returns which of the two sources were linked. Nothing else may differ.
fn linked(bench: &Workbench, corpus: &Path, old: &Path, name: &str) -> [bool; 2] {
    let (fresh, new) = (bench.path(&format!("{name}-fresh")), bench.path(&format!("{name}-new")));
    build(corpus, &fresh, None).unwrap();
    build(corpus, &new, Some(old)).unwrap();
    assert!(tree(&fresh) == tree(&new), "{name}");
    ["web", "math"].map(|source| {
        let file = |store: &Path| store.join(source).join("train/tokens-00000.arrow");
        fs::metadata(file(&new)).unwrap().ino() == fs::metadata(file(old)).unwrap().ino()
    })
}

fn corpus(bench: &Workbench, keys: &str, steps: &str) -> PathBuf {
    let path = bench.corpus(keys);
    let text = fs::read_to_string(&path).unwrap() + steps;
    bench.write("corpus.toml", text)
}

/// Documents that are all different.
fn unique(numbers: std::ops::Range<u64>) -> String {
    let line =
        |i| serde_json::json!({"id": format!("d{i}"), "text": format!("document number {i}")});
    numbers.map(|i| line(i).to_string() + "\n").collect()
}

const CUT: &str = "shard_tokens = 4000";

#[test]
fn only_what_changed_is_built() {
    let bench = Workbench::new(90);
    let old = bench.path("old");
    build(&corpus(&bench, CUT, ""), &old, None).unwrap();
    let same = |name: &str, keys: &str, steps: &str| {
        linked(&bench, &corpus(&bench, keys, steps), &old, name)
    };
    assert_eq!(same("nothing", CUT, ""), [true, true]);
    assert_eq!(same("unit", &format!("{CUT}\non_error = \"skip\""), ""), [true, true]);
    let step = "[[prepare]]\nstep = \"length\"\nmin_words = 5\n";
    assert_eq!(same("all steps", CUT, step), [false, false]);
    assert_eq!(same("one step", CUT, &format!("{step}sources = [\"math\"]\n")), [true, false]);
    assert_eq!(same("larger shards", "shard_tokens = 9000", ""), [false, true]);
    assert_eq!(same("smaller shards", "shard_tokens = 1500", ""), [false, false]);
    assert_eq!(same("other limit", "max_document_bytes = 100000", ""), [false, false]);
    bench.write("math.jsonl", json_lines(1_000_000, 31));
    assert_eq!(linked(&bench, &corpus(&bench, CUT, ""), &old, "input"), [true, false]);
    fs::rename(bench.path("web-1.jsonl"), bench.path("web-9.jsonl")).unwrap();
    assert_eq!(linked(&bench, &corpus(&bench, CUT, ""), &old, "rename"), [true, false]);
}

#[test]
fn another_tokenizer_takes_nothing_over() {
    let bench = Workbench::new(60);
    let old = bench.path("old");
    build(&corpus(&bench, "", ""), &old, None).unwrap();
    let changed = crate::testing::bytes_tokenizer(|json| json["version"] = "2.0".into());
    fs::write(
        bench.path("tokenizer.json"),
        String::from_utf8(changed).unwrap().replace("2.0", "1.0") + "\n",
    )
    .unwrap();
    assert_eq!(linked(&bench, &corpus(&bench, "", ""), &old, "tokenizer"), [false, false]);
}

#[test]
fn a_source_whose_duplicates_went_elsewhere_is_built_again() {
    let bench = Workbench::new(60);
    let steps = "[[prepare]]\nstep = \"exact-duplicates\"\n";
    bench.write("web-0.jsonl", unique(0..60));
    bench.write("web-1.jsonl", unique(60..80));
    bench.write("math.jsonl", unique(2000..2040) + &unique(10..15));
    let old = bench.path("old");
    build(&corpus(&bench, "", steps), &old, None).unwrap();
    assert_eq!(linked(&bench, &corpus(&bench, "", steps), &old, "same"), [true, true]);
    // Web loses what math repeats: math's own inputs are the same, what stays of them is not.
    bench.write("web-0.jsonl", unique(20..60));
    assert_eq!(linked(&bench, &corpus(&bench, "", steps), &old, "web"), [false, false]);
    bench.write("web-0.jsonl", unique(0..60) + &unique(5000..5003));
    assert_eq!(linked(&bench, &corpus(&bench, "", steps), &old, "more"), [false, true]);
}

#[test]
fn damage_is_not_taken_over() {
    let bench = Workbench::new(60);
    let corpus = corpus(&bench, "", "");
    let old = bench.path("old");
    build(&corpus, &old, None).unwrap();
    let path = old.join("web/train/tokens-00000.arrow");
    let mut bytes = fs::read(&path).unwrap();
    bytes[700] ^= 1;
    fs::write(&path, bytes).unwrap();
    let fault = build(&corpus, &bench.path("new"), Some(&old)).unwrap_err();
    assert!(fault.class() == Class::Data && fault.to_string().contains("tokens-00000"), "{fault}");
    let fault = build(&corpus, &bench.path("other"), Some(&bench.path("none"))).unwrap_err();
    assert!(fault.to_string().contains("store does not exist"), "{fault}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]
    #[test]
    fn kills_leave_no_trace(kill in 1usize..160, math: bool) {
        let bench = Workbench::new(80);
        let path = corpus(&bench, CUT, "");
        let old = bench.path("old");
        build(&path, &old, None).unwrap();
        // One of the two changes, so that what is taken over comes before or after what is built.
        bench.write(if math { "math.jsonl" } else { "web-1.jsonl" }, json_lines(7000, 40));
        let (whole, killed) = (bench.path("whole"), bench.path("killed"));
        build(&path, &whole, None).unwrap();
        let request = Corpus::read(&path).unwrap();
        let mut left = kill;
        let outcome = build_from(&request, &killed, Some(&Location::from(&old)), options(1), || {
            left = left.saturating_sub(1);
            if left == 0 { Err(Fault::machine("killed")) } else { Ok(()) }
        });
        if outcome.is_err() {
            let from = (kill % 2 == 0).then_some(old.as_path());
            build(&path, &killed, from).unwrap();
        }
        prop_assert!(tree(&whole) == tree(&killed));
    }
}
