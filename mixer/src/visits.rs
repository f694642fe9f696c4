//! The inverse of the plan: where a piece of a source's text is seen, over the whole run.

use std::ops::Range;

use crate::order::{Epoch, SourceOrder};
use crate::plan::{PhasePlan, Plan, SourceUse};
use crate::remainder::Part;

/// Neighbouring tokens of a source at one place of one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Visit {
    /// The global sample number.
    pub sample: u64,
    /// Where in the sequence the first of these tokens stands.
    pub offset_in_sequence: u32,
    /// The first of these tokens, counted in the source's training stream.
    pub token: u64,
    /// How many.
    pub tokens: u32,
}

/// Asks one segment of the run for one range of tokens.
struct Search<'a> {
    phase: &'a PhasePlan,
    entry: usize,
    part: &'a SourceUse,
    order: &'a SourceOrder,
    tokens: Range<u64>,
    found: Vec<Visit>,
}

impl Plan {
    /// Every place at which tokens `tokens` of `source` are seen, in the order of the run: the inverse of
    /// [`Plan::sample`].
    pub fn visits(&self, source: usize, tokens: Range<u64>) -> Vec<Visit> {
        let Some(order) = self.orders.get(source).and_then(Option::as_ref) else {
            return Vec::new();
        };
        let tokens = tokens.start..tokens.end.min(order.tokens);
        let mut found = Vec::new();
        for phase in &self.phases {
            let Some(entry) = phase.uses.iter().position(|part| part.source == source) else {
                continue;
            };
            let (part, tokens) = (&phase.uses[entry], tokens.clone());
            let mut search = Search { phase, entry, part, order, tokens, found };
            if part.samples > 0 && !search.tokens.is_empty() {
                search.run();
            }
            found = search.found;
        }
        found.sort_unstable();
        found
    }
}

impl Search<'_> {
    fn run(&mut self) {
        for number in self.part.segment.start.epoch..=self.part.after.epoch {
            let epoch = self.order.epoch(number);
            let units =
                self.tokens.start / self.order.unit..=(self.tokens.end - 1) / self.order.unit;
            for unit in units {
                let start = unit * self.order.unit;
                let inside =
                    self.tokens.start.max(start)..self.tokens.end.min(start + self.order.unit);
                self.unit(number, &epoch, unit, inside);
            }
        }
    }

    /// Tokens `inside` of one unit in one epoch.
    fn unit(&mut self, number: u64, epoch: &Epoch, unit: u64, inside: Range<u64>) {
        let (group, slot) = epoch.slot_of_unit(unit);
        let segment = &self.part.segment;
        let remainder = match number == segment.start.epoch {
            true => segment.parts().find(|part| part.left.group == group),
            false => None,
        };
        if remainder.is_none() && (number, group) > (self.part.after.epoch, self.part.after.next) {
            return;
        }
        let cut = remainder.map_or(self.phase.seq_len, |part| part.left.cut);
        let pieces = epoch.group(group, cut);
        let (start, cut) = (unit * self.order.unit, u64::from(cut));
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

    /// `tokens` of a remainder, which stand at `at` of its group as it is served.
    fn remainder(&mut self, part: &Part, at: u64, tokens: Range<u64>) {
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
