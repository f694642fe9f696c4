//! What the plan answers with: which text a sample is, and where it stands.

use contract::Fault;
use std::ops::Range;

use contract::UNIT_TOKENS;
use serde::Deserialize;

/// A run of tokens that are neighbours in their stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// First token, counted in the source's training stream.
    pub start: u64,
    /// How many tokens, at least one.
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
/// Its spans, in order, hold at most `seq_len` tokens together; the rest is padding at the end. A joint between two
/// spans is a document boundary, even where the text happens to go on. The label of a span's last token is the
/// next token of the stream, if that belongs to the same document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleSpec {
    /// The global sample number: the one clock.
    pub sample: u64,
    /// Index into [`crate::Plan::phases`].
    pub phase: usize,
    /// Index into [`crate::Plan::sources`].
    pub source: usize,
    /// Number of this sample among the phase's samples of this source.
    pub ordinal: u64,
    /// How many times the source had been gone through before (from 0).
    pub epoch: u64,
    /// Tokens in the sequence, padding included.
    pub seq_len: u32,
    /// The text.
    pub spans: Vec<Span>,
    /// Where in the sequence the text is that no step sees any more: rising, apart.
    pub banned: Vec<Range<u32>>,
}

/// One step, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSpec {
    /// The step, from 1.
    pub step: u64,
    /// Index into [`crate::Plan::phases`].
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

/// What planning needs to know of a source: a store's manifest tells it, or a description does.
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
}

fn unit() -> u64 {
    UNIT_TOKENS
}

/// The names of these sources.
pub(crate) fn names(facts: &[SourceFacts]) -> impl Iterator<Item = &str> {
    facts.iter().map(|facts| facts.name.as_str())
}

/// What is said of a name that no source has; `known` are those of all.
pub fn unknown<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Fault {
    Fault::usage(format!("no store has a source {name:?}")).one_of(name, known)
}
