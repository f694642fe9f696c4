//! Which documents a plan bans, and how much text a ban hides.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::{Fault, Result};

use crate::bans::{Ban, Bans};
use crate::plan::DataPlan;
use crate::sample::{names, unknown};
use curriculum::Curriculum;

/// The bans of a curriculum whose phases are planned.
pub(crate) fn banned(curriculum: &Curriculum, plan: &DataPlan) -> Result<Bans> {
    let mut all = Vec::new();
    for (number, amendment) in curriculum.amendments.iter().enumerate() {
        let step = amendment.step;
        for (name, documents) in &amendment.ban {
            let place = || curriculum.place(&format!("amendment.{}.ban", number + 1));
            let source = plan.sources.iter().position(|facts| facts.name == *name);
            let source = source.ok_or_else(|| unknown(name, names(&plan.sources)).at(place()))?;
            let count = plan.sources[source].documents;
            if let Some(document) = documents.iter().find(|document| **document >= count) {
                return Err(Fault::usage(format!("source {name:?} has no document {document}"))
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

impl DataPlan {
    /// The banned documents, in the order of the amendments.
    pub fn bans(&self) -> &[Ban] {
        &self.bans.all
    }

    /// Looks up the tokens of each banned document: `tokens` maps a source's document numbers (ascending) to token
    /// ranges, which only a store knows. From then on no sample shows them.
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

    /// How much text a ban hides over the run: tokens, and labels among them. A document's last token has no label.
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
