//! A run's folder: who may write to it, what it contains, and whether the run may continue.
//!
//! ```text
//! run.toml        the curriculum in canonical form, stores by absolute path
//! ledger.jsonl    what was computed, chained          events.jsonl    where and when
//! checkpoints/    step-N, committed by its manifest   lock            held by every process of the run
//! metrics/        curves for TensorBoard              checkpoints.at  place of checkpoints elsewhere, and its key
//! forked.json     the run it was forked from, if any  lock.writer     held by the process that writes here
//! replays/        states before replayed steps; runs never continue from them
//! ```

mod lock;

use std::path::{Path, PathBuf};
use std::time::Duration;

use contract::{Class, Digest, Fault, Result, shell};
use kernels::runtime::KernelTable;
use loader::{open::no_run, recorded};
use mixer::{Curriculum, CurriculumDifference};
use serde_json::Value;
use store::{Location, disk, disk::Writing, open::MANIFEST, regular};

use crate::checkpoint::Checkpoints;
use crate::events;
use crate::ledger::{self, Ledger, LedgerHead, RESTORE};
use crate::spec::RunSpec;

pub use self::lock::RunLocks;
pub(crate) use self::lock::try_lock;
pub use self::lock::was_taken;

/// The file with the place of the checkpoints, if they are not in the run's folder.
const ELSEWHERE: &str = "checkpoints.at";

/// Paths in a run's folder.
#[derive(Clone, Debug)]
pub struct RunFolder {
    root: PathBuf,
}

/// A run's folder that only this process writes to.
pub struct OpenRun {
    /// Its paths.
    pub folder: RunFolder,
    /// Its ledger.
    pub ledger: Ledger,
    /// What an accepted edit of the curriculum changed, for the events.
    pub edits: Vec<String>,
    /// Settings in `run.toml` that recorded steps were not trained with: the file was edited by hand.
    pub by_hand: Vec<String>,
    /// The first step for which the curriculum differs from the ledger's, if any.
    pub changes_from: Option<u64>,
    /// Prevents other processes of this run from writing in the folder.
    _writing: Writing,
}

impl OpenRun {
    /// Takes possession of the place of this run's checkpoints, `wanted` or the current one. A place serves one run:
    /// its owner file holds a key that only this folder knows; a place with another key is refused. The key also
    /// identifies a place that was moved, and a missing place (such as an unmounted disk) is not taken for an empty
    /// one. A run without recorded steps has nothing to lose and may use any place.
    ///
    /// In a local folder the key is renewed each time, and the place is locked: of a run's folder and its copy, the
    /// first to continue gets the checkpoints, and the other is refused.
    ///
    /// The folder `checkpoints` of a run belongs to it without a key. Elsewhere, checkpoints without a key are this
    /// run's if its ledger contains one of them.
    pub(crate) fn take_checkpoints(
        &self,
        wanted: Option<&Location>,
        locks: &RunLocks,
        patience: Duration,
    ) -> Result<Checkpoints> {
        let (folder, recorded) = (self.folder.clone(), self.ledger.last_step());
        let found = folder.elsewhere()?;
        let Some(place) = wanted.or(found.as_ref().map(|(place, _)| place)) else {
            let checkpoints = folder.checkpoints()?;
            return match checkpoints.has_owner()? {
                true => Err(checkpoints.of_another_run()),
                false => Ok(checkpoints),
            };
        };
        let place = place.absolute()?;
        let checkpoints = Checkpoints::new(place.clone());
        if checkpoints.is_a_store()? {
            return Err(Fault::usage("this folder holds a store, which is never altered")
                .at("--checkpoints")
                .found(place)
                .hint("name another place for the checkpoints"));
        }
        let has = match &found {
            Some((found, _)) => Some(found.clone()),
            None if folder.checkpoints()?.steps()?.is_empty() => None,
            None => Some(folder.inside()),
        };
        let ours = match &found {
            Some((_, words)) if recorded > 0 => checkpoints.knows(words)?,
            _ => recorded == 0,
        };
        match has {
            Some(has) if has != place && !ours => {
                return Err(Fault::usage("this run has its checkpoints elsewhere")
                    .at("--checkpoints")
                    .found(place)
                    .wanted(format!("{has}, or where that was moved to")));
            }
            Some(_) if found.is_some() && !ours && !checkpoints.has_owner()? => {
                return Err(folder.gone(&place));
            }
            _ => (),
        }
        if !checkpoints.has_owner()? {
            storage::apart::refuse_shared(&place)
                .map_err(|fault| fault.at("--checkpoints").found(&place))?;
            self.may_claim(&place, &checkpoints)?;
        }
        if let Location::Local(path) = &place {
            locks.take_place(path, patience)?;
        }
        let new = found.is_none();
        let words = found.map_or_else(|| folder.word(), |(_, words)| words);
        folder.know(&place, &words)?;
        checkpoints.claim(&words).inspect_err(|fault| {
            // The next command may name another place. If a bucket did not answer, the key may be there, so it is kept.
            if new && (fault.class() == Class::Usage || !place.is_remote()) {
                let _ = disk::remove(&folder.root.join(ELSEWHERE));
            }
        })?;
        if !place.is_remote() {
            // Written before and after: the folder knows the current key whenever this is interrupted.
            let word = folder.word();
            folder.know(&place, &format!("{words} {word}"))?;
            checkpoints.hand_over(&word)?;
            folder.know(&place, &word)?;
        }
        Ok(checkpoints)
    }

