//! Other projects' token files: Megatron `.bin/.idx`, datatrove `.ds`, OLMo `.npy` with csv, and MDS.
//!
//! ```text
//! store --export--> OUT/SOURCE/SPLIT...    what the other project's readers open
//! files --import--> store                  what `verify`, `plan`, `batch` and training open
//! ```
//!
//! Invariant: a file's claims about itself are checked against its real size before memory is allocated or data is
//! used. Any content ends in documents, in a counted drop, or in a [`contract::Fault`], never in a panic.
//! Invariant: nothing is ever unpickled, and only the columns of tokens and ids are decoded.
//! Invariant: a result appears by renaming its whole folder; the leftovers of a killed run are removed by the next one.

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
use store::disk::{self, AtomicFile};
use store::{FileRecord, InputRecord};

pub use self::tokens::Width;

/// The project whose format is used.
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

/// What an importer needs that the files do not say.
#[derive(Clone, Debug)]
struct Hints {
    /// The width of a token, for files without a header.
    width: Option<Width>,
    /// The token that ends each document, if nothing else marks its end.
    end: Option<u32>,
    /// The column of tokens (MDS).
    column: String,
    /// One more than the largest id of the tokenizer.
    vocab: u32,
}

/// One document of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NextDocument {
    /// Its id, if the format has ids.
    id: Option<String>,
    /// The byte range of its tokens in the decompressed file.
    bytes: (u64, u64),
}

/// The documents of a file, in order.
trait Documents {
    /// Replaces `tokens` by the next document's tokens; `None` at the end, after everything that the files claim about
    /// themselves was checked.
    fn next(&mut self, tokens: &mut Vec<u32>) -> Result<Option<NextDocument>>;

    /// The files, starting with the one that holds the tokens; called after the last document.
    fn inputs(&self) -> Vec<InputRecord>;
}

/// Writes the documents of a store in another project's format.
trait Writer {
    /// The next document.
    fn document(&mut self, tokens: &[u32], id: &str, src: &str, row: u64) -> Result<()>;

    /// Ends the files.
    fn finish(self: Box<Self>) -> Result<Vec<FileRecord>>;
}

/// Begins a file of an export, creating its folder.
fn begin(path: &Path) -> Result<AtomicFile> {
    disk::create_folder(disk::folder_of(path))?;
    AtomicFile::create(path)
}

/// Completes a file of an export; its record has its path.
fn end(file: AtomicFile) -> Result<FileRecord> {
    let name = file.path().display().to_string();
    Ok(FileRecord { name, ..file.commit()? })
}

/// The fault for a damaged file.
fn damaged(path: &Path, what: impl Into<String>) -> Fault {
    Fault::data(what).at(path.display().to_string()).hint(
        "fetch or export the file again; a file that its index contradicts is not read in part",
    )
}
