//! Fear: that an input is silently skipped, taken for something else, or waited for forever.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::support::{Scratch, arg, build, corpus, curriculum, json_lines, zdata, zdata_command};

/// A corpus over the given `files`, with a tokenizer.
fn of(scratch: &Scratch, files: &str, keys: &str) -> std::path::PathBuf {
    let head = "tokenizer = \"tokenizer.json\"\nend = \"<|endoftext|>\"\nvalidation = 0\n";
    let source = format!("[[source]]\nname = \"x\"\nfiles = [\"{files}\"]\n");
    scratch.write("x.toml", format!("{head}{keys}\n{source}"))
}

#[test]
fn what_a_glob_names_is_read_or_refused() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    scratch.write("in/a.jsonl", json_lines(1, 5));
    scratch.write("in/.hidden.jsonl", "nonsense");
    let out = scratch.path("out");
    let build = |files: &str| zdata(&["build", arg(&of(&scratch, files, "")), "--out", arg(&out)]);
    symlink("nowhere", scratch.path("in/b.jsonl")).unwrap();
    build("in/*.jsonl").fails(6, &["in/b.jsonl", "leads nowhere"]);
    fs::remove_file(scratch.path("in/b.jsonl")).unwrap();
    assert!(Command::new("mkfifo").arg(scratch.path("in/b.jsonl")).status().unwrap().success());
    build("in/*.jsonl").fails(2, &["in/b.jsonl", "a FIFO"]);
    fs::remove_file(scratch.path("in/b.jsonl")).unwrap();
    for name in ["t.csv", "t.tsv", "t.parq", "t"] {
        scratch.write(&format!("in/{name}"), "a,b\n");
        build(&format!("in/{name}")).fails(2, &[name, "x.toml:7", "format = \"text\""]);
    }
    scratch.write("latin.toml", b"# caf\xe9\n");
    let latin = scratch.path("latin.toml");
    zdata(&["build", arg(&latin), "--out", arg(&out)]).fails(2, &["latin.toml:1", "UTF-8"]);
    assert!(!out.exists());
    build("in/*.jsonl").ok();
    let seen = zdata(&["inspect", arg(&out)]).ok();
    assert!(seen.contains("5 read from 1 file = "), "{seen}");
    zdata(&["inspect", arg(&scratch.path("x.toml"))]).fails(2, &["x.toml", "--check"]);
}

/// Stores, partial builds and exports also contain JSON lists, including those of evaluation sets.
#[test]
fn what_builds_left_beside_the_text_is_no_text() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    let steps = "[[prepare]]\nstep = \"decontaminate\"\nfiles = [\"raw/math.jsonl\"]\n";
    let file = of(&scratch, "**/*.jsonl*", "");
    fs::write(&file, fs::read_to_string(&file).unwrap() + steps).unwrap();
    let (first, work) = (scratch.path("first"), scratch.path("work"));
    let built = |out: &Path| {
        let out = ["--out", arg(out), "--cache-dir", arg(&work)];
        zdata(&[&["build", arg(&file)][..], &out].concat())
    };
    let digest = built(&first).ok().split_whitespace().next().unwrap().to_owned();
    let made = crate::support::tree(&first).into_keys().filter(|it| it.contains("jsonl"));
    assert_eq!(made.count(), 3, "dropped records of two parts, and what they share");
    zdata(&["export", arg(&first), "--format", "olmo", "--out", arg(&scratch.path("olmo"))]).ok();
    let again = built(&first).err;
    for passed in ["first (a store)", "olmo (an export)"] {
        assert!(again.contains(&format!("passes over {passed}")), "{passed}: {again}");
    }
    assert!(again.contains("up to date"));
    assert!(built(&scratch.path("second")).ok().starts_with(&digest));
    // A pattern that names such a folder explicitly includes it.
    let list = of(&scratch, "first/x/*.jsonl", "");
    assert!(zdata(&["build", arg(&list), "--check"]).err.starts_with("1 file: "));
}

