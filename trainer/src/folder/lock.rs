//! Locks of folders, which the operating system drops with the process that has them, however it ends.

use std::path::Path;
use std::time::{Duration, Instant};

use contract::{Fault, Result, Symptom};
use store::disk::{self, Log};

/// The file that the process that trains holds.
pub(super) const LOCK: &str = "lock";

/// Between two looks whether the folder is free.
const LOOK: Duration = Duration::from_millis(20);

/// Takes the folder in which this lock's file lies for this process, once nobody else has it.
pub(super) fn lock_within(path: &Path, patience: Duration) -> Result<Log> {
    let start = Instant::now();
    loop {
        if let Some(file) = try_lock(path)? {
            return Ok(file);
        }
        if start.elapsed() >= patience {
            return Err(Fault::machine("another run is using this folder")
                .at(disk::folder_of(path).display().to_string())
                .hint("wait for it, stop it, or name another folder with --out or --checkpoints")
                .sign_of(Symptom::InUse));
        }
        std::thread::sleep(LOOK);
    }
}

/// Takes a run's folder; `None` where another process has it.
pub(crate) fn try_lock_run(root: &Path) -> Result<Option<Log>> {
    try_lock(&root.join(LOCK))
}

fn try_lock(path: &Path) -> Result<Option<Log>> {
    let file = Log::open(path).map_err(|error| Fault::io("open", path, &error))?;
    let free = disk::hold(file.file()).map_err(|error| Fault::io("lock", path, &error))?;
    Ok(free.then_some(file))
}

/// Whether a run has taken this folder at some time: the lock's file stays.
pub(crate) fn was_taken(root: &Path) -> bool {
    root.join(LOCK).exists()
}
