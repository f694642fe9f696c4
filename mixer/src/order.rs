//! The order in which one source is read, whatever the phases: epochs, groups, windows, remainders.
//!
//! ```text
//! epoch    the source's units (the last one may be partial), permuted under (seed, name, epoch)
//! group    consecutive permuted units: 1,024, or fewer so that they are at most a sixteenth of the source (the last
//!          group may be smaller)
//! window   a unit cut into pieces of `seq_len` tokens; a group's windows are permuted under (seed, name, epoch, group)
//! ```
//!
//! Invariant: an epoch is used up before the next begins. So every token is served once before any is served twice,
//! even if `seq_len` changes: what a change leaves of the open group is a [`Remainder`], served before the epoch ends
//! (`segment.rs` defines when).
//!
//! Nothing here is proportional to the source's size: the partial unit and its short window are found by inverse
//! permutations, and everything else is division.

use contract::{Key, Permutation};

use crate::sample::Span;

/// Units in a group, at most.
pub const GROUP_UNITS: u64 = 1024;

/// A group is at most this fraction of its source, unless a single unit is more. So a change of `seq_len` finds only a
/// small part of the text in the open group, however small the source.
pub const GROUPS_LEAST: u64 = 16;

/// The order in which one source is read.
#[derive(Clone, Debug)]
pub(crate) struct SourceOrder {
    key: Key,
    /// Tokens in the source.
    pub(crate) tokens: u64,
    /// Tokens in a unit.
    pub(crate) unit: u64,
    /// Units, the partial one included.
    units: u64,
    /// Tokens in the partial unit; 0 if there is none.
    tail: u64,
    /// Units in a group.
    group_units: u64,
}

/// The position of a source: all state left by earlier steps.
///
/// All groups of this epoch before `next` are served, except for `open` and `deferred`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Epochs completed.
    pub epoch: u64,
    /// The next group of this epoch to open.
    pub next: u64,
    /// What is left of the group opened last.
    pub open: Option<Remainder>,
    /// What is left of earlier groups, in the order of deferral: at most one per change of `seq_len`.
    pub deferred: Vec<Remainder>,
    /// For packed documents: packs served at each declared length, over all epochs. Else empty.
    pub packs: Vec<u64>,
}

/// What is left of a group: everything after its first `served` windows and `offset` tokens of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remainder {
    /// The group.
    pub group: u64,
    /// The `seq_len` at which it was cut.
    pub cut: u32,
    /// Windows served, at least one.
    pub served: u64,
    /// Tokens served of the next window, at another `seq_len`; fewer than it has.
    pub offset: u64,
}

/// One epoch of a source.
pub(crate) struct Epoch<'a> {
    source: &'a SourceOrder,
    key: Key,
    units: Permutation,
    /// The slot of the partial unit in permuted order.
    tail_slot: Option<u64>,
}

/// One group of an epoch, cut into windows of one `seq_len`.
pub(crate) struct Group<'a> {
    epoch: &'a Epoch<'a>,
    /// The length of its windows.
    pub(crate) seq_len: u64,
    first_slot: u64,
    /// Tokens in the group.
    pub(crate) tokens: u64,
    /// The slot of this group that holds the partial unit.
    tail_slot: Option<u64>,
    windows: Permutation,
    /// The short window's place in permuted order, and how many tokens it is short of `seq_len`.
    pub(crate) short: Option<(u64, u64)>,
}

impl SourceOrder {
    /// The order of the source `name` under `seed`.
    ///
    /// # Panics
    /// If `tokens` or `unit` is zero.
    pub(crate) fn new(seed: u64, name: &str, tokens: u64, unit: u64) -> Self {
        assert!(tokens > 0 && unit > 0, "a source needs tokens and a unit");
        let key = Key::from_seed(seed).child("order").child(name);
        let group_units = (tokens / unit / GROUPS_LEAST).clamp(1, GROUP_UNITS);
        let (units, tail) = (tokens.div_ceil(unit), tokens % unit);
        SourceOrder { key, tokens, unit, units, tail, group_units }
    }

