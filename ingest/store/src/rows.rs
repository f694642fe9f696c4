//! The offsets of document starts in their file, for sparse and full readers.

use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use crate::BLOCK_STARTS;
use crate::folder::StoreFile;
use crate::write::block_offset;
use contract::Result;

/// Bytes of one start.
pub(crate) const WIDTH: u64 = 8;

/// The blocks that hold these rows: for each, the rows in it and their offset in the file.
pub(crate) fn pieces(rows: Range<u64>) -> impl Iterator<Item = (Range<u64>, u64)> {
    let blocks = rows.start / BLOCK_STARTS..rows.end.div_ceil(BLOCK_STARTS);
    blocks.map(move |block| {
        let first = block * BLOCK_STARTS;
        let part = rows.start.max(first)..rows.end.min(first + BLOCK_STARTS);
        let offset = block_offset(BLOCK_STARTS * WIDTH, block) + (part.start - first) * WIDTH;
        (part, offset)
    })
}

/// The starts of this many documents, in order.
pub(crate) fn starts(file: StoreFile, documents: u64) -> Result<impl Iterator<Item = Result<u64>>> {
    let path = file.location();
    let file = file.open().map_err(|error| path.fault("read", &error))?;
    Ok(pieces(0..documents).flat_map(move |(part, offset)| {
        let mut bytes = vec![0; ((part.end - part.start) * WIDTH) as usize];
        match file.read_exact_at(&mut bytes, offset) {
            Ok(()) => words(&bytes).map(Ok).collect(),
            Err(error) => vec![Err(path.fault("read", &error))],
        }
    }))
}

/// Little-endian words.
pub(crate) fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word))
}
