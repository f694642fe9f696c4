//! Weights that change from sample to sample: a balanced tree whose nodes divide integrals.
//!
//! A ramp of `n` samples is a curve `c` from one mix to another: at position `t` a set `S` of sources weighs
//! `(1 - c(t)) from(S) + c(t) to(S)`, where both mixes sum to `T`. `K(u)` is the integral of `c` over the first `u`
//! samples, rounded down to a multiple of 2^-32. With `D = 2^32 T`, the first `u` samples owe `S` the integer
//! `F_S(u) = from(S) (2^32 u - 2^32 K(u)) + to(S) 2^32 K(u)` in units of a `D`-th of a sample: an integral in closed
//! form, at most 2^-32 of a sample from that of the real curve whatever the length.
//!
//! Between integers `F_S` is continued in straight lines. A node that covers `S` has its own clock: its sample `m` is
//! served at the time `u` with `F_S(u) = m D`. Of its first `m` samples it sends `F_L(u) / D` to its left child `L`,
//! rounded to nearest. `F_L` grows by at most as much as `F_S`, so this grows by at most one a sample: each count is
//! monotone and has an inverse. At the root, sample and time are one number.
//!
//! **Bound.** A count that is `e` from its integral sets the clock wrong by at most `e` samples of the node, which
//! moves the child's integral by at most `e`; rounding adds 1/2. So a source at depth `d` stays within `d / 2` of its
//! integral at every prefix. The depth is the logarithm of the number of sources, rounded up: 5 samples for 1,000
//! sources.

use std::ops::Range;

use curriculum::RAMP_ONE;

/// A mix that changes over `samples` samples. Sources are numbered in the order in which their weights were given.
#[derive(Clone, Debug)]
pub(crate) struct RampTree {
    /// For each source and after the last: the sum of the weights before it, at the curve's 0 and at its 1.
    sums: Vec<[u64; 2]>,
    samples: u64,
    /// The curve, at equal distances from the first sample to the last.
    knots: Vec<u64>,
    /// For each knot: twice the sum of the trapezoids before it, each one knot wide.
    areas: Vec<u64>,
}

impl RampTree {
    /// The ramp between two lists of weights with one sum, along `knots`, whose unit is [`RAMP_ONE`].
    pub(crate) fn new([from, to]: [&[u64]; 2], knots: &[u64], samples: u64) -> Self {
        let mut sums = vec![[0, 0]];
        for (from, to) in from.iter().zip(to) {
            let [low, high] = sums[sums.len() - 1];
            sums.push([low + from, high + to]);
        }
        let mut areas = vec![0];
        for pair in knots.windows(2) {
            areas.push(areas[areas.len() - 1] + pair[0] + pair[1]);
        }
        RampTree { sums, samples, knots: knots.to_vec(), areas }
    }

    /// The number of sources.
    fn sources(&self) -> usize {
        self.sums.len() - 1
    }

    /// One sample, in the units of [`Self::due`].
    fn one(&self) -> u128 {
        u128::from(RAMP_ONE) * u128::from(self.sums[self.sources()][0])
    }

    /// The curve's integral over the first `u` samples.
    fn turned(&self, u: u64) -> u128 {
        let (pieces, samples) = (self.knots.len() as u64 - 1, u128::from(self.samples));
        let at = u128::from(u) * u128::from(pieces);
        let (knot, inside) = ((at / samples) as usize, at % samples);
        let (low, area) = (u128::from(self.knots[knot]), u128::from(self.areas[knot]));
        let straight = samples * area + 2 * low * inside;
        let bend = match self.knots.get(knot + 1) {
            // At a knot, the last one included, nothing is inside.
            None => 0,
            Some(high) => {
                let rise = i128::from(*high) - low as i128;
                (rise * (inside * inside) as i128).div_euclid(samples as i128)
            }
        };
        (straight as i128 + bend) as u128 / (2 * u128::from(pieces))
    }

    /// What the first `u` samples owe sources `set`.
    fn due(&self, set: &Range<usize>, u: u64) -> u128 {
        let [first, last] = [self.sums[set.start], self.sums[set.end]];
        let (from, to) = (u128::from(last[0] - first[0]), u128::from(last[1] - first[1]));
        let turned = self.turned(u);
        from * (u128::from(u) * u128::from(RAMP_ONE) - turned) + to * turned
    }

    /// The last time at which `set` is owed at most `due`; searched from `near` outwards.
    fn last_time(&self, set: &Range<usize>, due: u128, near: u64) -> u64 {
        let reached = |u: u64| u <= self.samples && self.due(set, u) <= due;
        let (mut low, mut high, mut stride) = (near, near, 1);
        if reached(near) {
            loop {
                high = low + stride;
                if !reached(high) {
                    break;
                }
                (low, stride) = (high, 2 * stride);
            }
        } else {
            loop {
                low = high.saturating_sub(stride);
                if reached(low) {
                    break;
                }
                (high, stride) = (low, 2 * stride);
            }
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if reached(middle) { low = middle } else { high = middle }
        }
        low
    }

