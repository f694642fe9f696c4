//! Decompresses a file (`.gz`, `.zst`), and hashes its raw bytes on the way.
//!
//! Concatenated gzip members and zstd frames, including skippable ones, form one stream. A stream that ends early or is
//! followed by other data is damaged: ignoring that would lose documents silently.

use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::fault::{again, is_out_of_memory};
use contract::{Fault, Identity, Result};
use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};

use super::{Content, kinds};
use crate::disk::Disk;

/// Raw bytes are read and hashed in pieces of this size.
const RAW_BYTES: usize = 256 << 10;

/// `zstd --long=31`, which published dumps use, needs windows this large; zstd allocates what the frame asks for.
const WINDOW_LOG_MAX: u32 = 31;

/// A decompressed stream that tracks its position.
pub(super) struct Stream {
    decoder: Decoder,
    path: PathBuf,
    offset: u64,
}

enum Decoder {
    Plain(BufReader<Tee>),
    Gzip(Box<MultiGzDecoder<BufReader<Tee>>>),
    Zstd(zstd::Decoder<'static, BufReader<Tee>>),
}

impl Stream {
    /// Opens `path`; its extension gives the compression.
    pub(super) fn open(disk: &dyn Disk, path: &Path) -> Result<Self> {
        let raw = BufReader::with_capacity(RAW_BYTES, Tee::open(disk, path)?);
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        let decoder = match extension.as_ref().and_then(|extension| extension.to_str()) {
            Some("gz") => Decoder::Gzip(Box::new(MultiGzDecoder::new(raw))),
            Some("zst") => {
                let decoder = zstd::Decoder::with_buffer(raw).and_then(|mut decoder| {
                    decoder.window_log_max(WINDOW_LOG_MAX)?;
                    Ok(decoder)
                });
                Decoder::Zstd(decoder.map_err(|error| Fault::io("read", path, &error))?)
            }
            _ => Decoder::Plain(raw),
        };
        Ok(Stream { decoder, path: path.to_owned(), offset: 0 })
    }

    /// Appends up to `at_most` bytes and returns how many; fewer only at the end of the stream.
    ///
    /// The first bytes of the file are checked: a name without a compression's extension may be wrong.
    pub(super) fn fill(&mut self, buffer: &mut Vec<u8>, at_most: usize) -> Result<usize> {
        let before = buffer.len();
        let reserved = buffer.try_reserve(at_most).map_err(io::Error::from);
        let outcome = reserved.and_then(|()| match &mut self.decoder {
            Decoder::Plain(reader) => reader.take(at_most as u64).read_to_end(buffer),
            Decoder::Gzip(reader) => reader.take(at_most as u64).read_to_end(buffer),
            Decoder::Zstd(reader) => reader.take(at_most as u64).read_to_end(buffer),
        });
        let got = buffer.len() - before;
        let (first, plain) = (self.offset == 0, self.kind().is_none());
        self.offset += got as u64;
        outcome.map_err(|error| match is_out_of_memory(&error) {
            true => Fault::io("read", &self.path, &io::ErrorKind::OutOfMemory.into()),
            false => self.damaged(&error.to_string()),
        })?;
        if got == 0 && at_most > 0 && self.tee().bytes == 0 && self.kind().is_some() {
            return Err(self.damaged("the file is empty"));
        }
        if first
            && plain
            && let Some(fault) = kinds::misnamed(&self.path, &buffer[before..])
        {
            return Err(fault);
        }
        Ok(got)
    }

    /// The number of raw bytes read so far.
    pub(super) fn raw_bytes(&self) -> u64 {
        self.tee().bytes
    }

    /// What was read, once it is at its end.
    pub(super) fn content(&self) -> Content {
        let (bytes, sha256) = self.tee().content();
        Content { bytes, sha256, segments: 1, hashes: None }
    }

    fn tee(&self) -> &Tee {
        match &self.decoder {
            Decoder::Plain(reader) => reader.get_ref(),
            Decoder::Gzip(reader) => reader.get_ref().get_ref(),
            Decoder::Zstd(reader) => reader.get_ref().get_ref(),
        }
    }

