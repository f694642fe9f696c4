//! The tasks of a plan: a function of the corpus file, of the names and sizes of its inputs, and of where the groups of
//! large ones are.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use contract::{Fault, Identity, Result, json, note};
use serde::{Deserialize, Serialize};
use store::{Location, disk, open, regular};

use super::stage::Stage;
use crate::assembly;
use crate::assembly::request::Head;
use crate::cache_dir::{CacheDir, Owner, PLAN as FILE, PlanName};
use crate::corpus::{Corpus, Inventory, PartInputs, SourceFile};
use crate::cuts;
use crate::dropped::check_cut;
use crate::tokenize::{Engine, Tokenizer};
use crate::versions;

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
    /// The inputs of each task.
    pub(super) tasks: Vec<PartInputs>,
}

/// Plans the build of `corpus` in the folder `work`, or opens the existing plan. All parts stay, and so do other plans
/// that are still needed.
pub(super) fn put(corpus: &Corpus, work: &Path, engine: Engine, owner: Owner) -> Result<Plan> {
    let tokenizer = assembly::tokenizer(corpus, engine)?;
    let (tasks, part_bytes) = cuts::parts(corpus)?;
    if part_bytes > corpus.part_bytes {
        note!(
            "note: part_bytes = {} would make more than {} parts: it is taken as {part_bytes}",
            corpus.part_bytes,
            cuts::PARTS_MAX
        );
    }
    let text = Text {
        corpus: everywhere(&corpus.file)?,
        said: corpus.text.clone(),
        found: Inventory::of(corpus)?,
        head: assembly::head(corpus, &tokenizer, engine)?,
        tasks,
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
    disk::write_atomic(&folder.join(FILE), &bytes)?;
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
        let source = self.text.tasks.get(task).map(|part| &self.corpus.sources[part.source]);
        source.is_some_and(|source| source.recipe.scanned() > 0)
    }

    /// The folder of this plan's own files.
    pub(super) fn folder(&self) -> PathBuf {
        self.cache.plan(self.name)
    }

    /// The path of a task's list of removed documents, once decided.
    pub(super) fn list(&self, task: usize) -> PathBuf {
        self.decided().join(format!("removed-{task:06}.jsonl.zst"))
    }

    /// The folder of the scan's decision.
    pub(super) fn decided(&self) -> PathBuf {
        self.folder().join("decided")
    }

    /// The corpus as a task sees it: one source, some of its inputs.
    pub(super) fn cut(&self, task: usize) -> Result<Corpus> {
        let Some(inputs) = self.text.tasks.get(task) else {
            return Err(Fault::usage("the plan has no such task")
                .at(self.folder().display().to_string())
                .found(task)
                .wanted(format!("below {}", self.tasks())));
        };
        Ok(self.corpus.cut(inputs))
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
        check_cut(&list, &bytes)?;
        Ok(Some(Identity::of_bytes(&bytes)))
    }

    /// The folder of a task's part in the store.
    pub(super) fn place_of(&self, task: usize) -> PathBuf {
        let source = self.text.tasks[task].source;
        let before = self.text.tasks[..task].iter().filter(|part| part.source == source);
        let name = &self.corpus.sources[source].name;
        open::part_folder(Path::new(""), name, before.count() as u32)
    }

    /// The size of a task's inputs.
    pub(super) fn bytes_of(&self, task: usize) -> Result<u64> {
        self.cut(task)?.sources[0].files.iter().map(SourceFile::size).sum()
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
