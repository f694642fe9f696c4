//! JSON Lines: one record per line; rows are counted from 1, including blank lines, which are skipped.
//!
//! A line ends only at `\n`, since strings may contain U+2028 and U+0085. A `\r` before it and a byte-order mark at the
//! start of the file are not part of a line.
//!
//! A file whose name ends in `.json` may instead be one array of records, read as if each were on its own line.

use std::path::Path;
use std::sync::Arc;

use contract::fault::nearest;
use contract::{Fault, Result, counted};
use memchr::{memchr, memchr_iter, memrchr};

use super::arrays::Array;
use super::decompress::Stream;
use super::json::{self, FieldValues, Value, Wanted};
use super::{
    Content, Document, Fields, Input, Limits, Parsed, Records, Row, Slab, dropped, kinds, names,
    too_long_to_keep,
};
use crate::disk::Disk;

const MARK: &[u8] = b"\xef\xbb\xbf";

/// A line that exceeds the limit by more than a mark and a `\r` is too long in any case.
const SLACK: u64 = 4;

/// The longest line that the JSON parser takes.
const LINE_BYTES_MAX: u64 = u32::MAX as u64;

/// The longest line that is read: each byte of the longest document as an escape, and as much again as other keys may
/// reasonably have.
fn line_bytes_max(document: u64) -> u64 {
    document.saturating_mul(6).saturating_add(1 << 20).min(LINE_BYTES_MAX)
}

/// Cuts a stream into slabs of whole lines.
pub(super) struct Reader {
    stream: Stream,
    place: Place,
    limits: Limits,
    /// The array that contains the records, if there is one.
    array: Option<Array>,
    /// The bytes after the last line end that was passed on.
    carry: Vec<u8>,
    /// The offset of these bytes in the stream.
    offset: u64,
    /// The number of the line with which they begin.
    line: u64,
    ended: bool,
}

/// A file, and the name of its records in messages.
#[derive(Clone)]
struct Place {
    path: Arc<Path>,
    in_array: bool,
}

impl Place {
    fn of(&self, row: u64) -> String {
        let path = self.path.display();
        if self.in_array { format!("{path}: record {row}") } else { format!("{path}:{row}") }
    }
}

/// Whole lines.
pub(super) struct Lines {
    place: Place,
    bytes: Vec<u8>,
    offset: u64,
    line: u64,
    bytes_max: u64,
}

/// A line that was skipped because of its length.
pub(super) struct TooLong {
    place: Place,
    line: u64,
    bytes: u64,
    bytes_max: u64,
}

impl Reader {
    pub(super) fn open(disk: &dyn Disk, path: &Path, limits: Limits) -> Result<Self> {
        let limits = Limits { slab_bytes: limits.slab_bytes.max(1), ..limits };
        let stream = Stream::open(disk, path)?;
        let (place, carry) = (Place { path: path.into(), in_array: false }, Vec::new());
        let (array, offset, line, ended) = (None, 0, 1, false);
        let mut reader = Reader { stream, place, limits, array, carry, offset, line, ended };
        reader.read_on(kinds::HEAD)?;
        if reader.carry.starts_with(MARK) {
            reader.carry.drain(..MARK.len());
            reader.offset = MARK.len() as u64;
        }
        if Array::may_be(path) {
            // White space does not show yet whether there is an array.
            while reader.carry.iter().all(u8::is_ascii_whitespace) && !reader.ended {
                reader.read_on(limits.slab_bytes)?;
            }
            reader.array = Array::of(&reader.carry, reader.offset);
            reader.place.in_array = reader.array.is_some();
            reader.rewrite(0)?;
        }
        Ok(reader)
    }

    /// Passes on the first `length` bytes.
    fn cut(&mut self, length: usize) -> Slab {
        let rest = self.carry.split_off(length);
        let bytes = std::mem::replace(&mut self.carry, rest);
        let (offset, line) = (self.offset, self.line);
        self.offset += bytes.len() as u64;
        self.line += memchr_iter(b'\n', &bytes).count() as u64;
        let bytes_max = self.limits.max_document_bytes;
        Slab(Records::Lines(Lines { place: self.place.clone(), bytes, offset, line, bytes_max }))
    }

