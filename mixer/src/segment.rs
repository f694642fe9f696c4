//! One source during one segment of a phase: its position before, the text of its `k`-th sample, its position after.
//!
//! ```text
//! first    deferred remainders that fit this `seq_len`, then what is left of the open group
//! windows  of the groups not opened yet, at this `seq_len`
//! late     before the epoch ends, deferred remainders that do not fit
//!          and then epoch after epoch of windows
//! ```
//!
//! If what is left of the open group does not fit and the phase says `remainder = "defer"`, it is late instead of
//! first. Every row is a closed form of `k`. There are at most as many remainders as changes of `seq_len` in the epoch.

use std::ops::Range;

use curriculum::RemainderRule;

use crate::composition::Composition;
use crate::order::{Cursor, Remainder, SourceOrder};
use crate::remainder::{RemainderPart, fits};
use crate::sample::Span;

/// A source during a segment.
#[derive(Clone, Debug)]
pub(crate) struct SourceSegment {
    pub(crate) seq_len: u32,
    /// The source's position when the segment began.
    pub(crate) start: Cursor,
    /// Remainders served first.
    first: Vec<RemainderPart>,
    /// Whether the last of them is what is left of the open group.
    opens: bool,
    /// The first window to serve in the epoch.
    first_window: u64,
    /// Remainders served when the epoch has no more windows.
    late: Vec<RemainderPart>,
    /// Windows of an epoch.
    pub(crate) windows: u64,
}

/// A sample of a segment, before its text is looked up.
enum Position<'a> {
    /// Sample number `ordinal` of a remainder.
    Part { part: &'a RemainderPart, ordinal: u64 },
    /// A window of an epoch.
    Window { epoch: u64, window: u64 },
}

impl SourceSegment {
    pub(crate) fn new(
        order: &SourceOrder,
        start: Cursor,
        seq_len: u32,
        rule: RemainderRule,
    ) -> Self {
        let fitting = |left: &&Remainder| fits(left, seq_len);
        let (mut first, mut late): (Vec<&Remainder>, Vec<&Remainder>) =
            start.deferred.iter().partition(fitting);
        let opens = start
            .open
            .as_ref()
            .is_some_and(|open| fits(open, seq_len) || rule == RemainderRule::Join);
        let queue = if opens { &mut first } else { &mut late };
        queue.extend(&start.open);
        let epoch = order.epoch(start.epoch);
        let windows = order.windows(seq_len);
        let first_window = epoch.windows_before(start.next, seq_len);
        let parts = |lefts: Vec<&Remainder>, mut at: u64| -> Vec<RemainderPart> {
            let part = |left: &Remainder| {
                let part =
                    RemainderPart::new(&epoch.group(left.group, left.cut), *left, seq_len, at);
                at += part.samples;
                part
            };
            lefts.into_iter().map(part).collect()
        };
        let first = parts(first, 0);
        let late = parts(late, end_of(&first).unwrap_or(0) + windows - first_window);
        SourceSegment { seq_len, start, first, opens, first_window, late, windows }
    }

