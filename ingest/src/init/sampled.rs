//! The first records of a file, and the estimated size of all its records.

use std::collections::BTreeMap;
use std::path::Path;

use contract::Result;
use serde_json::Value;

use crate::source::{self, Fields, Format, Limits, Parsed};

/// The number of records used for a guess.
pub(super) const RECORDS: usize = 100;

/// Bytes of a file that are read to measure its compression.
const RAW_BYTES: u64 = 1 << 20;

/// The number of files per extension whose compression is measured.
const MEASURED: u64 = 3;

/// What was read of a file.
pub(super) struct Sample {
    /// Its first records that are objects, each with its bytes as JSON.
    pub(super) records: Vec<(Value, u64)>,
    /// The estimated size of all its records.
    pub(super) bytes: u64,
}

/// Measured compression ratios, by file extension.
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
    /// Samples a file of this size.
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
            // Uncompressed: nothing is estimated.
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

/// `value` x `by` / `of`, which fits a file size.
fn scaled(value: u64, by: u64, of: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(by) / u128::from(of.max(1))).unwrap_or(u64::MAX)
}

/// The first records of a file, and how much was read: at least `least` bytes, unless the file is shorter.
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
        read.raw = input.raw_bytes();
        // The identity of a Parquet file is read after its row groups: its row count gives the remaining size.
        if format == Format::Parquet && read.rows > 0 {
            break;
        }
    }
    Ok((records, read))
}