    /// Skips the current line, and keeps what follows it.
    fn pass_over(&mut self) -> Result<Slab> {
        let (mut length, mut last) = (0, 0);
        let line = self.line;
        loop {
            let end = memchr(b'\n', &self.carry);
            let piece = &self.carry[..end.unwrap_or(self.carry.len())];
            length += piece.len() as u64;
            last = piece.last().copied().unwrap_or(last);
            if let Some(end) = end {
                self.carry.drain(..=end);
                self.line += 1;
                self.offset += length + 1;
                break;
            }
            self.carry.clear();
            if self.ended {
                self.offset += length;
                break;
            }
            self.read_on(self.limits.slab_bytes)?;
        }
        let bytes = length - u64::from(last == b'\r');
        let bytes_max = line_bytes_max(self.limits.max_document_bytes);
        Ok(Slab(Records::TooLong(TooLong { place: self.place.clone(), line, bytes, bytes_max })))
    }

    /// Reads `wanted` more bytes, or to the end.
    fn read_on(&mut self, wanted: usize) -> Result<()> {
        let read = self.carry.len();
        self.ended = self.stream.fill(&mut self.carry, wanted)? < wanted;
        self.rewrite(read)
    }

    /// Makes lines from the records of an array, from this byte of the buffer on.
    fn rewrite(&mut self, from: usize) -> Result<()> {
        let Some(array) = &mut self.array else { return Ok(()) };
        array.rewrite(&self.place.path, &mut self.carry[from..])?;
        if self.ended { array.finish(&self.place.path) } else { Ok(()) }
    }
}

impl Input for Reader {
    fn next_slab(&mut self) -> Result<Option<Slab>> {
        let mut searched = 0;
        loop {
            // Only bytes not searched before, so that a line over many slabs takes linear time.
            if let Some(end) = memrchr(b'\n', &self.carry[searched..]) {
                if self.ended || self.carry.len() >= self.limits.slab_bytes {
                    return Ok(Some(self.cut(searched + end + 1)));
                }
            } else {
                searched = self.carry.len();
                if searched as u64 > line_bytes_max(self.limits.max_document_bytes) + SLACK {
                    return self.pass_over().map(Some);
                }
            }
            if self.ended {
                let last = self.carry.len();
                return Ok((last > 0).then(|| self.cut(last)));
            }
            self.read_on(self.limits.slab_bytes)?;
        }
    }

    fn raw_bytes(&self) -> u64 {
        self.stream.raw_bytes()
    }

    fn content(&self) -> Content {
        self.stream.content()
    }
}

impl Lines {
    pub(super) fn parse(&self, fields: &Fields) -> Vec<Parsed> {
        let wanted = Wanted::new(fields.path(), fields.id.as_deref());
        // One check for the whole slab; line by line only if it fails.
        let valid = simdutf8::basic::from_utf8(&self.bytes).ok();
        // No string is longer than its line; memory that is not needed is never touched.
        let mut scratch = Vec::with_capacity(self.bytes.len());
        let mut parsed = Vec::new();
        let mut start = 0;
        let ends = memchr_iter(b'\n', &self.bytes).chain([self.bytes.len()]);
        for (row, end) in (self.line..).zip(ends) {
            let line = &self.bytes[start..end];
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let length = line.len() as u64;
            let (before, line) = if self.place.in_array { unspaced(line) } else { (0, line) };
            let from = start + before;
            let record = Record { lines: self, row, start: from, line, fields };
            let text = match valid {
                Some(text) => Ok(&text[from..from + line.len()]),
                None => std::str::from_utf8(line),
            };
            parsed.extend(match text {
                _ if length > line_bytes_max(self.bytes_max) => {
                    Some(too_long(&self.place, row, length, line_bytes_max(self.bytes_max)))
                }
                _ if line.iter().all(|byte| b" \t\r".contains(byte)) => None,
                Ok(text) => Some(record.parse(text, &wanted, &mut scratch)),
                Err(error) => Some(record.not_utf8(error.valid_up_to())),
            });
            start = end + 1;
        }
        parsed
    }
}

