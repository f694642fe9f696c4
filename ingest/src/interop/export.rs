//! `zdata export`: writes a whole or partial store in the format of another project.
//!
//! `OUT/export.json` names the store, and each file's size and digest; `OUT/tokenizer.json` belongs to the tokens.

use std::ops::Range;
use std::path::Path;

use contract::{Fault, Identity, Result, counted, json};
use serde::{Deserialize, Serialize};
use storage::publish;
use storage::staging::Staging;
use store::disk::{self, write_atomic};
use store::location::Object;
use store::write::ROW_GROUP_DOCUMENTS;
use store::{
    DocumentRecord, FileRecord, Location, SourceRecord, Split, Store, StreamReader, is_file_name,
    open,
};

use super::{Peer, Writer, datatrove, mds, megatron, olmo};
use crate::assembly;
pub use crate::made::NOTE;
use crate::moved;
use crate::progress::{Measure, Progress};

/// Tokens read at a time.
const READ_TOKENS: u64 = 1 << 20;

/// What to export.
#[derive(Clone, Debug)]
pub struct Export {
    /// The store.
    pub store: Location,
    /// The folder to create, local or in a bucket.
    pub out: Location,
    /// The format.
    pub peer: Peer,
    /// Exports only this source.
    pub source: Option<String>,
    /// Exports only this split.
    pub split: Option<Split>,
    /// Whether progress is not shown.
    pub quiet: bool,
}

/// The content of `export.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The format.
    pub format: String,
    /// The store's digest.
    pub store: Identity,
    /// The streams, in the store's order.
    pub streams: Vec<StreamNote>,
}

/// One stream of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamNote {
    /// Its source.
    pub source: String,
    /// Its split.
    pub split: String,
    /// Its documents.
    pub documents: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Its files.
    pub files: Vec<FileRecord>,
}

/// The outcome of an export.
#[derive(Debug)]
pub enum Exported {
    /// The files existed already.
    UpToDate(Note),
    /// Written now, with counts and rates.
    Done(Note, String),
}

/// Exports.
pub fn export(request: &Export) -> Result<Exported> {
    let store = Store::open(&request.store)?;
    let chosen = chosen(&store, request)?;
    match &request.out {
        Location::Local(folder) => into_folder(folder, request, &store, &chosen),
        Location::Object(target) => into_bucket(target, request, &store, &chosen),
    }
}

/// The exported streams, each with its source and split.
type Chosen<'a> = [(&'a SourceRecord, Split, StreamReader)];

/// Exports to a local folder, then uploads the files, the note last; a killed run is resumed.
fn into_bucket(
    target: &Object,
    request: &Export,
    store: &Store,
    chosen: &Chosen,
) -> Result<Exported> {
    let scratch = publish::scratch(target)?;
    if let Some(note) = note_of(&request.out)? {
        let exported = same(&request.out, request, store, chosen, note)?;
        moved::ended(&scratch)?;
        // Left by a run that was killed at its very end.
        let left = note_of(&Location::from(&scratch)).ok().flatten();
        if left.is_some_and(|note| is_of(&note, request, store, chosen)) {
            moved::away(&scratch)?;
        }
        return Ok(exported);
    }
    let ours = |name: &str| {
        let of_source = |name: &str| chosen.iter().any(|(source, ..)| source.name == name);
        [open::TOKENIZER, NOTE].contains(&name)
            || name.split_once('/').is_some_and(|(top, _)| of_source(top))
    };
    publish::check_place(target, ours)?;
    let left = note_of(&Location::from(&scratch))?;
    if left.is_some_and(|note| !is_of(&note, request, store, chosen)) {
        disk::remove(&scratch)?;
    }
    let (Exported::Done(note, _) | Exported::UpToDate(note)) =
        into_folder(&scratch, request, store, chosen)?;
    let files = note.streams.iter().flat_map(|stream| &stream.files);
    let mut names: Vec<String> = files.map(|file| file.name.clone()).collect();
    names.extend([open::TOKENIZER, NOTE].map(str::to_owned));
    let bytes = publish::bytes(&scratch, &names)?;
    let progress = Progress::new("put", Measure::Bytes, bytes, request.quiet);
    progress.during(|passed| publish::publish(&scratch, target, &names, passed))?;
    moved::away(&scratch)?;
    let summary = summary(&note);
    Ok(Exported::Done(note, summary))
}

