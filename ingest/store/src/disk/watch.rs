//! Folders whose acts tests are told of.

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

/// How many folders are watched.
static WATCHED: AtomicUsize = AtomicUsize::new(0);

static WATCHES: Mutex<Vec<Arc<Watched>>> = Mutex::new(Vec::new());

/// A folder that is watched, what was done in it, and the bytes that it still takes.
struct Watched {
    folder: PathBuf,
    acts: Mutex<Vec<Act>>,
    room: Mutex<u64>,
}

/// Sees every act below a folder until it is dropped. Nothing there is really synced meanwhile, which saves tests time.
pub struct Watch(Arc<Watched>);

/// Watches `folder`, which takes `room` bytes until the disk is full: for tests.
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

/// Tells whoever watches of an act that was done; whether somebody does.
pub(super) fn note(act: impl FnOnce() -> Act) -> bool {
    if WATCHED.load(Ordering::SeqCst) == 0 {
        return false;
    }
    let act = act();
    let watches = held(&WATCHES);
    let ours = watches.iter().filter(|watched| act.path().starts_with(&watched.folder));
    ours.map(|watched| held(&watched.acts).push(act.clone())).count() > 0
}

/// Refuses `bytes` where a watched disk is full.
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
