//! TensorBoard's event files: records of protocol-buffer messages, each with its length and two checksums.
//!
//! ```text
//! record   length u64 | masked crc32c of the length u32 | message | masked crc32c of the message u32     little-endian
//! Event    1 wall_time double | 2 step int64 | 3 file_version text | 5 Summary | 7 SessionLog
//! Summary  1 Value (repeated): 1 tag text, 2 simple_value float
//! ```
//!
//! A file begins with its version and a session start: readers then drop later steps of earlier files, so that a run
//! that continues after a kill has one curve.

use std::path::Path;

use contract::{Fault, Result};
use store::disk::AppendFile;

use crate::events;

/// The prefix of event file names.
const NAME: &str = "events.out.tfevents.";

/// `SessionLog.status` of a start.
const START: u64 = 1;

/// A file for appending.
pub(super) struct Writer {
    log: AppendFile,
}

impl Writer {
    /// Creates a file in `folder` for steps after `step`.
    pub(super) fn create(folder: &Path, step: u64) -> Result<Writer> {
        let now = events::now();
        // Readers sort files by name, so names must ascend even if the clock was set back.
        let time = newest(folder)?.map_or(now, |newest| now.max(newest + 0.001));
        let name = format!("{NAME}{time:015.3}.{}", std::process::id());
        let path = folder.join(name);
        let log = AppendFile::open(&path).map_err(|error| Fault::io("create", &path, &error))?;
        let mut writer = Writer { log };
        let mut version = Message::event(now, 0);
        version.bytes(3, b"brain.Event:2");
        writer.append(&version)?;
        let mut session = Message::default();
        session.varint(1, START);
        let mut start = Message::event(now, step + 1);
        start.bytes(7, &session.0);
        writer.append(&start)?;
        Ok(writer)
    }

    /// Writes scalars of one step, in one event.
    pub(super) fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        let mut summary = Message::default();
        for (tag, value) in values {
            let mut one = Message::default();
            one.bytes(1, tag.as_bytes());
            one.float(2, *value as f32);
            summary.bytes(1, &one.0);
        }
        let mut event = Message::event(events::now(), step);
        event.bytes(5, &summary.0);
        self.append(&event)
    }

    /// Writes in one system call, so that a kill leaves at most one incomplete record, which readers skip.
    fn append(&mut self, message: &Message) -> Result<()> {
        let length = (message.0.len() as u64).to_le_bytes();
        let sum = |bytes: &[u8]| masked(crc32c(bytes)).to_le_bytes();
        let record = [&length[..], &sum(&length), &message.0, &sum(&message.0)].concat();
        let written = self.log.append(&record);
        written.map_err(|error| Fault::io("append to", self.log.path(), &error))
    }
}

/// The time in the name of the newest file in `folder`.
fn newest(folder: &Path) -> Result<Option<f64>> {
    let fault = |error: std::io::Error| Fault::io("list", folder, &error);
    let mut newest: Option<f64> = None;
    for entry in std::fs::read_dir(folder).map_err(fault)? {
        let name = entry.map_err(fault)?.file_name();
        let time = name.to_str().and_then(|name| name.strip_prefix(NAME)?.rsplit_once('.'));
        let time = time.and_then(|(time, _)| time.parse().ok()).filter(|time: &f64| *time < 1e11);
        newest = time.into_iter().chain(newest).reduce(f64::max);
    }
    Ok(newest)
}

/// A protocol-buffer message being built.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn event(time: f64, step: u64) -> Message {
        let mut event = Message::default();
        event.key(1, 1);
        event.0.extend(time.to_le_bytes());
        event.varint(2, step);
        event
    }

    fn key(&mut self, field: u64, kind: u64) {
        self.raw_varint(field << 3 | kind);
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }
}

/// TFRecord's CRC masking, which keeps a checksum of bytes that contain checksums from being a likely value.
fn masked(sum: u32) -> u32 {
    sum.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    !bytes
        .iter()
        .fold(!0, |sum, byte| (sum >> 8) ^ TABLE[((sum ^ u32::from(*byte)) & 0xff) as usize])
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let (mut sum, mut bit) = (index as u32, 0);
        while bit < 8 {
            sum = if sum & 1 == 1 { (sum >> 1) ^ 0x82f6_3b78 } else { sum >> 1 };
            bit += 1;
        }
        table[index] = sum;
        index += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock was set back, or was ahead for a while.
    #[test]
    fn a_later_file_has_a_later_name() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("events.out.tfevents.09999999999.000.7"), "").unwrap();
        for step in 0..3 {
            Writer::create(folder.path(), step).unwrap();
        }
        let names = std::fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> = names.map(|one| one.unwrap().file_name()).collect();
        names.sort();
        let (last, before) = names.split_last().unwrap();
        assert_eq!(before.len(), 3, "{names:?}");
        let last = last.to_str().unwrap();
        assert!(last.starts_with("events.out.tfevents.09999999999.003."), "{names:?}");
    }

    /// The vectors of RFC 3720, appendix B.4.
    #[test]
    fn the_sum_is_that_of_the_standard() {
        let rising: Vec<u8> = (0..32).collect();
        let falling: Vec<u8> = (0..32).rev().collect();
        for (bytes, sum) in [
            (vec![0; 32], 0x8a91_36aa),
            (vec![0xff; 32], 0x62a8_ab43),
            (rising, 0x46dd_794e),
            (falling, 0x113f_db5c),
            (b"123456789".to_vec(), 0xe306_9283),
        ] {
            assert_eq!(crc32c(&bytes), sum);
        }
    }
}
