//! A lock file shared by all processes of a group: a folder is theirs until the last one ends, in whatever order they
//! end.
//!
//! Each process holds a shared lock of the operating system, which ends with the process. Such locks may not reach
//! other machines, and some file systems have none. So the file also contains a lease: a line that names the group and
//! one of its processes, renewed by any of them. A process of another group that cannot see the locks of the lease's
//! machine takes the file only after the line has not changed for some time.
//!
//! ```text
//! lock           the lease, and a shared lock of every process of the group
//! lock.writer    an exclusive lock of the one process that takes the file, or writes for the group
//! ```
//!
//! An exclusive lock cannot become a shared one atomically, so a process that takes the file also holds the second one.
//!
//! [`super::lock()`] is for a single process: its output is renamed or removed, so it locks the folder itself and
//! leaves no file in it, and on the same machine the lock of a killed process ends at once. Here, processes on several
//! machines hold a folder that outlives them, which needs files, names and a thread.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use contract::{Digest, Fault, Result};

use super::lock::{is_at, is_lockless};
use super::{beside, create_folder, entries, folder_of, remove, remove_if_empty};
use crate::regular;

/// The timing of a lease.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// The time between checks of the own lease, which is renewed unless another process renewed it since the last
    /// check.
    period: Duration,
    /// A lease of another machine that did not change for this long has expired.
    lease: Duration,
}

/// See [`Times`].
const TIMES: Times = Times { period: Duration::from_secs(5), lease: Duration::from_secs(20) };

/// The time between checks whether a file is free.
const LOOK: Duration = Duration::from_millis(20);

/// Without locks, two processes may write at once: the one whose line is still there after this time has the file.
const SETTLE: Duration = Duration::from_millis(500);

/// The suffix of the second file's name.
const WRITER: &str = ".writer";

/// This process's hold on a file of its group.
#[derive(Debug)]
pub struct Held {
    file: File,
    path: PathBuf,
    /// Whether this call created the folder.
    made: bool,
    lost: Arc<AtomicBool>,
    renewing: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The right to write for the group, until it is dropped.
#[derive(Debug)]
pub struct Writing {
    _exclusive: File,
}

/// The lease: which group holds a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lease {
    group: String,
    /// How often it was renewed.
    renewed: u64,
    /// The boot of the machine that renewed it last: its locks can be seen only there.
    boot: String,
    process: u32,
    host: String,
}

/// The result of a lock attempt.
#[derive(PartialEq, Eq)]
enum Lock {
    Got,
    Busy,
    /// The file system has no locks.
    Missing,
}

impl Held {
    /// Takes the file at `path` for `group`, or joins that group; creates its folder if missing. Waits up to `patience`
    /// for a file that others hold; then returns who they are.
    pub fn take(
        path: &Path,
        group: &str,
        patience: Duration,
    ) -> Result<std::result::Result<Held, String>> {
        let made = !folder_of(path).exists();
        create_folder(folder_of(path))?;
        let taken = Held::take_by(path, group, patience, TIMES);
        let mut taken = taken.map_err(|error| Fault::io("open", path, &error))?;
        if let Ok(held) = &mut taken {
            held.made = made;
        }
        Ok(taken)
    }

