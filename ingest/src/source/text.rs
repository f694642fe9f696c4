//! Plain text: one file is one document.

use std::path::Path;
use std::sync::Arc;

use contract::{Fault, Result, counted};

use super::decompress::Stream;
use super::{Content, Document, Fields, Input, Limits, Parsed, Records, Row, Slab, dropped};
use crate::disk::Disk;

const MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads a file as one slab.
pub(super) struct Reader {
    stream: Stream,
    path: Arc<Path>,
    limits: Limits,
    done: bool,
}

/// A file's whole text, or only its length if it is too large.
pub(super) struct Whole {
    path: Arc<Path>,
    bytes: Vec<u8>,
    length: u64,
    bytes_max: u64,
}

impl Reader {
    pub(super) fn open(disk: &dyn Disk, path: &Path, limits: Limits) -> Result<Self> {
        Ok(Reader { stream: Stream::open(disk, path)?, path: path.into(), limits, done: false })
    }
}

impl Input for Reader {
    fn next_slab(&mut self) -> Result<Option<Slab>> {
        if self.done {
            return Ok(None);
        }
        let bytes_max = self.limits.max_document_bytes;
        let wanted = self.limits.slab_bytes.max(1);
        let (mut bytes, mut length) = (Vec::new(), 0);
        loop {
            let got = self.stream.fill(&mut bytes, wanted)?;
            length += got as u64;
            if length > bytes_max {
                bytes = Vec::new();
            }
            if got < wanted {
                break;
            }
        }
        self.done = true;
        Ok(Some(Slab(Records::Whole(Whole { path: self.path.clone(), bytes, length, bytes_max }))))
    }

    fn raw_bytes(&self) -> u64 {
        self.stream.raw_bytes()
    }

    fn content(&self) -> Content {
        self.stream.content()
    }
}

impl Whole {
    pub(super) fn parse(&self, fields: &Fields) -> Parsed {
        if self.length > self.bytes_max {
            let fault = Fault::data("the file is too long for one document");
            let fault = fault.found(counted(self.length, "byte"));
            return self.dropped("too large", fault.wanted(format!("at most {}", self.bytes_max)));
        }
        let text = self.bytes.strip_prefix(MARK).unwrap_or(&self.bytes);
        let start = self.length - text.len() as u64;
        match std::str::from_utf8(text) {
            Ok("") => self.dropped("empty", Fault::data("the document is empty")),
            Ok(text) => Parsed::Document(Document {
                id: None,
                text: text.to_owned(),
                row: 0,
                group: None,
                bytes: Some((start, self.length)),
                // A text has no fields.
                kept: vec![None; fields.keep.len()],
            }),
            Err(error) => {
                let at = error.valid_up_to();
                let found = format!("byte 0x{:02x} at offset {}", text[at], start + at as u64);
                self.dropped("invalid UTF-8", Fault::data("invalid UTF-8").found(found))
            }
        }
    }

    fn dropped(&self, reason: &'static str, fault: Fault) -> Parsed {
        let row = Row { group: None, row: 0 };
        dropped(reason, row, self.length, fault.at(self.path.display().to_string()))
    }
}
