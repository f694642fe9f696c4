//! Locks of folders, which the operating system releases when the process ends, however that happens.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use contract::{Fault, Result, Symptom};
use store::Location;
use store::disk::{self, AppendFile, Held, Writing};

/// The lock of a run's folder, shared by every process of the run.
const LOCK: &str = "lock";

/// The lock of a place for checkpoints, which may be a run's folder too.
const PLACE_LOCK: &str = "owner.lock";

/// How long to wait for the previous process of the same run to stop writing.
const PREDECESSOR: Duration = Duration::from_secs(10);

/// The locks that each process of a run shares: the run's folder, and the place of its checkpoints if that is
/// elsewhere. So both stay locked until the last process ends, in any order.
#[derive(Debug, Default)]
pub struct RunLocks {
    /// The group name that these processes share.
    group: OnceLock<String>,
    folder: OnceLock<Held>,
    place: OnceLock<Held>,
}

impl RunLocks {
    /// For a process that was started by another one of this group; `None` for the first process of a group.
    pub fn of(group: Option<String>) -> RunLocks {
        let group = group.map(OnceLock::from).unwrap_or_default();
        RunLocks { group, ..RunLocks::default() }
    }

    /// The name of the group.
    pub fn group(&self) -> &str {
        self.group.get_or_init(disk::draw_group)
    }

    /// Takes the run's folder `root`, once it is free.
    pub(super) fn take_folder(&self, root: &Path, patience: Duration) -> Result<()> {
        take(&self.folder, self.group(), &root.join(LOCK), patience)
    }

    /// The same for a place for checkpoints.
    pub(super) fn take_place(&self, root: &Path, patience: Duration) -> Result<()> {
        take(&self.place, self.group(), &root.join(PLACE_LOCK), patience)
    }

    /// Joins the group of the rank that took the locks, for the folder and the checkpoints as far as this rank's
    /// machine sees them.
    pub(crate) fn join(&self, group: &str, root: &Path, place: &Location) -> Result<()> {
        let group = self.group.get_or_init(|| group.to_owned());
        join(&self.folder, group, &root.join(LOCK))?;
        match place {
            Location::Local(place) => join(&self.place, group, &place.join(PLACE_LOCK)),
            Location::Object(_) => Ok(()),
        }
    }

    /// Joins the lock of the process that started this one on the run's folder, if this machine sees it.
    pub fn follow(&self, root: &Path) -> Result<()> {
        self.group.get().map_or(Ok(()), |group| join(&self.folder, group, &root.join(LOCK)))
    }

    /// Takes the right to write in the run's folder, once no other rank has it.
    pub(super) fn write(&self, patience: Duration) -> Result<Writing> {
        let held = self.folder.get().ok_or_else(|| Fault::bug("the run's folder is not held"))?;
        held.write(patience.max(PREDECESSOR))?.ok_or_else(|| {
            Fault::machine("another process of this run still writes in its folder")
                .hint("end it, then run the same command again")
        })
    }

    /// Stops if another run has taken the folder or the place of the checkpoints.
    pub(crate) fn check(&self) -> Result<()> {
        let is_lost = |held: &OnceLock<Held>| held.get().is_some_and(Held::is_lost);
        if !is_lost(&self.folder) && !is_lost(&self.place) {
            return Ok(());
        }
        Err(Fault::machine("another run has taken this folder, while this one stood still")
            .hint("one of them may go on: stop the other, then run the same command again")
            .sign_of(Symptom::InUse))
    }

    /// Releases the locks.
    pub fn release(self) {
        let held = [self.place, self.folder].into_iter().filter_map(OnceLock::into_inner);
        held.for_each(Held::let_go);
    }
}

fn take(held: &OnceLock<Held>, group: &str, path: &Path, patience: Duration) -> Result<()> {
    if held.get().is_some() {
        return Ok(());
    }
    let taken = Held::take(path, group, patience)?.map_err(|holder| {
        Fault::machine("another run is using this folder")
            .at(disk::folder_of(path).display().to_string())
            .found(holder)
            .hint("wait for it, stop it, or name another folder with --out or --checkpoints")
            .sign_of(Symptom::InUse)
    })?;
    // Only this thread sets it.
    let _ = held.set(taken);
    Ok(())
}

fn join(held: &OnceLock<Held>, group: &str, path: &Path) -> Result<()> {
    if held.get().is_none()
        && let Some(joined) = Held::join(path, group)?
    {
        let _ = held.set(joined);
    }
    Ok(())
}

/// Locks a folder for this process alone; `None` if another process holds it.
pub(crate) fn try_lock(root: &Path) -> Result<Option<AppendFile>> {
    let path = root.join(LOCK);
    let file = AppendFile::open(&path).map_err(|error| Fault::io("open", &path, &error))?;
    let free = disk::hold(file.file()).map_err(|error| Fault::io("lock", &path, &error))?;
    Ok(free.then_some(file))
}

/// Whether a run ever used this folder: the lock file stays.
pub fn was_taken(root: &Path) -> bool {
    root.join(LOCK).exists()
}
