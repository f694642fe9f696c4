//! Objects of one folder as files of one folder on this machine, under their own names.
//!
//! Some formats find one file by the name of another. The files are links to copies in the cache, which stay there as
//! long as this lives; errors and records that name a link are rewritten to name its object.

use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use store::Location;
use store::location::LocalFile;
use tempfile::TempDir;

/// Copies of some objects.
pub struct ObjectCopies {
    folder: TempDir,
    from: Location,
    held: Vec<(Location, LocalFile)>,
}

impl ObjectCopies {
    /// Fetches those of `names` that are there from the folder `from`.
    pub fn of(from: &Location, names: &[String]) -> Result<Self> {
        let folder = tempfile::tempdir();
        let folder = folder.map_err(|error| Fault::io("create", &std::env::temp_dir(), &error))?;
        let mut held = Vec::new();
        for name in names {
            let object = from.join(name);
            let copy = match object.fetch() {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                copy => copy.map_err(|error| object.fault("fetch", &error))?,
            };
            let link = folder.path().join(name);
            let linked = std::path::absolute(copy.path()).and_then(|path| symlink(path, &link));
            linked.map_err(|error| Fault::io("create", &link, &error))?;
            held.push((object, copy));
        }
        Ok(ObjectCopies { folder, from: from.clone(), held })
    }

    /// The path of the copy of the object called `name`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The name of the object that a name here is a copy of, with any suffix kept; `None` for another name.
    pub fn object(&self, name: &str) -> Option<String> {
        let within = name.strip_prefix(self.folder.path().to_str()?)?;
        // A bucket's own name ends in a slash.
        Some(format!("{}{within}", self.from.to_string().trim_end_matches('/')))
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Rewrites the fault to name the object. The copy may be what is damaged, so the object is fetched again next
    /// time.
    pub fn told(&self, fault: Fault) -> Fault {
        let place = fault.place().and_then(|place| self.object(place));
        let fault = place.into_iter().fold(fault, Fault::at);
        self.held.iter().fold(fault, |fault, (object, copy)| object.doubt(copy, fault))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_told_by_the_name_of_its_object() {
        for from in ["s3://bucket", "s3://bucket/a/b"] {
            let object = crate::locate(&format!("{from}/x.index")).unwrap();
            let copies = ObjectCopies::of(&object.folder(), &[]).unwrap();
            let line = format!("{}:7", copies.path("x.index").display());
            assert_eq!(copies.object(&line), Some(format!("{from}/x.index:7")));
        }
    }
}
