//! A part of the scan stage: what the scan saw of one task's documents, stored on disk.
//!
//! ```text
//! "zdatpart", entries: u8 kind, then
//!     3 end of a file     u32 length and JSON: its content
//!     4 reason            u32 length and JSON: a text that entries after it name by its number
//!     5 document seen     u64 place, u8 step, u8 reason, u8 marks and each, u32 length and JSON of matches
//! u8 0, the part's key (32 bytes), xxh3-128 of all bytes before it
//! ```
//!
//! The key is at the end, because it covers the content of the files, which is known only after they were read. The
//! reader supplies file names and the numbers of files and steps: they may change while the part stays the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result, json};
use serde::{Serialize, de::DeserializeOwned};
use store::disk::AtomicFile;
use store::regular;
use xxhash_rust::xxh3::Xxh3;

use super::key::Content;
use crate::dedup::{Mark, Observed};

const MAGIC: &[u8; 8] = b"zdatpart";

/// The longest JSON of an entry: matches and numbers.
const META_BYTES: u32 = 1 << 26;

/// An entry of a part.
pub(super) enum Entry {
    Observed(Observed),
    FileEnd(Content),
}

/// Stands for no step.
const NONE: u8 = u8::MAX;

/// Writes a part.
pub(super) struct PartWriter {
    file: AtomicFile,
    reasons: Vec<&'static str>,
}

impl PartWriter {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let mut part = PartWriter { file: AtomicFile::create(path)?, reasons: Vec::new() };
        part.put(MAGIC)?;
        Ok(part)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.put(bytes)
    }

    fn entry(&mut self, kind: u8, meta: &impl Serialize) -> Result<()> {
        self.put(&[kind])?;
        self.json(meta)
    }

    fn json(&mut self, meta: &impl Serialize) -> Result<()> {
        let json = json::bytes(meta, "a part")?;
        let length = u32::try_from(json.len()).ok().filter(|length| *length <= META_BYTES);
        let length =
            length.ok_or_else(|| Fault::usage("a document has too many matches for a part"))?;
        self.put(&length.to_le_bytes())?;
        self.put(&json)
    }

    pub(super) fn file_end(&mut self, content: Content) -> Result<()> {
        self.entry(3, &content)
    }

    /// Adds a document that the scan saw. Its steps are named by their places.
    pub(super) fn observed(&mut self, observed: &Observed) -> Result<()> {
        let gone = match observed.dropped {
            None => [NONE, 0],
            Some((step, reason)) => [step, self.reason(reason)?],
        };
        self.put(&[5])?;
        self.put(&observed.at.to_le_bytes())?;
        self.put(&gone)?;
        self.put(&[observed.marks.len() as u8])?;
        for (step, mark) in &observed.marks {
            self.put(&[*step as u8])?;
            match mark {
                Mark::Content(content) => {
                    self.put(&[0])?;
                    self.put(&content.0.to_le_bytes())?;
                }
                Mark::Bands(keys) => {
                    self.put(&[1])?;
                    self.put(&(keys.len() as u16).to_le_bytes())?;
                    keys.iter().try_for_each(|key| self.put(&key.to_le_bytes()))?;
                }
                Mark::Text(text) => {
                    self.put(&[2])?;
                    self.put(&(text.len() as u64).to_le_bytes())?;
                    self.put(text.as_bytes())?;
                }
            }
        }
        self.json(&observed.matches)
    }

    /// The number of a reason, which is written at its first use.
    fn reason(&mut self, reason: &'static str) -> Result<u8> {
        if let Some(known) = self.reasons.iter().position(|known| *known == reason) {
            return Ok(known as u8);
        }
        self.reasons.push(reason);
        self.entry(4, &reason)?;
        u8::try_from(self.reasons.len() - 1).map_err(|_| Fault::bug("too many reasons in a part"))
    }

    /// Completes and syncs the part; returns its digest.
    pub(super) fn finish(mut self, key: Identity) -> Result<Digest> {
        self.put(&[0])?;
        self.put(&key.0)?;
        let digest = self.file.digest();
        self.put(&digest.0.to_le_bytes())?;
        self.file.commit()?;
        Ok(digest)
    }
}

/// Reads a part sequentially; its digest is checked at the end, before any of its data is committed.
pub(super) struct PartReader {
    path: PathBuf,
    key: Identity,
    file: BufReader<File>,
    hash: Box<Xxh3>,
    reasons: BTreeMap<String, &'static str>,
    /// The reasons that scanned documents name by number.
    numbered: Vec<&'static str>,
    /// The digest at the end of the file.
    at_end: Digest,
    /// The digest, once all bytes before it were read and match.
    pub(super) digest: Option<Digest>,
}

impl PartReader {
    /// Opens the part of this key. An intact part of another key under this name is refused before anything is read.
    pub(super) fn open(path: &Path, key: Identity) -> Result<Self> {
        let mut file = regular::open(path).map_err(|error| Fault::io("read", path, &error))?;
        let end = tail(&mut file);
        let begin = file.seek(SeekFrom::Start(0));
        begin.map_err(|error| Fault::io("read", path, &error))?;
        let file = BufReader::with_capacity(128 << 10, file);
        let hash = Box::new(Xxh3::new());
        let (path, reasons) = (path.to_owned(), BTreeMap::new());
        let numbered = Vec::new();
        let (at_end, digest) = (Digest(0), None);
        let mut part = PartReader { path, key, file, hash, reasons, numbered, at_end, digest };
        if part.array()? != *MAGIC {
            return Err(part.damaged("this is not a part"));
        }
        match end {
            Ok((found, digest)) if found == key => part.at_end = digest,
            Ok(_) => return Err(part.damaged("this is another part than its name says, or cut")),
            Err(error) if is_short(&error) => return Err(part.damaged("it ends within an entry")),
            Err(error) => return Err(Fault::io("read", &part.path, &error)),
        }
        Ok(part)
    }

