//! A file that is written sequentially; large ones bypass the page cache.
//!
//! A store is read long after it was written, and by other processes: its pages in the cache only evict others. In
//! virtual machines, filling new pages also costs more than the copy itself. So full pieces are written with direct I/O
//! from an aligned buffer; where the file system has none, they are written normally. The bytes are the same either
//! way.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::lock::{Lease, lease};
use super::{Act, admit, hold, is_lockless, note, synced};

/// Bytes written at once; smaller files are written normally.
const PIECE_BYTES: usize = 1 << 20;

/// The alignment of memory, offsets and lengths for direct I/O: no disk in use has larger sectors.
const ALIGNMENT: usize = 4096;

/// A file being written, sequentially.
pub(super) struct DirectFile {
    path: PathBuf,
    /// The file, locked against other writers.
    file: File,
    /// Replaces the lock where locks do not work.
    _lease: Option<Lease>,
    /// Whether direct I/O is never used.
    usual: bool,
    /// The handle for direct I/O, which takes aligned pieces only.
    direct: Option<File>,
    /// One piece, and the space to align it.
    buffer: Vec<u8>,
    /// The offset of the aligned piece in the buffer.
    aligned: usize,
    /// Bytes of the piece so far.
    waiting: usize,
    /// Bytes written to the system.
    written: u64,
    /// Whether all bytes are on the disk.
    finished: bool,
}