fn into_folder(
    folder: &Path,
    request: &Export,
    store: &Store,
    chosen: &Chosen,
) -> Result<Exported> {
    let out = Location::from(folder);
    if let Some(note) = note_of(&out)? {
        open::finish(folder)?;
        return same(&out, request, store, chosen, note);
    }
    let mut staging = Staging::begin(folder)?;
    let tokens = chosen.iter().map(|(_, _, stream)| stream.record().tokens).sum();
    let mut progress = Progress::new("export", Measure::Count("token"), tokens, request.quiet);
    let mut streams = Vec::new();
    for (source, split, stream) in chosen {
        let stem = staging.path().join(&source.name).join(split.name());
        let writer = writer(request.peer, &stem, store, stream)?;
        let mut files = walk(stream, writer, &mut progress)?;
        for file in &mut files {
            file.name = relative(&file.name, staging.path());
        }
        streams.push(StreamNote {
            source: source.name.clone(),
            split: split.name().to_owned(),
            documents: stream.record().documents,
            tokens: stream.record().tokens,
            files,
        });
    }
    let note =
        Note { format: request.peer.name().to_owned(), store: store.manifest().digest, streams };
    write_atomic(&staging.path().join(open::TOKENIZER), &store.tokenizer()?)?;
    write_atomic(&staging.path().join(NOTE), &json::pretty(&note, "an export's note")?)?;
    assembly::place(&mut staging, &mut progress)?;
    let summary = summary(&note);
    Ok(Exported::Done(note, summary))
}

fn summary(note: &Note) -> String {
    let sum = |count: fn(&StreamNote) -> u64| note.streams.iter().map(count).sum::<u64>();
    let (documents, tokens) = (sum(|stream| stream.documents), sum(|stream| stream.tokens));
    format!("{}, {}", counted(documents, "document"), counted(tokens, "token"))
}

fn relative(name: &str, folder: &Path) -> String {
    let short = Path::new(name).strip_prefix(folder).unwrap_or(Path::new(name));
    short.display().to_string()
}

/// The requested streams that hold documents.
fn chosen<'a>(
    store: &'a Store,
    request: &Export,
) -> Result<Vec<(&'a SourceRecord, Split, StreamReader)>> {
    let sources = &store.manifest().sources;
    if let Some(name) = &request.source
        && store.manifest().source(name).is_none()
    {
        let refused =
            Fault::usage(format!("the store has no source {name:?}")).at(request.store.to_string());
        return Err(refused.one_of(name, sources.iter().map(|source| source.name.as_str())));
    }
    let mut chosen = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        for split in Split::ALL {
            let wanted = request.source.as_ref().is_none_or(|name| *name == source.name)
                && request.split.is_none_or(|only| only == split);
            if wanted && source.stream(split).documents > 0 {
                chosen.push((source, split, store.stream(index, split)));
            }
        }
    }
    if chosen.is_empty() {
        return Err(Fault::usage("nothing was chosen to export")
            .at(request.store.to_string())
            .hint("see `zdata inspect` for what the store holds"));
    }
    Ok(chosen)
}

fn writer(
    peer: Peer,
    stem: &Path,
    store: &Store,
    stream: &StreamReader,
) -> Result<Box<dyn Writer>> {
    let vocab = store.manifest().tokenizer.vocab;
    let documents = stream.record().documents;
    Ok(match peer {
        Peer::Megatron => Box::new(megatron::Files::create(stem, vocab, documents)?),
        Peer::Datatrove => {
            let name = store.manifest().tokenizer.sha256.to_string();
            let path = stem.join("00000_unshuffled.ds");
            Box::new(datatrove::Files::create(&path, vocab, &name)?)
        }
        Peer::Olmo => Box::new(olmo::Files::create(stem, vocab)?),
        Peer::Mds => Box::new(mds::Files::create(stem, vocab)?),
    })
}

/// Passes every document of a stream to `writer`, reading tokens in long runs.
fn walk(
    stream: &StreamReader,
    mut writer: Box<dyn Writer>,
    progress: &mut Progress,
) -> Result<Vec<FileRecord>> {
    let mut window = Window { stream, next: 0, range: 0..0, tokens: Vec::new() };
    for shard in &stream.record().shards {
        let end = shard.first_document + shard.documents;
        let mut at = shard.first_document;
        while at < end {
            // By row groups, so that none is opened twice.
            let next = end.min(at + ROW_GROUP_DOCUMENTS as u64);
            for record in stream.documents(std::slice::from_ref(&(at..next)))? {
                document(stream, &mut window, &record, &mut *writer)?;
                progress.document(0, record.tokens);
                progress.within(record.first_token + record.tokens);
                progress.tick();
            }
            at = next;
        }
    }
    progress.file(stream.record().tokens);
    writer.finish()
}