    /// Refuses a place without a key that must not become this run's.
    fn may_claim(&self, place: &Location, checkpoints: &Checkpoints) -> Result<()> {
        if let Location::Local(path) = place
            && let Some(parent) = path.parent().filter(|parent| was_taken(parent))
        {
            // A run uses its own subfolder without a key.
            let real = |path: &Path| {
                path.canonicalize().map_err(|error| Fault::io("resolve", path, &error))
            };
            if real(parent)? == real(self.folder.root())? {
                return Ok(());
            }
            return Err(match RunFolder::new(parent).inside() == *place {
                true => checkpoints.of_another_run(),
                false => Fault::usage("this place lies in the folder of another run")
                    .at("--checkpoints")
                    .found(place)
                    .wanted(format!("a place outside {}", Location::Local(parent.to_owned()))),
            });
        }
        let steps = checkpoints.steps()?;
        let ours = |step: &u64| {
            let chain = self.ledger.chain_at(*step);
            let found = checkpoints.open(*step).map(|reader| reader.manifest().chain);
            chain.is_some() && found.ok() == chain
        };
        match steps.is_empty() || steps.iter().any(ours) {
            true => Ok(()),
            false => Err(checkpoints.of_another_run()),
        }
    }
}

impl RunFolder {
    /// The folder at `root`, which need not exist.
    pub fn new(root: &Path) -> Self {
        RunFolder { root: root.to_owned() }
    }

    /// Its path.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The curriculum of the run.
    pub fn curriculum(&self) -> PathBuf {
        self.root.join("run.toml")
    }

    /// The ledger.
    pub fn ledger(&self) -> PathBuf {
        self.root.join("ledger.jsonl")
    }

    /// Reads the ledger; refuses a folder that is not a run's.
    pub fn read_ledger(&self) -> Result<Ledger> {
        let path = self.ledger();
        if path.exists() { Ledger::read(&path) } else { Err(no_run(&self.root, "ledger.jsonl")) }
    }

    /// The events.
    pub fn events(&self) -> PathBuf {
        self.root.join("events.jsonl")
    }

