//! What a folder of parts holds that no build has used for long.
//!
//! A part's time of change is when it was made or last found again. It decides nothing but this: a part that goes too
//! early is made once more.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use contract::{Fault, Result, counted};
use indicatif::HumanBytes;
use store::{disk, regular};

use super::result::TaskResult;
use crate::cache_dir::{CacheDir, PLAN};

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
    let cache = CacheDir::open(work)?;
    let _lock = disk::lock(work)?;
    let needed = needed(&cache)?;
    let mut pruned = Pruned::default();
    for path in cache.parts()? {
        let about = path.symlink_metadata().map_err(|error| Fault::io("look at", &path, &error))?;
        let used = about.modified().map_err(|error| Fault::io("look at", &path, &error))?;
        // A time that lies ahead is another machine's clock: just used.
        let since = today().duration_since(used).unwrap_or_default();
        let goes = since >= unused && !needed.contains(&path);
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

/// The parts that plans name whose stores are not made.
fn needed(cache: &CacheDir) -> Result<BTreeSet<PathBuf>> {
    let mut needed = BTreeSet::new();
    for plan in cache.plans()?.into_iter().filter(|plan| !cache.is_done(*plan)) {
        for path in disk::entries(&cache.plan(plan))? {
            if path.extension().is_some_and(|it| it == "json") && !path.ends_with(PLAN) {
                let bytes =
                    regular::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
                needed.insert(cache.part(TaskResult::parse(&path, &bytes)?.part));
            }
        }
    }
    Ok(needed)
}
