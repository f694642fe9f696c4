//! One JSON array of records, read as JSON Lines are.
//!
//! The stream is rewritten in place, byte for byte: the array's brackets become spaces, the commas between records
//! become line ends, and line ends inside a record become spaces. So a record is a line, with the same number and the
//! same byte range, and all checks of lines apply to records.

use std::path::Path;

use contract::{Fault, Result, counted};

/// The position in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before the array.
    Start,
    /// Inside it, at this depth.
    Within(u64),
    /// In a string of a record, maybe after a backslash.
    String { depth: u64, escaped: bool },
    /// After it.
    End,
}

/// An array that is rewritten as it is read.
#[derive(Debug)]
pub(super) struct Array {
    at: At,
    /// Whether the current record has any content.
    begun: bool,
    /// Whether a comma came before it.
    due: bool,
    offset: u64,
}

impl Array {
    /// Whether a file's name allows a single JSON value.
    pub(super) fn may_be(path: &Path) -> bool {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
        let name = name.unwrap_or_default();
        name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name).ends_with(".json")
    }

    /// The array that begins in `head`, this many bytes into the file, if there is one.
    pub(super) fn of(head: &[u8], offset: u64) -> Option<Self> {
        let first = head.iter().find(|byte| !byte.is_ascii_whitespace());
        (first == Some(&b'[')).then_some(Array { at: At::Start, begun: false, due: false, offset })
    }

    /// Rewrites the next bytes.
    pub(super) fn rewrite(&mut self, path: &Path, bytes: &mut [u8]) -> Result<()> {
        for byte in bytes {
            *byte = self.byte(*byte).map_err(|found| {
                Fault::data("this file is not one JSON array of records")
                    .at(path.display().to_string())
                    .found(format!("{found} at byte {}", self.offset))
                    .hint("correct it; where each line is a record, end its name in .jsonl")
            })?;
            self.offset += 1;
        }
        Ok(())
    }

    fn byte(&mut self, byte: u8) -> std::result::Result<u8, &'static str> {
        let is_space = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        let (at, byte) = match (self.at, byte) {
            (At::Start, b'[') => (At::Within(0), b' '),
            (At::Start | At::End, _) if is_space => (self.at, b' '),
            (At::Start | At::End, _) => return Err("something behind the end of the array"),
            (At::String { depth, escaped: true }, byte) => {
                (At::String { depth, escaped: false }, unbroken(byte))
            }
            (At::String { depth, .. }, b'\\') => (At::String { depth, escaped: true }, byte),
            (At::String { depth, .. }, b'"') => (At::Within(depth), byte),
            (At::String { .. }, byte) => (self.at, unbroken(byte)),
            (At::Within(0), b',' | b']') => {
                let last = byte == b']';
                if !self.begun && (self.due || !last) {
                    return Err("no record next to a comma");
                }
                (self.begun, self.due) = (false, !last);
                if last { (At::End, b' ') } else { (self.at, b'\n') }
            }
            (At::Within(0), b'}') => return Err("a `}` that closes nothing"),
            (At::Within(depth), b'}' | b']') => (At::Within(depth - 1), byte),
            (At::Within(depth), b'{' | b'[') => (At::Within(depth + 1), byte),
            (At::Within(depth), b'"') => (At::String { depth, escaped: false }, byte),
            (At::Within(_), _) if is_space => (self.at, b' '),
            (At::Within(_), byte) => (self.at, byte),
        };
        self.begun |= !byte.is_ascii_whitespace();
        self.at = at;
        Ok(byte)
    }

    /// Refuses an array that is not closed at the end of the file.
    pub(super) fn finish(&self, path: &Path) -> Result<()> {
        if self.at == At::End {
            return Ok(());
        }
        Err(Fault::data("the JSON array of this file is not closed: it is cut short or damaged")
            .at(path.display().to_string())
            .found(format!("the end of the file after {}", counted(self.offset, "byte")))
            .hint("fetch or write the file again"))
    }
}

/// A byte of a string: line ends are replaced by a byte that is just as invalid there, but not a line end.
fn unbroken(byte: u8) -> u8 {
    if byte == b'\n' { 1 } else { byte }
}
