//! Locks of folders, which the operating system drops with the process that has them, however it ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use contract::{Fault, Result, Symptom};
use store::disk;

/// The file that the process that trains holds.
pub(super) const LOCK: &str = "lock";

/// Between two looks whether the folder is free.
const LOOK: Duration = Duration::from_millis(20);

/// Takes the folder in which this lock's file lies for this process, once nobody else has it.
pub(super) fn lock_within(path: &Path, patience: Duration) -> Result<File> {
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
pub(crate) fn try_lock_run(root: &Path) -> Result<Option<File>> {
    try_lock(&root.join(LOCK))
}

fn try_lock(path: &Path) -> Result<Option<File>> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|error| Fault::io("open", path, &error))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(Fault::io("lock", path, &error)),
    }
}

/// Whether a run has taken this folder at some time: the lock's file stays.
pub(crate) fn was_taken(root: &Path) -> bool {
    root.join(LOCK).exists()
}
