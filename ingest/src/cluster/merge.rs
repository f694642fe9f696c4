//! The merge: the parts become folders of the store, by renames or links, and the manifest says what they are. No token
//! is read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use contract::{Fault, Identity, Result, json, note};
use serde::{Deserialize, Serialize};
use storage::staging::Staging;
use store::{FileRecord, Manifest, disk, open, regular};

use super::known::{missing, results_telling};
use super::output;
use super::plan::Plan;
use super::scan;
use super::stage::Stage;
use crate::assembly;
use crate::assembly::part::Stop;
use crate::assembly::request;
use crate::assembly::source::{SourceBuilder, changed};
use crate::cache_dir::{CacheDir, apart_from};
use crate::corpus::{OnError, Source, SourceFile};
use crate::dedup::Scan;
use crate::progress::{Measure, Progress};

/// How the files of parts get into a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Links {
    /// The folders of parts are moved: the cache is removed with the build.
    Move,
    /// Files get a second name, or are copied where the file system has none.
    Link,
}

/// In the build folder of an unfinished store: the parts that were moved into it.
const MOVED: &str = "parts.json";

/// A part that was moved, and its path in the store.
#[derive(Serialize, Deserialize)]
struct Moved(Identity, String);

/// Makes the store from all parts.
pub fn merge(plan: &Plan, store: &Path, quiet: bool) -> Result<Manifest> {
    apart_from(plan.cache.path(), store)?;
    if store.join(open::MANIFEST).exists() {
        let manifest = assembly::built(&plan.corpus, store, None)?;
        // The process that made it may have been killed before it recorded that.
        plan.cache.merged(plan.name)?;
        return Ok(manifest);
    }
    let mut progress = Progress::new("merge", Measure::Count("part"), plan.tasks() as u64, quiet);
    let manifest = assemble(plan, store, &mut progress, Links::Link)?;
    plan.cache.merged(plan.name)?;
    Ok(manifest)
}

/// Makes the store from all parts. It appears atomically.
pub(super) fn assemble(
    plan: &Plan,
    store: &Path,
    progress: &mut Progress,
    links: Links,
) -> Result<Manifest> {
    let scan = scan::decision(plan)?;
    // If a task has two results, one of them is wrong.
    let mut reading = progress.then(Measure::Count("task"), plan.tasks() as u64);
    let results = results_telling(plan, Stage::Encode, || reading.add(1))?;
    drop(reading);
    let (mut sources, mut parts, mut inputs) = (Vec::new(), Vec::new(), Vec::new());
    let mut results = results.into_iter().zip(&plan.text.tasks).peekable();
    for (number, (name, preparation)) in plan.text.head.sources.iter().enumerate() {
        let source = &plan.corpus.sources[number];
        let mut builder =
            SourceBuilder::new(name, preparation, &source.fields.keep, &source.recipe);
        let (mut built, mut stamp) = (Vec::new(), None);
        while let Some((result, part)) = results.next_if(|(_, part)| part.source == number) {
            let files = &source.files[part.files.clone()];
            let (output, digest) = output::read(&plan.cache, result.part)?
                .ok_or_else(|| missing(plan, Stage::Encode, parts.len()))?;
            if digest != result.digest || output.inputs.len() != files.len() {
                return Err(Fault::data("this part is not what its task made")
                    .at(plan.cache.part_record(result.part).display().to_string())
                    .hint("delete this part and run its task again"));
            }
            output::refuse_incomplete(&plan.cache.part_folder(result.part), &output)?;
            if let (OnError::Stop, Some(stop)) = (plan.corpus.on_error, &output.stop) {
                return Err(stopped(stop, files));
            }
            parts.push(PartFiles {
                key: result.part,
                folder: open::part_folder(Path::new(""), name, builder.part()),
                files: output::files(&output).cloned().collect(),
            });
            // All parts of a file read the same version.
            let last = stamp.replace(result.inputs.last().map(|input| input.stamp.clone()));
            if part.first_group() > 0 && stamp != last {
                return Err(changed(&files[0].shown));
            }
            let shown = || files.iter().map(|file| file.shown.clone());
            built.extend(shown().zip(result.inputs.iter().map(|input| input.sha256)));
            builder.push(output, shown(), part.first_group())?;
        }
        inputs.push(built);
        tell_of_fields(source, &builder);
        sources.push(builder.finish());
    }
    if let Some(scan) = &scan {
        scan.close(&plan.corpus, &inputs, &mut sources)?;
    }
    request::check_kept(&sources)?;
    let empty = request::empty_manifest(&plan.text.head, plan.tokenizer.token_bytes());
    let mut staging = Staging::begin(store)?;
    let finish = || {
        place(plan, &mut staging, &parts, links, progress)?;
        if let Some(scan) = &scan {
            lists(plan, scan, staging.path())?;
        }
        let manifest = Manifest { sources, ..empty };
        let manifest = assembly::finish(staging.path(), &plan.tokenizer, manifest)?;
        assembly::place(&mut staging, progress)?;
        Ok(manifest)
    };
    // What was moved is not removed with a store that could not be finished.
    finish().inspect_err(|_| drop(reclaim(&plan.cache, store)))
}

