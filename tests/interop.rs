//! Fear: that another project reads our files differently, or we read theirs differently.
//!
//! The other projects' own packages decide (`peers.py`, installed once into the user's cache by pip). If they cannot be
//! installed, each test is skipped with a line in the log. Nothing else here needs Python.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Instant;

use serde_json::Value;
use store::{Split, Store};

use crate::python::{provision, skipped, tests_folder};
use crate::resume::{Fire, kills};
use crate::support::{
    Scratch, arg, assert_same_tree, build, corpus, curriculum, json_lines, zdata, zdata_command,
};

const FORMATS: [&str; 4] = ["megatron", "datatrove", "olmo", "mds"];

/// A Python with the packages of `peers.txt`, or why there is none.
fn python() -> Result<&'static Path, &'static str> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PYTHON.get_or_init(|| provision("peers.txt")).as_deref().map_err(String::as_str)
}

/// Runs `peers.py`; `None`, and a line in the log, if Python or a package is not available.
fn peers(args: &[&str]) -> Option<Value> {
    let python = match python() {
        Ok(python) => python,
        Err(why) => {
            skipped("other projects' code", why);
            return None;
        }
    };
    let output =
        Command::new(python).arg(tests_folder().join("peers.py")).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// The documents of the first source's stream: ids and tokens.
fn documents(store: &Path, split: Split) -> Vec<(String, Vec<u32>)> {
    let store = Store::open(store).unwrap();
    let stream = store.stream(0, split);
    let all = stream.documents(std::slice::from_ref(&(0..stream.record().documents))).unwrap();
    let doc = |record: store::DocumentRecord| {
        let mut tokens = Vec::new();
        let range = record.first_token..record.first_token + record.tokens;
        stream.read_tokens(range, &mut tokens).unwrap();
        (record.shown_id().into_owned(), tokens)
    };
    all.into_iter().map(doc).collect()
}

fn export(store: &Path, format: &str, out: &Path) {
    zdata(&["export", arg(store), "--format", format, "--out", arg(out)]).ok();
}

#[test]
fn other_projects_read_our_exports() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    for format in FORMATS {
        let out = scratch.path(format);
        export(&store, format, &out);
        for split in Split::ALL {
            let wanted = documents(&store, split);
            let folder = out.join("web");
            let Some(found) = peers(&["read", format, arg(&folder), split.name()]) else { return };
            let found: Vec<(Option<String>, Vec<u32>)> = serde_json::from_value(found).unwrap();
            assert_eq!(found.len(), wanted.len(), "{format}");
            for ((id, tokens), (wanted_id, wanted)) in found.iter().zip(&wanted) {
                assert_eq!(tokens, wanted, "{format}: {wanted_id}");
                assert!(id.as_ref().is_none_or(|id| id == wanted_id), "{format}: {id:?}");
                assert_eq!(id.is_some(), format == "mds");
            }
        }
    }
}

#[test]
fn we_read_what_other_projects_write() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 60, "");
    let store = build(&scratch, &corpus, "store");
    let wanted = documents(&store, Split::Train);
    let docs = scratch.write("docs.json", serde_json::to_vec(&wanted).unwrap());
    let packed = ["mds:zstd:7", "mds:gz", "mds:br:5", "mds:bz2", "mds:snappy"];
    for written in FORMATS.into_iter().chain(packed) {
        let folder = scratch.path(&format!("by-{}", written.replace(':', "-")));
        if peers(&["write", written, arg(&folder), arg(&docs)]).is_none() {
            return;
        }
        let (format, compression) = written.split_once(':').unwrap_or((written, ""));
        if format == "mds" {
            // The package wrote checksums by each algorithm that we check.
            let index = fs::read_to_string(folder.join("peer/index.json")).unwrap();
            let index: Value = serde_json::from_str(&index).unwrap();
            let packed = &index["shards"][0]["zip_data"];
            assert_eq!(packed.is_object(), !compression.is_empty(), "{written}");
            let sums = index["shards"][0]["raw_data"]["hashes"].as_object().unwrap();
            assert_eq!(sums.len(), 5, "{sums:?}");
        }
        let back = folder.with_extension("back");
        let path = if matches!(format, "megatron" | "mds") { folder.join("peer") } else { folder };
        let tokenizer = scratch.path("tokenizer.json");
        let source = format!("web={}", arg(&path));
        let end = ["--end", "<|endoftext|>", "--unit", "1024"];
        let named = ["--tokenizer", arg(&tokenizer), "--source", &source];
        zdata(&[&["import", arg(&back), "--format", format][..], &named, &end].concat()).ok();
        zdata(&["verify", arg(&back)]).ok();
        let found = documents(&back, Split::Train);
        let tokens =
            |docs: &[(String, Vec<u32>)]| docs.iter().map(|doc| doc.1.clone()).collect::<Vec<_>>();
        assert_eq!(tokens(&found), tokens(&wanted), "{written}");
    }
}

