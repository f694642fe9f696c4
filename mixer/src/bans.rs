//! Documents that no step sees any more, from an amendment on. They keep their places, so that nothing else moves.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::Hasher;

use crate::sample::{SourceFacts, Span};

/// A document that is banned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ban {
    /// From this step on.
    pub step: u64,
    /// The first global sample number of that step.
    pub first_sample: u64,
    /// Index into [`crate::Plan::sources`].
    pub source: usize,
    /// Its number in the source's training stream.
    pub document: u64,
    /// Its tokens there, once [`crate::Plan::place_bans`] was told; nothing is hidden before.
    pub tokens: Range<u64>,
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bans {
    pub(crate) all: Vec<Ban>,
    /// By source the tokens of each, rising, with the first sample that does not see them.
    pub(crate) by_source: BTreeMap<usize, Vec<(Range<u64>, u64)>>,
}

impl Bans {
    /// Where in sample `sample`, whose text is `spans` of `source`, banned text stands.
    pub(crate) fn places(&self, source: usize, sample: u64, spans: &[Span]) -> Vec<Range<u32>> {
        let mut places: Vec<Range<u32>> = Vec::new();
        let Some(banned) = self.by_source.get(&source) else { return places };
        let mut at = 0;
        for span in spans {
            let end = span.start + u64::from(span.tokens);
            let first = banned.partition_point(|(tokens, _)| tokens.end <= span.start);
            let inside = banned[first..].iter().take_while(|(tokens, _)| tokens.start < end);
            for (tokens, _) in inside.filter(|(_, first_sample)| *first_sample <= sample) {
                let place = |token: u64| at + (token - span.start) as u32;
                let (from, to) = (place(tokens.start.max(span.start)), place(tokens.end.min(end)));
                match places.last_mut() {
                    Some(last) if last.end == from => last.end = to,
                    _ => places.push(from..to),
                }
            }
            at += span.tokens;
        }
        places
    }

    /// What of them decides steps up to `step`: nothing where there is none.
    pub(crate) fn feed(&self, step: u64, sources: &[SourceFacts], hasher: &mut Hasher) {
        let begun = || self.all.iter().filter(|ban| ban.step <= step);
        let count = begun().count() as u64;
        if count == 0 {
            return;
        }
        hasher.tag("bans.v1").u64(count);
        for Ban { step, first_sample: _, source, document, tokens: _ } in begun() {
            hasher.u64(*step).str(&sources[*source].name).u64(*document);
        }
    }
}