    fn kind(&self) -> Option<&'static str> {
        match &self.decoder {
            Decoder::Plain(_) => None,
            Decoder::Gzip(_) => Some("gzip"),
            Decoder::Zstd(_) => Some("zstd"),
        }
    }

    /// The fault behind a failed read: the machine's if the raw file could not be read, otherwise the data's.
    fn damaged(&self, error: &str) -> Fault {
        if let Some(fault) = self.tee().failed(&self.path) {
            return fault;
        }
        let kind = self.kind().unwrap_or("raw");
        Fault::data(format!(
            "the {kind} stream is damaged, cut short or followed by something else"
        ))
        .at(self.path.display().to_string())
        .found(format!(
            "{error}, {} decompressed bytes into the stream ({} of the file read)",
            self.offset,
            self.tee().bytes
        ))
        .hint(
            "fetch the file again; its name must end in .gz or .zst exactly if it is compressed so",
        )
    }
}

/// A file, or a range of one, whose bytes are hashed as they are read.
pub(crate) struct Tee {
    file: Box<dyn Read + Send>,
    /// The next byte, and the end of what is read.
    at: u64,
    to: u64,
    bytes: u64,
    hasher: Sha256,
    /// Where the groups end that have hashes of their own, and the hashes of those that have ended.
    ends: Vec<u64>,
    groups: Vec<Identity>,
    failed: Option<io::Error>,
}

impl Tee {
    pub(crate) fn open(disk: &dyn Disk, path: &Path) -> Result<Self> {
        Tee::over(disk, path, 0..u64::MAX, Vec::new())
    }

    /// A range of a file, with groups that end at these bytes.
    pub(crate) fn over(
        disk: &dyn Disk,
        path: &Path,
        range: Range<u64>,
        ends: Vec<u64>,
    ) -> Result<Self> {
        let Range { start: at, end: to } = range;
        let file = disk.stream(path, at).map_err(|error| Fault::io("open", path, &error))?;
        let (hasher, groups) = (Sha256::new(), Vec::new());
        Ok(Tee { file, at, to, bytes: 0, hasher, ends, groups, failed: None })
    }

    /// The I/O error, if one occurred: a decoder may have replaced it by another error.
    pub(crate) fn failed(&self, path: &Path) -> Option<Fault> {
        self.failed.as_ref().map(|error| Fault::io("read", path, error))
    }

    /// Reads to byte `end` or the end of the range, for the identity only.
    pub(crate) fn read_to(&mut self, end: u64, path: &Path) -> Result<()> {
        let rest = end.saturating_sub(self.at);
        let read =
            io::copy(&mut BufReader::with_capacity(RAW_BYTES, self.take(rest)), &mut io::sink());
        read.map(drop).map_err(|error| Fault::io("read", path, &error))
    }

    /// The number of bytes read so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next byte of the file.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// The number of bytes read so far, and their identity, if there are no groups.
    pub(crate) fn content(&self) -> (u64, Identity) {
        (self.bytes, Identity(self.hasher.clone().finalize().into()))
    }

    /// The hashes of the groups that have ended.
    pub(crate) fn groups(&self) -> &[Identity] {
        &self.groups
    }

    fn hash(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        while let Some(end) = self.ends.get(self.groups.len())
            && let Some((group, rest)) = bytes.split_at_checked((end - self.at) as usize)
        {
            self.hasher.update(group);
            self.groups.push(Identity(self.hasher.finalize_reset().into()));
            (self.at, bytes) = (*end, rest);
        }
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
    }
}

impl Read for Tee {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.to - self.at).unwrap_or(usize::MAX).min(buffer.len());
        let got = loop {
            match self.file.read(&mut buffer[..most]) {
                Ok(got) => break got,
                // Retried here, so that decoders need not handle it.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // A decoder may wrap or replace the error, but its class must survive.
                    self.failed = Some(again(&error));
                    return Err(error);
                }
            }
        };
        self.hash(&buffer[..got]);
        Ok(got)
    }
}
