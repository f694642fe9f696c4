//! Shared helpers of these tests: a scratch folder, a generated corpus, and the two programs as processes.

mod folder;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use contract::{Key, Purpose, draw};

pub(crate) use folder::tree;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;

use crate::python::tests_folder;

/// A scratch folder, removed when dropped.
pub(crate) struct Scratch(tempfile::TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        Scratch(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file, making its folder.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }
}

/// A port for a program that opens it later. Linux gives ports from 32768 on to connections, so none of them takes this
/// one in the meantime; two tests never get the same.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id() * 64;
    loop {
        let offset = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000;
        let port = 10_000 + u16::try_from(offset).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A finished process.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Ran {
    /// Standard output of a success.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "stdout: {}\nstderr: {}", self.out, self.err);
        self.out
    }

    /// Standard error of a failure with that exit code, which has to contain every word: an error names its place.
    #[track_caller]
    pub(crate) fn fails(self, code: i32, words: &[&str]) -> String {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.out, self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in: {}", self.err);
        }
        self.err
    }
}

pub(crate) fn zdata_command(args: &[&str]) -> Command {
    command(env!("CARGO_BIN_EXE_zdata"), args)
}

fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).env_remove("RUST_BACKTRACE");
    // Golden bits are those of the CPU, on a machine with a GPU too. A stand-in does not read these.
    command.env("CUDA_VISIBLE_DEVICES", "-1").env("HIP_VISIBLE_DEVICES", "-1");
    command
}

pub(crate) fn zdata(args: &[&str]) -> Ran {
    zdata_command(args).output().unwrap().into()
}

/// Runs a command whose standard output is closed.
pub(crate) fn unread(mut command: Command) -> Ran {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdout(writer).output().unwrap().into()
}

#[cfg(feature = "train")]
pub(crate) fn ztrain_command(args: &[&str]) -> Command {
    command(env!("CARGO_BIN_EXE_ztrain"), args)
}

#[cfg(feature = "train")]
pub(crate) fn ztrain(args: &[&str]) -> Ran {
    ztrain_command(args).output().unwrap().into()
}

/// The same on a full disk, simulated by a file size limit: with the signal ignored, a write past it fails.
#[cfg(feature = "train")]
pub(crate) fn ztrain_on_a_full_disk(args: &[&str]) -> Ran {
    let script = "trap '' XFSZ; ulimit -f 2; exec \"$@\"";
    let begin = ["-c", script, "sh", env!("CARGO_BIN_EXE_ztrain")];
    command("sh", &[&begin[..], args].concat()).output().unwrap().into()
}

/// A library of the tests, compiled.
pub(crate) fn compiled(source: &str, name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (library, own) = (folder.join(name), folder.join(format!("{}-{name}", std::process::id())));
    let mut compiler = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
    compiler.args(["-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", "-pthread", "-o"]);
    let made = compiler.arg(&own).arg(tests_folder().join(source)).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    fs::rename(own, &library).unwrap();
    library
}

/// Whether to run all cases, which takes minutes (`tests/full.sh`).
#[cfg(feature = "train")]
pub(crate) fn is_full() -> bool {
    std::env::var_os("FULL").is_some()
}

/// A Parquet file of columns of text, in one row group.
pub(crate) fn parquet(columns: &[(&str, Vec<String>)]) -> Vec<u8> {
    parquet_in_groups(columns, 1 << 20)
}

