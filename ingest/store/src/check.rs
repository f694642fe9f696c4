//! Checks a manifest before any file is opened by its names and numbers.
//!
//! The digests prove that a manifest was not changed by accident. They do not prove who wrote it: a forger can make
//! them agree. So names must be valid file names, sizes must match the numbers, counts must add up, and all must be
//! small enough that later code may multiply and add without overflow checks.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use contract::Ratio;

use crate::write::block_offset;
use crate::{
    BLOCK_STARTS, BLOCK_TOKENS, FileRecord, Manifest, PreparedRecord, ShardRecord, SourceRecord,
    Split, StreamRecord, names,
};

/// More tokens, documents or bytes than any store holds; sums and products of smaller numbers fit a `u64`.
const MOST: u64 = 1 << 52;

/// The longest name of a file.
const NAME_BYTES: usize = 255;

/// Bytes of one start.
const START_BYTES: u64 = 8;

/// The first impossible thing in a manifest, if any.
pub(crate) fn flaw(manifest: &Manifest) -> Option<String> {
    head_flaw(manifest).or_else(|| sources_flaw(manifest)).or_else(|| total_flaw(manifest))
}

fn sources_flaw(manifest: &Manifest) -> Option<String> {
    let mut known = BTreeSet::from([
        names::MANIFEST,
        names::MANIFEST_SUM,
        names::TOKENIZER,
        names::BUILD_FOLDER,
    ]);
    manifest.sources.iter().find_map(|source| {
        let name = source.name.as_str();
        if !is_file_name(name) {
            return Some(format!("a source is called {name:?}"));
        }
        if !known.insert(name) {
            return Some(format!("two sources or files are called {name:?}"));
        }
        let what = source_flaw(manifest, source)?;
        Some(format!("source {name:?}: {what}"))
    })
}

/// The total of all files and tokens is possible.
fn total_flaw(manifest: &Manifest) -> Option<String> {
    let streams = || manifest.sources.iter().flat_map(|source| [&source.train, &source.validation]);
    let files = manifest.files();
    let bytes = sum(files.iter().filter_map(|file| file.record).map(|record| record.bytes));
    let tokens = sum(streams().map(|stream| stream.tokens));
    let texts = sum(streams().map(|stream| stream.text_bytes));
    (bytes.is_none() || tokens.is_none() || texts.is_none())
        .then(|| "it counts more than can be".to_owned())
}

fn head_flaw(manifest: &Manifest) -> Option<String> {
    let Manifest { tokenizer, token_bytes, unit, validation, .. } = manifest;
    if !matches!(token_bytes, 2 | 4) || !(1..=MOST).contains(unit) {
        return Some(format!("{token_bytes} bytes a token, {unit} tokens in a unit"));
    }
    let most = if *token_bytes == 2 { 1 << 16 } else { 1 << 31 };
    let vocab = tokenizer.vocab;
    if !(1..=most).contains(&vocab) {
        return Some(format!("a vocabulary of {vocab} in {token_bytes} bytes a token"));
    }
    if let Some(id) = [tokenizer.begin, tokenizer.end].into_iter().flatten().find(|id| *id >= vocab)
    {
        return Some(format!("the id {id} of a vocabulary of {vocab} marks documents"));
    }
    match validation.parse::<Ratio>() {
        Ok(share) if share.num() <= share.den() => None,
        _ => Some(format!("{validation:?} is not a share of documents")),
    }
}

fn source_flaw(manifest: &Manifest, source: &SourceRecord) -> Option<String> {
    // None of them is called like the folder of a part.
    let is_of_a_part = |file: &&FileRecord| file.name.parse::<u32>().is_ok();
    if let Some(file) = source.lists().find(is_of_a_part) {
        return Some(format!("a list is called {:?}", file.name));
    }
    let mut names = BTreeSet::new();
    if let Some(what) = source.lists().find_map(|file| file_flaw(&mut names, "", file, 0)) {
        return Some(what);
    }
    let (mut before, mut names) = ((0, 0), BTreeSet::new());
    for (number, part) in source.parts.iter().enumerate() {
        let (first, group) = (part.first_file, part.first_group);
        let segments = source.inputs.get(first as usize).map_or(1, |input| input.segments.max(1));
        let is_input = (first as usize) < source.inputs.len().max(1);
        if !is_input || u64::from(group) >= segments || (first, group) < before {
            return Some(format!("part {number} begins with group {group} of input {first}"));
        }
        before = (first, group);
        let folder = names::part(number as u32);
        let mut list = part.dropped_file.iter();
        if let Some(what) = list.find_map(|file| file_flaw(&mut names, &folder, file, 0)) {
            return Some(format!("part {number}: {what}"));
        }
    }
    for split in Split::ALL {
        let (stream, parts) = (source.stream(split), source.parts.len());
        let width = u64::from(manifest.token_bytes);
        if let Some(what) = stream_flaw(stream, parts, width, &mut names) {
            return Some(format!("{}: {what}", split.name()));
        }
    }
    accounting_flaw(source)
}

