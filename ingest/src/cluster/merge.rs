//! The merge: all parts, in the order of the plan, through the committer of a local build.

use std::path::Path;

use contract::{Fault, Result};
use storage::staging::Staging;
use store::{InputRecord, Manifest, disk, open};

use super::part::{Entry, PartReader};
use super::plan::{Plan, Stage};
use super::result::{self, TaskResult};
use super::scan;
use crate::build;
use crate::build::commit::Committer;
use crate::build::journal::Journal;
use crate::build::pipeline::{Auditor, Item, Step};
use crate::build::request;
use crate::dedup::Scan;
use crate::progress::{Measure, Progress};
use crate::takeover;
use crate::tokenize::Engine;
use crate::tokenize::audit::Wanted;

/// Makes the store of all parts.
pub fn merge(plan: &Plan, store: &Path, quiet: bool) -> Result<Manifest> {
    if store.join(open::MANIFEST).exists() {
        return build::built(&plan.corpus, store, Engine::Fastest);
    }
    let results = results(plan, Stage::Encode)?;
    let scan = scan::decision(plan)?;
    let staging = Staging::begin(store)?;
    let head = &plan.text.head;
    let empty = request::empty_manifest(head, plan.tokenizer.token_bytes());
    let journal = Journal::begin(staging.path(), head)?;
    let wanted = Wanted::default();
    let inputs = results.iter().flat_map(|result| &result.inputs);
    let bytes = inputs.map(|input| input.bytes).sum();
    let mut progress = Progress::new("merge", Measure::Bytes, bytes, quiet);
    let begun = (journal, Vec::new());
    let mut committer =
        Committer::new(&plan.corpus, staging.path(), &empty, begun, &wanted, &mut progress)?;
    for (task, result) in results.iter().enumerate() {
        commit(plan, task, result, &mut committer)?;
    }
    let mut sources = std::mem::take(&mut committer.sources);
    drop(committer);
    if let Some(scan) = scan {
        lists(plan, &scan, staging.path())?;
        scan.close(&plan.corpus, &mut sources)?;
    }
    let manifest = build::finish(staging.path(), &plan.tokenizer, Manifest { sources, ..empty })?;
    staging.commit()?;
    Ok(manifest)
}

/// What all tasks of a stage did; refuses if one did nothing, or two things.
pub(super) fn results(plan: &Plan, stage: Stage) -> Result<Vec<TaskResult>> {
    let tasks = plan.tasks_of(stage);
    let mut results = Vec::new();
    for task in tasks {
        let result = plan.result(stage, task)?.ok_or_else(|| {
            Fault::data(format!("the part of {} task {task} is missing", stage.name()))
                .at(plan.folder().display().to_string())
                .hint("run the tasks that are missing, then this again")
        })?;
        results.push(result);
    }
    let mut conflicts = result::conflicts(&plan.folder())?;
    conflicts.extend(result::conflicts(&plan.parts())?.into_iter().filter(|path| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let ours = |name: String| results.iter().any(|r| name.starts_with(&r.part.to_string()));
        name.is_some_and(ours)
    }));
    match conflicts.first() {
        None => Ok(results),
        Some(path) => Err(Fault::mismatch("a task gave two results")
            .at(path.display().to_string())
            .hint("find out which is wrong, delete it, and merge again")),
    }
}

/// Tells the committer what one part holds.
fn commit(
    plan: &Plan,
    task: usize,
    result: &TaskResult,
    committer: &mut Committer<'_>,
) -> Result<()> {
    let (source, range) = &plan.text.tasks[task];
    let places = plan.corpus.sources[*source].recipe.encoding_places();
    let mut files = plan.corpus.sources[*source].files[range.clone()].iter();
    let mut part = PartReader::open(&plan.part(result.part), result.part)?;
    let auditor = Auditor::default();
    let mut tell = |step| committer.step(step, &auditor, &mut || Ok(()));
    while let Some(entry) = part.next()? {
        let foreign = || part.damaged("it holds what its task cannot give");
        tell(match entry {
            Entry::Item(Item::Dropped { reason, bytes, content, fault }) => {
                let file = files.as_slice().first().ok_or_else(foreign)?;
                let place = format!("{}{}", file.path, fault.place().unwrap_or_default());
                let dropped = Item::Dropped { reason, bytes, content, fault: fault.at(place) };
                Step::Slab { items: vec![dropped], raw_bytes: 0 }
            }
            Entry::Item(mut item) => {
                if let Item::Document(document) = &mut item {
                    for (place, _, _) in document.trace.iter_mut().flat_map(|t| &mut t.changes) {
                        *place = *places.get(*place).ok_or_else(foreign)?;
                    }
                }
                Step::Slab { items: vec![item], raw_bytes: 0 }
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
    if plan.text.tasks.get(task + 1).is_none_or(|(next, _)| next != source) {
        tell(Step::SourceEnd)?;
    }
    Ok(())
}

/// Puts the scan's lists into the store.
fn lists(plan: &Plan, scan: &Scan, store: &Path) -> Result<()> {
    for (source, files) in plan.corpus.sources.iter().zip(&scan.files) {
        let (from, to) = (plan.decided().join(&source.name), store.join(&source.name));
        for file in files {
            disk::create_folder(&to)?;
            takeover::link(&from.join(&file.name), &to.join(&file.name), file)?;
        }
    }
    Ok(())
}
