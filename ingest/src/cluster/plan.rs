//! Which tasks there are: a function of the corpus file, and of the names and sizes of its inputs.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, json};
use serde::{Deserialize, Serialize};
use store::disk::{self, Lock};
use store::{Location, regular};

use super::stage::Stage;
use crate::assembly;
use crate::assembly::request::Head;
use crate::corpus::{Corpus, Inventory, Source, SourceFile};
use crate::dropped::REMOVED;
pub(super) use crate::made::PARTS;
use crate::made::PLAN as FILE;
use crate::progress::{Measure, Progress};
use crate::tokenize::{Engine, Tokenizer};
use crate::versions;

/// Bytes of input that a task gets at most, unless it is told otherwise; a larger file is a task by itself.
pub const TASK_BYTES: u64 = 1 << 28;

/// The most tasks of a plan, where sources allow it: schedulers bound the size of a job array.
const TASKS_MAX: usize = 1000;

/// Before the digest of the plan to which a folder belongs.
const PLAN: &str = "plan-";

/// In the folder of a plan whose store is made.
const MERGED: &str = "merged";

/// A plan, with what it needs of the corpus.
pub struct Plan {
    /// The folder of the plan and all parts.
    pub work: PathBuf,
    /// Which plan this is.
    pub digest: Digest,
    pub(super) text: Text,
    pub(super) corpus: Corpus,
    pub(crate) tokenizer: Tokenizer,
}

/// `plan.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Text {
    /// The corpus file.
    pub(super) corpus: String,
    /// Its text.
    pub(super) said: String,
    /// What was found of what it names: no task looks for it again.
    pub(super) found: Inventory,
    /// What no task may see changed.
    pub(super) head: Head,
    /// For each task its source and files.
    pub(super) tasks: Vec<(usize, Range<usize>)>,
}

/// Plans the build of `corpus` in the folder `work`, or takes it up there. Parts stay, whatever they were made for.
pub(super) fn put(corpus: &Corpus, work: &Path, task_bytes: u64, engine: Engine) -> Result<Plan> {
    let tokenizer = assembly::tokenizer(corpus, engine)?;
    let text = Text {
        corpus: everywhere(&corpus.file)?,
        said: corpus.text.clone(),
        found: Inventory::of(corpus)?,
        head: assembly::head(corpus, &tokenizer)?,
        tasks: tasks(corpus, task_bytes)?,
    };
    let bytes = json::pretty(&text, "a plan")?;
    let digest = Digest::of_bytes(&bytes);
    let plan = Plan { work: work.to_owned(), digest, text, corpus: corpus.clone(), tokenizer };
    for folder in [plan.folder(), plan.parts()] {
        disk::create_folder(&folder)?;
    }
    disk::remove(&plan.folder().join(MERGED))?;
    disk::write_whole(&work.join(FILE), &bytes)?;
    plan.remove_others()?;
    Ok(plan)
}

/// The name of the corpus file that every machine knows it by.
fn everywhere(file: &Location) -> Result<String> {
    let Location::Local(path) = file else { return Ok(file.to_string()) };
    let real = fs::canonicalize(path).map_err(|error| Fault::io("find", path, &error))?;
    let name = real.into_os_string().into_string();
    name.map_err(|_| Fault::usage("the path of this corpus file is not UTF-8").at(file.to_string()))
}

/// Holds a folder of parts against other builds until it is dropped, or the process dies.
pub fn lock(work: &Path) -> Result<Lock> {
    disk::create_folder(work)?;
    disk::lock(work)
}

