//! A part: what the committer is told of one task's files, on the disk.
//!
//! ```text
//! 0   "zdatpart"    16 bytes: the plan's digest
//!     entries: u8 kind (1 document, 2 loss, 3 end of a file), u32 length and JSON of what is not tokens,
//!              for a document u64 tokens and u32 each
//!     u8 0, then xxh3-128 of all bytes before it
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use contract::store::{InputRecord, Split};
use contract::{Digest, Fault, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use xxhash_rust::xxh3::Xxh3;

use crate::pipeline::{Encoded, Item};

const MAGIC: &[u8; 8] = b"zdatpart";

/// The longest JSON of an entry: an id and numbers.
const META_BYTES: u32 = 1 << 26;

#[derive(Serialize, Deserialize)]
struct Document {
    id: Option<String>,
    row: u64,
    group: Option<u32>,
    bytes: Option<(u64, u64)>,
    text_bytes: u64,
    content: Digest,
    held_back: bool,
}

#[derive(Serialize, Deserialize)]
struct Loss {
    reason: String,
    bytes: u64,
    content: Digest,
}

/// What a part tells next.
pub(super) enum Entry {
    Item(Item),
    FileEnd(InputRecord),
}

/// Writes a part.
pub(super) struct PartWriter {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Box<Xxh3>,
}

impl PartWriter {
    pub(super) fn create(path: &Path, plan: Digest) -> Result<Self> {
        let file = File::create(path).map_err(|error| Fault::io("create", path, &error))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let mut part = PartWriter { path: path.to_owned(), file, hash: Box::new(Xxh3::new()) };
        part.put(MAGIC)?;
        part.put(&plan.0.to_le_bytes())?;
        Ok(part)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes).map_err(|error| Fault::io("write", &self.path, &error))
    }

    fn entry(&mut self, kind: u8, meta: &impl Serialize) -> Result<()> {
        let json = serde_json::to_vec(meta)
            .map_err(|error| Fault::bug(format!("a part cannot be written: {error}")))?;
        let length = u32::try_from(json.len()).ok().filter(|length| *length <= META_BYTES);
        let length =
            length.ok_or_else(|| Fault::usage("a document's id is too long for a part"))?;
        self.put(&[kind])?;
        self.put(&length.to_le_bytes())?;
        self.put(&json)
    }

    pub(super) fn document(&mut self, document: &Encoded) -> Result<()> {
        let Encoded { id, row, group, bytes, text_bytes, content, split, tokens, .. } = document;
        let meta = Document {
            id: id.clone(),
            row: *row,
            group: *group,
            bytes: *bytes,
            text_bytes: *text_bytes,
            content: *content,
            held_back: *split == Split::Validation,
        };
        self.entry(1, &meta)?;
        self.put(&(tokens.len() as u64).to_le_bytes())?;
        for piece in tokens.chunks(1 << 14) {
            let raw: Vec<u8> = piece.iter().flat_map(|id| id.to_le_bytes()).collect();
            self.put(&raw)?;
        }
        Ok(())
    }

    pub(super) fn loss(&mut self, reason: &str, bytes: u64, content: Digest) -> Result<()> {
        self.entry(2, &Loss { reason: reason.to_owned(), bytes, content })
    }

    pub(super) fn file_end(&mut self, input: &InputRecord) -> Result<()> {
        self.entry(3, input)
    }

    /// Ends the part, on the disk; its digest.
    pub(super) fn finish(mut self) -> Result<Digest> {
        self.put(&[0])?;
        let digest = Digest(self.hash.digest128());
        let fault = |error: &io::Error| Fault::io("write", &self.path, error);
        let mut file = self.file;
        file.write_all(&digest.0.to_le_bytes()).map_err(|error| fault(&error))?;
        let file = file.into_inner().map_err(|error| fault(error.error()))?;
        file.sync_all().map_err(|error| fault(&error))?;
        Ok(digest)
    }
}