#[test]
fn pyarrow_opens_a_store() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 90, "part_bytes = 1"), "store");
    let Some(found) = peers(&["open", arg(&store)]) else { return };
    let opened = Store::open(&store).unwrap();
    let (mut tokens, mut starts, mut ids, mut shards) = (Vec::new(), Vec::new(), Vec::new(), 0);
    // pyarrow sorts paths: math before web.
    for source in [1, 0] {
        let stream = opened.stream(source, Split::Train);
        let record = stream.record();
        stream.read_tokens(0..record.tokens, &mut tokens).unwrap();
        stream.starts_in(0..record.tokens, &mut starts).unwrap();
        ids.extend(stream.documents(std::slice::from_ref(&(0..record.documents))).unwrap());
        shards += record.shards.len();
    }
    assert!(shards > 2);
    let flat = |key: &str| -> Vec<Value> {
        let parts = found[key].as_array().unwrap().iter();
        parts.flat_map(|part| part.as_array().unwrap().clone()).collect()
    };
    let numbers = |key: &str| flat(key).iter().map(|n| n.as_u64().unwrap()).collect::<Vec<u64>>();
    assert_eq!(numbers("tokens"), tokens.iter().map(|id| u64::from(*id)).collect::<Vec<_>>());
    assert_eq!(numbers("starts"), starts);
    let rows = flat("documents");
    assert_eq!(rows.len(), ids.len());
    for (row, record) in rows.iter().zip(&ids) {
        assert_eq!(row["id"].as_str(), record.id.as_deref());
        assert_eq!(row["first_token"].as_u64().unwrap(), record.first_token);
        assert_eq!(row["tokens"].as_u64().unwrap(), record.tokens);
    }
}

#[test]
fn an_imported_store_is_planned_and_batched() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let out = scratch.path("out");
    export(&store, "megatron", &out);
    let back = scratch.path("back");
    let tokenizer = out.join("tokenizer.json");
    let paths =
        ["web", "math"].map(|name| format!("{name}={}", arg(&out.join(name).join("train"))));
    let named = ["--source", &paths[0], "--source", &paths[1], "--unit", "1024"];
    let head = ["import", arg(&back), "--format", "megatron", "--tokenizer", arg(&tokenizer)];
    zdata(&[&head[..], &named].concat()).ok();
    let told = zdata(&["inspect", arg(&back)]).ok();
    assert!(told.contains("imported from megatron") && told.contains("balance 0"), "{told}");
    // The same tokens under the same names: the digest of every step equals that with the original store.
    let digests = |store: &Path, name: &str| {
        let path = curriculum(&scratch, store, name, &[]);
        zdata(&["plan", arg(&path)]).ok();
        let batch = zdata(&["batch", arg(&path), "--step", "3"]).ok();
        assert!(batch.contains("<|endoftext|>"), "{batch}");
        zdata(&["digest", arg(&path), "--steps", "1..21"]).ok()
    };
    assert_eq!(digests(&store, "a.toml"), digests(&back, "b.toml"));
}

