//! Other projects' token files: Megatron `.bin/.idx`, datatrove `.ds`, OLMo `.npy` with csv, and MDS.
//!
//! ```text
//! store --export--> OUT/SOURCE/SPLIT...    what a peer's own readers open
//! files --import--> store                  what `verify`, `plan`, `batch` and training open
//! ```
//!
//! Invariant: what a peer's file says of itself is held against its real size before memory is given or a byte is
//! believed; whatever it holds ends in documents, in a counted drop, or in a [`contract::Fault`], never in a panic.
//! Invariant: nothing is ever unpickled, and no column is decoded but tokens and ids.
//! Invariant: a result appears by the rename of its whole folder; what a killed run leaves is cleared by the next.

mod datatrove;
pub mod export;
pub mod import;
mod mds;
mod megatron;
mod olmo;
mod shard;
#[cfg(test)]
mod tests;
mod tokens;
mod units;

use std::path::Path;

use contract::{Fault, Result};
use store::disk::{self, Whole};
use store::{FileRecord, InputRecord};

pub use self::tokens::Width;

/// Whose files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// `.bin` and `.idx`.
    Megatron,
    /// `.ds` and `.ds.index`.
    Datatrove,
    /// Headerless `.npy` and `.csv.gz`.
    Olmo,
    /// A folder of `index.json` and shards.
    Mds,
}

impl Peer {
    /// Every peer.
    pub const ALL: [Peer; 4] = [Peer::Megatron, Peer::Datatrove, Peer::Olmo, Peer::Mds];

    /// The name used in `--format`.
    pub const fn name(self) -> &'static str {
        match self {
            Peer::Megatron => "megatron",
            Peer::Datatrove => "datatrove",
            Peer::Olmo => "olmo",
            Peer::Mds => "mds",
        }
    }
}

/// What an importer has to be told because the files do not say it.
#[derive(Clone, Debug)]
struct Hints {
    /// The width of a token, where there is no header.
    width: Option<Width>,
    /// The token that ends each document, where nothing else says where it ends.
    end: Option<u32>,
    /// The column of tokens (MDS).
    column: String,
    /// One more than the largest id of the tokenizer.
    vocab: u32,
}

/// One document of a peer's file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NextDocument {
    /// Its id, where the peer keeps one.
    id: Option<String>,
    /// Where its tokens stand in the file, decompressed.
    bytes: (u64, u64),
}

/// The documents of one of a peer's files, front to back.
trait Documents {
    /// Puts the next document's tokens into `tokens`, which is emptied first; `None` at the end, once all that the
    /// files say of themselves was found to be true.
    fn next(&mut self, tokens: &mut Vec<u32>) -> Result<Option<NextDocument>>;

    /// The files, the one with the tokens first; asked for after the last document.
    fn inputs(&self) -> Vec<InputRecord>;
}

/// Takes the documents of a store, and makes a peer's files.
trait Writer {
    /// The next document.
    fn document(&mut self, tokens: &[u32], id: &str, src: &str, row: u64) -> Result<()>;

    /// Ends the files.
    fn finish(self: Box<Self>) -> Result<Vec<FileRecord>>;
}

/// Begins a file of an export, making its folder.
fn begin(path: &Path) -> Result<Whole> {
    disk::create_folder(disk::folder_of(path))?;
    Whole::create(path)
}

/// Ends a file of an export; its record names its path.
fn end(file: Whole) -> Result<FileRecord> {
    let name = file.path().display().to_string();
    Ok(FileRecord { name, ..file.commit()? })
}

/// A file that is not what it should be.
fn damaged(path: &Path, what: impl Into<String>) -> Fault {
    Fault::data(what).at(path.display().to_string()).hint(
        "fetch or export the file again; a file that its index contradicts is not read in part",
    )
}
