//! What a leaf computes on: tokens, labels, and where one document ends and the next begins.

use contract::{Fault, Result};
use tch::{Device, Tensor};

use super::ZayaConfig;
use super::shift::Starts;

/// The sequences of one leaf, as the loader serves them.
#[derive(Clone, Copy, Debug)]
pub struct LeafInput<'a> {
    /// Token ids, row after row.
    pub tokens: &'a [i32],
    /// The token to predict at each place; without meaning where the mask is 0.
    pub labels: &'a [i32],
    /// Place of each token in its document.
    pub positions: &'a [i32],
    /// 1 where there is a label.
    pub mask: &'a [u8],
    /// Starts of documents inside each row; the first is 0.
    pub boundaries: &'a [Vec<u32>],
    /// Sequences.
    pub rows: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
}

/// Tokens `start..start + len` of the leaf that see each other, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: i64,
    pub(super) len: i64,
}

/// A leaf on the device, with everything that follows from its boundaries.
#[derive(Debug)]
pub(super) struct Prepared {
    /// `[tokens]`, i64.
    pub(super) tokens: Tensor,
    /// `[tokens]`, i64.
    pub(super) labels: Tensor,
    /// `[tokens]`, f32: 1 or 0.
    pub(super) mask: Tensor,
    /// `[tokens]`, i64: place in the span, as rotary embedding sees it.
    pub(super) positions: Tensor,
    /// In order, covering every token.
    pub(super) spans: Vec<Span>,
    /// Where they start.
    pub(super) starts: Starts,
    /// Tokens with a label.
    pub(super) label_count: u64,
}

impl LeafInput<'_> {
    /// Refuses what would read past an end; a loader never serves it.
    pub(super) fn validate(&self, config: &ZayaConfig) -> Result<()> {
        let bug = |what: String| Err(Fault::bug(format!("a leaf that fits no model: {what}")));
        let count = self.rows * self.seq_len;
        let lengths = [self.tokens.len(), self.labels.len(), self.positions.len(), self.mask.len()];
        if count == 0 || lengths.iter().any(|&length| length != count) {
            return bug(format!(
                "{} rows of {} tokens, lists of {lengths:?}",
                self.rows, self.seq_len
            ));
        }
        if self.boundaries.len() != self.rows {
            return bug(format!("{} rows, boundaries of {}", self.rows, self.boundaries.len()));
        }
        let valid = |starts: &Vec<u32>| {
            starts.first() == Some(&0)
                && starts.is_sorted_by(|a, b| a < b)
                && starts.last().is_some_and(|&last| (last as usize) < self.seq_len)
        };
        if let Some(row) = self.boundaries.iter().position(|starts| !valid(starts)) {
            return bug(format!("boundaries of row {row} do not ascend from 0 inside the row"));
        }
        if self.seq_len as i64 > config.max_position_embeddings {
            return Err(Fault::usage("a sequence longer than the model's positions")
                .at("[model] max_position_embeddings")
                .found(format!("seq_len {}", self.seq_len))
                .wanted(format!("at most {}", config.max_position_embeddings)));
        }
        let known = |&id: &i32| (0..config.vocab_size).contains(&i64::from(id));
        let labelled = self.labels.iter().zip(self.mask).filter(|(_, mask)| **mask != 0);
        let wrong =
            self.tokens.iter().chain(labelled.map(|(label, _)| label)).find(|id| !known(id));
        if let Some(id) = wrong {
            return Err(Fault::usage("a token that the model does not have")
                .at("[model] vocab_size")
                .found(format!("token {id}, vocab_size {}", config.vocab_size))
                .hint("the vocabulary must hold every id of the store's tokenizer"));
        }
        if self.positions.iter().any(|place| !(0..self.seq_len as i32).contains(place)) {
            return bug("a position outside its sequence".to_owned());
        }
        Ok(())
    }

    /// Moves the leaf to `device` and derives its spans.
    pub(super) fn prepare(&self, config: &ZayaConfig, device: Device) -> Prepared {
        let mask: Vec<f32> = self.mask.iter().map(|&mask| f32::from(u8::from(mask != 0))).collect();
        let wide = |ids: Vec<i64>| Tensor::from_slice(&ids).to_device(device);
        let labels = self.labels.iter().zip(&mask);
        // A place without a label may hold anything: 0 is a token of every vocabulary.
        let labels = labels.map(|(&label, &mask)| if mask == 0.0 { 0 } else { i64::from(label) });
        let positions = match config.document_mask {
            true => self.positions.iter().map(|&place| i64::from(place)).collect(),
            false => (0..self.rows).flat_map(|_| 0..self.seq_len as i64).collect(),
        };
        let spans = self.spans(config.document_mask);
        let starts = wide(spans.iter().map(|span| span.start).collect());
        Prepared {
            tokens: wide(self.tokens.iter().map(|&id| i64::from(id)).collect()),
            labels: wide(labels.collect()),
            positions: wide(positions),
            starts: Starts::new(starts, self.tokens.len() as i64),
            spans,
            label_count: mask.iter().filter(|&&mask| mask != 0.0).count() as u64,
            mask: Tensor::from_slice(&mask).to_device(device),
        }
    }

    fn spans(&self, documents: bool) -> Vec<Span> {
        let seq_len = self.seq_len as i64;
        let mut spans = Vec::new();
        for (row, starts) in (0i64..).zip(self.boundaries) {
            let starts = if documents { starts.as_slice() } else { &[0] };
            let ends = starts[1..].iter().map(|&start| i64::from(start)).chain([seq_len]);
            spans.extend(starts.iter().zip(ends).map(|(&start, end)| Span {
                start: row * seq_len + i64::from(start),
                len: end - i64::from(start),
            }));
        }
        spans
    }
}
