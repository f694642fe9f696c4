//! Fills one row of a batch from one sample.

use std::ops::Range;

use contract::{Digest, Fault, Hasher, Result};
use mixer::{SampleSpec, Span};

use crate::memory::ColumnsMut;
use crate::stream::SourceStream;

/// The row to fill: four slices of `seq_len`. Their initial content does not matter: every value is written.
pub(crate) struct Row<'a> {
    pub(crate) tokens: &'a mut [i32],
    pub(crate) labels: &'a mut [i32],
    pub(crate) positions: &'a mut [i32],
    pub(crate) mask: &'a mut [u8],
}

/// Buffers reused from row to row.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) ids: Vec<i32>,
    pub(crate) starts: Vec<u64>,
}

impl<'a> Row<'a> {
    /// The row at this range of a batch's columns.
    pub(crate) fn of(columns: &'a mut ColumnsMut<'_>, at: Range<usize>) -> Row<'a> {
        Row {
            tokens: &mut columns.tokens[at.clone()],
            labels: &mut columns.labels[at.clone()],
            positions: &mut columns.positions[at.clone()],
            mask: &mut columns.mask[at],
        }
    }

    /// Fills the row with the text of `spec` from `stream`; returns where its documents begin. `markers`: whether
    /// documents of the store have a begin token, and an end token.
    pub(crate) fn fill(
        &mut self,
        stream: &SourceStream,
        spec: &SampleSpec,
        markers: [bool; 2],
        scratch: &mut Scratch,
    ) -> Result<Vec<u32>> {
        let mut boundaries = Vec::new();
        let mut at = 0;
        for span in &spec.spans {
            let fits = at + span.tokens as usize <= self.tokens.len();
            let end = span.start.checked_add(u64::from(span.tokens));
            if span.tokens == 0 || !fits || end.is_none_or(|end| end > stream.tokens()) {
                return Err(Fault::bug(format!(
                    "sample {} asks for {span:?} at {at} of {} in a stream of {} tokens",
                    spec.sample,
                    self.tokens.len(),
                    stream.tokens()
                )));
            }
            self.add(stream, *span, at, &mut boundaries, scratch)?;
            self.apply_objective(stream, spec, *span, at, markers, scratch)?;
            at += span.tokens as usize;
        }
        if at < self.tokens.len() {
            boundaries.push(at as u32); // Padding is a document of its own: no text attends to it.
            self.tokens[at..].fill(0);
            self.labels[at..].fill(0);
            self.mask[at..].fill(0);
        }
        self.count_positions(&boundaries);
        for place in &spec.banned {
            self.blank(place);
        }
        Ok(boundaries)
    }

    /// Replaces a range of text by padding without labels: the model sees only its length.
    pub(crate) fn blank(&mut self, place: &Range<u32>) {
        let place = place.start as usize..place.end as usize;
        self.tokens[place.clone()].fill(0);
        self.labels[place.clone()].fill(0);
        self.mask[place].fill(0);
    }

    /// Writes one span at `at`. Its first token is a boundary even within a document: the text before it is not in the
    /// sequence.
    fn add(
        &mut self,
        stream: &SourceStream,
        span: Span,
        at: usize,
        boundaries: &mut Vec<u32>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (start, count) = (span.start, span.tokens as usize);
        let end = start + u64::from(span.tokens);
        let Scratch { ids, starts } = scratch;
        starts.clear();
        stream.starts_in(start + 1..end + 1, starts)?;
        starts.dedup();
        // The label of the last token is the token after the span, unless a document ends between them.
        let continues = end < stream.tokens() && starts.last() != Some(&end);
        ids.clear();
        stream.read_ids(start..end + u64::from(continues), ids)?;
        if !continues {
            ids.push(0);
        }
        self.tokens[at..at + count].copy_from_slice(&ids[..count]);
        self.labels[at..at + count].copy_from_slice(&ids[1..]);
        self.mask[at..at + count].fill(1);
        self.mask[at + count - 1] = u8::from(continues);
        boundaries.push(at as u32);
        for &document in starts.iter() {
            let first = at + (document - start) as usize;
            // A document's first token is not a label.
            (self.labels[first - 1], self.mask[first - 1]) = (0, 0);
            if document < end {
                boundaries.push(first as u32);
            }
        }
        Ok(())
    }

    /// Counts positions from 0 at every boundary.
    fn count_positions(&mut self, boundaries: &[u32]) {
        let ends = boundaries.iter().skip(1).copied().chain([self.positions.len() as u32]);
        for (&from, to) in boundaries.iter().zip(ends) {
            let part = &mut self.positions[from as usize..to as usize];
            part.iter_mut().enumerate().for_each(|(i, position)| *position = i as i32);
        }
    }

    /// The digest of what the model sees of this row, and of the weight of its losses.
    pub(crate) fn digest(&self, boundaries: &[u32], weight: f32) -> Digest {
        // Labels are left out: those that count are the next tokens of the text.
        let Row { tokens, labels: _, positions, mask } = self;
        let mut hasher = Hasher::new();
        hasher.tag("sequence.v1").i32s(tokens).i32s(positions).u32s(boundaries).bytes(mask);
        if weight != 1.0 {
            hasher.tag("loss_weight.v1").u64(u64::from(weight.to_bits()));
        }
        hasher.finish()
    }
}
