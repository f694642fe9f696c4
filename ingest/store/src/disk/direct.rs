//! A file that is written from its first byte to its last, large ones past the page cache.
//!
//! A store is read long after it was written, and not by this process: pages kept of it only push out others. Filling
//! fresh pages also costs more than the copy itself where memory is handed out by a hypervisor. So full pieces are
//! written directly, from an aligned buffer; where the file system knows no direct writes, as usual. The bytes are the
//! same either way.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::lock::{Lease, lease};
use super::{Act, admit, hold, is_lockless, note, synced};

/// Bytes written at once; a file that is smaller is written as usual.
const PIECE_BYTES: usize = 1 << 20;

/// What memory, offsets and lengths of direct writes are multiples of: no disk in use has larger sectors.
const ALIGNMENT: usize = 4096;

/// A file being written, front to back.
pub(super) struct DirectFile {
    path: PathBuf,
    /// Held by a lock, so that nobody else writes it.
    file: File,
    /// The same where no locks work.
    _lease: Option<Lease>,
    /// Whether the page cache is never passed by.
    usual: bool,
    /// The handle that passes it, and takes aligned pieces only.
    direct: Option<File>,
    /// One piece, and room to align it.
    buffer: Vec<u8>,
    /// Where the aligned piece begins in the buffer.
    aligned: usize,
    /// Bytes of the piece that are waiting.
    waiting: usize,
    /// Bytes handed to the system.
    written: u64,
    /// Whether the bytes are on the disk, all of them.
    finished: bool,
}

impl DirectFile {
    /// Begins the file at `path`, emptying one that is there, unless somebody else is writing it.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        let (held, lease) = match hold(&file) {
            Err(error) if is_lockless(&error) => {
                let lease = lease(path)?;
                (lease.is_some(), lease)
            }
            held => (held?, None),
        };
        // The one before may have moved or removed it between our opening it and locking it.
        let (ours, there) = (file.metadata()?, std::fs::metadata(path).ok());
        if !held || there.map(|it| (it.ino(), it.dev())) != Some((ours.ino(), ours.dev())) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another run is writing it"));
        }
        file.set_len(0)?;
        Ok(DirectFile { usual: false, _lease: lease, ..DirectFile::usual(file, path) })
    }

    /// Begins the new file at `path`, which is open: it stays so, and is written as usual.
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

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Hands all bytes so far to the system, so that they can be read; the rest is written as usual.
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

    /// Ends the file, unless that was done; its bytes are on the disk.
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

    /// Hands the bytes of the ended file to `take`, as the disk gives them back: past the page cache where they were written so.
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
                // As above: a piece that leaves an odd rest.
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
                // Opened for direct writes, and refused one after all, or took a piece that leaves an odd rest.
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

    /// Does nothing: what is not a whole piece is written at the end.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How a file is opened past the page cache, where the system knows that.
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
            // Scratch may be memory, which knows no direct writes; where this test was built is a disk.
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
        // An address that is not aligned is what the system refuses.
        file.aligned += 8;
        file.write_all(&bytes[PIECE_BYTES..]).unwrap();
        assert!(file.direct.is_none());
        file.finish().unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
}
