//! Checking a store: every byte of every file, and what the bytes mean.
//!
//! Files whose digest is wrong are never parsed; damage inside one is found by block sums at offsets that arithmetic
//! gives, and named with the documents it touches as long as one of the two lists of documents is whole.

use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::documents::{Documents, Starts};
use super::manifest::chain;
use super::write::block_offset;
use super::{
    BLOCK_TOKENS, DocumentRecord, FileRecord, Manifest, ShardRecord, SourceRecord, Split,
    StreamRecord, open,
};
use crate::digest::block_sum;
use crate::{Digest, Fault, Identity, Result, far};

/// One damaged place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file, from the store's folder.
    pub file: String,
    /// What is wrong.
    pub what: String,
    /// The damaged block, where one can be told.
    pub block: Option<u64>,
    /// The documents it touches, where they can be told.
    pub documents: Option<String>,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.what)?;
        if let Some(block) = self.block {
            write!(f, ", block {block}")?;
        }
        self.documents.as_ref().map_or(Ok(()), |documents| write!(f, ", {documents}"))
    }
}

/// Checks what belongs to no stream: the tokenizer.
pub fn verify_tokenizer(store: &Path, manifest: &Manifest) -> Vec<Damage> {
    let found = far::read(&store.join(open::TOKENIZER));
    let what = match found {
        Err(error) => format!("it cannot be read: {error}"),
        Ok(bytes) if Identity::of_bytes(&bytes) == manifest.tokenizer.sha256 => return Vec::new(),
        Ok(bytes) => format!(
            "its content changed: found {}, wanted {}",
            Identity::of_bytes(&bytes).short(),
            manifest.tokenizer.sha256.short()
        ),
    };
    vec![Damage { file: open::TOKENIZER.to_owned(), what, block: None, documents: None }]
}

/// Checks one stream: its files, ids, starts, provenance and digest. Calls `passed` with the bytes of each file read.
pub fn verify_stream(
    store: &Path,
    manifest: &Manifest,
    source: &SourceRecord,
    split: Split,
    passed: &dyn Fn(u64),
) -> Vec<Damage> {
    let stream = source.stream(split);
    let mut check = Check {
        folder: open::stream_folder(store, &source.name, split),
        shown: format!("{}/{}", source.name, split.name()),
        manifest,
        source,
        damages: Vec::new(),
    };
    check.arithmetic(stream);
    let mut state = Some(Digest::default());
    for shard in &stream.shards {
        state = check.shard(shard, state);
        for file in [&shard.token_file, &shard.sum_file, &shard.start_file, &shard.document_file] {
            passed(file.bytes);
        }
    }
    if let Some(digest) = state
        && digest != stream.digest
    {
        let what = format!("its documents give the digest {digest}, not {}", stream.digest);
        check.tell(String::new(), what);
    }
    check.damages
}

struct Check<'a> {
    folder: PathBuf,
    shown: String,
    manifest: &'a Manifest,
    source: &'a SourceRecord,
    damages: Vec<Damage>,
}

/// The chain over the documents so far; `None` once damage has broken it.
type State = Option<Digest>;