fn document(
    stream: &StreamReader,
    window: &mut Window<'_>,
    record: &DocumentRecord,
    writer: &mut dyn Writer,
) -> Result<()> {
    let inputs = &stream.source().inputs;
    let src = inputs.get(record.file as usize).map_or("", |input| input.path.as_str());
    if record.first_token != window.next || record.tokens > stream.record().tokens - window.next {
        return Err(Fault::data("a document's provenance contradicts its place")
            .at(format!("document {:?} of {}", record.shown_id(), stream.source().name))
            .found(format!("{} tokens from {}", record.tokens, record.first_token))
            .wanted(format!("tokens from {}", window.next))
            .hint(
                "run `zdata verify`; restore the store, or remove its folder and build it again",
            ));
    }
    window.next += record.tokens;
    let tokens = window.get(record.first_token..window.next)?;
    writer.document(tokens, &record.shown_id(), src, record.row)
}

/// Tokens of a stream in memory.
struct Window<'a> {
    stream: &'a StreamReader,
    /// The expected start of the next document.
    next: u64,
    range: Range<u64>,
    tokens: Vec<u32>,
}

impl Window<'_> {
    /// The tokens of `range`, which must begin at or after the end of the previous range.
    fn get(&mut self, range: Range<u64>) -> Result<&[u32]> {
        if range.end > self.range.end || range.start < self.range.start {
            let all = self.stream.record().tokens;
            let end = range.end.max(all.min(range.start + READ_TOKENS));
            self.tokens.clear();
            self.stream.read_tokens(range.start..end, &mut self.tokens)?;
            self.range = range.start..end;
        }
        let first = (range.start - self.range.start) as usize;
        Ok(&self.tokens[first..first + (range.end - range.start) as usize])
    }
}

/// The note of an existing export.
fn note_of(out: &Location) -> Result<Option<Note>> {
    let path = out.join(NOTE);
    match path.read() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(path.fault("read", &error)),
        Ok(bytes) => {
            let refused = || Fault::data("this is not the note of an export").at(path.to_string());
            let note: Note =
                serde_json::from_slice(&bytes).map_err(|error| refused().found(error))?;
            let mut names = note.streams.iter().flat_map(|stream| &stream.files).map(|it| &it.name);
            match names.find(|name| !name.split('/').all(is_file_name)) {
                Some(name) => Err(refused().found(format!("a file called {name:?}"))),
                None => Ok(Some(note)),
            }
        }
    }
}

/// Whether a note matches the request.
fn is_of(note: &Note, request: &Export, store: &Store, chosen: &Chosen) -> bool {
    let same = note.format == request.peer.name() && note.store == store.manifest().digest;
    same && asked(chosen) == held(note)
}

fn asked(chosen: &Chosen) -> Vec<String> {
    chosen.iter().map(|(source, split, _)| format!("{} {}", source.name, split.name())).collect()
}

fn held(note: &Note) -> Vec<String> {
    note.streams.iter().map(|stream| format!("{} {}", stream.source, stream.split)).collect()
}

/// Whether the export at `out` matches the request; its files' sizes are checked.
fn same(
    out: &Location,
    request: &Export,
    store: &Store,
    chosen: &Chosen,
    note: Note,
) -> Result<Exported> {
    if !is_of(&note, request, store, chosen) {
        let told = |format: &str, of: Identity, streams: Vec<String>| {
            format!("{format} of store {}: {}", of.short(), streams.join(", "))
        };
        return Err(Fault::usage("this folder holds another export")
            .at(out.to_string())
            .found(told(&note.format, note.store, held(&note)))
            .wanted(told(request.peer.name(), store.manifest().digest, asked(chosen)))
            .hint("name another --out"));
    }
    for file in note.streams.iter().flat_map(|stream| &stream.files) {
        let path = out.join(&file.name);
        let bytes = path.size().map_err(|error| path.fault("read", &error))?;
        if bytes != file.bytes {
            return Err(Fault::data("a file of this export changed its size")
                .at(path.to_string())
                .found(counted(bytes, "byte"))
                .wanted(counted(file.bytes, "byte"))
                .hint("delete the folder and export again"));
        }
    }
    Ok(Exported::UpToDate(note))
}
