//! A file of a source: where it lies and how it holds documents.

use contract::Result;
use serde::{Deserialize, Serialize};
use store::Location;

use super::Format;

/// One input file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Where it lies.
    #[serde(with = "place")]
    pub path: Location,
    /// Its path from the corpus file's folder, for people.
    pub shown: String,
    /// How it holds documents.
    pub format: Format,
}

impl SourceFile {
    /// Its size.
    pub(crate) fn size(&self) -> Result<u64> {
        self.path.size().map_err(|error| self.path.fault("read", &error))
    }
}

/// A place in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Place(#[serde(with = "place")] pub(crate) Location);

/// Places in a plan: as text, which every machine reads alike.
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
