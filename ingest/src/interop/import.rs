//! `zdata import`: makes a store from the token files of another project.
//!
//! Reads top to bottom: the tokenizer, the files, whether the store exists already, document after document into a
//! staging folder next to the store, the manifest, the rename.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use contract::framed::quoted;
use contract::{Digest, Fault, Hasher, Identity, Ratio, Result, counted};
use storage::staging::Staging;
use store::{
    DocumentRecord, FORMAT, InputRecord, Location, Manifest, SourceRecord, Split, TokenizerRecord,
    disk, open,
};

use super::units::{Unit, canonical, units};
use super::{Hints, NextDocument, Peer, Width};
use crate::assembly;
use crate::assembly::part::{InputOutput, PartBuilder, PartOutput};
use crate::assembly::pipeline::held_out;
use crate::assembly::request;
use crate::assembly::source::SourceBuilder;
use crate::corpus::check_name;
use crate::disk::Real;
use crate::dropped::Line;
use crate::progress::{Measure, Progress};
use crate::recipe::Recipe;
use crate::source::Content;
use crate::tokenize::{Engine, Tokenizer};

/// Files of a source.
#[derive(Clone, Debug)]
pub struct Part {
    /// The source.
    pub source: String,
    /// A file or a folder, local or in a bucket.
    pub path: Location,
    /// Whether all documents are for validation.
    pub held_out: bool,
}

/// What to import.
#[derive(Clone, Debug)]
pub struct Import {
    /// The folder that becomes the store.
    pub store: PathBuf,
    /// The format of the files.
    pub peer: Peer,
    /// The tokenizer that made the tokens.
    pub tokenizer: Location,
    /// The files, in order.
    pub parts: Vec<Part>,
    /// The width of a token, for files without a header.
    pub width: Option<Width>,
    /// The token that begins each document, if any: checked and recorded.
    pub begin: Option<String>,
    /// The token that ends each document, if any: checked and recorded.
    pub end: Option<String>,
    /// The column of tokens, only for MDS; `None`: `tokens`.
    pub column: Option<String>,
    /// The share of documents to hold out of the parts that are not held out as a whole.
    pub validation: Ratio,
    /// Tokens in a unit.
    pub unit: u64,
    /// Bytes of token files that a part of the store is made of.
    pub part_bytes: u64,
    /// Whether progress is not shown.
    pub quiet: bool,
}

/// The outcome of an import.
#[derive(Debug)]
pub enum Imported {
    /// The store existed already, made from the same files.
    UpToDate(Manifest),
    /// Imported now, with counts and rates.
    Done(Manifest, String),
}

/// Imports.
pub fn import(request: &Import) -> Result<Imported> {
    if let (Some(column), true) = (&request.column, request.peer != Peer::Mds) {
        return Err(Fault::usage("only files of MDS have columns")
            .at("--column")
            .found(format!("{column:?} for files of {}", request.peer.name()))
            .hint("leave it out"));
    }
    let tokenizer = Tokenizer::read(&request.tokenizer, Engine::Reference)?;
    let empty = empty(request, &tokenizer)?;
    let hints = Hints {
        width: request.width,
        end: empty.tokenizer.end,
        column: request.column.as_deref().unwrap_or("tokens").to_owned(),
        vocab: tokenizer.vocab(),
    };
    let names = names(request)?;
    let files = files(request)?;
    let there = request.store.join(open::MANIFEST).exists();
    if there {
        open::finish(&request.store)?;
    }
    // An existing store is compared with an import that writes nothing: the same reading, the same checks.
    let mut staging = if there { None } else { Some(Staging::begin(&request.store)?) };
    let bytes = files.iter().flat_map(|files| &files.units).map(|unit| unit.bytes(request.peer));
    let bytes = bytes.fold(0, u64::saturating_add);
    let mut progress = Progress::new("import", Measure::Bytes, bytes, request.quiet);
    let mut sources = Vec::new();
    for name in names {
        let folder = staging.as_ref().map(Staging::path);
        let mut import =
            Source { request, hints: &hints, manifest: &empty, progress: &mut progress };
        sources.push(import.source(name, &files, folder)?);
    }
    let mut manifest = Manifest { sources, ..empty };
    manifest.request = request::identity(&manifest);
    let Some(staging) = &mut staging else { return same(&request.store, &manifest) };
    let kept = request::check_kept(&manifest.sources);
    kept.map_err(|fault| fault.hint("check --dtype and the files, or leave the source out"))?;
    let manifest = assembly::finish(staging.path(), &tokenizer, manifest)?;
    assembly::place(staging, &mut progress)?;
    let streams = || manifest.sources.iter().flat_map(|source| [&source.train, &source.validation]);
    let documents: u64 = streams().map(|stream| stream.documents).sum();
    let tokens: u64 = streams().map(|stream| stream.tokens).sum();
    let summary = format!("{}, {}", counted(documents, "document"), counted(tokens, "token"));
    Ok(Imported::Done(manifest, summary))
}

