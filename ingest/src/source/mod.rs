//! From raw files to documents: JSON Lines, Parquet, Arrow IPC and plain text.
//!
//! Reading is split by thread: an [`Input`] belongs to one reader thread, which reads, decompresses and cuts at record
//! boundaries; its [`Slab`]s are parsed on any worker thread.
//!
//! Invariant: the documents of a file, their order, rows and byte ranges depend only on the file's bytes, not on the
//! size of slabs.
//! Invariant: whatever a file contains ends in a document, in a counted drop, or in a [`Fault`]; never in a panic.

mod arrays;
mod arrow;
mod columns;
pub(crate) mod decompress;
mod file;
mod groups;
mod ipc;
mod json;
mod jsonl;
pub(crate) mod kinds;
pub(crate) mod names;
mod parquet;
mod records;
mod text;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use contract::{Class, Fault, Field, Framed, Identity, Result, counted};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use store::location::LocalFile;
use store::{KEPT_BYTES_MAX, Location};

pub use self::file::SourceFile;
pub(crate) use self::file::{Place, Stamp};
pub(crate) use self::groups::{Cut, GroupHashes, Layout};
use crate::disk::{Disk, Real};

/// What a file holds, whatever it is compressed with.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// One JSON object per line, or one array of them in a file called so (plain, gzip or zstd).
    #[serde(rename = "jsonl")]
    JsonLines,
    /// Parquet with a string column.
    Parquet,
    /// Arrow IPC, file or stream, with a string column.
    Arrow,
    /// One document per file (plain, gzip or zstd).
    Text,
}

impl Format {
    /// Every format, in the order in which messages list them.
    pub const ALL: [Format; 4] = [Format::JsonLines, Format::Parquet, Format::Arrow, Format::Text];

    /// The format of a file name's extension; none for other extensions, since reading a table as one text would be a
    /// silent loss. Source code and other text needs `format = "text"`.
    ///
    /// A final `.gz` or `.zst` is the compression; the extension before it counts.
    pub fn guess(path: &Path) -> Option<Format> {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
        let name = name.unwrap_or_default();
        let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
        match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
            "jsonl" | "jsonlines" | "jl" | "ndjson" | "json" => Some(Format::JsonLines),
            "parquet" | "pq" => Some(Format::Parquet),
            "arrow" | "arrows" | "ipc" | "feather" => Some(Format::Arrow),
            "txt" | "text" | "md" | "markdown" | "rst" | "tex" => Some(Format::Text),
            _ => None,
        }
    }

    /// Whether a file of this format can be compressed as a whole: columnar files cannot, since they are read from the
    /// end.
    pub fn is_stream(self) -> bool {
        matches!(self, Format::JsonLines | Format::Text)
    }

    /// Whether a file's extension is that of a compression.
    pub fn is_compressed(name: &str) -> bool {
        let name = name.to_lowercase();
        name.ends_with(".gz") || name.ends_with(".zst")
    }

    /// The name used in `format = "..."`.
    pub fn name(self) -> &'static str {
        match self {
            Format::JsonLines => "jsonl",
            Format::Parquet => "parquet",
            Format::Arrow => "arrow",
            Format::Text => "text",
        }
    }
}

/// The fields of a record to read. Parts of a path are separated by dots, `meta.id`; a dot in a name has a backslash,
/// `a\.b`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fields {
    /// The source of the text.
    pub text: TextAt,
    /// The path of the document's id, if it has one.
    pub id: Option<String>,
    /// The paths of the fields that are kept with the document's provenance.
    pub keep: Vec<String>,
}

/// The source of a document's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextAt {
    /// The string at this path.
    Path(String),
    /// The whole record as JSON, from which a template takes these fields, or all of them if the list is empty.
    Record(Vec<String>),
}

impl fmt::Display for TextAt {
    /// The canonical spelling, which enters identities. No path begins with a dot.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextAt::Path(path) => f.write_str(path),
            TextAt::Record(fields) => write!(f, ".{}", fields.join(",")),
        }
    }
}

impl Field for TextAt {
    fn feed(&self, framed: &mut Framed) {
        match self {
            TextAt::Path(path) => framed.field("path").field(path),
            TextAt::Record(fields) => framed.field("record").field(fields),
        };
    }
}

impl Fields {
    /// The string at `text` and the id at `id`.
    pub fn at(text: &str, id: Option<&str>) -> Self {
        Fields { text: TextAt::Path(text.to_owned()), id: id.map(str::to_owned), keep: Vec::new() }
    }

    /// Whole records, from which a template takes these fields.
    pub fn record(fields: impl IntoIterator<Item = impl Into<String>>, id: Option<&str>) -> Self {
        let fields = fields.into_iter().map(Into::into).collect();
        Fields { text: TextAt::Record(fields), id: id.map(str::to_owned), keep: Vec::new() }
    }

    /// Whether the text is the whole record.
    pub fn is_record(&self) -> bool {
        matches!(self.text, TextAt::Record(_))
    }

