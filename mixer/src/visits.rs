//! The inverse of the plan: where a piece of a source's text is seen, over the whole run.

use std::ops::Range;

use crate::order::{Cursor, Epoch, SourceOrder};
use crate::plan::{PhasePlan, Plan, SourceUse};

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
        let Cursor { epoch: first, .. } = self.part.segment.start;
        for number in first..=self.part.after.epoch {
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
        let in_remainder = (number, group) == (segment.start.epoch, segment.start.group);
        let cut = if in_remainder && segment.has_remainder() {
            segment.start.cut
        } else {
            self.phase.seq_len
        };
        if (number, group) < (segment.start.epoch, segment.start.group)
            || (number, group) > (self.part.after.epoch, self.part.after.group)
        {
            return;
        }
        let pieces = epoch.group(group, cut);
        let (start, cut) = (unit * self.order.unit, u64::from(cut));
        for window in (inside.start - start) / cut..=(inside.end - 1 - start) / cut {
            let place = pieces.place(slot, window);
            let first = start + window * cut;
            let (from, to) = (inside.start.max(first), inside.end.min(first + cut));
            if in_remainder && segment.has_remainder() {
                self.remainder(pieces.tokens_before(place) + from - first, from, to - from);
            } else {
                let index = epoch.windows_before(group, self.phase.seq_len) + place;
                if let Some(ordinal) = segment.ordinal_of_window(number, index) {
                    self.push(ordinal, from - first, from, to - from);
                }
            }
        }
    }

    /// `count` tokens of the remainder, which begin at `token` and stand at `at` of the open group.
    fn remainder(&mut self, at: u64, token: u64, count: u64) {
        let seq_len = u64::from(self.phase.seq_len);
        let origin = self.part.segment.remainder_start();
        let skipped = origin.saturating_sub(at).min(count);
        let (mut at, mut token, mut left) = (at + skipped, token + skipped, count - skipped);
        while left > 0 {
            let (ordinal, offset) = ((at - origin) / seq_len, (at - origin) % seq_len);
            let tokens = left.min(seq_len - offset);
            self.push(ordinal, offset, token, tokens);
            (at, token, left) = (at + tokens, token + tokens, left - tokens);
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
