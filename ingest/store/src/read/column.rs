//! Where the bytes of an Arrow IPC file's only column lie.
//!
//! Positions come from the file's footer and messages; nothing here is trusted: whatever does not fit the manifest, the
//! file's length or the format is a fault that names the file, and the bytes found are checked by their sums.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use arrow::ipc::{MessageHeader, root_as_footer, root_as_message};

use crate::{far, regular};
use contract::{Fault, Result};

/// `ARROW1` at both ends of a file, and the footer's length before the last one.
const MAGIC: &[u8] = b"ARROW1";
const TAIL: u64 = 10;
/// A message's metadata begins with a continuation mark and its length.
const PREFIX: usize = 8;

/// A run of neighbouring values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// How many values.
    pub(super) rows: u64,
    /// Where the first one's bytes begin in the file.
    pub(super) offset: u64,
}

/// A record batch as the footer tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    offset: u64,
    meta: u64,
    body: u64,
}

impl Batch {
    /// The distance from one batch to the next.
    pub(super) fn stride(&self) -> u64 {
        self.meta + self.body
    }

    /// Where it begins.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }
}

/// An open column file of known length.
pub(super) struct ColumnFile {
    /// The file, unless it is far: then blocks are fetched one by one.
    file: Option<File>,
    path: PathBuf,
    bytes: u64,
}

impl ColumnFile {
    /// Opens the file, which must have exactly `bytes` bytes.
    pub(super) fn open(path: PathBuf, bytes: u64) -> Result<Self> {
        let (file, found) = if far::is_far(&path) {
            (None, far::size(&path).map_err(|error| missing(&path, &error))?)
        } else {
            let file = regular::open(&path).map_err(|error| missing(&path, &error))?;
            let about = file.metadata().map_err(|error| Fault::io("examine", &path, &error))?;
            (Some(file), about.len())
        };
        if found != bytes {
            return Err(damaged(&path, "the file has the wrong size")
                .found(format!("{found} bytes"))
                .wanted(format!("{bytes} bytes")));
        }
        Ok(ColumnFile { file, path, bytes })
    }

    /// The file's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `buffer` from `offset` on, moving no cursor: any number of threads may read at once.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let read = match &self.file {
            Some(file) => file.read_exact_at(buffer, offset),
            None => far::reader(&self.path).and_then(|far| match far {
                Some(far) => far.read_at(&self.path, buffer, offset),
                None => Err(std::io::ErrorKind::Unsupported.into()),
            }),
        };
        read.map_err(|error| Fault::io("read", &self.path, &error))
    }

    /// The whole file.
    pub(super) fn read_all(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.length(self.bytes)?];
        self.read(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// The record batches in the footer's order.
    pub(super) fn batches(&self) -> Result<Vec<Batch>> {
        let wrong = |what: &str| damaged(&self.path, what);
        let mut tail = [0; TAIL as usize];
        let tail_at =
            self.bytes.checked_sub(TAIL).ok_or_else(|| wrong("too short for an Arrow file"))?;
        self.read(&mut tail, tail_at)?;
        if &tail[4..] != MAGIC {
            return Err(wrong("the file does not end like an Arrow file"));
        }
        let length = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
        let footer_at = tail_at
            .checked_sub(length)
            .ok_or_else(|| wrong("its footer has an impossible length"))?;
        let mut footer = vec![0; self.length(length)?];
        self.read(&mut footer, footer_at)?;
        let footer = root_as_footer(&footer).map_err(|_| wrong("its footer is damaged"))?;
        let Some(blocks) = footer.recordBatches() else { return Ok(Vec::new()) };
        let parse = |block: &arrow::ipc::Block| {
            let batch = Batch {
                offset: u64::try_from(block.offset()).ok()?,
                meta: u64::try_from(block.metaDataLength()).ok()?,
                body: u64::try_from(block.bodyLength()).ok()?,
            };
            let end = batch.offset.checked_add(batch.meta)?.checked_add(batch.body)?;
            (end <= footer_at).then_some(batch)
        };
        blocks
            .iter()
            .map(|block| parse(block).ok_or_else(|| wrong("its footer points past its end")))
            .collect()
    }

    /// Where the values of `batch` lie, each `width` bytes wide.
    pub(super) fn run(&self, batch: Batch, width: u64) -> Result<Run> {
        let wrong = || damaged(&self.path, "a record batch is not the plain column it should be");
        let mut meta = vec![0; self.length(batch.meta)?];
        self.read(&mut meta, batch.offset)?;
        let message =
            meta.get(PREFIX..).and_then(|bytes| root_as_message(bytes).ok()).ok_or_else(wrong)?;
        if message.header_type() != MessageHeader::RecordBatch {
            return Err(wrong());
        }
        let header = message.header_as_record_batch().ok_or_else(wrong)?;
        let buffers = header.buffers().ok_or_else(wrong)?;
        // A column's buffers: the validity bits, empty here, and the values.
        if header.compression().is_some() || buffers.len() != 2 {
            return Err(wrong());
        }
        let values = buffers.get(1);
        let rows = u64::try_from(header.length()).map_err(|_| wrong())?;
        let inner = u64::try_from(values.offset()).map_err(|_| wrong())?;
        let bytes = u64::try_from(values.length()).map_err(|_| wrong())?;
        let fits = rows.checked_mul(width) == Some(bytes)
            && inner.checked_add(bytes).is_some_and(|end| end <= batch.body);
        if !fits {
            return Err(wrong());
        }
        Ok(Run { rows, offset: batch.offset + batch.meta + inner })
    }

    /// A length found in the file, as a size: never more than the file has.
    fn length(&self, bytes: u64) -> Result<usize> {
        usize::try_from(bytes)
            .ok()
            .filter(|_| bytes <= self.bytes)
            .ok_or_else(|| damaged(&self.path, "it tells an impossible length"))
    }
}

/// Damaged data in `path`.
pub(super) fn damaged(path: &Path, what: &str) -> Fault {
    Fault::data(what).at(path.display().to_string()).hint(
        "restore this file from a copy or build the store again; `zdata verify STORE` lists all that is damaged",
    )
}

/// A file of the store that could not be opened.
pub(super) fn missing(path: &Path, error: &std::io::Error) -> Fault {
    if error.kind() == std::io::ErrorKind::NotFound {
        damaged(path, "a file of the store is missing")
    } else {
        Fault::io("open", path, error)
    }
}
