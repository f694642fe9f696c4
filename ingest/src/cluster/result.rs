//! What a task did: which content it found in its files, and which part came of it.
//!
//! A result is created only where there is none. A second one must say the same; where it does not, both are kept.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, json};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use store::{disk, regular};

use super::key::Content;
use super::plan::Plan;
use super::stage::Stage;
use crate::corpus::SourceFile;
use crate::parallel;
use crate::source::Stamp;

/// The result of one task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TaskResult {
    /// Which task, as its file is called: two of one source may have files of the same number.
    pub(super) of: String,
    /// Its files.
    pub(super) inputs: Vec<Input>,
    /// The key of its part.
    pub(super) part: Identity,
    /// The digest at the end of its part.
    pub(super) digest: Digest,
    /// Whether that part was there already.
    pub(super) reused: bool,
}

/// One file, as a task found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Input {
    pub(super) bytes: u64,
    pub(super) sha256: Identity,
    /// Taken before its content. Where it differs, a build that goes on looks at the content again; it decides nothing
    /// else.
    stamp: Stamp,
}

/// The stamps of files: to be taken before these are read.
pub(super) fn stamps(files: &[SourceFile]) -> Result<Vec<Stamp>> {
    files.iter().map(SourceFile::stamp).collect()
}

/// Takes the content of files.
pub(super) fn contents(files: &[SourceFile]) -> Result<Vec<Content>> {
    parallel::start_shared()?;
    files.par_iter().map(|file| file.path.content()).collect()
}

/// Files with this content that was read after these stamps were taken.
pub(super) fn stamped(contents: &[Content], stamps: Vec<Stamp>) -> Vec<Input> {
    let files = contents.iter().zip(stamps);
    files.map(|((bytes, sha256), stamp)| Input { bytes: *bytes, sha256: *sha256, stamp }).collect()
}

impl TaskResult {
    /// Bytes and identity of its files.
    pub(super) fn contents(&self) -> Vec<Content> {
        self.inputs.iter().map(|input| (input.bytes, input.sha256)).collect()
    }

    /// Whether its files were not touched since.
    pub(super) fn is_of(&self, files: &[SourceFile]) -> bool {
        let same = |(input, file): (&Input, &SourceFile)| {
            input.stamp.tells() && file.stamp().is_ok_and(|stamp| stamp == input.stamp)
        };
        self.inputs.len() == files.len() && self.inputs.iter().zip(files).all(same)
    }

    /// What the result of a task is called.
    pub(super) fn name(stage: Stage, task: usize) -> String {
        format!("{}-{task:06}", stage.name())
    }

    fn path(plan: &Plan, stage: Stage, task: usize) -> PathBuf {
        plan.folder().join(format!("{}.json", TaskResult::name(stage, task)))
    }

    /// The result that is there.
    pub(super) fn read(plan: &Plan, stage: Stage, task: usize) -> Result<Option<Self>> {
        let path = TaskResult::path(plan, stage, task);
        let bytes = match regular::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.map_err(|error| Fault::io("read", &path, &error))?,
        };
        let (found, wanted) = (TaskResult::parse(&path, &bytes)?, TaskResult::name(stage, task));
        if found.of != wanted {
            return Err(Fault::data("this is the result of another task")
                .at(path.display().to_string())
                .found(found.of)
                .wanted(wanted)
                .hint("delete it and run the task again"));
        }
        Ok(Some(found))
    }

    /// The result in a file.
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|error| {
            Fault::data("this result of a task is damaged")
                .at(path.display().to_string())
                .found(error)
                .hint("delete it and run the task again")
        })
    }

    /// Removes the result, if there is one.
    pub(super) fn remove(plan: &Plan, stage: Stage, task: usize) -> Result<()> {
        let path = TaskResult::path(plan, stage, task);
        disk::remove(&path)
    }

    /// Puts the result down, unless there is one: then the two must say the same.
    pub(super) fn commit(&self, plan: &Plan, stage: Stage, task: usize) -> Result<()> {
        let path = TaskResult::path(plan, stage, task);
        let name = &self.of;
        let scratch = scratch(&plan.folder(), name)?;
        disk::write_whole(&scratch, &json::bytes(self, "a result")?)?;
        if create(&scratch, &path)? {
            return Ok(());
        }
        let before = TaskResult::read(plan, stage, task)?.ok_or_else(|| {
            Fault::machine("a result is gone that was there").at(path.display().to_string())
        })?;
        if (before.part, before.digest) == (self.part, self.digest) {
            return disk::remove(&scratch);
        }
        let kept = plan.folder().join(format!("{name}-{}.conflict", self.part.short()));
        disk::rename(&scratch, &kept).map_err(|error| Fault::io("keep", &kept, &error))?;
        Err(conflict(&format!("{} task {task}", stage.name()))
            .at(path.display().to_string())
            .found(format!("part {}, kept as {}", self.part.short(), kept.display()))
            .wanted(format!("part {}", before.part.short())))
    }
}

/// What is said of a second result that differs.
pub(super) fn conflict(what: &str) -> Fault {
    Fault::mismatch(format!("{what} gave another result than before")).hint(
        "an input changed, or a machine computes wrongly: find out which, delete the wrong one of the two",
    )
}

/// A name that no other process uses: its own for each process, on each machine.
pub(super) fn scratch(folder: &Path, name: &str) -> Result<PathBuf> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let job = std::env::var("SLURM_JOB_ID").unwrap_or_default();
    let path = folder.join(format!(".{name}-{}-{job}-{}", host.trim(), std::process::id()));
    disk::remove(&path)?;
    Ok(path)
}

/// Gives a finished file its name if there is none with that name yet, and says whether it did.
pub(super) fn create(scratch: &Path, path: &Path) -> Result<bool> {
    match disk::rename_new(scratch, path) {
        Ok(()) => {
            disk::sync_folder(disk::folder_of(path))?;
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(Fault::io("create", path, &error)),
    }
}

/// The files in `folder` that keep a second result.
pub(super) fn conflicts(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = disk::entries(folder)?;
    found.retain(|path| path.extension().is_some_and(|ending| ending == "conflict"));
    Ok(found)
}
