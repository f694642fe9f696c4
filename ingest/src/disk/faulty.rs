//! Slow, interrupted or broken disks, for tests of readers.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use store::pieces::{Pieces, Place};

use super::Disk;

/// A disk on which sequential reads and reads of pieces can fail independently.
#[derive(Clone, Copy)]
pub(crate) struct Faulty {
    /// The limit of bytes per read.
    pub(crate) most: usize,
    /// Whether every other call is interrupted.
    pub(crate) interrupted: bool,
    /// The first byte on which a sequential read fails; if this is the file's length, reaching the end fails.
    pub(crate) stream_ends: u64,
    /// The first byte that cannot be read in a piece.
    pub(crate) pieces_end: u64,
    /// The error at that byte.
    pub(crate) error: fn() -> io::Error,
}

/// The errors of a broken disk, of a read that would block, and of a process without free handles.
pub(crate) const ERRORS: [fn() -> io::Error; 3] = [
    || io::Error::from_raw_os_error(5),
    || io::ErrorKind::WouldBlock.into(),
    || io::Error::from_raw_os_error(24),
];

/// A disk without errors.
pub(crate) const SOUND: Faulty = Faulty {
    most: usize::MAX,
    interrupted: false,
    stream_ends: u64::MAX,
    pieces_end: u64::MAX,
    error: || io::Error::from_raw_os_error(5),
};

struct Handle {
    disk: Faulty,
    file: File,
    at: u64,
    turn: AtomicBool,
}

impl Handle {
    fn open(disk: Faulty, path: &Path) -> io::Result<Handle> {
        Ok(Handle { disk, file: File::open(path)?, at: 0, turn: AtomicBool::new(false) })
    }

    /// Reads from `offset` on, failing from `end` on.
    fn some(&self, buffer: &mut [u8], offset: u64, end: u64) -> io::Result<usize> {
        if self.disk.interrupted && !self.turn.fetch_xor(true, Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if offset >= end && !buffer.is_empty() {
            return Err((self.disk.error)());
        }
        let most = (end - offset).min(self.disk.most as u64).min(buffer.len() as u64);
        FileExt::read_at(&self.file, &mut buffer[..most as usize], offset)
    }
}

impl io::Read for Handle {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.some(buffer, self.at, self.disk.stream_ends)?;
        self.at += got as u64;
        Ok(got)
    }
}

impl Place for Handle {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.some(buffer, offset, self.disk.pieces_end)
    }
}

impl Disk for Faulty {
    fn stream(&self, path: &Path, from: u64) -> io::Result<Box<dyn io::Read + Send>> {
        Ok(Box::new(Handle { at: from, ..Handle::open(*self, path)? }))
    }

    fn pieces(&self, path: &Path) -> io::Result<Pieces> {
        let handle = Handle::open(*self, path)?;
        let bytes = handle.file.metadata()?.len();
        Ok(Pieces::of(Box::new(handle), bytes))
    }
}

/// A disk without errors, except for one file.
pub(crate) struct Badly<'a> {
    /// That file.
    pub(crate) file: &'a Path,
    /// How it fails.
    pub(crate) disk: Faulty,
}

impl Badly<'_> {
    fn under(&self, path: &Path) -> Faulty {
        if path == self.file { self.disk } else { SOUND }
    }
}

impl Disk for Badly<'_> {
    fn stream(&self, path: &Path, from: u64) -> io::Result<Box<dyn io::Read + Send>> {
        self.under(path).stream(path, from)
    }

    fn pieces(&self, path: &Path) -> io::Result<Pieces> {
        self.under(path).pieces(path)
    }
}