    fn take_by(
        path: &Path,
        group: &str,
        patience: Duration,
        times: Times,
    ) -> io::Result<std::result::Result<Held, String>> {
        let start = Instant::now();
        let mut seen: Option<(Option<Lease>, Instant)> = None;
        loop {
            if let Some(held) = Held::join_by(path, group, times)? {
                return Ok(Ok(held));
            }
            let writing = Writing::of(path)?;
            let file = open(path)?;
            let lock = if writing.is_some() { lock(&file)? } else { Lock::Busy };
            let found = Lease::read(&file)?;
            let is_free = lock != Lock::Busy && is_at(&file, path);
            // A process killed by a signal leaves a line of this machine, but the locks show that it ended.
            let is_of_others = |lease: &Lease| lock == Lock::Missing || lease.boot != boot();
            let unsure = is_free && found.as_ref().is_some_and(is_of_others);
            let (same, over) = match &seen {
                _ if !unsure => (true, true),
                Some((before, since)) => (*before == found, since.elapsed() >= times.lease),
                None => {
                    let (who, seconds) = (words(found.as_ref()), times.lease.as_secs());
                    contract::note!(
                        "note: {} is held by {who}: it is taken if that is not renewed within {seconds} s",
                        path.display()
                    );
                    seen = Some((found.clone(), Instant::now()));
                    (true, false)
                }
            };
            if is_free && same && over {
                Lease::new(group).write(&file)?;
                match lock {
                    Lock::Missing => thread::sleep(SETTLE),
                    _ => file.lock_shared()?,
                }
                if Lease::read(&file)?.is_some_and(|lease| lease.group == group) {
                    return Held::new(file, path, group, times).map(Ok);
                }
            }
            if !(is_free && same) && start.elapsed() >= patience {
                return Ok(Err(words(found.as_ref())));
            }
            seen = seen.filter(|_| same);
            drop((file, writing));
            thread::sleep(LOOK);
        }
    }

    /// Joins the processes of `group` that hold the file at `path`; `None` if another group or no process holds it.
    pub fn join(path: &Path, group: &str) -> Result<Option<Held>> {
        let joined = Held::join_by(path, group, TIMES);
        joined.map_err(|error| Fault::io("open", path, &error))
    }

    fn join_by(path: &Path, group: &str, times: Times) -> io::Result<Option<Held>> {
        if !path.exists() {
            return Ok(None);
        }
        let file = open(path)?;
        let is_ours = || {
            let found = Lease::read(&file)?;
            Ok::<_, io::Error>(found.is_some_and(|lease| lease.group == group))
        };
        if !is_ours()? || answer(file.try_lock_shared())? == Lock::Busy || !is_ours()? {
            return Ok(None);
        }
        Held::new(file, path, group, times).map(Some)
    }

    fn new(file: File, path: &Path, group: &str, times: Times) -> io::Result<Held> {
        let (sender, receiver) = channel();
        let lost = Arc::new(AtomicBool::new(false));
        let (place, group, flag) = (path.to_owned(), group.to_owned(), Arc::clone(&lost));
        let work = move || renew(&place, &group, &flag, times.period, &receiver);
        let thread = thread::Builder::new().name("lease".to_owned()).spawn(work)?;
        let (path, renewing) = (path.to_owned(), Some((sender, thread)));
        Ok(Held { file, path, made: false, lost, renewing })
    }

    /// Waits up to `patience` for the right to write for the group; one of its processes has it at a time.
    pub fn write(&self, patience: Duration) -> Result<Option<Writing>> {
        let start = Instant::now();
        loop {
            let writing = Writing::of(&self.path);
            let writing = writing.map_err(|error| Fault::io("open", &self.path, &error))?;
            if writing.is_some() || start.elapsed() >= patience {
                return Ok(writing);
            }
            thread::sleep(LOOK);
        }
    }

    /// Whether another group has taken the file because this group did not renew its lease in time.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Ends normally: the last process of the group empties the file, so that other machines need not wait. A folder
    /// that was created for the file is removed with it if it holds nothing else.
    pub fn let_go(mut self) {
        self.end();
        if self.is_lost() || !lock(&self.file).is_ok_and(|lock| lock != Lock::Busy) {
            return;
        }
        // A failure here only costs another machine some seconds.
        let _ = self.file.set_len(0);
        let own = [self.path.clone(), beside(&self.path, WRITER)];
        let folder = folder_of(&self.path);
        if self.made && entries(folder).is_ok_and(|all| all.iter().all(|path| own.contains(path))) {
            let _ = own.iter().try_for_each(|path| remove(path));
            remove_if_empty(folder);
        }
    }

