//! The answers of a plan: which text a sample shows, and from where.

use contract::{Digest, Fault};
use std::ops::Range;
use std::sync::Arc;

use contract::UNIT_TOKENS;
use serde::Deserialize;

use crate::objective::Objective;

/// A run of contiguous tokens of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// First token, as numbered in the source's training stream.
    pub start: u64,
    /// Number of tokens, at least one.
    pub tokens: u32,
}

impl Span {
    pub(crate) fn new(start: u64, tokens: u64) -> Self {
        let tokens = u32::try_from(tokens).expect("at most seq_len tokens, which is 32 bits");
        Span { start, tokens }
    }
}

/// Global sample number `sample`, resolved.
///
/// Its spans, in order, have at most `seq_len` tokens in total; the rest is padding at the end. A joint between two
/// spans is a document boundary, even if the text happens to continue. The label of a span's last token is the next
/// token of the stream if that belongs to the same document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleSpec {
    /// The global sample number, on which every position in the run is based.
    pub sample: u64,
    /// Index into [`crate::DataPlan::phases`].
    pub phase: usize,
    /// Index into [`crate::DataPlan::sources`].
    pub source: usize,
    /// Number of this sample among the phase's samples of this source.
    pub ordinal: u64,
    /// Epochs of the source completed before it.
    pub epoch: u64,
    /// Tokens in the sequence, padding included.
    pub seq_len: u32,
    /// The text.
    pub spans: Vec<Span>,
    /// The ranges of the sequence that amendments ban, ascending and disjoint.
    pub banned: Vec<Range<u32>>,
    /// What its source asks the model to predict; `None`: each next token.
    pub objective: Option<Arc<Objective>>,
}

impl SampleSpec {
    /// What the loss of each of its labels is multiplied by in the gradient.
    pub fn loss_weight(&self) -> f32 {
        self.objective.as_ref().map_or(1.0, |objective| objective.factor())
    }
}

/// One step, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSpec {
    /// The step, from 1.
    pub step: u64,
    /// Index into [`crate::DataPlan::phases`].
    pub phase: usize,
    /// First global sample number.
    pub first_sample: u64,
    /// Sequences in the step.
    pub batch: u64,
    /// Sequences in a micro-batch; divides `batch`.
    pub micro_batch: u64,
    /// Tokens in a sequence.
    pub seq_len: u32,
}

/// What planning needs to know of a source, from a store's manifest or a store stub.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFacts {
    /// Its name.
    pub name: String,
    /// Tokens in its training stream.
    pub tokens: u64,
    /// Documents in its training stream.
    pub documents: u64,
    /// Tokens in a unit.
    #[serde(default = "unit")]
    pub unit: u64,
    /// Of a bucket: the digest of the selection of its documents. `None` for a whole source, or from a store stub.
    #[serde(skip)]
    pub selection: Option<Digest>,
}

fn unit() -> u64 {
    UNIT_TOKENS
}

/// The names of these sources.
pub(crate) fn names(facts: &[SourceFacts]) -> impl Iterator<Item = &str> {
    facts.iter().map(|facts| facts.name.as_str())
}

/// The error for a name that no source has; `known` are all sources' names.
pub fn unknown<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Fault {
    Fault::usage(format!("no store has a source {name:?}")).one_of(name, known)
}
