//! Fear: that damage or a mistake is not detected, or that its error message is useless.
//!
//! Every case checks the exit code and that the message names the place.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{
    Scratch, arg, build, corpus, curriculum, document, json_lines, parquet, tree, zdata,
};

/// A corpus of one file, next to a valid tokenizer, built with `on_error` as given.
fn one_file(scratch: &Scratch, file: &str, bytes: &[u8], keys: &str) -> PathBuf {
    corpus(scratch, 30, "");
    scratch.write(file, bytes);
    let head = "tokenizer = \"tokenizer.json\"\nend = \"<|endoftext|>\"\nunit = 1024\nvalidation = \"0\"\n";
    let source = format!("[[source]]\nname = \"bad\"\nfiles = [\"{file}\"]\ntext = \"text\"\n");
    scratch.write("bad.toml", format!("{head}{keys}\n{source}"))
}

#[track_caller]
fn build_fails(file: &str, bytes: &[u8], code: i32, words: &[&str]) {
    let scratch = Scratch::new();
    let corpus = one_file(&scratch, file, bytes, "");
    let out = scratch.path("out");
    zdata(&["build", arg(&corpus), "--out", arg(&out)]).fails(code, words);
    assert!(!out.join("manifest.json").exists(), "a failed build left a store");
}

#[test]
fn malformed_lines_are_named_or_counted() {
    let good = json_lines(4, 3);
    for (bad, line) in [
        (&b"{\"text\": \"no end\n"[..], "4"),
        (b"{\"text\": 3}\n", "4"),
        (b"{\"body\": \"no text\"}\n", "4"),
        (b"{\"text\": \"bad \xff utf-8\"}\n", "4"),
        (b"{\"text\": \"a\"} trailing\n", "4"),
        (b"{\"text\": \"\\ud800\"}\n", "4"),
    ] {
        let bytes = [good.as_bytes(), bad, good.as_bytes()].concat();
        build_fails("bad.jsonl", &bytes, 3, &["bad.jsonl", line]);
        let scratch = Scratch::new();
        let skip = one_file(&scratch, "bad.jsonl", &bytes, "on_error = \"skip\"");
        let store = build(&scratch, &skip, "out");
        let seen: serde_json::Value =
            serde_json::from_slice(&fs::read(store.join("manifest.json")).unwrap()).unwrap();
        assert_eq!(seen["sources"][0]["dropped"][0]["documents"], 1, "{seen}");
        assert_eq!(seen["sources"][0]["train"]["documents"], 6, "{seen}");
    }
}

#[test]
fn truncated_files_are_named() {
    let lines = json_lines(4, 200);
    let zst = zstd::encode_all(lines.as_bytes(), 3).unwrap();
    build_fails("bad.jsonl.zst", &zst[..zst.len() / 2], 3, &["bad.jsonl.zst"]);
    let mut gz = flate(&lines);
    gz.truncate(gz.len() / 2);
    build_fails("bad.jsonl.gz", &gz, 3, &["bad.jsonl.gz"]);
    let half = parquet_file(&lines);
    build_fails("bad.parquet", &half[..half.len() / 2], 3, &["bad.parquet"]);
    build_fails("bad.parquet", b"not a parquet file", 3, &["bad.parquet"]);
}

fn flate(text: &str) -> Vec<u8> {
    let mut command = Command::new("gzip");
    command.arg("-c").stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let text = text.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output.stdout
}

fn parquet_file(lines: &str) -> Vec<u8> {
    parquet(&[("text", lines.lines().map(str::to_owned).collect())])
}

#[test]
fn empty_files_and_documents_are_counted_not_fatal() {
    let scratch = Scratch::new();
    let bytes = format!("{{\"text\": \"\"}}\n\n{}", json_lines(4, 3));
    let corpus = one_file(&scratch, "bad.jsonl", bytes.as_bytes(), "");
    scratch.write("empty.jsonl", "");
    let text = fs::read_to_string(&corpus)
        .unwrap()
        .replace("[\"bad.jsonl\"]", "[\"bad.jsonl\", \"empty.jsonl\"]");
    fs::write(&corpus, text).unwrap();
    let store = build(&scratch, &corpus, "out");
    let told = zdata(&["inspect", arg(&store)]).ok();
    assert!(told.contains("empty"), "{told}");
    zdata(&["verify", arg(&store)]).ok();
}

