//! Which documents a sample shows.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use contract::{Fault, Result};
use mixer::{DataPlan, SampleSpec};
use store::{DocumentRecord, Split};

use crate::Stores;
use crate::infill::{Infill, InfillToken, Piece};

/// A run of tokens of one document within a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequencePart {
    /// Its range in the sequence.
    pub place: Range<u32>,
    /// Its tokens, as numbered in the source's training stream.
    pub tokens: Range<u64>,
    /// The document's number in the stream.
    pub document: u64,
    /// The document's provenance.
    pub record: Arc<DocumentRecord>,
    /// Whether an amendment hides it here.
    pub banned: bool,
    /// How it is rearranged for fill-in-the-middle, if it is.
    pub infill: Option<Infill>,
}

impl SequencePart {
    /// Its tokens, as numbered in the document.
    pub fn in_document(&self) -> Range<u64> {
        let first = self.record.first_token;
        self.tokens.start - first..self.tokens.end - first
    }

    /// For each of its places: which token of the document is there; `None` for a sentinel.
    pub fn order(&self) -> Vec<Option<u64>> {
        let first = self.in_document().start;
        let Some(infill) = &self.infill else { return self.in_document().map(Some).collect() };
        let token = |place: InfillToken| match place {
            InfillToken::Text(token) => Some(first + u64::from(token)),
            InfillToken::Sentinel(_) => None,
        };
        infill.places().into_iter().map(token).collect()
    }
}

/// The pieces of each sample in reading order, without padding. Opens each provenance file once.
pub fn pieces(
    plan: &DataPlan,
    stores: &Stores,
    samples: &[SampleSpec],
) -> Result<Vec<Vec<SequencePart>>> {
    let unknown = Arc::new(DocumentRecord {
        id: None,
        file: 0,
        row: 0,
        group: None,
        bytes: None,
        first_token: 0,
        tokens: 0,
        kept: Vec::new(),
    });
    let mut all = Vec::with_capacity(samples.len());
    let mut wanted: BTreeMap<usize, BTreeMap<u64, Arc<DocumentRecord>>> = BTreeMap::new();
    for sample in samples {
        let cut = cut(plan, stores, sample)?;
        let known = wanted.entry(sample.source).or_default();
        known.extend(cut.iter().map(|(_, _, document)| (*document, Arc::clone(&unknown))));
        all.push(cut);
    }
    for (source, known) in &mut wanted {
        let stream = stores.stream(&plan.sources()[*source].name, Split::Train)?;
        let records = stream.documents(&runs(known.keys().copied()))?;
        known.values_mut().zip(records).for_each(|(slot, record)| *slot = Arc::new(record));
    }
    let found = samples.iter().zip(all).map(|(sample, cut)| {
        let known = &wanted[&sample.source];
        let piece = |(place, tokens, document): PartRange| {
            let record = Arc::clone(&known[&document]);
            let banned = sample.banned.iter().any(|banned| banned.contains(&place.start));
            let DocumentRecord { first_token, tokens: all, .. } = *record;
            let ends = [tokens.start == first_token, tokens.end == first_token + all];
            let piece = Piece { tokens: tokens.clone(), ends };
            let infill = Infill::of(sample, stores.held_tokens(), &piece).filter(|_| !banned);
            SequencePart { place, tokens, document, record, banned, infill }
        };
        cut.into_iter().map(piece).collect()
    });
    Ok(found.collect())
}

/// The piece at a place of a sample; `None` in padding.
pub fn piece_at(
    plan: &DataPlan,
    stores: &Stores,
    sample: &SampleSpec,
    place: u32,
) -> Result<Option<SequencePart>> {
    let found = pieces(plan, stores, std::slice::from_ref(sample))?;
    Ok(found.into_iter().flatten().find(|piece| piece.place.contains(&place)))
}

/// Range in the sequence, tokens of the stream, document.
type PartRange = (Range<u32>, Range<u64>, u64);

/// Splits a sample where documents begin and where spans join.
fn cut(plan: &DataPlan, stores: &Stores, sample: &SampleSpec) -> Result<Vec<PartRange>> {
    let stream = stores.stream(&plan.sources()[sample.source].name, Split::Train)?;
    let (mut found, mut starts, mut place) = (Vec::new(), Vec::new(), 0);
    for span in &sample.spans {
        let end = span.start + u64::from(span.tokens);
        starts.clear();
        stream.starts_in(span.start + 1..end, &mut starts)?;
        let mut document = stream.document_of_token(span.start)?;
        let mut from = span.start;
        for to in starts.iter().copied().chain([end]) {
            let tokens = u32::try_from(to - from)
                .map_err(|_| Fault::bug("a span is longer than its sequence"))?;
            found.push((place..place + tokens, from..to, document));
            (place, from, document) = (place + tokens, to, document + 1);
        }
    }
    Ok(found)
}

/// Groups ascending numbers into ranges.
fn runs(numbers: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}
