//! Opens untrusted files: on this machine or, in tests, on a simulated disk that fails.

use std::io::{Read, Result};
use std::path::Path;

use store::pieces::Pieces;
use store::regular;

/// Opens files.
pub(crate) trait Disk {
    /// Opens a file to be read sequentially.
    fn stream(&self, path: &Path) -> Result<Box<dyn Read + Send>>;

    /// Opens a file to be read in pieces.
    fn pieces(&self, path: &Path) -> Result<Pieces>;
}

/// The real disk.
pub(crate) struct Real;

impl Disk for Real {
    fn stream(&self, path: &Path) -> Result<Box<dyn Read + Send>> {
        Ok(Box::new(regular::open(path)?))
    }

    fn pieces(&self, path: &Path) -> Result<Pieces> {
        Pieces::open(path)
    }
}

#[cfg(test)]
pub(crate) mod faulty;
