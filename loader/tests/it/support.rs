//! Generates stores and curricula for tests and benchmarks, by the real writer.

use std::fs;
use std::path::Path;

use contract::{Identity, Key, Purpose, draw};
use mixer::{Curriculum, DataPlan};
use store::manifest::{StreamDigest, TokenizerRecord};
use store::open::{commit, part_folder};
use store::write::{ShardWriter, StreamHead};
use store::{
    DocumentRecord, FORMAT, InputRecord, Manifest, PartRecord, SourceRecord, Split, StreamRecord,
};
use tempfile::TempDir;

/// A source to write.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    /// Its name.
    pub(crate) name: String,
    /// The training documents.
    pub(crate) train: Vec<Vec<u32>>,
    /// The held-out documents.
    pub(crate) validation: Vec<Vec<u32>>,
    /// A shard ends with the document that reaches this many tokens.
    pub(crate) shard_tokens: u64,
    /// The values of the kept column `quality`: those of the training documents, then of the held-out ones. Without
    /// any, no column is kept.
    pub(crate) kept: Vec<Option<String>>,
}

impl Text {
    fn keep(&self) -> Vec<String> {
        if self.kept.is_empty() { Vec::new() } else { vec!["quality".to_owned()] }
    }

    /// Documents of these lengths with random tokens; `limit` is above every id.
    pub(crate) fn generate(name: &str, lengths: &[u64], limit: u64) -> Self {
        let document = |(number, length): (usize, &u64)| {
            let key = Key::from_seed(1).child(name).nth(number as u64);
            (0..*length).map(|i| (draw(key, Purpose::Generate, i) % limit) as u32).collect()
        };
        let train = lengths.iter().enumerate().map(document).collect();
        Text {
            name: name.to_owned(),
            train,
            validation: Vec::new(),
            shard_tokens: u64::MAX,
            kept: Vec::new(),
        }
    }
}

/// A scratch folder in memory if possible: writers sync every file, which is slow on a disk.
pub(crate) fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Writes a store.
pub(crate) fn write_store(dir: &Path, texts: &[Text], token_bytes: u32, unit: u64) {
    write_store_with(dir, texts, token_bytes, unit, [None; 2]);
}

/// Writes a store whose documents have these tokens at their begin and end.
pub(crate) fn write_store_with(
    dir: &Path,
    texts: &[Text],
    token_bytes: u32,
    unit: u64,
    held: [Option<u32>; 2],
) {
    let sources = texts.iter().map(|text| SourceRecord {
        name: text.name.clone(),
        preparation: String::new(),
        inputs: Vec::new(),
        train: write_stream(dir, text, Split::Train, token_bytes),
        validation: write_stream(dir, text, Split::Validation, token_bytes),
        dropped: Vec::new(),
        prepared: None,
        removed_file: None,
        keep: text.keep(),
        parts: vec![PartRecord::default()],
    });
    commit_store_with(dir, sources.collect(), token_bytes, unit, held);
}

/// The tokenizer of all stores: only its names of tokens matter.
const TOKENIZER: &str =
    r#"{"added_tokens": [{"id": 7, "content": "<pre>"}, {"id": 8, "content": "<mid>"}]}"#;

/// Writes the manifest that makes the folder a store of these sources.
pub(crate) fn commit_store(dir: &Path, sources: Vec<SourceRecord>, token_bytes: u32, unit: u64) {
    commit_store_with(dir, sources, token_bytes, unit, [None; 2]);
}

fn commit_store_with(
    dir: &Path,
    mut sources: Vec<SourceRecord>,
    token_bytes: u32,
    unit: u64,
    held: [Option<u32>; 2],
) {
    for source in &mut sources {
        let documents = source.train.documents + source.validation.documents;
        let (path, sha256) = ("generated".to_owned(), Identity([0; 32]));
        source.inputs = vec![InputRecord { path, bytes: 1, sha256, documents, segments: 1 }];
    }
    fs::write(dir.join("tokenizer.json"), TOKENIZER).unwrap();
    let tokenizer = TokenizerRecord {
        sha256: Identity::of_bytes(TOKENIZER.as_bytes()),
        vocab: vocab(token_bytes),
        begin: held[0],
        end: held[1],
        encoder: "generated".to_owned(),
    };
    let (digest, request) = (Identity([0; 32]), Identity([0; 32]));
    let validation = "0".to_owned();
    let mut manifest = Manifest {
        format: FORMAT,
        digest,
        request,
        tokenizer,
        token_bytes,
        unit,
        validation,
        sources,
    };
    manifest.digest = manifest.identity();
    commit(dir, &manifest).unwrap();
}

