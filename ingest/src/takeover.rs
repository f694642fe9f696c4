//! `--from STORE`: what did not change since an earlier build is taken over, not built again.
//!
//! A source's streams are a function of the content of its inputs, of its preparation (and so of the lists that a scan
//! left), of the tokenizer with the tokens put around documents, of the validation share, of the cut into shards and of
//! the format. Where all of these are equal, its files are checked and linked (or copied, on another file system); the
//! store that results is the one a build from nothing would have made.

use std::path::Path;

use contract::{Digest, Fault, Result};
use store::documents::Starts;
use store::{
    FORMAT, FileRecord, InputRecord, Location, Manifest, ShardRecord, SourceRecord, Split,
    StreamRecord, disk, open, verify,
};

use crate::build::journal::Head;
use crate::build::request;
use crate::corpus::{Corpus, OnError, Source};

/// A source of an earlier store that is taken over.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    store: Location,
    /// Its record, with the inputs called as they are now.
    pub(crate) record: SourceRecord,
}

/// The corpus, with its unchanged sources marked. `lists` are those that this build's scan left, by source; `begun`
/// says which sources an unfinished build has begun or finished already.
pub(crate) fn plan(
    corpus: &Corpus,
    from: &Location,
    head: &Head,
    lists: &[Vec<FileRecord>],
    begun: impl Fn(usize) -> bool,
) -> Result<(Corpus, Vec<String>)> {
    let manifest = open::manifest(from)?;
    let mut planned = corpus.clone();
    let mut notes = Vec::new();
    for (index, source) in planned.sources.iter_mut().enumerate() {
        if begun(index) {
            continue;
        }
        let none = Vec::new();
        let lists = lists.get(index).unwrap_or(&none);
        let name = &source.name;
        match changed((corpus, head), source, &manifest, lists, from)? {
            Err(what) => notes.push(format!("{name} is built again: {what}")),
            Ok(record) => {
                check(from, &manifest, &record)?;
                notes.push(format!("{name} is taken over from {}", from));
                source.taken = Some(Box::new(Taken { store: from.clone(), record }));
            }
        }
    }
    Ok((planned, notes))
}

/// The record to take over, or what changed.
fn changed(
    (corpus, head): (&Corpus, &Head),
    source: &Source,
    old: &Manifest,
    lists: &[FileRecord],
    from: &Location,
) -> Result<std::result::Result<SourceRecord, &'static str>> {
    let Some(record) = old.source(&source.name) else { return Ok(Err("it is new")) };
    let (a, b) = (&old.tokenizer, &head.tokenizer);
    let what = if old.format != FORMAT {
        "the format changed"
    } else if (a.sha256, a.begin, a.end) != (b.sha256, b.begin, b.end) {
        "the tokenizer changed"
    } else if old.validation != head.validation {
        "`validation` changed"
    } else if record.preparation != request::preparation(corpus, source) {
        "its preparation changed"
    } else if record.lists() != lists {
        "other documents of it are removed"
    } else if !same_cut(record, from, corpus.shard_tokens)? {
        "`shard_tokens` changed"
    } else if corpus.on_error == OnError::Stop
        && record.dropped.iter().any(|dropped| !request::always_counted(&dropped.reason))
    {
        "it has records that are no documents"
    } else {
        return same_inputs(source, record);
    };
    Ok(Err(what))
}

/// The record with the inputs as they are called now, if their content is the same.
fn same_inputs(
    source: &Source,
    record: &SourceRecord,
) -> Result<std::result::Result<SourceRecord, &'static str>> {
    if source.files.len() != record.inputs.len() {
        return Ok(Err("the number of its inputs changed"));
    }
    let mut record = record.clone();
    for (file, input) in source.files.iter().zip(&mut record.inputs) {
        if file.size()? != input.bytes || file.content()? != (input.bytes, input.sha256) {
            return Ok(Err("its inputs changed"));
        }
        let InputRecord { path, .. } = input;
        path.clone_from(&file.shown);
    }
    Ok(Ok(record))
}

/// Whether a build with this `shard_tokens` would have cut its train stream where it is cut, and its validation stream
/// never by itself: only then are the bytes those of a build from nothing.
fn same_cut(record: &SourceRecord, from: &Location, shard_tokens: u64) -> Result<bool> {
    let full = |shard: &ShardRecord| shard.tokens >= shard_tokens;
    let (train, validation) = (&record.train.shards, &record.validation.shards);
    let before_last = train.split_last().map_or(&[][..], |(_, before)| before);
    if validation.iter().any(full) || !before_last.iter().all(full) {
        return Ok(false);
    }
    for shard in train.iter().filter(|shard| full(shard)) {
        let mut last = shard.first_token;
        let name = &shard.start_file.name;
        let file = open::stream_file(from, &record.name, Split::Train, name);
        for start in Starts::open(&file)? {
            last = start?;
        }
        if last - shard.first_token >= shard_tokens {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Refuses to take over what is damaged.
fn check(from: &Location, manifest: &Manifest, record: &SourceRecord) -> Result<()> {
    for split in Split::ALL {
        let old = manifest.source(&record.name).unwrap_or(record);
        let damages = verify::verify_stream(from, manifest, old, split, &|_| ())?;
        if let Some(damage) = damages.first() {
            return Err(Fault::data("the store to take over from is damaged")
                .at(from.join(&damage.file).to_string())
                .found(&damage.what)
                .hint("restore that store, or build without --from"));
        }
    }
    Ok(())
}

impl Taken {
    /// Puts the files into `store`.
    pub(crate) fn link(&self, store: &Path) -> Result<()> {
        for split in Split::ALL {
            let stream: &StreamRecord = self.record.stream(split);
            if stream.shards.is_empty() {
                continue;
            }
            let old = self.store.join(&self.record.name).join(split.name());
            let new = open::stream_folder(store, &self.record.name, split);
            disk::create_folder(&new)?;
            for file in stream.files() {
                link(old.join(&file.name), &new.join(&file.name), file)?;
            }
            disk::sync_folder(&new)?;
        }
        Ok(())
    }
}

/// Links a file; copies and checks it where that is not possible.
pub(crate) fn link(old: impl Into<Location>, new: &Path, record: &FileRecord) -> Result<()> {
    let old = old.into();
    disk::remove(new)?;
    if old.local().is_some_and(|old| disk::link(old, new).is_ok()) {
        return Ok(());
    }
    let bytes = old.read().map_err(|error| old.fault("read", &error))?;
    if Digest::of_bytes(&bytes) != record.digest {
        return Err(Fault::data("this file changed while it was taken over")
            .at(old.to_string())
            .hint("restore that store, or build without --from"));
    }
    disk::write_whole(new, &bytes).map(drop)
}

#[cfg(test)]
mod tests;
