//! A store that was built here for a place elsewhere: what lies here goes once every byte of the other one was read again.
//!
//! It goes by another name first, so that a crash leaves the whole of it or nothing that is called a store.

use std::path::Path;

use contract::{Fault, Result};
use store::{Location, disk, open, verify};

/// What the name of a folder ends in that is being removed.
const GONE: &str = ".gone";

/// Puts the store in `folder` to `place` by `put`, reads all of it there, and removes what lies here.
pub fn to(
    folder: &Path,
    place: &Location,
    quiet: bool,
    put: impl FnOnce() -> Result<()>,
) -> Result<()> {
    // Another run for the same place may find the store there before this one has read it.
    let _lock = disk::lock(folder)?;
    put()?;
    remove(folder, place, quiet)
}

/// Removes what a run left in `folder` that was killed after it had put the store to `place`, where a store is now. Another
/// one stays, and so does one that somebody is at work on.
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

/// Removes the store in `folder`, which is the only whole copy until every byte of the one at `place` was read.
fn remove(folder: &Path, place: &Location, quiet: bool) -> Result<()> {
    let found = crate::verify::verify(place, quiet)?;
    verify::fault(place, &found.damages).map_or(Ok(()), Err)?;
    away(folder)
}

/// Removes a folder by another name.
pub(crate) fn away(folder: &Path) -> Result<()> {
    ended(folder)?;
    let gone = disk::beside(folder, GONE);
    disk::rename(folder, &gone).map_err(|error| Fault::io("rename", folder, &error))?;
    disk::sync_folder(disk::folder_of(folder))?;
    disk::remove(&gone)
}

/// Ends what a killed run left of that.
pub(crate) fn ended(folder: &Path) -> Result<()> {
    disk::remove(&disk::beside(folder, GONE))
}
