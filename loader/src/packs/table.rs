//! The file format of a source's packs.
//!
//! ```text
//! head      magic (`zpacks 1`), key, number of lengths; of each length: tokens, packs of each kind, pieces, documents,
//!           documents cut
//! of each length
//!   ends    for each pack: the number of pieces up to its end                 u64
//!   padding for each pack with padding: how much                              u32
//!   pieces  pack after pack: first token, tokens                              u64, u32
//!   places  the pieces by first token: first token, pack, offset, tokens      u64, u64, u32, u32
//! digest    as of each file next to a store (`sealed.rs`)
//! ```
//!
//! Numbers are little-endian. Only `padding` is held in memory: reading a pack takes two small reads.

use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::{Digest, Result};
use mixer::fit::FittedPacks;
use mixer::{PackPlace, PackTable, PackedLength, Span};

use crate::sealed::{Kind, SealedFile, SealedWriter};

/// The file's first word.
const MAGIC: u64 = u64::from_le_bytes(*b"zpacks 1");

const END_BYTES: u64 = 8;
const PIECE_BYTES: u64 = 12;
const PLACE_BYTES: u64 = 24;
/// Magic, key, number of lengths.
const HEAD_WORDS: usize = 4;
/// Tokens, contiguous, joined, padded, pieces, documents, cut.
const LENGTH_WORDS: usize = 7;

/// An open file of packs.
#[derive(Debug)]
pub(super) struct Table {
    file: SealedFile,
    lengths: Vec<PackedLength>,
    layouts: Vec<Layout>,
}

/// The offsets of a length's columns.
#[derive(Clone, Copy, Debug)]
struct Layout {
    ends: u64,
    padding: u64,
    pieces: u64,
    places: u64,
    end: u64,
    /// Pieces of all packs.
    count: u64,
}

impl Layout {
    /// The layout from offset `at`, for `packs` packs (`padded` of them with padding) and `count` pieces; `None` on
    /// overflow.
    fn new(at: u64, packs: u64, padded: u64, count: u64) -> Option<Self> {
        let after = |at: u64, count: u64, bytes: u64| at.checked_add(count.checked_mul(bytes)?);
        let padding = after(at, packs, END_BYTES)?;
        let pieces = after(padding, padded, 4)?;
        let places = after(pieces, count, PIECE_BYTES)?;
        let end = after(places, count, PLACE_BYTES)?;
        Some(Layout { ends: at, padding, pieces, places, end, count })
    }
}

/// Writes the packs of all lengths into `folder` as `name`, atomically; returns the path.
pub(super) fn write(
    folder: &Path,
    name: &str,
    key: Digest,
    lengths: &[u32],
    packs: &[FittedPacks],
) -> Result<PathBuf> {
    let mut file = SealedWriter::create(Kind::Packs, folder, name)?;
    let mut put = |bytes: &[u8]| file.put(bytes);
    put(&MAGIC.to_le_bytes())?;
    put(&key.0.to_le_bytes())?;
    put(&(lengths.len() as u64).to_le_bytes())?;
    for (length, FittedPacks { contiguous, joined, padded, documents, cut }) in
        lengths.iter().zip(packs)
    {
        let pieces: usize = joined.iter().chain(padded).map(Vec::len).sum();
        let counts = [contiguous.len(), joined.len(), padded.len(), contiguous.len() + pieces];
        put(&u64::from(*length).to_le_bytes())?;
        for count in counts {
            put(&(count as u64).to_le_bytes())?;
        }
        put(&documents.to_le_bytes())?;
        put(&cut.to_le_bytes())?;
    }
    for (length, packs) in lengths.iter().zip(packs) {
        columns(*length, packs, &mut put)?;
    }
    file.commit()
}

