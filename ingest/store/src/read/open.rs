//! Opening a store: what of its manifest must hold before anything is read.

use std::fs;
use std::path::{Component, Path};

use super::column::{damaged, missing};
use crate::far;
use crate::open::{MANIFEST, TOKENIZER, manifest as store_manifest};
use crate::{Manifest, Split, StreamRecord};
use contract::{Identity, Result};

/// Reads and checks `manifest.json`.
pub(super) fn manifest(root: &Path) -> Result<Manifest> {
    let manifest = store_manifest(root)?;
    match flaw(&manifest) {
        Some(what) => {
            let what = format!("the manifest contradicts itself: {what}");
            Err(damaged(&root.join(MANIFEST), &what))
        }
        None => Ok(manifest),
    }
}

/// What in a manifest cannot be, if anything. The identity covers the content; this covers the cut into shards.
fn flaw(manifest: &Manifest) -> Option<String> {
    if !matches!(manifest.token_bytes, 2 | 4) || manifest.unit == 0 {
        return Some(format!("{} bytes per token, unit {}", manifest.token_bytes, manifest.unit));
    }
    if manifest.tokenizer.vocab > 1 << 31 {
        return Some(format!("a vocabulary of {}", manifest.tokenizer.vocab));
    }
    let mut names: Vec<&str> = manifest.sources.iter().map(|source| source.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Some(format!("two sources are called {:?}", pair[0]));
    }
    if let Some(name) = names.iter().find(|name| !is_plain(name)) {
        return Some(format!("a source called {name:?}"));
    }
    manifest.sources.iter().find_map(|source| {
        if let Some(list) = source.lists().iter().find(|list| !is_plain(&list.name)) {
            return Some(format!("source {:?} has a list called {:?}", source.name, list.name));
        }
        Split::ALL.into_iter().find_map(|split| {
            let what = stream_flaw(source.stream(split))?;
            Some(format!("source {:?}, {}: {what}", source.name, split.name()))
        })
    })
}

/// Shards must tile their stream, in tokens and in documents.
fn stream_flaw(stream: &StreamRecord) -> Option<String> {
    let (mut tokens, mut documents) = (0u64, 0u64);
    for (number, shard) in stream.shards.iter().enumerate() {
        if let Some(file) = shard.files().iter().find(|file| !is_plain(&file.name)) {
            return Some(format!("shard {number} has a file called {:?}", file.name));
        }
        if (shard.first_token, shard.first_document) != (tokens, documents) || shard.tokens == 0 {
            return Some(format!("shard {number} does not begin where the one before it ends"));
        }
        let ends = (tokens.checked_add(shard.tokens), documents.checked_add(shard.documents));
        let (Some(end_token), Some(end_document)) = ends else {
            return Some(format!("shard {number} is impossibly large"));
        };
        (tokens, documents) = (end_token, end_document);
    }
    ((tokens, documents) != (stream.tokens, stream.documents))
        .then(|| format!("its shards hold {tokens} tokens, the stream {}", stream.tokens))
}

/// Whether a name stays in the folder it is joined to.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

/// Reads `tokenizer.json`, which must be the one that made the tokens.
pub(super) fn tokenizer(root: &Path, manifest: &Manifest) -> Result<Vec<u8>> {
    let path = root.join(TOKENIZER);
    let bytes = far::read(&path).map_err(|error| missing(&path, &error))?;
    let found = Identity::of_bytes(&bytes);
    if found == manifest.tokenizer.sha256 {
        return Ok(bytes);
    }
    Err(damaged(&path, "the tokenizer is not the one that made this store's tokens")
        .found(found)
        .wanted(manifest.tokenizer.sha256))
}

/// How many files this process may open; 256 where the system does not say.
pub(super) fn file_limit() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok()).unwrap_or(256)
}