    /// The folder of TensorBoard curves.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics")
    }

    /// The folder of saved explanations.
    pub fn explained(&self) -> PathBuf {
        self.root.join("explained")
    }

    /// The folder of states before replayed steps.
    pub fn replays(&self) -> PathBuf {
        self.root.join("replays")
    }

    /// The default path of the run's report.
    pub fn report(&self) -> PathBuf {
        self.root.join("report.html")
    }

    /// The checkpoints, in this folder or elsewhere.
    pub fn checkpoints(&self) -> Result<Checkpoints> {
        let elsewhere = self.elsewhere()?;
        Ok(Checkpoints::new(elsewhere.map_or_else(|| self.inside(), |(place, _)| place)))
    }

    /// The same, but refused if their place is missing, as on a disk that is not mounted.
    pub fn found_checkpoints(&self) -> Result<Checkpoints> {
        let Some((place, _)) = self.elsewhere()? else { return self.checkpoints() };
        let checkpoints = Checkpoints::new(place.clone());
        if checkpoints.has_owner()? { Ok(checkpoints) } else { Err(self.gone(&place)) }
    }

    fn inside(&self) -> Location {
        Location::Local(self.root.join("checkpoints"))
    }

    /// The place of checkpoints outside this folder, and the keys of which it holds one.
    fn elsewhere(&self) -> Result<Option<(Location, String)>> {
        let path = self.root.join(ELSEWHERE);
        let text = match regular::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Fault::io("read", &path, &error)),
        };
        // The path may contain any bytes, even a newline.
        let text = text.trim_ascii_end();
        let lines = text.iter().rposition(|byte| *byte == b'\n').map(|at| text.split_at(at));
        match lines.and_then(|(place, words)| Some((place, str::from_utf8(&words[1..]).ok()?))) {
            Some((place, words)) => Ok(Some((storage::locate_written(place)?, words.to_owned()))),
            None => Err(Fault::data("this file does not say where checkpoints lie")
                .at(path.display().to_string())
                .wanted("a place on the first line, a word on the second")
                .hint("restore the file from a backup")),
        }
    }

    /// Records the place of the checkpoints and, separated by spaces, the keys of which it holds one.
    fn know(&self, place: &Location, words: &str) -> Result<()> {
        let text = [&storage::written(place), format!("\n{words}\n").as_bytes()].concat();
        write_atomic(&self.root.join(ELSEWHERE), &text)
    }

    fn gone(&self, place: &Location) -> Fault {
        let at = self.root.join(ELSEWHERE);
        Fault::data("the checkpoints of this run are not where it left them")
            .at(place.to_string())
            .hint(format!(
                "mount it, or name the place that they moved to: ztrain --curriculum ... --checkpoints PLACE; \
                 without {}, and with --restart, all steps are computed again",
                at.display()
            ))
    }

    /// A key that is unique to this folder.
    fn word(&self) -> String {
        let (root, now) = (std::path::absolute(&self.root), events::now());
        Digest::of_bytes(format!("{root:?} {now} {}", std::process::id()).as_bytes()).to_string()
    }

    /// Takes the folder for the processes of this run, once no other run holds it.
    pub fn take(&self, locks: &RunLocks, patience: Duration) -> Result<()> {
        if self.root.join(MANIFEST).exists() {
            return Err(Fault::usage("this folder holds a store, which is never altered")
                .at(self.root.display().to_string())
                .hint("name another folder for the run with --out"));
        }
        locks.take_folder(&self.root, patience)
    }

    /// Takes the folder for `spec`: begins a run, or continues its run if that is the same one, and no source runs out
    /// by its losses. Waits up to `patience` for another process that holds it. A run whose ledger is missing begins
    /// again only with `restart`.
    pub fn open(
        &self,
        spec: &RunSpec,
        source: &Location,
        table: &KernelTable,
        locks: &RunLocks,
        patience: Duration,
        restart: bool,
    ) -> Result<OpenRun> {
        self.take(locks, patience)?;
        let writing = locks.write(patience)?;
        let head = head(spec, table)?;
        let found = Ledger::open(&self.ledger())?;
        let changes_from = match &found {
            Some(ledger) => {
                compare_heads(ledger.head(), &head, &self.ledger())?;
                let from = accept(ledger, spec, &self.ledger())?;
                recorded::extended(&spec.plan, &self.ledger(), u64::MAX)?.check_lasting()?;
                from
            }
            None => {
                self.refuse_foreign()?;
                if !restart {
                    self.refuse_bereft()?;
                }
                None
            }
        };
        let (by_hand, edits) = self.edits(spec, found.as_ref().map(Ledger::last_step))?;
        self.write_curriculum(spec, source)?;
        let ledger = match found {
            Some(ledger) => ledger,
            None => Ledger::create(&self.ledger(), head)?,
        };
        Ok(OpenRun {
            folder: self.clone(),
            ledger,
            edits,
            by_hand,
            changes_from,
            _writing: writing,
        })
    }

    /// Refuses a folder without a ledger whose `run.toml` was not written by a run: it belongs to a user.
    fn refuse_foreign(&self) -> Result<()> {
        let path = self.curriculum();
        let text = match regular::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => String::new(),
            Err(error) => return Err(Fault::io("read", &path, &error)),
        };
        let parsed = Curriculum::parse(&text, &path.display().to_string());
        if parsed.is_ok_and(|curriculum| curriculum.canonical() == text) {
            return Ok(());
        }
        Err(Fault::usage("this file is in the way: a run writes its curriculum there")
            .at(path.display().to_string())
            .wanted("a folder without it, or the folder of a run, with its ledger")
            .hint("name another folder with --out, or give the file another name"))
    }

    /// Refuses a folder with checkpoints and no ledger: a new ledger would not match them.
    fn refuse_bereft(&self) -> Result<()> {
        let Some(step) = events::kept(&self.events()) else { return Ok(()) };
        Err(Fault::data("this run's ledger is missing")
            .at(self.ledger().display().to_string())
            .wanted(format!("that of the checkpoint step-{step}, by {}", self.events().display()))
            .hint(RESTORE))
    }

    /// The differences between the curriculum and that of `run.toml`, for people. The curriculum already agrees with
    /// the ledger, so differences in `recorded` steps (the first list) are edits of `run.toml` that were never trained.
    /// An amendment of later steps in `run.toml` is not dropped silently.
    fn edits(&self, spec: &RunSpec, ledger: Option<u64>) -> Result<(Vec<String>, Vec<String>)> {
        let path = self.curriculum();
        if !path.exists() {
            return Ok(Default::default());
        }
        let text = regular::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
        let text = String::from_utf8_lossy(&text);
        let Ok(last) = Curriculum::parse(&text, &path.display().to_string()) else {
            // Safe to ignore: the ledger records what was trained, and the file is about to be rewritten.
            let found = "its text, which is not a curriculum,".to_owned();
            return Ok((vec![found], Vec::new()));
        };
        let recorded = ledger.unwrap_or(0);
        let of_step = |step| spec.curriculum.amendments.iter().any(|kept| kept.step == step);
        let lost = last.amendments.iter().find(|edit| edit.step > recorded && !of_step(edit.step));
        if let (Some(lost), Some(_)) = (lost, ledger) {
            let (edited, root) = (shell::path(&path), shell::path(&self.root));
            return Err(Fault::usage(format!(
                "the run's own curriculum amends step {}, and this one does not",
                lost.step
            ))
            .at(path.display().to_string())
            .hint(format!(
                "continue with `ztrain --curriculum {edited} --out {root}`, or take the amendment out of that file first"
            )));
        }
        let differences = last.difference(&spec.curriculum).into_iter();
        let (by_hand, edits): (Vec<_>, Vec<_>) =
            differences.partition(|edit| edit.first_step <= recorded);
        let texts =
            |list: Vec<CurriculumDifference>| list.iter().map(ToString::to_string).collect();
        Ok((
            by_hand.into_iter().map(|edit| format!("{} = {}", edit.key, edit.wanted)).collect(),
            texts(edits),
        ))
    }

    /// Writes `run.toml`: the curriculum from `source`, with absolute paths.
    pub fn write_curriculum(&self, spec: &RunSpec, source: &Location) -> Result<()> {
        let mut resolved = spec.curriculum.clone();
        let folder = source.folder();
        let added = resolved.amendments.iter_mut().filter_map(|amendment| amendment.store.as_mut());
        let named = resolved.stores.iter_mut().chain(added.map(|store| &mut store.path));
        for store in named {
            *store = match storage::resolve(&folder, store)? {
                Location::Local(path) => {
                    let whole = path.canonicalize();
                    let whole = whole.map_err(|error| Fault::io("resolve", &path, &error))?;
                    text_of(&whole)?
                }
                // An object's name is already absolute.
                object => object.to_string(),
            };
        }
        if let Some(start) = &spec.start {
            let path = start.folder();
            // A path that no longer exists is only made absolute.
            let path = path.canonicalize().or_else(|_| std::path::absolute(path));
            let path = path.map_err(|error| Fault::io("resolve", start.folder(), &error))?;
            resolved.init_from = Some(text_of(&path)?);
            start.keep(&self.root)?;
        }
        write_atomic(&self.curriculum(), resolved.canonical().as_bytes())
    }
}