    /// The remainders in serving order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &RemainderPart> {
        self.first.iter().chain(&self.late)
    }

    /// Samples before the first window.
    fn windows_begin(&self) -> u64 {
        end_of(&self.first).unwrap_or(0)
    }

    /// Samples until the end of the epoch in which the segment begins.
    fn epoch_end(&self) -> u64 {
        let windows = self.windows_begin() + self.windows - self.first_window;
        end_of(&self.late).unwrap_or(windows)
    }

    /// How many of the first `samples` samples are windows of the epoch in which the segment begins, and of later
    /// epochs.
    pub(crate) fn windows_taken(&self, samples: u64) -> (u64, u64) {
        let first = samples.saturating_sub(self.windows_begin());
        let later = samples.saturating_sub(self.epoch_end());
        (first.min(self.windows - self.first_window), later)
    }

    fn position(&self, ordinal: u64) -> Position<'_> {
        let of = |part: &&RemainderPart| (part.first..part.first + part.samples).contains(&ordinal);
        if let Some(part) = self.parts().find(of) {
            return Position::Part { part, ordinal: ordinal - part.first };
        }
        match ordinal.checked_sub(self.epoch_end()) {
            None => {
                let window = self.first_window + ordinal - self.windows_begin();
                Position::Window { epoch: self.start.epoch, window }
            }
            Some(index) => {
                let epoch = self.start.epoch + 1 + index / self.windows;
                Position::Window { epoch, window: index % self.windows }
            }
        }
    }

    /// The epoch and the text of sample `ordinal`.
    pub(crate) fn text(&self, order: &SourceOrder, ordinal: u64) -> (u64, Vec<Span>) {
        match self.position(ordinal) {
            Position::Part { part, ordinal } => {
                let epoch = order.epoch(self.start.epoch);
                let group = epoch.group(part.left.group, part.left.cut);
                (self.start.epoch, part.text(&group, ordinal))
            }
            Position::Window { epoch: number, window } => {
                let epoch = order.epoch(number);
                let (group, place) = epoch.group_of_window(window, self.seq_len);
                (number, vec![epoch.group(group, self.seq_len).window(place)])
            }
        }
    }

    /// The source's position after `samples` samples.
    pub(crate) fn after(&self, order: &SourceOrder, samples: u64) -> Cursor {
        if samples == 0 {
            return self.start.clone();
        }
        let (windows, later) = self.windows_taken(samples);
        if samples >= self.epoch_end() {
            let epoch = self.start.epoch + 1 + later / self.windows;
            return self.at_window(order, epoch, later % self.windows);
        }
        let epoch = order.epoch(self.start.epoch);
        let left = |part: &RemainderPart| {
            part.after(&epoch.group(part.left.group, part.left.cut), samples)
        };
        let (put_off, opened) = self.first.split_at(self.first.len() - usize::from(self.opens));
        let mut cursor = match windows {
            0 => {
                let (next, open) = (self.start.next, opened.iter().find_map(left));
                Cursor { epoch: self.start.epoch, next, open, ..Cursor::default() }
            }
            _ => self.at_window(order, self.start.epoch, self.first_window + windows),
        };
        cursor.deferred = put_off.iter().chain(&self.late).filter_map(left).collect();
        cursor
    }

    /// The source's position once an epoch is served up to a window.
    fn at_window(&self, order: &SourceOrder, epoch: u64, window: u64) -> Cursor {
        let (mut next, mut open) = (order.groups(), None);
        if window < self.windows {
            let (group, served) = order.epoch(epoch).group_of_window(window, self.seq_len);
            let begun = Remainder { group, cut: self.seq_len, served, offset: 0 };
            (next, open) = (group + u64::from(served > 0), (served > 0).then_some(begun));
        }
        Cursor { epoch, next, open, ..Cursor::default() }
    }

    /// How many samples the phase can take before epoch number `epochs` (from 0) of the source would begin.
    pub(crate) fn samples_within(&self, epochs: u64) -> u64 {
        match epochs.checked_sub(self.start.epoch + 1) {
            None => 0,
            Some(more) => more.saturating_mul(self.windows).saturating_add(self.epoch_end()),
        }
    }

    /// Which of the phase's samples is a given window of an epoch: the inverse of [`Position::Window`].
    pub(crate) fn ordinal_of_window(&self, epoch: u64, window: u64) -> Option<u64> {
        match epoch.checked_sub(self.start.epoch)? {
            0 => Some(self.windows_begin() + window.checked_sub(self.first_window)?),
            later => Some(self.epoch_end() + (later - 1) * self.windows + window),
        }
    }
}

/// The number after the last sample of these parts.
fn end_of(parts: &[RemainderPart]) -> Option<u64> {
    parts.last().map(|part| part.first + part.samples)
}

impl SourceSegment {
    /// The composition of the first `samples` samples.
    pub(crate) fn composition(&self, order: &SourceOrder, samples: u64) -> Composition {
        let epoch = order.epoch(self.start.epoch);
        let mut all = Composition::default();
        for part in self.parts() {
            let group = epoch.group(part.left.group, part.left.cut);
            all += part.composition(&group, samples);
        }
        let (first, later) = self.windows_taken(samples);
        let short = |number: u64, windows: Range<u64>| {
            let short = order.epoch(number).short_window(self.seq_len);
            u64::from(short.is_some_and(|short| windows.contains(&short)))
        };
        let of_first = self.first_window..self.first_window + first;
        all += Composition::of(first, 0, short(self.start.epoch, of_first));
        let (whole, rest) = (later / self.windows, later % self.windows);
        let number = self.start.epoch + 1;
        let padded = whole * short(number, 0..self.windows) + short(number + whole, 0..rest);
        all += Composition::of(later, 0, padded);
        all
    }
}