/// A record without the spaces around it, which belong to its array, and the number of spaces before it.
fn unspaced(line: &[u8]) -> (usize, &[u8]) {
    let before = line.iter().take_while(|byte| **byte == b' ').count();
    let end = line.iter().rposition(|byte| *byte != b' ').map_or(before, |at| at + 1);
    (before, &line[before..end])
}

/// One line and its position.
struct Record<'a> {
    lines: &'a Lines,
    row: u64,
    start: usize,
    line: &'a [u8],
    fields: &'a Fields,
}

impl Record<'_> {
    fn parse(&self, text: &str, wanted: &Wanted, scratch: &mut Vec<u8>) -> Parsed {
        match json::read(text, wanted, scratch) {
            Ok(found) => self.document(text, found),
            Err(reason) => {
                let goes_on = text.trim_end().ends_with(['{', '[', ':', ',']);
                let over_lines = (reason.contains(json::ENDS_WITHIN) || goes_on) && self.row == 1;
                let dropped =
                    self.dropped("malformed", Fault::data("malformed JSON").found(reason));
                if over_lines { hinted(dropped, ONE_VALUE) } else { dropped }
            }
        }
    }

    fn document(&self, line: &str, found: FieldValues) -> Parsed {
        let id = match found.id {
            None | Some(Value::Other("null")) => None,
            Some(Value::String(id) | Value::Integer(id)) => Some(id),
            Some(Value::Other(kind)) => return self.wrong_id(kind),
        };
        let text = match found.text {
            _ if self.fields.is_record() => line.to_owned(),
            Some(Value::String(text)) => text,
            Some(Value::Integer(_)) => return self.wrong_text(line, "a number"),
            Some(Value::Other(kind)) => return self.wrong_text(line, kind),
            None => return self.no_text(line),
        };
        if text.is_empty() {
            return self.dropped("empty", Fault::data("the document is empty"));
        }
        let (length, most) = (text.len() as u64, self.lines.bytes_max);
        if length > most {
            let fault = Fault::data("the document is too long").found(counted(length, "byte"));
            return self.dropped("too large", fault.wanted(format!("at most {most}")));
        }
        let kept = json::kept(line, &self.fields.keep);
        if let Some(fault) = too_long_to_keep(&kept, &self.fields.keep) {
            return self.dropped("too large", fault);
        }
        let start = self.lines.offset + self.start as u64;
        let bytes = Some((start, start + self.line.len() as u64));
        Parsed::Document(Document { id, text, row: self.row, group: None, bytes, kept })
    }

    fn wrong_id(&self, kind: &str) -> Parsed {
        let key = self.fields.id.as_deref().unwrap_or_default();
        let fault = Fault::data(format!("key `{key}` holds no id")).found(kind);
        self.dropped("malformed", fault.wanted("a string or an integer"))
    }

    fn wrong_text(&self, line: &str, kind: &str) -> Parsed {
        let path = self.fields.path();
        let fault = Fault::data(format!("key `{path}` holds no text")).found(kind);
        let dropped = self.dropped("missing text", fault.wanted("a string"));
        let within = match kind {
            "an object" => json::keys_beside(line, &format!("{path}.")).0,
            _ => return dropped,
        };
        let within = within.first().map_or("field", |key| key);
        hinted(
            dropped,
            &format!(
                "name a field of the object, like text = \"{path}.{}\", or several: template = \"{{{path}.{0}}}\"",
                names::escaped(within)
            ),
        )
    }

    fn no_text(&self, line: &str) -> Parsed {
        let (keys, part) = json::keys_beside(line, self.fields.path());
        let fault = Fault::data(format!("no key `{}`", self.fields.path()));
        let fault = match nearest(&part, keys.iter().map(String::as_str)) {
            Some(near) => fault.found(format!("the nearest key is `{near}`")),
            None if keys.is_empty() => fault.found("no key at all where it should stand"),
            None => fault.found(format!("the keys {}", listed(&keys))),
        };
        let dropped = self.dropped("missing text", fault);
        let with_dot =
            |key: &&String| key.contains('.') && self.fields.path().contains(key.as_str());
        match keys.iter().find(with_dot) {
            Some(key) => hinted(dropped, &names::with_backslash(key)),
            None if self.row == 1 && line.starts_with('[') => hinted(dropped, ONE_VALUE),
            None => dropped,
        }
    }

    fn not_utf8(&self, valid: usize) -> Parsed {
        let found = format!("byte 0x{:02x} in column {}", self.line[valid], valid + 1);
        self.dropped("invalid UTF-8", Fault::data("invalid UTF-8").found(found))
    }

    fn dropped(&self, reason: &'static str, fault: Fault) -> Parsed {
        let place = self.lines.place.of(self.row);
        let row = Row { group: None, row: self.row };
        dropped(reason, row, self.line.len() as u64, fault.at(place))
    }
}

