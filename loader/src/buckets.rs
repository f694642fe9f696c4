//! The buckets of a source: which documents each has, by a column that the corpus keeps.
//!
//! Each is found once, in one pass over the column, and kept in a file next to the store (`sealed.rs`). The key of the
//! file is a digest of the text, the column and the rule of the bucket.

use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Hasher, Result};
use curriculum::{BucketRule, Buckets, Curriculum};
use store::{Split, StreamReader};

use crate::Stores;
use crate::sealed::Kind;
use crate::selection::{Selection, SelectionWriter};

/// The version of the rules and of the file format.
const VERSION: u64 = 2;

/// Replaces each source that the curriculum cuts by its buckets.
pub(crate) fn cut(curriculum: &Curriculum, stores: &mut Stores) -> Result<()> {
    for (source, buckets) in curriculum.bucketed() {
        if stores.number(source).is_none() {
            continue; // Planning refuses it.
        }
        let root = Kind::Bucket.folders(stores.root_of(source)?);
        let mut selections = Vec::with_capacity(2);
        for split in Split::ALL {
            let reader = stores.stream(source, split)?.reader();
            let place = || curriculum.place(&format!("source.{source}.buckets.column"));
            let found = selected(reader, split, buckets, &root);
            selections.push(found.map_err(|fault| fault.or_at(place))?);
        }
        stores.cut(source, buckets, selections)?;
    }
    Ok(())
}

/// The documents of each bucket of a stream: read from the files, or found and written.
fn selected(
    stream: &StreamReader,
    split: Split,
    buckets: &Buckets,
    folders: &[PathBuf],
) -> Result<Vec<Selection>> {
    let column = &buckets.column;
    if !stream.source().keep.contains(column) {
        let keep = &stream.source().keep;
        let found =
            if keep.is_empty() { "it keeps none".to_owned() } else { format!("it keeps {keep:?}") };
        let what = format!("source {:?} does not keep the column {column:?}", stream.source().name);
        return Err(Fault::usage(what).found(found).hint(format!(
            "build the store with keep = [{column:?}] under [[source]] of its corpus, or name another column"
        )));
    }
    let keys: Vec<Digest> =
        (0..buckets.count()).map(|at| key(stream, split, buckets, at)).collect();
    let find = |key: &Digest| Kind::Bucket.find(folders, &Kind::Bucket.file(*key));
    let mut paths: Vec<Option<PathBuf>> = keys.iter().map(find).collect();
    if paths.iter().any(Option::is_none) {
        let missing: Vec<bool> = paths.iter().map(Option::is_none).collect();
        let begin = |folder: &Path| begin(&keys, &missing, folder);
        let written = write(stream, buckets, Kind::Bucket.first_writable(folders, begin)?)?;
        paths = paths.into_iter().zip(written).map(|(found, made)| found.or(made)).collect();
    }
    let lost = || Fault::bug("a bucket was neither found nor written");
    let open =
        |(path, key): (Option<PathBuf>, &Digest)| Selection::open(&path.ok_or_else(lost)?, *key);
    paths.into_iter().zip(&keys).map(open).collect()
}

/// The digest of what the documents of bucket number `at` depend on.
fn key(stream: &StreamReader, split: Split, buckets: &Buckets, at: usize) -> Digest {
    let mut hasher = Hasher::new();
    hasher.tag("bucket").u64(VERSION).digest(stream.record().digest).str(split.name());
    hasher.str(&buckets.column);
    let named = buckets.names.len();
    match &buckets.rule {
        _ if at + 1 == buckets.count() && buckets.none.is_some() => {
            hasher.tag("none");
        }
        BucketRule::Edges(edges) => {
            // Zero has two representations. Edges are finite: infinities stand for their absence.
            let bits = |edge: f64| (edge + 0.0).to_bits();
            let start = at.checked_sub(1).map_or(f64::NEG_INFINITY, |below| edges[below]);
            let end = edges.get(at).copied().unwrap_or(f64::INFINITY);
            hasher.tag("range").u64(bits(start)).u64(bits(end));
        }
        BucketRule::Values(values, _) if at < named => {
            hasher.tag("value").str(&values[at]);
        }
        BucketRule::Values(values, _) => {
            hasher.tag("other").u64(values.len() as u64);
            values.iter().for_each(|value| {
                hasher.str(value);
            });
        }
    }
    hasher.finish()
}

/// Begins the files of the missing buckets in `folder`.
fn begin(keys: &[Digest], missing: &[bool], folder: &Path) -> Result<Vec<Option<SelectionWriter>>> {
    let create = |(key, missing): (&Digest, &bool)| {
        missing.then(|| SelectionWriter::create(folder, *key)).transpose()
    };
    keys.iter().zip(missing).map(create).collect()
}

/// Finds the documents of these buckets in one pass over the column, and writes their files.
fn write(
    stream: &StreamReader,
    buckets: &Buckets,
    mut writers: Vec<Option<SelectionWriter>>,
) -> Result<Vec<Option<PathBuf>>> {
    let (mut document, mut start) = (0, 0);
    stream.kept_values(&buckets.column, |tokens, value| {
        let at = buckets.of(value).map_err(|what| unfit(stream, document, buckets, value, what))?;
        if let Some(Some(writer)) = at.map(|at| &mut writers[at]) {
            writer.add(document, start, tokens)?;
        }
        (document, start) = (document + 1, start + tokens);
        Ok(())
    })?;
    writers.into_iter().map(|writer| writer.map(SelectionWriter::commit).transpose()).collect()
}

/// The error for a value that the rule cannot place.
fn unfit(
    stream: &StreamReader,
    document: u64,
    buckets: &Buckets,
    value: Option<&str>,
    what: &str,
) -> Fault {
    let id = stream.document(document).map(|record| record.shown_id().into_owned());
    let id = id.unwrap_or_else(|_| document.to_string());
    let column = &buckets.column;
    Fault::usage(format!("{column:?} of document {id:?} is {what}"))
        .found(format!("{:?}", value.unwrap_or_default()))
        .wanted("numbers, since `edges` cut it into buckets")
        .hint("name its values under `values`, or keep another column")
}
