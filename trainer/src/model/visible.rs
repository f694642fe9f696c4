//! Which keys the queries of each chunk see, in layers with a window and in layers without one.
//!
//! With a window, the first query of every chunk sees earlier keys from the same row of a chunk on. So the keys of a
//! chunk have two parts, and a later chunk sees all of a part or nothing:
//!
//! ```text
//! chunk    0        1        2        3            width 4, window 6: the first query of chunk 3 sees the last key of
//! keys     a a a b  a a a b  a a a b  a a a b      chunk 1. a: seen by the next chunk; b: by the next two
//! ```

use std::cell::OnceCell;
use std::ops::Range;

use kernels::device;
use kernels::ops::{AttentionSpan, KEY_BLOCK};
use tch::{Device, Tensor};

use super::grid::ChunkGrid;
use super::line::{Assignment, Rows, Table};

/// One for layers without a window and, where it differs, one for layers with a window.
pub(super) struct ByWindow<T> {
    pub(super) full: T,
    pub(super) sliding: Option<T>,
}

impl<T> ByWindow<T> {
    /// That of a layer with this window.
    pub(super) fn of(&self, window: Option<i64>) -> &T {
        window.and(self.sliding.as_ref()).unwrap_or(&self.full)
    }
}

/// Keys of one document that lie in one chunk, and that the same chunks see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KeyPart {
    /// The document's index in the micro-batch, from 0.
    pub(super) document: usize,
    pub(super) chunk: u64,
    /// Whether it is the last part of the chunk's keys, which one more chunk sees.
    pub(super) late: bool,
}

/// A part of the keys that a chunk sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VisibleKeys {
    /// The index of the first one among the keys that the reading chunk sees.
    pub(super) key: i64,
    pub(super) of: KeyPart,
    /// How many keys.
    pub(super) len: i64,
}

/// What queries see in layers with this window.
#[derive(Clone, Copy)]
pub(super) struct Visibility {
    pub(super) grid: ChunkGrid,
    pub(super) window: Option<i64>,
}

impl Visibility {
    /// The first row of a chunk's late part.
    fn split(self) -> i64 {
        self.window.map_or(0, |window| (1 - window).rem_euclid(self.grid.width))
    }

    /// The rows of a part.
    pub(super) fn rows(self, document: AttentionSpan, part: KeyPart) -> Rows {
        let ChunkGrid { length, width, .. } = self.grid;
        let (sequence, begins) = (document.start / length, document.start % length);
        let left = part.chunk as i64 * width;
        let split = left + self.split();
        let (from, to) = if part.late { (split, left + width) } else { (left, split) };
        let (first, end) = (begins.max(from), (begins + document.len).min(to));
        Rows { chunk: part.chunk, first: self.grid.row(sequence, first), len: (end - first).max(0) }
    }

    /// The chunks whose queries see a part, its own first.
    pub(super) fn seen_by(self, document: AttentionSpan, part: KeyPart) -> Range<u64> {
        let (end, width) = (self.grid.reach(document).end, self.grid.width);
        let Some(window) = self.window else { return part.chunk..end };
        let later = (window + width - 2) / width - i64::from(!part.late);
        part.chunk..end.min((part.chunk as i64 + 1 + later).cast_unsigned())
    }

    /// All parts of documents that have rows, in order.
    fn parts(
        self,
        documents: &[AttentionSpan],
    ) -> impl Iterator<Item = (AttentionSpan, KeyPart, Rows)> {
        let of = move |(index, document): (usize, &AttentionSpan)| {
            let document = *document;
            let parts = self.grid.reach(document).flat_map(move |chunk| {
                [false, true].map(|late| KeyPart { document: index, chunk, late })
            });
            parts.map(move |part| (document, part, self.rows(document, part)))
        };
        documents.iter().enumerate().flat_map(of).filter(|(.., rows)| rows.len > 0)
    }

    /// Rows of other ranks that queries of the chunks of `place` see, document after document.
    pub(super) fn earlier(
        self,
        dealt: Assignment,
        documents: &[AttentionSpan],
        place: u64,
    ) -> Vec<Rows> {
        let received = |document, part: KeyPart| {
            dealt.place_of(part.chunk) != place
                && self.seen_by(document, part).any(|chunk| dealt.place_of(chunk) == place)
        };
        let parts = self.parts(documents).filter(|(document, part, _)| received(*document, *part));
        parts.map(|(.., rows)| rows).collect()
    }
}

