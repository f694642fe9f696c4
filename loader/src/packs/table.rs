//! The file format of a source's packs.
//!
//! ```text
//! head       magic (`zpacks 2`), key                                          u64, u128
//! of each block of documents that were packed together at one length
//!   padding  for each pack that is not full: its free space                  u32
//!   ends     for each pack but the contiguous ones: pieces up to its end     u32
//!   whole    for each contiguous pack: its first token                       u64
//!   pieces   of the other packs, pack after pack: first token, tokens        u64, u32
//!   places   the pieces of all packs by first token: first token, pack of the block, offset, tokens
//!                                                                             u64, u64, u32, u32
//! blocks     of each block: length, offset, first token, packs of each kind, pieces, documents, documents cut
//!                                                                             9 x u64
//! tail       the lengths; numbers of blocks and of lengths                   u64
//! sums       as of each file next to a store (`sealed.rs`)
//! ```
//!
//! Numbers are little-endian. A pack's number counts the contiguous packs of all blocks of its length first, then the
//! joined ones, then those with free space. Of each block its sizes are held in memory, and 4 bytes for each pack with
//! free space: reading a pack takes two small reads.

use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::{Digest, Result};
use mixer::fit::FittedPacks;
use mixer::{PackPlace, PackTable, PackedLength, Span};

use crate::sealed::{Kind, SealedFile, SealedWriter};

/// The file's first word.
const MAGIC: u64 = u64::from_le_bytes(*b"zpacks 2");

const PIECE_BYTES: u64 = 12;
const PLACE_BYTES: u64 = 24;
const HEAD_WORDS: usize = 3;
const BLOCK_WORDS: usize = 9;
const TAIL_WORDS: usize = 2;

/// Packs by kind: contiguous, joined, with free space.
type Kinds = [u64; 3];

/// One block of packs in the file.
#[derive(Clone, Debug)]
struct Block {
    /// The offset of its columns.
    at: u64,
    /// The first token of its first document.
    first_token: u64,
    packs: Kinds,
    /// Pieces of its packs that are not contiguous.
    pieces: u64,
    /// Packs of each kind in the blocks of this length before it.
    before: Kinds,
}

/// The offsets of a block's columns.
struct Columns {
    ends: u64,
    whole: u64,
    pieces: u64,
    places: u64,
    end: u64,
}

impl Block {
    /// Its columns; `None` on overflow.
    fn columns(&self) -> Option<Columns> {
        let [contiguous, joined, padded] = self.packs;
        let after = |at: u64, count: u64, bytes: u64| at.checked_add(count.checked_mul(bytes)?);
        let ends = after(self.at, padded, 4)?;
        let whole = after(ends, joined.checked_add(padded)?, 4)?;
        let pieces = after(whole, contiguous, 8)?;
        let places = after(pieces, self.pieces, PIECE_BYTES)?;
        let end = after(places, self.places()?, PLACE_BYTES)?;
        Some(Columns { ends, whole, pieces, places, end })
    }

    fn places(&self) -> Option<u64> {
        self.packs[0].checked_add(self.pieces)
    }
}

/// A file of packs under construction.
pub(super) struct TableWriter {
    file: SealedWriter,
    lengths: Vec<u32>,
    /// The rows of the blocks.
    blocks: Vec<u64>,
}

impl TableWriter {
    /// Begins the file `name` in `folder`, for packs of these lengths.
    pub(super) fn create(folder: &Path, name: &str, key: Digest, lengths: &[u32]) -> Result<Self> {
        let mut file = SealedWriter::create(Kind::Packs, folder, name)?;
        file.put(&MAGIC.to_le_bytes())?;
        file.put(&key.0.to_le_bytes())?;
        Ok(TableWriter { file, lengths: lengths.to_vec(), blocks: Vec::new() })
    }