/// The existing store, if it matches the request.
fn same(store: &Path, wanted: &Manifest) -> Result<Imported> {
    let manifest = open::manifest(store)?;
    if manifest.request == wanted.request && manifest.tokenizer == wanted.tokenizer {
        store::whole::refuse_incomplete(&store.into(), &manifest)?;
        return Ok(Imported::UpToDate(manifest));
    }
    let (what, old, new) = difference(&manifest, wanted);
    Err(Fault::mismatch(format!("this store was made from something else: {what}"))
        .at(store.display().to_string())
        .found(new)
        .wanted(old)
        .hint("name another folder; a store is never altered"))
}

/// The first difference between a store and the request: its name, the store's value, the requested value.
fn difference(there: &Manifest, wanted: &Manifest) -> (String, String, String) {
    let id = |id: Option<u32>| id.map_or("none".to_owned(), |id| format!("token {id}"));
    let settings = |manifest: &Manifest| {
        let TokenizerRecord { sha256, begin, end, ref encoder, .. } = manifest.tokenizer;
        let sources: Vec<&str> = manifest.sources.iter().map(|it| it.name.as_str()).collect();
        [
            ("the tokenizer", sha256.to_string()),
            ("--begin", id(begin)),
            ("--end", id(end)),
            ("--unit", manifest.unit.to_string()),
            ("--validation", manifest.validation.clone()),
            ("its sources", sources.join(", ")),
            ("its origin", encoder.clone()),
        ]
    };
    let pairs = settings(there).into_iter().zip(settings(wanted));
    for ((what, old), (_, new)) in pairs {
        if old != new {
            return (what.to_owned(), old, new);
        }
    }
    for (before, now) in there.sources.iter().zip(&wanted.sources) {
        let input = |record: Option<&InputRecord>| {
            record.map_or("none".to_owned(), |it| format!("{} ({})", it.path, it.sha256))
        };
        let count = before.inputs.len().max(now.inputs.len());
        let mut inputs =
            (0..count).map(|at| [before.inputs.get(at), now.inputs.get(at)].map(input));
        if let Some([old, new]) = inputs.find(|[old, new]| old != new) {
            return (format!("an input of source {}", before.name), old, new);
        }
    }
    ("its request".to_owned(), there.request.to_string(), wanted.request.to_string())
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

/// The sources' names, without repetition, in order.
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

/// The files at a named path.
struct Files<'a> {
    part: &'a Part,
    units: Vec<Unit>,
    index: Option<InputRecord>,
}

/// The files of all parts, without repetition.
fn files(request: &Import) -> Result<Vec<Files<'_>>> {
    let (mut all, mut seen) = (Vec::new(), BTreeMap::new());
    for part in &request.parts {
        let (units, index) = units(&Real, request.peer, &part.path)?;
        for unit in &units {
            let whole = canonical(unit.path(request.peer));
            if let Some(before) = seen.insert(whole.clone(), part) {
                let told = |part: &Part| format!("{}={}", part.source, part.path);
                return Err(Fault::usage("this file would be imported twice")
                    .at(whole.to_string())
                    .found(format!("{} and {}", told(before), told(part)))
                    .hint("name each file once"));
            }
        }
        all.push(Files { part, units, index });
    }
    Ok(all)
}

/// One source being imported.
struct Source<'a> {
    request: &'a Import,
    hints: &'a Hints,
    manifest: &'a Manifest,
    progress: &'a mut Progress,
}

