//! Stand-in for the readers: JSON Lines only.
use std::path::Path;

use contract::{Fault, Identity, Result};

/// How a file holds documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    /// One JSON object a line.
    JsonLines,
    /// Parquet.
    Parquet,
    /// Arrow IPC.
    Arrow,
    /// One file, one document.
    Text,
}

/// Where a record's text and id stand.
#[derive(Clone, Debug)]
pub struct Fields {
    /// Dotted path.
    pub text: String,
    /// Dotted path.
    pub id: Option<String>,
}

/// Limits.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest document.
    pub max_document_bytes: u64,
}

/// A reader.
pub trait Input: Send {
    /// The next slab.
    fn next_slab(&mut self) -> Result<Option<Slab>>;
    /// Size and identity of the raw file, once exhausted.
    fn content(&self) -> (u64, Identity);
}

/// Some records.
pub struct Slab {
    first_row: u64,
    text: String,
}

/// One record.
pub enum Parsed {
    /// A document.
    Document(Document),
    /// None.
    Lost {
        /// Why.
        reason: &'static str,
        /// How much.
        bytes: u64,
        /// In words.
        fault: Fault,
    },
}

/// One document.
pub struct Document {
    /// Its id.
    pub id: Option<String>,
    /// Its text.
    pub text: String,
    /// Row.
    pub row: u64,
    /// Group.
    pub group: Option<u32>,
    /// Byte range.
    pub bytes: Option<(u64, u64)>,
}

impl Slab {
    /// Its records.
    pub fn parse(&self, fields: &Fields) -> Result<Vec<Parsed>> {
        let mut out = Vec::new();
        for (i, line) in self.text.lines().enumerate() {
            let value: std::result::Result<serde_json::Value, _> = serde_json::from_str(line);
            let bytes = line.len() as u64;
            let lost = |reason: &'static str| Parsed::Lost {
                reason,
                bytes,
                fault: Fault::data(reason).at(format!("line {}", self.first_row + i as u64)),
            };
            out.push(match value {
                Err(_) => lost("malformed"),
                Ok(value) => match value.get(&fields.text).and_then(|t| t.as_str()) {
                    None => lost("missing text"),
                    Some("") => lost("empty"),
                    Some(text) => Parsed::Document(Document {
                        id: fields.id.as_ref().and_then(|id| {
                            value.get(id).and_then(|id| id.as_str()).map(str::to_owned)
                        }),
                        text: text.to_owned(),
                        row: self.first_row + i as u64,
                        group: None,
                        bytes: Some((0, bytes)),
                    }),
                },
            });
        }
        Ok(out)
    }
}

struct Whole(Vec<u8>, Vec<Slab>);

impl Input for Whole {
    fn next_slab(&mut self) -> Result<Option<Slab>> {
        Ok(self.1.pop())
    }
    fn content(&self) -> (u64, Identity) {
        (self.0.len() as u64, Identity::of_bytes(&self.0))
    }
}

/// Opens.
pub fn open(path: &Path, _format: Format, _limits: &Limits) -> Result<Box<dyn Input>> {
    let raw = std::fs::read(path).map_err(|e| Fault::io("read", path, &e))?;
    let bytes = match path.extension().and_then(|e| e.to_str()) {
        Some("zst") => zstd::decode_all(&raw[..]),
        Some("gz") => {
            let mut out = Vec::new();
            std::io::Read::read_to_end(&mut flate2::read::MultiGzDecoder::new(&raw[..]), &mut out)
                .map(|_| out)
        }
        _ => Ok(raw.clone()),
    }
    .map_err(|e| Fault::io("read", path, &e))?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    let mut slabs: Vec<Slab> = lines
        .chunks(300)
        .enumerate()
        .map(|(i, lines)| Slab { first_row: 1 + 300 * i as u64, text: lines.join("\n") })
        .collect();
    slabs.reverse();
    Ok(Box::new(Whole(raw, slabs)))
}
