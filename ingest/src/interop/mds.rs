//! MosaicML Streaming's MDS: a folder of `index.json` and shards.
//!
//! ```text
//! shard    u32 n    u32 offset[n + 1], from the shard's beginning    config, JSON    samples
//! sample   u32 size of each column that has no fixed one    the columns, sorted by name
//! tokens   ndarray:uint16    one byte, 4 x dimensions + width of their sizes    the sizes    the values
//!          ndarray           the same after one byte that names the type
//!          bytes             nothing but the values: --dtype says what they are
//! ```
//!
//! Only two columns are decoded, the tokens and `id`; everything else in a sample (including pickles) is skipped as
//! bytes. The package's sums and compressions are in `shard`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::{Fault, Identity, Result, counted};
use serde::Deserialize;
use serde_json::{Value, json};
use store::{FileRecord, InputRecord};

use super::shard::{RawFile, check, unpacked};
use super::tokens::{Hashing, append, beyond};
use super::{Documents, Hints, NextDocument, Width, Writer, begin, damaged, end};
use crate::disk::Disk;

/// The file that makes a folder a data set.
pub(super) const INDEX: &str = "index.json";

/// The largest `index.json` that is read: some millions of shards.
const INDEX_BYTES: u64 = 1 << 30;

/// Approximate size of a shard, the reference's own limit.
const SHARD_BYTES: u64 = 1 << 26;

/// Offsets are four bytes.
const SHARD_BYTES_MAX: u64 = u32::MAX as u64;

#[derive(Deserialize)]
struct Index {
    version: u64,
    shards: Vec<Value>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Shard {
    column_encodings: Vec<String>,
    column_names: Vec<String>,
    column_sizes: Vec<Option<u64>>,
    #[serde(default)]
    compression: Option<String>,
    format: String,
    pub(super) raw_data: RawFile,
    samples: u64,
    #[serde(default)]
    zip_data: Option<RawFile>,
}

impl Shard {
    /// The names of its files, plain and compressed, if they are names of files in its own folder.
    pub(super) fn files(&self) -> Vec<String> {
        let files = [Some(&self.raw_data), self.zip_data.as_ref()].into_iter().flatten();
        files.filter(|file| file.is_beside()).map(|file| file.basename.clone()).collect()
    }
}

/// The shards of the data set in `folder`, and its index as an input.
pub(super) fn shards(disk: &dyn Disk, folder: &Path) -> Result<(Vec<Shard>, InputRecord)> {
    let path = folder.join(INDEX);
    let (bytes, record) = Hashing::whole(disk, &path, INDEX_BYTES)?;
    let wrong = |error: serde_json::Error| {
        damaged(&path, "this is not an index of MDS shards").found(error)
    };
    let index: Index = serde_json::from_slice(&bytes).map_err(wrong)?;
    if index.version != 2 {
        return Err(damaged(&path, "this index is of another version")
            .found(index.version)
            .wanted(2));
    }
    let shard = |value: Value| {
        let shard: Shard = serde_json::from_value(value).map_err(wrong)?;
        if shard.format == "mds" {
            return Ok(shard);
        }
        let found = shard.format;
        Err(damaged(&path, "it holds shards of another format").found(found).wanted("mds"))
    };
    Ok((index.shards.into_iter().map(shard).collect::<Result<_>>()?, record))
}

/// How the column of tokens is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    /// Values only.
    Bare(Width),
    /// The sizes, then the values.
    Shaped(Width),
    /// The type, the sizes, the values.
    Free,
}

fn encoding(text: &str, hints: &Hints, path: &Path) -> Result<Encoding> {
    let place = || format!("{}: column {:?}", path.display(), hints.column);
    let mut parts = text.split(':');
    let found = match (parts.next(), parts.next(), parts.next()) {
        (Some("bytes"), None, None) => hints.width.map(Encoding::Bare).ok_or_else(|| {
            Fault::usage("nothing says what the bytes of this column are")
                .at(place())
                .wanted("--dtype (old releases of llm-foundry write int64)")
        })?,
        (Some("ndarray"), None, None) => Encoding::Free,
        (Some("ndarray"), Some(kind), shape) => {
            let width = Width::from_name(kind).ok_or_else(|| {
                damaged(path, "its values are not whole numbers").at(place()).found(kind)
            })?;
            if shape.is_some() { Encoding::Bare(width) } else { Encoding::Shaped(width) }
        }
        _ => {
            return Err(damaged(path, "this column cannot hold tokens")
                .at(place())
                .found(text.chars().take(80).collect::<String>())
                .wanted("ndarray, ndarray:DTYPE or bytes")
                .hint("name another --column; a pickle is never run"));
        }
    };
    Ok(found)
}

