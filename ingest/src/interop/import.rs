//! `zdata import`: a peer's tokens to a store.
//!
//! Reads top to bottom: the tokenizer, the files, whether the store is there already, document after document into a
//! folder beside the store's place, the manifest, the rename.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Hasher, Identity, Ratio, Result};
use store::{
    DocumentRecord, FORMAT, InputRecord, Manifest, SourceRecord, Split, TokenizerRecord, open,
    write,
};

use super::fill::Filling;
use super::staging::{self, Staging};
use super::{Documents, Found, Hints, Peer, Width, datatrove, mds, megatron, olmo};
use crate::corpus::check_name;
use crate::disk::{Disk, Real};
use crate::pipeline::held_out;
use crate::progress::{Measure, Progress};
use crate::request;
use crate::tokenize::{Engine, Tokenizer};

/// Files of a source.
#[derive(Clone, Debug)]
pub struct Part {
    /// The source.
    pub source: String,
    /// A file or a folder.
    pub path: PathBuf,
    /// Whether all of it is for validation.
    pub held_out: bool,
}

/// What to import.
#[derive(Clone, Debug)]
pub struct Import {
    /// The folder that becomes the store.
    pub store: PathBuf,
    /// Whose files they are.
    pub peer: Peer,
    /// The tokenizer that made the tokens.
    pub tokenizer: PathBuf,
    /// The files, in order.
    pub parts: Vec<Part>,
    /// The width of a token, where no header says it.
    pub width: Option<Width>,
    /// The token that begins each document, if there is one: checked and recorded.
    pub begin: Option<String>,
    /// The token that ends each document, if there is one: checked and recorded.
    pub end: Option<String>,
    /// The column of tokens (MDS).
    pub column: String,
    /// The share of documents to hold out of the parts that are not held out whole.
    pub validation: Ratio,
    /// Tokens in a unit.
    pub unit: u64,
    /// Tokens after which a shard is cut.
    pub shard_tokens: u64,
    /// Whether to keep silent about progress.
    pub quiet: bool,
}

/// How an import ended.
#[derive(Debug)]
pub enum Imported {
    /// The store was there already, of the same files.
    UpToDate(Manifest),
    /// Imported now; what passed.
    Done(Manifest, String),
}

/// One of a peer's data files, with all that is needed to open it.
enum Unit {
    File(PathBuf),
    Shard(PathBuf, Box<mds::Shard>),
}

impl Unit {
    fn open(&self, disk: &dyn Disk, peer: Peer, hints: &Hints) -> Result<Box<dyn Documents>> {
        Ok(match (self, peer) {
            (Unit::Shard(folder, shard), _) => {
                Box::new(mds::Reader::open(disk, folder, shard, hints)?)
            }
            (Unit::File(path), Peer::Megatron) => {
                Box::new(megatron::Reader::open(disk, path, hints)?)
            }
            (Unit::File(path), Peer::Datatrove) => {
                Box::new(datatrove::Reader::open(disk, path, hints)?)
            }
            (Unit::File(path), _) => Box::new(olmo::Reader::open(disk, path, hints)?),
        })
    }
}

/// Imports.
pub fn import(request: &Import) -> Result<Imported> {
    let tokenizer = Tokenizer::read(&request.tokenizer, Engine::Reference)?;
    let empty = empty(request, &tokenizer)?;
    let hints = Hints {
        width: request.width,
        end: empty.tokenizer.end,
        column: request.column.clone(),
        vocab: tokenizer.vocab(),
    };
    let there = request.store.join(open::MANIFEST).exists();
    if there {
        staging::finish(&request.store)?;
    }
    // What is there is compared by importing again into nothing: the same reading, the same checks.
    let staging = if there { None } else { Some(Staging::begin(&request.store)?) };
    let mut progress = Progress::new("import", Measure::Bytes, size(request), request.quiet);
    let mut sources = Vec::new();
    for name in names(request)? {
        let folder = staging.as_ref().map(Staging::path);
        let mut import =
            Source { request, hints: &hints, manifest: &empty, progress: &mut progress };
        sources.push(import.source(name, folder)?);
    }
    let mut manifest = Manifest { sources, ..empty };
    manifest.request = request::identity(&manifest);
    let Some(staging) = staging else { return same(&request.store, &manifest) };
    manifest.digest = manifest.identity();
    write::write_whole(&staging.path().join(open::TOKENIZER), tokenizer.bytes())?;
    open::commit(staging.path(), &manifest)?;
    staging.commit()?;
    progress.finish();
    let streams = || manifest.sources.iter().flat_map(|source| [&source.train, &source.validation]);
    let documents: u64 = streams().map(|stream| stream.documents).sum();
    let tokens: u64 = streams().map(|stream| stream.tokens).sum();
    Ok(Imported::Done(manifest, format!("{documents} documents, {tokens} tokens")))
}