impl DirectFile {
    /// Creates or truncates the file at `path`, unless another process is writing it.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        let (held, lease) = match hold(&file) {
            Err(error) if is_lockless(&error) => {
                let lease = lease(path)?;
                (lease.is_some(), lease)
            }
            held => (held?, None),
        };
        // The previous writer may have moved or removed it between our open and our lock.
        let (ours, there) = (file.metadata()?, std::fs::metadata(path).ok());
        if !held || there.map(|it| (it.ino(), it.dev())) != Some((ours.ino(), ours.dev())) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another run is writing it"));
        }
        file.set_len(0)?;
        Ok(DirectFile { usual: false, _lease: lease, ..DirectFile::usual(file, path) })
    }

    /// Writes to the new, open file at `path` without direct I/O; the handle stays open.
    pub(super) fn usual(file: File, path: &Path) -> Self {
        note(|| Act::Create(path.to_owned()));
        let buffer = vec![0; PIECE_BYTES + ALIGNMENT];
        let aligned = buffer.as_ptr().align_offset(ALIGNMENT);
        let path = path.to_owned();
        let (usual, direct, finished) = (true, None, false);
        let (waiting, written) = (0, 0);
        DirectFile {
            path,
            file,
            _lease: None,
            usual,
            direct,
            buffer,
            aligned,
            waiting,
            written,
            finished,
        }
    }

    /// The path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes out all bytes so far, so that they can be read; the rest is written without direct I/O.
    pub(super) fn settle(&mut self) -> io::Result<()> {
        if self.direct.is_some() {
            self.go_on_as_usual()?;
        }
        self.write_out()
    }

    fn go_on_as_usual(&mut self) -> io::Result<()> {
        self.direct = None;
        self.file.seek(SeekFrom::Start(self.written)).map(drop)
    }

    /// Completes the file, if not done yet; its bytes are then on the disk.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if self.finished {
            return Ok(());
        }
        let end = self.written + self.waiting as u64;
        if self.direct.is_some() {
            let whole = self.waiting.next_multiple_of(ALIGNMENT);
            self.buffer[self.aligned + self.waiting..self.aligned + whole].fill(0);
            self.waiting = whole;
        }
        self.write_out()?;
        if self.written > end {
            self.file.set_len(end)?;
            note(|| Act::SetLength(self.path.clone(), end));
        }
        synced(&self.file, || Act::Sync(self.path.clone()))?;
        self.finished = true;
        Ok(())
    }

    /// Passes the bytes of the complete file to `take`, read from the disk: with direct I/O if it was written so.
    pub(super) fn read_back(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        let mut file = File::open(&self.path)?;
        let (length, mut at) = (file.metadata()?.len(), 0);
        if self.direct.is_some() {
            file = direct().read(true).open(&self.path)?;
        }
        let piece = &mut self.buffer[self.aligned..self.aligned + PIECE_BYTES];
        while at < length {
            match file.read(piece) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(taken) => {
                    take(&piece[..taken]);
                    at += taken as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // As above: a piece that leaves an unaligned rest.
                Err(error)
                    if self.direct.is_some() && error.kind() == io::ErrorKind::InvalidInput =>
                {
                    self.direct = None;
                    file = File::open(&self.path)?;
                    file.seek(SeekFrom::Start(at))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_out(&mut self) -> io::Result<()> {
        let mut from = 0;
        while from < self.waiting {
            let piece = &self.buffer[self.aligned + from..self.aligned + self.waiting];
            admit(&self.path, piece)?;
            match self.direct.as_mut().unwrap_or(&mut self.file).write(piece) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(taken) => {
                    let bytes = || piece[..taken].to_vec();
                    note(|| Act::Write(self.path.clone(), self.written, bytes()));
                    from += taken;
                    self.written += taken as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The file opened for direct I/O but refuses the write, or wrote part of a piece and left an unaligned
                // rest.
                Err(error)
                    if self.direct.is_some() && error.kind() == io::ErrorKind::InvalidInput =>
                {
                    self.go_on_as_usual()?;
                }
                Err(error) => return Err(error),
            }
        }
        self.waiting = 0;
        Ok(())
    }
}

impl Write for DirectFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.finished = false;
        let taken = bytes.len().min(PIECE_BYTES - self.waiting);
        let start = self.aligned + self.waiting;
        self.buffer[start..start + taken].copy_from_slice(&bytes[..taken]);
        self.waiting += taken;
        if self.waiting == PIECE_BYTES {
            if self.written == 0 && !self.usual {
                self.direct = direct().write(true).open(&self.path).ok();
            }
            self.write_out()?;
        }
        Ok(taken)
    }

    /// Does nothing: a partial piece is written at the end.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Options to open a file for direct I/O, where the system has it.
fn direct() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_DIRECT);
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(folder: &Path, bytes: &[u8], pieces: &[usize]) -> Vec<u8> {
        let path = folder.join("file");
        let mut file = DirectFile::create(&path).unwrap();
        let mut rest = bytes;
        for &piece in pieces.iter().cycle() {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            file.write_all(now).unwrap();
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        file.finish().unwrap();
        let mut back = Vec::new();
        file.read_back(|piece| back.extend_from_slice(piece)).unwrap();
        assert!(back == std::fs::read(path).unwrap(), "it is read back as it is");
        back
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn what_is_written_is_there(
            length in prop_oneof![0usize..9000, 0usize..5_000_000,
                Just(PIECE_BYTES - 1), Just(PIECE_BYTES), Just(PIECE_BYTES + 1), Just(3 * PIECE_BYTES)],
            pieces in prop::collection::vec(1usize..2_000_000, 1..5),
        ) {
            let bytes: Vec<u8> = (0..length).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
            // The scratch folder may be in memory, which has no direct I/O; the folder of the test binary is on a disk.
            let here = std::env::current_exe().unwrap();
            let folders = [tempfile::tempdir(), tempfile::tempdir_in(here.parent().unwrap())];
            for folder in folders.map(Result::unwrap) {
                prop_assert!(written(folder.path(), &bytes, &pieces) == bytes);
            }
        }
    }

    #[test]
    fn a_file_that_refuses_direct_writes_is_written_as_usual() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..2 * PIECE_BYTES + 77).map(|at| (at >> 4) as u8).collect();
        let mut file = DirectFile::create(&path).unwrap();
        file.write_all(&bytes[..PIECE_BYTES]).unwrap();
        if file.direct.is_none() {
            let told =
                "1 test of direct writes skipped: the scratch folder's file system knows none";
            writeln!(io::stderr(), "{told}").unwrap();
            return;
        }
        // The system refuses an unaligned address.
        file.aligned += 8;
        file.write_all(&bytes[PIECE_BYTES..]).unwrap();
        assert!(file.direct.is_none());
        file.finish().unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
}