impl Check<'_> {
    fn tell(&mut self, name: String, what: String) {
        let file =
            if name.is_empty() { self.shown.clone() } else { format!("{}/{name}", self.shown) };
        self.damages.push(Damage { file, what, block: None, documents: None });
    }

    /// The shards of the manifest follow each other and add up.
    fn arithmetic(&mut self, stream: &StreamRecord) {
        let (mut tokens, mut documents) = (0, 0);
        for shard in &stream.shards {
            if (shard.first_token, shard.first_document) != (tokens, documents) {
                self.tell(
                    shard.token_file.name.clone(),
                    "it does not follow the one before".to_owned(),
                );
            }
            tokens = shard.first_token + shard.tokens;
            documents = shard.first_document + shard.documents;
        }
        if (tokens, documents) != (stream.tokens, stream.documents) {
            let what = format!(
                "its shards hold {tokens} tokens of {documents} documents, the manifest says {} of {}",
                stream.tokens, stream.documents
            );
            self.tell(String::new(), what);
        }
    }

    fn shard(&mut self, shard: &ShardRecord, state: State) -> State {
        let tokens = self.file(&shard.token_file);
        let sums = self.file(&shard.sum_file);
        let starts = self.file(&shard.start_file);
        let documents = self.file(&shard.document_file);
        let whole = Whole { starts: starts.is_ok(), documents: documents.is_ok() };
        for fault in
            [&sums, &starts, &documents].into_iter().filter_map(|found| found.as_ref().err())
        {
            self.damages.push(fault.clone());
        }
        match tokens {
            Ok(()) => {}
            Err(damage) => {
                let found = self.blocks(shard, sums.is_ok(), &whole);
                // Without a damaged block the container around them is what changed.
                self.damages.extend(if found.is_empty() { vec![damage] } else { found });
                return None;
            }
        }
        if sums.is_ok() {
            let found = self.blocks(shard, true, &whole);
            self.damages.extend(found);
        }
        if !whole.starts || !whole.documents {
            return None;
        }
        match self.meaning(shard, state) {
            Ok(state) => state,
            Err((name, what)) => {
                self.tell(name, what);
                None
            }
        }
    }

    /// Size and digest of one file.
    fn file(&self, record: &FileRecord) -> std::result::Result<(), Damage> {
        let damage = |what: String| Damage {
            file: format!("{}/{}", self.shown, record.name),
            what,
            block: None,
            documents: None,
        };
        let (bytes, digest) = match digest_of(&self.folder.join(&record.name)) {
            Ok(found) => found,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(damage("it is missing".to_owned()));
            }
            Err(error) => return Err(damage(format!("it cannot be read: {error}"))),
        };
        if bytes < record.bytes {
            return Err(damage(format!("it is truncated: {bytes} of {} bytes", record.bytes)));
        }
        if bytes > record.bytes {
            return Err(damage(format!("it is too long: {bytes} bytes, not {}", record.bytes)));
        }
        if digest != record.digest {
            return Err(damage(format!(
                "its bytes changed: found {digest}, wanted {}",
                record.digest
            )));
        }
        Ok(())
    }

    /// The blocks of a token file whose sums are wrong.
    fn blocks(&self, shard: &ShardRecord, sums_whole: bool, whole: &Whole) -> Vec<Damage> {
        let name = &shard.token_file.name;
        let path = self.folder.join(name);
        let (Ok(sums), Ok(mut file)) =
            (far::read(&self.folder.join(&shard.sum_file.name)), far::open(&path))
        else {
            return Vec::new();
        };
        if !sums_whole {
            return Vec::new();
        }
        let mut damages = Vec::new();
        for (block, sum) in (0u64..).zip(sums.chunks_exact(8)) {
            let range = block_range(shard, block);
            let found = read_block(&mut file, self.manifest.token_bytes, block, &range);
            let what = match found {
                Err(error) => format!("{error}"),
                Ok(bytes) if block_sum(&bytes).to_le_bytes() == sum => continue,
                Ok(_) => "its bytes changed".to_owned(),
            };
            let first = shard.first_token;
            damages.push(Damage {
                file: format!("{}/{name}", self.shown),
                what,
                block: Some(block),
                documents: self.documents_in(shard, first + range.start..first + range.end, whole),
            });
        }
        damages
    }

    /// The documents that own these tokens of the stream, in words.
    fn documents_in(
        &self,
        shard: &ShardRecord,
        tokens: Range<u64>,
        whole: &Whole,
    ) -> Option<String> {
        let mut named: Vec<String> = Vec::new();
        let mut count = 0u64;
        let mut add = |name: String| {
            count += 1;
            if named.len() < 4 {
                named.push(name);
            }
        };
        if whole.documents {
            let path = self.folder.join(&shard.document_file.name);
            for record in Documents::open(&path).ok()? {
                let record = record.ok()?;
                if record.first_token < tokens.end
                    && record.first_token + record.tokens > tokens.start
                {
                    add(record.id);
                }
            }
        } else if whole.starts {
            let path = self.folder.join(&shard.start_file.name);
            let starts: Vec<u64> = Starts::open(&path).ok()?.collect::<Result<_>>().ok()?;
            let first = starts.partition_point(|start| *start <= tokens.start).saturating_sub(1);
            let end = starts.partition_point(|start| *start < tokens.end);
            (first..end)
                .for_each(|index| add(format!("number {}", shard.first_document + index as u64)));
        } else {
            return None;
        }
        let more = if count as usize > named.len() { ", ..." } else { "" };
        Some(format!("{count} documents: {}{more}", named.join(", ")))
    }

    /// Ids, starts, provenance and the chain of a shard whose bytes are whole. An error is a file and what it says.
    fn meaning(
        &self,
        shard: &ShardRecord,
        state: State,
    ) -> std::result::Result<State, (String, String)> {
        let in_starts = |what: String| (shard.start_file.name.clone(), what);
        let in_documents = |what: String| (shard.document_file.name.clone(), what);
        let mut tokens =
            Tokens::open(&self.folder.join(&shard.token_file.name), shard, self.manifest)?;
        let starts = Starts::open(&self.folder.join(&shard.start_file.name))
            .map_err(|fault| in_starts(fault.to_string()))?;
        let mut documents = Documents::open(&self.folder.join(&shard.document_file.name))
            .map_err(|fault| in_documents(fault.to_string()))?;
        let (mut next, mut count, mut state) = (shard.first_token, 0u64, state);
        let mut open = Vec::new();
        for start in starts {
            let start = start.map_err(|fault| in_starts(fault.to_string()))?;
            let record = documents
                .next()
                .ok_or_else(|| in_documents(format!("it ends at document {count}")))?
                .map_err(|fault| in_documents(fault.to_string()))?;
            if start != next || record.tokens == 0 {
                return Err(in_starts(format!("document {count} starts at {start}, not {next}")));
            }
            self.provenance(&record, start).map_err(in_documents)?;
            tokens.take(record.tokens, &mut open)?;
            state = state.map(|digest| chain(digest, &open, &record));
            next += record.tokens;
            count += 1;
        }
        if documents.next().is_some() || count != shard.documents {
            return Err(in_documents(format!(
                "it holds more or fewer than {} documents",
                shard.documents
            )));
        }
        if next != shard.first_token + shard.tokens {
            return Err(in_starts(format!("the documents end at token {next}")));
        }
        Ok(state)
    }

    fn provenance(&self, record: &DocumentRecord, start: u64) -> std::result::Result<(), String> {
        if record.first_token != start {
            return Err(format!(
                "{} begins at {}, by its start at {start}",
                record.id, record.first_token
            ));
        }
        if record.file as usize >= self.source.inputs.len() {
            return Err(format!(
                "{} comes from file {}, which there is not",
                record.id, record.file
            ));
        }
        Ok(())
    }
}

