//! The state of a plan's tasks.

use std::collections::BTreeSet;
use std::path::PathBuf;

use contract::{Class, Digest, Fault, Identity, Result, note};
use store::disk;

use super::key::cache_key;
use super::output;
use super::part;
use super::plan::Plan;
use super::result::{self, TaskResult};
use super::stage::Stage;
use crate::progress::meanwhile;

impl Plan {
    /// Whether there are parts that no result of this plan names.
    pub(super) fn holds_others(&self) -> Result<bool> {
        let mut own = BTreeSet::new();
        for stage in [Stage::Scan, Stage::Encode] {
            for task in self.tasks_of(stage) {
                let result = TaskResult::read(self, stage, task)?;
                own.extend(result.map(|result| self.known_by(stage, result.part)));
            }
        }
        Ok(self.cache.parts()?.iter().any(|part| !own.contains(part)))
    }

    /// The file by which a part is known.
    pub(super) fn known_by(&self, stage: Stage, key: Identity) -> PathBuf {
        match stage {
            Stage::Scan => self.cache.part(key),
            Stage::Encode => self.cache.part_record(key),
        }
    }

    /// Whether there is a part with this key.
    pub(super) fn holds(&self, stage: Stage, key: Identity) -> bool {
        let folder = || stage == Stage::Scan || self.cache.part_folder(key).is_dir();
        self.known_by(stage, key).exists() && folder()
    }

    /// Removes a part.
    pub(super) fn remove_part(&self, stage: Stage, key: Identity) -> Result<()> {
        disk::remove(&self.known_by(stage, key))?;
        match stage {
            Stage::Scan => Ok(()),
            Stage::Encode => disk::remove(&self.cache.part_folder(key)),
        }
    }

    /// The digest of the part with this key; none if it does not exist. A damaged part is removed, so that its task
    /// makes it again.
    pub(super) fn whole_part(&self, stage: Stage, key: Identity) -> Result<Option<Digest>> {
        if !self.holds(stage, key) {
            return Ok(None);
        }
        let read = match stage {
            Stage::Scan => part::whole_digest(&self.cache.part(key), key),
            Stage::Encode => output::whole_digest(&self.cache, key),
        };
        match read {
            Err(fault) if fault.class() == Class::Data => {
                note!("note: {fault}: it is made again");
                self.remove_part(stage, key)?;
                Ok(None)
            }
            read => read.map(Some),
        }
    }

    /// The tasks of a stage that are not done.
    pub fn missing(&self, stage: Stage) -> Result<Vec<usize>> {
        meanwhile(stage.name(), "looking for tasks that are left", || {
            let mut missing = Vec::new();
            for task in self.tasks_of(stage) {
                if self.result(stage, task)?.is_none() {
                    missing.push(task);
                }
            }
            Ok(missing)
        })
    }

    /// The result of a finished task, if its part exists and has the right digest.
    pub(super) fn result(&self, stage: Stage, task: usize) -> Result<Option<TaskResult>> {
        let Some(result) = TaskResult::read(self, stage, task)? else { return Ok(None) };
        if !self.holds(stage, result.part) {
            return Ok(None);
        }
        let Ok(removed) = self.removed(stage, task) else { return Ok(None) };
        let (only, head) = (self.cut(task)?, &self.text.head);
        let wanted = cache_key(stage, &only, head, &result.contents(), removed);
        Ok((wanted == result.part).then_some(result))
    }
}

/// The results of all tasks of a stage; refuses a task without a result, or with two different ones.
pub(super) fn results(plan: &Plan, stage: Stage) -> Result<Vec<TaskResult>> {
    let read = || results_telling(plan, stage, || ());
    meanwhile(stage.name(), "reading what its tasks did", read)
}

/// The same, and reports each task that is read.
pub(super) fn results_telling(
    plan: &Plan,
    stage: Stage,
    mut tell: impl FnMut(),
) -> Result<Vec<TaskResult>> {
    let tasks = plan.tasks_of(stage);
    let mut results = Vec::new();
    for task in tasks {
        let result = plan.result(stage, task)?;
        results.push(result.ok_or_else(|| missing(plan, stage, task))?);
        tell();
    }
    let mut conflicts = result::conflicts(&plan.folder())?;
    conflicts.extend(result::conflicts(&plan.cache.parts_folder())?.into_iter().filter(|path| {
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

/// The fault for a missing part.
pub(super) fn missing(plan: &Plan, stage: Stage, task: usize) -> Fault {
    Fault::data(format!("the part of {} task {task} is missing", stage.name()))
        .at(plan.folder().display().to_string())
        .hint("run the tasks that are missing, then this again")
}