/// The values of an encoded column, and their width.
fn values(encoding: Encoding, bytes: &[u8]) -> Option<(Width, &[u8])> {
    let (width, rest) = match encoding {
        Encoding::Bare(width) => return Some((width, bytes)),
        Encoding::Shaped(width) => (width, bytes),
        Encoding::Free => {
            let (code, rest) = bytes.split_first()?;
            let codes = [
                (8, Width::U8),
                (9, Width::I8),
                (16, Width::U16),
                (17, Width::I16),
                (32, Width::U32),
                (33, Width::I32),
                (64, Width::U64),
                (65, Width::I64),
            ];
            (codes.iter().find(|(known, _)| known == code)?.1, rest)
        }
    };
    let (head, rest) = rest.split_first()?;
    let (dimensions, size) = (usize::from(head >> 2), 1usize << (head & 3));
    let (shape, values) = rest.split_at_checked(dimensions * size)?;
    let mut count = 1u64;
    for raw in shape.chunks_exact(size) {
        let mut word = [0; 8];
        word[..size].copy_from_slice(raw);
        count = count.checked_mul(u64::from_le_bytes(word))?;
    }
    (count.checked_mul(width.bytes())? == values.len() as u64).then_some((width, values))
}

/// Reads one shard into memory: it is at most 4 GiB, and never larger than its file claims.
pub(super) struct Reader {
    path: PathBuf,
    data: Vec<u8>,
    record: InputRecord,
    sizes: Vec<Option<u64>>,
    encoding: Encoding,
    column: usize,
    id: Option<usize>,
    samples: u64,
    sample: u64,
    vocab: u32,
}

impl Reader {
    pub(super) fn open(
        disk: &dyn Disk,
        folder: &Path,
        shard: &Shard,
        hints: &Hints,
    ) -> Result<Self> {
        let index = folder.join(INDEX);
        let columns = shard.column_names.len();
        if shard.column_encodings.len() != columns || shard.column_sizes.len() != columns {
            return Err(damaged(&index, "its lists of columns differ in length"));
        }
        let names = &shard.column_names;
        let column = names.iter().position(|name| *name == hints.column).ok_or_else(|| {
            Fault::usage(format!("this shard has no column {:?}", hints.column))
                .at(index.display().to_string())
                .wanted(format!("one of {}", names.join(", ")))
                .hint("name the column of tokens: --column NAME")
        })?;
        let id = names.iter().position(|name| name == "id");
        let id = id.filter(|id| shard.column_encodings[*id] == "str");
        let (path, data, record) = load(disk, folder, shard)?;
        let encoding = encoding(&shard.column_encodings[column], hints, &path)?;
        let (sizes, samples, vocab) = (shard.column_sizes.clone(), shard.samples, hints.vocab);
        let reader =
            Reader { path, data, record, sizes, encoding, column, id, samples, sample: 0, vocab };
        reader.check_head()?;
        Ok(reader)
    }

    /// Checks the number of samples and the outer offsets against the size.
    fn check_head(&self) -> Result<()> {
        let (count, size) = (self.word(0), self.data.len() as u64);
        if count.map(u64::from) != Some(self.samples) {
            return Err(damaged(&self.path, "it does not hold as many samples as its index says")
                .found(count.map_or("no count".to_owned(), |count| count.to_string()))
                .wanted(self.samples));
        }
        let head = 4 * (self.samples + 2);
        let last = self.word(self.samples + 1).map(u64::from);
        let first = self.word(1).map(u64::from);
        if last != Some(size) || first.is_none_or(|first| first < head || first > size) {
            return Err(damaged(&self.path, "its samples do not end where it does")
                .found(last.map_or("no end".to_owned(), |last| format!("byte {last}")))
                .wanted(format!("byte {size}")));
        }
        Ok(())
    }

