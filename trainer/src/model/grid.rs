//! Layout of a micro-batch that is cut into chunks: the row of each token in the order of chunks, and the part of each
//! document in each chunk.

use std::collections::BTreeSet;
use std::ops::Range;

use kernels::ops::AttentionSpan;

use super::line::{Assignment, Rows};

/// Rows before and after a document's part that its convolutions read: each of the two sees the token before.
pub(super) const REACH: i64 = 2;

/// The layout of a cut micro-batch.
#[derive(Clone, Copy)]
pub(super) struct ChunkGrid {
    /// Tokens in a sequence.
    pub(super) length: i64,
    /// Tokens of a sequence in a chunk.
    pub(super) width: i64,
    /// Sequences.
    pub(super) rows: i64,
}

/// The part of a document in a chunk.
#[derive(Clone, Copy)]
pub(super) struct DocumentPart {
    pub(super) sequence: i64,
    /// Index of its first token in the sequence.
    pub(super) place: i64,
    pub(super) span: AttentionSpan,
    pub(super) before: i64,
    pub(super) after: i64,
}

impl ChunkGrid {
    /// The row of a token in the order of chunks.
    pub(super) fn row(self, sequence: i64, place: i64) -> i64 {
        let ChunkGrid { width, rows, .. } = self;
        (place / width * rows + sequence) * width + place % width
    }

    /// The part of a document in a chunk.
    pub(super) fn part(self, document: AttentionSpan, chunk: i64) -> Option<DocumentPart> {
        let (sequence, begins) = (document.start / self.length, document.start % self.length);
        let (left, ends) = (chunk * self.width, begins + document.len);
        let (first, end) = (begins.max(left), ends.min(left + self.width));
        let (before, len) = (first - begins, end - first);
        let span = AttentionSpan { start: sequence * self.width + first - left, len, before };
        (len > 0).then_some(DocumentPart {
            sequence,
            place: first,
            span,
            before,
            after: ends - end,
        })
    }

    /// The chunk of a token's index in its sequence.
    pub(super) fn chunk(self, place: i64) -> u64 {
        (place / self.width) as u64
    }

    /// The chunks that contain a document.
    pub(super) fn reach(self, document: AttentionSpan) -> Range<u64> {
        let begins = document.start % self.length;
        self.chunk(begins)..self.chunk(begins + document.len - 1) + 1
    }

    /// Rows in chunks of other ranks that convolutions and the value shift of the chunks of `place` read, ascending.
    pub(super) fn beside(
        self,
        dealt: Assignment,
        documents: &[AttentionSpan],
        place: u64,
    ) -> Vec<Rows> {
        let mut rows = BTreeSet::new();
        for (document, chunk) in documents.iter().flat_map(|one| {
            let own = self.reach(*one).filter(move |chunk| dealt.place_of(*chunk) == place);
            own.map(move |chunk| (*one, chunk))
        }) {
            let Some(part) = self.part(document, chunk as i64) else { continue };
            let [first, last] = [part.before.min(REACH), part.after.min(REACH)];
            let end = part.place + part.span.len;
            let reached = (part.place - first..part.place).chain(end..end + last);
            rows.extend(reached.map(|place| Rows {
                chunk: self.chunk(place),
                first: self.row(part.sequence, place),
                len: 1,
            }));
        }
        rows.into_iter().filter(|rows| dealt.place_of(rows.chunk) != place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LayerType, ZayaConfig};
    use proptest::prelude::*;

    proptest! {
        /// With one document per sequence every rank computes as many pairs of a query and a key as planned, with a
        /// window too; without one and with zig-zag assignment all compute equally many.
        #[test]
        fn attention_is_dealt_evenly(
            (each, degree) in (1u64..5, 1u64..5),
            (width, rows) in (1i64..7, 1i64..4),
            window in 0i64..20,
        ) {
            let layer_types = vec![if window > 0 { LayerType::Sliding } else { LayerType::Full }];
            let nano = ZayaConfig::preset("zaya1-nano").unwrap();
            let config = ZayaConfig { num_hidden_layers: 1, sliding_window: window, layer_types, ..nano };
            let (chunks, length) = (2 * each * degree, width * (2 * each * degree) as i64);
            let grid = ChunkGrid { length, width, rows };
            let pairs = |place| {
                let own = Assignment { chunks, degree, place }.own();
                let parts = (0..rows).flat_map(|row| {
                    let document = AttentionSpan::whole(row * length, length);
                    own.iter().filter_map(move |chunk| grid.part(document, *chunk as i64))
                });
                let seen = |keys: i64| if window > 0 { keys.min(window) } else { keys };
                let queries = parts.flat_map(|part| (1..=part.span.len).map(move |own| seen(part.before + own)));
                queries.sum::<i64>() as u64
            };
            let found: Vec<u64> = (0..degree).map(pairs).collect();
            let dealt = Assignment { chunks, degree, place: 0 };
            let planned = dealt.pairs(&config, &[0], length as u32).into_iter();
            prop_assert_eq!(&found, &planned.map(|pairs| pairs * rows as u64).collect::<Vec<_>>());
            prop_assert!(window > 0 || found.iter().all(|own| *own == found[0]));
        }
    }
}
