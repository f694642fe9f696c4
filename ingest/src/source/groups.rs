//! Where the row groups of a Parquet file and the record batches of an Arrow file are: a build may cut a file there.
//!
//! ```text
//! | group 0        | group 1   | ... | last group | footer |
//! 0                begin of 1              begin of footer  end
//! ```
//!
//! A group reaches to the begin of the next one, so that padding, filters and indexes after it belong to it; one that
//! stores nothing begins where it ends. The identity of such a file is a hash over the SHA-256 of each group and of the
//! footer: parts of a build that read some groups each hash what they read, and no cut moves the identity.
//!
//! Invariant: every byte of a file is in exactly one hash. A file without a readable footer, or whose groups do not
//! follow each other, has no layout: it is not cut, and its identity is the SHA-256 of its bytes.

use std::ops::Range;
use std::path::Path;

use arrow::error::ArrowError;
use arrow::ipc::{Block, root_as_footer};
use contract::{Class, Fault, Framed, Identity, Result};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, ParquetMetaDataReader};
use parquet::file::reader::{ChunkReader as _, Length as _};
use serde::{Deserialize, Serialize};
use store::Location;
use store::pieces::Pieces;

use super::columns::{guarded, guarded_pieces};
use super::decompress::Tee;
use super::{Content, Format};
use crate::disk::{Disk, Real};

/// The magic at the end of a Parquet file, after the length of its metadata.
const PARQUET: &[u8; 4] = b"PAR1";

/// The magic at both ends of an Arrow file; at the end, after the length of the footer.
pub(super) const ARROW: &[u8; 6] = b"ARROW1";

/// The groups of a file that one part of a build reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cut {
    /// These groups.
    pub(crate) groups: Range<u32>,
    /// The groups of the whole file.
    of: u32,
    /// Bytes of these groups, with the footer after the last one.
    pub(crate) bytes: u64,
}

/// The layout of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The end of each group: the begin of the next one, or of the footer.
    ends: Vec<u64>,
    /// SHA-256 of the footer.
    footer: Identity,
    /// The size of the file.
    bytes: u64,
}

/// SHA-256 of groups of a file, in order, and of its footer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GroupHashes {
    first: u32,
    groups: Vec<Identity>,
    footer: Identity,
}

impl GroupHashes {
    /// The identity of these groups: of a whole file, its identity.
    pub(crate) fn identity(&self) -> Identity {
        let GroupHashes { first, groups, footer } = self;
        Framed::new("zdata groups", 1).field(first).field(groups).field(footer).finish()
    }

    /// Adds the hashes of the groups after these; returns whether they are of the same file.
    pub(crate) fn extend(&mut self, next: GroupHashes) -> bool {
        let follows = self.first as usize + self.groups.len() == next.first as usize;
        self.groups.extend(next.groups);
        follows && self.footer == next.footer
    }
}

impl Layout {
    /// The layout of a file; none where its groups are not known.
    pub(crate) fn of(file: &Location, format: Format) -> Result<Option<Layout>> {
        if format.is_stream() {
            return Ok(None);
        }
        let (place, named) = match file {
            Location::Local(path) => (Pieces::open(path), path.clone()),
            Location::Object(object) => {
                (Pieces::of_object(object), object.address().to_string().into())
            }
        };
        let pieces = place.map_err(|error| file.fault("open", &error))?;
        let found = match format {
            Format::Parquet => Layout::of_parquet(&named, &pieces),
            _ => Layout::of_arrow(&named, &pieces),
        };
        found.map_err(|fault| pieces.or_machine(file, fault))
    }