impl TooLong {
    pub(super) fn parse(&self) -> Parsed {
        too_long(&self.place, self.line, self.bytes, self.bytes_max)
    }
}

/// The hint for a file that is a single value.
const ONE_VALUE: &str = "each line is a record here: `jq -c .` writes a value on one line, and `jq -c '.KEY[]'` each record of a \
    list; an array of records is read from a file whose name ends in .json";

/// The same with another hint.
fn hinted(dropped: Parsed, hint: &str) -> Parsed {
    match dropped {
        Parsed::Dropped { reason, row, bytes, fault } => {
            Parsed::Dropped { reason, row, bytes, fault: fault.hint(hint) }
        }
        document => document,
    }
}

fn too_long(place: &Place, line: u64, bytes: u64, bytes_max: u64) -> Parsed {
    let fault = Fault::data("the line is too long")
        .at(place.of(line))
        .found(counted(bytes, "byte"))
        .wanted(format!("at most {bytes_max}"));
    dropped("too large", Row { group: None, row: line }, bytes, fault)
}

/// The first keys, for a message.
fn listed(keys: &[String]) -> String {
    let shown: Vec<_> = keys.iter().take(8).map(|key| format!("`{key}`")).collect();
    shown.join(", ") + if keys.len() > 8 { ", ..." } else { "" }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{documents, read, read_with, write};
    use super::*;
    use crate::disk::Real;

    #[test]
    fn rows_are_lines_and_ranges_are_bytes() {
        let text = "\u{feff}{\"text\":\"a\",\"id\":7}\r\n\n \t\n{\"text\":\"b\u{85}\u{2028}\"}\n{\"text\":\"c\"}";
        let file = write("x.jsonl", text.as_bytes());
        let got = documents(read(&file, "text", Some("id")));
        let rows: Vec<_> = got.iter().map(|d| (d.row, d.id.as_deref(), d.text.as_str())).collect();
        assert_eq!(rows, [(1, Some("7"), "a"), (4, None, "b\u{85}\u{2028}"), (5, None, "c")]);
        for document in &got {
            let (start, end) = document.bytes.unwrap();
            let line = &text.as_bytes()[start as usize..end as usize];
            let value: serde_json::Value = serde_json::from_slice(line).unwrap();
            assert_eq!(value["text"], document.text);
            assert!(line.ends_with(b"}"));
        }
    }

    #[test]
    fn every_loss_names_its_line() {
        let cases: [(&[u8], &str, &str); 9] = [
            (b"{\"text\":\"a\"", "malformed", "the line ends within an object"),
            (b"{\"text\":\"a\"} x", "malformed", "after the end of the record"),
            (b"{\"text\":\"\\ud800\"}", "malformed", "surrogate"),
            (b"{\"text\":\"a\",\"b\":\"\\u12G4\"}", "malformed", "column"),
            (b"{\"text\":\"\xff\"}", "invalid UTF-8", "byte 0xff in column 10"),
            (b"{\"txet\":\"a\"}", "missing text", "the nearest key is `txet`"),
            (b"{\"text\":null}", "missing text", "null"),
            (b"[]", "missing text", "no key at all"),
            (b"{\"text\":\"\"}", "empty", "empty"),
        ];
        for (line, wanted, found) in cases {
            let file = write("x.jsonl", &[b"{\"text\":\"ok\"}\n", line, b"\n"].concat());
            let parsed = read(&file, "text", None);
            assert_eq!(parsed.len(), 2);
            let Parsed::Dropped { reason, bytes, fault, .. } = &parsed[1] else {
                panic!("{parsed:?}")
            };
            assert_eq!((*reason, *bytes), (wanted, line.len() as u64));
            let message = fault.to_string();
            assert!(message.contains("x.jsonl:2: ") && message.contains(found), "{message}");
        }
    }

    #[test]
    fn a_document_too_long_is_lost_whatever_the_slab() {
        let limit = 40;
        for length in 41..61 {
            let line = format!("{{\"text\":\"{}\"}}", "x".repeat(length - 11));
            for ending in ["\n", "\r\n"] {
                let lines = format!("{{\"text\":\"a\"}}{ending}{line}{ending}{{\"text\":\"b\"}}");
                let file = write("x.jsonl", lines.as_bytes());
                for slab_bytes in [1, 7, 43, 1000] {
                    let limits = Limits { slab_bytes, max_document_bytes: limit };
                    let parsed = read_with(&file, "text", None, &limits).unwrap();
                    assert_eq!(parsed.len(), 3);
                    let too_long = length as u64 - 11 > limit;
                    assert_eq!(
                        matches!(parsed[1], Parsed::Dropped { reason: "too large", bytes, .. }
                        if bytes == length as u64),
                        too_long
                    );
                    let Parsed::Document(last) = &parsed[2] else { panic!("{parsed:?}") };
                    assert_eq!((last.row, last.bytes.unwrap().1), (3, lines.len() as u64));
                }
            }
        }
    }

    #[test]
    fn a_line_of_many_slabs_takes_linear_time() {
        // Searching such a line from its start for every slab would read over 10^12 bytes.
        let line = format!("{{\"text\":\"{}\"}}\n{{\"text\":\"b\"}}\n", "x\\n".repeat(5_000_000));
        let file = write("x.jsonl", line.as_bytes());
        let begun = std::time::Instant::now();
        let limits = Limits { slab_bytes: 64, ..Limits::default() };
        let got = documents(read_with(&file, "text", None, &limits).unwrap());
        assert_eq!((got[0].text.len(), got[1].row), (10_000_000, 2));
        assert!(begun.elapsed().as_secs() < 30, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_line_too_long_is_never_held() {
        let lines = format!("{{\"text\":\"{}\"}}\n{{\"text\":\"b\"}}\n", "x".repeat(20_000_000));
        let file = write("x.jsonl.zst", &zstd::encode_all(lines.as_bytes(), 1).unwrap());
        let limits = Limits { slab_bytes: 1000, max_document_bytes: 500 };
        let mut reader = Reader::open(&Real, &file.path, limits).unwrap();
        let first = reader.next_slab().unwrap().unwrap();
        assert!(matches!(first.0, Records::TooLong(TooLong { bytes: 20_000_011, .. })));
        let most = 4 * line_bytes_max(500) as usize;
        assert!(reader.carry.capacity() < most, "{}", reader.carry.capacity());
        assert!(reader.next_slab().unwrap().is_some());
    }
}
