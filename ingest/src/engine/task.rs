//! One task, and the merge of all.

use std::fs;
use std::path::{Path, PathBuf};

use contract::store::{Manifest, open, write};
use contract::{Digest, Fault, Result};
use rayon::prelude::*;

use super::part::{Entry, PartReader, PartWriter};
use super::plan::Plan;
use crate::build;
use crate::commit::Committer;
use crate::corpus::{Corpus, OnError};
use crate::exchange::staging::Staging;
use crate::journal::{Journal, Position};
use crate::pipeline::{self, Auditor, Encoding, Item, Step};
use crate::prepare::Prepared;
use crate::progress::Progress;
use crate::request::{self, always_counted};
use crate::tokenize::audit::{self, Audit, Wanted};

/// What became of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// Its part is new.
    New(Digest),
    /// A part with the very same content was there.
    Again(Digest),
}

/// Runs task `task` of a plan.
pub fn run(plan: &Plan, task: usize, workers: usize) -> Result<Ran> {
    let Some((source, files)) = plan.text.tasks.get(task).cloned() else {
        return Err(Fault::usage("there is no such task")
            .at(plan.work.display().to_string())
            .found(task)
            .wanted(format!("below {}", plan.tasks())));
    };
    let (mut corpus, tokenizer) = plan.corpus()?;
    let mut only = corpus.sources.swap_remove(source);
    only.files = only.files[files].to_vec();
    corpus.sources = vec![only];
    let wanted = Wanted::default();
    let tools = build::tools(&corpus, &tokenizer, &plan.text.head)?;
    let prepared = Prepared::new(&corpus, &tools, &plan.work)?;
    let encoding = Encoding {
        tokenizer: &tokenizer,
        begin: plan.text.head.tokenizer.begin,
        end: plan.text.head.tokenizer.end,
        validation: corpus.validation,
        wanted: &wanted,
        prepared: &prepared,
    };
    // Its own name for each process, on each machine: none writes into another's file.
    let scratch = tempfile_in(&plan.work, task)?;
    let mut taking = Taking {
        part: PartWriter::create(&scratch, plan.digest)?,
        corpus: &corpus,
        wanted: &wanted,
        audit: Audit::default(),
        file: 0,
        documents: 0,
    };
    let start = Position::start(0, 0);
    pipeline::run(&corpus, &encoding, workers.max(1), start, |step, auditor| {
        taking.step(step, auditor)
    })?;
    let Taking { part, mut audit, .. } = taking;
    let failure = audit.finish().par_iter().find_map_first(|s| audit::check(&tokenizer, s).err());
    failure.map_or(Ok(()), Err)?;
    let digest = part.finish()?;
    commit(plan, task, &scratch, digest)
}

/// A name that no other process uses.
fn tempfile_in(work: &Path, task: usize) -> Result<PathBuf> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let job = std::env::var("SLURM_JOB_ID").unwrap_or_default();
    let name = format!(".part-{task:06}-{}-{job}-{}", host.trim(), std::process::id());
    let path = work.join(name);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Fault::io("remove", &path, &error))
        }
        _ => Ok(path),
    }
}

/// Gives a part its name, unless there is one: then the two must be the same.
fn commit(plan: &Plan, task: usize, scratch: &Path, digest: Digest) -> Result<Ran> {
    let path = plan.part(task);
    let fault = |error: &std::io::Error| Fault::io("create", &path, error);
    let outcome = match fs::hard_link(scratch, &path) {
        Ok(()) => {
            write::sync_folder(&plan.work)?;
            Ran::New(digest)
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let before = digest_of(plan, &path)?;
            if before != digest {
                return Err(conflict(plan, task, scratch, (before, digest)));
            }
            Ran::Again(digest)
        }
        Err(error) => return Err(fault(&error)),
    };
    fs::remove_file(scratch).map_err(|error| fault(&error))?;
    Ok(outcome)
}

/// Keeps the second result beside the first.
fn conflict(plan: &Plan, task: usize, scratch: &Path, (before, now): (Digest, Digest)) -> Fault {
    let kept = plan.work.join(format!("part-{task:06}-{now}.conflict"));
    if let Err(error) = fs::rename(scratch, &kept) {
        return Fault::io("keep", &kept, &error);
    }
    Fault::mismatch(format!("task {task} gave another result than before"))
        .at(plan.part(task).display().to_string())
        .found(format!("{now}, kept as {}", kept.display()))
        .wanted(before)
        .hint("an input changed, or a machine computes wrongly: find out which, delete the wrong one of the two")
}

