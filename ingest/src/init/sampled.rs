//! The first records of a file, and how many bytes of records it holds.

use std::collections::BTreeMap;
use std::path::Path;

use contract::Result;
use serde_json::Value;

use crate::source::{self, Fields, Format, Limits, Parsed};

/// Records looked at for a guess.
pub(super) const RECORDS: usize = 100;

/// Bytes of a file that are read to see how much it is compressed.
const RAW_BYTES: u64 = 1 << 20;

/// Files of one ending for which that is looked at.
const MEASURED: u64 = 3;

/// What was seen of a file.
pub(super) struct Sample {
    /// Its first records that are objects, each with its bytes as JSON.
    pub(super) records: Vec<(Value, u64)>,
    /// The bytes of all its records, about.
    pub(super) bytes: u64,
}

/// How many bytes come of those of a file, by the ending of its name.
#[derive(Default)]
pub(super) struct Ratios(BTreeMap<String, Measured>);

#[derive(Clone, Copy, Default)]
struct Measured {
    files: u64,
    raw: u64,
    records: u64,
}

/// What was read of a file.
#[derive(Default)]
struct Read {
    rows: u64,
    records: u64,
    raw: u64,
    whole: bool,
}

impl Ratios {
    /// Looks at a file of so many bytes.
    pub(super) fn sample(
        &mut self,
        path: &Path,
        ending: &str,
        format: Format,
        size: u64,
    ) -> Result<Sample> {
        let measured = self.0.get(ending).copied().unwrap_or_default();
        let packed = format == Format::Arrow || Format::is_compressed(ending);
        let least = if packed && measured.files < MEASURED { RAW_BYTES } else { 0 };
        if format == Format::Text && least == 0 {
            // Nothing of it is guessed.
            let bytes = if packed { scaled(size, measured.records, measured.raw) } else { size };
            return Ok(Sample { records: Vec::new(), bytes });
        }
        let (records, read) = first(path, format, least)?;
        let bytes = match format {
            Format::Parquet if read.rows > 0 => {
                scaled(read.records, source::rows(path)?, read.rows)
            }
            _ if read.whole => read.records,
            _ if packed => {
                let mut measured = measured;
                if least > 0 {
                    measured.files += 1;
                    measured.raw += read.raw;
                    measured.records += read.records;
                    self.0.insert(ending.to_owned(), measured);
                }
                scaled(size, measured.records, measured.raw)
            }
            _ => size,
        };
        Ok(Sample { records, bytes })
    }
}

/// `value` x `by` / `of`, which is not more than any file holds.
fn scaled(value: u64, by: u64, of: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(by) / u128::from(of.max(1))).unwrap_or(u64::MAX)
}

/// The first records of a file, and what was read of it: `least` bytes unless it ends before.
fn first(path: &Path, format: Format, least: u64) -> Result<(Vec<(Value, u64)>, Read)> {
    let every = Fields::record(std::iter::empty::<String>(), None);
    let mut input = source::open(path, format, &every, &Limits::default())?;
    let (mut records, mut read) = (Vec::new(), Read::default());
    while read.raw < least || records.len() < RECORDS && read.raw < RAW_BYTES {
        let Some(slab) = input.next_slab()? else {
            read.whole = true;
            break;
        };
        for parsed in slab.parse(&every)? {
            let Parsed::Document(document) = parsed else { continue };
            let bytes = document.text.len() as u64;
            read.rows += 1;
            read.records += bytes;
            if records.len() < RECORDS
                && format != Format::Text
                && let Ok(record @ Value::Object(_)) = serde_json::from_str(&document.text)
            {
                records.push((record, bytes));
            }
        }
        read.raw = input.content().0;
        // The identity of a Parquet file follows its row groups: its own count of rows says how much is left.
        if format == Format::Parquet && read.rows > 0 {
            break;
        }
    }
    Ok((records, read))
}