    /// Windows of one epoch at `seq_len`.
    pub(crate) fn windows(&self, seq_len: u32) -> u64 {
        let seq_len = u64::from(seq_len);
        self.tokens / self.unit * (self.unit / seq_len) + self.tail.div_ceil(seq_len)
    }

    /// Groups of one epoch.
    pub(crate) fn groups(&self) -> u64 {
        self.units.div_ceil(self.group_units)
    }

    /// The order of one epoch.
    pub(crate) fn epoch(&self, epoch: u64) -> Epoch<'_> {
        let key = self.key.nth(epoch);
        let units = Permutation::new(key, self.units);
        let tail_slot = (self.tail > 0).then(|| units.inverse(self.units - 1));
        Epoch { source: self, key, units, tail_slot }
    }

    /// Tokens served from the start of the run to `cursor`.
    pub(crate) fn tokens_before(&self, cursor: &Cursor) -> u64 {
        let epoch = self.epoch(cursor.epoch);
        let opened = cursor.epoch * self.tokens + epoch.tokens_before(cursor.next);
        let left = |remainder: &Remainder| {
            let group = epoch.group(remainder.group, remainder.cut);
            group.tokens - group.tokens_before(remainder.served) - remainder.offset
        };
        opened - cursor.open.iter().chain(&cursor.deferred).map(left).sum::<u64>()
    }
}

impl Epoch<'_> {
    /// Windows of a group of whole units.
    fn group_windows(&self, seq_len: u32) -> u64 {
        self.source.group_units * (self.source.unit / u64::from(seq_len))
    }

    /// How many windows fewer the partial unit has than a whole one.
    fn missing_windows(&self, seq_len: u32) -> u64 {
        let seq_len = u64::from(seq_len);
        self.source.unit / seq_len - self.source.tail.div_ceil(seq_len)
    }

    /// Windows before `group`; past the last group, all windows of the epoch.
    pub(crate) fn windows_before(&self, group: u64, seq_len: u32) -> u64 {
        let whole = group * self.group_windows(seq_len);
        let before = match self.tail_slot {
            Some(slot) if self.group_of_slot(slot) < group => whole - self.missing_windows(seq_len),
            _ => whole,
        };
        before.min(self.source.windows(seq_len))
    }

    fn group_of_slot(&self, slot: u64) -> u64 {
        slot / self.source.group_units
    }

    /// The group that contains window `index` of the epoch, and the window's number in it.
    pub(crate) fn group_of_window(&self, index: u64, seq_len: u32) -> (u64, u64) {
        let full = self.group_windows(seq_len);
        let group = match self.tail_slot {
            Some(slot) => {
                let (tail_group, missing) =
                    (self.group_of_slot(slot), self.missing_windows(seq_len));
                match index / full {
                    group if group < tail_group => group,
                    _ if index + missing < (tail_group + 1) * full => tail_group,
                    _ => (index + missing) / full,
                }
            }
            None => index / full,
        };
        (group, index - self.windows_before(group, seq_len))
    }

    /// Tokens before `group`.
    fn tokens_before(&self, group: u64) -> u64 {
        let SourceOrder { unit, tail, units, group_units, .. } = *self.source;
        let whole = (group * group_units).min(units) * unit;
        match self.tail_slot {
            Some(slot) if self.group_of_slot(slot) < group => whole - (unit - tail),
            _ => whole,
        }
    }

    /// The epoch's one window shorter than `seq_len`, if there is one.
    pub(crate) fn short_window(&self, seq_len: u32) -> Option<u64> {
        let group = self.group_of_slot(self.tail_slot?);
        let (place, _) = self.group(group, seq_len).short?;
        Some(self.windows_before(group, seq_len) + place)
    }

    /// The group and slot of `unit`.
    pub(crate) fn slot_of_unit(&self, unit: u64) -> (u64, u64) {
        let slot = self.units.inverse(unit);
        (self.group_of_slot(slot), slot % self.source.group_units)
    }

    /// One group, cut into windows of `seq_len`.
    pub(crate) fn group(&self, group: u64, seq_len: u32) -> Group<'_> {
        let first_slot = group * self.source.group_units;
        let count = self.windows_before(group + 1, seq_len) - self.windows_before(group, seq_len);
        let tokens = self.tokens_before(group + 1) - self.tokens_before(group);
        let tail_slot = self
            .tail_slot
            .filter(|slot| self.group_of_slot(*slot) == group)
            .map(|slot| slot - first_slot);
        let windows = Permutation::new(self.key.nth(group), count);
        let seq_len = u64::from(seq_len);
        let short = tail_slot.filter(|_| !self.source.tail.is_multiple_of(seq_len)).map(|slot| {
            let window = slot * (self.source.unit / seq_len) + self.source.tail / seq_len;
            (windows.inverse(window), seq_len - self.source.tail % seq_len)
        });
        Group { epoch: self, seq_len, first_slot, tokens, tail_slot, windows, short }
    }
}