/// The same in row groups of so many rows.
pub(crate) fn parquet_in_groups(columns: &[(&str, Vec<String>)], rows: usize) -> Vec<u8> {
    let array = |texts: &Vec<String>| Arc::new(StringArray::from_iter_values(texts)) as ArrayRef;
    let columns = columns.iter().map(|(name, texts)| (*name, array(texts)));
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let rows = WriterProperties::builder().set_max_row_group_row_count(Some(rows)).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(rows)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

/// A path as an argument.
pub(crate) fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

const WORDS: &[&str] = &[
    "the",
    "a",
    "river",
    "of",
    "tokens",
    "runs",
    "through",
    "every",
    "shard",
    "and",
    "no",
    "step",
    "is",
    "lost",
    "while",
    "ranks",
    "come",
    "go",
    "exactly",
    "once",
    "each",
    "document",
    "ends",
    "where",
    "it",
    "should",
    "naive",
    "cafe",
    "42",
    "fn",
    "main()",
    "{",
    "}",
    "let",
    "x",
    "=",
    "1;",
    "hello,",
    "world!",
    "deterministic",
    "\u{00fc}ber",
    "\u{6587}\u{5b57}",
];

/// Document `index` of a generated corpus: some 5 to 200 words, the same on every machine.
pub(crate) fn document(seed: u64, index: u64) -> String {
    let key = Key::from_seed(seed).child("corpus").nth(index);
    let length = 5 + draw(key, Purpose::Generate, 0) % 196;
    let word = |i| WORDS[(draw(key, Purpose::Generate, 1 + i) % WORDS.len() as u64) as usize];
    (0..length).map(word).collect::<Vec<_>>().join(" ")
}

/// JSON Lines of `documents` generated documents.
pub(crate) fn json_lines(seed: u64, documents: u64) -> String {
    let line = |i| {
        serde_json::json!({"id": format!("doc-{seed}-{i}"), "text": document(seed, i)}).to_string()
            + "\n"
    };
    (0..documents).map(line).collect()
}

/// A corpus of two sources and its `corpus.toml`; the tokenizer is trained from it.
pub(crate) fn corpus(scratch: &Scratch, documents: u64, extra: &str) -> PathBuf {
    scratch.write("raw/web-0.jsonl", json_lines(1, documents));
    scratch.write(
        "raw/web-1.jsonl.zst",
        zstd::encode_all(json_lines(2, documents).as_bytes(), 3).unwrap(),
    );
    scratch.write("raw/math.jsonl", json_lines(3, documents / 2));
    let sources = "[[source]]\nname = \"web\"\nfiles = [\"raw/web-*\"]\ntext = \"text\"\nid = \"id\"\n\n\
                   [[source]]\nname = \"math\"\nfiles = [\"raw/math.jsonl\"]\ntext = \"text\"\nid = \"id\"\n";
    let head = format!(
        "tokenizer = \"tokenizer.json\"\nend = \"<|endoftext|>\"\nunit = 1024\nvalidation = \"1/50\"\n{extra}\n"
    );
    let path = scratch.write("corpus.toml", head + sources);
    let tokenizer = scratch.path("tokenizer.json");
    zdata(&["tokenizer", "train", arg(&path), "--vocab", "400", "--out", arg(&tokenizer)]).ok();
    path
}

/// Builds `corpus` into `name`.
pub(crate) fn build(scratch: &Scratch, corpus: &Path, name: &str) -> PathBuf {
    let store = scratch.path(name);
    zdata(&["build", arg(corpus), "--out", arg(&store)]).ok();
    store
}

/// Asserts that two folders hold the same files with the same bytes, naming the first that differs.
#[track_caller]
pub(crate) fn assert_same_tree(a: &Path, b: &Path) {
    let (a, b) = (tree(a), tree(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for ((name, left), right) in a.iter().zip(b.values()) {
        assert!(left == right, "{name} differs ({} and {} bytes)", left.len(), right.len());
    }
}

/// A small curriculum over the store that `corpus` builds: two phases, of different mix, length and batch.
pub(crate) fn curriculum(
    scratch: &Scratch,
    store: &Path,
    name: &str,
    change: &[(&str, &str)],
) -> PathBuf {
    let mut text = CURRICULUM.replace("STORE", arg(store));
    for (from, to) in change {
        assert!(text.contains(from), "the curriculum has no {from:?}");
        text = text.replace(from, to);
    }
    scratch.write(name, text)
}

/// A change of the curriculum that cuts its micro-batches inside.
#[cfg(feature = "train")]
pub(crate) const CUT: (&str, &str) =
    ("micro_batch = 2", "micro_batch = 2\ncontext_chunks = 4\nweight_shards = 2");

/// Curriculum changes that leave ten steps, of both phases.
#[cfg(feature = "train")]
pub(crate) const SHORT: [(&str, &str); 2] =
    [("steps = 12", "steps = 6"), ("\nsteps = 8", "\nsteps = 4")];

/// Curriculum changes that leave fourteen steps.
#[cfg(feature = "train")]
pub(crate) const MIDDLING: [(&str, &str); 2] =
    [("\nsteps = 8", "\nsteps = 6"), ("steps = 12", "steps = 8")];

const CURRICULUM: &str = r#"store = "STORE"
seed = 11
dtype = "f32"

[source.math]
max_epochs = 3

[model]
preset = "zaya1-nano"
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
moe_intermediate_size = 32
num_experts = 4
router_hidden_size = 16

[optimizer]
kind = "muon"
lr = 1e-2
weight_decay = 0.1
clip = 1.0

[schedule]
warmup_steps = 3
decay_steps = 30
final_lr = 1e-3

[[phase]]
name = "short"
steps = 12
seq_len = 64
batch = 8
micro_batch = 2
mix = { web = 0.7, math = "3/10" }

[[phase]]
name = "long"
steps = 8
seq_len = 128
batch = 6
micro_batch = 2
mix = { web = 1, math = 3 }
"#;