#[test]
fn a_wrong_kind_of_file_is_called_what_it_is() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 60, "");
    let store = build(&scratch, &corpus, "store");
    let path = curriculum(&scratch, &store, "run.toml", &[]);
    let out = scratch.path("out");
    zdata(&["plan", arg(&corpus)]).fails(2, &["corpus.toml: this is a corpus file, and a curri"]);
    let build = |what: &Path| zdata(&["build", arg(what), "--out", arg(&out)]);
    build(&path).fails(2, &["run.toml: this is a curriculum, and a corpus file"]);
    build(&store).fails(2, &["store: this is a store, and a corpus file"]);
    build(&scratch.path("")).fails(2, &["this is a folder, and a corpus file"]);
    let text = fs::read_to_string(&corpus).unwrap().replace("tokenizer.json", "store");
    build(&scratch.write("folder.toml", text)).fails(2, &["store: this is a folder, and a tok"]);
    let curriculum = fs::read_to_string(&path).unwrap();
    let stores = |stores: &str| {
        let named = format!("{:?}", arg(&store));
        assert!(curriculum.contains(&named), "{curriculum}");
        zdata(&["plan", arg(&scratch.write("other.toml", curriculum.replacen(&named, stores, 1)))])
    };
    let manifest = store.join("manifest.json");
    stores(&format!("{:?}", arg(&manifest)))
        .fails(2, &["manifest.json: this is a file of a store"]);
    stores(&format!("[{0:?}, {0:?}]", arg(&store))).fails(2, &["one store is named twice"]);
}

#[test]
fn what_is_taken_twice_or_holds_nothing_is_told() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    scratch.write("in/a.jsonl", json_lines(1, 5));
    scratch.write("in/none.jsonl", "");
    let source =
        |name: &str, file: &str| format!("[[source]]\nname = \"{name}\"\nfiles = [\"{file}\"]\n");
    let file = of(&scratch, "in/a.jsonl", "");
    let text = fs::read_to_string(&file).unwrap();
    let more =
        source("y", "in/*a.jsonl") + "keep = [\"deep.none\"]\n" + &source("z", "in/none.jsonl");
    fs::write(&file, text.clone() + &more).unwrap();
    let built = zdata(&["build", arg(&file), "--out", arg(&scratch.path("out"))]);
    for note in [
        "note: ",
        "\"in/a.jsonl\" is taken by source x and by source y",
        "note: source z: no record in its 1 file",
        "note: source y: no document has the field `deep.none` that `keep` names",
    ] {
        assert!(built.err.contains(note), "{built:?}");
    }
    built.ok();
    let refused = |keys: &str, told: &[&str]| {
        fs::write(&file, text.replacen("validation = 0", keys, 1)).unwrap();
        zdata(&["build", arg(&file), "--out", arg(&scratch.path("no"))]).fails(2, told);
    };
    refused("begin = \"nope\"", &["x.toml:3:9: `begin` names a token"]);
    refused("unit = 18446744073709551616", &["x.toml:3:8: `unit` is too large", "at most 184467"]);
    fs::write(&file, text).unwrap();
    let out = scratch.path("no");
    let slurm = ["build", arg(&file), "--out", arg(&out), "--sbatch=-p"];
    zdata(&slurm).fails(2, &["--sbatch", "--executor slurm"]);
    scratch.write("own/a.jsonl", json_lines(1, 5));
    scratch.write("own/b.parquet.gz", "x");
    let told = zdata(&["init", arg(&scratch.path("own"))]);
    assert!(told.err.contains("b.parquet.gz (compressed as a whole"), "{told:?}");
    told.ok();
}

#[test]
fn a_fifo_in_a_store_keeps_nobody_waiting() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 60, ""), "store");
    let shard = store.join("web/00000/tokens-train-00000.arrow");
    fs::remove_file(&shard).unwrap();
    assert!(Command::new("mkfifo").arg(&shard).status().unwrap().success());
    for args in [&["verify", arg(&store)][..], &["inspect", arg(&store), "--json"]] {
        ends(args);
    }
}

/// A run, or another user's folder, in which files were replaced by pipes.
#[test]
fn fifos_in_a_run_keep_nobody_waiting() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 60, ""), "store");
    let run = curriculum(&scratch, &store, "run/run.toml", &[]);
    scratch.write("run/ledger.jsonl", "{}\n");
    let amend = ["amend", arg(&run), "--step", "2", "--set", "optimizer.lr=0.001"];
    let lock = scratch.path("run/lock");
    assert!(Command::new("mkfifo").arg(&lock).status().unwrap().success());
    assert!(ends(&amend).contains("lock: cannot open it: it is a FIFO"));
    let ledger = scratch.path("run/ledger.jsonl");
    fs::rename(&lock, &ledger).unwrap();
    let folder = scratch.path("run");
    assert!(
        ends(&["verify-run", arg(&folder)]).contains("ledger.jsonl: cannot read it: it is a FIFO")
    );
}