/// Reads a part to its end.
fn digest_of(plan: &Plan, path: &Path) -> Result<Digest> {
    let mut part = PartReader::open(path, plan.digest)?;
    while part.next()?.is_some() {}
    part.digest.ok_or_else(|| Fault::bug("a part ended without a digest"))
}

/// What takes the steps of a task.
struct Taking<'a> {
    part: PartWriter,
    corpus: &'a Corpus,
    wanted: &'a Wanted,
    audit: Audit,
    file: usize,
    documents: u64,
}

impl Taking<'_> {
    fn step(&mut self, step: Step, auditor: &Auditor<'_>) -> Result<()> {
        match step {
            Step::Slab { items, .. } => {
                items.into_iter().try_for_each(|item| self.item(item, auditor))
            }
            Step::FileEnd(input) => {
                self.part.file_end(&contract::store::InputRecord {
                    documents: self.documents,
                    ..input
                })?;
                (self.file, self.documents) = (self.file + 1, 0);
                Ok(())
            }
            Step::SourceEnd => Ok(()),
        }
    }

    fn item(&mut self, item: Item, auditor: &Auditor<'_>) -> Result<()> {
        self.documents += 1;
        match item {
            Item::Document(mut document) => {
                let (content, bytes, sample) =
                    (document.content.0, document.text_bytes, document.sample.take());
                if let Some(sample) = self.audit.offer(content, bytes, sample, self.wanted) {
                    auditor.check(sample);
                }
                self.part.document(&document)
            }
            Item::Lost { reason, fault, .. }
                if self.corpus.on_error == OnError::Stop && !always_counted(&reason) =>
            {
                let file = &self.corpus.sources[0].files[self.file];
                Err(fault.or_at(|| file.shown.clone()))
            }
            Item::Lost { reason, bytes, content, .. } => self.part.loss(&reason, bytes, content),
        }
    }
}

/// Makes the store of all parts, in the order of the plan.
pub fn merge(plan: &Plan, store: &Path) -> Result<Manifest> {
    refuse_conflicts(plan)?;
    let (corpus, tokenizer) = plan.corpus()?;
    if store.join(open::MANIFEST).exists() {
        return crate::build::built(&corpus, store, crate::tokenize::Engine::Fastest);
    }
    if let Some(task) = plan.missing().first() {
        return Err(Fault::data(format!("the part of task {task} is missing"))
            .at(plan.part(*task).display().to_string())
            .hint("run the tasks that are missing, then merge"));
    }
    let staging = Staging::begin(store)?;
    let head = &plan.text.head;
    let empty = request::empty_manifest(head, tokenizer.token_bytes());
    let journal = Journal::begin(staging.path(), head)?;
    let (wanted, auditor) = (Wanted::default(), Auditor::idle());
    let mut progress = Progress::new(0, 0, true);
    let begun = (journal, Vec::new());
    let mut committer =
        Committer::new(&corpus, staging.path(), &empty, begun, &wanted, &mut progress)?;
    for (task, (source, _)) in plan.text.tasks.iter().enumerate() {
        let mut part = PartReader::open(&plan.part(task), plan.digest)?;
        while let Some(entry) = part.next()? {
            let step = match entry {
                Entry::Item(item) => Step::Slab { items: vec![item], raw_bytes: 0 },
                Entry::FileEnd(input) => Step::FileEnd(input),
            };
            committer.step(step, &auditor, &mut || Ok(()))?;
        }
        if plan.text.tasks.get(task + 1).is_none_or(|(next, _)| next != source) {
            committer.step(Step::SourceEnd, &auditor, &mut || Ok(()))?;
        }
    }
    let sources = std::mem::take(&mut committer.sources);
    drop(committer);
    let mut manifest = Manifest { sources, ..empty };
    write::write_whole(&staging.path().join(open::TOKENIZER), tokenizer.bytes())?;
    manifest.request = request::identity(&manifest);
    manifest.digest = manifest.identity();
    open::commit(staging.path(), &manifest)?;
    staging.commit()?;
    Ok(manifest)
}

fn refuse_conflicts(plan: &Plan) -> Result<()> {
    let fault = |error: &std::io::Error| Fault::io("list", &plan.work, error);
    for entry in fs::read_dir(&plan.work).map_err(|error| fault(&error))? {
        let path = entry.map_err(|error| fault(&error))?.path();
        if path.extension().is_some_and(|ending| ending == "conflict") {
            return Err(Fault::mismatch("a task gave two results")
                .at(path.display().to_string())
                .hint("find out which is wrong, delete it, and merge again"));
        }
    }
    Ok(())
}
