//! A scratch folder with a generated store, tiny curricula over it, and runs of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use contract::{Identity, Key, Purpose, Result, draw};
use kernels::runtime::{self, KernelTable, RuntimeOptions};
use loader::OpenedCurriculum;
use store::manifest::{StreamDigest, TokenizerRecord};
use store::open::{commit, part_folder};
use store::write::{ShardWriter, StreamHead};
use store::{
    DocumentRecord, FORMAT, InputRecord, Manifest, PartRecord, SourceRecord, Split, StreamRecord,
};
use tch::Device;
use tempfile::TempDir;
use trainer::workers::Workers;
use trainer::{ExecOptions, RunOutcome, World, train};

use crate::folder::tree;

pub(crate) const VOCAB: u32 = 50;

/// The documents of a generated store.
#[derive(Clone)]
pub(crate) struct Text {
    /// Training documents per source.
    pub(crate) documents: u64,
    /// By source, the percentage of random tokens.
    pub(crate) noise: [u64; 2],
    /// Documents that begin with other tokens, by id.
    pub(crate) planted: BTreeMap<String, Vec<u32>>,
}

/// Whether to run all cases, which takes minutes (`tests/full.sh`).
pub(crate) fn is_full() -> bool {
    std::env::var_os("FULL").is_some()
}

/// A scratch folder with a store of two sources.
pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        // In memory if possible: checkpoints sync every file, which is slow on a disk.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let scratch = Scratch(folder);
        scratch.write_store(1);
        scratch.write("run.toml", CURRICULUM);
        scratch
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    /// The curriculum with some of its text replaced.
    pub(crate) fn edited(&self, name: &str, changes: &[(&str, &str)]) -> PathBuf {
        let mut text = CURRICULUM.to_owned();
        for (from, to) in changes {
            assert!(text.contains(from), "no {from:?}");
            text = text.replace(from, to);
        }
        self.write(name, &text)
    }

    /// Cuts `run.toml` to five steps, three of its first phase and two of its second.
    pub(crate) fn five_steps(&self) {
        let path = self.path("run.toml");
        let mut text = fs::read_to_string(&path).unwrap();
        for (from, to) in [("\nsteps = 6\n", "\nsteps = 3\n"), ("\nsteps = 4\n", "\nsteps = 2\n")] {
            assert!(text.contains(from), "no {from:?}");
            text = text.replace(from, to);
        }
        fs::write(path, text).unwrap();
    }

    pub(crate) fn write_store(&self, seed: u64) {
        self.write_other_store("store", ["web", "math"], seed);
    }

    /// The usual store, in which some training documents begin with other tokens, by id.
    pub(crate) fn write_planted(&self, folder: &str, planted: &BTreeMap<String, Vec<u32>>) {
        self.write_text(folder, &Text { planted: planted.clone(), ..Text::easy() });
    }

    /// A store with this text.
    pub(crate) fn write_text(&self, folder: &str, text: &Text) {
        self.write_any_store(folder, ["web", "math"], 1, text);
    }

    /// A store with these sources.
    pub(crate) fn write_other_store(&self, folder: &str, names: [&str; 2], seed: u64) {
        self.write_any_store(folder, names, seed, &Text::easy());
    }

    fn write_any_store(&self, folder: &str, names: [&str; 2], seed: u64, text: &Text) {
        let root = self.path(folder);
        let _ = fs::remove_dir_all(&root);
        let source = |at: usize| source(&root, names[at], seed, text, text.noise[at]);
        let sources = vec![source(0), source(1)];
        fs::write(root.join("tokenizer.json"), "{}").unwrap();
        let tokenizer = TokenizerRecord {
            sha256: Identity::of_bytes(b"{}"),
            vocab: VOCAB,
            begin: None,
            end: None,
            encoder: "generated".to_owned(),
        };
        let (digest, request) = (Identity([0; 32]), Identity([0; 32]));
        let (format, token_bytes, unit, validation) = (FORMAT, 2, 512, "1/14".to_owned());
        let mut manifest =
            Manifest { format, digest, request, tokenizer, token_bytes, unit, validation, sources };
        manifest.digest = manifest.identity();
        commit(&root, &manifest).unwrap();
    }

    pub(crate) fn store_digest(&self, folder: &str) -> String {
        store::Store::open(self.path(folder)).unwrap().manifest().digest.to_string()
    }

    /// Trains `run.toml` in the folder `out` until its end.
    pub(crate) fn train(&self, out: &str) -> RunOutcome {
        self.run(&self.path("run.toml"), out, |_| ()).unwrap()
    }

    /// Trains with other options.
    pub(crate) fn run(
        &self,
        curriculum: &Path,
        out: &str,
        change: impl Fn(&mut ExecOptions),
    ) -> Result<RunOutcome> {
        let mut exec = ExecOptions::new(self.path(out));
        (exec.progress, exec.checkpoint_every) = (false, 3);
        change(&mut exec);
        train(&OpenedCurriculum::open(curriculum)?, &exec, &mut World::alone(Device::Cpu, table()))
    }

    pub(crate) fn ledger(&self, out: &str) -> String {
        fs::read_to_string(self.path(out).join("ledger.jsonl")).unwrap()
    }

    /// Every file in a run's folder except its events, by relative path.
    pub(crate) fn tree(&self, out: &str) -> BTreeMap<String, Vec<u8>> {
        let mut files = tree(&self.path(out));
        // Only a run's states and ledger follow from its curriculum.
        for other in ["events.jsonl", "lock", "lock.writer"] {
            files.remove(other);
        }
        files
    }
}

