//! Creates a new run that shares all steps up to one with another run, and differs from there.
//!
//! ```text
//! ledger.jsonl   the first N + 1 lines of the other run, byte for byte (line 0 is its identity)
//! run.toml       its curriculum, amended from step N + 1 on; that step's ledger line will contain the text
//! checkpoints/   those up to step N, by links            events.jsonl   its events up to step N
//! metrics/       its curves; those of later steps are dropped when the new run continues
//! forked.json    which run, its location, and after which step
//! ```
//!
//! It is made as `NEW.partial` and renamed once it is complete and on disk: a kill or a power loss leaves no incomplete
//! run, and the same command starts over. All disk operations use `store::disk`, so that tests can simulate crashes.
//! The other run may continue meanwhile; the fork writes nothing there.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use contract::{Class, Digest, Fault, Result, note};
use kernels::runtime::KernelTable;
use loader::OpenedCurriculum;
use mixer::Curriculum;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use store::disk::{self, Lock, OutputFile};
use store::{Location, regular};

use crate::change::{DocumentsBySource, WhatIfChange};
use trainer::checkpoint::Checkpoints;
use trainer::events;
use trainer::folder::{self, RunFolder, compare_content, compare_curriculum, head};
use trainer::ledger::Ledger;
use trainer::spec::RunSpec;

/// The file in which a fork records its origin.
const FORKED: &str = "forked.json";

/// The fork to make.
pub struct ForkRequest<'a> {
    /// The run to fork.
    pub run: &'a Path,
    /// The last shared step.
    pub step: u64,
    /// The folder of the new run, which must not exist.
    pub out: &'a Path,
    /// Where the run's stores are now, if they were moved.
    pub stores: &'a [Location],
    /// The change from the next step on.
    pub change: &'a WhatIfChange,
    /// A file with further amendments.
    pub amend: Option<&'a Path>,
}

/// The fork that was made.
#[derive(Clone, Debug, Serialize)]
pub struct Forked {
    /// The last shared step.
    pub step: u64,
    /// The last step of the new run's curriculum.
    pub steps: u64,
    /// The steps of the shared checkpoints, ascending.
    pub checkpoints: Vec<u64>,
    /// The changes of the new run's curriculum, for people.
    pub changes: Vec<String>,
}

/// The origin of a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The folder of the original run at that time; invalid UTF-8 is replaced.
    pub of: String,
    /// The last shared step.
    pub step: u64,
    /// The ledger's chain after that step, which identifies the run wherever it is.
    pub chain: Digest,
}

impl Origin {
    /// The origin of the run in `root`; `None` if it is not a fork.
    pub fn read(root: &Path) -> Result<Option<Origin>> {
        let path = root.join(FORKED);
        let text = match regular::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Fault::io("read", &path, &error)),
        };
        serde_json::from_str(&text).map(Some).map_err(|error| {
            Fault::data(format!("this file does not say where a run comes from: {error}"))
                .at(path.display().to_string())
        })
    }
}

/// Makes the fork.
pub fn fork(request: &ForkRequest<'_>, table: &KernelTable) -> Result<Forked> {
    let ForkRequest { run, step, out, stores, change, amend } = *request;
    if fs::symlink_metadata(out).is_ok() {
        return Err(Fault::usage("there is something at this place already")
            .at("--out")
            .found(out.display())
            .wanted("a name that is free"));
    }
    let folder = disk::folder_of(out);
    let within =
        |folder: &Path| Some(folder.canonicalize().ok()?.starts_with(run.canonicalize().ok()?));
    if within(folder).unwrap_or(false) {
        return Err(Fault::usage(
            "a fork is a folder outside its run, whose folder stays as it is",
        )
        .at("--out")
        .found(out.display())
        .wanted(format!("a place outside of {}", run.display())));
    }
    let old = OriginalRun::open(run, stores, table)?;
    old.check(step)?;
    let curriculum = amended(&old.spec, step, change, amend)?;
    // Parsed from the text that will be trained, so that errors are reported here, with their line.
    let opened = OpenedCurriculum::open_text(old.folder.curriculum(), curriculum.canonical())?;
    let spec = RunSpec::new(&opened)?;
    let (scratch, _lock) = scratch(out)?;
    let new = RunFolder::new(&scratch);
    // First and synced: if anything is left after a crash, this file marks it as an incomplete fork.
    old.write_origin(step, &scratch)?;
    disk::sync_folder(&scratch)?;
    old.ledger.copy_through(step, &new.ledger())?;
    let ledger = Ledger::read_whole(&new.ledger())?;
    compare_curriculum(&ledger, &spec, &new.ledger())?;
    new.write_curriculum(&spec, &opened.file)?;
    let checkpoints = share_checkpoints(&old, step, &new)?;
    copy_events(&old.folder.events(), step, &checkpoints, &new.events())?;
    copy_files(&old.folder.metrics(), &new.metrics())?;
    disk::sync_folders(&scratch)?;
    disk::rename(&scratch, out).map_err(|error| Fault::io("rename to", out, &error))?;
    disk::sync_folder(disk::folder_of(out))?;
    let before = Curriculum::parse(ledger.curriculum(), "the ledger's curriculum")?;
    let changes = before.difference(&spec.curriculum).iter().map(ToString::to_string).collect();
    Ok(Forked { step, steps: spec.plan.steps(), checkpoints, changes })
}

