//! The store: what `ingest` promises and `loader` relies on. `ingest/docs/format.md` describes the bytes.
//!
//! ```text
//! STORE/
//!   manifest.json                      committed last, by rename; a folder without it is not a store
//!   manifest.sum                       xxh3-128 of its bytes, for the flipped bit that changes no meaning
//!   tokenizer.json                     the bytes that made the tokens
//!   SOURCE/00000/                      a part: what some input files of the source became, in input order
//!     tokens-train-00000.arrow         one non-null column `token`, record batches of 16,384 tokens
//!     tokens-train-00000.sums          xxh3-64 of each batch's token bytes, u64 little-endian
//!     starts-train-00000.arrow         one non-null column `start`: where each document begins in the shard, u64
//!     documents-train-00000.parquet    provenance, one row per document
//!     tokens-train-00001.arrow ...     the next shard of a large part
//!     tokens-validation-00000.arrow .. the same, never trained on
//!   SOURCE/00001/ ...
//! ```
//!
//! A stream is the documents of a source and split. A part is a finished piece of the store: a shard never crosses it,
//! offsets in the files of a shard are relative to the shard, and file numbers to the part, so that no byte of a part
//! depends on the parts before it. A token's shard is found by binary search in the manifest; its block by division.

#![forbid(unsafe_code)]

mod check;
pub mod disk;
pub mod documents;
pub mod folder;
pub mod location;
pub mod manifest;
pub mod memory;
mod names;
pub mod open;
pub mod pieces;
pub mod read;
pub mod regular;
mod rows;
#[cfg(test)]
mod tests;
pub mod verify;
pub mod whole;
pub mod write;

use std::borrow::Cow;

pub use check::is_file_name;
pub use contract::UNIT_TOKENS;
pub use location::Location;
pub use manifest::{
    Change, Dropped, FileEntry, FileRecord, InputRecord, Manifest, PartRecord, PreparedRecord,
    ShardRecord, SourceRecord, StreamRecord, TokenizerRecord,
};
pub use read::{Store, StreamReader};

/// The version of everything in this module; part of a store's identity.
pub const FORMAT: u32 = 3;

/// Tokens in a record batch (the last one of a shard may hold fewer): the unit of checking and of reading.
pub const BLOCK_TOKENS: u64 = 16_384;

/// Tokens after which a shard ends and the next one of its part begins: half a gigabyte of stored u32.
pub const SHARD_TOKENS: u64 = 1 << 27;

/// Starts in a record batch of `starts-*.arrow` (the last one may hold fewer).
pub const BLOCK_STARTS: u64 = 8_192;

/// Bytes before the first record batch of an Arrow file of the store, and bytes of metadata before the values of
/// each: with them a block's offset is a multiplication, and one read fetches it.
pub const HEAD_BYTES: u64 = 192;

/// The two splits of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Split {
    /// Trained on.
    Train,
    /// Never trained on.
    Validation,
}

impl Split {
    /// Both, in the order in which they are stored.
    pub const ALL: [Split; 2] = [Split::Train, Split::Validation];

    /// The name, as in the names of files.
    pub const fn name(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::Validation => "validation",
        }
    }
}

/// One document's provenance: a row of `documents-*.parquet`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentRecord {
    /// The id that its input gives; [`DocumentRecord::shown_id`] where there is none.
    pub id: Option<String>,
    /// Which input file of the source (index into [`SourceRecord::inputs`]); in the file, counted in the part.
    pub file: u32,
    /// Line (from 1) of a JSON Lines file, row (from 0) of a row group or record batch, 0 for a whole file.
    pub row: u64,
    /// Row group or record batch (from 0); `None` for lines and whole files.
    pub group: Option<u32>,
    /// First byte of the record in the decompressed stream; `None` for columnar input, which has none.
    pub bytes: Option<(u64, u64)>,
    /// First token in the stream.
    pub first_token: u64,
    /// Tokens, begin and end markers included.
    pub tokens: u64,
    /// The values of the columns that its source keeps, in the order of [`SourceRecord::keep`]: strings as they are,
    /// other JSON without white space; none where the record has null or no such field.
    pub kept: Vec<Option<String>>,
}

/// The longest kept value, in bytes.
pub const KEPT_BYTES_MAX: usize = 64 << 10;

impl DocumentRecord {
    /// The id for users: its own, or `FILE#ROW` (`FILE#GROUP.ROW`), where FILE counts the source's inputs from 0.
    pub fn shown_id(&self) -> Cow<'_, str> {
        match (&self.id, self.group) {
            (Some(id), _) => Cow::Borrowed(id),
            (None, Some(group)) => Cow::Owned(format!("{}#{group}.{}", self.file, self.row)),
            (None, None) => Cow::Owned(format!("{}#{}", self.file, self.row)),
        }
    }

    /// The segment of its input file that it belongs to: its row group or record batch, or the whole file.
    pub fn segment(&self) -> u64 {
        u64::from(self.group.unwrap_or(0))
    }
}

/// The place that a [`DocumentRecord::shown_id`] without an own id names: file, row group and row.
pub(crate) fn place_of_id(id: &str) -> Option<(u32, Option<u32>, u64)> {
    let (file, row) = id.split_once('#')?;
    let place = match row.split_once('.') {
        Some((group, row)) => (file.parse().ok()?, Some(group.parse().ok()?), row.parse().ok()?),
        None => (file.parse().ok()?, None, row.parse().ok()?),
    };
    // Only the spelling that users are shown.
    let (file, group, row) = place;
    let shown = DocumentRecord {
        id: None,
        file,
        group,
        row,
        bytes: None,
        first_token: 0,
        tokens: 0,
        kept: Vec::new(),
    };
    (shown.shown_id() == id).then_some(place)
}
