//! Fear: that a document is dropped silently, or that an edit of the steps is not noticed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use crate::golden::golden;
use crate::resume::{Fire, kills};
use crate::support::{
    Scratch, arg, assert_same_tree, build, corpus, document, json_lines, zdata, zdata_command,
};

/// Input for every kind of step: duplicates, near-duplicates, chats and an evaluation set.
pub(crate) fn prepared(scratch: &Scratch) -> PathBuf {
    let plain = corpus(scratch, 150, "");
    let line = |id: String, text: String| json!({"id": id, "text": text}).to_string() + "\n";
    let copies = (0..60).map(|i| {
        let text = document(1, i);
        let text =
            if i % 2 == 0 { text } else { text.replacen("river", "brook", 1) + " e\u{301}\r\n" };
        line(format!("copy-{i}"), text)
    });
    // Without this document the source would be empty and refused.
    let own = "This page is about the one thing that none of the others has to say, and so it stays to the end.";
    let own = line("own".to_owned(), own.to_owned());
    scratch.write("raw/copies.jsonl", copies.chain([own]).collect::<String>());
    let chat = |i: u64| {
        let answer = format!("<think>{}</think>The answer is {i}.", document(5, i));
        json!({"id": i, "messages": [{"role": "user", "content": document(6, i)},
                                     {"role": "assistant", "content": answer}]})
    };
    scratch
        .write("raw/chat.jsonl", (0..40).map(|i| chat(i).to_string() + "\n").collect::<String>());
    let items =
        (100..104).map(|i| json!({"question": document(1, i), "answer": "42"}).to_string() + "\n");
    scratch.write("eval/set.jsonl", items.collect::<String>());
    let text = fs::read_to_string(&plain).unwrap();
    scratch.write("prepared.toml", text + STEPS)
}

const STEPS: &str = r#"
[[source]]
name = "copies"
files = ["raw/copies.jsonl"]
id = "id"

[[source]]
name = "chat"
files = ["raw/chat.jsonl"]
chat = "messages"
id = "id"

[[prepare]]
step = "clean"
trailing_space = true

[[prepare]]
step = "length"
min_words = 15

[[prepare]]
step = "gopher-quality"
sources = ["web", "copies"]
min_words = false
min_letter_words = 0.5

[[prepare]]
step = "exact-duplicates"

[[prepare]]
step = "near-duplicates"

[[prepare]]
step = "decontaminate"
files = ["eval/*.jsonl"]
template = "{question} {answer}"

[[prepare]]
step = "gopher-repetition"
sources = ["math"]
max_top_2 = 0.3
max_top_3 = false
max_top_4 = false

[[prepare]]
step = "trim"
sources = ["chat"]
context = 300
"#;

fn inspected(store: &Path) -> Value {
    serde_json::from_str(&zdata(&["inspect", arg(store), "--json"]).ok()).unwrap()
}