/// The name of what lies in a folder of parts; none of ours where that is no text.
pub(super) fn name_of(path: &Path) -> &str {
    path.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

/// Whether builds put what is called so into a folder of parts.
fn is_ours(path: &Path) -> bool {
    let name = name_of(path);
    name == PARTS || name.strip_suffix(disk::PART).unwrap_or(name) == FILE || is_plans(name)
}

/// Whether a folder of that name belongs to one plan.
pub(super) fn is_plans(name: &str) -> bool {
    name.strip_prefix(PLAN).is_some_and(|digest| digest.parse::<Digest>().is_ok())
}

/// Whether the folder of a plan says that its store is made.
pub(super) fn is_merged(folder: &Path) -> bool {
    folder.join(MERGED).is_file()
}

/// Refuses a folder that holds what no build has put there.
pub(crate) fn refuse_foreign(work: &Path) -> Result<()> {
    let found = if work.is_dir() { disk::entries(work)? } else { Vec::new() };
    match found.iter().find(|entry| !is_ours(entry)) {
        None => Ok(()),
        Some(entry) => {
            Err(Fault::usage("this folder is in the way: the parts of this build belong there")
                .at(work.display().to_string())
                .found(entry.file_name().unwrap_or_default().to_string_lossy())
                .hint("move it, or name another folder for parts: --work FOLDER"))
        }
    }
}

/// Removes what builds have put into a folder, and the folder if it held nothing else.
pub fn clear(work: &Path, quiet: bool) -> Result<()> {
    let (ours, others): (Vec<_>, Vec<_>) =
        disk::entries(work)?.into_iter().partition(|it| is_ours(it));
    remove_all(&ours, quiet)?;
    if others.is_empty() { disk::remove(work) } else { Ok(()) }
}

/// Removes files and folders of many files: a plan goes before what was made by it, so that nothing goes on by half of that.
fn remove_all(paths: &[PathBuf], quiet: bool) -> Result<()> {
    let is_folder = |path: &&PathBuf| path.is_dir() && !path.is_symlink();
    let (folders, single): (Vec<_>, Vec<_>) = paths.iter().partition(is_folder);
    for path in single {
        disk::remove(path)?;
        disk::sync_folder(disk::folder_of(path))?;
    }
    let mut files = Vec::new();
    for folder in &folders {
        files.extend(disk::entries(folder)?);
    }
    let mut progress = Progress::new("clear", Measure::Count("file"), files.len() as u64, quiet);
    for file in &files {
        disk::remove(file)?;
        progress.add(1);
    }
    folders.into_iter().try_for_each(|path| disk::remove(path))
}

/// The parts in a folder of parts.
pub(super) fn parts(work: &Path) -> Result<Vec<PathBuf>> {
    let parts = work.join(PARTS);
    let mut found = if parts.is_dir() { disk::entries(&parts)? } else { Vec::new() };
    found.retain(|path| path.extension().is_some_and(|ending| ending == "bin"));
    Ok(found)
}

/// Whether a folder of parts holds any.
pub(crate) fn holds_parts(work: &Path) -> Result<bool> {
    parts(work).map(|parts| !parts.is_empty())
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
        // By doubling, so that a corpus that grows a little is cut where it was.
        bytes = bytes.saturating_mul(2);
    }
}

