//! Moves a finished store to its destination; the local copy is removed after the destination was read back and
//! verified.
//!
//! The local copy is renamed before it is removed, so that a crash leaves either a whole store or no store.

use std::path::Path;

use contract::{Fault, Result};
use store::{Location, disk, open, verify};

/// The suffix of a folder that is being removed.
const GONE: &str = ".gone";

/// Uploads the store in `folder` to `place` by `put`, verifies it there, and removes the local copy.
pub fn to(
    folder: &Path,
    place: &Location,
    quiet: bool,
    put: impl FnOnce() -> Result<()>,
) -> Result<()> {
    // Another run for the same place may find the store there before this one has verified it.
    let _lock = disk::lock(folder)?;
    put()?;
    remove(folder, place, quiet)
}

/// Removes a local copy that a run left which was killed after the upload to `place`. Another store stays, and so does
/// one that a process is working on.
pub fn left(folder: &Path, place: &Location, quiet: bool) -> Result<()> {
    ended(folder)?;
    if !folder.join(open::MANIFEST).is_file() {
        return Ok(());
    }
    let Ok(_lock) = disk::lock(folder) else { return Ok(()) };
    let here = open::manifest(folder).map(|manifest| manifest.digest);
    match here.is_ok_and(|here| open::manifest(place).is_ok_and(|there| there.digest == here)) {
        true => remove(folder, place, quiet),
        false => Ok(()),
    }
}

/// Removes the store in `folder`, the only trusted copy until every byte of the one at `place` was read.
fn remove(folder: &Path, place: &Location, quiet: bool) -> Result<()> {
    let found = crate::verify::verify(place, quiet)?;
    verify::fault(place, &found.damages).map_or(Ok(()), Err)?;
    away(folder)
}

/// Renames a folder, then removes it.
pub(crate) fn away(folder: &Path) -> Result<()> {
    ended(folder)?;
    let gone = disk::beside(folder, GONE);
    disk::rename(folder, &gone).map_err(|error| Fault::io("rename", folder, &error))?;
    disk::sync_folder(disk::folder_of(folder))?;
    disk::remove(&gone)
}

/// Completes such a removal after a kill.
pub(crate) fn ended(folder: &Path) -> Result<()> {
    disk::remove(&disk::beside(folder, GONE))
}
