//! Documents banned from some step on. Their positions stay occupied, so no other text moves.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::Hasher;

use crate::sample::{SourceFacts, Span};

/// A banned document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ban {
    /// The first step that does not show it.
    pub step: u64,
    /// The first global sample number of that step.
    pub first_sample: u64,
    /// Index into [`crate::DataPlan::sources`].
    pub source: usize,
    /// Its number in the source's training stream.
    pub document: u64,
    /// Its tokens there, filled in by [`crate::DataPlan::place_bans`]; until then nothing is hidden.
    pub tokens: Range<u64>,
}

/// All bans of a plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bans {
    pub(crate) all: Vec<Ban>,
    /// By source: each ban's tokens, ascending, and the first sample that hides them.
    pub(crate) by_source: BTreeMap<usize, Vec<(Range<u64>, u64)>>,
}

impl Bans {
    /// The banned ranges in sample `sample`, whose text is `spans` of `source`.
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

    /// Hashes the bans that affect steps up to `step`; adds nothing if there is none.
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
