//! A file of a source: its location and its format.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use contract::{Fault, Result};
use serde::{Deserialize, Serialize};
use store::Location;

use super::Format;

/// One input file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Its location.
    #[serde(with = "place")]
    pub path: Location,
    /// Its path relative to the corpus file's folder, for users.
    pub shown: String,
    /// Its format.
    pub format: Format,
}

impl SourceFile {
    /// Its size.
    pub(crate) fn size(&self) -> Result<u64> {
        self.path.size().map_err(|error| self.path.fault("read", &error))
    }

    /// A stamp that shows whether the file was touched, to be taken before it is read.
    pub(crate) fn stamp(&self) -> Result<Stamp> {
        let Location::Local(path) = &self.path else { return Ok(Stamp(None)) };
        let meta = fs::metadata(path).map_err(|error| Fault::io("read", path, &error))?;
        let changed = [(meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec())];
        Ok(Stamp(Some(Touched { length: meta.len(), inode: meta.ino(), changed })))
    }

    /// Refuses the file if it was touched since this stamp was taken, or if `bytes`, the number read since then, is not
    /// its size: otherwise the bytes may be a mix of two versions.
    pub(crate) fn unchanged(&self, stamp: Stamp, bytes: u64) -> Result<()> {
        let now = self.stamp()?;
        let whole = now.0.is_none_or(|now| now.length == bytes);
        if whole && now == stamp {
            return Ok(());
        }
        let length = |stamp: Stamp| stamp.0.map_or(0, |touched| touched.length);
        Err(Fault::mismatch("this input changed while it was read")
            .at(self.shown.clone())
            .found(format!("{} bytes, of which {bytes} were read", length(now)))
            .wanted(format!("the file of {} bytes, as it was at first", length(stamp)))
            .hint("run the same command again when nobody writes this file"))
    }
}

/// The last change of a file, equal on all machines that see it. Objects, which are never altered, have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Stamp(Option<Touched>);

/// Size, inode and the times of the last changes of content and metadata, in seconds and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Touched {
    length: u64,
    inode: u64,
    changed: [(i64, i64); 2],
}

impl Stamp {
    /// Whether this stamp can show a change.
    pub(crate) fn tells(self) -> bool {
        self.0.is_some()
    }
}

/// A location in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Place(#[serde(with = "place")] pub(crate) Location);

/// Locations in a plan are text, which every machine reads alike.
mod place {
    use serde::de::Error as _;
    use serde::ser::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};
    use store::Location;

    pub(super) fn serialize<S: Serializer>(place: &Location, to: S) -> Result<S::Ok, S::Error> {
        match place.local().map(|path| path.to_str()) {
            Some(None) => Err(S::Error::custom(format!("the path {place} is not UTF-8"))),
            Some(Some(path)) => to.serialize_str(path),
            None => to.serialize_str(&place.to_string()),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Location, D::Error> {
        let text = String::deserialize(from)?;
        storage::locate(&text).map_err(D::Error::custom)
    }
}
