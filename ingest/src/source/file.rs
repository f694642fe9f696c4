//! A file of a source: its location and its format.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use contract::{Fault, Identity, Result};
use serde::{Deserialize, Serialize};
use store::Location;
use store::location::IdentityKind;

use super::{Cut, Fields, Format, Input, Limits, groups, open_cut};

/// One input file, or some groups of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Its location.
    #[serde(with = "place")]
    pub path: Location,
    /// Its path relative to the corpus file's folder, for users.
    pub shown: String,
    /// Its format.
    pub format: Format,
    /// The groups that are read, if not all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cut: Option<Cut>,
}

impl SourceFile {
    /// A whole file.
    pub(crate) fn new(path: Location, shown: String, format: Format) -> Self {
        SourceFile { path, shown, format, cut: None }
    }

    /// Its size.
    pub(crate) fn size(&self) -> Result<u64> {
        match &self.cut {
            Some(cut) => Ok(cut.bytes),
            None => self.path.size().map_err(|error| self.path.fault("read", &error)),
        }
    }

    /// Opens it for reading.
    pub(crate) fn open(&self, fields: &Fields, limits: &Limits) -> Result<Box<dyn Input>> {
        open_cut(&self.path, self.format, fields, limits, self.cut.as_ref())
    }

    /// Bytes and identity, as a reader finds them.
    pub(crate) fn content(&self) -> Result<(u64, Identity)> {
        let of_groups = |path: &Path| groups::content(path, self.format, self.cut.as_ref());
        match (self.format, &self.cut) {
            (Format::JsonLines | Format::Text, _) => self.path.content(),
            (Format::Parquet, None) => self.path.identity(IdentityKind::RowGroups, of_groups),
            (Format::Arrow, None) => self.path.identity(IdentityKind::RecordBatches, of_groups),
            (_, Some(_)) => {
                let copy = self.path.fetch().map_err(|error| self.path.fault("read", &error))?;
                of_groups(copy.path())
            }
        }
    }

    /// A stamp that shows whether the file was touched, to be taken before it is read.
    pub(crate) fn stamp(&self) -> Result<Stamp> {
        let path = match &self.path {
            Location::Local(path) => path,
            Location::Object(object) => {
                let version = object.version();
                return version.map(Stamp::Object).map_err(|error| self.path.fault("read", &error));
            }
        };
        let meta = fs::metadata(path).map_err(|error| Fault::io("read", path, &error))?;
        let changed = [(meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec())];
        Ok(Stamp::File { length: meta.len(), inode: meta.ino(), changed })
    }

    /// Refuses the file if it was touched since this stamp was taken, or if `bytes`, the number read since then, is not
    /// its size: otherwise the bytes may be a mix of two versions.
    pub(crate) fn unchanged(&self, stamp: &Stamp, bytes: u64) -> Result<()> {
        let now = self.stamp()?;
        let whole = match now {
            Stamp::File { length, .. } => self.cut.is_some() || length == bytes,
            Stamp::Object(_) => true,
        };
        if whole && now == *stamp {
            return Ok(());
        }
        let shown = |stamp: &Stamp| match stamp {
            Stamp::File { length, .. } => format!("{length} bytes"),
            Stamp::Object(version) => format!("the version {version}"),
        };
        Err(Fault::mismatch("this input changed while it was read")
            .at(self.shown.clone())
            .found(format!("{}, of which {bytes} bytes were read", shown(&now)))
            .wanted(format!("the file of {}, as it was at first", shown(stamp)))
            .hint("run the same command again when no program writes this file"))
    }
}

/// The last change of a file, equal on all machines that see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Stamp {
    /// Of an object: what its server calls its version.
    Object(String),
    /// Size, inode and the times of the last changes of content and metadata, in seconds and nanoseconds.
    File {
        /// Its size.
        length: u64,
        /// Its inode.
        inode: u64,
        /// Of content and of metadata.
        changed: [(i64, i64); 2],
    },
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
