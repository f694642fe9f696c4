//! The tasks of a plan: a function of the corpus file, and of the names and sizes of its inputs.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, json};
use serde::{Deserialize, Serialize};
use store::{Location, disk, regular};

use super::stage::Stage;
use crate::assembly;
use crate::assembly::request::Head;
use crate::cache_dir::{CacheDir, Owner, PLAN as FILE, PlanName};
use crate::corpus::{Corpus, Inventory, Source, SourceFile};
use crate::dropped::REMOVED;
use crate::tokenize::{Engine, Tokenizer};
use crate::versions;

/// The default limit on a task's input bytes; a larger file is a task of its own.
pub const TASK_BYTES: u64 = 1 << 28;

/// The limit on tasks per plan, where the sources allow it: schedulers limit the size of a job array.
const TASKS_MAX: usize = 1000;

/// A plan, with its corpus.
pub struct Plan {
    /// The folder that holds this plan and the parts of all plans.
    pub cache: CacheDir,
    /// Which plan this is.
    pub name: PlanName,
    pub(super) text: Text,
    pub(super) corpus: Corpus,
    pub(crate) tokenizer: Tokenizer,
    /// While this is open, the plan is not removed.
    _at_work: Option<File>,
}

/// `plan.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Text {
    /// The corpus file.
    pub(super) corpus: String,
    /// Its text.
    pub(super) said: String,
    /// The inputs that were found: tasks do not search again.
    pub(super) found: Inventory,
    /// What may not change between tasks.
    pub(super) head: Head,
    /// For each task, its source and files.
    pub(super) tasks: Vec<(usize, Range<usize>)>,
}

/// Plans the build of `corpus` in the folder `work`, or opens the existing plan. All parts stay, and so do other plans
/// that are still needed.
pub(super) fn put(
    corpus: &Corpus,
    work: &Path,
    task_bytes: u64,
    engine: Engine,
    owner: Owner,
) -> Result<Plan> {
    let tokenizer = assembly::tokenizer(corpus, engine)?;
    let text = Text {
        corpus: everywhere(&corpus.file)?,
        said: corpus.text.clone(),
        found: Inventory::of(corpus)?,
        head: assembly::head(corpus, &tokenizer, engine)?,
        tasks: tasks(corpus, task_bytes)?,
    };
    let bytes = json::pretty(&text, "a plan")?;
    let (cache, name) = (CacheDir::make(work)?, PlanName::of(owner, &bytes));
    let folder = cache.plan(name);
    if !folder.join(FILE).exists() {
        // A plan that was only partly removed.
        disk::remove(&folder)?;
    }
    for folder in [&folder, &cache.parts_folder()] {
        disk::create_folder(folder)?;
    }
    let _at_work = cache.at_work(name);
    cache.not_merged(name)?;
    disk::write_whole(&folder.join(FILE), &bytes)?;
    cache.remove_plans(Some(name))?;
    Ok(Plan { cache, name, text, corpus: corpus.clone(), tokenizer, _at_work })
}

/// The path of the corpus file that is valid on every machine.
fn everywhere(file: &Location) -> Result<String> {
    let Location::Local(path) = file else { return Ok(file.to_string()) };
    let real = fs::canonicalize(path).map_err(|error| Fault::io("find", path, &error))?;
    let name = real.into_os_string().into_string();
    name.map_err(|_| Fault::usage("the path of this corpus file is not UTF-8").at(file.to_string()))
}

/// Cuts every source into ranges of files.
fn tasks(corpus: &Corpus, task_bytes: u64) -> Result<Vec<(usize, Range<usize>)>> {
    let mut sizes: Vec<Vec<u64>> = Vec::new();
    for source in &corpus.sources {
        sizes.push(source.files.iter().map(SourceFile::size).collect::<Result<_>>()?);
    }
    let mut bytes = task_bytes.max(1);
    loop {
        let mut tasks = Vec::new();
        for (number, (source, sizes)) in corpus.sources.iter().zip(&sizes).enumerate() {
            tasks.extend(cut(&source.files, sizes, bytes).into_iter().map(|range| (number, range)));
        }
        if tasks.len() <= TASKS_MAX.max(corpus.sources.len()) || bytes == u64::MAX {
            return Ok(tasks);
        }
        // By doubling, so that a corpus that grows a little is cut at the same files.
        bytes = bytes.saturating_mul(2);
    }
}

/// Cuts a list of files into ranges of at most `bytes`. Each cut depends only on the files near it, so that editing or
/// adding a file does not move all later ranges: whether a file ends its range is a random number of its name, with a
/// probability that grows with its size.
fn cut(files: &[SourceFile], sizes: &[u64], bytes: u64) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let (mut first, mut sum) = (0, 0u64);
    for (number, (file, size)) in files.iter().zip(sizes).enumerate() {
        if number > first && sum.saturating_add(*size) > bytes {
            ranges.push(first..number);
            (first, sum) = (number, 0);
        }
        sum = sum.saturating_add(*size);
        let drawn = Digest::of_bytes(file.shown.as_bytes()).0 as u64;
        let last = u128::from(drawn) * u128::from(bytes) < u128::from(size.saturating_mul(2)) << 64;
        if last && number + 1 < files.len() {
            ranges.push(first..number + 1);
            (first, sum) = (number + 1, 0);
        }
    }
    ranges.push(first..files.len());
    ranges
}

