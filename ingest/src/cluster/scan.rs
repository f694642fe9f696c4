//! Between the stages: combines the results of all scan tasks, and decides as a single process would.

use std::io;
use std::path::Path;

use contract::{Digest, Fault, Hasher, Result, json};
use serde::{Deserialize, Serialize};
use store::disk::{self, AtomicFile};
use store::{is_file_name, regular};

use super::known::results;
use super::part::{Entry, PartReader};
use super::plan::Plan;
use super::result::{self, TaskResult};
use super::stage::Stage;
use crate::corpus::PartInputs;
use crate::dedup::{Gathered, Scan};
use crate::dropped::{REMOVED, cut};
use crate::progress::{Measure, Progress, meanwhile};

/// `decided/scan.json`.
#[derive(Serialize, Deserialize)]
struct Decision {
    /// The digest of the parts that it was made from.
    basis: Digest,
    scan: Scan,
}

const FILE: &str = "scan.json";

/// The digest of the parts that a decision is made from.
fn basis(results: &[TaskResult]) -> Digest {
    let mut hasher = Hasher::new();
    hasher.tag("scan.v1");
    for result in results {
        hasher.str(&result.part.to_string()).digest(result.digest);
    }
    hasher.finish()
}

/// Decides which documents are removed, once every scan task is done. Does nothing if the corpus compares none, or if
/// decided.
pub fn decide(plan: &Plan, quiet: bool) -> Result<()> {
    if plan.tasks_of(Stage::Scan).is_empty() {
        return Ok(());
    }
    let results = results(plan, Stage::Scan)?;
    if read(plan)?.is_some_and(|decision| decision.basis == basis(&results)) {
        return Ok(());
    }
    let folder = result::scratch(&plan.folder(), "decided")?;
    let scratch = folder.join(".scratch");
    disk::create_folder(&scratch)?;
    let mut gathered = Gathered::new(&plan.corpus, &folder, &scratch)?;
    let mut progress = Progress::new("decide", Measure::Count("part"), results.len() as u64, quiet);
    for (task, result) in plan.tasks_of(Stage::Scan).into_iter().zip(&results) {
        gather(plan, task, result, &mut gathered)?;
        progress.add(1);
    }
    drop(progress);
    let scan = meanwhile("decide", "comparing documents", || gathered.decide())?;
    disk::remove(&scratch)?;
    cut_lists(
        plan,
        &folder,
        Progress::new("decide", Measure::Count("list"), results.len() as u64, quiet),
    )?;
    let decision = Decision { basis: basis(&results), scan };
    let bytes = json::bytes(&decision, "the scan")?;
    // This also makes the names of the lists durable.
    disk::write_atomic(&folder.join(FILE), &bytes)?;
    commit(plan, &folder, &bytes)
}

/// Cuts each source's decision into a list for each of its tasks. The names are durable once `folder` is synced.
fn cut_lists(plan: &Plan, folder: &Path, mut progress: Progress) -> Result<()> {
    for (number, source) in plan.corpus.sources.iter().enumerate() {
        if source.recipe.scanned() == 0 {
            continue;
        }
        let tasks = plan.text.tasks.iter().enumerate().filter(|(_, part)| part.source == number);
        let (tasks, parts): (Vec<usize>, Vec<_>) = tasks.unzip();
        cut(&folder.join(&source.name).join(REMOVED), &parts, |number| {
            let name = plan.list(tasks[number]);
            let name = name.file_name().ok_or_else(|| Fault::bug("a list without a name"))?;
            progress.add(1);
            AtomicFile::create(&folder.join(name))
        })?;
    }
    Ok(())
}

/// Moves the decision into place; an existing one must be equal, unless it was made from other parts.
fn commit(plan: &Plan, folder: &Path, bytes: &[u8]) -> Result<()> {
    let decided = plan.decided();
    let fault = |what: &str, error: &io::Error| Fault::io(what, &decided, error);
    loop {
        match disk::rename(folder, &decided) {
            Ok(()) => return disk::sync_folder(&plan.folder()),
            Err(error) if !decided.exists() => return Err(fault("create", &error)),
            Err(_) => {}
        }
        let there = match regular::read(&decided.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            there => there.map_err(|error| fault("read", &error))?,
        };
        if there == bytes {
            return disk::remove(folder);
        }
        let same_basis = |a: &[u8], b: &[u8]| {
            let read = |bytes| serde_json::from_slice::<Decision>(bytes).ok().map(|d| d.basis);
            read(a).is_some() && read(a) == read(b)
        };
        if same_basis(&there, bytes) {
            let kept = decided.with_extension("conflict");
            disk::rename(folder, &kept).map_err(|error| Fault::io("keep", &kept, &error))?;
            return Err(result::conflict("the scan").at(kept.display().to_string()));
        }
        disk::remove(&decided)?;
    }
}

