//! Runs all tasks in this process: new results are written to their part and to the store at once; existing parts are
//! read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use contract::{Class, Fault, Result, note};
use store::{Manifest, disk};

use super::merge::{assemble, tell_part};
use super::part::is_whole;
use super::plan::Plan;
use super::scan;
use super::stage::Stage;
use super::task::{Ran, Runner, tell};
use crate::assembly::Options;
use crate::assembly::pipeline::Step;
use crate::dedup::Seen;
use crate::progress::{Measure, Progress};

/// A store, with statistics of its build.
pub(crate) struct Made {
    pub(crate) manifest: Manifest,
    /// Counts and rates.
    pub(crate) summary: String,
    /// Documents that the reference encoded again, and their bytes.
    pub(crate) audited: (u64, u64),
}

/// Runs the missing tasks of a plan and makes the store, while `go_on`, called before each document, succeeds. A part
/// that turns out to be damaged is made again.
pub(crate) fn make(
    plan: &Plan,
    store: &Path,
    options: &Options,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Made> {
    let runner = Runner::new(plan, options.workers)?;
    if !options.quiet {
        runner.notes().for_each(|note| note!("note: {note}"));
    }
    let mut again = BTreeSet::new();
    loop {
        let fault = match attempt(&runner, plan, store, options, go_on) {
            Err(fault) => fault,
            made => return made,
        };
        // Each part is retried once: whatever damaged it may do so every time.
        let part = damaged_part(plan, &fault).filter(|part| again.insert(part.clone()));
        let Some(part) = part else { return Err(fault) };
        note!("note: {}: {}: it is made again", part.display(), fault.what());
        disk::remove(&part)?;
        for part in damaged_parts(plan, options.quiet)? {
            note!("note: {}: this part is damaged: it is made again", part.display());
            disk::remove(&part)?;
            again.insert(part);
        }
    }
}

/// The parts whose bytes are damaged. If one is, others may be, and finding them one by one would cost an attempt each.
fn damaged_parts(plan: &Plan, quiet: bool) -> Result<Vec<PathBuf>> {
    let mut sized = Vec::new();
    for part in plan.cache.parts()? {
        let about = part.metadata().map_err(|error| Fault::io("read", &part, &error))?;
        sized.push((part, about.len()));
    }
    let bytes = sized.iter().map(|(_, bytes)| bytes).sum();
    let mut progress = Progress::new("checking parts", Measure::Bytes, bytes, quiet);
    let mut damaged = Vec::new();
    for (part, bytes) in sized {
        if !is_whole(&part)? {
            damaged.push(part);
        }
        progress.add(bytes);
    }
    Ok(damaged)
}

/// The part that a fault reports as damaged; it can be made again from its inputs.
fn damaged_part(plan: &Plan, fault: &Fault) -> Option<PathBuf> {
    let place = fault.place()?;
    // By its file name alone: the printed path of a folder that is not UTF-8 does not exist.
    let part = plan.cache.parts_folder().join(Path::new(place).file_name()?);
    (fault.class() == Class::Data && place == part.display().to_string()).then_some(part)
}

fn attempt(
    runner: &Runner<'_>,
    plan: &Plan,
    store: &Path,
    options: &Options,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Made> {
    scan_missing(runner, plan, options.quiet, go_on)?;
    scan::decide(plan, options.quiet)?;
    let bytes = plan.bytes(Stage::Encode)?;
    let mut progress = Progress::new("build", Measure::Bytes, bytes, options.quiet);
    let mut audited = (0, 0);
    let manifest = assemble(plan, store, &mut progress, |task, committer| {
        if plan.result(Stage::Encode, task)?.is_none() {
            let (ran, (documents, bytes)) = runner.encode(task, &mut |step| {
                if let Step::Slab { items, .. } = &step {
                    items.iter().try_for_each(|_| go_on())?;
                }
                committer.step(step)
            })?;
            audited = (audited.0 + documents, audited.1 + bytes);
            if !matches!(ran, Ran::Reused(_)) {
                return Ok(());
            }
        }
        tell_part(plan, task, committer)
    })?;
    Ok(Made { manifest, summary: progress.finish(), audited })
}

/// Scans the documents of tasks that have no scan result yet, for the steps that compare them.
fn scan_missing(
    runner: &Runner<'_>,
    plan: &Plan,
    quiet: bool,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let missing = plan.missing(Stage::Scan)?;
    if missing.is_empty() {
        return Ok(());
    }
    let bytes = missing.iter().map(|task| plan.bytes_of(*task)).sum::<Result<u64>>()?;
    let mut progress = Progress::new("dedup scan", Measure::Bytes, bytes, quiet);
    for task in missing {
        let ran = runner.scan(task, &mut |seen| {
            if let Seen::Documents { observed, .. } = seen {
                observed.iter().try_for_each(|_| go_on())?;
            }
            tell(seen, &mut progress);
            Ok(())
        })?;
        if matches!(ran, Ran::Reused(_)) {
            progress.add(plan.bytes_of(task)?);
        }
    }
    if !quiet {
        note!("dedup scan: {}", progress.finish());
    }
    Ok(())
}
