//! A ramp is exact at every prefix, its queries agree, and its length changes nothing about that.

use mixer::MixWeights;
use mixer::mixing::Mixing;
use proptest::prelude::*;

use crate::naive::{NaiveRamp, integral};

/// The whole way of a curve.
const ONE: u64 = 1 << 32;

/// Weights at the two ends of a ramp, with one sum, and a curve.
#[derive(Clone, Debug)]
struct Drawn {
    from: Vec<u64>,
    to: Vec<u64>,
    knots: Vec<u64>,
}

impl Drawn {
    fn mixing(&self, samples: u64) -> Mixing {
        let Drawn { from, to, knots } = self.clone();
        Mixing::new(&MixWeights::Ramp { from, to, knots }, samples)
    }

    fn total(&self) -> u128 {
        u128::from(self.from.iter().sum::<u64>())
    }

    /// The bound of the proof, twice: the depth of the tree.
    fn depth(&self) -> u128 {
        u128::from(self.from.len().next_power_of_two().trailing_zeros())
    }
}

/// A weight: often zero, one in a million, or anything.
fn weight() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0u64), 2 => Just(1u64), 1 => Just(1_000_000u64), 4 => 1u64..1000]
}

fn knots() -> impl Strategy<Value = Vec<u64>> {
    let cosine = |at: u64| {
        ((1.0 - (std::f64::consts::PI * at as f64 / 64.0).cos()) / 2.0 * ONE as f64) as u64
    };
    let any = prop_oneof![Just(0u64), Just(ONE), 0..=ONE];
    prop_oneof![
        Just(vec![0, ONE]),
        Just((0..=64).map(cosine).collect()),
        prop::collection::vec(any, 2..9),
    ]
}

/// Ramps between `sources` weights and the same number of others.
fn drawn(sources: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Drawn> {
    let both = prop::collection::vec((weight(), weight()), sources);
    (both, knots()).prop_map(|(both, knots)| {
        let (mut from, mut to): (Vec<u64>, Vec<u64>) = both.into_iter().unzip();
        let (low, high) = (from.iter().sum::<u64>(), to.iter().sum::<u64>());
        from[0] += high.saturating_sub(low) + 1;
        to[0] += low.saturating_sub(high) + 1;
        Drawn { from, to, knots }
    })
}

/// Checks every guarantee for each of the first `walked` samples of a ramp over `samples`; returns the worst deviation
/// in hundredths of a sample.
fn walk(drawn: &Drawn, samples: u64, walked: u64) -> Result<u128, TestCaseError> {
    let Drawn { from, to, knots } = drawn;
    let mixing = drawn.mixing(samples);
    let mut naive = NaiveRamp::new([from, to], knots, samples);
    let (turned, mut given, mut worst) = (integral(knots, samples), vec![0u64; from.len()], 0);
    // One sample, in units in which the integral of the real curve is whole.
    let one = (2 * (knots.len() as u128 - 1) * u128::from(samples)) << 32;
    for j in 0..walked {
        let (source, ordinal) = mixing.pick(j);
        prop_assert_eq!(source, naive.next(), "sample {}", j);
        prop_assert_eq!(ordinal, given[source], "sample {} skips or repeats", j);
        prop_assert_eq!(mixing.nth(source, ordinal), j);
        given[source] += 1;
        let (n, way) = (u128::from(j) + 1, turned[j as usize + 1]);
        for (source, &count) in given.iter().enumerate() {
            let [low, high] = [from[source], to[source]].map(u128::from);
            let due = low * (n * one - way) + high * way;
            let off = (u128::from(count) * drawn.total() * one).abs_diff(due);
            let allowed = drawn.depth() * drawn.total() * one / 2 + ((drawn.total() * one) >> 32);
            prop_assert!(off <= allowed, "source {} of {}, sample {}", source, from.len(), j);
            worst = worst.max(100 * off / (drawn.total() * one));
        }
    }
    prop_assert_eq!(mixing.counts(walked), given.clone());
    for (source, &count) in given.iter().enumerate() {
        prop_assert_eq!(mixing.count(source, walked), count);
    }
    Ok(worst)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_prefix_is_exact(drawn in drawn(1..24), samples in 1u64..160) {
        walk(&drawn, samples, samples)?;
    }

    /// Wherever it is asked in a ramp of any length, and for weights that fill 128 bits.
    #[test]
    fn far_away_is_as_exact(
        drawn in drawn(1..40), (factor, length) in prop_oneof![
            Just((1u64, 1u64 << 46)), Just((1 << 20, 10_000_000_000_000)), Just((1 << 35, 1000)), Just((3, 1 << 40))
        ], at in any::<prop::sample::Index>(),
    ) {
        let scaled = |weights: &[u64]| weights.iter().map(|weight| weight * factor).collect();
        let Drawn { from, to, knots } = drawn;
        let drawn = Drawn { from: scaled(&from), to: scaled(&to), knots };
        let (mixing, j) = (drawn.mixing(length), at.index(length as usize) as u64);
        let (source, ordinal) = mixing.pick(j);
        prop_assert_eq!(mixing.nth(source, ordinal), j);
        let (before, after) = (mixing.counts(j), mixing.counts(j + 1));
        prop_assert_eq!(after.iter().sum::<u64>(), j + 1);
        for entry in 0..before.len() {
            prop_assert_eq!(before[entry] + u64::from(entry == source), after[entry]);
            prop_assert_eq!(mixing.count(entry, j), before[entry]);
        }
        prop_assert_eq!(before[source], ordinal);
    }

    /// The integral of a straight line at any point of 10^13 samples.
    #[test]
    fn no_length_adds_a_deviation(drawn in drawn(2..60), at in 0u64..=10_000_000_000_000) {
        const SAMPLES: u128 = 10_000_000_000_000;
        let drawn = Drawn { knots: vec![0, ONE], ..drawn };
        let counts = drawn.mixing(SAMPLES as u64).counts(at);
        let one = 2 * SAMPLES * drawn.total();
        for (source, count) in counts.into_iter().enumerate() {
            let [low, high] = [drawn.from[source], drawn.to[source]].map(u128::from);
            let u = u128::from(at);
            let due = low * u * (2 * SAMPLES - u) + high * u * u;
            let allowed = drawn.depth() * one / 2 + (one >> 32);
            prop_assert!((u128::from(count) * one).abs_diff(due) <= allowed, "source {}", source);
        }
    }
}

#[test]
fn a_thousand_sources_stay_exact() {
    let from: Vec<u64> = (0..1000).map(|i| i * i % 977).collect();
    let to = from.iter().rev().copied().collect();
    let worst = walk(&Drawn { from, to, knots: vec![0, ONE] }, 3000, 900).unwrap();
    assert!((60..=501).contains(&worst), "{worst} hundredths: the measure is alive");
}

/// A source of one in a million that fades in is due once a million samples on average.
#[test]
fn one_in_a_million_is_served() {
    let (from, to) = (vec![0, 1_000_000], vec![1, 999_999]);
    let mixing = Drawn { from, to, knots: vec![0, ONE] }.mixing(20_000_000);
    assert_eq!(mixing.counts(20_000_000), [10, 19_999_990]);
    let places: Vec<u64> = (0..10).map(|ordinal| mixing.nth(0, ordinal)).collect();
    // The k-th half is due where the square of the position is (2k + 1) x 20 x 10^12.
    for (k, place) in places.into_iter().enumerate() {
        let real = ((2 * k + 1) as f64 * 20e12).sqrt();
        assert!((place as f64 - real).abs() <= 1.0, "{place} for {real}");
    }
}
