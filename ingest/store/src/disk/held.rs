//! A file that all processes of one group hold, so that a folder is theirs until the last of them ends, whichever ends first.
//!
//! Each holds a shared lock of the operating system, which ends with the process, however that ends. Such locks may not reach
//! other machines, and some file systems have none. So the file also holds a lease: a line that names the group and one of its
//! processes, and that any of them renews. A process of another group that reads a lease of a machine whose locks it cannot see
//! takes the file only after the line has not changed for some time.
//!
//! ```text
//! lock           the lease, and a shared lock of every process of the group
//! lock.writer    an exclusive lock of the one process that takes the file, or writes for the group
//! ```
//!
//! A shared lock cannot be made of an exclusive one without a moment in between: whoever takes the file has the second one, too.
//!
//! [`super::lock()`] is for one process that works in a folder for itself: what it makes there gets another name or goes, so it
//! locks the folder and leaves no file in it, and a killed one is over at once, on its own machine alone. Here several processes
//! on several machines hold what outlives them: that takes files, names and a thread, of which the other has none.

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

/// How a lease is kept.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Between two looks at a lease of one's own; it is renewed if nobody else has done so since the look before.
    period: Duration,
    /// After so long without a change a lease of another machine is over.
    lease: Duration,
}

/// See [`Times`].
const TIMES: Times = Times { period: Duration::from_secs(5), lease: Duration::from_secs(20) };

/// Between two looks whether a file is free.
const LOOK: Duration = Duration::from_millis(20);

/// Where there are no locks, two may have written at once: the one whose line stands after so long has the file.
const SETTLE: Duration = Duration::from_millis(500);

/// What the second file's name ends with.
const WRITER: &str = ".writer";

/// This process's part of a file that its group holds.
#[derive(Debug)]
pub struct Held {
    file: File,
    path: PathBuf,
    /// Whether taking it made the folder.
    made: bool,
    lost: Arc<AtomicBool>,
    renewing: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The right to write for the group, until it is dropped.
#[derive(Debug)]
pub struct Writing {
    _exclusive: File,
}

/// The lease: who holds a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lease {
    group: String,
    /// How often it was renewed.
    renewed: u64,
    /// The boot of the machine on which it was renewed last: locks reach as far as that.
    boot: String,
    process: u32,
    host: String,
}

/// How a lock was answered.
#[derive(PartialEq, Eq)]
enum Lock {
    Got,
    Busy,
    /// This file system has none.
    Missing,
}

impl Held {
    /// Takes the file at `path` for `group`, or joins that group; its folder is made if need be. A file that others hold is
    /// waited for with `patience`; then the answer is who they are.
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
            // An end by a signal leaves the line of this machine, whose locks say more.
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

    /// Joins the processes of `group` that hold the file at `path`; `None` where it is another group's, or nobody's.
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
        let work = move || renew(&place, &group, &flag, (times.period, &receiver));
        let thread = thread::Builder::new().name("lease".to_owned()).spawn(work)?;
        let (path, renewing) = (path.to_owned(), Some((sender, thread)));
        Ok(Held { file, path, made: false, lost, renewing })
    }

    /// Waits with `patience` for the right to write for the group, which one of its processes has at a time.
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

    /// Whether another group has taken the file, since nobody of this one could renew its lease in time.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Ends in good order: if no other process holds the file, it says so to other machines. A folder that was made for it and
    /// holds nothing else goes with it.
    pub fn let_go(mut self) {
        self.end();
        if self.is_lost() || !lock(&self.file).is_ok_and(|lock| lock != Lock::Busy) {
            return;
        }
        // Whatever fails here costs another machine some seconds.
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
            // It has nothing to say.
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
    /// The right to write beside the file at `path`; `None` where another process has it.
    fn of(path: &Path) -> io::Result<Option<Writing>> {
        let path = beside(path, WRITER);
        let file = open(&path)?;
        Ok((lock(&file)? != Lock::Busy && is_at(&file, &path))
            .then_some(Writing { _exclusive: file }))
    }
}

impl Lease {
    /// One that begins in this process.
    fn new(group: &str) -> Lease {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let (group, host, process) = (group.to_owned(), host.trim().to_owned(), std::process::id());
        Lease { group, renewed: 0, boot: boot(), process, host }
    }

    /// That of an open file; `None` where none stands in it.
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
        Some(Lease { group, renewed, boot, process: next().parse().unwrap_or(0), host: next() })
    }

    /// Writes it over the one that stands there, in one call.
    fn write(&self, file: &File) -> io::Result<()> {
        let Lease { group, renewed, boot, process, host } = self;
        let line = format!("{group} {renewed:020} {boot} {process} {host}\n");
        file.write_all_at(line.as_bytes(), 0)?;
        file.set_len(line.len() as u64)?;
        // Other machines see what has left this one.
        file.sync_data()
    }
}

/// Who holds a file, for people.
fn words(lease: Option<&Lease>) -> String {
    let named = |lease: &Lease| format!("process {} on {}", lease.process, lease.host);
    lease.map_or_else(|| "a process that has not given its name yet".to_owned(), named)
}

/// A name for a group that no other has.
pub fn draw_group() -> String {
    let mut chance = [0; 16];
    // Without it the process and its machine tell groups apart.
    let _ = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut chance));
    let words = format!("{chance:?} {} {}", boot(), std::process::id());
    Digest::of_bytes(words.as_bytes()).to_string()
}

/// Renews the lease until `end` hangs up, or another group has the file.
fn renew(path: &Path, group: &str, lost: &AtomicBool, (period, end): (Duration, &Receiver<()>)) {
    let mut seen = None;
    while end.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
        // A folder that was moved away is held by the lock alone.
        let Ok(file) = File::options().read(true).write(true).open(path) else { continue };
        let Ok(found) = Lease::read(&file) else { continue };
        let renewed = found.as_ref().map_or(0, |lease| lease.renewed);
        match found {
            Some(lease) if lease.group != group => return lost.store(true, Ordering::Relaxed),
            Some(_) if seen != Some(renewed) => seen = Some(renewed),
            _ => {
                let renewed = renewed + 1;
                // It is tried again before others may take it.
                if (Lease { renewed, ..Lease::new(group) }).write(&file).is_ok() {
                    seen = Some(renewed);
                }
            }
        }
    }
}

/// What tells machines, and their boots, apart: containers of one machine share its locks.
fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Opens the file, or makes it.
fn open(path: &Path) -> io::Result<File> {
    if path.exists() {
        regular::size(path)?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK);
    options.open(path)
}

/// Locks what is open against everybody else.
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

    /// A lease of another machine, renewed so often.
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
        // One of them writes at a time, and that too ends with it.
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
        // However long it would have to stand still: it is seen to move.
        assert!(!free(&path));
        flag.store(true, Ordering::Relaxed);
        renewing.join().unwrap();
        drop(take(&path, SOON));
        // One of this machine is over with its lock.
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
        // A renewal at that very moment may write over it once.
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