/// Which lists of documents can be trusted.
struct Whole {
    starts: bool,
    documents: bool,
}

/// The tokens of a block, counted in its shard.
fn block_range(shard: &ShardRecord, block: u64) -> Range<u64> {
    let start = block * BLOCK_TOKENS;
    start.min(shard.tokens)..(start + BLOCK_TOKENS).min(shard.tokens)
}

fn read_block(
    file: &mut File,
    token_bytes: u32,
    block: u64,
    tokens: &Range<u64>,
) -> std::io::Result<Vec<u8>> {
    let width = u64::from(token_bytes);
    let mut bytes = vec![0; ((tokens.end - tokens.start) * width) as usize];
    file.seek(SeekFrom::Start(block_offset(BLOCK_TOKENS * width, block)))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn digest_of(path: &Path) -> std::io::Result<(u64, Digest)> {
    let mut file = far::open(path)?;
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok((bytes, Digest(hash.digest128())));
        }
        hash.update(&buffer[..count]);
        bytes += count as u64;
    }
}

/// Reads a shard's tokens front to back.
struct Tokens<'a> {
    file: File,
    name: &'a str,
    shard: &'a ShardRecord,
    vocab: u32,
    token_bytes: u32,
    block: u64,
    ids: Vec<u32>,
    at: usize,
}

impl<'a> Tokens<'a> {
    fn open(
        path: &Path,
        shard: &'a ShardRecord,
        manifest: &Manifest,
    ) -> std::result::Result<Self, (String, String)> {
        let name = &shard.token_file.name;
        let file = far::open(path).map_err(|error| (name.clone(), error.to_string()))?;
        let (vocab, token_bytes) = (manifest.tokenizer.vocab, manifest.token_bytes);
        Ok(Tokens { file, name, shard, vocab, token_bytes, block: 0, ids: Vec::new(), at: 0 })
    }

    /// The next `count` tokens.
    fn take(
        &mut self,
        count: u64,
        into: &mut Vec<u32>,
    ) -> std::result::Result<(), (String, String)> {
        into.clear();
        while (into.len() as u64) < count {
            if self.at == self.ids.len() {
                self.fill().map_err(|what| (self.name.to_owned(), what))?;
            }
            let missing =
                (count - into.len() as u64).min((self.ids.len() - self.at) as u64) as usize;
            into.extend_from_slice(&self.ids[self.at..self.at + missing]);
            self.at += missing;
        }
        Ok(())
    }

    fn fill(&mut self) -> std::result::Result<(), String> {
        let range = block_range(self.shard, self.block);
        if range.is_empty() {
            return Err("it ends before its documents do".to_owned());
        }
        let bytes = read_block(&mut self.file, self.token_bytes, self.block, &range)
            .map_err(|error| format!("block {}: {error}", self.block))?;
        self.ids.clear();
        if self.token_bytes == 2 {
            self.ids.extend(bytes.as_chunks().0.iter().map(|b| u32::from(u16::from_le_bytes(*b))));
        } else {
            self.ids.extend(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)));
        }
        if let Some(id) = self.ids.iter().find(|id| **id >= self.vocab) {
            return Err(format!(
                "block {} holds the id {id} of a vocabulary of {}",
                self.block, self.vocab
            ));
        }
        (self.block, self.at) = (self.block + 1, 0);
        Ok(())
    }
}

/// The fault that a list of damages is.
pub fn fault(store: &Path, damages: &[Damage]) -> Option<Fault> {
    let first = damages.first()?;
    let lines: Vec<String> = damages.iter().map(Damage::to_string).collect();
    let what = match damages.len() {
        1 => "this store is damaged".to_owned(),
        count => format!("this store is damaged in {count} places"),
    };
    let found = lines.join("\n           ");
    Some(
        Fault::data(what)
            .at(store.join(&first.file).display().to_string())
            .found(found)
            .hint("restore these files from a copy, or build the store again: it will be the same"),
    )
}