fn vocab(token_bytes: u32) -> u32 {
    if token_bytes == 2 { 1 << 16 } else { 1 << 20 }
}

/// The head for a stream's writer; creates the stream's folder.
pub(crate) fn head(dir: &Path, source: &str, split: Split, token_bytes: u32) -> StreamHead {
    let folder = part_folder(dir, source, 0);
    fs::create_dir_all(&folder).unwrap();
    let (source, vocab) = (source.to_owned(), vocab(token_bytes));
    StreamHead { folder, source, split, token_bytes, vocab, keep: Vec::new() }
}

fn write_stream(dir: &Path, text: &Text, split: Split, token_bytes: u32) -> StreamRecord {
    let documents = match split {
        Split::Train => &text.train,
        Split::Validation => &text.validation,
    };
    let head = StreamHead { keep: text.keep(), ..head(dir, &text.name, split, token_bytes) };
    let mut kept = text.kept.iter().skip(if split == Split::Train { 0 } else { text.train.len() });
    let (mut stream, mut open) = (StreamRecord::empty(), None);
    let mut digest = StreamDigest::default();
    for tokens in documents {
        let record = DocumentRecord {
            kept: kept.next().into_iter().cloned().collect(),
            ..record(&text.name, stream.documents, stream.tokens, tokens.len() as u64)
        };
        let shard = open.get_or_insert_with(|| {
            let (index, first) = (stream.shards.len(), stream.documents);
            ShardWriter::create(head.clone(), index, record.first_token, first).unwrap()
        });
        shard.push(tokens, &record).unwrap();
        digest.document(tokens, &record).unwrap();
        (stream.tokens, stream.documents) = (stream.tokens + record.tokens, stream.documents + 1);
        if shard.tokens() >= text.shard_tokens {
            stream.shards.extend(open.take().map(|shard| shard.finish().unwrap()));
        }
    }
    stream.shards.extend(open.map(|shard| shard.finish().unwrap()));
    digest.end_file(1);
    stream.digest = digest.finish();
    stream
}

/// The provenance of a generated document.
pub(crate) fn record(source: &str, number: u64, first_token: u64, tokens: u64) -> DocumentRecord {
    let (id, row) = (Some(format!("{source}-{number}")), number + 1);
    DocumentRecord {
        id,
        file: 0,
        row,
        group: None,
        bytes: Some((0, 1)),
        first_token,
        tokens,
        kept: Vec::new(),
    }
}

/// A phase for [`curriculum`]: steps, sequence length, batch, micro-batch and mix.
pub(crate) struct PhaseText<'a>(
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) u64,
    pub(crate) u64,
    pub(crate) &'a str,
);

/// The text of a curriculum over `stores`; every source may be read 1,000 times.
pub(crate) fn curriculum(stores: &[&Path], sources: &[&str], phases: &[PhaseText]) -> String {
    let stores: Vec<String> =
        stores.iter().map(|path| format!("{:?}", path.display().to_string())).collect();
    let mut text = format!("store = [{}]\nseed = 7\n", stores.join(", "));
    for (number, PhaseText(steps, seq_len, batch, micro_batch, mix)) in phases.iter().enumerate() {
        text += &format!(
            "[[phase]]\nname = \"p{number}\"\nsteps = {steps}\nseq_len = {seq_len}\nbatch = {batch}\n\
             micro_batch = {micro_batch}\nmix = {{ {mix} }}\n"
        );
    }
    for source in sources {
        text += &format!("[source.{source}]\nmax_epochs = 1000\n");
    }
    text
}

/// The plan of such a curriculum over `stores`.
pub(crate) fn plan(text: &str, stores: &loader::Stores) -> DataPlan {
    let curriculum = Curriculum::parse(text, "curriculum.toml").unwrap();
    DataPlan::new(&curriculum, &stores.facts()).unwrap()
}
