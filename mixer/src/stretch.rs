//! One source during one phase: where it starts, which text its `k`-th sample is, and where it stands afterwards.
//!
//! Samples of a phase come from two places: first from what an earlier `seq_len` left of the open group (the head),
//! then from whole groups at the phase's own `seq_len`, on and on through the epochs. Both are closed forms of `k`.

use crate::course::{Course, Cursor};
use crate::sample::Segment;

/// A source's part of a phase.
#[derive(Clone, Debug)]
pub(crate) struct Stretch {
    seq_len: u32,
    /// Where the source stood when the phase began.
    pub(crate) start: Cursor,
    /// What is left of a group that was cut at another length.
    head: Option<Head>,
    /// The epoch, and the window in it, at which samples after the head begin.
    first_epoch: u64,
    first_window: u64,
    /// Windows of an epoch.
    windows: u64,
}

/// A leftover: tokens `from..to` of the open group, in the order in which it is served.
#[derive(Clone, Copy, Debug)]
struct Head {
    from: u64,
    to: u64,
    samples: u64,
}

/// A sample of a stretch, before its text is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spot {
    /// Tokens `from..to` of the group that was open at the start.
    Head { from: u64, to: u64 },
    /// A window of an epoch.
    Window { epoch: u64, window: u64 },
}

impl Stretch {
    pub(crate) fn new(course: &Course, start: Cursor, seq_len: u32) -> Self {
        let windows = course.windows(seq_len);
        let epoch = course.epoch(start.epoch);
        let resumes = start.cut == seq_len && start.offset == 0;
        if start.served == 0 || resumes {
            let first_window = epoch.windows_before(start.group, seq_len) + start.served;
            let first_epoch = start.epoch;
            return Stretch { seq_len, start, head: None, first_epoch, first_window, windows };
        }
        let group = epoch.group(start.group, start.cut);
        let (from, to) = (group.tokens_before(start.served) + start.offset, group.tokens);
        let head = Some(Head { from, to, samples: (to - from).div_ceil(u64::from(seq_len)) });
        let (first_epoch, first_window) = if start.group + 1 == course.groups() {
            (start.epoch + 1, 0)
        } else {
            (start.epoch, epoch.windows_before(start.group + 1, seq_len))
        };
        Stretch { seq_len, start, head, first_epoch, first_window, windows }
    }

    /// Samples that the head gives.
    fn head_samples(&self) -> u64 {
        self.head.map_or(0, |head| head.samples)
    }

    /// Where sample `ordinal` stands.
    pub(crate) fn spot(&self, ordinal: u64) -> Spot {
        match self.head {
            Some(Head { from, to, samples }) if ordinal < samples => {
                let from = from + ordinal * u64::from(self.seq_len);
                Spot::Head { from, to: to.min(from + u64::from(self.seq_len)) }
            }
            _ => {
                let window = self.first_window + (ordinal - self.head_samples());
                let epoch = self.first_epoch + window / self.windows;
                Spot::Window { epoch, window: window % self.windows }
            }
        }
    }

    /// The epoch and the text of sample `ordinal`.
    pub(crate) fn text(&self, course: &Course, ordinal: u64) -> (u64, Vec<Segment>) {
        match self.spot(ordinal) {
            Spot::Head { from, to } => {
                let epoch = course.epoch(self.start.epoch);
                let text = epoch.group(self.start.group, self.start.cut).text(from, to);
                (self.start.epoch, text)
            }
            Spot::Window { epoch: number, window } => {
                let epoch = course.epoch(number);
                let (group, place) = epoch.group_of_window(window, self.seq_len);
                (number, vec![epoch.group(group, self.seq_len).window(place)])
            }
        }
    }

    /// Where the source stands after `samples` samples.
    pub(crate) fn after(&self, course: &Course, samples: u64) -> Cursor {
        if samples == 0 {
            return self.start;
        }
        if samples < self.head_samples() {
            let offset = self.start.offset + samples * u64::from(self.seq_len);
            return Cursor { offset, ..self.start };
        }
        let window = self.first_window + (samples - self.head_samples());
        let (epoch, window) = (self.first_epoch + window / self.windows, window % self.windows);
        let (group, served) = course.epoch(epoch).group_of_window(window, self.seq_len);
        Cursor { epoch, group, cut: self.seq_len, served, offset: 0 }
    }

    /// How many samples the phase can take before the source would begin its epoch number `epochs` (from 0).
    pub(crate) fn samples_within(&self, epochs: u64) -> u64 {
        if self.start.epoch >= epochs {
            return 0;
        }
        let windows = (epochs - self.first_epoch).saturating_mul(self.windows);
        self.head_samples().saturating_add(windows.saturating_sub(self.first_window))
    }

    /// Whether the phase begins with the leftover of another length.
    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Where in the open group the leftover begins, in tokens.
    pub(crate) fn head_start(&self) -> u64 {
        self.head.map_or(0, |head| head.from)
    }

    /// Which sample of the phase a window of an epoch is: the inverse of [`Spot::Window`].
    pub(crate) fn ordinal_of_window(&self, epoch: u64, window: u64) -> Option<u64> {
        let epochs = epoch.checked_sub(self.first_epoch)?;
        let index = (epochs * self.windows + window).checked_sub(self.first_window)?;
        Some(self.head_samples() + index)
    }
}
