//! OLMo's and dolma's `.npy`, which has no NumPy header: only tokens, with a csv file next to it.
//!
//! ```text
//! X.npy      tokens, u16 or u32 (u16 up to a vocabulary of 65,536)
//! X.csv.gz   for each document a line: start, end (in tokens) and, from dolma, id, src, loc
//! ```
//!
//! Without the csv, documents are split after each end token (`--end`), as in OLMo-core.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use store::disk::AtomicFile;
use store::{FileRecord, InputRecord};

use super::tokens::{Hashing, TokenFile, fitting, put};
use super::{Documents, Hints, NextDocument, Width, Writer, begin, damaged, end};
use crate::disk::Disk;

/// The longest line of a csv.
const LINE_BYTES: u64 = 1 << 20;

/// The limit of tokens per file, as in dolma.
const FILE_TOKENS: u64 = 512 << 20;

/// The csv that belongs to a `.npy`.
pub(super) fn csv_of(path: &Path) -> PathBuf {
    path.with_extension("csv.gz")
}

/// The documents of a csv, in order.
struct Table {
    path: PathBuf,
    reader: BufReader<MultiGzDecoder<BufReader<Hashing>>>,
    line: u64,
    end: u64,
}

/// One line of the csv.
struct Row {
    tokens: u64,
    id: Option<String>,
}

impl Table {
    fn open(disk: &dyn Disk, path: &Path) -> Result<Self> {
        let raw = BufReader::with_capacity(64 << 10, Hashing::open(disk, path)?);
        let reader = BufReader::with_capacity(64 << 10, MultiGzDecoder::new(raw));
        Ok(Table { path: path.to_owned(), reader, line: 0, end: 0 })
    }

    fn wrong(&self, what: &str) -> Fault {
        let place = format!("{}: line {}", self.path.display(), self.line);
        damaged(&self.path, what).at(place)
    }

    /// The next line; a quoted field may contain line ends.
    fn line(&mut self) -> Result<Option<String>> {
        let (mut raw, mut open) = (Vec::new(), false);
        self.line += 1;
        loop {
            let (before, room) = (raw.len(), LINE_BYTES - raw.len() as u64);
            let got = (&mut self.reader).take(room).read_until(b'\n', &mut raw);
            let got = got.map_err(|error| {
                let damage = || self.wrong(&format!("the gzip stream is damaged: {error}"));
                self.raw().failed().unwrap_or_else(damage)
            })?;
            open ^= raw[before..].iter().filter(|byte| **byte == b'"').count() % 2 == 1;
            if got == 0 && raw.is_empty() {
                return Ok(None);
            }
            if raw.len() as u64 == LINE_BYTES || (got == 0 && open) {
                return Err(self.wrong("a line does not end"));
            }
            if got == 0 || !open {
                break;
            }
        }
        match String::from_utf8(raw) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(self.wrong("a line is not UTF-8")),
        }
    }

    fn next(&mut self) -> Result<Option<Row>> {
        let Some(line) = self.line()? else { return Ok(None) };
        let mut fields = fields(line.trim_end_matches(['\r', '\n'])).into_iter();
        let mut number = || fields.next().and_then(|field| field.trim().parse::<u64>().ok());
        let (Some(start), Some(end)) = (number(), number()) else {
            return Err(self.wrong("it does not begin with two numbers: a start and an end"));
        };
        if start != self.end || end < start {
            return Err(self
                .wrong("a document does not begin where the one before it ends")
                .found(format!("{start} to {end}"))
                .wanted(format!("from {}", self.end)));
        }
        self.end = end;
        let id = fields.next().filter(|id| !id.is_empty());
        Ok(Some(Row { tokens: end - start, id }))
    }

    /// The compressed file.
    fn raw(&self) -> &Hashing {
        self.reader.get_ref().get_ref().get_ref()
    }

    fn record(&self) -> InputRecord {
        self.raw().record(0)
    }
}

/// The fields of a line, quotes removed.
fn fields(line: &str) -> Vec<String> {
    let (mut found, mut field, mut quoted) = (Vec::new(), String::new(), false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => {
                letters.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => found.push(std::mem::take(&mut field)),
            letter => field.push(letter),
        }
    }
    found.push(field);
    found
}

/// A field quoted for a line.
fn field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// How document ends are found.
enum Ends {
    Table(Box<Table>),
    Token(u32),
}

/// Reads a `.npy`.
pub(super) struct Reader {
    tokens: TokenFile,
    ends: Ends,
    /// Whether the csv has no rows: dolma leaves a file to which it wrote nothing at its full size, of zeros.
    unwritten: bool,
}

