//! Exclusive locks on folders and files for one process; for locks of a group see [`super::Held`], which says why these
//! are two.
//!
//! Where a file system has no locks, a lease replaces one: a file next to the locked path, created only if it does not
//! exist, that names its holder. If the holder ended without removing it, its own machine recognizes that by the
//! process number; from another machine a user has to remove the file, which the error names.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Once;
use std::time::Duration;

use contract::{Fault, Result, note};

use super::{beside, rename};

/// The suffix of a lease's name.
const LEASE: &str = ".lock";

/// How often a briefly held lease is retried, and how long to wait in between.
const LOOKS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// An exclusive lock on a folder, until this is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    _folder: File,
    _lease: Option<Lease>,
}

/// Locks `folder`, which must exist.
pub fn lock(folder: &Path) -> Result<Lock> {
    let busy = |hint: &str| {
        Fault::machine("another run is writing this folder")
            .at(folder.display().to_string())
            .hint(hint)
    };
    let wait = "wait for it, or name another folder";
    let open = File::open(folder).map_err(|error| Fault::io("open", folder, &error))?;
    let lease = match hold(&open) {
        Ok(true) => None,
        Ok(false) => return Err(busy(wait)),
        Err(error) if is_lockless(&error) => {
            let lease = lease(folder).map_err(|error| Fault::io("lock", folder, &error))?;
            let file = beside(folder, LEASE);
            let held = || {
                let (by, file) = (fs::read_to_string(&file).unwrap_or_default(), file.display());
                busy(&format!("{wait}; if its process has ended, remove {file}"))
                    .found(format!("a lease of {}", by.trim()))
            };
            let lease = lease.ok_or_else(held)?;
            static NOTED: Once = Once::new();
            let (folder, file) = (folder.display(), file.display());
            NOTED.call_once(|| {
                note!("note: {folder}: this file system knows no locks: {file} stands for one");
            });
            Some(lease)
        }
        Err(error) => return Err(Fault::io("lock", folder, &error)),
    };
    // The previous holder may have renamed it between our open and our lock.
    match is_at(&open, folder) {
        true => Ok(Lock { _folder: open, _lease: lease }),
        false => Err(busy(wait)),
    }
}

/// Whether the open file is the one at `path`.
pub(super) fn is_at(open: &File, path: &Path) -> bool {
    let place = |about: fs::Metadata| (about.ino(), about.dev());
    let same = || Ok::<_, io::Error>(place(open.metadata()?) == place(path.metadata()?));
    same().unwrap_or(false)
}

/// Locks an open file exclusively until it is closed; returns whether it was free.
pub fn hold(open: &File) -> io::Result<bool> {
    match open.try_lock() {
        Ok(()) => Ok(true),
        Err(fs::TryLockError::WouldBlock) => Ok(false),
        Err(fs::TryLockError::Error(error)) => Err(error),
    }
}

/// Whether an error on locking means that the file system has no locks.
pub fn is_lockless(error: &io::Error) -> bool {
    is_unsupported(error) || error.raw_os_error() == Some(libc::ENOLCK)
}

/// Whether an error means that the file system does not support the operation at all.
pub(super) fn is_unsupported(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    error.kind() == ErrorKind::Unsupported || matches!(code, Some(libc::EINVAL | libc::ENOTTY))
}

/// Whether an error on linking means that the file system has no hard links.
pub(super) fn is_linkless(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    is_unsupported(error) || matches!(code, Some(libc::EPERM | libc::EMLINK))
}

/// The file that names the holder of the path it lies next to; removed on drop.
#[derive(Debug)]
pub(super) struct Lease(PathBuf);

impl Drop for Lease {
    fn drop(&mut self) {
        // If it stays, it names a process that has ended.
        let _ = fs::remove_file(&self.0);
    }
}

/// Takes the lease of `path` as soon as it is free; it is only ever held briefly.
pub(super) fn wait_for_lease(path: &Path) -> io::Result<Lease> {
    for _ in 0..LOOKS {
        match lease(path)? {
            Some(lease) => return Ok(lease),
            None => std::thread::sleep(PAUSE),
        }
    }
    let file = beside(path, LEASE);
    let what = format!("{} is held; if its process has ended, remove it", file.display());
    Err(io::Error::new(ErrorKind::ResourceBusy, what))
}

/// Takes the lease of `path`, unless its holder may be alive.
pub(super) fn lease(path: &Path) -> io::Result<Option<Lease>> {
    let (file, own) = (beside(path, LEASE), holder(process::id()));
    match File::create_new(&file) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
        Ok(mut new) => {
            let lease = Lease(file);
            new.write_all(own.unwrap_or_default().as_bytes())?;
            return Ok(Some(lease));
        }
    }
    let gone = |error: &io::Error| error.kind() == ErrorKind::NotFound;
    let there = match fs::read_to_string(&file) {
        Err(error) if gone(&error) => return lease(path),
        there => there?,
    };
    if !has_ended(&there) {
        return Ok(None);
    }
    // Only one of the processes that find it removes it, and only the file that was found.
    let away = beside(&file, &format!(".{}", process::id()));
    match rename(&file, &away) {
        Err(error) if gone(&error) => return lease(path),
        renamed => renamed?,
    }
    let is_it = fs::read_to_string(&away)? == there;
    if !is_it {
        rename(&away, &file)?;
        return Ok(None);
    }
    fs::remove_file(&away)?;
    lease(path)
}

/// Whether the lease was written by a process of this machine that has ended.
fn has_ended(lease: &str) -> bool {
    let number = || lease.split_whitespace().nth(1)?.parse().ok();
    let machine = |text: &str| text.lines().nth(1).map(str::to_owned);
    let here = machine(&holder(process::id()).unwrap_or_default());
    match number() {
        Some(number) => {
            here.is_some()
                && machine(lease) == here
                && holder(number).as_deref().and_then(|now| now.lines().next())
                    != lease.lines().next()
        }
        None => false,
    }
}

/// Identifies a process of this machine: its number and start time; on a second line, the boot of the machine and the
/// process namespace.
fn holder(process: u32) -> Option<String> {
    let about = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may hold anything; the start time is the twentieth number after it.
    let began = about.rsplit_once(')')?.1.split_whitespace().nth(19)?;
    let word = |path: &str| Some(fs::read_to_string(path).ok()?.trim().to_owned());
    let host = word("/proc/sys/kernel/hostname")?;
    let boot = word("/proc/sys/kernel/random/boot_id")?;
    let realm = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("process {process} since {began}\non {host} {boot} {}\n", realm.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_held_by_one_and_ends_with_its_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("held");
        let file = beside(&path, LEASE);
        let first = lease(&path).unwrap().unwrap();
        assert!(lease(&path).unwrap().is_none(), "this process lives");
        drop(first);
        assert!(!file.exists());
        let own = holder(process::id()).unwrap();
        let mut child = process::Command::new("true").spawn().unwrap();
        let ended = own
            .replace(&format!("process {} ", process::id()), &format!("process {} ", child.id()));
        child.wait().unwrap();
        let another = own.replace(" since ", " since 1");
        for (left, free) in [
            (ended.as_str(), true),
            // The number was given to another process since.
            (&another, true),
            (&own, false),
            // Of a machine that cannot be checked from here, or with an incomplete line.
            (&another.replace("\non ", "\non a"), false),
            ("", false),
        ] {
            fs::write(&file, left).unwrap();
            assert_eq!(lease(&path).unwrap().is_some(), free, "{left}");
            let _ = fs::remove_file(&file);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