/// The original run.
struct OriginalRun {
    folder: RunFolder,
    spec: RunSpec,
    ledger: Ledger,
}

impl OriginalRun {
    fn open(root: &Path, stores: &[Location], table: &KernelTable) -> Result<Self> {
        let folder = RunFolder::new(root);
        let ledger = folder.read_ledger()?;
        let spec = RunSpec::of_folder(root, stores, &ledger.head().stores)?;
        compare_content(ledger.head(), &head(&spec, table)?, &folder.ledger())?;
        compare_curriculum(&ledger, &spec, &folder.ledger())?;
        Ok(OriginalRun { folder, spec, ledger })
    }

    /// Refuses a step that cannot be the last shared one.
    fn check(&self, step: u64) -> Result<()> {
        let (recorded, steps) = (self.ledger.last_step(), self.spec.plan.steps());
        let last = recorded.min(steps - 1);
        if step <= last {
            return Ok(());
        }
        Err(Fault::usage(format!("no run can share the steps up to {step}"))
            .at("--step")
            .found(format!("a curriculum of {steps} steps, {recorded} of them recorded"))
            .wanted(format!("a step from 0 to {last}; the new run differs from the next one on")))
    }

    fn write_origin(&self, step: u64, root: &Path) -> Result<()> {
        let (of, path) = (self.folder.root(), root.join(FORKED));
        let of = of.canonicalize().map_err(|error| Fault::io("resolve", of, &error))?;
        let of = of.to_string_lossy().into_owned();
        let chain = self.ledger.chain_at(step).unwrap_or_default();
        let text = serde_json::to_string(&Origin { of, step, chain }).map_err(|error| {
            Fault::bug(format!("where a run comes from cannot be written: {error}"))
        })?;
        write(&path, &mut (text + "\n").as_bytes())
    }
}

/// Writes a new file and syncs it.
fn write(path: &Path, bytes: &mut dyn Read) -> Result<()> {
    let fault = |error: io::Error| Fault::io("write", path, &error);
    let mut file = OutputFile::create(path)?;
    io::copy(bytes, &mut file).map_err(fault)?;
    file.sync().map_err(fault)
}

/// The curriculum of the new run: the old one, amended from the step after `step` on.
fn amended(
    spec: &RunSpec,
    step: u64,
    change: &WhatIfChange,
    amend: Option<&Path>,
) -> Result<Curriculum> {
    let mut curriculum = match change.is_some() {
        false => spec.curriculum.clone(),
        true => {
            let documents = documents(spec, &change.drop_documents)?;
            change.amended(spec, step + 1..spec.plan.steps() + 1, documents)?
        }
    };
    let Some(path) = amend else { return Ok(curriculum) };
    let text = fs::read_to_string(path).map_err(|error| Fault::io("read", path, &error))?;
    let mut amendments = curriculum.read_amendments(&text, &path.display().to_string())?;
    if let Some(early) = amendments.iter().find(|amendment| amendment.step <= step) {
        return Err(Fault::usage(format!(
            "an amendment reaches step {}, which is shared",
            early.step
        ))
        .at(path.display().to_string())
        .wanted(format!("a step from {} on", step + 1)));
    }
    let folder = Location::from(path).folder();
    for store in amendments.iter_mut().filter_map(|amendment| amendment.store.as_mut()) {
        // The path is relative to the amendments' file.
        store.path = storage::resolve(&folder, &store.path)?.absolute()?.to_string();
    }
    curriculum.amend(amendments);
    Ok(curriculum)
}

