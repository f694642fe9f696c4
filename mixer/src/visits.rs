//! The inverse of the plan: where a range of a source's text appears, over the whole run.

use std::ops::Range;

use contract::Result;

use crate::order::{Epoch, SourceOrder};
use crate::packing::Segment;
use crate::packs::PackSegment;
use crate::plan::{DataPlan, PhasePlan, SourceUse};
use crate::remainder::RemainderPart;
use crate::segment::SourceSegment;

/// A run of contiguous tokens of a source within one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Visit {
    /// The global sample number.
    pub sample: u64,
    /// The position in the sequence of the first of these tokens.
    pub offset_in_sequence: u32,
    /// The first of these tokens, as numbered in the source's training stream.
    pub token: u64,
    /// Number of tokens.
    pub tokens: u32,
}

/// Searches one segment of the run for one range of tokens.
struct Search<'a> {
    phase: &'a PhasePlan,
    entry: usize,
    part: &'a SourceUse,
    tokens: Range<u64>,
    found: Vec<Visit>,
}

impl DataPlan {
    /// Every appearance of tokens `tokens` of `source` in the steps whose data is fixed, in the order of the run: the
    /// inverse of [`DataPlan::sample`].
    pub fn visits(&self, source: usize, tokens: Range<u64>) -> Result<Vec<Visit>> {
        let Some(facts) = self.sources.get(source) else { return Ok(Vec::new()) };
        let tokens = tokens.start..tokens.end.min(facts.tokens);
        let mut found = Vec::new();
        for phase in &self.phases {
            let of_source = |part: &SourceUse| part.source == source && part.samples > 0;
            let Some(entry) = phase.uses.iter().position(of_source) else { continue };
            if tokens.is_empty() {
                break;
            }
            let (part, tokens) = (&phase.uses[entry], tokens.clone());
            let mut search = Search { phase, entry, part, tokens, found };
            match &part.segment {
                Segment::Windows(order, segment) => search.windows(order, segment),
                Segment::Packs(segment) => search.packs(segment)?,
            }
            found = search.found;
        }
        let fixed = self.fixed_samples();
        found.retain(|visit| visit.sample < fixed);
        found.sort_unstable();
        Ok(found)
    }
}

impl Search<'_> {
    fn packs(&mut self, segment: &PackSegment) -> Result<()> {
        for (ordinal, place) in segment.visits(self.tokens.clone(), self.part.samples)? {
            let tokens = place.tokens;
            self.push(ordinal, u64::from(place.offset), tokens.start, tokens.end - tokens.start);
        }
        Ok(())
    }

    fn windows(&mut self, order: &SourceOrder, segment: &SourceSegment) {
        for number in segment.start.epoch..=self.part.after.epoch {
            let epoch = order.epoch(number);
            let units = self.tokens.start / order.unit..=(self.tokens.end - 1) / order.unit;
            for unit in units {
                let start = unit * order.unit;
                let inside = self.tokens.start.max(start)..self.tokens.end.min(start + order.unit);
                self.unit(segment, number, &epoch, unit, order.unit, inside);
            }
        }
    }

    /// Finds tokens `inside` of one unit (number, tokens) in one epoch (number, order).
    fn unit(
        &mut self,
        segment: &SourceSegment,
        number: u64,
        epoch: &Epoch,
        unit: u64,
        size: u64,
        inside: Range<u64>,
    ) {
        let (group, slot) = epoch.slot_of_unit(unit);
        let remainder = match number == segment.start.epoch {
            true => segment.parts().find(|part| part.left.group == group),
            false => None,
        };
        if remainder.is_none() && (number, group) > (self.part.after.epoch, self.part.after.next) {
            return;
        }
        let cut = remainder.map_or(self.phase.seq_len, |part| part.left.cut);
        let pieces = epoch.group(group, cut);
        let (start, cut) = (unit * size, u64::from(cut));
        for window in (inside.start - start) / cut..=(inside.end - 1 - start) / cut {
            let place = pieces.place(slot, window);
            let first = start + window * cut;
            let (from, to) = (inside.start.max(first), inside.end.min(first + cut));
            if let Some(part) = remainder {
                let at = part.coordinate(&pieces, place) + from - first;
                self.remainder(part, at, from..to);
            } else {
                let index = epoch.windows_before(group, self.phase.seq_len) + place;
                if let Some(ordinal) = segment.ordinal_of_window(number, index) {
                    self.push(ordinal, from - first, from, to - from);
                }
            }
        }
    }

    /// Finds `tokens` of a remainder, which start at `at` of its group in serving order.
    fn remainder(&mut self, part: &RemainderPart, at: u64, tokens: Range<u64>) {
        let seq_len = u64::from(self.phase.seq_len);
        let mut token = (tokens.start + part.origin.saturating_sub(at)).min(tokens.end);
        while token < tokens.end {
            let position = at + (token - tokens.start) - part.origin;
            let offset = position % seq_len;
            let count = (tokens.end - token).min(seq_len - offset);
            self.push(part.first + position / seq_len, offset, token, count);
            token += count;
        }
    }

    fn push(&mut self, ordinal: u64, offset: u64, token: u64, tokens: u64) {
        if ordinal >= self.part.samples {
            return;
        }
        let narrow = |value: u64| u32::try_from(value).expect("below seq_len, which is 32 bits");
        self.found.push(Visit {
            sample: self.phase.first_sample + self.phase.mixing.nth(self.entry, ordinal),
            offset_in_sequence: narrow(offset),
            token,
            tokens: narrow(tokens),
        });
    }
}