    /// Word number `index` of the header.
    fn word(&self, index: u64) -> Option<u32> {
        let at = usize::try_from(index.checked_mul(4)?).ok()?;
        self.data.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word))
    }

    /// The ranges of the two columns in the current sample.
    fn columns(&self, first: usize, end: usize) -> Option<(Range<usize>, Option<&[u8]>)> {
        let sample = self.data.get(first..end)?;
        let variable = self.sizes.iter().filter(|size| size.is_none()).count();
        let (heads, _) = sample.split_at_checked(4 * variable)?;
        let mut heads = heads.as_chunks().0.iter().map(|word| u64::from(u32::from_le_bytes(*word)));
        let (mut at, mut tokens, mut id) = (first + 4 * variable, None, None);
        for (column, size) in self.sizes.iter().enumerate() {
            let size = size.or_else(|| heads.next())?;
            let stop = at.checked_add(usize::try_from(size).ok()?).filter(|stop| *stop <= end)?;
            if column == self.column {
                tokens = Some(at..stop);
            }
            if Some(column) == self.id {
                id = self.data.get(at..stop);
            }
            at = stop;
        }
        (at == end).then_some((tokens?, id))
    }
}

/// The bytes of a shard, decompressed and checked against the sums in its index.
fn load(disk: &dyn Disk, folder: &Path, shard: &Shard) -> Result<(PathBuf, Vec<u8>, InputRecord)> {
    let raw = &shard.raw_data;
    for file in [Some(raw), shard.zip_data.as_ref()].into_iter().flatten() {
        if !file.is_beside() {
            return Err(damaged(&folder.join(INDEX), "it names a file outside its folder")
                .found(format!("{:?}", file.basename)));
        }
    }
    if raw.bytes > SHARD_BYTES_MAX {
        return Err(damaged(&folder.join(INDEX), "a shard is larger than its offsets reach")
            .found(counted(raw.bytes, "byte"))
            .wanted(format!("at most {SHARD_BYTES_MAX}")));
    }
    let plain = folder.join(&raw.basename);
    let zip = shard.zip_data.as_ref().filter(|_| !plain.is_file());
    let Some(zip) = zip else {
        let (data, record) = Hashing::whole(disk, &plain, raw.bytes)?;
        check(&plain, &data, raw)?;
        return Ok((plain, data, record));
    };
    let path = folder.join(&zip.basename);
    let (packed, record) = Hashing::whole(disk, &path, zip.bytes)?;
    check(&path, &packed, zip)?;
    let data = unpacked(&path, &packed, shard.compression.as_deref(), raw.bytes)?;
    check(&path, &data, raw)?;
    Ok((path, data, record))
}

impl Documents for Reader {
    fn next(&mut self, tokens: &mut Vec<u32>) -> Result<Option<NextDocument>> {
        tokens.clear();
        if self.sample == self.samples {
            return Ok(None);
        }
        let place = format!("{}: sample {}", self.path.display(), self.sample);
        let wrong = |what: &str| damaged(&self.path, what).at(place.clone());
        let bounds = (self.word(self.sample + 1), self.word(self.sample + 2));
        let (Some(first), Some(end)) = bounds else { return Err(wrong("it has no offset")) };
        let (first, end) = (first as usize, end as usize);
        if first < 4 * (self.samples as usize + 2) || first > end {
            return Err(wrong("it does not begin where the one before it ends"));
        }
        let (at, id) =
            self.columns(first, end).ok_or_else(|| wrong("its columns do not fill it"))?;
        let (width, raw) = values(self.encoding, &self.data[at.clone()])
            .ok_or_else(|| wrong("its tokens are not an array of whole numbers"))?;
        if !(raw.len() as u64).is_multiple_of(width.bytes()) {
            return Err(wrong("its tokens end within one"));
        }
        if let Err((index, value)) = width.decode(raw, self.vocab, tokens) {
            return Err(beyond(&self.path, index as u64, value, self.vocab)
                .at(format!("{place}, token {index}")));
        }
        let id = match id.map(|id| std::str::from_utf8(id)) {
            None => None,
            Some(Ok(id)) => Some(id.to_owned()),
            Some(Err(_)) => return Err(wrong("its id is not UTF-8")),
        };
        self.sample += 1;
        self.record.documents += 1;
        Ok(Some(NextDocument { id, bytes: (at.start as u64, at.end as u64) }))
    }

    fn inputs(&self) -> Vec<InputRecord> {
        vec![self.record.clone()]
    }
}

/// Writes a data set of the columns `id` and `tokens`.
pub(super) struct Files {
    folder: PathBuf,
    width: Width,
    samples: Vec<u8>,
    offsets: Vec<u32>,
    shards: Vec<Value>,
    done: Vec<FileRecord>,
}