#[test]
fn a_document_beyond_the_limit_is_refused_by_file_and_row_or_counted() {
    let lines = format!("{}{{\"text\": \"{}\"}}\n", json_lines(4, 3), "long ".repeat(2000));
    let zst = zstd::encode_all(lines.as_bytes(), 3).unwrap();
    for (file, bytes, place) in [
        ("bad.jsonl", lines.clone().into_bytes(), "bad.jsonl:4"),
        ("bad.jsonl.zst", zst, "bad.jsonl.zst:4"),
        ("bad.parquet", parquet_file(&lines), "bad.parquet: row group 0, row 3"),
    ] {
        let scratch = Scratch::new();
        let limit = "max_document_bytes = 9000";
        let stop = one_file(&scratch, file, &bytes, limit);
        let out = scratch.path("stopped");
        zdata(&["build", arg(&stop), "--out", arg(&out)])
            .fails(3, &[place, "too long", "at most 9000"]);
        let skip = one_file(&scratch, file, &bytes, &format!("{limit}\non_error = \"skip\""));
        let store = build(&scratch, &skip, "skipped");
        let told = zdata(&["inspect", arg(&store)]).ok();
        assert!(told.contains("too large"), "{told}");
        zdata(&["verify", arg(&store)]).ok();
    }
}

#[test]
fn a_huge_document_is_one_document() {
    let scratch = Scratch::new();
    let text: String = (0..12_000).map(|i| document(8, i) + "\\n").collect();
    let bytes = format!("{{\"text\": \"{text}\"}}\n");
    assert!(bytes.len() > 4 << 20);
    let store = build(&scratch, &one_file(&scratch, "bad.jsonl", bytes.as_bytes(), ""), "out");
    zdata(&["verify", arg(&store)]).ok();
}

#[test]
fn a_changed_tokenizer_is_another_store() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 60, "");
    let store = build(&scratch, &corpus, "store");
    let tokenizer = scratch.path("tokenizer.json");
    let before = fs::read(&tokenizer).unwrap();
    let train = ["tokenizer", "train", arg(&corpus), "--vocab", "390", "--out", arg(&tokenizer)];
    zdata(&train).fails(2, &["tokenizer.json", "is never overwritten"]);
    assert_eq!(fs::read(&tokenizer).unwrap(), before);
    fs::remove_file(&tokenizer).unwrap();
    zdata(&train).ok();
    let again = zdata(&train);
    assert!(again.err.contains("already there"), "{again:?}");
    zdata(&["build", arg(&corpus), "--out", arg(&store)]).fails(4, &["tokenizer"]);
}

#[test]
fn damage_to_a_store_is_named_by_verify_and_by_reading() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let curriculum = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    let digest = ["digest", arg(&curriculum), "--steps", "1..13"];
    zdata(&digest).ok();
    for (name, bytes) in tree(&store) {
        let path = store.join(&name);
        let shard = Path::new(&name).file_name().unwrap().to_str().unwrap().to_owned();
        let reread =
            !name.contains("validation") && (shard.contains("tokens") || shard.contains("starts"));
        for damaged in [flipped(&bytes, bytes.len() / 2), bytes[..bytes.len() - 1].to_vec()] {
            fs::write(&path, damaged).unwrap();
            zdata(&["verify", arg(&store)]).fails(3, &[&shard]);
            if reread {
                zdata(&digest).fails(3, &[&shard]);
            }
        }
        fs::remove_file(&path).unwrap();
        zdata(&["verify", arg(&store)]).fails(3, &[&shard]);
        if reread {
            zdata(&digest).fails(3, &[&shard]);
        }
        fs::write(&path, bytes).unwrap();
    }
    zdata(&["verify", arg(&store)]).ok();
    zdata(&digest).ok();
}

fn flipped(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 4;
    bytes
}

#[test]
fn mistakes_in_a_curriculum_are_named_with_their_line() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    for (from, to, words) in [
        ("web = 0.7", "web = -0.7", &[":36:", "web"][..]),
        ("web = 0.7", "web = 0", &[":36:", "web"]),
        ("web = 0.7", "wib = 0.7", &[":36:", "wib", "web"]),
        ("seq_len = 64", "seq_length = 64", &[":33:", "seq_length", "seq_len"]),
        (
            "micro_batch = 2\nmix = { web = 0.7",
            "micro_batch = 3\nmix = { web = 0.7",
            &["micro_batch", "8"],
        ),
        ("seq_len = 64", "seq_len = 100", &["seq_len", "1024"]),
        ("steps = 12", "steps = 100000", &["max_epochs", "step"]),
        ("kind = \"muon\"", "kind = \"moun\"", &["muon"]),
    ] {
        let path = curriculum(&scratch, &store, "bad.toml", &[(from, to)]);
        zdata(&["plan", arg(&path)]).fails(2, words);
    }
    zdata(&["plan", arg(&scratch.path("nowhere.toml"))]).fails(3, &["nowhere.toml"]);
}