impl Group<'_> {
    /// The text of the window served at `place` in this group.
    pub(crate) fn window(&self, place: u64) -> Span {
        let window = self.windows.forward(place);
        let SourceOrder { unit, tail, .. } = *self.epoch.source;
        let (whole, partial) = (unit / self.seq_len, tail.div_ceil(self.seq_len));
        let (slot, inside) = match self.tail_slot {
            Some(slot) if window >= slot * whole + partial => {
                let window = window + whole - partial;
                (window / whole, window % whole)
            }
            _ => (window / whole, window % whole),
        };
        let start = self.epoch.units.forward(self.first_slot + slot) * unit + inside * self.seq_len;
        let tokens = self.seq_len.min(self.epoch.source.tokens - start);
        Span::new(start, tokens)
    }

    /// The place at which window `inside` of the unit at `slot` is served.
    pub(crate) fn place(&self, slot: u64, inside: u64) -> u64 {
        let SourceOrder { unit, tail, .. } = *self.epoch.source;
        let (whole, partial) = (unit / self.seq_len, tail.div_ceil(self.seq_len));
        let missing = match self.tail_slot {
            Some(tail_slot) if slot > tail_slot => whole - partial,
            _ => 0,
        };
        self.windows.inverse(slot * whole + inside - missing)
    }

    /// The group's windows.
    pub(crate) fn windows(&self) -> u64 {
        self.windows.len()
    }

    /// Tokens in the windows before `place`.
    pub(crate) fn tokens_before(&self, place: u64) -> u64 {
        match self.short {
            Some((short, missing)) if short < place => place * self.seq_len - missing,
            _ => place * self.seq_len,
        }
    }

    /// The window that contains token number `token` of this group, and the offset in it.
    pub(crate) fn place_of_token(&self, token: u64) -> (u64, u64) {
        match self.short {
            Some((short, missing)) if token >= (short + 1) * self.seq_len - missing => {
                ((token + missing) / self.seq_len, (token + missing) % self.seq_len)
            }
            _ => (token / self.seq_len, token % self.seq_len),
        }
    }

    /// Tokens `from..to` of this group in serving order, as spans split at window boundaries.
    pub(crate) fn text(&self, from: u64, to: u64) -> Vec<Span> {
        let (mut place, mut skip) = self.place_of_token(from);
        let mut left = to - from;
        let mut spans = Vec::new();
        while left > 0 {
            let window = self.window(place);
            let tokens = (u64::from(window.tokens) - skip).min(left);
            spans.push(Span::new(window.start + skip, tokens));
            (place, skip, left) = (place + 1, 0, left - tokens);
        }
        spans
    }
}