/// A path as written in a curriculum.
fn text_of(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Fault::usage("this path is not UTF-8, and a curriculum is")
            .at(path.display().to_string())
            .hint("give its folders names that are")
    })
}

/// Compares a curriculum with the one that the ledger's steps were trained with: refused if it changes one of them,
/// else returns the first step that it changes.
fn accept(ledger: &Ledger, spec: &RunSpec, path: &Path) -> Result<Option<u64>> {
    let (recorded, differences) = (ledger.last_step(), differences(ledger, spec, path)?);
    match differences.first() {
        Some(first) if first.first_step <= recorded => Err(Fault::usage(format!(
            "{} was edited after the run began, and matters from step {} on; {recorded} steps are recorded",
            first.key, first.first_step
        ))
        .at(spec.curriculum.place(&first.key))
        .found(&first.found)
        .wanted(format!("{}, as in {}", first.wanted, path.display()))
        .hint("take the edit back, or train it as a run of its own with --out")),
        first => Ok(first.map(|first| first.first_step)),
    }
}

/// Refuses a curriculum that differs from the one that the recorded steps were trained with.
pub fn compare_curriculum(ledger: &Ledger, spec: &RunSpec, path: &Path) -> Result<()> {
    let (recorded, differences) = (ledger.last_step(), differences(ledger, spec, path)?);
    match differences.first().filter(|first| first.first_step <= recorded) {
        None => Ok(()),
        Some(first) => Err(Fault::mismatch(format!(
            "{} is not what the run was trained by from step {} on",
            first.key, first.first_step
        ))
        .at(spec.curriculum.place(&first.key))
        .found(&first.found)
        .wanted(format!("{}, as in {}", first.wanted, path.display()))
        .hint(
            "run.toml was edited since: `ztrain --curriculum FILE --out RUN`, with the file that the run \
             continues with, writes it again",
        )),
    }
}