/// The numbers of the documents with these ids; an id must be unique to one source.
fn documents(spec: &RunSpec, ids: &[String]) -> Result<DocumentsBySource> {
    let mut found = DocumentsBySource::new();
    for id in ids {
        let Some((source, numbers)) = spec.data.named("--drop-doc", id, None)? else {
            return Err(Fault::usage("no document that is trained on has this id")
                .at("--drop-doc")
                .found(format!("{id:?}"))
                .hint("`ztrain replay` shows the ids of a step's documents"));
        };
        found.entry(source.to_owned()).or_default().extend(numbers);
    }
    Ok(found)
}

/// A locked folder next to `out`. The leftovers of a killed fork in it are removed, except for [`FORKED`], which
/// identifies them; any other content is refused.
fn scratch(out: &Path) -> Result<(PathBuf, Lock)> {
    let scratch = disk::beside(out, ".partial");
    disk::create_folder(&scratch)?;
    let held = disk::lock(&scratch)?;
    let entries = disk::entries(&scratch)?;
    let ours = scratch.join(FORKED).is_file() && !folder::was_taken(&scratch);
    if !entries.is_empty() && !ours {
        return Err(Fault::usage("a fork is made under this name first, and it is taken")
            .at(scratch.display().to_string())
            .found("files that no fork left there")
            .hint("move that folder away, or give --out another name"));
    }
    entries
        .iter()
        .filter(|path| !path.ends_with(FORKED))
        .try_for_each(|path| disk::remove(path))?;
    Ok((scratch, held))
}

/// Links the checkpoints up to `step`; from a bucket, only the newest is copied.
fn share_checkpoints(old: &OriginalRun, step: u64, new: &RunFolder) -> Result<Vec<u64>> {
    let (from, to) = (old.folder.found_checkpoints()?, new.checkpoints()?);
    let mut steps = from.steps()?;
    steps.retain(|at| *at <= step);
    if from.place().is_remote() {
        steps.drain(..steps.len().saturating_sub(1));
    }
    let mut shared = Vec::new();
    for at in steps {
        let looked = from.open(at).and_then(|reader| {
            reader.of_run(old.ledger.chain_at(at))?;
            reader.has_its_files()
        });
        match looked.and_then(|()| from.share(at, &to)) {
            Ok(()) => shared.push(at),
            // The original run continues, and its retention has removed this one.
            Err(_) if !from.steps()?.contains(&at) => Checkpoints::clean(&to)?,
            Err(fault) if fault.class() == Class::Data => {
                note!("warning: checkpoint step-{at} is not shared: {fault}");
                Checkpoints::clean(&to)?;
            }
            Err(fault) => return Err(fault),
        }
    }
    Ok(shared)
}

/// Copies the events of steps up to `step`. Events of checkpoints that the fork lacks are omitted, since a missing
/// checkpoint is an error. An event without a step (ranks, edits) belongs to the step before it.
fn copy_events(from: &Path, step: u64, checkpoints: &[u64], to: &Path) -> Result<()> {
    let (text, mut about) = (events::read(from)?, 0);
    let shared = |line: &&str| {
        let Ok(event) = serde_json::from_str::<Value>(line) else { return false };
        let steps = ["step", "from_step", "recorded"];
        about = steps.iter().find_map(|step| event[step].as_u64()).unwrap_or(about);
        about <= step && (event["event"] != "checkpoint" || checkpoints.contains(&about))
    };
    let kept: String = text.lines().filter(shared).map(|line| line.to_owned() + "\n").collect();
    // Ends the process of the original run, which is not one of the fork's.
    let last = kept.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
    let time = last.map_or(json!(0), |last| last["time"].clone());
    let of = disk::folder_of(from).display().to_string();
    let forked = json!({"time": time, "event": "forked", "step": step, "of": of});
    write(to, &mut format!("{kept}{forked}\n").as_bytes())
}

/// Copies the files of a folder, if it exists. Links would be modified when either run continues.
fn copy_files(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        return Ok(());
    }
    disk::create_folder(to)?;
    for path in disk::entries(from)? {
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            let mut file =
                fs::File::open(&path).map_err(|error| Fault::io("read", &path, &error))?;
            write(&to.join(name), &mut file)?;
        }
    }
    Ok(())
}