impl Plan {
    /// Reads the plan of this name in `work`: the corpus as it was planned, even if its file has changed.
    pub fn read(work: &Path, name: PlanName) -> Result<Self> {
        let cache = CacheDir::open(work)?;
        let _at_work = cache.at_work(name);
        let path = cache.plan(name).join(FILE);
        let bytes = match regular::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(none(&cache, name));
            }
            bytes => bytes.map_err(|error| Fault::io("read", &path, &error))?,
        };
        let place = path.display().to_string();
        let text: Text = serde_json::from_slice(&bytes).map_err(|error| {
            Fault::data("this is not the plan of a build, or another version of zdata made it")
                .at(place.clone())
                .found(error)
                .hint("plan again")
        })?;
        if text.head.versions != versions::identity() {
            return Err(Fault::usage("another version of zdata made this plan")
                .at(place)
                .hint("plan again, or run its tasks by that version"));
        }
        if !name.is_of(&bytes) {
            return Err(Fault::data("this is another plan than its folder says, or it is damaged")
                .at(place)
                .wanted(name)
                .hint("delete this folder and plan again"));
        }
        let corpus = Corpus::found(storage::locate(&text.corpus)?, &text.said, text.found.clone())?;
        let tokenizer = assembly::tokenizer(&corpus, text.head.engine)?;
        if assembly::head(&corpus, &tokenizer, text.head.engine)? != text.head {
            return Err(Fault::mismatch("the tokenizer changed since this build was planned")
                .at(place)
                .found(tokenizer.identity())
                .wanted(text.head.tokenizer.sha256)
                .hint("restore it, or plan again: what did not change is not done again"));
        }
        Ok(Plan { cache, name, text, corpus, tokenizer, _at_work })
    }

    /// How many tasks there are.
    pub fn tasks(&self) -> usize {
        self.text.tasks.len()
    }

    /// The tasks of a stage: the scan skips sources without steps that compare documents.
    pub fn tasks_of(&self, stage: Stage) -> Vec<usize> {
        let scanned = |task: &usize| stage == Stage::Encode || self.is_scanned(*task);
        (0..self.tasks()).filter(scanned).collect()
    }

    pub(super) fn is_scanned(&self, task: usize) -> bool {
        let source = self.text.tasks.get(task).map(|(source, _)| &self.corpus.sources[*source]);
        source.is_some_and(|source| source.recipe.scanned() > 0)
    }

    /// The folder of this plan's own files.
    pub(super) fn folder(&self) -> PathBuf {
        self.cache.plan(self.name)
    }

    /// The path of the part with this key.
    pub(super) fn part(&self, key: Identity) -> PathBuf {
        self.cache.part(key)
    }

    /// The path of a task's list of removed documents, once decided.
    pub(super) fn list(&self, task: usize) -> PathBuf {
        self.decided().join(format!("removed-{task:06}.jsonl.zst"))
    }

    /// The path of the scan's list for a source, if the source is scanned.
    pub(super) fn removed_of(&self, source: &Source) -> Option<PathBuf> {
        let scanned = source.recipe.scanned() > 0;
        scanned.then(|| self.decided().join(&source.name).join(REMOVED))
    }

    /// The folder of the scan's decision.
    pub(super) fn decided(&self) -> PathBuf {
        self.folder().join("decided")
    }

    /// The corpus as a task sees it: one source, some of its files.
    pub(super) fn cut(&self, task: usize) -> Result<Corpus> {
        let Some((source, files)) = self.text.tasks.get(task) else {
            return Err(Fault::usage("the plan has no such task")
                .at(self.folder().display().to_string())
                .found(task)
                .wanted(format!("below {}", self.tasks())));
        };
        let Source { name, files: all, fields, recipe } = &self.corpus.sources[*source];
        let source = Source {
            name: name.clone(),
            files: all[files.clone()].to_vec(),
            fields: fields.clone(),
            recipe: recipe.clone(),
        };
        Ok(self.corpus.of(source))
    }

    /// The identity of what the scan removed from a task's files, if the stage depends on it.
    pub(super) fn removed(&self, stage: Stage, task: usize) -> Result<Option<Identity>> {
        if stage == Stage::Scan || !self.is_scanned(task) {
            return Ok(None);
        }
        let list = self.list(task);
        let bytes = regular::read(&list).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Fault::data("the scan is not decided")
                .at(list.display().to_string())
                .hint("`zdata task scan` for each task first, then `zdata task decide`"),
            _ => Fault::io("read", &list, &error),
        })?;
        Ok(Some(Identity::of_bytes(&bytes)))
    }

    /// The size of a task's files.
    pub(super) fn bytes_of(&self, task: usize) -> Result<u64> {
        let (source, range) = &self.text.tasks[task];
        let files = self.corpus.sources[*source].files[range.clone()].iter();
        files.map(SourceFile::size).sum()
    }

    /// The size of the files of all tasks of a stage.
    pub(super) fn bytes(&self, stage: Stage) -> Result<u64> {
        self.tasks_of(stage).into_iter().map(|task| self.bytes_of(task)).sum()
    }

    /// Removes everything except the parts, including leftovers of killed tasks.
    pub fn close(&self) -> Result<()> {
        self.cache.remove_plan(self.name)
    }
}

/// The fault for a missing plan.
fn none(cache: &CacheDir, name: PlanName) -> Fault {
    let there = cache.plans().unwrap_or_default();
    let there: Vec<String> = there.iter().map(PlanName::to_string).collect();
    let fault = Fault::data("this folder has no such plan, or its build has ended")
        .at(cache.path().display().to_string())
        .found(name)
        .hint("plan it: zdata task plan CORPUS --cache-dir FOLDER; parts that are there are used again");
    if there.is_empty() { fault } else { fault.wanted(there.join(" or ")) }
}