#[test]
fn every_dropped_record_has_a_reason_and_the_accounting_balances() {
    let scratch = Scratch::new();
    let path = prepared(&scratch);
    let store = build(&scratch, &path, "store");
    let answer = inspected(&store);
    let mut reasons = std::collections::BTreeSet::new();
    for source in answer["sources"].as_array().unwrap() {
        assert_eq!(source["accounting"]["balance"], 0, "{source}");
        assert_eq!(source["prepared"]["balance"], 0, "{source}");
        for dropped in source["dropped"].as_array().unwrap() {
            reasons
                .insert(dropped["reason"].as_str().unwrap().split(':').next().unwrap().to_owned());
        }
    }
    let steps = ["length", "exact-duplicates", "near-duplicates", "decontaminate"];
    assert!(steps.iter().all(|step| reasons.contains(*step)), "{reasons:?}");
    // Evaluation items were taken from the first source: exactly these documents are removed, and the list says why.
    let hits = fs::read_to_string(store.join("web/contaminated.jsonl")).unwrap();
    let items: Vec<Value> = hits.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for item in [1, 2, 4] {
        let id = format!("doc-1-{}", 99 + item);
        assert!(items.iter().any(|hit| hit["item"] == item && hit["id"] == id), "{item}: {hits}");
    }
    let told = zdata(&["inspect", arg(&store)]).ok();
    for word in [
        "exact-duplicates: of an earlier document",
        "step 01 clean: changed",
        "bytes of text",
        "trim",
    ] {
        assert!(told.contains(word), "no {word:?} in {told}");
    }
    zdata(&["verify", arg(&store)]).ok();
    // No chat is longer than its context.
    let sample =
        zdata(&["inspect", arg(&store), "--sample", "1000", "--corpus", arg(&path), "--json"]).ok();
    let sample: Vec<Value> =
        sample.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(sample.len(), 150 + 150 + 75 + 61 + 40);
    let chats = sample.iter().filter(|sampled| sampled["source"] == "chat");
    let tokens: Vec<u64> = chats.filter_map(|sampled| sampled["tokens"].as_u64()).collect();
    assert!(tokens.iter().all(|tokens| *tokens <= 300), "{tokens:?}");
    assert!(tokens.contains(&300), "{tokens:?}");
    let told = zdata(&["inspect", arg(&store), "--sample", "20", "--corpus", arg(&path)]).ok();
    assert!(told.contains("= train, ") && told.contains("01 clean"), "{told}");
    zdata(&["inspect", arg(&store), "--sample", "20"]).fails(2, &["--corpus"]);
    zdata(&[
        "inspect",
        arg(&store),
        "--sample",
        "2",
        "--corpus",
        arg(&scratch.path("corpus.toml")),
    ])
    .fails(2, &["another corpus", "corpus.toml"]);
}

#[test]
fn prepared_stores_keep_their_digests() {
    let scratch = Scratch::new();
    let store = build(&scratch, &prepared(&scratch), "store");
    let answer = inspected(&store);
    let mut found = format!("store {}\n", answer["digest"].as_str().unwrap());
    for source in answer["sources"].as_array().unwrap() {
        let name = source["name"].as_str().unwrap();
        found += &format!("{name} {}\n", source["train"]["digest"].as_str().unwrap());
        for dropped in source["dropped"].as_array().unwrap() {
            found += &format!(
                "{name} {} {}\n",
                dropped["documents"],
                dropped["reason"].as_str().unwrap()
            );
        }
    }
    golden("prepared.txt", &found);
}

#[test]
fn a_killed_build_with_steps_ends_with_the_same_bytes() {
    let scratch = Scratch::new();
    let path = prepared(&scratch);
    scratch.write("raw/web-2.jsonl", json_lines(9, 1500));
    let start = Instant::now();
    let undisturbed = build(&scratch, &path, "undisturbed");
    let mut fire = Fire::new(start.elapsed(), 0);
    while let Some(index) = fire.round(kills()) {
        let store = scratch.path(&format!("killed-{index}"));
        let command = ["build", arg(&path), "--out", arg(&store), "--workers", "2"];
        for _ in 0..3 {
            // Kills are spread over scan and build.
            fire.kill(zdata_command(&command));
        }
        zdata(&command).ok();
        assert_same_tree(&undisturbed, &store);
    }
}

#[test]
fn an_edit_rebuilds_what_it_concerns() {
    let scratch = Scratch::new();
    let path = prepared(&scratch);
    let (old, new, work) = (scratch.path("old"), scratch.path("new"), scratch.path("work"));
    let in_work = |corpus: &Path, out: &Path| {
        zdata(&["build", arg(corpus), "--out", arg(out), "--cache-dir", arg(&work)])
    };
    in_work(&path, &old).ok();
    let text = fs::read_to_string(&path).unwrap().replace("context = 300", "context = 200");
    let edited = scratch.write("edited.toml", text);
    zdata(&["build", arg(&edited), "--out", arg(&old)])
        .fails(2, &["source chat", "trim v1 context=200", "--cache-dir"]);
    zdata(&["build", arg(&edited), "--out", arg(&new), "--from", arg(&old)])
        .fails(2, &["--from", "--cache-dir FOLDER"]);
    assert!(!new.exists());
    let ran = in_work(&edited, &new);
    assert!(ran.err.contains("scan: made 0 of 4 parts"), "{}", ran.err);
    assert!(ran.err.contains("encode: made 1 of 4 parts (1 file,"), "{}", ran.err);
    ran.ok();
    assert_same_tree(&build(&scratch, &edited, "fresh"), &new);
}
