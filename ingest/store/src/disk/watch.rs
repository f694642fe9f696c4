//! Folders whose acts are recorded for tests.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Act;

impl Act {
    fn path(&self) -> &Path {
        match self {
            Act::CreateFolder(path) | Act::Create(path) | Act::Write(path, _, _) => path,
            Act::SetLength(path, _) | Act::Sync(path) | Act::SyncFolder(path) => path,
            Act::Rename(path, _) | Act::Link(path, _) => path,
            Act::Remove(path) | Act::RemoveFolder(path) => path,
        }
    }
}

/// The number of watched folders.
static WATCHED: AtomicUsize = AtomicUsize::new(0);

static WATCHES: Mutex<Vec<Arc<Watched>>> = Mutex::new(Vec::new());

/// A watched folder, the acts in it, and the bytes that are left until its disk is full.
struct Watched {
    folder: PathBuf,
    acts: Mutex<Vec<Act>>,
    room: Mutex<u64>,
}

/// Records every act below a folder until it is dropped. Nothing there is really synced meanwhile, which saves tests
/// time.
pub struct Watch(Arc<Watched>);

/// Watches `folder` for a test, on a simulated disk of limited size.
pub fn watch(folder: &Path, room: u64) -> Watch {
    let (folder, acts, room) = (folder.to_owned(), Mutex::default(), Mutex::new(room));
    let watched = Arc::new(Watched { folder, acts, room });
    held(&WATCHES).push(Arc::clone(&watched));
    WATCHED.fetch_add(1, Ordering::SeqCst);
    Watch(watched)
}

impl Watch {
    /// The acts so far.
    pub fn acts(&self) -> Vec<Act> {
        held(&self.0.acts).clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHED.fetch_sub(1, Ordering::SeqCst);
        held(&WATCHES).retain(|watched| !Arc::ptr_eq(watched, &self.0));
    }
}

/// Records an act for the watches of its path; returns whether there is one.
pub(super) fn note(act: impl FnOnce() -> Act) -> bool {
    if WATCHED.load(Ordering::SeqCst) == 0 {
        return false;
    }
    let act = act();
    let watches = held(&WATCHES);
    let ours = watches.iter().filter(|watched| act.path().starts_with(&watched.folder));
    ours.map(|watched| held(&watched.acts).push(act.clone())).count() > 0
}

/// Refuses `bytes` if a watched disk is full.
pub(super) fn admit(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if WATCHED.load(Ordering::SeqCst) == 0 {
        return Ok(());
    }
    for watched in held(&WATCHES).iter().filter(|watched| path.starts_with(&watched.folder)) {
        let mut room = held(&watched.room);
        *room = room.checked_sub(bytes.len() as u64).ok_or(ErrorKind::StorageFull)?;
    }
    Ok(())
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