    /// How many of the first `m` samples of a node go left; its sample `m` is served near time `near`.
    fn left(&self, node: &Range<usize>, m: u64, near: u64) -> u64 {
        let (one, left) = (self.one(), node.start..middle(node));
        let clock = u128::from(m) * one;
        let u = self.last_time(node, clock, near);
        let (due, served) = (self.due(&left, u), self.due(node, u));
        let more = clock - served;
        if u == self.samples {
            // Counts may be ahead of their integrals when the ramp ends: both children then get half of the rest.
            return ((2 * due + more + one) / (2 * one)) as u64;
        }
        let whole = (2 * due + one) / (2 * one);
        let lacking = (2 * whole + 1) * one - 2 * due;
        let (share, of) = (self.due(&left, u + 1) - due, self.due(node, u + 1) - served);
        whole as u64 + u64::from(wide(2 * share, more) >= wide(lacking, of))
    }

    /// The source of sample `j`, and how many samples of that source precede it.
    pub(crate) fn pick(&self, j: u64) -> (usize, u64) {
        let (mut node, mut ordinal) = (0..self.sources(), j);
        while node.len() > 1 {
            let before = self.left(&node, ordinal, j);
            if self.left(&node, ordinal + 1, j) > before {
                (node.end, ordinal) = (middle(&node), before);
            } else {
                (node.start, ordinal) = (middle(&node), ordinal - before);
            }
        }
        (node.start, ordinal)
    }

    /// How many of the first `n` samples come from `source`.
    pub(crate) fn count(&self, source: usize, n: u64) -> u64 {
        let (mut node, mut count) = (0..self.sources(), n);
        while node.len() > 1 {
            let left = self.left(&node, count, n);
            if source < middle(&node) {
                (node.end, count) = (middle(&node), left);
            } else {
                (node.start, count) = (middle(&node), count - left);
            }
        }
        count
    }

    /// [`Self::count`] of every source.
    pub(crate) fn counts(&self, n: u64) -> Vec<u64> {
        let mut counts = vec![0; self.sources()];
        let mut open = vec![(0..self.sources(), n)];
        while let Some((node, count)) = open.pop() {
            if node.len() == 1 {
                counts[node.start] = count;
                continue;
            }
            let left = self.left(&node, count, n);
            open.push((node.start..middle(&node), left));
            open.push((middle(&node)..node.end, count - left));
        }
        counts
    }

    /// The sample that is number `ordinal` of `source`, which must have that many: the inverse of [`Self::pick`].
    pub(crate) fn nth(&self, source: usize, ordinal: u64) -> u64 {
        let (mut node, mut path) = (0..self.sources(), Vec::new());
        while node.len() > 1 {
            path.push(node.clone());
            match source < middle(&node) {
                true => node.end = middle(&node),
                false => node.start = middle(&node),
            }
        }
        let (mut ordinal, mut near) = (ordinal, self.samples / 2);
        while let Some(node) = path.pop() {
            (ordinal, near) = self.join(&node, source, ordinal, near);
        }
        ordinal
    }

    /// The number among a node's samples of sample `k` of its child that covers `source`, and a time near it.
    fn join(&self, node: &Range<usize>, source: usize, k: u64, near: u64) -> (u64, u64) {
        let is_left = source < middle(node);
        let child = if is_left { node.start..middle(node) } else { middle(node)..node.end };
        let one = self.one();
        // A half is rounded up on the left, and so down on the right.
        let before = u128::from(k) * one + one / 2 - u128::from(is_left);
        let near = self.last_time(&child, before, near);
        // What has been served by then holds at most `k` of the child: its sample `k` is this one or one of the next.
        let mut sample = (self.due(node, near) / one) as u64;
        let count = |m: u64| {
            let left = self.left(node, m, near);
            if is_left { left } else { m - left }
        };
        while count(sample + 1) <= k {
            sample += 1;
        }
        (sample, near)
    }
}

/// Where a node's children meet.
fn middle(node: &Range<usize>) -> usize {
    node.start + node.len() / 2
}

/// The product of two numbers in 256 bits, as high and low half.
fn wide(a: u128, b: u128) -> (u128, u128) {
    const LOW: u128 = u64::MAX as u128;
    let (high_a, low_a, high_b, low_b) = (a >> 64, a & LOW, b >> 64, b & LOW);
    let (low, cross, other) = (low_a * low_b, high_a * low_b, low_a * high_b);
    let carry = (low >> 64) + (cross & LOW) + (other & LOW);
    let high = high_a * high_b + (cross >> 64) + (other >> 64) + (carry >> 64);
    (high, (carry << 64) | (low & LOW))
}