#[test]
fn wrong_imports_and_exports_say_what_to_do() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 30, ""), "store");
    let out = scratch.path("out");
    let to = ["--out", arg(&out)];
    zdata(&[&["export", arg(&store), "--format", "parquet"][..], &to].concat())
        .fails(2, &["megatron"]);
    zdata(&[&["export", arg(&store), "--format", "olmo", "--source", "wbe"][..], &to].concat())
        .fails(2, &["wbe", "web"]);
    zdata(&[&["export", arg(&out), "--format", "olmo"][..], &to].concat())
        .fails(3, &["store does not exist"]);
    export(&store, "megatron", &out);
    let tokenizer = scratch.path("tokenizer.json");
    let back = scratch.path("back");
    let head = ["import", arg(&back), "--format", "megatron", "--tokenizer", arg(&tokenizer)];
    zdata(&head).fails(2, &["--source"]);
    let missing = format!("web={}", arg(&scratch.path("nothing")));
    zdata(&[&head[..], &["--source", &missing]].concat()).fails(3, &["nothing.idx"]);
    let cut = scratch.write("cut.bin", [0; 7]);
    fs::copy(out.join("web/train.idx"), scratch.path("cut.idx")).unwrap();
    let cut = format!("web={}", arg(&cut));
    zdata(&[&head[..], &["--source", &cut]].concat()).fails(3, &["cut.bin", "within a token"]);
    assert!(!back.exists());
}

#[test]
fn an_import_says_what_it_leaves_out() {
    let scratch = Scratch::new();
    corpus(&scratch, 30, "");
    let tokens = [5u16, 6, 7, 8].map(u16::to_le_bytes).concat();
    let raw = scratch.write("raw.ds", tokens);
    scratch.write("raw.ds.index", [3u64, 3, 4].map(u64::to_le_bytes).concat());
    let (back, named) = (scratch.path("back"), format!("web={}", arg(&raw)));
    let tokenizer = scratch.path("tokenizer.json");
    let head = ["import", arg(&back), "--format", "datatrove", "--tokenizer", arg(&tokenizer)];
    let told = zdata(&[&head[..], &["--source", &named]].concat());
    assert!(told.err.contains("dropped of web: 1 of 3 records (1 empty)"), "{told:?}");
    told.ok();
}

#[test]
fn a_killed_import_or_export_leaves_nothing_that_looks_whole() {
    let scratch = Scratch::new();
    let small = corpus(&scratch, 50, "");
    scratch.write("raw/web-2.jsonl", json_lines(9, 6_000));
    let store = build(&scratch, &small, "store");
    let tokenizer = scratch.path("tokenizer.json");
    for (number, format) in FORMATS.into_iter().enumerate() {
        let out = scratch.path(&format!("export-{format}"));
        let source = format!("web={}", arg(&out.join("web/train")));
        let exporting = |out: &str| {
            ["export", arg(&store), "--format", format, "--out", out].map(str::to_owned)
        };
        let importing = |out: &str| {
            ["import", out, "--format", format, "--tokenizer", arg(&tokenizer), "--source", &source]
                .map(str::to_owned)
        };
        killed(&scratch, &out, number as u64 * 100, exporting);
        let back = scratch.path(&format!("import-{format}"));
        killed(&scratch, &back, number as u64 * 100 + 50, importing);
    }
}

/// Makes `whole` undisturbed, then others interrupted by kills, and compares.
fn killed<const N: usize>(
    scratch: &Scratch,
    whole: &Path,
    salt: u64,
    command: impl Fn(&str) -> [String; N],
) {
    let start = Instant::now();
    zdata(&command(arg(whole)).each_ref().map(String::as_str)).ok();
    let name = whole.file_name().unwrap().to_str().unwrap();
    let mut fire = Fire::new(start.elapsed(), salt).named(name);
    while let Some(index) = fire.round(kills().div_ceil(4)) {
        let name = format!("{name}-{index}");
        let target = scratch.path(&name);
        let words = command(arg(&target));
        let words = words.each_ref().map(String::as_str);
        for _ in 0..3 {
            fire.kill(zdata_command(&words));
            let whole =
                ["manifest.json", "export.json"].iter().any(|name| target.join(name).exists());
            assert!(whole || !target.exists(), "{} is there, and is not whole", target.display());
        }
        zdata(&words).ok();
        assert_same_tree(whole, &target);
        assert!(!scratch.path(&format!("{name}.partial")).exists());
    }
}
