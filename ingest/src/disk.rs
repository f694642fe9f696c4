//! Where files that others made are opened: on this machine, or, in tests, on a disk that fails.

use std::io::{Read, Result};
use std::path::Path;

use store::pieces::Pieces;
use store::regular;

/// What opens files.
pub(crate) trait Disk {
    /// A file from front to back.
    fn stream(&self, path: &Path) -> Result<Box<dyn Read + Send>>;

    /// A file in pieces.
    fn pieces(&self, path: &Path) -> Result<Pieces>;
}

/// This machine's.
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
