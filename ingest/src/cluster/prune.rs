//! Removes parts that no build has used for a long time.
//!
//! A part's modification time is when it was made or last reused. Nothing else depends on it: a part that is removed
//! too early is made again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use contract::{Fault, Result, counted};
use indicatif::HumanBytes;
use store::{disk, regular};

use super::result::TaskResult;
use crate::cache_dir::{CacheDir, PLAN};

/// What happened to the parts of a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Parts removed, or to be removed, and their bytes.
    pub removed: (u64, u64),
    /// Parts kept, because they were used since then or an unfinished build needs them, and their bytes.
    pub kept: (u64, u64),
}

impl Pruned {
    /// A message for users; with `look`, of what would be removed.
    pub fn told(self, look: bool) -> String {
        let [removed, kept] = [self.removed, self.kept]
            .map(|(parts, bytes)| format!("{} ({})", counted(parts, "part"), HumanBytes(bytes)));
        match look {
            true => format!("would remove {removed}, and keep {kept}"),
            false => format!("removed {removed}, kept {kept}"),
        }
    }
}

/// Removes the parts in `work` that were not used for `unused`; with `look`, only counts them. Refused while a build
/// works there. Parts that results of unfinished builds name stay, and so do conflicting results.
pub fn prune(work: &Path, unused: Duration, look: bool) -> Result<Pruned> {
    let cache = CacheDir::open(work)?;
    let _lock = disk::lock(work)?;
    let needed = needed(&cache)?;
    let mut pruned = Pruned::default();
    for path in cache.parts()? {
        let about = path.symlink_metadata().map_err(|error| Fault::io("look at", &path, &error))?;
        let used = about.modified().map_err(|error| Fault::io("look at", &path, &error))?;
        // A time in the future comes from another machine's clock: treat it as just used.
        let since = today().duration_since(used).unwrap_or_default();
        let goes = since >= unused && !needed.contains(&path);
        let side = if goes { &mut pruned.removed } else { &mut pruned.kept };
        // An encoded part is a folder, next to the record by which it is known.
        let folder = path.with_extension("");
        *side = (side.0 + 1, side.1 + about.len() + size_of(&folder)?);
        if goes && !look {
            disk::remove(&path)?;
            disk::remove(&folder)?;
        }
    }
    Ok(pruned)
}

/// The size of the files in a folder, if there is one.
fn size_of(folder: &Path) -> Result<u64> {
    if !folder.is_dir() {
        return Ok(0);
    }
    let size = |path: &PathBuf| {
        let about = path.symlink_metadata();
        about.map(|about| about.len()).map_err(|error| Fault::io("look at", path, &error))
    };
    disk::entries(folder)?.iter().map(size).sum()
}

/// Marks a part as used now.
pub(super) fn used(part: &Path) {
    // The time of another user's part cannot be set: at worst it is made again one day.
    let _ = regular::open(part).and_then(|part| part.set_modified(today()));
}

#[expect(
    clippy::disallowed_methods,
    reason = "how long a part lay unused decides only whether it is made again"
)]
fn today() -> SystemTime {
    SystemTime::now()
}

/// The parts that are named by plans whose stores are not complete.
fn needed(cache: &CacheDir) -> Result<BTreeSet<PathBuf>> {
    let mut needed = BTreeSet::new();
    for plan in cache.plans()?.into_iter().filter(|plan| !cache.is_done(*plan)) {
        for path in disk::entries(&cache.plan(plan))? {
            if path.extension().is_some_and(|it| it == "json") && !path.ends_with(PLAN) {
                let bytes =
                    regular::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
                let key = TaskResult::parse(&path, &bytes)?.part;
                needed.extend([cache.part(key), cache.part_record(key)]);
            }
        }
    }
    Ok(needed)
}
