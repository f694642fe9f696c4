//! Documents that no step sees any more, from an amendment on. They keep their places, so that nothing else moves.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::{Fault, Hasher, Result};

use crate::plan::{Plan, unknown};
use crate::sample::{SourceFacts, Span};
use curriculum::Curriculum;

/// A document that is banned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ban {
    /// From this step on.
    pub step: u64,
    /// The first global sample number of that step.
    pub first_sample: u64,
    /// Index into [`Plan::sources`].
    pub source: usize,
    /// Its number in the source's training stream.
    pub document: u64,
    /// Its tokens there, once [`Plan::place_bans`] was told; nothing is hidden before.
    pub tokens: Range<u64>,
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bans {
    all: Vec<Ban>,
    /// By source the tokens of each, rising, with the first sample that does not see them.
    by_source: BTreeMap<usize, Vec<(Range<u64>, u64)>>,
}

impl Bans {
    /// Those of a curriculum whose phases are planned.
    pub(crate) fn new(curriculum: &Curriculum, plan: &Plan) -> Result<Self> {
        let mut all = Vec::new();
        for (number, amendment) in curriculum.amendments.iter().enumerate() {
            let step = amendment.step;
            for (name, documents) in &amendment.ban {
                let place = || curriculum.place(&format!("amendment.{}.ban", number + 1));
                let source = plan.sources.iter().position(|facts| facts.name == *name);
                let source = source.ok_or_else(|| unknown(name, &plan.sources).at(place()))?;
                let count = plan.sources[source].documents;
                if let Some(document) = documents.iter().find(|document| **document >= count) {
                    return Err(Fault::usage(format!(
                        "source {name:?} has no document {document}"
                    ))
                    .at(place())
                    .wanted(format!("numbers below {count}, its documents"))
                    .hint("`zdata where CURRICULUM --doc ID` shows a document's number"));
                }
                let first_sample = plan.step(step)?.first_sample;
                let ban = |document: &u64| {
                    let document = *document;
                    Ban { step, first_sample, source, document, tokens: 0..0 }
                };
                all.extend(documents.iter().map(ban));
            }
        }
        Ok(Bans { all, by_source: BTreeMap::new() })
    }

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

impl Plan {
    /// The documents that are banned, in the order of the amendments.
    pub fn bans(&self) -> &[Ban] {
        &self.bans.all
    }

    /// Learns from `tokens` which tokens of its source each of some documents (rising) is: only a store knows. From then on
    /// no sample shows them.
    pub fn place_bans(
        &mut self,
        tokens: impl Fn(&str, &[u64]) -> Result<Vec<Range<u64>>>,
    ) -> Result<()> {
        let Bans { all, by_source } = &mut self.bans;
        by_source.clear();
        for (source, facts) in self.sources.iter().enumerate() {
            let mut bans: Vec<&mut Ban> =
                all.iter_mut().filter(|ban| ban.source == source).collect();
            if bans.is_empty() {
                continue;
            }
            bans.sort_by_key(|ban| ban.document);
            let documents: Vec<u64> = bans.iter().map(|ban| ban.document).collect();
            let found = tokens(&facts.name, &documents)?;
            let mut ranges = Vec::with_capacity(found.len());
            for (ban, tokens) in bans.into_iter().zip(found) {
                ban.tokens = tokens.clone();
                ranges.push((tokens, ban.first_sample));
            }
            by_source.insert(source, ranges);
        }
        Ok(())
    }

    /// What a ban takes out of the run: tokens, and labels among them. A document's last token has no label.
    pub fn hidden_by(&self, ban: &Ban) -> Result<(u64, u64)> {
        let visits = self.visits(ban.source, ban.tokens.clone())?.into_iter();
        let visits = visits.filter(|visit| visit.sample >= ban.first_sample);
        Ok(visits.fold((0, 0), |(tokens, labels), visit| {
            let count = u64::from(visit.tokens);
            let ends = visit.token + count == ban.tokens.end;
            (tokens + count, labels + count - u64::from(ends))
        }))
    }
}