    pub(super) fn damaged(&self, what: &str) -> Fault {
        Fault::data(what)
            .at(self.path.display().to_string())
            .hint("delete this part and run its task again")
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact(bytes);
        read.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => self.damaged("it ends within an entry"),
            _ => Fault::io("read", &self.path, &error),
        })?;
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
        let json = self.bytes(u64::from(length))?;
        serde_json::from_slice(&json)
            .map_err(|error| self.damaged("an entry is damaged").found(error))
    }

    /// The next bytes.
    fn bytes(&mut self, length: u64) -> Result<Vec<u8>> {
        // Reads only what exists: the length may be wrong.
        let mut bytes = Vec::new();
        let read = (&mut self.file).take(length).read_to_end(&mut bytes);
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        self.hash.update(&bytes);
        if bytes.len() as u64 != length {
            return Err(self.damaged("it ends within an entry"));
        }
        Ok(bytes)
    }

    /// Reasons are constants elsewhere; the few that a part names are interned here.
    fn constant(&mut self, reason: String) -> &'static str {
        self.reasons.entry(reason).or_insert_with_key(|reason| reason.clone().leak())
    }

    fn observed(&mut self) -> Result<Observed> {
        let at = u64::from_le_bytes(self.array()?);
        let [step, reason, marks] = self.array()?;
        let gone = match (step, self.numbered.get(usize::from(reason))) {
            (NONE, _) => None,
            (_, Some(reason)) => Some((step, *reason)),
            (_, None) => return Err(self.damaged("an entry names no reason")),
        };
        let mut found = Vec::new();
        for _ in 0..marks {
            let [step, kind] = self.array()?;
            let mark = match kind {
                0 => Mark::Content(Digest(u128::from_le_bytes(self.array()?))),
                1 => {
                    let count = u16::from_le_bytes(self.array()?);
                    let keys = (0..count).map(|_| self.array().map(u64::from_le_bytes));
                    Mark::Bands(keys.collect::<Result<_>>()?)
                }
                2 => {
                    let length = u64::from_le_bytes(self.array()?);
                    let text = String::from_utf8(self.bytes(length)?);
                    Mark::Text(text.map_err(|_| self.damaged("a text is not valid UTF-8"))?)
                }
                _ => return Err(self.damaged("an entry holds a mark of no kind")),
            };
            found.push((usize::from(step), mark));
        }
        // Bytes are counted only while documents are read from their files.
        Ok(Observed { at, bytes: 0, dropped: gone, marks: found, matches: self.meta()? })
    }

    /// The next entry, or nothing at the end of an intact part.
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        let mut kind = self.array::<1>()?[0];
        while kind == 4 {
            let reason = self.meta()?;
            let reason = self.constant(reason);
            self.numbered.push(reason);
            [kind] = self.array()?;
        }
        Ok(Some(match kind {
            0 => {
                if self.array()? != self.key.0 {
                    return Err(self.damaged("it is not the part that its name says"));
                }
                let found = Digest(self.hash.digest128());
                let wanted = Digest(u128::from_le_bytes(self.array()?));
                if found != wanted {
                    return Err(self.damaged("this part is damaged").found(found).wanted(wanted));
                }
                self.digest = Some(found);
                return Ok(None);
            }
            3 => Entry::FileEnd(self.meta()?),
            5 => Entry::Observed(self.observed()?),
            _ => return Err(self.damaged("an entry is of no kind")),
        }))
    }
}

/// The key and the digest at the end of a part.
fn tail(file: &mut File) -> io::Result<(Identity, Digest)> {
    let (mut key, mut digest) = ([0; 32], [0; 16]);
    file.seek(SeekFrom::End(-48))?;
    file.read_exact(&mut key)?;
    file.read_exact(&mut digest)?;
    Ok((Identity(key), Digest(u128::from_le_bytes(digest))))
}

/// Whether the bytes of a part are those that were written; their meaning is not checked.
pub(super) fn is_whole(path: &Path) -> Result<bool> {
    let fault = |error: &io::Error| Fault::io("read", path, error);
    let mut file = regular::open(path).map_err(|error| fault(&error))?;
    let length = file.metadata().map_err(|error| fault(&error))?.len();
    let Some(hashed) = length.checked_sub(16).filter(|hashed| *hashed >= 32) else {
        return Ok(false);
    };
    let found = regular::digest((&mut file).take(hashed), &|_| ());
    let (_, found) = found.map_err(|error| fault(&error))?;
    let (key, wanted) = tail(&mut file).map_err(|error| fault(&error))?;
    let name = path.file_stem().is_some_and(|name| name == key.to_string().as_str());
    Ok(name && found == wanted)
}

/// The digest at the end of a part, not checked here but by its readers.
pub(super) fn digest_at_end(path: &Path, key: Identity) -> Result<Digest> {
    PartReader::open(path, key).map(|part| part.at_end)
}

/// The same, once all bytes were read and match it.
pub(super) fn whole_digest(path: &Path, key: Identity) -> Result<Digest> {
    let part = PartReader::open(path, key)?;
    match is_whole(path)? {
        true => Ok(part.at_end),
        false => Err(part.damaged("this part is damaged")),
    }
}

/// Whether a file is shorter than the trailer of a part.
fn is_short(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidInput)
}
