//! Runs all tasks in this process, then merges their parts.

use std::path::Path;
use std::sync::Mutex;

use contract::{Class, Fault, Result, note};
use store::Manifest;

use super::known::missing;
use super::merge::{Links, assemble};
use super::output;
use super::plan::Plan;
use super::result::TaskResult;
use super::scan;
use super::stage::Stage;
use super::tally::tallies;
use super::task::{GoOn, Runner};
use crate::assembly::Options;
use crate::progress::{Measure, Progress};

/// A store, with statistics of its build.
pub(crate) struct Made {
    pub(crate) manifest: Manifest,
    /// Counts and rates.
    pub(crate) summary: String,
    /// For each stage, how many parts were made and how many were reused.
    pub(crate) tallies: Vec<String>,
    /// Documents that the reference encoded again, and their bytes.
    pub(crate) audited: (u64, u64),
}

/// Called with each file of a part that was made, and its name in the store.
pub(crate) type MadeFile<'a> = &'a mut dyn FnMut(&Path, &str) -> Result<()>;

/// Runs the missing tasks of a plan and makes the store, while `go_on`, called before each document, succeeds. A part
/// that is damaged is made again.
pub(crate) fn make(
    plan: &Plan,
    store: &Path,
    options: &Options,
    go_on: GoOn<'_>,
    made: MadeFile<'_>,
) -> Result<Made> {
    let runner = Runner::new(plan, options.workers)?;
    if !options.quiet {
        runner.notes().for_each(|note| note!("note: {note}"));
    }
    if !scan::is_decided(plan)? {
        forget_damaged(plan, Stage::Scan)?;
        let summary = run(&runner, plan, Stage::Scan, options.quiet, go_on)?.finish();
        if !options.quiet {
            note!("dedup scan: {summary}");
        }
        scan::decide(plan, options.quiet)?;
    }
    forget_damaged(plan, Stage::Encode)?;
    let mut audited = (0, 0);
    let mut progress = {
        let bytes = plan.bytes(Stage::Encode)?;
        let left = plan.missing(Stage::Encode)?;
        let mut progress = Progress::new("build", Measure::Bytes, bytes, options.quiet);
        let later = left.iter().map(|task| plan.bytes_of(*task)).sum::<Result<u64>>()?;
        progress.file(bytes - later);
        let (progress, mut tasks) = (Mutex::new(progress), left.iter());
        runner.run_all(Stage::Encode, &left, &progress, go_on, |(_, (documents, bytes))| {
            audited = (audited.0 + documents, audited.1 + bytes);
            tasks.next().map_or(Ok(()), |task| tell_of(plan, *task, made))
        })?;
        progress.into_inner().map_err(|_| Fault::bug("progress was reported by a panic"))?
    };
    let tallies = tallies(plan)?;
    // The parts of a cache that is removed with the build move into the store, unless another plan needs them.
    let is_own = options.work.is_none() && plan.cache.plans()? == [plan.name];
    let links = if is_own { Links::Move } else { Links::Link };
    let manifest = assemble(plan, store, &mut progress, links)?;
    let summary = progress.of(&manifest);
    Ok(Made { manifest, summary, tallies, audited })
}

/// Tells of the files of a part that was made.
fn tell_of(plan: &Plan, task: usize, made: MadeFile<'_>) -> Result<()> {
    let gone = || missing(plan, Stage::Encode, task);
    let key = TaskResult::read(plan, Stage::Encode, task)?.ok_or_else(gone)?.part;
    let (output, _) = output::read(&plan.cache, key)?.ok_or_else(gone)?;
    let (folder, place) = (plan.cache.part_folder(key), plan.place_of(task));
    let name = |name: &str| place.join(name).to_string_lossy().into_owned();
    output::files(&output).try_for_each(|file| made(&folder.join(&file.name), &name(&file.name)))
}

/// Runs the missing tasks of a stage.
fn run(
    runner: &Runner<'_>,
    plan: &Plan,
    stage: Stage,
    quiet: bool,
    go_on: GoOn<'_>,
) -> Result<Progress> {
    let missing = plan.missing(stage)?;
    let bytes = missing.iter().map(|task| plan.bytes_of(*task)).sum::<Result<u64>>()?;
    let progress = Mutex::new(Progress::new("dedup scan", Measure::Bytes, bytes, quiet));
    runner.run_all(stage, &missing, &progress, go_on, |_| Ok(()))?;
    progress.into_inner().map_err(|_| Fault::bug("progress was reported by a panic"))
}

/// Removes the parts of finished tasks that are damaged, so that these are run again.
fn forget_damaged(plan: &Plan, stage: Stage) -> Result<()> {
    for task in plan.tasks_of(stage) {
        let result = match TaskResult::read(plan, stage, task) {
            Err(fault) if fault.class() == Class::Data => None,
            result => result?,
        };
        result.map_or(Ok(None), |result| plan.whole_part(stage, result.part))?;
    }
    Ok(())
}