/// Writes the columns of one length.
fn columns(
    length: u32,
    packs: &FittedPacks,
    put: &mut impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let FittedPacks { contiguous, joined, padded, documents: _, cut: _ } = packs;
    let all = || {
        let single = contiguous.iter().map(std::slice::from_ref);
        single.chain(joined.iter().chain(padded).map(Vec::as_slice))
    };
    let mut end = 0;
    for pack in all() {
        end += pack.len() as u64;
        put(&end.to_le_bytes())?;
    }
    for pack in padded {
        let taken: u32 = pack.iter().map(|piece| piece.tokens).sum();
        put(&(length - taken).to_le_bytes())?;
    }
    let mut places: Vec<(Span, u64, u32)> = Vec::new();
    for (number, pack) in (0u64..).zip(all()) {
        let mut offset = 0;
        for piece in pack {
            put(&piece.start.to_le_bytes())?;
            put(&piece.tokens.to_le_bytes())?;
            places.push((*piece, number, offset));
            offset += piece.tokens;
        }
    }
    places.sort_unstable();
    for (piece, pack, offset) in places {
        put(&piece.start.to_le_bytes())?;
        put(&pack.to_le_bytes())?;
        put(&offset.to_le_bytes())?;
        put(&piece.tokens.to_le_bytes())?;
    }
    Ok(())
}

impl Table {
    /// Opens the file with the packs of `key` and checks its digest.
    pub(super) fn open(path: &Path, key: Digest) -> Result<Self> {
        let file = SealedFile::open(Kind::Packs, path)?;
        let body = file.body;
        let head = file.words(0, HEAD_WORDS)?;
        let named = Digest(u128::from(head[1]) | u128::from(head[2]) << 64);
        if head[0] != MAGIC || named != key {
            return Err(file.damaged("it is not what its name says").found(named).wanted(key));
        }
        let count = usize::try_from(head[3]).ok().filter(|count| *count <= body as usize / 8);
        let count = count.ok_or_else(|| file.damaged("it has too many lengths"))?;
        let table = file.words(HEAD_WORDS as u64 * 8, count * LENGTH_WORDS)?;
        let mut start = (HEAD_WORDS + count * LENGTH_WORDS) as u64 * 8;
        let (mut lengths, mut layouts) = (Vec::new(), Vec::new());
        for row in table.chunks(LENGTH_WORDS) {
            let &[seq_len, contiguous, joined, padded, pieces, documents, cut] = row else { break };
            let packs = contiguous.checked_add(joined).and_then(|sum| sum.checked_add(padded));
            let layout = packs.and_then(|packs| Layout::new(start, packs, padded, pieces));
            let layout = layout.filter(|layout| layout.end <= body);
            let layout = layout.ok_or_else(|| file.damaged("its columns go beyond its end"))?;
            let padding = file.bytes(layout.padding, padded as usize * 4)?;
            let padding =
                padding.as_chunks().0.iter().map(|lacks| u32::from_le_bytes(*lacks)).collect();
            let seq_len = seq_len as u32; // The digest matches, so it is a u32.
            start = layout.end;
            lengths.push(PackedLength { seq_len, contiguous, joined, padding, documents, cut });
            layouts.push(layout);
        }
        Ok(Table { file, lengths, layouts })
    }

    fn end(&self, layout: &Layout, pack: u64) -> Result<u64> {
        Ok(u64::from_le_bytes(self.file.at(layout.ends + pack * END_BYTES)?))
    }

    /// Piece number `index` in order of first token: its tokens, pack, offset.
    fn place(&self, layout: &Layout, index: u64) -> Result<(Range<u64>, u64, u32)> {
        let from = layout.places + index * PLACE_BYTES;
        let row: [u8; PLACE_BYTES as usize] = self.file.at(from)?;
        let word = |at: usize| u64::from_le_bytes(row.as_chunks().0[at]);
        let (start, pack, both) = (word(0), word(1), word(2));
        let (offset, tokens) = (both as u32, both >> 32);
        Ok((start..start + tokens, pack, offset))
    }
}