/// What was read equals what was kept plus what was dropped, in documents and in bytes of text.
fn accounting_flaw(source: &SourceRecord) -> Option<String> {
    let SourceRecord { inputs, train, validation, prepared, .. } = source;
    let read = sum(inputs.iter().map(|input| input.documents));
    let dropped = source.dropped.iter().map(|dropped| dropped.documents);
    let kept = sum([train.documents, validation.documents].into_iter().chain(dropped));
    let (Some(read), Some(kept)) = (read, kept) else {
        return Some("it counts more documents than can be".to_owned());
    };
    if read != kept {
        return Some(format!("{read} documents were read, {kept} were kept or dropped"));
    }
    let texts = [train.text_bytes, validation.text_bytes];
    let after = sum(texts.into_iter().chain(source.dropped.iter().map(|dropped| dropped.bytes)));
    let sizes = sum(inputs.iter().map(|input| input.bytes));
    // Each takes at least a byte.
    if inputs.iter().any(|input| input.segments > input.bytes.max(1)) {
        return Some("an input has more row groups than bytes".to_owned());
    }
    let (Some(after), Some(_)) = (after, sizes) else {
        return Some("it counts more bytes than can be".to_owned());
    };
    let PreparedRecord { read_bytes, changes, files: _ } = prepared.as_ref()?;
    let added = changes.iter().map(|change| change.added);
    let removed = changes.iter().map(|change| change.removed);
    let before = sum([*read_bytes].into_iter().chain(added));
    let after = sum([after].into_iter().chain(removed));
    (before.is_none() || before != after)
        .then(|| "the bytes of text before and after its steps do not add up".to_owned())
}

/// Shards must tile their stream, in tokens and in documents, part by part, each in files of its own.
fn stream_flaw(
    stream: &StreamRecord,
    parts: usize,
    width: u64,
    names: &mut Names,
) -> Option<String> {
    let (mut tokens, mut documents, mut part) = (0u64, 0u64, 0);
    for (number, shard) in stream.shards.iter().enumerate() {
        if shard.part < part || shard.part as usize >= parts {
            return Some(format!("shard {number} is of part {}", shard.part));
        }
        part = shard.part;
        if (shard.first_token, shard.first_document) != (tokens, documents) {
            return Some(format!("shard {number} does not begin where the one before it ends"));
        }
        if let Some(what) = shard_flaw(shard, width, names) {
            return Some(format!("shard {number}: {what}"));
        }
        (tokens, documents) = (tokens + shard.tokens, documents + shard.documents);
        if tokens > MOST {
            return Some(format!("shard {number} is impossibly large"));
        }
    }
    ((tokens, documents) != (stream.tokens, stream.documents)).then(|| {
        format!(
            "its shards hold {tokens} tokens of {documents} documents, not {} of {}",
            stream.tokens, stream.documents
        )
    })
}

fn shard_flaw(shard: &ShardRecord, width: u64, names: &mut Names) -> Option<String> {
    let ShardRecord { tokens, documents, token_file, sum_file, start_file, document_file, .. } =
        shard;
    if !(1..=MOST).contains(tokens) || !(1..=MOST).contains(documents) {
        return Some(format!("{tokens} tokens of {documents} documents"));
    }
    let sums = tokens.div_ceil(BLOCK_TOKENS) * 8;
    if sum_file.bytes != sums {
        return Some(format!("{} has {} bytes, not {sums}", sum_file.name, sum_file.bytes));
    }
    let files = [
        (token_file, values_end(*tokens, BLOCK_TOKENS, width)),
        (sum_file, sums),
        (start_file, values_end(*documents, BLOCK_STARTS, START_BYTES)),
        (document_file, 0),
    ];
    let folder = names::part(shard.part);
    files.into_iter().find_map(|(file, least)| file_flaw(names, &folder, file, least))
}

/// Where the last of `rows` values ends in an Arrow file of the store.
fn values_end(rows: u64, block_rows: u64, width: u64) -> u64 {
    let last = (rows - 1) / block_rows;
    block_offset(block_rows * width, last) + (rows - last * block_rows) * width
}

/// The names of files so far, with their folders.
type Names = BTreeSet<(String, String)>;

/// A file must have a unique name in its folder, and at least this size.
fn file_flaw(names: &mut Names, folder: &str, file: &FileRecord, least: u64) -> Option<String> {
    let FileRecord { name, bytes, digest: _ } = file;
    if !is_file_name(name) {
        return Some(format!("a file is called {name:?}"));
    }
    if !names.insert((folder.to_owned(), name.clone())) {
        return Some(format!("two files are called {name:?}"));
    }
    (!(least..=MOST).contains(bytes)).then(|| format!("{name} has {bytes} bytes, which cannot be"))
}

/// The sum, if it is possible.
fn sum(numbers: impl IntoIterator<Item = u64>) -> Option<u64> {
    let mut numbers = numbers.into_iter();
    numbers.try_fold(0u64, |sum, number| sum.checked_add(number).filter(|sum| *sum <= MOST))
}

/// Whether a name stays in the folder it is joined to and prints as it is. Check it before using names from files that
/// others may have written.
pub fn is_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let one = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    one && name.len() <= NAME_BYTES && !name.contains('/') && !name.chars().any(char::is_control)
}
