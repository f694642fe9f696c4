//! The journal of an unfinished build: what is committed so far, and where in the inputs to go on.
//!
//! `STORE/.build/journal.jsonl` holds a head, then one line per checkpoint; a torn last line is cut. A checkpoint is
//! written after the shards it names are on the disk, so whatever the journal says is true.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Hasher, Identity, Result};
use serde::{Deserialize, Serialize};
use store::disk::{self, Output};
use store::{
    Dropped, InputRecord, PreparedRecord, ShardRecord, SourceRecord, TokenizerRecord, open,
};

use crate::tokenize::audit::{Audit, Sample};

/// What a build may not change on its way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    /// The versions that it was begun with: others may read, encode or write otherwise.
    pub(crate) versions: Identity,
    pub(crate) tokenizer: TokenizerRecord,
    pub(crate) unit: u64,
    pub(crate) validation: String,
    pub(crate) shard_tokens: u64,
    /// Names and preparations.
    pub(crate) sources: Vec<(String, String)>,
}

/// Where to go on: the next record to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Index of the source.
    pub(crate) source: usize,
    /// Index of the file in the source.
    pub(crate) file: usize,
    /// Records read from that file.
    pub(crate) documents: u64,
    /// Their digest, so that a file that changed since is noticed.
    pub(crate) consumed: Digest,
}

impl Position {
    /// The beginning of file `file` of source `source`.
    pub(crate) fn start(source: usize, file: usize) -> Self {
        Position { source, file, documents: 0, consumed: Digest::default() }
    }

    /// After one more record with this content.
    pub(crate) fn pass(&mut self, content: Digest) {
        self.documents += 1;
        self.consumed =
            Hasher::new().tag("consumed.v1").digest(self.consumed).digest(content).finish();
    }
}

/// What a stream amounts to so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Totals {
    pub(crate) tokens: u64,
    pub(crate) documents: u64,
    pub(crate) text_bytes: u64,
    pub(crate) digest: Digest,
}

/// One step forward.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    pub(crate) position: Position,
    /// The source whose streams these are; `position` is beyond it once it is finished.
    pub(crate) source: usize,
    /// Its inputs finished since the checkpoint before.
    pub(crate) inputs: Vec<InputRecord>,
    /// The shards committed now, train and validation.
    pub(crate) shards: [Option<ShardRecord>; 2],
    pub(crate) streams: [Totals; 2],
    pub(crate) dropped: Vec<Dropped>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) prepared: Option<PreparedRecord>,
    pub(crate) audit: Audit,
    /// The whole source, if it was taken over from another store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) taken: Option<Box<SourceRecord>>,
}

/// The journal, open for appending.
pub(crate) struct Journal {
    folder: PathBuf,
    file: Output,
}

impl Journal {
    /// Whether the folder of a store holds an unfinished build.
    pub(crate) fn exists(store: &Path) -> bool {
        path(store).is_file()
    }

    /// Begins one.
    pub(crate) fn begin(store: &Path, head: &Head) -> Result<Self> {
        let folder = store.join(open::BUILD_FOLDER);
        disk::create_folder(&folder)?;
        let head = line(head)?;
        disk::write_whole(&path(store), &head)?;
        Journal::go_on(store, head.len() as u64)
    }

    /// Goes on with one: its head, its checkpoints, its audit samples.
    pub(crate) fn resume(store: &Path) -> Result<(Self, Head, Vec<Checkpoint>)> {
        let path = path(store);
        let bytes = fs::read(&path).map_err(|error| Fault::io("read", &path, &error))?;
        let damaged = |what: String| {
            Fault::data(format!("the journal of this build is damaged: {what}"))
                .at(path.display().to_string())
                .hint("delete the store's folder and build it again")
        };
        let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').peekable();
        let head = lines.next().ok_or_else(|| damaged("it has no head".to_owned()))?;
        let mut whole = head.len() as u64;
        let head = serde_json::from_slice(head).map_err(|error| damaged(error.to_string()))?;
        let mut checkpoints = Vec::new();
        while let Some(line) = lines.next() {
            match serde_json::from_slice(line) {
                Ok(checkpoint) if line.ends_with(b"\n") => checkpoints.push(checkpoint),
                // The last line may be torn: what it stood for was never said to be done, and is done again.
                _ if lines.peek().is_none() => break,
                Ok(_) => return Err(damaged("a line does not end".to_owned())),
                Err(error) => return Err(damaged(error.to_string())),
            }
            whole += line.len() as u64;
        }
        Ok((Journal::go_on(store, whole)?, head, checkpoints))
    }

    /// Open for what follows the first `length` bytes.
    fn go_on(store: &Path, length: u64) -> Result<Self> {
        let file = Output::go_on(&path(store), length)?;
        Ok(Journal { folder: store.join(open::BUILD_FOLDER), file })
    }

    /// Records a checkpoint. The samples come first: to know more than needed does no harm.
    pub(crate) fn record(
        &mut self,
        checkpoint: &Checkpoint,
        floor: Option<Vec<(u64, u128, Sample)>>,
    ) -> Result<()> {
        if let Some(floor) = floor {
            disk::write_whole(&self.folder.join(FLOOR), &line(&Floor::from(floor))?)?;
        }
        let bytes = line(checkpoint)?;
        let write = self.file.write_all(&bytes).and_then(|()| self.file.sync());
        write.map_err(|error| Fault::io("write", &self.folder.join(JOURNAL), &error))
    }

    /// The audit samples of the checkpoints so far.
    pub(crate) fn floor(&self) -> Result<Vec<(u64, u128, Sample)>> {
        let path = self.folder.join(FLOOR);
        match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(Fault::io("read", &path, &error)),
            Ok(bytes) => match serde_json::from_slice::<Floor>(&bytes) {
                Ok(floor) => Ok(floor.into()),
                Err(error) => Err(Fault::data(format!("the samples are damaged: {error}"))
                    .at(path.display().to_string())
                    .hint("delete the store's folder and build it again")),
            },
        }
    }
}

const JOURNAL: &str = "journal.jsonl";
const FLOOR: &str = "samples.json";

/// Samples as JSON: contents are 128 bits, which JSON numbers are not.
#[derive(Serialize, Deserialize)]
struct Floor(Vec<(u64, Digest, Sample)>);

impl From<Vec<(u64, u128, Sample)>> for Floor {
    fn from(floor: Vec<(u64, u128, Sample)>) -> Self {
        Floor(floor.into_iter().map(|(key, content, s)| (key, Digest(content), s)).collect())
    }
}

impl From<Floor> for Vec<(u64, u128, Sample)> {
    fn from(floor: Floor) -> Self {
        floor.0.into_iter().map(|(key, content, s)| (key, content.0, s)).collect()
    }
}

fn path(store: &Path) -> PathBuf {
    store.join(open::BUILD_FOLDER).join(JOURNAL)
}

fn line(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(value)
        .map_err(|error| Fault::bug(format!("the journal cannot be written: {error}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}