/// The output of a command that ends, with or without an error; panics if it hangs.
fn ends(args: &[&str]) -> String {
    let mut command = zdata_command(args);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let left = (0..600).find_map(|_| {
        sleep(Duration::from_millis(100));
        child.try_wait().unwrap()
    });
    if left.is_none() {
        child.kill().unwrap();
        panic!("{args:?} waits");
    }
    std::io::read_to_string(child.stderr.unwrap()).unwrap()
}

#[test]
fn what_is_dropped_is_told_and_a_source_of_which_nothing_is_left_is_refused() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    let bad = "{\"text\": 7}\nnonsense\n";
    scratch.write("in/a.jsonl", json_lines(1, 5) + bad);
    let skip = of(&scratch, "in/a.jsonl", "on_error = \"skip\"");
    let out = scratch.path("out");
    let told = zdata(&["build", arg(&skip), "--out", arg(&out)]);
    assert!(
        told.err.contains("dropped of x: 2 of 7 records (1 malformed, 1 missing text)"),
        "{told:?}"
    );
    let listed = zdata(&["inspect", arg(&out), "--dropped"]).ok();
    let lines = ["x in/a.jsonl:6  missing text", "x in/a.jsonl:7  malformed"];
    assert_eq!(listed.lines().collect::<Vec<_>>(), lines);
    let listed = zdata(&["inspect", arg(&out), "--dropped", "--json"]).ok();
    let first: serde_json::Value = serde_json::from_str(listed.lines().next().unwrap()).unwrap();
    assert_eq!((&first["file"], &first["row"]), (&"in/a.jsonl".into(), &6.into()));
    // The list is a file of the store: damage to it is detected.
    let list = out.join("x/00000/dropped.jsonl.zst");
    let bytes = fs::read(&list).unwrap();
    fs::write(&list, [&bytes[..9], b"!", &bytes[10..]].concat()).unwrap();
    zdata(&["verify", arg(&out)]).fails(3, &["x/00000/dropped.jsonl.zst"]);
    fs::write(&list, bytes).unwrap();
    zdata(&["verify", arg(&out)]).ok();
    scratch.write("in/a.jsonl", bad);
    let empty = scratch.path("empty");
    zdata(&["build", arg(&skip), "--out", arg(&empty)])
        .fails(3, &["nothing is left of source \"x\"", "2 records", "1 malformed"]);
    assert!(!empty.join("manifest.json").exists());
    // The same with tasks, which a scheduler merges, and when a rule dropped everything.
    let work = scratch.path("work");
    let told = zdata(&["task", "plan", arg(&skip), "--cache-dir", arg(&work)]).ok();
    let of = ["--cache-dir", arg(&work), "--plan", told.split_once("  ").unwrap().0];
    zdata(&[&["task", "run", "--index", "0"], &of[..]].concat()).ok();
    zdata(&[&["task", "merge", "--out", arg(&empty)], &of[..]].concat())
        .fails(3, &["nothing is left of source \"x\"", "2 records", "1 malformed"]);
    scratch.write("in/a.jsonl", json_lines(1, 5) + "{\"text\": \"\"}\n");
    let strict = "[[prepare]]\nstep = \"length\"\nmin_words = 100000\n";
    let text = std::fs::read_to_string(&skip).unwrap();
    let strict = scratch.write("strict.toml", text + strict);
    zdata(&["build", arg(&strict), "--out", arg(&empty)]).fails(
        3,
        &["nothing is left of source \"x\"", "5 length: ", "1 empty", "loosen the steps"],
    );
    assert!(!empty.join("manifest.json").exists());
}

#[test]
fn a_check_lists_every_bad_record_and_builds_nothing() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    scratch.write("in/a.jsonl", json_lines(1, 5) + "{\"text\": 7}\nnonsense\n{\"text\": \"\"}\n");
    let stop = of(&scratch, "in/a.jsonl", "");
    let ran = zdata(&["build", arg(&stop), "--check"]);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert_eq!(lines.len(), 3, "{ran:?}");
    for (line, (row, reason)) in
        lines.iter().zip([("6", "missing text"), ("7", "malformed"), ("8", "empty")])
    {
        assert!(line.contains(&format!("a.jsonl:{row}: {reason}: ")), "{line}");
    }
    ran.fails(3, &["5 documents, 3 bad records"]);
    let skip = of(&scratch, "in/a.jsonl", "on_error = \"skip\"");
    assert_eq!(zdata(&["build", arg(&skip), "--check", "--json"]).ok().lines().count(), 3);
    scratch.write("in/a.jsonl", "{\"x\": 1}\n");
    let check = ["build", arg(&skip), "--check", "--workers", "2"];
    zdata(&check).fails(3, &["1 file: 0 documents, 1 bad record\n", "nothing is left of source"]);
    for ignored in ["--executor=slurm", "--encoder=reference", "--cache-dir=w", "--sbatch=-p"] {
        zdata(&["build", arg(&skip), "--check", ignored]).fails(2, &["--check", "--"]);
    }
}