/// Reads a part front to back; its digest is checked at its end, before anything that came of it is committed.
pub(super) struct PartReader {
    path: PathBuf,
    file: BufReader<File>,
    hash: Box<Xxh3>,
    reasons: BTreeMap<String, &'static str>,
    /// The digest at its end, once it is read.
    pub(super) digest: Option<Digest>,
}

impl PartReader {
    pub(super) fn open(path: &Path, plan: Digest) -> Result<Self> {
        let file = File::open(path).map_err(|error| Fault::io("read", path, &error))?;
        let file = BufReader::with_capacity(128 << 10, file);
        let hash = Box::new(Xxh3::new());
        let (path, reasons) = (path.to_owned(), BTreeMap::new());
        let mut part = PartReader { path, file, hash, reasons, digest: None };
        let (magic, of) = (part.array::<8>()?, Digest(u128::from_le_bytes(part.array()?)));
        if magic != *MAGIC || of != plan {
            return Err(part.damaged("it is no part of this plan"));
        }
        Ok(part)
    }

    fn damaged(&self, what: &str) -> Fault {
        Fault::data(what)
            .at(self.path.display().to_string())
            .hint("delete this part and run its task again")
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact(bytes);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        self.hash.update(bytes);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn meta<T: DeserializeOwned>(&mut self) -> Result<T> {
        let length = u32::from_le_bytes(self.array()?);
        if length > META_BYTES {
            return Err(self.damaged("an entry has an impossible length"));
        }
        // As much as there is: a length may be a lie.
        let mut json = Vec::new();
        let read = (&mut self.file).take(u64::from(length)).read_to_end(&mut json);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        self.hash.update(&json);
        if json.len() as u64 != u64::from(length) {
            return Err(self.damaged("it ends within an entry"));
        }
        serde_json::from_slice(&json)
            .map_err(|error| self.damaged("an entry is damaged").found(error))
    }

    fn tokens(&mut self) -> Result<Vec<u32>> {
        let mut left = u64::from_le_bytes(self.array()?);
        let (mut tokens, mut raw) = (Vec::new(), Vec::new());
        while left > 0 {
            let piece = left.min(1 << 14);
            raw.resize(piece as usize * 4, 0);
            self.fill(&mut raw)?;
            tokens.extend(raw.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)));
            left -= piece;
        }
        Ok(tokens)
    }

    /// The next entry, or nothing at the end of a part that is whole.
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        let [kind] = self.array()?;
        Ok(Some(match kind {
            0 => {
                let found = Digest(self.hash.digest128());
                let wanted = Digest(u128::from_le_bytes(self.array()?));
                if found != wanted {
                    return Err(self.damaged("this part is damaged").found(found).wanted(wanted));
                }
                self.digest = Some(found);
                return Ok(None);
            }
            1 => {
                let meta: Document = self.meta()?;
                let tokens = self.tokens()?;
                Entry::Item(Item::Document(Box::new(encoded(meta, tokens))))
            }
            2 => {
                let Loss { reason, bytes, content } = self.meta()?;
                let fault = Fault::data(reason.clone());
                // The committer's reasons are constants; a part names the few there are.
                let reason =
                    *self.reasons.entry(reason).or_insert_with_key(|reason| reason.clone().leak());
                Entry::Item(Item::Lost { reason: reason.into(), bytes, content, fault })
            }
            3 => Entry::FileEnd(self.meta()?),
            _ => return Err(self.damaged("an entry is of no kind")),
        }))
    }
}

fn encoded(meta: Document, tokens: Vec<u32>) -> Encoded {
    let Document { id, row, group, bytes, text_bytes, content, held_back } = meta;
    let split = if held_back { Split::Validation } else { Split::Train };
    // A task has audited its documents itself.
    let (consumed, trace, sample) = (content, None, None);
    Encoded { id, row, group, bytes, text_bytes, consumed, content, trace, split, tokens, sample }
}