/// Passes the content of one part to the scan.
fn gather(
    plan: &Plan,
    task: usize,
    result: &TaskResult,
    gathered: &mut Gathered<'_>,
) -> Result<()> {
    let PartInputs { source, files: range, .. } = &plan.text.tasks[task];
    let steps = &plan.corpus.sources[*source].recipe.steps;
    let mut part = PartReader::open(&plan.cache.part(result.part), result.part)?;
    let mut file = range.start;
    while let Some(entry) = part.next()? {
        match entry {
            Entry::Observed(mut observed) => {
                // A part names steps by place, and the corpus file by number.
                let known = observed.renamed(|place| steps.get(place).map(|(number, _)| *number));
                if known.is_none() || file >= range.end {
                    return Err(part.damaged("it holds what its task cannot give"));
                }
                let place = || plan.cache.part(result.part).display().to_string();
                gathered.document(*source, file, observed).map_err(|fault| fault.or_at(place))?;
            }
            Entry::FileEnd((_, identity)) => {
                gathered.end(*source, identity);
                file += 1;
            }
        }
    }
    if part.digest != Some(result.digest) || file != range.end {
        return Err(part.damaged("this part is not what its task made"));
    }
    Ok(())
}

fn read(plan: &Plan) -> Result<Option<Decision>> {
    let path = plan.decided().join(FILE);
    match regular::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Fault::io("read", &path, &error)),
        Ok(bytes) => parse(&bytes).map(Some).map_err(|flaw| {
            Fault::data("the scan of this build is damaged")
                .at(path.display().to_string())
                .found(flaw)
                .hint("delete its folder and run `zdata task decide` again")
        }),
    }
}

/// Parses a decision and checks that its lists are files of their sources' folders.
fn parse(bytes: &[u8]) -> std::result::Result<Decision, String> {
    let decision: Decision = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let mut names = decision.scan.files.iter().flatten().map(|file| &file.name);
    match names.find(|name| !is_file_name(name)) {
        Some(name) => Err(format!("a file called {name:?}")),
        None => Ok(decision),
    }
}

/// The decision; none if the corpus compares no documents.
pub(super) fn decision(plan: &Plan) -> Result<Option<Scan>> {
    if plan.tasks_of(Stage::Scan).is_empty() {
        return Ok(None);
    }
    let decided = current(plan)?.ok_or_else(|| {
        Fault::data("the scan is not decided")
            .at(plan.decided().display().to_string())
            .hint("run `zdata task decide`, then the tasks that are missing")
    })?;
    Ok(Some(decided))
}

/// The decision, if it was made from the current parts.
fn current(plan: &Plan) -> Result<Option<Scan>> {
    let results = results(plan, Stage::Scan)?;
    let current = read(plan)?.filter(|decision| decision.basis == basis(&results));
    Ok(current.map(|decision| decision.scan))
}

/// Whether the decision is made.
pub fn is_decided(plan: &Plan) -> Result<bool> {
    let tasks = plan.tasks_of(Stage::Scan);
    Ok(tasks.is_empty() || (plan.missing(Stage::Scan)?.is_empty() && current(plan)?.is_some()))
}

/// Removes a decision that was made from other than the current parts.
pub(super) fn forget(plan: &Plan) -> Result<()> {
    if is_decided(plan)? || !plan.decided().exists() {
        return Ok(());
    }
    let decided = plan.decided();
    disk::remove(&decided)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_names_files_of_its_own_folders() {
        for (name, fine) in [("matches.jsonl.zst", true), ("../x", false), ("/etc/passwd", false)] {
            let file = store::FileRecord { name: name.to_owned(), bytes: 0, digest: Digest(0) };
            let scan = Scan { inputs: Vec::new(), files: vec![vec![file]] };
            let bytes = serde_json::to_vec(&Decision { basis: Digest(0), scan }).unwrap();
            assert_eq!(parse(&bytes).is_ok(), fine, "{name}");
        }
    }
}