    /// Ends the thread that renews the lease.
    fn end(&mut self) {
        if let Some((sender, thread)) = self.renewing.take() {
            drop(sender);
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.end();
    }
}

impl Writing {
    /// The right to write next to the file at `path`; `None` where another process has it.
    fn of(path: &Path) -> io::Result<Option<Writing>> {
        let path = beside(path, WRITER);
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = open(&path).map_err(named)?;
        Ok((lock(&file)? != Lock::Busy && is_at(&file, &path))
            .then_some(Writing { _exclusive: file }))
    }
}

impl Lease {
    /// A new lease of this process.
    fn new(group: &str) -> Lease {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let (group, host, process) = (group.to_owned(), host.trim().to_owned(), std::process::id());
        Lease { group, renewed: 0, boot: boot(), process, host }
    }

    /// The lease in an open file; `None` if the file has none.
    fn read(file: &File) -> io::Result<Option<Lease>> {
        let mut bytes = [0; 512];
        let length = file.read_at(&mut bytes, 0)?;
        Ok(Lease::parse(&String::from_utf8_lossy(&bytes[..length])))
    }

    fn parse(text: &str) -> Option<Lease> {
        let line = text.lines().next().filter(|line| !line.is_empty())?;
        let mut words = line.splitn(5, ' ').map(str::to_owned);
        let mut next = || words.next().unwrap_or_default();
        let (group, renewed, boot) = (next(), next().parse().unwrap_or(0), next());
        // Anything else was not written by a process that holds the file.
        Some(Lease { group, renewed, boot, process: next().parse().ok()?, host: next() })
    }

    /// Overwrites the lease in the file, in one call.
    fn write(&self, file: &File) -> io::Result<()> {
        let Lease { group, renewed, boot, process, host } = self;
        let line = format!("{group} {renewed:020} {boot} {process} {host}\n");
        file.write_all_at(line.as_bytes(), 0)?;
        file.set_len(line.len() as u64)?;
        // Other machines see only synced bytes.
        file.sync_data()
    }
}

/// Who holds a file, for messages.
fn words(lease: Option<&Lease>) -> String {
    let named = |lease: &Lease| format!("process {} on {}", lease.process, lease.host);
    lease.map_or_else(|| "a process that has not given its name yet".to_owned(), named)
}

/// A unique name for a group.
pub fn draw_group() -> String {
    let mut chance = [0; 16];
    // If this fails, process and machine still tell groups apart.
    let _ = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut chance));
    let words = format!("{chance:?} {} {}", boot(), std::process::id());
    Digest::of_bytes(words.as_bytes()).to_string()
}

/// Renews the lease until `end` is closed or another group has the file.
fn renew(path: &Path, group: &str, lost: &AtomicBool, period: Duration, end: &Receiver<()>) {
    let mut seen = None;
    while end.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
        // A folder that was moved is held by the lock alone.
        let Ok(file) = File::options().read(true).write(true).open(path) else { continue };
        let Ok(found) = Lease::read(&file) else { continue };
        let renewed = found.as_ref().map_or(0, |lease| lease.renewed);
        match found {
            Some(lease) if lease.group != group => return lost.store(true, Ordering::Relaxed),
            Some(_) if seen != Some(renewed) => seen = Some(renewed),
            _ => {
                let renewed = renewed + 1;
                // A failed renewal is tried again before the lease expires.
                if (Lease { renewed, ..Lease::new(group) }).write(&file).is_ok() {
                    seen = Some(renewed);
                }
            }
        }
    }
}

/// Identifies a machine and its boot: containers of one machine share its locks.
fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Opens or creates the file.
fn open(path: &Path) -> io::Result<File> {
    if path.exists() {
        regular::size(path)?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK);
    options.open(path)
}

/// Locks an open file exclusively.
fn lock(file: &File) -> io::Result<Lock> {
    answer(file.try_lock())
}