pub(crate) fn table() -> KernelTable {
    runtime::start(&RuntimeOptions { device: "cpu".to_owned() }).unwrap()
}

pub(crate) fn workers(count: usize) -> impl Fn(&mut ExecOptions) {
    move |exec| exec.workers = Workers::new(count)
}

pub(crate) fn stop_after(step: u64) -> impl Fn(&mut ExecOptions) {
    move |exec| exec.stop_after = Some(step)
}

impl Text {
    /// 120 documents that can be learned completely.
    fn easy() -> Text {
        Text { documents: 120, noise: [0, 0], planted: BTreeMap::new() }
    }
}

/// A source with such documents, and 9 held-out ones.
fn source(root: &Path, name: &str, seed: u64, text: &Text, noise: u64) -> SourceRecord {
    let key = Key::from_seed(seed).child(name);
    let train = stream(root, name, Split::Train, key, text.documents, noise, &text.planted);
    let (split, key) = (Split::Validation, key.child("held back"));
    let validation = stream(root, name, split, key, 9, noise, &BTreeMap::new());
    let input = InputRecord {
        path: format!("{name}.jsonl"),
        bytes: 1,
        sha256: Identity::of_bytes(name.as_bytes()),
        documents: text.documents + 9,
        segments: 1,
    };
    SourceRecord {
        name: name.to_owned(),
        preparation: String::new(),
        inputs: vec![input],
        train,
        validation,
        dropped: Vec::new(),
        prepared: None,
        removed_file: None,
        keep: Vec::new(),
        parts: vec![PartRecord::default()],
    }
}

/// Documents of 2 to 60 tokens that are easy to learn: each token follows from the one before, except for noise.
fn stream(
    root: &Path,
    name: &str,
    split: Split,
    key: Key,
    documents: u64,
    noise: u64,
    planted: &BTreeMap<String, Vec<u32>>,
) -> StreamRecord {
    let folder = part_folder(root, name, 0);
    fs::create_dir_all(&folder).unwrap();
    let (source, token_bytes) = (name.to_owned(), 2);
    let head = StreamHead { folder, source, split, token_bytes, vocab: VOCAB, keep: Vec::new() };
    let mut shard = ShardWriter::create(head, 0, 0, 0).unwrap();
    let (mut stream, mut digest) = (StreamRecord::empty(), StreamDigest::default());
    for number in 0..documents {
        let key = key.nth(number);
        let length = 2 + draw(key, Purpose::Generate, 0) % 59;
        let first = draw(key, Purpose::Generate, 1) as u32 % VOCAB;
        let mut tokens = vec![first];
        for place in 1..length {
            let drawn = draw(key, Purpose::Generate, 1 + place);
            let is_noise = drawn % 100 < noise;
            let next = if is_noise { (drawn / 100) as u32 } else { tokens[place as usize - 1] + 7 };
            tokens.push(next % VOCAB);
        }
        let id = format!("{name}-{number}");
        if let Some(planted) = planted.get(&id) {
            tokens.iter_mut().zip(planted).for_each(|(token, planted)| *token = *planted);
        }
        let record = DocumentRecord {
            id: Some(id),
            file: 0,
            row: number + 1,
            group: None,
            bytes: Some((0, 1)),
            first_token: stream.tokens,
            tokens: length,
            kept: Vec::new(),
        };
        shard.push(&tokens, &record).unwrap();
        digest.document(&tokens, &record).unwrap();
        (stream.tokens, stream.documents) = (stream.tokens + length, stream.documents + 1);
    }
    stream.shards.push(shard.finish().unwrap());
    digest.end_file(1);
    stream.digest = digest.finish();
    stream
}

/// Ten steps in two phases of different mix, length, batch and micro-batch, with three and five micro-batches per step,
/// neither a power of two.
pub(crate) const CURRICULUM: &str = r#"store = "store"
seed = 11
dtype = "f32"

[model]
preset = "zaya1-nano"
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 8
moe_intermediate_size = 16
num_experts = 3
router_hidden_size = 8

[optimizer]
kind = "muon"
lr = 1e-2
weight_decay = 0.1
clip = 0.5

[schedule]
warmup_steps = 3
decay_steps = 30
final_lr = 1e-3

[[phase]]
name = "short"
steps = 6
seq_len = 32
batch = 6
micro_batch = 2
mix = { web = 0.7, math = "3/10" }

[[phase]]
name = "long"
steps = 4
seq_len = 64
batch = 5
micro_batch = 1
mix = { web = 1, math = 3 }
"#;