#[test]
fn a_folder_of_text_becomes_a_corpus_and_a_plan() {
    let scratch = Scratch::new();
    scratch.write("own/web/a.jsonl", json_lines(1, 300));
    scratch.write("own/notes/a.md", "a note");
    let (folder, file) = (scratch.path("own"), scratch.path("own/corpus.toml"));
    let told = zdata(&["init", arg(&folder)]);
    assert!(told.err.contains("the text is `text`") && told.err.contains("tokenizer"), "{told:?}");
    let train = format!(
        "next: zdata tokenizer train {0}/corpus.toml --vocab 8192 --out {0}/tokenizer.json",
        arg(&folder)
    );
    assert!(told.err.contains(&train), "{told:?}");
    zdata(&["build", arg(&file), "--out", arg(&folder.join("store"))])
        .fails(3, &["tokenizer.json", "huggingface.co", "zdata tokenizer train"]);
    let tokenizer = folder.join("tokenizer.json");
    zdata(&["tokenizer", "train", arg(&file), "--vocab", "400", "--out", arg(&tokenizer)]).ok();
    let built = zdata(&["build", arg(&file), "--out", arg(&folder.join("store"))]);
    let none = "note: source notes: 1 document is too little for a validation split of 1/1000: none was held out";
    assert!(built.err.contains(none), "{built:?}");
    built.ok();
    let nearly = fs::read_to_string(&file).unwrap().replace("1/1000", "9999/10000");
    let nearly = scratch.write("own/nearly.toml", nearly);
    let built = zdata(&["build", arg(&nearly), "--out", arg(&folder.join("nearly"))]);
    let all = "note: source notes: a validation split of 9999/10000 holds out 1 document: none is left to train on";
    assert!(built.err.contains(all), "{built:?}");
    built.ok();
    // One of the sources is a note of six bytes.
    zdata(&["plan", arg(&folder.join("curriculum.toml"))]).ok();
    zdata(&["init", arg(&folder)]).fails(2, &["corpus.toml", "never overwritten"]);
    // Files that the written globs would match, and that no build accepts.
    let odd = scratch.path("odd");
    fs::create_dir(&odd).unwrap();
    fs::copy(scratch.path("own/web/a.jsonl"), odd.join("a.jsonl")).unwrap();
    fs::write(odd.join(std::ffi::OsStr::from_bytes(b"b\xff.jsonl")), "{}").unwrap();
    zdata(&["init", arg(&odd)]).fails(2, &["is not UTF-8", "rename it"]);
    assert!(!odd.join("corpus.toml").exists());
}

/// The peak memory of a process in bytes, as the kernel reports it while the process runs. Its allocator returns freed
/// memory at once. By default it waits 10 ms, so memory freed earlier would count or not by chance.
fn peak(mut command: Command) -> u64 {
    command.env("MIMALLOC_PURGE_DELAY", "0");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut most = 0;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        most = most.max(kib.unwrap_or(0) << 10);
        sleep(Duration::from_millis(2));
    }
    assert!(child.wait().unwrap().success());
    most
}

#[test]
fn a_long_line_is_held_three_times_at_most() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    let mib = 96u64;
    let reading = |name: &str, text: &str| {
        scratch.write(name, format!("{{\"text\": \"{text}\"}}\n"));
        let command = zdata_command(&["build", arg(&of(&scratch, name, "")), "--check"]);
        peak(command)
    };
    // Memory is sampled every 2 ms: on a busy machine, a short run may peak between two samples.
    let least = (0..3).map(|_| reading("short.jsonl", "short")).max().unwrap();
    // With escapes at its ends, the text cannot be a slice of its line.
    let long = format!("\\n{}\\n", "x".repeat((mib as usize) << 20));
    let held = reading("long.jsonl", &long) - least;
    assert!(held < (3 * mib + mib / 4) << 20, "{} MiB for a line of {mib} MiB", held >> 20);
}