    /// Appends the packs of these documents, which follow the documents of earlier blocks of this length.
    pub(super) fn add(
        &mut self,
        length: usize,
        documents: &[Range<u64>],
        packs: &FittedPacks,
    ) -> Result<()> {
        let Some(first) = documents.first() else { return Ok(()) };
        let FittedPacks { contiguous, joined, padded, documents, cut } = packs;
        let at = self.file.body;
        let others = || joined.iter().chain(padded);
        for pack in padded {
            let taken: u32 = pack.iter().map(|piece| piece.tokens).sum();
            self.file.put(&(self.lengths[length] - taken).to_le_bytes())?;
        }
        let mut pieces = 0u32; // At most one for each document of the block.
        for pack in others() {
            pieces += pack.len() as u32;
            self.file.put(&pieces.to_le_bytes())?;
        }
        for span in contiguous {
            self.file.put(&span.start.to_le_bytes())?;
        }
        let mut places: Vec<(Span, u64, u32)> =
            (0..).zip(contiguous).map(|(pack, span)| (*span, pack, 0)).collect();
        for (pack, pieces) in (contiguous.len() as u64..).zip(others()) {
            let mut offset = 0;
            for piece in pieces {
                self.file.put(&piece.start.to_le_bytes())?;
                self.file.put(&piece.tokens.to_le_bytes())?;
                places.push((*piece, pack, offset));
                offset += piece.tokens;
            }
        }
        places.sort_unstable();
        for (piece, pack, offset) in places {
            self.file.put_words(&[piece.start, pack])?;
            self.file.put(&offset.to_le_bytes())?;
            self.file.put(&piece.tokens.to_le_bytes())?;
        }
        let kinds = [contiguous.len(), joined.len(), padded.len()].map(|packs| packs as u64);
        self.blocks.extend([length as u64, at, first.start]);
        self.blocks.extend(kinds);
        self.blocks.extend([u64::from(pieces), *documents, *cut]);
        Ok(())
    }

    /// Ends the file; returns its path.
    pub(super) fn commit(mut self) -> Result<PathBuf> {
        self.file.put_words(&self.blocks)?;
        let lengths: Vec<u64> = self.lengths.iter().map(|length| u64::from(*length)).collect();
        self.file.put_words(&lengths)?;
        let blocks = self.blocks.len() / BLOCK_WORDS;
        self.file.put_words(&[blocks as u64, lengths.len() as u64])?;
        self.file.commit()
    }
}

/// An open file of packs.
#[derive(Debug)]
pub(super) struct Table {
    file: SealedFile,
    lengths: Vec<PackedLength>,
    /// The blocks of each length.
    blocks: Vec<Vec<Block>>,
}

impl Table {
    /// Opens the file with the packs of `key`.
    pub(super) fn open(path: &Path, key: Digest) -> Result<Self> {
        let file = SealedFile::open(Kind::Packs, path)?;
        let head = file.words(0, HEAD_WORDS)?;
        let named = Digest(u128::from(head[1]) | u128::from(head[2]) << 64);
        if head[0] != MAGIC || named != key {
            return Err(file.damaged("it is not what its name says").found(named).wanted(key));
        }
        let early = || file.damaged("it ends early");
        let tail_at = file.body.checked_sub(TAIL_WORDS as u64 * 8).ok_or_else(early)?;
        let tail = file.words(tail_at, TAIL_WORDS)?;
        let words =
            tail[0].checked_mul(BLOCK_WORDS as u64).and_then(|all| all.checked_add(tail[1]));
        let table_at = words.and_then(|words| tail_at.checked_sub(words.checked_mul(8)?));
        let table_at = table_at.ok_or_else(early)?;
        let rows = file.words(table_at, ((tail_at - table_at) / 8) as usize)?;
        let (rows, lengths) = rows.split_at(rows.len() - tail[1] as usize);
        let length = |tokens: &u64| PackedLength { seq_len: *tokens as u32, ..Default::default() };
        let mut table = Table {
            lengths: lengths.iter().map(length).collect(),
            blocks: vec![Vec::new(); lengths.len()],
            file,
        };
        for row in rows.as_chunks::<BLOCK_WORDS>().0 {
            table.add(*row, table_at)?;
        }
        Ok(table)
    }

    /// Takes over the row of a block, whose columns end before `end`.
    fn add(&mut self, row: [u64; BLOCK_WORDS], end: u64) -> Result<()> {
        let [length, at, first_token, contiguous, joined, padded, pieces, documents, cut] = row;
        let number = length as usize;
        let Some(length) = self.lengths.get_mut(number) else {
            return Err(self.file.damaged("a block has a length that is not there"));
        };
        let before = [length.contiguous, length.joined, length.padding.len() as u64];
        let packs = [contiguous, joined, padded];
        let block = Block { at, first_token, packs, pieces, before };
        if block.columns().is_none_or(|columns| columns.end > end) {
            return Err(self.file.damaged("its columns extend beyond its end"));
        }
        let padding = self.file.bytes(at, padded as usize * 4)?;
        length.padding.extend(padding.as_chunks().0.iter().map(|free| u32::from_le_bytes(*free)));
        length.contiguous += contiguous;
        length.joined += joined;
        length.documents += documents;
        length.cut += cut;
        self.blocks[number].push(block);
        Ok(())
    }