#[test]
fn a_full_disk_stops_a_build_that_then_goes_on() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 1500, "");
    let whole = build(&scratch, &corpus, "whole");
    let store = scratch.path("store");
    // A file size limit makes a write fail, as a full disk does.
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$0\" build \"$1\" --out \"$2\"";
    let program = env!("CARGO_BIN_EXE_zdata");
    let output = Command::new("sh")
        .args(["-c", script, program, arg(&corpus), arg(&store)])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", String::from_utf8_lossy(&output.stderr));
    zdata(&["build", arg(&corpus), "--out", arg(&store)]).ok();
    crate::support::assert_same_tree(&whole, &store);
}

#[cfg(feature = "train")]
mod training {
    use super::*;
    use crate::support::{ztrain, ztrain_command};

    fn started(scratch: &Scratch) -> (PathBuf, PathBuf) {
        let store = build(scratch, &corpus(scratch, 300, ""), "store");
        let path = curriculum(scratch, &store, "run.toml", &[]);
        let out = scratch.path("run");
        let stop = [
            "--curriculum",
            arg(&path),
            "--out",
            arg(&out),
            "--checkpoint-every",
            "3",
            "--stop-after",
            "8",
        ];
        ztrain(&stop).ok();
        (path, out)
    }

    #[test]
    fn an_edited_curriculum_is_refused_from_the_step_that_it_changes() {
        let scratch = Scratch::new();
        let (path, out) = started(&scratch);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("lr = 1e-2", "lr = 2e-2")).unwrap();
        ztrain(&["--curriculum", arg(&path), "--out", arg(&out)]).fails(2, &["lr", "step 1"]);
        // Changing later steps does not affect earlier ones.
        fs::write(&path, text.replace("steps = 8", "steps = 2")).unwrap();
        ztrain(&["--curriculum", arg(&path), "--out", arg(&out)]).ok();
    }

    #[test]
    fn a_damaged_checkpoint_falls_back_to_the_one_before() {
        let scratch = Scratch::new();
        let (path, out) = started(&scratch);
        let mut steps: Vec<_> =
            fs::read_dir(out.join("checkpoints")).unwrap().map(|e| e.unwrap().path()).collect();
        steps.sort();
        let newest = steps.last().unwrap();
        let blob = fs::read_dir(newest)
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.extension().is_some_and(|e| e == "safetensors"));
        let blob = blob.unwrap();
        let bytes = fs::read(&blob).unwrap();
        fs::write(&blob, flipped(&bytes, bytes.len() / 2)).unwrap();
        let ran =
            ztrain(&["--curriculum", arg(&path), "--out", arg(&out), "--checkpoint-every", "3"]);
        assert!(ran.err.contains(newest.file_name().unwrap().to_str().unwrap()), "{}", ran.err);
        ran.ok();
        let whole = scratch.path("whole");
        ztrain(&["--curriculum", arg(&path), "--out", arg(&whole)]).ok();
        ztrain(&["compare", arg(&whole), arg(&out)]).ok();
    }

    #[test]
    fn two_runs_do_not_share_a_folder() {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
        let path = curriculum(&scratch, &store, "run.toml", &[]);
        let out = scratch.path("run");
        let args = ["--curriculum", arg(&path), "--out", arg(&out)];
        let mut first = ztrain_command(&args)
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while !out.join("ledger.jsonl").exists() && first.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(
            first.try_wait().unwrap().is_none(),
            "the first run ended before the second could start"
        );
        ztrain(&args).fails(6, &["run"]);
        assert!(first.wait().unwrap().success());
    }

    #[test]
    fn a_run_that_diverges_says_which_step_to_replay() {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
        let wild = [("lr = 1e-2", "lr = 1e30"), ("kind = \"muon\"", "kind = \"adamw\"")];
        let path = curriculum(&scratch, &store, "run.toml", &wild);
        let out = scratch.path("run");
        ztrain(&["--curriculum", arg(&path), "--out", arg(&out)]).fails(5, &["step", "replay"]);
    }

    #[test]
    fn a_tampered_ledger_is_found() {
        let scratch = Scratch::new();
        let (path, out) = started(&scratch);
        let ledger = out.join("ledger.jsonl");
        let text = fs::read_to_string(&ledger).unwrap();
        fs::write(&ledger, text.replacen("\"step\":4", "\"step\":5", 1)).unwrap();
        zdata(&["verify-run", arg(&out)]).fails(4, &["ledger.jsonl"]);
        ztrain(&["--curriculum", arg(&path), "--out", arg(&out)]).fails(4, &["ledger.jsonl"]);
    }

    /// Another store is refused by its digest before anything else, whatever its sources are called.
    #[test]
    fn a_store_that_moved_is_named_and_another_one_is_refused() {
        let scratch = Scratch::new();
        let (_, out) = started(&scratch);
        let text = fs::read_to_string(scratch.path("corpus.toml")).unwrap();
        let text = text.replace("\"web\"", "\"news\"").replace("\"math\"", "\"code\"");
        let other = build(&scratch, &scratch.write("other.toml", text), "other");
        let store = scratch.path("store");
        let moved = scratch.path("moved");
        fs::rename(&store, &moved).unwrap();
        let verify = |more: &[&str]| zdata(&[&["verify-run", arg(&out)], more].concat());
        let replay = |more: &[&str]| {
            ztrain(&[&["replay", "--run", arg(&out), "--step", "2"], more].concat())
        };
        let digest = |store: &std::path::Path| {
            let told = zdata(&["inspect", arg(store), "--json"]).ok();
            let told: serde_json::Value = serde_json::from_str(&told).unwrap();
            told["digest"].as_str().unwrap().to_owned()
        };
        let [found, wanted] = [digest(&other), digest(&moved)];
        for command in [&verify as &dyn Fn(&[&str]) -> crate::support::Ran, &replay] {
            command(&[]).fails(3, &["--store", arg(&store)]);
            command(&["--store", arg(&moved)]).ok();
            let words = ["its digest is not the run's", &found, &wanted, "--store"];
            command(&["--store", arg(&other)]).fails(4, &words);
            command(&["--store", arg(&moved), "--store", arg(&moved)]).fails(2, &["--store"]);
        }
        // The same in the original place, without `--store`.
        fs::rename(&other, &store).unwrap();
        for command in [&verify as &dyn Fn(&[&str]) -> crate::support::Ran, &replay] {
            command(&[]).fails(4, &["its digest is not the run's", &found, &wanted]);
        }
    }

    #[test]
    fn a_missing_device_is_said() {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 60, ""), "store");
        let path = curriculum(&scratch, &store, "run.toml", &[]);
        let ran = ztrain(&[
            "--curriculum",
            arg(&path),
            "--out",
            arg(&scratch.path("run")),
            "--device",
            "cuda:0",
        ]);
        ran.fails(6, &["cuda"]);
    }
}