/// Keys and values that the queries of this rank's chunks see, in layers with one window.
pub(super) struct EarlierKeys {
    pub(super) visible: Visibility,
    /// Includes the earlier keys and values of other ranks.
    pub(super) table: Table,
}

impl EarlierKeys {
    pub(super) fn new(
        visible: Visibility,
        dealt: Assignment,
        documents: &[AttentionSpan],
        on: Device,
    ) -> kernels::Result<EarlierKeys> {
        let size = visible.grid.rows * visible.grid.width;
        let reads = |place| match dealt.degree {
            1 => Vec::new(),
            _ => visible.earlier(dealt, documents, place),
        };
        Ok(EarlierKeys { visible, table: Table::new(dealt, size, reads, on)? })
    }
}

/// The keys that a chunk's queries see, in layers with one window.
pub(super) struct SeenKeys {
    /// Documents, or their parts in this chunk; in order, covering every token. Keys before the window may be left out.
    pub(super) spans: Vec<AttentionSpan>,
    /// What attention computed from the spans, cached by the first layer.
    pub(super) attending: OnceCell<Tensor>,
    /// Their rows in the table of [`EarlierKeys`], span by span, i64; `None` where there is one chunk.
    rows: Option<Tensor>,
    /// The same keys by document and chunk; empty where there is one chunk.
    pub(super) pieces: Vec<VisibleKeys>,
}

impl SeenKeys {
    /// Of a micro-batch in one chunk.
    pub(super) fn whole(spans: Vec<AttentionSpan>) -> SeenKeys {
        SeenKeys { spans, attending: OnceCell::new(), rows: None, pieces: Vec::new() }
    }

