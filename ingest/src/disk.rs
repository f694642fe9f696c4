//! Opens untrusted files: on this machine or, in tests, on a simulated disk that fails.

use std::io::{Read, Result, Seek as _, SeekFrom};
use std::path::Path;

use store::pieces::Pieces;
use store::regular;

/// Opens files.
pub(crate) trait Disk {
    /// Opens a file to be read sequentially, from this byte on.
    fn stream(&self, path: &Path, from: u64) -> Result<Box<dyn Read + Send>>;

    /// Opens a file to be read in pieces.
    fn pieces(&self, path: &Path) -> Result<Pieces>;
}

/// The real disk.
pub(crate) struct Real;

impl Disk for Real {
    fn stream(&self, path: &Path, from: u64) -> Result<Box<dyn Read + Send>> {
        let mut file = regular::open(path)?;
        if from > 0 {
            file.seek(SeekFrom::Start(from))?;
        }
        Ok(Box::new(file))
    }

    fn pieces(&self, path: &Path) -> Result<Pieces> {
        Pieces::open(path)
    }
}

#[cfg(test)]
pub(crate) mod faulty;
