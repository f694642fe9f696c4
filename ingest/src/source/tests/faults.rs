//! Disks that are slow, interrupted or broken, under every format.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use contract::pieces::{Pieces, Place};

use super::*;

/// A disk of which a stream and the pieces of a file can go wrong on their own.
#[derive(Clone, Copy)]
struct Faulty {
    /// Bytes of one read, at most.
    most: usize,
    /// Whether every other call is interrupted.
    interrupted: bool,
    /// The first byte that a stream cannot read; at the file's length, its end.
    stream_ends: u64,
    /// The first byte that cannot be read in a piece.
    pieces_end: u64,
    /// The error there.
    error: fn() -> io::Error,
}

const SOUND: Faulty = Faulty {
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

    /// What can be read from `offset` on, if bytes from `end` on cannot.
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
    fn stream(&self, path: &Path) -> io::Result<Box<dyn io::Read + Send>> {
        Ok(Box::new(Handle::open(*self, path)?))
    }

    fn pieces(&self, path: &Path) -> io::Result<Pieces> {
        let handle = Handle::open(*self, path)?;
        let bytes = handle.file.metadata()?.len();
        Ok(Pieces::of(Box::new(handle), bytes))
    }
}

/// Every kind of file with the fields to read from it: the sound ones, plain ones, and Parquet as whole records.
fn files() -> Vec<(Scratch, Fields)> {
    let fields = |text: &str| Fields { text: text.to_owned(), id: None };
    let sound = sound_files();
    let (_, parquet) = sound.iter().find(|(name, _)| name.ends_with("parquet")).unwrap();
    let record = (write("r.parquet", parquet), fields(&Fields::record(["text", "n"])));
    let plain = json_lines(&[Row { text: Some("plain".repeat(40)), id: None }], "\r\n").repeat(5);
    let plain = [("p.jsonl", &plain), ("p.md", &plain)];
    let plain = plain.map(|(name, text)| (write(name, text.as_bytes()), fields("text")));
    let sound = sound.iter().map(|(name, bytes)| (write(name, bytes), fields("text")));
    sound.chain(plain).chain([record]).collect()
}

#[test]
fn short_reads_and_interruptions_change_nothing() {
    for (file, fields) in files() {
        let wanted = outcomes(read_on(&SOUND, &file, &fields, &limits(300)).unwrap());
        assert!(!wanted.is_empty() && wanted.iter().all(|(.., outcome)| outcome.is_ok()));
        for (most, interrupted) in [(1, false), (usize::MAX, true), (1, true), (7, true)] {
            let disk = Faulty { most, interrupted, ..SOUND };
            let found = read_on(&disk, &file, &fields, &limits(300)).unwrap();
            assert_eq!(outcomes(found), wanted, "{} by {most}", file.path.display());
        }
    }
}

#[test]
fn an_error_at_any_byte_is_the_machines_and_names_the_file() {
    let errors: [fn() -> io::Error; 3] = [
        || io::Error::from_raw_os_error(5),
        || io::ErrorKind::WouldBlock.into(),
        || io::Error::from_raw_os_error(24),
    ];
    for (file, fields) in files() {
        let length = std::fs::metadata(&file.path).unwrap().len();
        let wanted = outcomes(read_on(&SOUND, &file, &fields, &limits(300)).unwrap());
        let near = |at: u64| at < 120 || at + 120 > length || at.is_multiple_of(13);
        let mut failed = 0;
        for at in (0..=length).filter(|&at| near(at)) {
            let error = errors[(at % 3) as usize];
            let judge = |disk: Faulty| match read_on(&disk, &file, &fields, &limits(300)) {
                Ok(parsed) => Ok(outcomes(parsed)),
                Err(fault) => {
                    let place = file.path.display().to_string();
                    assert_eq!(fault.class(), Class::Machine, "byte {at} of {place}: {fault}");
                    assert!(fault.to_string().starts_with(&place), "{fault}");
                    Err(())
                }
            };
            // Every reader reads its stream to the end, be it for the identity of the bytes alone.
            assert_eq!(judge(Faulty { stream_ends: at, error, ..SOUND }), Err(()), "byte {at}");
            match judge(Faulty { pieces_end: at, error, ..SOUND }) {
                Ok(found) => assert_eq!(found, wanted, "byte {at}"),
                Err(()) => failed += 1,
            }
        }
        let in_pieces = Format::guess(&file.path) == Format::Parquet;
        assert_eq!(failed > 0, in_pieces, "{}", file.path.display());
    }
}

#[test]
fn a_file_that_cannot_be_opened_says_why() {
    struct Closed;
    impl Disk for Closed {
        fn stream(&self, _: &Path) -> io::Result<Box<dyn io::Read + Send>> {
            Err(io::Error::from_raw_os_error(24))
        }

        fn pieces(&self, _: &Path) -> io::Result<Pieces> {
            Err(io::Error::from_raw_os_error(24))
        }
    }
    for (file, fields) in files() {
        let fault = read_on(&Closed, &file, &fields, &limits(300)).unwrap_err();
        assert_eq!(fault.class(), Class::Machine);
        let message = fault.to_string();
        assert!(message.starts_with(file.path.to_str().unwrap()) && message.contains("ulimit -n"));
    }
}