fn answer(tried: std::result::Result<(), TryLockError>) -> io::Result<Lock> {
    match tried {
        Ok(()) => Ok(Lock::Got),
        Err(TryLockError::WouldBlock) => Ok(Lock::Busy),
        Err(TryLockError::Error(error)) if is_lockless(&error) => Ok(Lock::Missing),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Times =
        Times { period: Duration::from_millis(5), lease: Duration::from_millis(50) };

    fn free(path: &Path) -> bool {
        let taken = Held::take_by(path, "others", Duration::ZERO, TIMES).unwrap();
        taken.map(Held::let_go).is_ok()
    }

    fn take(path: &Path, times: Times) -> Held {
        Held::take_by(path, "ours", Duration::ZERO, times).unwrap().unwrap()
    }

    /// A lease of another machine, with this many renewals.
    fn elsewhere(path: &Path, renewed: u64) {
        let boot = "another boot".replace(' ', "-");
        Lease { boot, renewed, ..Lease::new("theirs") }.write(&open(path).unwrap()).unwrap();
    }

    #[test]
    fn a_file_is_its_groups_until_the_last_of_them_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let (first, second) = (take(&path, TIMES), take(&path, TIMES));
        let who = Held::take_by(&path, "others", Duration::ZERO, TIMES).unwrap().unwrap_err();
        assert!(who.starts_with(&format!("process {} on ", std::process::id())), "{who}");
        // One of them writes at a time, and that right too ends with the process.
        let writing = first.write(Duration::ZERO).unwrap().unwrap();
        assert!(second.write(Duration::ZERO).unwrap().is_none());
        drop((first, writing));
        assert!(second.write(Duration::ZERO).unwrap().is_some() && !free(&path));
        drop(second);
        assert!(free(&path) && Held::join(&path, "ours").unwrap().is_none());
    }

    #[test]
    fn no_moment_is_free_while_processes_of_a_group_come_and_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let mut held = take(&path, TIMES);
        let over = Arc::new(AtomicBool::new(false));
        let (flag, place) = (Arc::clone(&over), path.clone());
        let stranger = thread::spawn(move || {
            let mut looks = 0;
            while !flag.load(Ordering::Relaxed) {
                assert!(!free(&place), "it was free");
                looks += 1;
            }
            looks
        });
        for _ in 0..300 {
            held = take(&path, TIMES);
        }
        over.store(true, Ordering::Relaxed);
        assert!(stranger.join().unwrap() > 0);
        drop(held);
        assert!(free(&path));
    }

    #[test]
    fn a_lease_of_another_machine_holds_while_it_is_renewed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        elsewhere(&path, 0);
        let (flag, place) = (Arc::new(AtomicBool::new(false)), path.clone());
        let over = Arc::clone(&flag);
        let renewing = thread::spawn(move || {
            (1..)
                .take_while(|_| !over.load(Ordering::Relaxed))
                .for_each(|at| elsewhere(&place, at));
        });
        // However long the required standstill: it is seen to change.
        assert!(!free(&path));
        flag.store(true, Ordering::Relaxed);
        renewing.join().unwrap();
        drop(take(&path, SOON));
        // A lease of this machine expires with its lock.
        assert!(free(&path));
    }

    #[test]
    fn a_lease_is_renewed_and_its_loss_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = take(&path, SOON);
        let renewed =
            || Lease::read(&open(&path).unwrap()).unwrap().map_or(0, |lease| lease.renewed);
        while renewed() < 3 {
            thread::sleep(SOON.period);
        }
        assert!(!held.is_lost());
        // A simultaneous renewal may overwrite it once.
        while !held.is_lost() {
            elsewhere(&path, 0);
            thread::sleep(SOON.period);
        }
        held.let_go();
        assert_eq!(renewed(), 0, "it is the others'");
        assert!(Lease::read(&open(&path).unwrap()).unwrap().is_some());
    }

    #[test]
    fn a_folder_that_was_made_in_vain_goes() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("run/lock");
        let take = || Held::take(&path, "ours", Duration::ZERO).unwrap().unwrap();
        let (first, second) = (take(), take());
        first.let_go();
        assert!(path.exists(), "another process holds it");
        second.let_go();
        take().let_go();
        assert!(path.exists(), "the one that made it is gone, and the folder may be somebody's");
        std::fs::remove_dir_all(place.path().join("run")).unwrap();
        take().let_go();
        assert!(!place.path().join("run").exists());
    }
}
