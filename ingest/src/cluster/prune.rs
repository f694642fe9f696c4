//! What a folder of parts holds that no build has used for long.
//!
//! A part's time of change is when it was made or last found again. It decides nothing but this: a part that goes too
//! early is made once more.

use std::collections::BTreeSet;
use std::fs::{self, DirEntry, File};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use contract::{Fault, Identity, Result, counted};
use indicatif::HumanBytes;
use store::disk;

use super::plan::{PARTS, is_merged, is_plans, lock};
use super::result::TaskResult;

/// What became of the parts of a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Removed, or to be removed: parts, and their bytes.
    pub removed: (u64, u64),
    /// Kept, because they were used since, or a build that is not done needs them: parts, and their bytes.
    pub kept: (u64, u64),
}

impl Pruned {
    /// For people; with `look` as what would be.
    pub fn told(self, look: bool) -> String {
        let [removed, kept] = [self.removed, self.kept]
            .map(|(parts, bytes)| format!("{} ({})", counted(parts, "part"), HumanBytes(bytes)));
        match look {
            true => format!("would remove {removed}, and keep {kept}"),
            false => format!("removed {removed}, kept {kept}"),
        }
    }
}

/// Removes the parts in `work` that were not used for `unused`, or with `look` only counts them. Refused while a build
/// works there; parts that the results of a build name that is not done stay, and so do results that are in conflict.
pub fn prune(work: &Path, unused: Duration, look: bool) -> Result<Pruned> {
    let parts = work.join(PARTS);
    if !parts.is_dir() {
        return Err(Fault::usage("this folder holds no parts")
            .at(work.display().to_string())
            .wanted("the --work folder of a build"));
    }
    let _lock = lock(work)?;
    let needed = needed(work)?;
    let mut pruned = Pruned::default();
    for entry in entries(&parts)? {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(key) = name.strip_suffix(".bin") else { continue };
        let about = entry.metadata().map_err(|error| Fault::io("look at", &path, &error))?;
        let used = about.modified().map_err(|error| Fault::io("look at", &path, &error))?;
        // A time that lies ahead is another machine's clock: just used.
        let since = today().duration_since(used).unwrap_or_default();
        let goes = since >= unused && !needed.contains(key);
        let side = if goes { &mut pruned.removed } else { &mut pruned.kept };
        *side = (side.0 + 1, side.1 + about.len());
        if goes && !look {
            disk::remove(&path)?;
        }
    }
    Ok(pruned)
}

/// Says of a part that it was used now.
pub(super) fn used(part: &Path) {
    // Where another user made it, it keeps its time: at worst it is made again one day.
    let _ = File::open(part).and_then(|part| part.set_modified(today()));
}

#[expect(
    clippy::disallowed_methods,
    reason = "how long a part lay unused decides only whether it is made again"
)]
fn today() -> SystemTime {
    SystemTime::now()
}

/// The keys of the parts that builds name which are not done.
fn needed(work: &Path) -> Result<BTreeSet<String>> {
    let mut needed = BTreeSet::new();
    let needs = |entry: &DirEntry| {
        let (name, folder) = (entry.file_name(), entry.path());
        name.to_str().is_some_and(is_plans) && folder.is_dir() && !is_merged(&folder)
    };
    for folder in entries(work)?.into_iter().filter(needs) {
        for entry in entries(&folder.path())? {
            let path = entry.path();
            if path.extension().is_some_and(|ending| ending == "json") {
                needed.insert(part(&path)?.to_string());
            }
        }
    }
    Ok(needed)
}

/// The part that a result names.
fn part(path: &Path) -> Result<Identity> {
    let bytes = fs::read(path).map_err(|error| Fault::io("read", path, &error))?;
    TaskResult::parse(path, &bytes).map(|result| result.part)
}

fn entries(folder: &Path) -> Result<Vec<DirEntry>> {
    let listed = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    listed.map_err(|error| Fault::io("list", folder, &error))
}
