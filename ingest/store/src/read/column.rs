//! A file of the store that is read in pieces, any number of them at once.
//!
//! The offset of a piece is arithmetic (`block_offset`); its sums check its bytes.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::Location;
use crate::folder::{StoreFile, damaged, missing};
use crate::location::Object;
use contract::Result;

/// The data source: an open file, or an object whose blocks are fetched one by one.
enum BytesAt {
    File(File),
    Object(Object),
}

/// An open column file of known length.
pub(super) struct ColumnFile {
    bytes_at: BytesAt,
    location: Location,
    bytes: u64,
}

impl ColumnFile {
    /// Opens the file, which must have exactly `bytes` bytes.
    pub(super) fn open(file: &StoreFile, bytes: u64) -> Result<Self> {
        let location = file.location();
        let (bytes_at, found) = match &location {
            Location::Object(object) => {
                let found = file.size().map_err(|error| missing(&location, &error))?;
                (BytesAt::Object(object.clone()), found)
            }
            Location::Local(_) => {
                let file = file.open().map_err(|error| missing(&location, &error))?;
                let about = file.metadata().map_err(|error| location.fault("examine", &error))?;
                (BytesAt::File(file), about.len())
            }
        };
        if found != bytes {
            return Err(damaged(&location, "the file has the wrong size")
                .found(format!("{found} bytes"))
                .wanted(format!("{bytes} bytes")));
        }
        Ok(ColumnFile { bytes_at, location, bytes })
    }

    /// The file's location.
    pub(super) fn location(&self) -> &Location {
        &self.location
    }

    /// Fills `buffer` from `offset` on without a cursor: any number of threads may read at once.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let read = match &self.bytes_at {
            BytesAt::File(file) => file.read_exact_at(buffer, offset),
            BytesAt::Object(object) => object.read_at(buffer, offset),
        };
        read.map_err(|error| self.location.fault("read", &error))
    }

    /// Reads the whole file. A forged manifest may claim any size, and a sparse file of terabytes takes no disk space.
    pub(super) fn read_all(&self) -> Result<Vec<u8>> {
        let length = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(length)
            .map_err(|error| self.location.fault("read", &error.into()))?;
        bytes.resize(length, 0);
        self.read(&mut bytes, 0)?;
        Ok(bytes)
    }
}