    fn columns(&self, block: &Block) -> Result<Columns> {
        block.columns().ok_or_else(|| self.file.damaged("its columns extend beyond its end"))
    }

    /// The block of a pack and its number in that block.
    fn find(&self, length: usize, pack: u64) -> Result<(&Block, u64)> {
        let PackedLength { contiguous, joined, .. } = self.lengths[length];
        let (kind, index) = match pack {
            _ if pack < contiguous => (0, pack),
            _ if pack - contiguous < joined => (1, pack - contiguous),
            _ => (2, pack - contiguous - joined),
        };
        let blocks = &self.blocks[length];
        let after = blocks.partition_point(|block| block.before[kind] <= index);
        let block = after.checked_sub(1).map(|at| &blocks[at]);
        let inside = block.map(|block| (block, index - block.before[kind]));
        let (block, inside) = inside
            .filter(|(block, inside)| *inside < block.packs[kind])
            .ok_or_else(|| self.file.damaged("it lacks a pack"))?;
        Ok((block, block.packs[..kind].iter().sum::<u64>() + inside))
    }

    /// The number of a block's pack among all of its length.
    fn number(&self, length: usize, block: &Block, pack: u64) -> u64 {
        let PackedLength { contiguous, joined, .. } = self.lengths[length];
        let [own_contiguous, own_joined, _] = block.packs;
        match pack {
            _ if pack < own_contiguous => block.before[0] + pack,
            _ if pack - own_contiguous < own_joined => {
                contiguous + block.before[1] + pack - own_contiguous
            }
            _ => contiguous + joined + block.before[2] + pack - own_contiguous - own_joined,
        }
    }

    /// Piece number `index` of a block in order of first token: its tokens, pack of the block, offset.
    fn place(&self, columns: &Columns, index: u64) -> Result<(Range<u64>, u64, u32)> {
        let from = columns.places + index * PLACE_BYTES;
        let row: [u8; PLACE_BYTES as usize] = self.file.at(from)?;
        let word = |at: usize| u64::from_le_bytes(row.as_chunks().0[at]);
        let (start, pack, both) = (word(0), word(1), word(2));
        let (offset, tokens) = (both as u32, both >> 32);
        Ok((start..start.saturating_add(tokens), pack, offset))
    }

