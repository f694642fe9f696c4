//! Fear: that something that should affect only speed, or a file's location, changes a bit.

use std::fs;

#[cfg(feature = "train")]
use crate::support::{Ran, compiled, ztrain_command};
use crate::support::{Scratch, arg, assert_same_tree, build, corpus, curriculum, zdata};

#[test]
fn worker_counts_do_not_reach_the_store() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 400, "part_bytes = 1");
    let stores: Vec<_> = ["1", "2", "7"]
        .iter()
        .map(|workers| {
            let store = scratch.path(&format!("store-{workers}"));
            zdata(&["build", arg(&corpus), "--out", arg(&store), "--workers", workers]).ok();
            zdata(&["verify", arg(&store)]).ok();
            store
        })
        .collect();
    assert_same_tree(&stores[0], &stores[1]);
    assert_same_tree(&stores[0], &stores[2]);
}

#[test]
fn a_moved_or_touched_corpus_is_the_same_corpus() {
    let (here, there) = (Scratch::new(), Scratch::new());
    let corpus_here = corpus(&here, 60, "");
    let store = build(&here, &corpus_here, "store");
    fs::rename(here.path("raw"), there.path("raw")).unwrap();
    fs::copy(here.path("tokenizer.json"), there.path("tokenizer.json")).unwrap();
    let corpus_there = there.write("corpus.toml", fs::read(&corpus_here).unwrap());
    let again = zdata(&["build", arg(&corpus_there), "--out", arg(&store)]).ok();
    let moved = build(&there, &corpus_there, "store");
    assert_eq!(digest_of(&store), digest_of(&moved), "{again}");
}

fn digest_of(store: &std::path::Path) -> String {
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(store.join("manifest.json")).unwrap()).unwrap();
    manifest["digest"].as_str().unwrap().to_owned()
}

#[test]
fn the_cut_into_parts_does_not_reach_the_digest() {
    let scratch = Scratch::new();
    let whole = corpus(&scratch, 200, "");
    let text = fs::read_to_string(&whole).unwrap();
    let cut = scratch.write("cut.toml", format!("part_bytes = 1\n{text}"));
    let (whole, cut) = (build(&scratch, &whole, "whole"), build(&scratch, &cut, "cut"));
    assert_eq!(digest_of(&whole), digest_of(&cut));
    let steps = |store, name| {
        let curriculum = curriculum(&scratch, store, name, &[]);
        zdata(&["digest", arg(&curriculum), "--steps", "1..21"]).ok()
    };
    let digests = steps(&whole, "whole-run.toml");
    assert_eq!(digests, steps(&cut, "cut-run.toml"));
    assert_eq!(digests.lines().count(), 20, "{digests}");
}

#[test]
fn what_comes_later_leaves_what_was_before() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 400, "");
    let store = build(&scratch, &corpus, "store");
    let digests = |name, change: &[(&str, &str)], steps| {
        let curriculum = curriculum(&scratch, &store, name, change);
        zdata(&["digest", arg(&curriculum), "--steps", steps, "--workers", "3"]).ok()
    };
    let before = digests("a.toml", &[], "1..13");
    let changed = [("seq_len = 128", "seq_len = 256"), ("web = 1, math = 3", "web = 1")];
    assert_eq!(before, digests("b.toml", &changed, "1..13"));
    assert_eq!(before, digests("c.toml", &[("steps = 12", "steps = 15")], "1..13"));
    assert_ne!(before, digests("d.toml", &[("seed = 11", "seed = 12")], "1..13"));
}

/// The table of operations is a property of the run: chosen at its start, recorded, and fixed.
#[cfg(feature = "train")]
#[test]
fn another_table_of_operations_is_another_run() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let train = |operations: &str, name: &str, steps: &str| -> Ran {
        let out = scratch.path(name);
        let args = ["--curriculum", arg(&path), "--out", arg(&out), "--stop-after", steps];
        ztrain_command(&args).env("ZTRAIN_OPS", operations).output().unwrap().into()
    };
    train("reference", "reference", "2").ok();
    train("cpu", "reference", "3").fails(4, &["operations", "reference", "cpu"]);
    train("reference", "reference", "3").ok();
    train("", "cpu", "3").ok();
    train("cpu", "cpu", "4").ok();
    train("fast", "cpu", "5").fails(2, &["ZTRAIN_OPS", "fast", "reference"]);
    let losses = |name: &str| -> Vec<f64> {
        let ledger = fs::read_to_string(scratch.path(name).join("ledger.jsonl")).unwrap();
        let lines = ledger.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.filter_map(|line: serde_json::Value| line["loss"].as_f64()).collect()
    };
    // Different rounding, the same mathematics.
    for (a, b) in losses("reference").iter().zip(losses("cpu")) {
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }
    assert_eq!(losses("reference").len(), 3);
}

/// The C library affects bits and has no version to query, so its results are recorded as a property of the run.
#[cfg(feature = "train")]
#[test]
fn another_mathematics_library_is_another_run() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let library = compiled("mathematics.cpp", "mathematics.so");
    let train = |name: &str, steps: &str, more: &[&str], off: &str| -> Ran {
        let out = scratch.path(name);
        let args = ["--curriculum", arg(&path), "--out", arg(&out), "--stop-after", steps];
        let mut command = ztrain_command(&[&args[..], more].concat());
        command.env("LD_PRELOAD", &library).env("MATHEMATICS", off).output().unwrap().into()
    };
    train("run", "2", &[], "").ok();
    train("run", "3", &[], "all").fails(4, &["mathematics"]);
    train("run", "3", &[], "").ok();
    let ranks = ["--nproc", "2", "--workers", "1"];
    train("apart", "2", &ranks, "1").fails(4, &["mathematics"]);
    train("together", "2", &ranks, "all").ok();
}
