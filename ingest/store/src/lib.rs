//! The store: what `ingest` promises and `loader` relies on. `ingest/docs/format.md` describes the bytes.
//!
//! ```text
//! STORE/
//!   manifest.json                      committed last, by rename; a folder without it is not a store
//!   manifest.sum                       xxh3-128 of its bytes, for the flipped bit that changes no meaning
//!   tokenizer.json                     the bytes that made the tokens
//!   SOURCE/train/                      one stream: the documents of a source and split, in input order
//!     tokens-00000.arrow               one non-null column `token`, record batches of 16,384 tokens
//!     tokens-00000.sums                xxh3-64 of each batch's token bytes, u64 little-endian
//!     starts-00000.arrow               one non-null column `start`: where each document begins in the stream, u64
//!     documents-00000.parquet          provenance, one row per document
//!     tokens-00001.arrow ...
//!   SOURCE/validation/                 the same, never trained on
//! ```
//!
//! A stream is cut into shards at document ends, so that each shard can be read alone and a killed build resumes after
//! the last complete one. A token's shard is found by binary search in the manifest; its block by division.

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

pub use check::is_file_name;
pub use contract::UNIT_TOKENS;
pub use location::Location;
pub use manifest::{
    Change, Dropped, FileEntry, FileRecord, InputRecord, Manifest, PreparedRecord, ShardRecord,
    SourceRecord, StreamRecord, TokenizerRecord,
};
pub use read::{Store, StreamReader};

/// The version of everything in this module; part of a store's identity.
pub const FORMAT: u32 = 2;

/// Tokens in a record batch (the last one of a shard may hold fewer): the unit of checking and of reading.
pub const BLOCK_TOKENS: u64 = 16_384;

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

    /// The folder's name.
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
    /// The corpus's own id, or `FILE#ROW` where it has none.
    pub id: String,
    /// Which input file of the source (index into [`SourceRecord::inputs`]).
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
}
