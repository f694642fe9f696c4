//! A ramp in the most obvious way: the integral added up in tiny steps, lists of what is due, and counters that are
//! moved on sample by sample.

/// The integral of a curve over the first `u` samples for each `u`, exactly: in units of `1 / (2 x pieces x samples)`
/// of a knot's unit.
pub(crate) fn integral(knots: &[u64], samples: u64) -> Vec<u128> {
    let (n, pieces) = (u128::from(samples), knots.len() as u128 - 1);
    let height = |at: u128| {
        let (knot, inside) = ((at / n) as usize, at % n);
        let next = u128::from(*knots.get(knot + 1).unwrap_or(&0));
        u128::from(knots[knot]) * (n - inside) + next * inside
    };
    let mut sums = vec![0];
    for at in 0..pieces * n {
        sums.push(sums[at as usize] + height(at) + height(at + 1));
    }
    sums.into_iter().step_by(pieces as usize).collect()
}

/// A node of the tree.
pub(crate) enum NaiveRamp {
    Source(usize),
    Node {
        children: Box<[NaiveRamp; 2]>,
        /// What the first samples owe the node, and its left child.
        due: Vec<u128>,
        due_left: Vec<u128>,
        one: u128,
        time: usize,
        sent: u128,
        sent_left: u128,
    },
}

impl NaiveRamp {
    /// The tree of all sources; the sums of both lists are equal, and small.
    pub(crate) fn new([from, to]: [&[u64]; 2], knots: &[u64], samples: u64) -> Self {
        let parts = 2 * (knots.len() as u128 - 1) * u128::from(samples);
        let turned: Vec<u128> = integral(knots, samples).iter().map(|sum| sum / parts).collect();
        NaiveRamp::node([from, to], &turned, 0..from.len())
    }

    fn node(weights: [&[u64]; 2], turned: &[u128], set: std::ops::Range<usize>) -> Self {
        if set.len() == 1 {
            return NaiveRamp::Source(set.start);
        }
        let middle = set.start + set.len() / 2;
        let due = |set: std::ops::Range<usize>| -> Vec<u128> {
            let [from, to] = weights.map(|all| all[set.clone()].iter().sum::<u64>());
            let owed = |(u, turned): (usize, &u128)| {
                u128::from(from) * (((u as u128) << 32) - turned) + u128::from(to) * turned
            };
            turned.iter().enumerate().map(owed).collect()
        };
        NaiveRamp::Node {
            due: due(set.clone()),
            due_left: due(set.start..middle),
            one: u128::from(weights[0].iter().sum::<u64>()) << 32,
            children: Box::new([
                NaiveRamp::node(weights, turned, set.start..middle),
                NaiveRamp::node(weights, turned, middle..set.end),
            ]),
            time: 0,
            sent: 0,
            sent_left: 0,
        }
    }

    /// The source of the next sample.
    pub(crate) fn next(&mut self) -> usize {
        match self {
            NaiveRamp::Source(source) => *source,
            NaiveRamp::Node { children, due, due_left, one, time, sent, sent_left } => {
                *sent += 1;
                let clock = *sent * *one;
                while due.get(*time + 1).is_some_and(|due| *due <= clock) {
                    *time += 1;
                }
                let (whole, rest) = (due_left[*time] / *one, due_left[*time] % *one);
                // The part of a sample that the left child is due beyond `whole`, as a fraction of `2 one`.
                let (over, under) = match due.get(*time + 1) {
                    Some(next) => {
                        let (step, more) = (next - due[*time], clock - due[*time]);
                        let left = due_left[*time + 1] - due_left[*time];
                        (2 * rest * step + 2 * left * more + *one * step, 2 * *one * step)
                    }
                    None => (2 * rest + (clock - due[*time]) + *one, 2 * *one),
                };
                let wanted = whole + over / under;
                assert!(wanted == *sent_left || wanted == *sent_left + 1, "two at once");
                if wanted > *sent_left {
                    *sent_left += 1;
                    children[0].next()
                } else {
                    children[1].next()
                }
            }
        }
    }
}
