//! Creates a folder atomically: it is written under a temporary name next to its target and renamed.
//!
//! `OUT.partial` has a marker file, so that cleaning up after a killed run never removes other people's files; it is
//! locked, so that two runs for one place do not meet. A run that fails removes it.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use store::disk::{self, Lock, entries, folder_of};
use store::open;

use super::apart;

/// The marker file, in [`open::BUILD_FOLDER`].
const MARK: &str = "staging";

/// The suffix of an incomplete folder.
const PARTIAL: &str = ".partial";

/// A folder under construction.
pub struct Staging {
    target: PathBuf,
    path: PathBuf,
    /// The parent folders that were created for it.
    above: Vec<PathBuf>,
    /// Folders in it whose names are durable already.
    synced: BTreeSet<PathBuf>,
    committed: bool,
    _lock: Lock,
}

impl Staging {
    /// Begins `target`, which must not exist or be an empty folder.
    pub fn begin(target: &Path) -> Result<Self> {
        // A trailing `/.` would name what is inside the folder, which does not exist yet.
        let target = &target.components().collect::<PathBuf>();
        refuse_link(target)?;
        refuse_long(target)?;
        refuse_taken(target)?;
        apart::refuse_inside(&target.into())?;
        if target.file_name().is_none() {
            let fault = Fault::usage("this is not a name for a new folder");
            return Err(fault.at(target.display().to_string()));
        }
        let path = disk::beside(target, PARTIAL);
        let above = disk::missing_above(&path);
        disk::create_folder(&path)?;
        let lock = disk::lock(&path)?;
        clear(&path)?;
        let mark = path.join(open::BUILD_FOLDER).join(MARK);
        let target = target.to_owned();
        let synced = BTreeSet::new();
        let staging = Staging { target, path, above, synced, committed: false, _lock: lock };
        disk::create_folder(folder_of(&mark))?;
        disk::write_atomic(&mark, b"zdata\n")?;
        Ok(staging)
    }

    /// Where a folder is written before it is renamed to `target`.
    pub fn place_of(target: &Path) -> PathBuf {
        disk::beside(target, PARTIAL)
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves a folder, whose files and names are synced, to `place` in this one.
    pub fn take(&mut self, folder: &Path, place: &Path) -> Result<()> {
        let to = self.path.join(place);
        disk::create_folder(folder_of(&to))?;
        disk::rename(folder, &to).map_err(|error| Fault::io("create", &to, &error))?;
        self.synced.insert(to);
        Ok(())
    }

    /// Renames the folder to its target. Every file in it must be synced.
    pub fn commit(mut self) -> Result<()> {
        self.commit_telling(|_, _| ())
    }

    /// The same, and reports how many folders of how many are synced.
    pub fn commit_telling(&mut self, mut tell: impl FnMut(u64, u64)) -> Result<()> {
        let mut folders = disk::folders(&self.path)?;
        folders.retain(|folder| !self.synced.contains(folder));
        for (number, folder) in folders.iter().enumerate() {
            disk::sync_folder(folder)?;
            tell(number as u64 + 1, folders.len() as u64);
        }
        refuse_taken(&self.target)?;
        disk::rename(&self.path, &self.target)
            .map_err(|error| Fault::io("create", &self.target, &error))?;
        self.committed = true;
        // Before the marker is removed: a folder without one must not be found under a partial name.
        disk::sync_folder(folder_of(&self.target))?;
        open::finish(&self.target)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.committed {
            // The original fault is more useful than one about this folder, which the next run clears.
            let _ = disk::remove(&self.path);
            self.above.iter().for_each(|folder| disk::remove_if_empty(folder));
        }
    }
}

/// Refuses a target that is a link: the rename would replace the link, or fail after all the work.
pub fn refuse_link(target: &Path) -> Result<()> {
    // A trailing slash would follow the link.
    let name: PathBuf = target.components().collect();
    let Ok(to) = std::fs::read_link(&name) else { return Ok(()) };
    let to = folder_of(&name).join(to);
    Err(Fault::usage("this is a link, and what is made here appears whole, by a rename")
        .at(name.display().to_string())
        .found(format!("a link to {}", to.display()))
        .wanted("a new or empty folder that is none")
        .hint("name the folder that the link leads to, or remove the link"))
}

/// Refuses a target whose name is too long once our suffix is added, before the work.
pub fn refuse_long(target: &Path) -> Result<()> {
    let beside = disk::beside(target, PARTIAL);
    match beside.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::InvalidFilename => {
            Err(Fault::io("create", &beside, &error))
        }
        _ => Ok(()),
    }
}

fn refuse_taken(target: &Path) -> Result<()> {
    if !target.exists() {
        return Ok(());
    }
    match entries(target)?.first().and_then(|entry| entry.file_name()) {
        None => Ok(()),
        Some(name) => Err(Fault::usage("this folder holds something else")
            .at(target.display().to_string())
            .found(name.to_string_lossy())
            .wanted("a new or empty folder")
            .hint("name another folder")),
    }
}

/// Empties the folder that a killed run left, except for the marker; a folder without a marker must be empty.
fn clear(path: &Path) -> Result<()> {
    let (found, build) = (entries(path)?, path.join(open::BUILD_FOLDER));
    // Killed while it wrote the marker: nothing else is there.
    if !build.join(MARK).is_file() && found.iter().any(|entry| *entry != build) {
        return Err(Fault::usage("this folder is in the way, and is not a partial result of ours")
            .at(path.display().to_string())
            .hint("move it, or name another folder"));
    }
    let inside = if build.is_dir() { entries(&build)? } else { Vec::new() };
    let ours = [build.join(MARK), build];
    let mut others = found.iter().chain(&inside).filter(|entry| !ours.contains(entry));
    others.try_for_each(|entry| disk::remove(entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_made_leaves_no_folder_above_it() {
        let bench = tempfile::tempdir().unwrap();
        let own = bench.path().join("own");
        std::fs::create_dir(&own).unwrap();
        drop(Staging::begin(&own.join("a/b/out")).unwrap());
        assert!(entries(&own).unwrap().is_empty());
        // Other people's files stay, and so do folders that existed.
        let staging = Staging::begin(&own.join("a/b/out")).unwrap();
        std::fs::write(own.join("a/note"), "mine").unwrap();
        drop(staging);
        assert_eq!(entries(&own.join("a")).unwrap(), [own.join("a/note")]);
    }

    /// Many folders take long, so progress is reported.
    #[test]
    fn a_commit_tells_of_every_folder() {
        let bench = tempfile::tempdir().unwrap();
        let target = bench.path().join("deep/out");
        let mut staging = Staging::begin(&target).unwrap();
        for name in ["a/train", "a/validation", "b"] {
            disk::create_folder(&staging.path().join(name)).unwrap();
        }
        let mut told = Vec::new();
        staging.commit_telling(|done, all| told.push((done, all))).unwrap();
        // Those four, the folder itself and that of the marker.
        assert_eq!(told, (1..=6).map(|done| (done, 6)).collect::<Vec<_>>());
        assert!(target.join("a/train").is_dir());
    }
}
