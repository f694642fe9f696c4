//! The result of a task: the content that it found in its files, and the part that it made.
//!
//! A result is created only if there is none. A second one must be equal; otherwise both are kept.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, json};
use serde::{Deserialize, Serialize};
use store::{disk, regular};

use super::key::Content;
use super::plan::Plan;
use super::stage::Stage;
use crate::corpus::SourceFile;
use crate::source::Stamp;

/// The result of one task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TaskResult {
    /// The task's name, as in the result's file name: two tasks of one source may have equally many files.
    pub(super) of: String,
    /// Its files.
    pub(super) inputs: Vec<Input>,
    /// The key of its part.
    pub(super) part: Identity,
    /// The digest at the end of its part.
    pub(super) digest: Digest,
    /// Whether that part existed already.
    pub(super) reused: bool,
}

/// One file, as a task found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Input {
    pub(super) bytes: u64,
    pub(super) sha256: Identity,
    /// Taken before its content was read. If it differs, a resumed build checks the content again.
    pub(super) stamp: Stamp,
}

/// The stamps of files, to be taken before the files are read.
pub(super) fn stamps(files: &[SourceFile]) -> Result<Vec<Stamp>> {
    files.iter().map(SourceFile::stamp).collect()
}

/// Inputs with this content, which was read after these stamps were taken.
pub(super) fn stamped(contents: &[Content], stamps: Vec<Stamp>) -> Vec<Input> {
    let files = contents.iter().zip(stamps);
    files.map(|((bytes, sha256), stamp)| Input { bytes: *bytes, sha256: *sha256, stamp }).collect()
}

impl TaskResult {
    /// Size and identity of its files.
    pub(super) fn contents(&self) -> Vec<Content> {
        self.inputs.iter().map(|input| (input.bytes, input.sha256)).collect()
    }

    /// Whether its files are unchanged since then.
    pub(super) fn is_of(&self, files: &[SourceFile]) -> bool {
        let same = |(input, file): (&Input, &SourceFile)| {
            file.stamp().is_ok_and(|stamp| stamp == input.stamp)
        };
        self.inputs.len() == files.len() && self.inputs.iter().zip(files).all(same)
    }

    /// The file name of a task's result.
    pub(super) fn name(stage: Stage, task: usize) -> String {
        format!("{}-{task:06}", stage.name())
    }

    fn path(plan: &Plan, stage: Stage, task: usize) -> PathBuf {
        plan.folder().join(format!("{}.json", TaskResult::name(stage, task)))
    }

    /// The existing result.
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

    /// Writes the result, unless there is one: then the two must be equal.
    pub(super) fn commit(&self, plan: &Plan, stage: Stage, task: usize) -> Result<()> {
        let path = TaskResult::path(plan, stage, task);
        let name = &self.of;
        let scratch = scratch(&plan.folder(), name)?;
        disk::write_atomic(&scratch, &json::bytes(self, "a result")?)?;
        if create(&scratch, &path)? {
            return Ok(());
        }
        let before = TaskResult::read(plan, stage, task)?.ok_or_else(|| {
            Fault::machine("a result that was there is missing").at(path.display().to_string())
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

/// The fault for a second result that differs.
pub(super) fn conflict(what: &str) -> Fault {
    Fault::mismatch(format!("{what} gave another result than before")).hint(
        "an input changed, or a machine computes wrongly: find out which, delete the wrong one of the two",
    )
}

/// A unique name for this process on this machine.
pub(super) fn scratch(folder: &Path, name: &str) -> Result<PathBuf> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let job = std::env::var("SLURM_JOB_ID").unwrap_or_default();
    let path = folder.join(format!(".{name}-{}-{job}-{}", host.trim(), std::process::id()));
    disk::remove(&path)?;
    Ok(path)
}

/// Renames a finished file unless the name exists, and returns whether it did.
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

/// The files in `folder` that hold a second, differing result.
pub(super) fn conflicts(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = disk::entries(folder)?;
    found.retain(|path| path.extension().is_some_and(|ending| ending == "conflict"));
    Ok(found)
}