/// Facts in a manifest about missing files are not reported as facts.
#[test]
fn a_store_with_other_files_than_its_manifest_names_is_opened_by_nothing() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 60, ""), "store");
    let (run, out) = (curriculum(&scratch, &store, "run.toml", &[]), scratch.path("out"));
    let (run, store_name) = (arg(&run), arg(&store));
    let asked = [
        &["inspect", store_name][..],
        &["export", store_name, "--format", "megatron", "--out", arg(&out)],
        &["plan", run],
        &["digest", run, "--steps", "1..3"],
        &["batch", run, "--step", "2"],
        &["where", run, "--doc", "doc-1-3"],
        &["amend", run, "--step", "5", "--mix", "web=1,math=1", "--dry-run"],
    ];
    // Files not in the manifest are ignored.
    scratch.write("store/web/00000/notes.txt", "mine");
    for name in
        ["tokens-train-00000.arrow", "tokens-train-00000.sums", "documents-train-00000.parquet"]
    {
        let path = store.join("web/00000").join(name);
        let bytes = fs::read(&path).unwrap();
        let harms: [&dyn Fn(); 4] = [
            &|| (),
            &|| fs::write(&path, &bytes[..bytes.len() / 2]).unwrap(),
            &|| std::os::unix::fs::symlink(scratch.path("corpus.toml"), &path).unwrap(),
            &|| assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
        ];
        for harm in harms {
            fs::remove_file(&path).unwrap();
            harm();
            asked.iter().for_each(|args| drop(zdata(args).fails(3, &[name, "damaged"])));
            assert!(!out.exists());
            let _ = fs::remove_file(&path);
            fs::write(&path, &bytes).unwrap();
        }
    }
    let tokenizer = store.join("tokenizer.json");
    let bytes = fs::read(&tokenizer).unwrap();
    fs::remove_file(&tokenizer).unwrap();
    asked.iter().for_each(|args| drop(zdata(args).fails(3, &["tokenizer.json", "damaged"])));
    fs::write(&tokenizer, bytes).unwrap();
    asked.iter().for_each(|args| drop(zdata(args).ok()));
}