impl PackTable for Table {
    fn digest(&self) -> Digest {
        self.file.digest
    }

    fn lengths(&self) -> &[PackedLength] {
        &self.lengths
    }

    fn spans(&self, length: usize, pack: u64) -> Result<Vec<Span>> {
        let layout = &self.layouts[length];
        let from = if pack == 0 { 0 } else { self.end(layout, pack - 1)? };
        let end = self.end(layout, pack)?;
        let pieces = end.checked_sub(from).filter(|_| end <= layout.count);
        let pieces = pieces.ok_or_else(|| self.file.damaged("its packs overlap"))?;
        let bytes = (pieces * PIECE_BYTES) as usize;
        let rows = self.file.bytes(layout.pieces + from * PIECE_BYTES, bytes)?;
        let span = |row: &[u8; PIECE_BYTES as usize]| {
            let (start, tokens) = row.split_first_chunk().unwrap_or((&[0; 8], &[]));
            let tokens = tokens.try_into().map_or(0, u32::from_le_bytes);
            Span { start: u64::from_le_bytes(*start), tokens }
        };
        Ok(rows.as_chunks().0.iter().map(span).collect())
    }

    fn places(&self, tokens: Range<u64>) -> Result<Vec<PackPlace>> {
        let mut found = Vec::new();
        for (length, layout) in self.layouts.iter().enumerate() {
            // The first piece that ends after the first token.
            let (mut low, mut high) = (0, layout.count);
            while low < high {
                let middle = low + (high - low) / 2;
                let (piece, _, _) = self.place(layout, middle)?;
                if piece.end <= tokens.start { low = middle + 1 } else { high = middle }
            }
            for index in low..layout.count {
                let (piece, pack, offset) = self.place(layout, index)?;
                if piece.start >= tokens.end {
                    break;
                }
                let inside = piece.start.max(tokens.start)..piece.end.min(tokens.end);
                let offset = offset + (inside.start - piece.start) as u32;
                found.push(PackPlace { length, pack, offset, tokens: inside });
            }
        }
        found.sort_unstable_by_key(|place| place.tokens.start);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use storage::crash::Recording;

    use super::*;
    use crate::sealed::clear;

    /// A file with its final name is always complete, and a missing one is recomputed identically.
    #[test]
    fn packs_survive_crashes() {
        let bench = tempfile::tempdir().unwrap();
        let folder = bench.path().join("place");
        fs::create_dir(&folder).unwrap();
        let mut packs = FittedPacks::default();
        packs.add(&[(0, 5), (5, 9), (14, 3), (17, 30)], 16, 4);
        let (key, packs) = (Digest(7), [packs]);
        let beside = folder.join("store.packs");
        let make = || {
            clear(Kind::Packs, &beside);
            write(&beside, "a.packs", key, &[16], &packs).unwrap()
        };
        let (recording, path) = Recording::of(&folder, make);
        let wanted = fs::read(&path).unwrap();
        assert_eq!(Table::open(&path, key).unwrap().lengths().len(), 1);
        let mut seen = [0, 0];
        recording.each(80, |_| {
            let is_there = path.exists();
            seen[usize::from(is_there)] += 1;
            if is_there {
                Table::open(&path, key).unwrap();
            }
            make();
            assert!(fs::read(&path).unwrap() == wanted, "other packs");
            assert_eq!(fs::read_dir(&beside).unwrap().count(), 1, "a piece is left");
        });
        assert!(seen[0] > 5 && seen[1] > 0, "{seen:?}");
    }

    #[test]
    fn packs_that_became_a_pipe_keep_nobody_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.packs");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (done, end) = channel();
        let named = path.clone();
        std::thread::spawn(move || done.send(Table::open(&named, Digest(7)).err()));
        let fault = end.recv_timeout(Duration::from_secs(60)).expect("it waits").unwrap();
        assert!(fault.to_string().contains("a FIFO"), "{fault}");
    }
}