/// The fault of a record that an earlier build skipped, and at which this one stops.
fn stopped(stop: &Stop, files: &[SourceFile]) -> Fault {
    let Stop { file, place, reason } = stop;
    let file = files.get(*file).map(|file| file.path.to_string()).unwrap_or_default();
    Fault::data(format!("a record is not a document: {reason}"))
        .at(format!("{file}{place}"))
        .hint("correct or drop it, or set on_error = \"skip\" to count such records and go on")
}

/// Notes fields that the settings of a source name and no record has: the id, and kept columns.
fn tell_of_fields(source: &Source, builder: &SourceBuilder<'_>) {
    if let (Some(id), true) = (&source.fields.id, builder.is_nameless()) {
        note!("{}", request::nameless(&source.name, id));
    }
    for column in builder.never_kept() {
        note!("{}", request::never_kept(&source.name, column));
    }
}

/// A part, and where it is in the store.
struct PartFiles {
    key: Identity,
    folder: PathBuf,
    files: Vec<FileRecord>,
}

/// Puts the parts into their places.
fn place(
    plan: &Plan,
    staging: &mut Staging,
    parts: &[PartFiles],
    links: Links,
    progress: &mut Progress,
) -> Result<()> {
    let mut uses: BTreeMap<[u8; 32], u64> = BTreeMap::new();
    parts.iter().for_each(|part| *uses.entry(part.key.0).or_default() += 1);
    // A part that is in several places is linked.
    let moves = |part: &PartFiles| links == Links::Move && uses[&part.key.0] == 1;
    let moved: Vec<Moved> = parts
        .iter()
        .filter(|part| moves(part))
        .map(|part| Moved(part.key, part.folder.to_string_lossy().into_owned()))
        .collect();
    if !moved.is_empty() {
        let list = staging.path().join(open::BUILD_FOLDER).join(MOVED);
        disk::write_atomic(&list, &json::bytes(&moved, "the moved parts")?)?;
    }
    let mut progress = progress.then(Measure::Count("part"), parts.len() as u64);
    for part in parts {
        let (from, to) = (plan.cache.part_folder(part.key), staging.path().join(&part.folder));
        if moves(part) {
            staging.take(&from, &part.folder)?;
        } else {
            disk::create_folder(&to)?;
            for file in &part.files {
                copy(&from.join(&file.name), &to.join(&file.name), file)?;
            }
        }
        progress.add(1);
    }
    Ok(())
}

/// Moves the parts back that a build, which was killed while it moved them, left in its unfinished store.
pub(crate) fn reclaim(cache: &CacheDir, store: &Path) -> Result<()> {
    let partial = Staging::place_of(store);
    let Ok(list) = regular::read(&partial.join(open::BUILD_FOLDER).join(MOVED)) else {
        return Ok(());
    };
    // A list that cannot be read is none of a build that had begun to move.
    let moved: Vec<Moved> = serde_json::from_slice(&list).unwrap_or_default();
    let mut reclaimed = false;
    for Moved(key, place) in moved {
        let (from, to) = (partial.join(place), cache.part_folder(key));
        if from.is_dir() && !to.exists() && cache.part_record(key).exists() {
            disk::rename(&from, &to).map_err(|error| Fault::io("move", &from, &error))?;
            reclaimed = true;
        }
    }
    if reclaimed { disk::sync_folder(&cache.parts_folder()) } else { Ok(()) }
}

/// Puts the lists of the scan into the store.
fn lists(plan: &Plan, scan: &Scan, store: &Path) -> Result<()> {
    for (source, files) in plan.corpus.sources.iter().zip(&scan.files) {
        let (from, to) = (plan.decided().join(&source.name), store.join(&source.name));
        for file in files {
            disk::create_folder(&to)?;
            copy(&from.join(&file.name), &to.join(&file.name), file)?;
        }
    }
    Ok(())
}

/// Hard-links a file, or copies and checks it. A pipe in its place is refused, since it would make the store
/// unreadable.
fn copy(old: &Path, new: &Path, record: &FileRecord) -> Result<()> {
    let size = regular::size(old).map_err(|error| Fault::io("read", old, &error))?;
    if size == record.bytes && disk::link(old, new).is_ok() {
        return Ok(());
    }
    let read = |error: &std::io::Error| Fault::io("read", old, error);
    let file = regular::open(old).map_err(|error| read(&error))?;
    let mut out = disk::AtomicFile::create(new)?;
    let mut failed = Ok(());
    let passed = regular::each_piece(file, |piece| {
        if failed.is_ok() {
            failed = out.put(piece);
        }
    });
    passed.map_err(|error| read(&error))?;
    failed?;
    if out.digest() != record.digest {
        return Err(Fault::data("this file of a part or of the scan is damaged")
            .at(old.display().to_string())
            .hint("delete its folder, and run its task or `zdata task decide` again"));
    }
    out.commit().map(drop)
}