impl Files {
    pub(super) fn create(folder: &Path, vocab: u32) -> Result<Self> {
        let width = if vocab <= 1 << 16 { Width::U16 } else { Width::U32 };
        Ok(Files {
            folder: folder.to_owned(),
            width,
            samples: Vec::new(),
            offsets: vec![0],
            shards: Vec::new(),
            done: Vec::new(),
        })
    }

    fn config(&self) -> Value {
        json!({
            "column_encodings": ["str", format!("ndarray:{}", self.width.name())],
            "column_names": ["id", "tokens"], "column_sizes": [null, null], "compression": null,
            "format": "mds", "hashes": ["sha256"], "size_limit": SHARD_BYTES, "version": 2,
        })
    }

    /// Completes the open shard.
    fn cut(&mut self) -> Result<()> {
        let count = self.offsets.len() - 1;
        if count == 0 {
            return Ok(());
        }
        let config = spaced(&self.config());
        let head = 4 * (count as u64 + 2) + config.len() as u64;
        let mut bytes = Vec::with_capacity(head as usize + self.samples.len());
        bytes.extend((count as u32).to_le_bytes());
        for offset in &self.offsets {
            let offset = u32::try_from(u64::from(*offset) + head);
            let offset = offset.map_err(|_| too_large(&self.folder))?;
            bytes.extend(offset.to_le_bytes());
        }
        bytes.extend(config.as_bytes());
        bytes.append(&mut self.samples);
        self.offsets.truncate(1);
        let name = format!("shard.{:05}.mds", self.shards.len());
        let mut shard = self.config();
        shard["samples"] = json!(count);
        shard["zip_data"] = Value::Null;
        shard["raw_data"] = json!({"basename": name, "bytes": bytes.len(),
                                   "hashes": {"sha256": Identity::of_bytes(&bytes).to_string()}});
        self.shards.push(shard);
        let mut sink = begin(&self.folder.join(name))?;
        sink.put(&bytes)?;
        self.done.push(end(sink)?);
        Ok(())
    }
}

/// The fault for a shard whose offsets exceed four bytes.
fn too_large(folder: &Path) -> Fault {
    Fault::usage("a document is too large for an MDS shard, which ends at 4 GiB")
        .at(folder.display().to_string())
        .hint("export to another format")
}

/// JSON in the format of Python's `json.dumps`, so that a shard equals the reference's.
fn spaced(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let sorted: BTreeMap<&String, &Value> = map.iter().collect();
            let part =
                |(key, value): (&String, &Value)| format!("{}: {}", json!(key), spaced(value));
            format!("{{{}}}", sorted.into_iter().map(part).collect::<Vec<_>>().join(", "))
        }
        Value::Array(list) => {
            format!("[{}]", list.iter().map(spaced).collect::<Vec<_>>().join(", "))
        }
        value => value.to_string(),
    }
}

impl Writer for Files {
    fn document(&mut self, tokens: &[u32], id: &str, _src: &str, _row: u64) -> Result<()> {
        let count = tokens.len() as u64;
        // The smallest width that holds the only dimension.
        let (code, size) = match count {
            0..0x100 => (0u8, 1),
            0x100..0x1_0000 => (1, 2),
            0x1_0000..0x1_0000_0000 => (2, 4),
            _ => return Err(too_large(&self.folder)),
        };
        let width = self.width.bytes();
        let (id_bytes, array) = (id.len() as u64, 1 + size + count * width);
        let sample = 8 + id_bytes + array;
        if 4 + self.samples.len() as u64 + sample > SHARD_BYTES {
            self.cut()?;
        }
        let words = (u32::try_from(id_bytes), u32::try_from(array));
        let (Ok(id_bytes), Ok(array)) = words else { return Err(too_large(&self.folder)) };
        self.samples.extend(id_bytes.to_le_bytes());
        self.samples.extend(array.to_le_bytes());
        self.samples.extend(id.as_bytes());
        self.samples.push(1 << 2 | code);
        self.samples.extend(&count.to_le_bytes()[..size as usize]);
        append(tokens, width, &mut self.samples);
        let end = u32::try_from(self.samples.len()).map_err(|_| too_large(&self.folder))?;
        self.offsets.push(end);
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<FileRecord>> {
        self.cut()?;
        let index = json!({"version": 2, "shards": self.shards});
        let mut sink = begin(&self.folder.join(INDEX))?;
        sink.put(spaced(&index).as_bytes())?;
        self.done.push(end(sink)?);
        Ok(std::mem::take(&mut self.done))
    }
}
