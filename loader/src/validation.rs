//! The held-out split, window after window, as batches: for a validation loss.
//!
//! There is no plan and no shuffling: window `w` of a source is its tokens from `w * seq_len` on, the last one padded.

use contract::{Fault, Result};
use mixer::{SampleSpec, Span};
use store::Split;

use crate::Stores;
use crate::batch::{Batch, BatchHeader};

/// How many windows of `seq_len` tokens the validation split of a source has.
pub fn windows(stores: &Stores, source: &str, seq_len: u32) -> Result<u64> {
    if seq_len == 0 {
        return Err(Fault::usage("a window needs at least one token"));
    }
    let stream = stores.stream(source, Split::Validation)?;
    Ok(stream.tokens().div_ceil(u64::from(seq_len)))
}

/// Up to `rows` windows of a source's validation split from window `first` on; fewer at the end, none past it.
pub fn batch(stores: &Stores, source: &str, seq_len: u32, first: u64, rows: u64) -> Result<Batch> {
    let end = windows(stores, source, seq_len)?.min(first.saturating_add(rows));
    let tokens = stores.stream(source, Split::Validation)?.tokens();
    let number = stores.number(source).unwrap_or_default();
    let sample = |window: u64| {
        let start = window * u64::from(seq_len);
        let tokens = (tokens - start).min(u64::from(seq_len)) as u32;
        SampleSpec {
            banned: Vec::new(),
            objective: None,
            sample: window,
            phase: 0,
            source: number,
            ordinal: window,
            epoch: 0,
            seq_len,
            spans: vec![Span { start, tokens }],
        }
    };
    let (split, samples) = (Split::Validation, (first..end).map(sample).collect());
    let head =
        BatchHeader { step: 0, first_sample: first, micro_batch: 1, seq_len, split, samples };
    let memory = stores.memory(head.tokens());
    Batch::assemble(head, stores, memory, |_| source)
}
