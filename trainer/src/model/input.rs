//! What a leaf computes on: tokens, labels, and where one document ends and the next begins.

use contract::{Fault, Result};
use kernels::device::{Buffer, Buffers, Staged, Stager};
use kernels::ops::Span;
use tch::{Device, Kind, Tensor};

use super::ZayaConfig;
use crate::refusal::refused;

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

/// Leaves side by side in one buffer, as a device takes them: made by the readers of a prefetcher, so that one copy moves all
/// of a batch.
///
/// A leaf is words of 64 bits: tokens, labels, positions, starts of spans, and the mask, two f32 a word.
#[derive(Debug)]
pub struct PackedLeaves {
    buffer: Buffer,
    leaves: Vec<Packed>,
}

/// What is known of a leaf without its words.
#[derive(Debug)]
struct Packed {
    /// Where its words begin in the buffer.
    first: usize,
    tokens: usize,
    spans: Vec<Span>,
    rows: i64,
    label_count: u64,
}

/// A leaf on its way to the device: made by a prefetcher's last stage, computed by [`super::micro_batch`].
#[derive(Debug)]
pub struct StagedLeaf {
    words: Staged,
    tokens: i64,
    spans: Vec<Span>,
    rows: i64,
    label_count: u64,
}

/// Words between the beginnings of two leaves are a multiple of this: a line of a processor's cache, and more than any load of
/// a device.
const ALIGNED: usize = 8;

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
    /// Rows at which they start, i64.
    pub(super) starts: Tensor,
    /// Sequences.
    pub(super) rows: i64,
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

    /// Checks leaves and writes them into a buffer of their device's ring.
    pub fn pack(
        leaves: &[LeafInput<'_>],
        config: &ZayaConfig,
        buffers: &Buffers,
    ) -> Result<PackedLeaves> {
        let mut length = 0;
        let mut packed = Vec::with_capacity(leaves.len());
        for leaf in leaves {
            leaf.validate(config)?;
            let one = Packed {
                first: length,
                tokens: leaf.tokens.len(),
                spans: leaf.spans(config.document_mask),
                rows: leaf.rows as i64,
                label_count: leaf.mask.iter().filter(|mask| **mask != 0).count() as u64,
            };
            length += one.length().next_multiple_of(ALIGNED);
            packed.push(one);
        }
        let mut buffer = buffers.take(length).map_err(machine)?;
        // What lies between two leaves is old; nobody looks at it.
        for (leaf, one) in leaves.iter().zip(&packed) {
            leaf.fill(one, config, &mut buffer.words()[one.first..one.first + one.length()]);
        }
        Ok(PackedLeaves { buffer, leaves: packed })
    }

    /// Writes every one of a leaf's words.
    fn fill(&self, packed: &Packed, config: &ZayaConfig, words: &mut [i64]) {
        fn put(words: &mut [i64], values: impl Iterator<Item = i64>) {
            words.iter_mut().zip(values).for_each(|(word, value)| *word = value);
        }
        let (tokens, words) = words.split_at_mut(packed.tokens);
        put(tokens, self.tokens.iter().copied().map(i64::from));
        // A place without a label may hold anything: 0 is a token of every vocabulary.
        let labels = self.labels.iter().zip(self.mask);
        let (place, words) = words.split_at_mut(packed.tokens);
        put(place, labels.map(|(&label, &mask)| if mask == 0 { 0 } else { i64::from(label) }));
        let (place, words) = words.split_at_mut(packed.tokens);
        match config.document_mask {
            true => put(place, self.positions.iter().copied().map(i64::from)),
            false => put(place, (0..self.rows).flat_map(|_| 0..self.seq_len as i64)),
        }
        let (starts, mask) = words.split_at_mut(packed.spans.len());
        put(starts, packed.spans.iter().map(|span| span.start));
        let bits = |mask: &u8| i64::from(f32::from(u8::from(*mask != 0)).to_bits());
        let pair = |pair: &[u8]| bits(&pair[0]) | pair.get(1).map_or(0, bits) << 32;
        put(mask, self.mask.chunks(2).map(pair));
    }

    /// Checks the leaf and starts moving it alone; on a GPU beside the computation.
    pub fn stage(&self, config: &ZayaConfig, stager: &Stager) -> Result<StagedLeaf> {
        let packed = LeafInput::pack(&[*self], config, stager.buffers())?;
        let leaf = packed.send(stager)?.pop();
        leaf.ok_or_else(|| Fault::bug("a leaf was not staged"))
    }

    /// The leaf on `device`, at once.
    pub(super) fn prepare(&self, config: &ZayaConfig, device: Device) -> Result<Prepared> {
        let stager = Stager::new(device).map_err(machine)?;
        self.stage(config, &stager)?.arrive()
    }

    fn spans(&self, documents: bool) -> Vec<Span> {
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
                    .map(|(start, end)| Span::whole(row * seq_len + start, end - start)),
            );
        }
        spans
    }
}

impl Packed {
    /// How many words it takes.
    fn length(&self) -> usize {
        3 * self.tokens + self.spans.len() + self.tokens.div_ceil(2)
    }
}

impl PackedLeaves {
    /// Starts moving the leaves, by one copy.
    pub fn send(self, stager: &Stager) -> Result<Vec<StagedLeaf>> {
        let PackedLeaves { buffer, leaves } = self;
        let sent = stager.send(buffer).map_err(machine)?;
        let leaf = |one: Packed| {
            let words = sent.part(one.first as i64, one.length() as i64).map_err(machine)?;
            let Packed { first: _, tokens, spans, rows, label_count } = one;
            Ok(StagedLeaf { words, tokens: tokens as i64, spans, rows, label_count })
        };
        leaves.into_iter().map(leaf).collect()
    }
}

/// A foreign refusal is the machine's.
fn machine(error: kernels::Error) -> Fault {
    Fault::machine(error.to_string())
}

impl StagedLeaf {
    /// Waits, on the device, for the copy; the arrays are views of it.
    pub(super) fn arrive(self) -> Result<Prepared> {
        let StagedLeaf { words, tokens, spans, rows, label_count } = self;
        let (words, starts) = (words.arrive().map_err(refused)?, spans.len() as i64);
        let part = |first, count| words.f_narrow(0, first, count);
        let views = || -> kernels::Result<_> {
            let mask = part(3 * tokens + starts, (tokens + 1) / 2)?.f_view_dtype(Kind::Float)?;
            Ok(Prepared {
                tokens: part(0, tokens)?,
                labels: part(tokens, tokens)?,
                positions: part(2 * tokens, tokens)?,
                mask: mask.f_narrow(0, 0, tokens)?,
                starts: part(3 * tokens, starts)?,
                spans,
                rows,
                label_count,
            })
        };
        views().map_err(refused)
    }
}
