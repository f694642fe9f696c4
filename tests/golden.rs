//! Fear: that a data bit changes unnoticed between two versions of this project.
//!
//! The files in `tests/golden` freeze digests of a generated corpus. They depend on no machine: they cover data only.
//! `UPDATE_GOLDEN=1 cargo test --test it golden` rewrites them; the commit then says `[bits]` and why.

use std::fs;
use std::path::Path;

use crate::support::{
    Scratch, arg, build, corpus, curriculum, document, json_lines, parquet_in_groups, zdata,
};

/// Compares `found` with the golden file, or writes the file if `UPDATE_GOLDEN` is set.
#[track_caller]
pub(crate) fn golden(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, found).unwrap();
    }
    let frozen = fs::read_to_string(&path).expect("the golden file is part of the repository");
    assert_eq!(frozen, found, "a data bit moved: see the head of tests/golden.rs");
}

#[test]
fn tokenizer_store_and_steps_keep_their_digests() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 400, "");
    let store = build(&scratch, &corpus, "store");
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(store.join("manifest.json")).unwrap()).unwrap();
    let mut found = format!("tokenizer {}\n", manifest["tokenizer"]["sha256"].as_str().unwrap());
    found += &format!("store {}\n", manifest["digest"].as_str().unwrap());
    for source in manifest["sources"].as_array().unwrap() {
        let train = &source["train"];
        let (name, digest) = (source["name"].as_str().unwrap(), train["digest"].as_str().unwrap());
        found += &format!("stream {name} {digest} {} tokens\n", train["tokens"]);
    }
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    found += &zdata(&["digest", arg(&path), "--steps", "1..21"]).ok();
    golden("small.txt", &found);
}

/// The tokens of batches, packed and with banned documents, over files of several kinds, some in row groups, with
/// dropped records. The format of a store may change, and where files are cut; what a step trains on may not.
#[test]
fn batches_outlive_the_format_of_the_store() {
    let scratch = Scratch::new();
    let path = corpus(&scratch, 200, "on_error = \"skip\"");
    scratch.write("raw/web-00.jsonl", json_lines(7, 9) + "nonsense\n{\"text\": \"\"}\n");
    scratch.write("raw/web-2.jsonl", "");
    // Text of another file among them: later duplicates go.
    let texts: Vec<String> =
        (0..130).map(|i| document(if i % 5 == 0 { 1 } else { 4 }, i)).collect();
    scratch.write("raw/table.parquet", parquet_in_groups(&[("text", texts)], 33));
    let more = "\n[[source]]\nname = \"table\"\nfiles = [\"raw/table.parquet\"]\n\n\
                [[prepare]]\nstep = \"exact-duplicates\"\n";
    fs::write(&path, fs::read_to_string(&path).unwrap() + more).unwrap();
    let store = build(&scratch, &path, "store");
    let text = fs::read_to_string(&path).unwrap();
    let cut = scratch.write("cut.toml", format!("part_bytes = 1\n{text}"));
    let cut = build(&scratch, &cut, "cut");
    assert!(cut.join("table/00003").is_dir() && !store.join("table/00001").exists());
    let sources = "[source.web]\npacking = \"best-fit\"\nlengths = { 64 = 2, 128 = 1 }\n\n\
                   [source.table]\nmax_epochs = 9\n\n[source.math]";
    let changes = [
        ("[source.math]", sources),
        ("mix = { web = 0.7, math = \"3/10\" }", "mix = { web = 2, math = 1, table = 1 }"),
        ("mix = { web = 1, math = 3 }", "mix = { web = 1, math = 1, table = 2 }"),
    ];
    let ban = "\n[[amendment]]\nstep = 4\nban = { web = [0, 17, 300], table = [0, 9, 77] }\n";
    for store in [store, cut] {
        let run = curriculum(&scratch, &store, "run.toml", &changes);
        fs::write(&run, fs::read_to_string(&run).unwrap() + ban).unwrap();
        golden("batches.txt", &zdata(&["digest", arg(&run), "--steps", "1..21"]).ok());
    }
}

#[test]
fn shipped_curricula_keep_their_plans() {
    let curricula = Path::new(env!("CARGO_MANIFEST_DIR")).join("curricula");
    let mut found = String::new();
    for name in ["phase1.toml", "phase2.toml", "phase3.toml"] {
        let told = zdata(&["plan", arg(&curricula.join(name)), "--json"]).ok();
        let plan: serde_json::Value = serde_json::from_str(&told).unwrap();
        found += &format!("{name} {} {} steps\n", plan["digest"].as_str().unwrap(), plan["steps"]);
    }
    golden("curricula.txt", &found);
}