/// Cuts a list of files into ranges of at most `bytes`. Where to cut depends on the files near the place alone, so that an
/// edit of one file, or another file in the list, does not move every range behind it: a file is the last of its range
/// by a draw on its name, with a chance that grows with its size.
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
    /// Reads the plan in `work`: the corpus as it was planned, whatever its file says now.
    pub fn read(work: &Path) -> Result<Self> {
        let path = work.join(FILE);
        let bytes = regular::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound if work.is_dir() => {
                Fault::data("no build is planned in this folder, or it has ended")
                    .at(work.display().to_string())
                    .hint("plan it: zdata task plan CORPUS --work FOLDER; parts that are there are used again")
            }
            _ => Fault::io("read", &path, &error),
        })?;
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
        let corpus = Corpus::found(storage::locate(&text.corpus)?, &text.said, text.found.clone())?;
        let tokenizer = assembly::tokenizer(&corpus, Engine::Fastest)?;
        if assembly::head(&corpus, &tokenizer)? != text.head {
            return Err(Fault::mismatch("the tokenizer changed since this build was planned")
                .at(place)
                .found(tokenizer.identity())
                .wanted(text.head.tokenizer.sha256)
                .hint("restore it, or plan again: what did not change is not done again"));
        }
        let digest = Digest::of_bytes(&bytes);
        Ok(Plan { work: work.to_owned(), digest, text, corpus, tokenizer })
    }

    /// How many tasks there are.
    pub fn tasks(&self) -> usize {
        self.text.tasks.len()
    }

    /// The tasks that a stage has: the scan has none for sources without steps that compare documents.
    pub fn tasks_of(&self, stage: Stage) -> Vec<usize> {
        let scanned = |task: &usize| stage == Stage::Encode || self.is_scanned(*task);
        (0..self.tasks()).filter(scanned).collect()
    }

    pub(super) fn is_scanned(&self, task: usize) -> bool {
        let source = self.text.tasks.get(task).map(|(source, _)| &self.corpus.sources[*source]);
        source.is_some_and(|source| source.recipe.scanned() > 0)
    }

    /// The folder of what belongs to this plan alone.
    pub(super) fn folder(&self) -> PathBuf {
        self.work.join(format!("{PLAN}{}", self.digest))
    }

    /// The folder of the parts of all plans.
    pub(super) fn parts(&self) -> PathBuf {
        self.work.join(PARTS)
    }

    /// Where the part with this key belongs.
    pub(super) fn part(&self, key: Identity) -> PathBuf {
        self.parts().join(format!("{key}.bin"))
    }

    /// Where a task's list of removed documents lies once it is decided.
    pub(super) fn list(&self, task: usize) -> PathBuf {
        self.decided().join(format!("removed-{task:06}.jsonl.zst"))
    }

    /// Where the scan's list of what it removed of a source lies, if it scans it.
    pub(super) fn removed_of(&self, source: &Source) -> Option<PathBuf> {
        let scanned = source.recipe.scanned() > 0;
        scanned.then(|| self.decided().join(&source.name).join(REMOVED))
    }

    /// Where the scan's decision lies.
    pub(super) fn decided(&self) -> PathBuf {
        self.folder().join("decided")
    }

    /// The corpus as a task sees it: one source, some of its files.
    pub(super) fn cut(&self, task: usize) -> Result<Corpus> {
        let Some((source, files)) = self.text.tasks.get(task) else {
            return Err(Fault::usage("the plan has no such task")
                .at(self.work.display().to_string())
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

    /// The identity of what the scan removed of a task's files, if that is for the stage to know.
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

    /// Bytes of the files of a task.
    pub(super) fn bytes_of(&self, task: usize) -> Result<u64> {
        let (source, range) = &self.text.tasks[task];
        let files = self.corpus.sources[*source].files[range.clone()].iter();
        files.map(SourceFile::size).sum()
    }

    /// Bytes of the files of all tasks of a stage.
    pub(super) fn bytes(&self, stage: Stage) -> Result<u64> {
        self.tasks_of(stage).into_iter().map(|task| self.bytes_of(task)).sum()
    }

    /// Removes everything but the parts: also what killed tasks left of theirs.
    pub fn close(&self, quiet: bool) -> Result<()> {
        for entry in disk::entries(&self.parts())? {
            if entry.file_name().unwrap_or_default().as_encoded_bytes().starts_with(b".") {
                disk::remove(&entry)?;
            }
        }
        remove_all(&[self.work.join(FILE), self.folder()], quiet)
    }

    /// Writes down that the store of this plan is made: it needs its parts no longer.
    pub(super) fn merged(&self) -> Result<()> {
        disk::write_whole(&self.folder().join(MERGED), &[]).map(drop)
    }

    /// Removes what belongs to other plans.
    fn remove_others(&self) -> Result<()> {
        let others = disk::entries(&self.work)?.into_iter();
        others
            .filter(|path| is_plans(name_of(path)) && *path != self.folder())
            .try_for_each(|path| disk::remove(&path))
    }
}
