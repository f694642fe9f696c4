//! The merge: passes all parts, in plan order, to the committer of a local build.

use std::path::Path;

use contract::{Digest, Fault, Result};
use storage::staging::Staging;
use store::{FileRecord, InputRecord, Manifest, disk, open, regular};

use super::known::{missing, results, results_telling};
use super::part::{Entry, PartReader};
use super::plan::Plan;
use super::scan;
use super::stage::Stage;
use crate::assembly;
use crate::assembly::commit::Committer;
use crate::assembly::pipeline::{Item, Step};
use crate::assembly::request;
use crate::cache_dir::apart_from;
use crate::dedup::Scan;
use crate::dropped::REMOVED;
use crate::progress::{Measure, Progress};

/// Makes the store from all parts.
pub fn merge(plan: &Plan, store: &Path, quiet: bool) -> Result<Manifest> {
    apart_from(plan.cache.path(), store)?;
    if store.join(open::MANIFEST).exists() {
        let manifest = assembly::built(&plan.corpus, store, None)?;
        // The process that made it may have been killed before it recorded that.
        plan.cache.merged(plan.name)?;
        return Ok(manifest);
    }
    results(plan, Stage::Encode)?;
    let mut progress = Progress::new("merge", Measure::Bytes, plan.bytes(Stage::Encode)?, quiet);
    let tell = |task, committer: &mut Committer<'_>| tell_part(plan, task, committer);
    let manifest = assemble(plan, store, &mut progress, tell)?;
    plan.cache.merged(plan.name)?;
    Ok(manifest)
}

/// Makes the store from what `tell` passes on for each task, in order. It appears atomically.
pub(super) fn assemble(
    plan: &Plan,
    store: &Path,
    progress: &mut Progress,
    mut tell: impl FnMut(usize, &mut Committer<'_>) -> Result<()>,
) -> Result<Manifest> {
    let scan = scan::decision(plan)?;
    let staging = Staging::begin(store)?;
    let empty = request::empty_manifest(&plan.text.head, plan.tokenizer.token_bytes());
    let scanned = plan.corpus.sources.iter();
    let scanned = scanned.map(|source| plan.removed_of(source)).collect();
    let mut committer = Committer::new(&plan.corpus, staging.path(), &empty, scanned, progress)?;
    for (task, (source, _)) in plan.text.tasks.iter().enumerate() {
        tell(task, &mut committer)?;
        if plan.text.tasks.get(task + 1).is_none_or(|(next, _)| next != source) {
            committer.step(Step::SourceEnd)?;
        }
    }
    let mut sources = committer.sources;
    // If a task has two results, one of them is wrong.
    let mut reading = progress.then(Measure::Count("task"), plan.tasks() as u64);
    results_telling(plan, Stage::Encode, || reading.add(1))?;
    drop(reading);
    if let Some(scan) = scan {
        lists(plan, &scan, staging.path())?;
        scan.close(&plan.corpus, &mut sources)?;
    }
    request::check_kept(&sources)?;
    let manifest =
        assembly::finish(staging.path(), &plan.tokenizer, Manifest { sources, ..empty })?;
    assembly::place(staging, progress)?;
    Ok(manifest)
}

/// Passes the part of a finished task to the committer.
pub(super) fn tell_part(plan: &Plan, task: usize, committer: &mut Committer<'_>) -> Result<()> {
    let result = plan.result(Stage::Encode, task)?;
    let result = result.ok_or_else(|| missing(plan, Stage::Encode, task))?;
    let (source, range) = &plan.text.tasks[task];
    let places = plan.corpus.sources[*source].recipe.encoding_places();
    let mut files = plan.corpus.sources[*source].files[range.clone()].iter();
    let mut part = PartReader::open(&plan.part(result.part), result.part)?;
    while let Some(entry) = part.next()? {
        let foreign = || part.damaged("it holds what its task cannot give");
        committer.step(match entry {
            Entry::Item(Item::Dropped(mut dropped)) => {
                let file = files.as_slice().first().ok_or_else(foreign)?;
                let place = dropped.fault.place().unwrap_or_default();
                let place = format!("{}{place}", file.path);
                dropped.fault = dropped.fault.at(place);
                Step::Slab { items: vec![Item::Dropped(dropped)], raw_bytes: 0 }
            }
            Entry::Item(Item::Document(mut document)) => {
                for (place, _, _) in document.trace.iter_mut().flat_map(|t| &mut t.changes) {
                    *place = *places.get(*place).ok_or_else(foreign)?;
                }
                Step::Slab { items: vec![Item::Document(document)], raw_bytes: 0 }
            }
            Entry::FileEnd((bytes, sha256)) => {
                let path = files.next().ok_or_else(foreign)?.shown.clone();
                Step::FileEnd(InputRecord { path, bytes, sha256, documents: 0 })
            }
            Entry::Observed(_) => return Err(foreign()),
        })?;
    }
    if part.digest != Some(result.digest) || files.next().is_some() {
        return Err(part.damaged("this part is not what its task made"));
    }
    Ok(())
}

/// Puts into the store the lists of the scan, which the committer does not write.
fn lists(plan: &Plan, scan: &Scan, store: &Path) -> Result<()> {
    for (source, files) in plan.corpus.sources.iter().zip(&scan.files) {
        let (from, to) = (plan.decided().join(&source.name), store.join(&source.name));
        for file in files.iter().filter(|file| file.name != REMOVED) {
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
    let bytes = regular::read(old).map_err(|error| Fault::io("read", old, &error))?;
    if Digest::of_bytes(&bytes) != record.digest {
        return Err(Fault::data("this list is damaged")
            .at(old.display().to_string())
            .hint("delete its folder and run `zdata task decide` again"));
    }
    disk::write_whole(new, &bytes).map(drop)
}