    /// Of chunk `number`.
    pub(super) fn cut(
        by: &EarlierKeys,
        documents: &[AttentionSpan],
        number: u64,
        on: Device,
    ) -> kernels::Result<SeenKeys> {
        let EarlierKeys { visible, table } = by;
        let (mut spans, mut keys, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
        for (document, span) in documents.iter().enumerate() {
            let Some(part) = visible.grid.part(*span, number as i64) else { continue };
            let seen = visible.window.map_or(0, |window| (part.before + 1 - window).max(0));
            let left_out = seen / KEY_BLOCK * KEY_BLOCK;
            spans.push(AttentionSpan { before: part.before - left_out, ..part.span });
            // What these keys are does not matter, as no query sees them.
            let unseen = keys.len() + (seen - left_out) as usize;
            for chunk in visible.grid.reach(*span).start..=number {
                for of in [false, true].map(|late| KeyPart { document, chunk, late }) {
                    let rows = visible.rows(*span, of);
                    if rows.len == 0 || !visible.seen_by(*span, of).contains(&number) {
                        continue;
                    }
                    let first = table.row(chunk, rows.first);
                    keys.resize(keys.len().max(unseen), first);
                    pieces.push(VisibleKeys { key: keys.len() as i64, of, len: rows.len });
                    keys.extend(first..first + rows.len);
                }
            }
        }
        let rows = Some(device::integers(on, &keys)?);
        Ok(SeenKeys { spans, attending: OnceCell::new(), rows, pieces })
    }

    /// From the table of [`EarlierKeys`], along `dim`: every row that a query of the chunk sees, span by span.
    pub(super) fn keys(&self, all: &Tensor, dim: i64) -> kernels::Result<Tensor> {
        Ok(match &self.rows {
            None => all.shallow_clone(),
            Some(rows) => all.f_index_select(dim, rows)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Windows that end within a chunk, at its edge and beyond a block of keys; or none.
    fn windows() -> impl Strategy<Value = Option<i64>> {
        prop_oneof![
            Just(None),
            Just(Some(1)),
            (2i64..40).prop_map(Some),
            (200i64..700).prop_map(Some)
        ]
    }

    /// Documents that begin at the first token and at `starts`.
    fn documents(grid: ChunkGrid, starts: &BTreeSet<i64>) -> Vec<AttentionSpan> {
        let all = grid.length * grid.rows;
        let rows = (0..grid.rows).map(|row| row * grid.length);
        let starts: BTreeSet<i64> = starts.iter().map(|start| start % all).chain(rows).collect();
        let ends = starts.iter().skip(1).copied().chain([all]);
        starts
            .iter()
            .zip(ends)
            .map(|(start, end)| AttentionSpan::whole(*start, end - start))
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A rank receives each key that one of its queries sees, once, and no other; the sum of a part's gradients has
        /// the chunks that see it; a chunk reads what its queries see, behind fewer other keys than a block.
        #[test]
        fn chunks_read_what_their_windows_have(
            (each, degree, rows) in (1u64..4, 1u64..4, 1i64..3),
            width in prop_oneof![1i64..8, 250i64..260],
            starts in prop::collection::btree_set(0i64..5000, 0..4),
            window in windows(),
        ) {
            let chunks = each * degree;
            let grid = ChunkGrid { length: width * chunks as i64, width, rows };
            let documents = documents(grid, &starts);
            let visible = Visibility { grid, window };
            let first_seen = |begins: i64, at: i64| begins.max(window.map_or(0, |window| at + 1 - window));
            let row = |document: &AttentionSpan, at: i64| grid.row(document.start / grid.length, at);
            // By key: the chunks that see it.
            let mut seen_by = vec![BTreeSet::new(); (grid.length * rows) as usize];
            let mut read = vec![BTreeSet::new(); chunks as usize];
            for document in &documents {
                let begins = document.start % grid.length;
                for at in begins..begins + document.len {
                    // The first query of a document in a chunk sees the earliest keys.
                    let chunk = grid.chunk(at);
                    let from = if at == begins || at % width == 0 { first_seen(begins, at) } else { at };
                    for key in from..=at {
                        seen_by[row(document, key) as usize].insert(chunk);
                        read[chunk as usize].insert(row(document, key));
                    }
                }
            }
            for place in 0..degree {
                let dealt = Assignment { chunks, degree, place };
                let found = visible.earlier(dealt, &documents, place);
                let found: Vec<i64> = found.iter().flat_map(|rows| rows.first..rows.first + rows.len).collect();
                let other = |key: &i64| dealt.place_of((*key / (width * rows)) as u64) != place;
                let own = dealt.own();
                let wanted: BTreeSet<i64> = own.iter().flat_map(|chunk| &read[*chunk as usize]).copied().filter(other).collect();
                prop_assert_eq!(found.len(), wanted.len());
                prop_assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), wanted);
            }
            for (document, part, rows) in visible.parts(&documents) {
                let chunks: BTreeSet<u64> = visible.seen_by(document, part).collect();
                for key in rows.first..rows.first + rows.len {
                    prop_assert_eq!(&seen_by[key as usize], &chunks);
                }
            }
            let keys = EarlierKeys::new(visible, Assignment::alone(chunks), &documents, Device::Cpu).unwrap();
            for chunk in 0..chunks {
                let found = SeenKeys::cut(&keys, &documents, chunk, Device::Cpu).unwrap();
                let all = Vec::<i64>::try_from(found.rows.as_ref().unwrap()).unwrap();
                let seen = found.pieces.iter().flat_map(|piece| &all[piece.key as usize..(piece.key + piece.len) as usize]);
                prop_assert_eq!(&seen.copied().collect::<BTreeSet<_>>(), &read[chunk as usize]);
                let unseen = all.len() as i64 - found.pieces.iter().map(|piece| piece.len).sum::<i64>();
                prop_assert_eq!(all.len() - unseen as usize, read[chunk as usize].len());
                prop_assert!(unseen < KEY_BLOCK * found.spans.len() as i64);
                let (mut end, mut spans) = (0, found.spans.iter());
                for (span, part) in documents.iter().filter_map(|one| Some((*one, grid.part(*one, chunk as i64)?))) {
                    let found = *spans.next().unwrap();
                    end += found.keys();
                    // Its last key is that of its last query.
                    prop_assert_eq!(all[end as usize - 1], row(&span, part.place + part.span.len - 1));
                    prop_assert_eq!((part.before - found.before) % KEY_BLOCK, 0);
                }
                prop_assert_eq!(end, all.len() as i64);
            }
        }
    }
}
