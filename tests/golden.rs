//! Fear: that a data bit changes unnoticed between two versions of this project.
//!
//! The files in `tests/golden` freeze digests of a generated corpus. They depend on no machine: they cover data only.
//! `UPDATE_GOLDEN=1 cargo test --test it golden` rewrites them; the commit then says `[bits]` and why.

use std::fs;
use std::path::Path;

use crate::support::{Scratch, arg, build, corpus, curriculum, zdata};

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