/// A build needs no more memory than its dry run says, which writes nothing.
#[test]
fn a_dry_run_bounds_the_memory_of_a_build_and_writes_nothing() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    for name in ["in/a.jsonl", "in/b.jsonl", "in/c.jsonl"] {
        scratch.write(name, json_lines(1, 1000));
    }
    let file = of(&scratch, "in/*.jsonl", "part_bytes = 1");
    let out = scratch.path("out");
    let before = fs::read_dir(scratch.path("")).unwrap().count();
    let shown = zdata(&["build", arg(&file), "--dry-run"]).ok();
    assert!(shown.starts_with("x: 3 files, ") && shown.contains(", 3 parts; "), "{shown}");
    let told = zdata(&["build", arg(&file), "--dry-run", "--workers", "2", "--json"]).ok();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["sources"][0]["documents"], 3_000);
    assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), before);
    let args = ["build", arg(&file), "--out", arg(&out), "--workers", "2"];
    let (held, bound) = (peak(zdata_command(&args)), told["memory_bytes"].as_u64().unwrap());
    assert!(held < bound && bound < 1 << 30, "{held} {bound}");
    zdata(&["build", arg(&file), "--dry-run", "--check"]).fails(2, &["cannot be used with"]);
}

/// A name that is too long is an error of the user, even if only a suffix that is added makes it too long.
#[test]
fn a_name_that_is_too_long_is_wrong_use() {
    let scratch = Scratch::new();
    let file = corpus(&scratch, 30, "");
    let tokenizer = scratch.path("tokenizer.json");
    for length in [248, 250, 253, 300] {
        let out = scratch.path(&"x".repeat(length));
        let found = format!("a name of {length} bytes");
        zdata(&["build", arg(&file), "--out", arg(&out)]).fails(2, &["at most 247 bytes", &found]);
        assert!(!scratch.path(&format!("{}.work", "x".repeat(length))).exists());
        let source = format!("web={}", arg(&scratch.path("raw")));
        let import = ["import", arg(&out), "--format", "olmo", "--tokenizer", arg(&tokenizer)];
        let source = ["--source", &source, "--dtype", "uint16"];
        assert_ne!(zdata(&[&import[..], &source].concat()).code, Some(6));
    }
    let long = scratch.path(&"y".repeat(304));
    zdata(&["build", arg(&long), "--check"]).fails(2, &["at most 255 bytes"]);
}

#[test]
fn a_dot_behind_a_folder_is_the_folder() {
    let scratch = Scratch::new();
    let file = corpus(&scratch, 30, "");
    for (name, behind) in [("one", "/."), ("two", "/"), ("three", "/./.")] {
        let out = scratch.path(name);
        zdata(&["build", arg(&file), "--out", &format!("{}{behind}", arg(&out))]).ok();
        assert!(out.join("manifest.json").is_file(), "{name}{behind}");
    }
}

/// The pattern in a hint matches the file.
#[test]
fn a_name_of_wildcards_is_shown_in_brackets() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    for (name, pattern) in [
        ("{a}.jsonl", "[{]a[}].jsonl"),
        ("[b]*.jsonl", "[[]b][*].jsonl"),
        ("{c,d.jsonl", "[{]c,d.jsonl"),
    ] {
        scratch.write(&format!("in/{name}"), json_lines(1, 5));
        let check = |glob: &str| {
            zdata(&["build", arg(&of(&scratch, &format!("in/{glob}"), "")), "--check"])
        };
        if name != "{c,d.jsonl" {
            check(name).fails(3, &[pattern]);
        }
        let seen = check(pattern);
        assert!(seen.err.starts_with("1 file: 5 documents"), "{pattern}: {}", seen.err);
    }
}

/// A mistyped `id` is reported without searching for a document that has none.
#[test]
fn a_source_without_the_ids_that_it_names_is_told_once() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    scratch.write("in/a.jsonl", json_lines(1, 5));
    scratch.write("in/b.jsonl", json_lines(2, 5) + "{\"text\": \"without\"}\n");
    let file = of(&scratch, "in/*.jsonl", "");
    let text = fs::read_to_string(&file).unwrap();
    for (id, told) in [("idd", 1), ("id", 0)] {
        fs::write(&file, format!("{text}id = \"{id}\"\n")).unwrap();
        let out = scratch.path(id);
        for args in [&["--check"][..], &["--out", arg(&out)]] {
            let ran = zdata(&[&["build", arg(&file)], args].concat());
            let found = ran.err.matches("source x: no record has its id `idd`").count();
            assert!(ran.code == Some(0) && found == told, "{args:?}: {}", ran.err);
        }
    }
}