/// The store that is there, if it is what was asked for.
fn same(store: &Path, wanted: &Manifest) -> Result<Imported> {
    let manifest = open::manifest(store)?;
    if manifest.request == wanted.request && manifest.tokenizer == wanted.tokenizer {
        return Ok(Imported::UpToDate(manifest));
    }
    Err(Fault::mismatch("this store was made from something else")
        .at(store.display().to_string())
        .found(wanted.request)
        .wanted(manifest.request)
        .hint("name another folder; a store is never altered"))
}

fn empty(request: &Import, tokenizer: &Tokenizer) -> Result<Manifest> {
    let marker = |key: &str, token: &Option<String>| {
        token.as_ref().map(|token| tokenizer.id_of(key, token)).transpose()
    };
    Ok(Manifest {
        format: FORMAT,
        digest: Identity([0; 32]),
        request: Identity([0; 32]),
        tokenizer: TokenizerRecord {
            sha256: tokenizer.identity(),
            vocab: tokenizer.vocab(),
            begin: marker("--begin", &request.begin)?,
            end: marker("--end", &request.end)?,
            encoder: format!("imported from {}", request.peer.name()),
        },
        token_bytes: tokenizer.token_bytes(),
        unit: request.unit,
        validation: request.validation.to_string(),
        sources: Vec::new(),
    })
}

/// The sources' names, each once, in order.
fn names(request: &Import) -> Result<Vec<&str>> {
    let mut names: Vec<&str> = Vec::new();
    let mut folded = BTreeMap::new();
    for part in &request.parts {
        let name = part.source.as_str();
        check_name(name, "--source")?;
        // Folders on some systems ignore case.
        match folded.insert(name.to_lowercase(), name) {
            None => names.push(name),
            Some(before) if before == name => {}
            Some(before) => {
                return Err(Fault::usage("two sources differ in case only")
                    .at("--source")
                    .found(format!("{before:?} and {name:?}")));
            }
        }
    }
    if names.is_empty() {
        return Err(Fault::usage("nothing is to be imported").wanted("--source NAME=PATH"));
    }
    Ok(names)
}

/// Bytes of the files, about: for the progress alone.
fn size(request: &Import) -> u64 {
    let below = |folder: &Path| -> u64 {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.metadata().ok()).map(|about| about.len()).sum()
    };
    let one = |part: &Part| match request.peer {
        Peer::Megatron => fs::metadata(megatron::pair(&part.path).0).map_or(0, |about| about.len()),
        _ if part.path.is_dir() => below(&part.path),
        _ => fs::metadata(&part.path).map_or(0, |about| about.len()),
    };
    request.parts.iter().map(one).sum()
}

/// The data files that a path means, in order, and what else was read to know them.
fn units(disk: &dyn Disk, peer: Peer, path: &Path) -> Result<(Vec<Unit>, Option<InputRecord>)> {
    if peer == Peer::Mds {
        let folder = if path.ends_with(mds::INDEX) { path.parent().unwrap_or(path) } else { path };
        let (shards, index) = mds::shards(disk, folder)?;
        let unit = |shard| Unit::Shard(folder.to_owned(), Box::new(shard));
        return Ok((shards.into_iter().map(unit).collect(), Some(index)));
    }
    if peer == Peer::Megatron || !path.is_dir() {
        return Ok((vec![Unit::File(path.to_owned())], None));
    }
    let ending = if peer == Peer::Datatrove { ".ds" } else { ".npy" };
    let fault = |error: &std::io::Error| Fault::io("list", path, error);
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(|error| fault(&error))? {
        let name = entry.map_err(|error| fault(&error))?.file_name();
        if name.to_string_lossy().ends_with(ending) {
            found.push(path.join(name));
        }
    }
    found.sort();
    if found.is_empty() {
        return Err(Fault::data(format!("this folder holds no *{ending}"))
            .at(path.display().to_string())
            .hint("name the folder of the files, or a file"));
    }
    Ok((found.into_iter().map(Unit::File).collect(), None))
}

/// One source being imported.
struct Source<'a> {
    request: &'a Import,
    hints: &'a Hints,
    manifest: &'a Manifest,
    progress: &'a mut Progress,
}