    /// Appends the places of tokens in a block.
    fn places_in(
        &self,
        length: usize,
        block: &Block,
        tokens: &Range<u64>,
        found: &mut Vec<PackPlace>,
    ) -> Result<()> {
        let columns = self.columns(block)?;
        // The first piece that ends after the first token.
        let count = block.packs[0] + block.pieces;
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            let (piece, _, _) = self.place(&columns, middle)?;
            if piece.end <= tokens.start { low = middle + 1 } else { high = middle }
        }
        for index in low..count {
            let (piece, pack, offset) = self.place(&columns, index)?;
            if piece.start >= tokens.end {
                break;
            }
            let inside = piece.start.max(tokens.start)..piece.end.min(tokens.end);
            let offset = offset + (inside.start - piece.start) as u32;
            let pack = self.number(length, block, pack);
            found.push(PackPlace { length, pack, offset, tokens: inside });
        }
        Ok(())
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
        let (block, pack) = self.find(length, pack)?;
        let (columns, contiguous) = (self.columns(block)?, block.packs[0]);
        let Some(other) = pack.checked_sub(contiguous) else {
            let start = u64::from_le_bytes(self.file.at(columns.whole + pack * 8)?);
            return Ok(vec![Span { start, tokens: self.lengths[length].seq_len }]);
        };
        let before = u64::from(other > 0);
        let ends = self.file.bytes(columns.ends + (other - before) * 4, 4 + before as usize * 4)?;
        let ends: Vec<u32> =
            ends.as_chunks().0.iter().map(|end| u32::from_le_bytes(*end)).collect();
        let (from, end) = if let [from, end] = ends[..] { (from, end) } else { (0, ends[0]) };
        let pieces = end.checked_sub(from).filter(|_| u64::from(end) <= block.pieces);
        let pieces = pieces.ok_or_else(|| self.file.damaged("its packs overlap"))?;
        let bytes = pieces as usize * PIECE_BYTES as usize;
        let rows = self.file.bytes(columns.pieces + u64::from(from) * PIECE_BYTES, bytes)?;
        let span = |row: &[u8; PIECE_BYTES as usize]| {
            let (start, tokens) = row.split_first_chunk().unwrap_or((&[0; 8], &[]));
            let tokens = tokens.try_into().map_or(0, u32::from_le_bytes);
            Span { start: u64::from_le_bytes(*start), tokens }
        };
        Ok(rows.as_chunks().0.iter().map(span).collect())
    }

    fn places(&self, tokens: Range<u64>) -> Result<Vec<PackPlace>> {
        let mut found = Vec::new();
        if tokens.is_empty() {
            return Ok(found);
        }
        for (length, blocks) in self.blocks.iter().enumerate() {
            // The documents of a block follow those of the blocks before it.
            let first = blocks.partition_point(|block| block.first_token <= tokens.start);
            let from = &blocks[first.saturating_sub(1)..];
            for block in from.iter().take_while(|block| block.first_token < tokens.end) {
                self.places_in(length, block, &tokens, &mut found)?;
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

    use proptest::prelude::*;
    use storage::crash::Recording;

    use super::*;
    use crate::sealed::clear;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Packs have the numbers, spans and places that plain lists of the packs of all blocks have.
        #[test]
        fn blocks_are_read_as_one_list(
            blocks in prop::collection::vec((0usize..2, prop::collection::vec(0u64..60, 0..30)), 1..8),
            from in 0u64..3000,
            count in 0u64..200,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let lengths = [16, 40];
            let mut writer = TableWriter::create(folder.path(), "a.packs", Digest(7), &lengths).unwrap();
            let mut lists: [[Vec<Vec<Span>>; 3]; 2] = Default::default();
            let mut at = 0;
            for (length, sizes) in blocks {
                let document = |size: u64| {
                    at += size;
                    at - size..at
                };
                let documents: Vec<Range<u64>> = sizes.into_iter().map(document).collect();
                let packs = FittedPacks::of(&documents, lengths[length], 3);
                writer.add(length, &documents, &packs).unwrap();
                let [contiguous, joined, padded] = &mut lists[length];
                contiguous.extend(packs.contiguous.into_iter().map(|span| vec![span]));
                joined.extend(packs.joined);
                padded.extend(packs.padded);
            }
            let table = Table::open(&writer.commit().unwrap(), Digest(7)).unwrap();
            let wanted = from..from + count;
            let mut places = Vec::new();
            for (length, kinds) in lists.iter().enumerate() {
                let packs = kinds.concat();
                let of = &table.lengths()[length];
                prop_assert_eq!(of.packs(), packs.len() as u64);
                let total = |pack: &Vec<Span>| pack.iter().map(|span| span.tokens).sum::<u32>();
                let free: Vec<u32> = kinds[2].iter().map(|pack| of.seq_len - total(pack)).collect();
                prop_assert_eq!(&of.padding, &free);
                for (number, pack) in (0..).zip(&packs) {
                    prop_assert_eq!(&table.spans(length, number).unwrap(), pack);
                    let mut offset = 0;
                    for span in pack {
                        let tokens = span.start.max(wanted.start)..(span.start + u64::from(span.tokens)).min(wanted.end);
                        if !tokens.is_empty() {
                            let offset = offset + (tokens.start - span.start) as u32;
                            places.push(PackPlace { length, pack: number, offset, tokens });
                        }
                        offset += span.tokens;
                    }
                }
                prop_assert!(table.spans(length, packs.len() as u64).is_err());
            }
            places.sort_unstable_by_key(|place| place.tokens.start);
            prop_assert_eq!(table.places(wanted).unwrap(), places);
        }
    }

    /// A file with its final name is always complete, and a missing one is recomputed identically.
    #[test]
    fn packs_survive_crashes() {
        let bench = tempfile::tempdir().unwrap();
        let folder = bench.path().join("place");
        fs::create_dir(&folder).unwrap();
        let documents = [0..5, 5..14, 14..17, 17..47];
        let (key, packs) = (Digest(7), FittedPacks::of(&documents, 16, 4));
        let beside = folder.join("store.packs");
        let make = || {
            clear(Kind::Packs, &beside);
            let mut writer = TableWriter::create(&beside, "a.packs", key, &[16]).unwrap();
            writer.add(0, &documents, &packs).unwrap();
            writer.commit().unwrap()
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
