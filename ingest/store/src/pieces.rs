//! A file that is read in pieces at given offsets, as Parquet is read.
//!
//! The library's own reader opens a handle for each piece, shares one cursor among them, and turns I/O errors into
//! text. Here a file is one handle without a cursor, and an I/O error is kept: it decides the class of the fault, and
//! so the exit code.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, Length};

use crate::location::Object;
use crate::{Location, regular};
use contract::Fault;
use contract::fault::again;

/// Something that can be read at any offset.
pub trait Place: Send + Sync {
    /// Reads some bytes from `offset` on; zero only at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl Place for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

/// An object, with its size.
struct Ranges(Object, u64);

impl Place for Ranges {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let Ranges(object, bytes) = self;
        let most = bytes.saturating_sub(offset).min(buffer.len() as u64) as usize;
        object.read_at(&mut buffer[..most], offset).map(|()| most)
    }
}

/// A file of known length; clones are the same file.
#[derive(Clone)]
pub struct Pieces(Arc<Inner>);

struct Inner {
    place: Box<dyn Place>,
    bytes: u64,
    failed: Mutex<Option<io::Error>>,
}

impl Pieces {
    /// Opens a local file.
    pub fn open(path: &Path) -> io::Result<Self> {
        Pieces::of_file(regular::open(path)?)
    }

    /// An open file.
    pub fn of_file(file: File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        Ok(Pieces::of(Box::new(file), bytes))
    }

    /// An object, of which only the ranges are fetched that are read.
    pub fn of_object(object: &Object) -> io::Result<Self> {
        let bytes = object.size()?;
        Ok(Pieces::of(Box::new(Ranges(object.clone(), bytes)), bytes))
    }

    /// The first `bytes` bytes of a place.
    pub fn of(place: Box<dyn Place>, bytes: u64) -> Self {
        Pieces(Arc::new(Inner { place, bytes, failed: Mutex::new(None) }))
    }

    /// `fault`, unless an I/O error came first: then that one.
    pub fn or_machine(&self, file: impl Into<Location>, fault: Fault) -> Fault {
        let failed = self.0.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.as_ref().map_or(fault, |error| file.into().fault("read", error))
    }

    /// Reads sequentially from byte `offset`.
    pub fn onward(&self, offset: u64) -> Onward {
        Onward { file: self.clone(), at: offset }
    }

    /// Keeps a copy of the I/O error that is returned.
    fn keep(&self, error: io::Error) -> io::Error {
        *self.0.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(again(&error));
        error
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        loop {
            match self.0.place.read_at(buffer, offset) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.keep(error)),
                read => return read,
            }
        }
    }
}

impl Length for Pieces {
    fn len(&self) -> u64 {
        self.0.bytes
    }
}

impl ChunkReader for Pieces {
    type T = BufReader<Onward>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        Ok(BufReader::new(self.onward(start)))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        // Lengths from a damaged file are checked against the file's size before memory is allocated.
        if start.checked_add(length as u64).is_none_or(|end| end > self.0.bytes) {
            let what = format!("{length} bytes at {start} are beyond the end of the file");
            return Err(ParquetError::EOF(what));
        }
        let mut buffer = Vec::new();
        if buffer.try_reserve_exact(length).is_err() {
            return Err(self.keep(ErrorKind::OutOfMemory.into()).into());
        }
        buffer.resize(length, 0);
        self.onward(start).read_exact(&mut buffer)?;
        Ok(buffer.into())
    }
}

/// A sequential reader.
pub struct Onward {
    file: Pieces,
    at: u64,
}

impl Read for Onward {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.file.read_at(buffer, self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns at most `most` bytes at a time, each after an interruption, and fails from `end` on.
    struct Slow {
        bytes: Vec<u8>,
        most: usize,
        end: u64,
        again: Mutex<bool>,
    }

    impl Place for Slow {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            let mut again = self.again.lock().unwrap();
            *again = !*again;
            if *again {
                return Err(ErrorKind::Interrupted.into());
            }
            if offset >= self.end {
                return Err(io::Error::from_raw_os_error(5));
            }
            let rest = &self.bytes[(offset as usize).min(self.bytes.len())..];
            let count = rest.len().min(buffer.len()).min(self.most);
            buffer[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }
    }

    proptest! {
        #[test]
        fn pieces_are_those_of_the_bytes(
            bytes in prop::collection::vec(any::<u8>(), 0..99), most in 1usize..20, start in 0u64..120, length in 0usize..120,
        ) {
            let total = bytes.len() as u64;
            let slow = Slow { bytes: bytes.clone(), most, end: u64::MAX, again: Mutex::new(false) };
            let pieces = Pieces::of(Box::new(slow), total);
            let wanted = bytes.get(start as usize..start as usize + length);
            let found = pieces.get_bytes(start, length).ok();
            prop_assert_eq!(found.as_deref(), wanted);
            let mut rest = Vec::new();
            pieces.get_read(start).unwrap().read_to_end(&mut rest).unwrap();
            prop_assert_eq!(&rest[..], bytes.get(start as usize..).unwrap_or_default());
            prop_assert!(pieces.or_machine(Path::new("x"), Fault::data("d")).class() == contract::Class::Data);
        }
    }

    #[test]
    fn a_failing_disk_is_remembered_and_a_hopeless_length_costs_no_memory() {
        let slow = Slow { bytes: vec![1; 100], most: 9, end: 50, again: Mutex::new(false) };
        let pieces = Pieces::of(Box::new(slow), 100);
        assert!(pieces.get_bytes(10, usize::MAX).is_err());
        assert!(pieces.get_bytes(60, 1 << 40).is_err());
        assert_eq!(pieces.get_bytes(10, 8).unwrap().len(), 8);
        assert_eq!(
            pieces.or_machine(Path::new("x"), Fault::data("d")).class(),
            contract::Class::Data
        );
        assert!(pieces.get_bytes(45, 20).is_err());
        let fault = pieces.clone().or_machine(Path::new("x"), Fault::data("d"));
        assert_eq!(fault.class(), contract::Class::Machine);
    }
}