    /// Whether a columnar reader makes a JSON object of each row: for a text of the whole record, and for kept fields.
    fn needs_rows(&self) -> bool {
        self.is_record() || !self.keep.is_empty()
    }

    /// The path of the text; a whole record has none.
    fn path(&self) -> &str {
        match &self.text {
            TextAt::Path(path) => path,
            TextAt::Record(_) => "",
        }
    }

    /// The needed fields of a whole record.
    fn columns(&self) -> &[String] {
        match &self.text {
            TextAt::Path(_) => &[],
            TextAt::Record(fields) => fields,
        }
    }
}

/// Limits on the memory of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Approximate bytes per slab; a slab holds at least one record.
    pub slab_bytes: usize,
    /// A longer record is dropped, and is skipped without being held in memory.
    pub max_document_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        // Slabs in flight limit the memory of a build; larger ones were no faster.
        Limits { slab_bytes: 256 << 10, max_document_bytes: 1 << 30 }
    }
}

/// One file being read, on its reader thread.
pub trait Input: Send {
    /// The next records, or nothing at the end of the file.
    fn next_slab(&mut self) -> Result<Option<Slab>>;

    /// Raw bytes read so far.
    fn raw_bytes(&self) -> u64;

    /// What was read, once there are no more slabs.
    fn content(&self) -> Content;
}

/// What a file, or the groups of one that a part of a build reads, was found to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Raw bytes.
    pub bytes: u64,
    /// Their identity: of a file with groups, that of the hashes of these and of its footer.
    pub sha256: Identity,
    /// Row groups or record batches; one where it has none of these.
    pub segments: u64,
    /// The hashes, if it has groups.
    pub(crate) hashes: Option<GroupHashes>,
}

/// Whole records of one file, read but not yet parsed.
pub struct Slab(Records);

enum Records {
    Lines(jsonl::Lines),
    TooLong(jsonl::TooLong),
    Rows(columns::Rows),
    Whole(text::Whole),
    Objects(records::Rows),
    /// Records of an object's local copy; errors name the object.
    Copied(Box<Slab>, Arc<Names>),
}

impl Slab {
    /// The documents of this slab, in file order, on a worker thread.
    pub fn parse(&self, fields: &Fields) -> Result<Vec<Parsed>> {
        match &self.0 {
            Records::Lines(lines) => Ok(lines.parse(fields)),
            Records::TooLong(line) => Ok(vec![line.parse()]),
            Records::Rows(rows) => rows.parse(fields),
            Records::Whole(whole) => Ok(vec![whole.parse(fields)]),
            Records::Objects(rows) => Ok(rows.parse(fields)),
            Records::Copied(slab, names) => {
                let parsed = slab.parse(fields).map_err(|fault| names.told(fault))?;
                Ok(parsed.into_iter().map(|parsed| names.parsed(parsed)).collect())
            }
        }
    }
}

/// The result for one record.
#[derive(Debug)]
pub enum Parsed {
    /// A document with a text that is not empty.
    Document(Document),
    /// A record without one.
    Dropped {
        /// One of `malformed`, `missing text`, `invalid UTF-8`, `too large`, `empty`.
        reason: &'static str,
        /// Its position in its file.
        row: Row,
        /// Its length in the decompressed stream, as far as known.
        bytes: u64,
        /// The same as a fault that names the place.
        fault: Fault,
    },
}

/// The position of a record in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Row group (Parquet) or record batch (Arrow), from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Line or element of an array, from 1 (JSON); row within its group, from 0 (Parquet, Arrow); 0 (text).
    pub row: u64,
}

/// One document and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Its own id, if an id field was named and the record has it.
    pub id: Option<String>,
    /// Its text, never empty.
    pub text: String,
    /// Line or element of an array, from 1 (JSON); row within its group, from 0 (Parquet, Arrow); 0 (text).
    pub row: u64,
    /// Row group (Parquet) or record batch (Arrow), from 0.
    pub group: Option<u32>,
    /// Byte range of the record in the decompressed stream, without its line ending.
    pub bytes: Option<(u64, u64)>,
    /// The values of the kept fields, in their order: strings as they are, other JSON without white space, null and
    /// absent ones none.
    pub kept: Vec<Option<String>>,
}

impl Document {
    /// The name of the document in an error.
    pub(crate) fn place(&self, file: &str) -> String {
        place(file, self.group, self.row)
    }
}

/// The name of a record of `file` in an error.
pub(crate) fn place(file: &str, group: Option<u32>, row: u64) -> String {
    match group {
        Some(group) => format!("{file}: row {row} of group {group}"),
        None => format!("{file}:{row}"),
    }
}

/// Opens a file for reading as `format`.
///
/// The fields are those for which its slabs will be parsed: a columnar reader skips the others, and refuses at once a
/// file that lacks these.
pub fn open(
    file: impl Into<Location>,
    format: Format,
    fields: &Fields,
    limits: &Limits,
) -> Result<Box<dyn Input>> {
    open_cut(&file.into(), format, fields, limits, None)
}

