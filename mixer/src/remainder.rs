//! What is left of a group when `seq_len` changes, cut anew.
//!
//! If each of its windows is a whole number of new sequences, the windows are split one by one: still contiguous text,
//! in the order of the windows. Otherwise the windows are concatenated without padding and cut anew. Each joint is a
//! document boundary, and the last sequence is padded.

use crate::composition::Composition;
use crate::order::{Group, Remainder};
use crate::sample::Span;

/// A remainder within a segment.
#[derive(Clone, Debug)]
pub(crate) struct RemainderPart {
    /// What is left when the segment begins.
    pub(crate) left: Remainder,
    /// The first of the segment's samples that reads it.
    pub(crate) first: u64,
    /// How many samples it gives.
    pub(crate) samples: u64,
    /// Whether windows are split one by one, not joined.
    split: bool,
    /// Its start in the group's tokens in serving order, counting inner padding.
    pub(crate) origin: u64,
    seq_len: u64,
}

/// Whether the remainder splits into whole sequences: `seq_len` divides its windows and its offset.
pub(crate) fn fits(left: &Remainder, seq_len: u32) -> bool {
    left.cut.is_multiple_of(seq_len) && left.offset.is_multiple_of(u64::from(seq_len))
}

impl RemainderPart {
    /// The part for `left` of `group` at `seq_len`; its first sample is the segment's sample `first`.
    pub(crate) fn new(group: &Group, left: Remainder, seq_len: u32, first: u64) -> Self {
        let split = fits(&left, seq_len);
        let seq_len = u64::from(seq_len);
        let mut part = RemainderPart { left, first, samples: 0, split, origin: 0, seq_len };
        part.origin = part.coordinate(group, left.served) + left.offset;
        let end = part.coordinate(group, group.windows());
        part.samples = (end - part.origin).div_ceil(seq_len);
        part
    }

    /// How many of the segment's first `samples` samples are in this part.
    fn taken(&self, samples: u64) -> u64 {
        samples.saturating_sub(self.first).min(self.samples)
    }

    /// How many sequences fewer the group's short window gives when windows are split.
    fn missing(&self, padding: u64) -> u64 {
        padding / self.seq_len
    }

    /// The start of the group's window `place` in its tokens in serving order.
    pub(crate) fn coordinate(&self, group: &Group, place: u64) -> u64 {
        match group.short {
            Some((short, padding)) if self.split && short < place => {
                place * group.seq_len - self.missing(padding) * self.seq_len
            }
            _ if self.split => place * group.seq_len,
            _ => group.tokens_before(place),
        }
    }

    /// The window, and the offset in it, at which sample `ordinal` of this part begins.
    fn begins(&self, group: &Group, ordinal: u64) -> (u64, u64) {
        let at = self.origin + ordinal * self.seq_len;
        if !self.split {
            return group.place_of_token(at);
        }
        let at = match group.short {
            Some((short, padding)) => {
                let missing = self.missing(padding) * self.seq_len;
                if at >= (short + 1) * group.seq_len - missing { at + missing } else { at }
            }
            None => at,
        };
        (at / group.seq_len, at % group.seq_len)
    }

    /// The text of sample `ordinal` of this part.
    pub(crate) fn text(&self, group: &Group, ordinal: u64) -> Vec<Span> {
        if self.split {
            let (place, inside) = self.begins(group, ordinal);
            let window = group.window(place);
            let tokens = self.seq_len.min(u64::from(window.tokens) - inside);
            return vec![Span::new(window.start + inside, tokens)];
        }
        let from = self.origin + ordinal * self.seq_len;
        group.text(from, group.tokens.min(from + self.seq_len))
    }

    /// What is left after the segment's first `samples` samples; `None` if nothing is.
    pub(crate) fn after(&self, group: &Group, samples: u64) -> Option<Remainder> {
        let taken = self.taken(samples);
        if taken == self.samples {
            return None;
        }
        let (served, offset) = self.begins(group, taken);
        Some(Remainder { served, offset, ..self.left })
    }

    /// The composition of its sequences among the segment's first `samples`.
    pub(crate) fn composition(&self, group: &Group, samples: u64) -> Composition {
        let taken = self.taken(samples);
        if self.split {
            let short = group.short.filter(|(_, padding)| !padding.is_multiple_of(self.seq_len));
            let padded = short.is_some_and(|(place, _)| {
                let last = self.coordinate(group, place + 1);
                (self.origin + 1..=self.origin + taken * self.seq_len).contains(&last)
            });
            return Composition::of(taken, 0, u64::from(padded));
        }
        let tokens = group.tokens - self.origin;
        let full = taken.min(tokens / self.seq_len);
        Composition::of(taken, self.joined(group, full), taken - full)
    }

    /// How many of the first `full` sequences contain a joint. Counts joints: each is inside one sequence or between
    /// two.
    fn joined(&self, group: &Group, full: u64) -> u64 {
        if full == 0 || self.seq_len > group.seq_len {
            // Longer than any window: every sequence has a joint.
            return full;
        }
        let end = self.origin + full * self.seq_len;
        // Joints below `end` are the starts of windows, from the second on.
        let first = self.left.served + 1;
        let (last, inside) = group.place_of_token(end);
        let last = (if inside == 0 { last } else { last + 1 }).max(first);
        // Before and after the short window, joints are equally spaced.
        let behind = group.short.map_or(last, |(short, _)| (short + 1).clamp(first, last));
        let inside = |from: u64, to: u64| {
            let at = group.tokens_before(from) - self.origin;
            (to - from) - multiples(at, group.seq_len, to - from, self.seq_len)
        };
        let joints = inside(first, behind) + inside(behind, last);
        joints - self.twice(group, first..last)
    }

    /// 1 if both ends of the short window are inside the same sequence (its two joints count once).
    fn twice(&self, group: &Group, joints: std::ops::Range<u64>) -> u64 {
        let Some((short, _)) = group.short else { return 0 };
        if !joints.contains(&short) || !joints.contains(&(short + 1)) {
            return 0;
        }
        let at = |place: u64| group.tokens_before(place) - self.origin;
        let (from, to) = (at(short), at(short + 1));
        let inside = |at: u64| !at.is_multiple_of(self.seq_len);
        u64::from(inside(from) && inside(to) && from / self.seq_len == to / self.seq_len)
    }
}

/// How many of `from`, `from + stride`, ... (`count` terms) are multiples of `of`. Multiples repeat with a period of at
/// most `of` terms.
fn multiples(from: u64, stride: u64, count: u64, of: u64) -> u64 {
    let period = of / contract::ratio::gcd(stride, of);
    match (0..period.min(count)).find(|i| (from + i * stride).is_multiple_of(of)) {
        Some(first) => (count - 1 - first) / period + 1,
        None => 0,
    }
}
