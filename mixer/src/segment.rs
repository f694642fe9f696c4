//! One source during one segment of a phase: where it starts, which text its `k`-th sample is, and where it stands afterwards.
//!
//! Samples come from two places: first from what an earlier `seq_len` left of the open group (the remainder), then from
//! whole groups at the phase's own `seq_len`, on and on through the epochs. Both are closed forms of `k`.

use crate::order::{Cursor, SourceOrder};
use crate::sample::Span;

/// A source's part of a segment.
#[derive(Clone, Debug)]
pub(crate) struct SourceSegment {
    seq_len: u32,
    /// Where the source stood when the segment began.
    pub(crate) start: Cursor,
    /// What is left of a group that was cut at another length.
    remainder: Option<Remainder>,
    /// The epoch, and the window in it, at which samples after the remainder begin.
    first_epoch: u64,
    first_window: u64,
    /// Windows of an epoch.
    windows: u64,
}

/// What another length left: tokens `from..to` of the open group, in the order in which it is served.
#[derive(Clone, Copy, Debug)]
struct Remainder {
    from: u64,
    to: u64,
    samples: u64,
}

/// A sample of a segment, before its text is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    /// Tokens `from..to` of the group that was open at the start.
    Remainder { from: u64, to: u64 },
    /// A window of an epoch.
    Window { epoch: u64, window: u64 },
}

impl SourceSegment {
    pub(crate) fn new(order: &SourceOrder, start: Cursor, seq_len: u32) -> Self {
        let windows = order.windows(seq_len);
        let epoch = order.epoch(start.epoch);
        let resumes = start.cut == seq_len && start.offset == 0;
        if start.served == 0 || resumes {
            let first_window = epoch.windows_before(start.group, seq_len) + start.served;
            let first_epoch = start.epoch;
            return SourceSegment {
                seq_len,
                start,
                remainder: None,
                first_epoch,
                first_window,
                windows,
            };
        }
        let group = epoch.group(start.group, start.cut);
        let (from, to) = (group.tokens_before(start.served) + start.offset, group.tokens);
        let remainder =
            Some(Remainder { from, to, samples: (to - from).div_ceil(u64::from(seq_len)) });
        let (first_epoch, first_window) = if start.group + 1 == order.groups() {
            (start.epoch + 1, 0)
        } else {
            (start.epoch, epoch.windows_before(start.group + 1, seq_len))
        };
        SourceSegment { seq_len, start, remainder, first_epoch, first_window, windows }
    }

    /// Samples that the remainder gives.
    fn remainder_samples(&self) -> u64 {
        self.remainder.map_or(0, |remainder| remainder.samples)
    }

    /// Where sample `ordinal` stands.
    pub(crate) fn position(&self, ordinal: u64) -> Position {
        match self.remainder {
            Some(Remainder { from, to, samples }) if ordinal < samples => {
                let from = from + ordinal * u64::from(self.seq_len);
                Position::Remainder { from, to: to.min(from + u64::from(self.seq_len)) }
            }
            _ => {
                let window = self.first_window + (ordinal - self.remainder_samples());
                let epoch = self.first_epoch + window / self.windows;
                Position::Window { epoch, window: window % self.windows }
            }
        }
    }

    /// The epoch and the text of sample `ordinal`.
    pub(crate) fn text(&self, order: &SourceOrder, ordinal: u64) -> (u64, Vec<Span>) {
        match self.position(ordinal) {
            Position::Remainder { from, to } => {
                let epoch = order.epoch(self.start.epoch);
                let text = epoch.group(self.start.group, self.start.cut).text(from, to);
                (self.start.epoch, text)
            }
            Position::Window { epoch: number, window } => {
                let epoch = order.epoch(number);
                let (group, place) = epoch.group_of_window(window, self.seq_len);
                (number, vec![epoch.group(group, self.seq_len).window(place)])
            }
        }
    }

    /// Where the source stands after `samples` samples.
    pub(crate) fn after(&self, order: &SourceOrder, samples: u64) -> Cursor {
        if samples == 0 {
            return self.start;
        }
        if samples < self.remainder_samples() {
            let offset = self.start.offset + samples * u64::from(self.seq_len);
            return Cursor { offset, ..self.start };
        }
        let window = self.first_window + (samples - self.remainder_samples());
        let (epoch, window) = (self.first_epoch + window / self.windows, window % self.windows);
        let (group, served) = order.epoch(epoch).group_of_window(window, self.seq_len);
        Cursor { epoch, group, cut: self.seq_len, served, offset: 0 }
    }

    /// How many samples the phase can take before the source would begin its epoch number `epochs` (from 0).
    pub(crate) fn samples_within(&self, epochs: u64) -> u64 {
        if self.start.epoch >= epochs {
            return 0;
        }
        let windows = (epochs - self.first_epoch).saturating_mul(self.windows);
        self.remainder_samples().saturating_add(windows.saturating_sub(self.first_window))
    }

    /// Whether the phase begins with the remainder of another length.
    pub(crate) fn has_remainder(&self) -> bool {
        self.remainder.is_some()
    }

    /// Where in the open group the remainder begins, in tokens.
    pub(crate) fn remainder_start(&self) -> u64 {
        self.remainder.map_or(0, |remainder| remainder.from)
    }

    /// Which sample of the phase a window of an epoch is: the inverse of [`Position::Window`].
    pub(crate) fn ordinal_of_window(&self, epoch: u64, window: u64) -> Option<u64> {
        let epochs = epoch.checked_sub(self.first_epoch)?;
        let index = (epochs * self.windows + window).checked_sub(self.first_window)?;
        Some(self.remainder_samples() + index)
    }
}
