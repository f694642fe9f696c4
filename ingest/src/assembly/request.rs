//! The request of a build, and how it differs from the request of an existing store.
//!
//! Touching, moving or renaming an input makes no difference: content is compared, never paths or dates.

use contract::framed::quoted;
use contract::{Fault, Framed, Identity, Result, counted};
use serde::{Deserialize, Serialize};
use store::{FORMAT, InputRecord, Location, Manifest, SourceRecord, TokenizerRecord};

use crate::corpus::{Corpus, OnError, Source, always_counted};
use crate::recipe;
use crate::tokenize::Engine;

/// What may not change during a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    /// The versions that it began with: others may read, encode or write differently.
    pub(crate) versions: Identity,
    pub(crate) tokenizer: TokenizerRecord,
    /// The library that encodes.
    pub(crate) engine: Engine,
    pub(crate) unit: u64,
    pub(crate) validation: String,
    /// Names and preparations.
    pub(crate) sources: Vec<(String, String)>,
}

/// The preparation of a source as canonical text: part of the store's identity.
pub(crate) fn preparation(corpus: &Corpus, source: &Source) -> String {
    let mut formats: Vec<&str> = Vec::new();
    for file in &source.files {
        let name = file.format.name();
        if !formats.contains(&name) {
            formats.push(name);
        }
    }
    let formats = formats.join("+");
    let id = source.fields.id.as_deref().map_or("none".to_owned(), quoted);
    let text = quoted(&source.fields.text.to_string());
    let (max, steps) = (corpus.max_document_bytes, source.recipe.describe());
    let keep = match source.fields.keep.iter().map(|path| quoted(path)).collect::<Vec<_>>() {
        none if none.is_empty() => String::new(),
        keep => format!(" keep={}", keep.join(",")),
    };
    format!("format={formats} text={text} id={id}{keep} max={max}{steps}")
}

/// SHA-256 over everything a build was asked to do.
pub(crate) fn identity(manifest: &Manifest) -> Identity {
    let TokenizerRecord { sha256, vocab: _, begin, end, encoder: _ } = &manifest.tokenizer;
    let mut framed = Framed::new("zdata request", FORMAT);
    framed.field(sha256).field(begin).field(end);
    framed.field(&manifest.unit).field(&manifest.validation).count(manifest.sources.len());
    for source in &manifest.sources {
        framed.field(&source.name).field(&source.preparation).field(&source.inputs);
    }
    framed.finish()
}

/// The manifest of a build that has not begun.
pub(crate) fn empty_manifest(head: &Head, token_bytes: u32) -> Manifest {
    Manifest {
        format: FORMAT,
        digest: Identity([0; 32]),
        request: Identity([0; 32]),
        tokenizer: head.tokenizer.clone(),
        token_bytes,
        unit: head.unit,
        validation: head.validation.clone(),
        sources: head.sources.iter().map(|(name, text)| SourceRecord::new(name, text)).collect(),
    }
}

/// The fault for a key whose value differs from that of `store`.
fn changed(store: &Location, key: &str, old: impl ToString, new: impl ToString) -> Fault {
    Fault::usage(format!("`{key}` changed since this store was built"))
        .at(store.to_string())
        .found(new.to_string())
        .wanted(old.to_string())
        .hint(
            "name another --out, or undo the change; with --cache-dir FOLDER at every build, unchanged parts are not made \
             again",
        )
}

/// Refuses a store that was encoded by another library than the one that the user named: the tokens should be the same,
/// but a user who names one does not rely on that.
pub(crate) fn compare_encoders(store: &Location, old: &Manifest, new: &Head) -> Result<()> {
    let (old, new) = (&old.tokenizer.encoder, &new.tokenizer.encoder);
    if old == new {
        return Ok(());
    }
    Err(Fault::usage("this store was made by another encoder than --encoder names")
        .at(store.to_string())
        .found(old)
        .wanted(new)
        .hint("name another --out, or leave --encoder out: the digest does not depend on it"))
}

/// Refuses a request whose keys or tokenizer differ.
pub(crate) fn compare_heads(store: &Location, old: &Head, new: &Head) -> Result<()> {
    if old.tokenizer.sha256 != new.tokenizer.sha256 {
        return Err(Fault::mismatch("the tokenizer changed since this store was built")
            .at(store.to_string())
            .found(new.tokenizer.sha256)
            .wanted(old.tokenizer.sha256)
            .hint("name another --out, or restore the old tokenizer.json"));
    }
    let id = |id: Option<u32>| id.map_or("none".to_owned(), |id| format!("token {id}"));
    let pairs = [
        ("begin", id(old.tokenizer.begin), id(new.tokenizer.begin)),
        ("end", id(old.tokenizer.end), id(new.tokenizer.end)),
        ("unit", old.unit.to_string(), new.unit.to_string()),
        ("validation", old.validation.clone(), new.validation.clone()),
    ];
    for (key, old, new) in pairs {
        if old != new {
            return Err(changed(store, key, old, new));
        }
    }
    let names = |head: &Head| {
        head.sources.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
    };
    if names(old) != names(new) {
        return Err(changed(store, "source", names(old), names(new)));
    }
    for ((name, old), (_, new)) in old.sources.iter().zip(&new.sources) {
        if old != new {
            let (old, new) = recipe::first_difference(old, new);
            return Err(changed(store, &format!("source {name}"), old, new));
        }
    }
    Ok(())
}

