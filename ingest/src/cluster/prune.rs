//! What a folder of parts holds that no build has used for long.
//!
//! A part's time of change is when it was made or last found again. It decides nothing but this: a part that goes too
//! early is made once more.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use contract::{Fault, Identity, Result, counted};
use indicatif::HumanBytes;
use store::{disk, regular};

use super::plan::{PARTS, is_merged, is_plans, lock, name_of};
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
    for path in disk::entries(&parts)? {
        let Some(key) = name_of(&path).strip_suffix(".bin") else { continue };
        let about = path.symlink_metadata().map_err(|error| Fault::io("look at", &path, &error))?;
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
    let _ = regular::open(part).and_then(|part| part.set_modified(today()));
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
    let needs =
        |folder: &PathBuf| is_plans(name_of(folder)) && folder.is_dir() && !is_merged(folder);
    for folder in disk::entries(work)?.into_iter().filter(needs) {
        for path in disk::entries(&folder)? {
            if path.extension().is_some_and(|ending| ending == "json") {
                needed.insert(part(&path)?.to_string());
            }
        }
    }
    Ok(needed)
}

/// The part that a result names.
fn part(path: &Path) -> Result<Identity> {
    let bytes = regular::read(path).map_err(|error| Fault::io("read", path, &error))?;
    TaskResult::parse(path, &bytes).map(|result| result.part)
}