/// The differences between a curriculum and the ledger's, by the first step that each affects.
fn differences(ledger: &Ledger, spec: &RunSpec, path: &Path) -> Result<Vec<CurriculumDifference>> {
    let place = format!("the curriculum in {}", path.display());
    Ok(Curriculum::parse(ledger.curriculum(), &place)?.difference(&spec.curriculum))
}

/// Writes a file atomically, unless it has this content already.
fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    if regular::read(path).is_ok_and(|before| before == bytes) {
        return Ok(());
    }
    disk::write_atomic(path, bytes).map(drop)
}

/// Line 0 of the ledger of `spec` on this machine.
pub fn head(spec: &RunSpec, table: &KernelTable) -> Result<LedgerHead> {
    let kernel_table = serde_json::to_value(table)
        .map_err(|error| Fault::bug(format!("the kernel table cannot be written: {error}")))?;
    Ok(LedgerHead {
        kind: "head".to_owned(),
        format: ledger::FORMAT,
        kernel_table,
        plan: mixer::PLAN_VERSION,
        curriculum: spec.canonical(),
        stores: spec.content.stores.clone(),
        tokenizer: spec.content.tokenizer,
        levels: table.levels().into_iter().map(str::to_owned).collect(),
        parameters: spec.names(),
    })
}