impl Source<'_> {
    /// Reads all parts of the source called `name`, into `folder` or, to compare, into nothing.
    fn source(&mut self, name: &str, folder: Option<&Path>) -> Result<SourceRecord> {
        let parts: Vec<&Part> =
            self.request.parts.iter().filter(|part| part.source == name).collect();
        let preparation = self.preparation(&parts);
        let store = folder.unwrap_or(Path::new(""));
        let mut filling =
            Filling::new(store, self.manifest, (name, preparation), self.request.shard_tokens);
        for part in parts {
            let (units, index) = units(&Real, self.request.peer, &part.path)?;
            for unit in units {
                self.unit(&unit, part, &mut filling, folder.is_some())?;
            }
            filling.record.inputs.extend(index);
        }
        filling.finish()
    }

    /// What was asked, as text: part of the identity.
    fn preparation(&self, parts: &[&Part]) -> String {
        let Import { peer, width, column, .. } = self.request;
        let width = width.map_or("stated", Width::name);
        let column = if *peer == Peer::Mds { format!(" column={column:?}") } else { String::new() };
        let held: String = parts.iter().map(|part| if part.held_out { '1' } else { '0' }).collect();
        format!("import={} dtype={width}{column} held={held}", peer.name())
    }

    fn unit(&mut self, unit: &Unit, part: &Part, filling: &mut Filling, keep: bool) -> Result<()> {
        let mut documents = unit.open(&Real, self.request.peer, self.hints)?;
        let file = filling.record.inputs.len();
        let file = u32::try_from(file).map_err(|_| Fault::usage("a source has too many files"))?;
        let (mut tokens, mut row, mut bytes) = (Vec::new(), 0, 0);
        while let Some(found) = documents.next(&mut tokens)? {
            bytes = found.bytes.1;
            if keep {
                self.document(found, &tokens, part, (file, row), filling)?;
            }
            row += 1;
            self.progress.within(bytes);
            self.progress.tick();
        }
        self.progress.file(bytes);
        filling.record.inputs.extend(documents.inputs());
        Ok(())
    }

    fn document(
        &mut self,
        found: Found,
        tokens: &[u32],
        part: &Part,
        (file, row): (u32, u64),
        filling: &mut Filling,
    ) -> Result<()> {
        if tokens.is_empty() {
            filling.dropped("empty", 0);
            return Ok(());
        }
        let id = found.id.unwrap_or_else(|| format!("{file}#0.{row}"));
        self.check_markers(tokens, &part.path, row)?;
        let split = if part.held_out || held_out(content(tokens), self.request.validation) {
            Split::Validation
        } else {
            Split::Train
        };
        self.progress.document(0, tokens.len() as u64);
        let record = DocumentRecord {
            id,
            file,
            row,
            group: Some(0),
            bytes: Some(found.bytes),
            first_token: 0,
            tokens: tokens.len() as u64,
        };
        filling.push(split, tokens, record)
    }

    /// What the manifest will say of every document must be true of this one.
    fn check_markers(&self, tokens: &[u32], path: &Path, row: u64) -> Result<()> {
        let TokenizerRecord { begin, end, .. } = &self.manifest.tokenizer;
        let sides = [("begin", begin, tokens.first()), ("end", end, tokens.last())];
        for (side, wanted, found) in sides {
            if let (Some(wanted), Some(found)) = (wanted, found)
                && wanted != found
            {
                return Err(Fault::data(format!(
                    "a document does not {side} with the token that --{side} names"
                ))
                .at(format!("{}: document {row}", path.display()))
                .found(found)
                .wanted(wanted)
                .hint(format!(
                    "leave --{side} out: it says what is there already, and adds nothing"
                )));
            }
        }
        Ok(())
    }
}

/// What decides whether a document without text is held out.
fn content(tokens: &[u32]) -> Digest {
    Hasher::new().tag("imported.v1").u32s(tokens).finish()
}

/// Every document of the files at `path`, and of nothing else: what the tests try to break.
#[cfg(test)]
pub(super) fn read_through(
    disk: &dyn Disk,
    peer: Peer,
    path: &Path,
    hints: &Hints,
) -> Result<Vec<(Option<String>, Vec<u32>)>> {
    let (mut found, mut tokens) = (Vec::new(), Vec::new());
    for unit in units(disk, peer, path)?.0 {
        let mut documents = unit.open(disk, peer, hints)?;
        while let Some(Found { id, .. }) = documents.next(&mut tokens)? {
            found.push((id, tokens.clone()));
        }
        documents.inputs();
    }
    Ok(found)
}