impl Reader {
    pub(super) fn open(disk: &dyn Disk, path: &Path, hints: &Hints) -> Result<Self> {
        let mut first = [0; 6];
        let mut file = Hashing::open(disk, path)?;
        if file.bytes >= 6 {
            file.read_exact(&mut first).map_err(|error| Fault::io("read", path, &error))?;
        }
        if first == *b"\x93NUMPY" {
            return Err(damaged(path, "this is a real NumPy file; OLMo's have no header")
                .hint("write it with numpy's tofile()"));
        }
        let csv = csv_of(path);
        let (size, has_csv) = (file.bytes, csv.exists());
        let (last, rows) = if has_csv { extent(disk, &csv)? } else { (0, 0) };
        let width = match hints.width {
            Some(width) => width,
            None if rows > 0 => {
                fitting(disk, path, size, last, hints.vocab, "its size does not fit its csv")?
            }
            None if has_csv => Width::U16,
            None => {
                return Err(Fault::usage("nothing says how wide a token is")
                    .at(path.display().to_string())
                    .wanted("--dtype uint16 or uint32, or a .csv.gz next to the file"));
            }
        };
        let ends = if has_csv {
            Ends::Table(Box::new(Table::open(disk, &csv)?))
        } else {
            Ends::Token(hints.end.ok_or_else(|| {
                Fault::usage("nothing says where documents end")
                    .at(path.display().to_string())
                    .wanted("a .csv.gz next to the file, or --end with the token that ends each document")
            })?)
        };
        let tokens = TokenFile::open(disk, path, width, hints.vocab)?;
        Ok(Reader { tokens, ends, unwritten: has_csv && rows == 0 })
    }
}

/// The last end in a csv, and its number of lines.
fn extent(disk: &dyn Disk, csv: &Path) -> Result<(u64, u64)> {
    let (mut table, mut rows) = (Table::open(disk, csv)?, 0);
    while table.next()?.is_some() {
        rows += 1;
    }
    Ok((table.end, rows))
}

impl Documents for Reader {
    fn next(&mut self, tokens: &mut Vec<u32>) -> Result<Option<NextDocument>> {
        tokens.clear();
        let first = self.tokens.at;
        let id = match &mut self.ends {
            Ends::Token(end) => {
                if !self.tokens.take_through(*end, tokens)? {
                    return Ok(None);
                }
                None
            }
            Ends::Table(table) => {
                let Some(row) = table.next()? else {
                    // The zeros of an unwritten file are part of its identity.
                    if self.unwritten {
                        self.tokens.drain()?
                    } else {
                        self.tokens.finish()?
                    }
                    return Ok(None);
                };
                self.tokens.take(row.tokens, tokens)?;
                row.id
            }
        };
        Ok(Some(NextDocument { id, bytes: self.tokens.range(first) }))
    }

    fn inputs(&self) -> Vec<InputRecord> {
        let table = match &self.ends {
            Ends::Table(table) => Some(table.record()),
            Ends::Token(_) => None,
        };
        [self.tokens.record()].into_iter().chain(table).collect()
    }
}

/// Writes a stream as `part-0-00000.npy` and so on.
pub(super) struct Files {
    folder: PathBuf,
    width: u64,
    open: Option<(AtomicFile, GzEncoder<AtomicFile>)>,
    at: u64,
    done: Vec<FileRecord>,
    raw: Vec<u8>,
    parts: u64,
}

impl Files {
    pub(super) fn create(folder: &Path, vocab: u32) -> Result<Self> {
        let mut files = Files {
            folder: folder.to_owned(),
            width: if vocab <= 1 << 16 { 2 } else { 4 },
            open: None,
            at: 0,
            done: Vec::new(),
            raw: Vec::new(),
            parts: 0,
        };
        files.begin()?;
        Ok(files)
    }

    fn begin(&mut self) -> Result<()> {
        let path = self.folder.join(format!("part-0-{:05}.npy", self.parts));
        let csv = GzEncoder::new(begin(&csv_of(&path))?, Compression::new(6));
        self.open = Some((begin(&path)?, csv));
        (self.at, self.parts) = (0, self.parts + 1);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        let Some((tokens, csv)) = self.open.take() else { return Ok(()) };
        let path = csv.get_ref().path().to_owned();
        let csv = csv.finish().map_err(|error| Fault::io("write", &path, &error))?;
        self.done.push(end(tokens)?);
        self.done.push(end(csv)?);
        Ok(())
    }
}

impl Writer for Files {
    fn document(&mut self, tokens: &[u32], id: &str, src: &str, row: u64) -> Result<()> {
        use std::io::Write as _;
        if self.at > 0 && self.at + tokens.len() as u64 > FILE_TOKENS {
            self.end()?;
            self.begin()?;
        }
        let Some((file, csv)) = &mut self.open else { return Err(Fault::bug("no file is open")) };
        put(file, tokens, self.width, &mut self.raw)?;
        let start = self.at;
        self.at += tokens.len() as u64;
        let line = format!("{start},{},{},{},{row}\n", self.at, field(id), field(src));
        let written = csv.write_all(line.as_bytes());
        written.map_err(|error| Fault::io("write", csv.get_ref().path(), &error))
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<FileRecord>> {
        self.end()?;
        Ok(std::mem::take(&mut self.done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn fields_survive_a_line(texts in proptest::collection::vec("[a-c,\"\n\r ]{0,8}", 1..5)) {
            let line = texts.iter().map(|text| field(text)).collect::<Vec<_>>().join(",");
            prop_assert_eq!(fields(&line), texts);
        }
    }
}