    fn of_parquet(path: &Path, pieces: &Pieces) -> Result<Option<Layout>> {
        let parse = || ParquetMetaDataReader::new().parse_and_finish(pieces);
        match guarded_pieces(path, pieces, parse) {
            Ok(metadata) => Layout::of_metadata(path, pieces, &metadata),
            Err(fault) if fault.class() == Class::Data => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// The layout of a Parquet file with this metadata.
    pub(super) fn of_metadata(
        path: &Path,
        pieces: &Pieces,
        metadata: &ParquetMetaData,
    ) -> Result<Option<Layout>> {
        let Some((footer, _)) = footer(path, pieces, PARQUET)? else { return Ok(None) };
        // Numbers of a damaged file make the library panic.
        let groups = guarded(path, "Parquet", || {
            let range = |column: &ColumnChunkMetaData| {
                let (start, length) = column.byte_range();
                start..start.saturating_add(length)
            };
            let groups = metadata.row_groups().iter().map(|group| {
                // A writer gives a column without bytes any offset.
                let columns = || group.columns().iter().map(range).filter(|one| !one.is_empty());
                let start = columns().map(|range| range.start).min().unwrap_or_default();
                start..columns().map(|range| range.end).max().unwrap_or_default()
            });
            Ok::<_, ParquetError>(groups.collect())
        });
        Layout::new(path, pieces, groups.unwrap_or_default(), footer)
    }

    /// The layout of an Arrow file. Dictionaries may be needed by every batch: a file that has some is not cut.
    pub(super) fn of_arrow(path: &Path, pieces: &Pieces) -> Result<Option<Layout>> {
        let head = ARROW.len() as u64;
        if pieces.len() < head || read(path, pieces, 0..head)? != ARROW {
            return Ok(None);
        }
        let Some((footer, bytes)) = footer(path, pieces, ARROW)? else { return Ok(None) };
        let groups = guarded(path, "Arrow", || {
            let footer = root_as_footer(&bytes);
            let footer = footer.map_err(|error| ArrowError::ParseError(error.to_string()))?;
            let is_plain = footer.dictionaries().is_none_or(|all| all.is_empty());
            let blocks = footer.recordBatches().filter(|_| is_plain).into_iter().flatten();
            let number = |value: i64| u64::try_from(value).unwrap_or_default();
            let range = |block: &Block| {
                let (head, body) = (i64::from(block.metaDataLength()), block.bodyLength());
                number(block.offset())
                    ..number(block.offset().saturating_add(head).saturating_add(body))
            };
            Ok::<_, ArrowError>(blocks.map(range).collect::<Vec<_>>())
        });
        let groups = groups.unwrap_or_default();
        // What stands between two batches is none of theirs.
        let follow = groups.windows(2).all(|pair| pair[0].end == pair[1].start)
            && groups.iter().all(|group| !group.is_empty());
        Layout::new(path, pieces, if follow { groups } else { Vec::new() }, footer)
    }

    /// The layout of groups at these places, empty ranges of those without bytes, and a footer from byte `footer` on.
    fn new(
        path: &Path,
        pieces: &Pieces,
        groups: Vec<Range<u64>>,
        footer: u64,
    ) -> Result<Option<Layout>> {
        let mut next = footer;
        let ends = groups.iter().rev().map(|group| {
            let begin = if group.is_empty() { next } else { group.start };
            std::mem::replace(&mut next, begin)
        });
        let mut ends: Vec<u64> = ends.collect();
        ends.reverse();
        let is_within = |(group, end): (&Range<u64>, &u64)| group.is_empty() || group.end <= *end;
        let fits = u32::try_from(groups.len()).is_ok() && groups.iter().zip(&ends).all(is_within);
        if groups.is_empty() || !fits {
            return Ok(None);
        }
        let bytes = pieces.len();
        let footer = Identity::of_bytes(&read(path, pieces, footer..bytes)?);
        Ok(Some(Layout { ends, footer, bytes }))
    }

    /// The begin of a group.
    fn start(&self, group: usize) -> u64 {
        group.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// The end of a group; of the last one, with the footer.
    fn end(&self, group: usize) -> u64 {
        if group + 1 == self.ends.len() { self.bytes } else { self.ends[group] }
    }

    /// Cuts the file into parts of about equal size, as many as parts of `bytes` bytes it would fill; none if it has
    /// too few groups.
    pub(crate) fn cuts(&self, bytes: u64) -> Vec<Cut> {
        let each = self.bytes.div_ceil(self.bytes.div_ceil(bytes.max(1)).max(1)).max(1);
        let groups: Vec<usize> = (0..self.ends.len()).collect();
        let parts = groups.chunk_by(|a, b| self.start(*a) / each == self.start(*b) / each);
        let cut = |part: &[usize]| self.cut(part[0]..part[0] + part.len());
        let cuts: Vec<Cut> = parts.map(cut).collect();
        if cuts.len() > 1 { cuts } else { Vec::new() }
    }

    fn cut(&self, groups: Range<usize>) -> Cut {
        let bytes = self.end(groups.end - 1) - self.start(groups.start);
        Cut { groups: groups.start as u32..groups.end as u32, of: self.ends.len() as u32, bytes }
    }
}

/// The begin of the footer of a file that ends in `magic`, after the length of what is before that, and its bytes
/// without those.
fn footer(path: &Path, pieces: &Pieces, magic: &[u8]) -> Result<Option<(u64, Vec<u8>)>> {
    let bytes = pieces.len();
    let Some(end) = bytes.checked_sub(4 + magic.len() as u64) else { return Ok(None) };
    let tail = read(path, pieces, end..bytes)?;
    let Some((length, _)) = tail.split_first_chunk::<4>().filter(|(_, rest)| *rest == magic) else {
        return Ok(None);
    };
    match end.checked_sub(u64::from(u32::from_le_bytes(*length))) {
        Some(begin) => Ok(Some((begin, read(path, pieces, begin..end)?))),
        None => Ok(None),
    }
}

fn read(path: &Path, pieces: &Pieces, range: Range<u64>) -> Result<Vec<u8>> {
    let length = (range.end - range.start) as usize;
    guarded_pieces(path, pieces, || {
        pieces.get_bytes(range.start, length).map(|bytes| bytes.to_vec())
    })
}

/// The groups of an open file that are to be read.
pub(super) struct Groups {
    layout: Option<Layout>,
    /// Their numbers.
    pub(super) range: Range<usize>,
}

impl Groups {
    /// Those of `cut`, or all of a whole file, which has `count` if it has no layout.
    pub(super) fn new(
        path: &Path,
        layout: Option<Layout>,
        count: usize,
        cut: Option<&Cut>,
    ) -> Result<Self> {
        let all = layout.as_ref().map_or(count, |layout| layout.ends.len());
        let Some(cut) = cut else { return Ok(Groups { layout, range: 0..all }) };
        let range = cut.groups.start as usize..cut.groups.end as usize;
        let is_planned = |layout: &Layout| range.end <= all && layout.cut(range.clone()) == *cut;
        if layout.as_ref().is_some_and(is_planned) {
            return Ok(Groups { layout, range });
        }
        Err(Fault::mismatch("this input changed since its build was planned")
            .at(path.display().to_string())
            .hint("run the same command again; of tasks, `zdata task plan` first"))
    }

    /// A reader of the bytes of these groups, which hashes each of them.
    pub(super) fn tee(&self, disk: &dyn Disk, path: &Path) -> Result<Tee> {
        let Some(Layout { ends, .. }) = &self.layout else { return Tee::open(disk, path) };
        let Range { start, end } = self.range;
        let to = if self.are_last() { u64::MAX } else { ends[end - 1] };
        let from = start.checked_sub(1).map_or(0, |before| ends[before]);
        Tee::over(disk, path, from..to, ends[start..end].to_vec())
    }

    /// Whether these are the last ones of the file.
    pub(super) fn are_last(&self) -> bool {
        self.layout.as_ref().is_none_or(|layout| layout.ends.len() == self.range.end)
    }

    /// Where a group ends, unless it is the last one, after which the footer follows.
    pub(super) fn end(&self, group: usize) -> Option<u64> {
        let ends = &self.layout.as_ref()?.ends;
        ends.get(group).filter(|_| group + 1 < ends.len()).copied()
    }

    /// What was read of `segments` groups, once `tee` is at their end.
    pub(super) fn content(&self, tee: &Tee, segments: u64) -> Content {
        let (bytes, sha256) = tee.content();
        let hashes = self.layout.as_ref().map(|layout| GroupHashes {
            first: self.range.start as u32,
            groups: tee.groups().to_vec(),
            footer: layout.footer,
        });
        let sha256 = hashes.as_ref().map_or(sha256, GroupHashes::identity);
        Content { bytes, sha256, segments, hashes }
    }
}

/// Size and identity of a local file, or of the groups in `cut`, as a reader finds them.
pub(super) fn content(path: &Path, format: Format, cut: Option<&Cut>) -> Result<(u64, Identity)> {
    let groups = Groups::new(path, Layout::of(&path.into(), format)?, 0, cut)?;
    let mut tee = groups.tee(&Real, path)?;
    tee.read_to(u64::MAX, path)?;
    let Content { bytes, sha256, .. } = groups.content(&tee, 0);
    Ok((bytes, sha256))
}
