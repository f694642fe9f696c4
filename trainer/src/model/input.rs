//! The input of a micro-batch: tokens, labels, and document boundaries.

use contract::{Fault, Result};
use kernels::ops::AttentionSpan;
use tch::{Device, Kind, Tensor};

use super::ZayaConfig;

/// The sequences of one micro-batch, as the loader serves them.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatchInput<'a> {
    /// Token ids, row after row.
    pub tokens: &'a [i32],
    /// The token to predict at each position; undefined where the mask is 0.
    pub labels: &'a [i32],
    /// Index of each token in its document.
    pub positions: &'a [i32],
    /// 1 where there is a label.
    pub mask: &'a [u8],
    /// Starts of documents inside each row; the first is 0.
    pub boundaries: &'a [Vec<u32>],
    /// For each row: what the losses of its labels are multiplied by in the gradient; empty if each is 1.
    pub weights: &'a [f32],
    /// Sequences.
    pub rows: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
}

/// A checked micro-batch without its arrays: its layout and counts.
#[derive(Debug)]
pub struct CheckedMicroBatch {
    pub(super) tokens: usize,
    /// In order, covering every token.
    pub(super) spans: Vec<AttentionSpan>,
    pub(super) rows: i64,
    pub(super) seq_len: i64,
    /// Whether positions count from the start of each document; otherwise from the start of each row.
    pub(super) by_document: bool,
    pub(super) label_count: u64,
    /// As in [`MicroBatchInput::weights`].
    pub(super) weights: Vec<f32>,
}

/// A micro-batch on the device, with the tensors that follow from its boundaries.
#[derive(Debug)]
pub(super) struct DeviceMicroBatch {
    /// `[tokens]`, i64.
    pub(super) tokens: Tensor,
    /// `[tokens]`, i64.
    pub(super) labels: Tensor,
    /// `[tokens]`, f32: the weight of its loss where there is a label, otherwise 0.
    pub(super) mask: Tensor,
    /// `[tokens]`, i64: index in the span, for rotary embedding.
    pub(super) positions: Tensor,
    /// In order, covering every token.
    pub(super) spans: Vec<AttentionSpan>,
    /// The first rows of the spans, i64.
    pub(super) starts: Tensor,
    /// Sequences.
    pub(super) rows: i64,
    /// Tokens with a label.
    pub(super) label_count: u64,
}

impl DeviceMicroBatch {
    /// Of sequences of one document each, with undefined numbers.
    pub(super) fn of_shape(rows: i64, seq_len: i64, device: Device) -> kernels::Result<Self> {
        let list = |count, kind| Tensor::f_empty([count], (kind, device));
        let tokens = rows * seq_len;
        Ok(DeviceMicroBatch {
            tokens: list(tokens, Kind::Int64)?,
            labels: list(tokens, Kind::Int64)?,
            mask: list(tokens, Kind::Float)?,
            positions: list(tokens, Kind::Int64)?,
            spans: (0..rows).map(|row| AttentionSpan::whole(row * seq_len, seq_len)).collect(),
            starts: list(rows, Kind::Int64)?,
            rows,
            label_count: tokens as u64,
        })
    }
}

impl MicroBatchInput<'_> {
    /// Refuses input that would read out of bounds; a loader never produces it.
    pub(super) fn validate(&self, config: &ZayaConfig) -> Result<()> {
        let bug =
            |what: String| Err(Fault::bug(format!("a micro-batch that fits no model: {what}")));
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
        let weights = self.weights;
        if ![0, self.rows].contains(&weights.len())
            || weights.iter().any(|weight| !(*weight > 0.0 && weight.is_finite()))
        {
            return bug(format!("{} rows with the weights {weights:?}", self.rows));
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

    /// Checks the micro-batch.
    pub fn check(&self, config: &ZayaConfig) -> Result<CheckedMicroBatch> {
        self.validate(config)?;
        Ok(CheckedMicroBatch {
            tokens: self.tokens.len(),
            spans: self.spans(config.document_mask),
            rows: self.rows as i64,
            seq_len: self.seq_len as i64,
            by_document: config.document_mask,
            label_count: self.mask.iter().filter(|mask| **mask != 0).count() as u64,
            weights: self.weights.to_vec(),
        })
    }

    /// The same for arrays that a device reads as they are: the mask must be zeros and ones, and labels outside it must
    /// be 0, a token of every vocabulary.
    pub fn check_in_place(&self, config: &ZayaConfig) -> Result<CheckedMicroBatch> {
        let mut places = self.labels.iter().zip(self.mask);
        if places.any(|(label, mask)| *mask > 1 || (*mask == 0 && *label != 0)) {
            return Err(Fault::bug("a micro-batch with a label where its mask has none"));
        }
        self.check(config)
    }

    fn spans(&self, documents: bool) -> Vec<AttentionSpan> {
        let seq_len = self.seq_len as i64;
        let mut spans = Vec::new();
        for (row, starts) in (0i64..).zip(self.boundaries) {
            let starts = if documents { starts.as_slice() } else { &[0] };
            let ends = starts[1..].iter().map(|&start| i64::from(start)).chain([seq_len]);
            spans.extend(
                starts
                    .iter()
                    .map(|&start| i64::from(start))
                    .zip(ends)
                    .map(|(start, end)| AttentionSpan::whole(row * seq_len + start, end - start)),
            );
        }
        spans
    }
}