/// Refuses to continue with other data, other kernels or another model than the ledger's.
fn compare_heads(begun: &LedgerHead, now: &LedgerHead, path: &Path) -> Result<()> {
    compare_content(begun, now, path)?;
    if let Some((key, before, after)) = table_difference(&begun.kernel_table, &now.kernel_table) {
        let variable = key.strip_prefix("environment.");
        let hint = match (variable, before.as_str()) {
            (Some(name), "null") => format!("unset {name}: it chooses other kernels"),
            (Some(name), value) => format!("export {name}={value}: it chooses the kernels"),
            (None, _) => {
                "go on where it began, or train it here as a run of its own with --out".to_owned()
            }
        };
        let shown = |value: String| if value == "null" { "not set".to_owned() } else { value };
        let fault = unlike(&format!("the kernel table's {key}"), shown(after), shown(before), path);
        return Err(fault.hint(hint));
    }
    Ok(())
}

fn unlike(what: &str, found: String, wanted: String, path: &Path) -> Fault {
    let fault = Fault::mismatch(format!("{what} is not the one that this run began with"));
    fault.at(path.display().to_string()).found(found).wanted(wanted)
}

/// Refuses other data or another model than the ledger's.
pub fn compare_content(begun: &LedgerHead, now: &LedgerHead, path: &Path) -> Result<()> {
    let refused =
        |what: &str, found: String, wanted: String| Err(unlike(what, found, wanted, path));
    mixer::check_version(begun.plan).map_err(|fault| fault.at(path.display().to_string()))?;
    if begun.tokenizer != now.tokenizer {
        return refused("the tokenizer", now.tokenizer.to_string(), begun.tokenizer.to_string());
    }
    let text = |stores: &[contract::Identity]| {
        stores.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    if begun.stores != now.stores {
        let fault = unlike("the content of a store", text(&now.stores), text(&begun.stores), path);
        let sorted = |stores: &[contract::Identity]| {
            let mut stores = stores.to_vec();
            stores.sort_unstable();
            stores
        };
        if sorted(&begun.stores) == sorted(&now.stores) {
            let what = "the order of the stores";
            return Err(unlike(what, text(&now.stores), text(&begun.stores), path)
                .hint("write `stores` in the order that the run began with"));
        }
        if now.stores.starts_with(&begun.stores) {
            return Err(unlike("the list of stores", text(&now.stores), text(&begun.stores), path)
                .hint("leave the further store out, and add it from a step on: zdata amend --step N --store STORE"));
        }
        let pairs = begun.stores.iter().zip(&now.stores);
        let which = pairs.enumerate().find(|(_, (begun, now))| begun != now).map(|(at, _)| at + 1);
        let which = which.map_or_else(String::new, |at| format!(" (number {at} of `stores`)"));
        return Err(fault.hint(format!(
            "put the store that the run began with back{which}: its data is part of a run. A new run needs another --out"
        )));
    }
    let start = |head: &LedgerHead| {
        let line = head.curriculum.lines().find_map(|line| line.strip_prefix("init_from = "));
        line.unwrap_or("random").to_owned()
    };
    if start(begun) != start(now) {
        return refused("the set of initial weights", start(now), start(begun));
    }
    if begun.parameters != now.parameters {
        let count = |head: &LedgerHead| format!("{} tensors", head.parameters.len());
        return refused("the list of the model's parameters", count(now), count(begun));
    }
    Ok(())
}

/// The first entry in which two kernel tables differ, with both values.
pub fn table_difference(before: &Value, after: &Value) -> Option<(String, String, String)> {
    if let (Value::Object(left), Value::Object(right)) = (before, after) {
        let keys: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
        return keys.into_iter().find_map(|key| {
            let side = |of: &serde_json::Map<_, _>| of.get(key).cloned().unwrap_or_default();
            let (inner, before, after) = table_difference(&side(left), &side(right))?;
            let key = if inner.is_empty() { key.clone() } else { format!("{key}.{inner}") };
            Some((key, before, after))
        });
    }
    (before != after).then(|| (String::new(), before.to_string(), after.to_string()))
}