impl Source<'_> {
    /// Reads all parts of the source called `name`, into `folder` or, to compare, without writing.
    fn source(
        &mut self,
        name: &str,
        files: &[Files<'_>],
        folder: Option<&Path>,
    ) -> Result<SourceRecord> {
        let ours = || files.iter().filter(move |files| files.part.source == name);
        let preparation = self.preparation(ours().map(|files| files.part));
        let recipe = Recipe::default();
        let mut source = SourceBuilder::new(name, &preparation, &[], &recipe);
        let mut open = None;
        for Files { part, units, index } in ours() {
            for unit in units {
                let sink = match &mut open {
                    Some(sink) => sink,
                    none => none.insert(Sink::new(name, source.part(), folder, self.manifest)?),
                };
                self.unit(unit, part, sink)?;
                if sink.bytes >= self.request.part_bytes
                    && let Some(sink) = open.take()
                {
                    sink.finish(&mut source)?;
                }
            }
            // The index of a folder is an input of the last part that needs it.
            if let Some(index) = index {
                let sink = match &mut open {
                    Some(sink) => sink,
                    none => none.insert(Sink::new(name, source.part(), folder, self.manifest)?),
                };
                sink.file_end(index.clone());
            }
        }
        if let Some(sink) = open {
            sink.finish(&mut source)?;
        }
        Ok(source.finish())
    }

    /// The request as text: part of the identity.
    fn preparation<'b>(&self, parts: impl Iterator<Item = &'b Part>) -> String {
        let Import { peer, width, .. } = self.request;
        let width = width.map_or("stated", Width::name);
        let column = match peer {
            Peer::Mds => format!(" column={}", quoted(&self.hints.column)),
            _ => String::new(),
        };
        let held: String = parts.map(|part| if part.held_out { '1' } else { '0' }).collect();
        format!("import={} dtype={width}{column} held={held}", peer.name())
    }

    fn unit(&mut self, unit: &Unit, part: &Part, sink: &mut Sink) -> Result<()> {
        let mut documents = unit.open(&Real, self.request.peer, self.hints)?;
        let (mut tokens, mut row, mut bytes) = (Vec::new(), 0, 0);
        while let Some(found) = documents.next(&mut tokens)? {
            bytes = found.bytes.1;
            if let Some(builder) = &mut sink.part {
                self.document(found, &tokens, part, row, builder)?;
            }
            row += 1;
            self.progress.within(bytes);
            self.progress.tick();
        }
        self.progress.file(bytes);
        sink.bytes += bytes;
        documents.inputs().into_iter().for_each(|input| sink.file_end(input));
        Ok(())
    }

    fn document(
        &mut self,
        found: NextDocument,
        tokens: &[u32],
        part: &Part,
        row: u64,
        builder: &mut PartBuilder,
    ) -> Result<()> {
        if tokens.is_empty() {
            let (file, group, reason) = (builder.file(), Some(0), "empty".to_owned());
            let (id, bytes, kept, spans) = (found.id, Some(0), None, Vec::new());
            return builder.dropped(Line { file, group, row, id, reason, bytes, kept, spans });
        }
        self.check_markers(tokens, &part.path, row)?;
        let split = if part.held_out || held_out(content(tokens), self.request.validation) {
            Split::Validation
        } else {
            Split::Train
        };
        self.progress.document(0, tokens.len() as u64);
        let record = DocumentRecord {
            id: found.id,
            file: 0,
            row,
            group: Some(0),
            bytes: Some(found.bytes),
            first_token: 0,
            tokens: tokens.len() as u64,
            kept: Vec::new(),
        };
        builder.document(split, tokens, record, 0)
    }

    /// Checks that this document has the begin and end tokens that the manifest will claim.
    fn check_markers(&self, tokens: &[u32], path: &Location, row: u64) -> Result<()> {
        let TokenizerRecord { begin, end, .. } = &self.manifest.tokenizer;
        let sides = [("begin", begin, tokens.first()), ("end", end, tokens.last())];
        for (side, wanted, found) in sides {
            if let (Some(wanted), Some(found)) = (wanted, found)
                && wanted != found
            {
                return Err(Fault::data(format!(
                    "a document does not {side} with the token that --{side} names"
                ))
                .at(format!("{path}: document {row}"))
                .found(found)
                .wanted(wanted)
                .hint(format!(
                    "--{side} adds nothing: leave it out if documents {side} without it; else the file is damaged"
                )));
            }
        }
        Ok(())
    }
}

/// A part being imported.
struct Sink {
    /// Where its documents go; none to compare, without writing.
    part: Option<PartBuilder>,
    /// Its folder.
    folder: PathBuf,
    inputs: Vec<InputRecord>,
    /// Bytes of token files so far.
    bytes: u64,
}

impl Sink {
    fn new(source: &str, part: u32, store: Option<&Path>, manifest: &Manifest) -> Result<Self> {
        let folder = open::part_folder(store.unwrap_or(Path::new("")), source, part);
        let part = store.map(|_| {
            disk::create_folder(&folder)?;
            PartBuilder::new(&folder, source, &[], manifest, None, 0)
        });
        Ok(Sink { part: part.transpose()?, folder, inputs: Vec::new(), bytes: 0 })
    }

    fn file_end(&mut self, input: InputRecord) {
        if let Some(part) = &mut self.part {
            let InputRecord { bytes, sha256, segments, .. } = input;
            part.file_end(Content { bytes, sha256, segments, hashes: None });
        }
        self.inputs.push(input);
    }

    /// Adds the finished part to its source; without one, only its inputs.
    fn finish(self, source: &mut SourceBuilder<'_>) -> Result<()> {
        let Sink { part, folder, inputs, bytes: _ } = self;
        let output = match part {
            Some(part) => {
                let output = part.finish()?;
                disk::sync_folder(&folder)?;
                output
            }
            None => PartOutput {
                inputs: inputs.iter().map(InputOutput::unread).collect(),
                ..PartOutput::default()
            },
        };
        source.push(output, inputs.into_iter().map(|input| input.path), 0)
    }
}

/// The digest that decides whether a document without text is held out.
fn content(tokens: &[u32]) -> Digest {
    Hasher::new().tag("imported.v1").u32s(tokens).finish()
}
