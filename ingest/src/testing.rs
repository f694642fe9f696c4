//! Helpers for the tests of this crate.

use std::fs;
use std::path::{Path, PathBuf};

use contract::{Key, Purpose, draw};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::build::Options;

/// A byte-level tokenizer without merges, with a plain and a special added token, modified by `change`.
pub(crate) fn bytes_tokenizer(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut alphabet: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab: serde_json::Map<String, Value> =
        alphabet.iter().enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": special})
    };
    let mut value = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [added(256, "<|end|>", true), added(257, "<tab>", false)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": false, "vocab": vocab, "merges": []},
    });
    change(&mut value);
    serde_json::to_vec(&value).unwrap()
}

/// Document `index`: 0 to 60 words; some documents are equal.
pub(crate) fn document(index: u64) -> String {
    let key = Key::from_seed(4).nth(index % 97);
    let words =
        ["one", "two", "a", "<tab>", "<|end|>", "caf\u{e9}", "\u{6587}\u{5b57}", "\n", "x=1;"];
    let length = 1 + draw(key, Purpose::Generate, 0) % 60;
    let word = |i| words[(draw(key, Purpose::Generate, 1 + i) % words.len() as u64) as usize];
    (0..length).map(word).collect::<Vec<_>>().join(" ")
}

/// JSON Lines of `count` documents from `first` on.
pub(crate) fn json_lines(first: u64, count: u64) -> String {
    (first..first + count)
        .map(|i| json!({"id": format!("d{i}"), "text": document(i)}).to_string() + "\n")
        .collect()
}

/// A folder with a tokenizer, two sources of JSON Lines and a corpus file.
pub(crate) struct Workbench {
    folder: TempDir,
}

impl Workbench {
    pub(crate) fn new(documents: u64) -> Self {
        let bench = Workbench { folder: tempfile::tempdir().unwrap() };
        bench.write("tokenizer.json", bytes_tokenizer(|_| ()));
        bench.write("web-0.jsonl", json_lines(0, documents));
        bench.write("web-1.jsonl", json_lines(documents, documents / 2));
        bench.write("math.jsonl", json_lines(1_000_000, documents / 3));
        bench
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Adds a document to the source `math` that no other file has, so that it is kept where documents are compared.
    pub(crate) fn own_document(&self) {
        let path = self.path("math.jsonl");
        let line = json!({"text": "this stands in no other file, and so it stays here"});
        let lines = fs::read_to_string(&path).unwrap() + &line.to_string() + "\n";
        fs::write(path, lines).unwrap();
    }

    /// The corpus file, with `keys` at its start.
    pub(crate) fn corpus(&self, keys: &str) -> PathBuf {
        let text = format!(
            "tokenizer = \"tokenizer.json\"\nend = \"<|end|>\"\nunit = 64\nvalidation = \"1/7\"\n{keys}\n\
             [[source]]\nname = \"web\"\nfiles = [\"web-*.jsonl\"]\nid = \"id\"\n\
             [[source]]\nname = \"math\"\nfiles = [\"math.jsonl\"]\n"
        );
        self.write("corpus.toml", text)
    }
}

/// Quiet options.
pub(crate) fn options(workers: usize) -> Options {
    Options { workers, engine: None, quiet: true, work: None }
}

/// The key of a corpus for a part of each file.
pub(crate) const IN_PARTS: &str = "part_bytes = 1";

/// Every file below `folder` with its bytes.
pub(crate) fn tree(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let (mut found, mut open) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                found.push((
                    path.strip_prefix(folder).unwrap().to_owned(),
                    fs::read(&path).unwrap(),
                ));
            }
        }
    }
    found.sort();
    found
}