/// The fault for added or missing inputs: it names one of them.
fn other_files(source: &Source, old: &[InputRecord], refused: impl Fn(String) -> Fault) -> Fault {
    let came = source.files.iter().find(|file| old.iter().all(|input| input.path != file.shown));
    let went = old.iter().find(|input| source.files.iter().all(|file| input.path != file.shown));
    let fault = match (came, went) {
        (Some(file), _) => refused(format!("the input {:?} was added", file.shown)),
        (None, Some(input)) => refused(format!("the input {:?} was taken away", input.path)),
        (None, None) => refused("the number of inputs changed".to_owned()),
    };
    let count = |files: usize| counted(files, "file");
    fault.found(count(source.files.len())).wanted(count(old.len()))
}

/// Refuses inputs whose content differs from what `source` was built from.
pub(crate) fn compare_inputs(store: &Location, source: &Source, old: &[InputRecord]) -> Result<()> {
    let place = || format!("{store}: source {:?}", source.name);
    let refused = |what: String| {
        Fault::mismatch(format!("{what} since this store was built"))
            .at(place())
            .hint("restore the inputs, or name another --out; a store is never altered")
    };
    if source.files.len() != old.len() {
        return Err(other_files(source, old, refused));
    }
    for (file, old) in source.files.iter().zip(old) {
        let (bytes, sha256) = file.content()?;
        if (bytes, sha256) != (old.bytes, old.sha256) {
            return Err(refused(format!("the input {:?} changed", file.shown))
                .found(format!("{bytes} bytes, {sha256}"))
                .wanted(format!("{} bytes, {} ({})", old.bytes, old.sha256, old.path)));
        }
    }
    Ok(())
}

/// Refuses to accept a store with dropped records if the corpus now says that a dropped record stops the build.
pub(crate) fn compare_dropped(
    corpus: &Corpus,
    manifest: &Manifest,
    store: &Location,
) -> Result<()> {
    if corpus.on_error == OnError::Skip {
        return Ok(());
    }
    for source in &manifest.sources {
        if let Some(dropped) =
            source.dropped.iter().find(|dropped| !always_counted(&dropped.reason))
        {
            return Err(Fault::usage("this store was built with on_error = \"skip\"")
                .at(store.to_string())
                .found(format!("{} of {:?}: {}", dropped.documents, source.name, dropped.reason))
                .hint("set on_error = \"skip\", or correct the inputs and name another --out"));
        }
    }
    Ok(())
}

/// Refuses a source of which nothing is left, whatever dropped it: otherwise a wrong `text` or a rule that is too
/// strict would go unnoticed. A source whose files hold no records is accepted.
pub(crate) fn check_kept(sources: &[SourceRecord]) -> Result<()> {
    for source in sources {
        let read: u64 = source.inputs.iter().map(|input| input.documents).sum();
        if read == 0 || source.train.documents + source.validation.documents > 0 {
            continue;
        }
        let reasons = source.dropped.iter();
        let reasons = reasons.map(|dropped| (dropped.documents, dropped.reason.as_str()));
        return Err(nothing_left(&source.name, reasons));
    }
    Ok(())
}

/// The note for a source in which no record has the id field that was named; for a columnar file this is an error.
pub(crate) fn nameless(source: &str, id: &str) -> String {
    format!("note: source {source}: no record has its id `{id}`: they are called FILE#ROW")
}

/// The note for a field that `keep` names and no document has.
pub(crate) fn never_kept(source: &str, column: &str) -> String {
    format!("note: source {source}: no document has the field `{column}` that `keep` names")
}

/// The fault for a source whose records were all dropped, with counts by reason.
pub(crate) fn nothing_left<'a>(
    source: &str,
    dropped: impl Iterator<Item = (u64, &'a str)>,
) -> Fault {
    let dropped: Vec<(u64, &str)> = dropped.collect();
    let read: u64 = dropped.iter().map(|(count, _)| count).sum();
    let reasons: Vec<String> = dropped.iter().map(|(n, reason)| format!("{n} {reason}")).collect();
    // What dropped most is what to change.
    let by_steps = dropped.iter().filter(|(_, reason)| recipe::is_reason(reason));
    let by_steps: u64 = by_steps.map(|(count, _)| count).sum();
    Fault::data(format!("nothing is left of source {source:?}"))
        .found(format!("{}: {}", counted(read, "record"), reasons.join(", ")))
        .wanted("at least one document")
        .hint(match by_steps > read - by_steps {
            true => "loosen the steps of the source, or take it out of the corpus",
            false => {
                "`zdata build CORPUS.toml --check` lists the records; check `text` of the source, \
                     or take it out of the corpus"
            }
        })
}

/// The head that a finished store matches.
pub(crate) fn head_of(manifest: &Manifest, like: &Head) -> Head {
    let pair = |source: &SourceRecord| (source.name.clone(), source.preparation.clone());
    Head {
        versions: like.versions,
        tokenizer: manifest.tokenizer.clone(),
        engine: like.engine,
        unit: manifest.unit,
        validation: manifest.validation.clone(),
        sources: manifest.sources.iter().map(pair).collect(),
    }
}