/// The same for some groups of the file.
fn open_cut(
    file: &Location,
    format: Format,
    fields: &Fields,
    limits: &Limits,
    cut: Option<&Cut>,
) -> Result<Box<dyn Input>> {
    if let Location::Local(path) = file {
        return open_on(&Real, path, format, fields, limits, cut);
    }
    file.reread(|| {
        let copy = file.fetch().map_err(|error| file.fault("open", &error))?;
        let (object, doubted) = (file.clone(), AtomicBool::new(false));
        let names = Arc::new(Names { copy, object, doubted });
        let opened = open_on(&Real, names.copy.path(), format, fields, limits, cut);
        let input = opened.map_err(|fault| names.named(fault))?;
        Ok(Box::new(Copied { input, names }) as Box<dyn Input>)
    })
}

/// An object that is read from its local copy: errors name the object.
struct Copied {
    input: Box<dyn Input>,
    names: Arc<Names>,
}

/// A copy, and the object that it is a copy of.
struct Names {
    copy: LocalFile,
    object: Location,
    /// Whether the object was fetched once more because its copy does not read right.
    doubted: AtomicBool,
}

impl Names {
    /// The fault with the name of the object instead of the copy's.
    fn named(&self, fault: Fault) -> Fault {
        let copy = self.copy.path().display().to_string();
        match fault.place().and_then(|place| place.strip_prefix(&copy)) {
            Some(within) => {
                let place = format!("{}{within}", self.object);
                fault.at(place)
            }
            None => fault,
        }
    }

    /// The same; damage is first compared with a new fetch of the object, since the copy may be at fault.
    fn told(&self, fault: Fault) -> Fault {
        let fault = self.named(fault);
        match fault.class() == Class::Data && !self.doubted.swap(true, Ordering::Relaxed) {
            true => self.object.doubt(&self.copy, fault),
            false => fault,
        }
    }

    fn parsed(&self, parsed: Parsed) -> Parsed {
        match parsed {
            Parsed::Dropped { reason, row, bytes, fault } => {
                let is_damage = ["malformed", "invalid UTF-8"].contains(&reason);
                let fault = if is_damage { self.told(fault) } else { self.named(fault) };
                Parsed::Dropped { reason, row, bytes, fault }
            }
            document => document,
        }
    }
}

impl Input for Copied {
    fn next_slab(&mut self) -> Result<Option<Slab>> {
        let slab = self.input.next_slab().map_err(|fault| self.names.told(fault))?;
        let named = |slab| Slab(Records::Copied(Box::new(slab), Arc::clone(&self.names)));
        Ok(slab.map(named))
    }

    fn raw_bytes(&self) -> u64 {
        self.input.raw_bytes()
    }

    fn content(&self) -> Content {
        self.input.content()
    }
}

/// The number of rows that a Parquet file states.
pub(crate) fn rows(path: &Path) -> Result<u64> {
    parquet::rows(&Real, path)
}

fn open_on(
    disk: &dyn Disk,
    path: &Path,
    format: Format,
    fields: &Fields,
    limits: &Limits,
    cut: Option<&Cut>,
) -> Result<Box<dyn Input>> {
    Ok(match format {
        Format::JsonLines => Box::new(jsonl::Reader::open(disk, path, *limits)?),
        Format::Parquet if fields.needs_rows() => {
            Box::new(records::Reader::open(disk, path, fields, *limits, cut)?)
        }
        Format::Parquet => Box::new(parquet::Reader::open(disk, path, fields, *limits, cut)?),
        Format::Arrow => Box::new(arrow::Reader::open(disk, path, fields, *limits, cut)?),
        Format::Text => Box::new(text::Reader::open(disk, path, *limits)?),
    })
}

/// Refuses a record with a kept value that is too long to be held for each of many documents.
fn too_long_to_keep(kept: &[Option<String>], keep: &[String]) -> Option<Fault> {
    let long = |value: &Option<String>| value.as_ref().is_some_and(|it| it.len() > KEPT_BYTES_MAX);
    let at = kept.iter().position(long)?;
    let bytes = kept[at].as_ref().map_or(0, String::len) as u64;
    Some(
        Fault::data(format!("the field `{}` that `keep` names is too long", keep[at]))
            .found(counted(bytes, "byte"))
            .wanted(format!("at most {KEPT_BYTES_MAX}")),
    )
}

/// A dropped record, with the hint that applies to every reason.
fn dropped(reason: &'static str, row: Row, bytes: u64, fault: Fault) -> Parsed {
    let fault = fault.hint(match reason {
        "empty" => "give it text, or drop it",
        "too large" => "split the document, or raise the limit",
        _ => "correct or drop it, or set on_error = \"skip\" to count such records and go on",
    });
    Parsed::Dropped { reason, row, bytes, fault }
}

#[cfg(test)]
mod tests;
