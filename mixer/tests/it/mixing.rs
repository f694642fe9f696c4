//! Mixing is exact at every prefix, its queries agree, and no weight is too small to count.

use mixer::MixWeights;
use mixer::mixing::{Mixing, WEIGHT_MAX};
use proptest::prelude::*;

/// A mix of constant weights.
fn constant(weights: &[u64]) -> Mixing {
    Mixing::new(&MixWeights::Constant(weights.to_vec()), 1)
}

/// A count's distance from weight x samples, in hundredths of a sample, rounded up.
fn deviation(mixing: &Mixing, source: usize, n: u64, count: u64) -> u128 {
    let MixWeights::Constant(weights) = mixing.weights() else { panic!("a ramp") };
    let total: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
    let due = u128::from(n) * u128::from(weights[source]);
    (u128::from(count) * total).abs_diff(due).saturating_mul(100).div_ceil(total)
}

/// Checks every guarantee for each of the first `samples` samples.
fn walk(weights: &[u64], samples: u64) -> Result<u128, TestCaseError> {
    let mixing = constant(weights);
    let mut given = vec![0u64; weights.len()];
    let mut worst = 0;
    for j in 0..samples {
        let (source, ordinal) = mixing.pick(j);
        prop_assert_eq!(ordinal, given[source], "sample {} skips or repeats", j);
        prop_assert_eq!(mixing.nth(source, ordinal), j);
        given[source] += 1;
        for (source, &count) in given.iter().enumerate() {
            worst = worst.max(deviation(&mixing, source, j + 1, count));
        }
    }
    prop_assert_eq!(mixing.counts(samples), given.clone());
    for (source, &count) in given.iter().enumerate() {
        prop_assert_eq!(mixing.count(source, samples), count);
    }
    // The proof in `mixing.rs` allows 1.68; the contract allows 2.
    prop_assert!(worst <= 168, "a count is {} hundredths off", worst);
    Ok(worst)
}

/// Weights as people and programs write them: equal, decimal, powers, and one in a million.
fn weights() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        prop::collection::vec(1u64..10, 1..60),
        prop::collection::vec(1u64..1_000_000, 1..40),
        prop::collection::vec((0u32..40).prop_map(|power| 1 << power), 1..30),
        prop::collection::vec(prop_oneof![Just(1u64), Just(1_000_000)], 1..20),
        (1usize..60).prop_map(|depth| (0..depth).map(|i| 1 << i).collect()),
        (1usize..80).prop_map(fibonacci),
    ]
}

fn fibonacci(length: usize) -> Vec<u64> {
    let pair = |state: &mut (u64, u64)| {
        *state = (state.1, state.0 + state.1);
        Some(state.0)
    };
    (0..length).scan((0, 1), |state, _| pair(state)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_prefix_is_exact(weights in weights(), samples in 1u64..3000) {
        walk(&weights, samples)?;
    }

    #[test]
    fn far_away_is_as_exact(weights in weights(), j in 0u64..1 << 62) {
        let mixing = constant(&weights);
        let (source, ordinal) = mixing.pick(j);
        prop_assert_eq!(mixing.nth(source, ordinal), j);
        let (before, after) = (mixing.counts(j), mixing.counts(j + 1));
        prop_assert_eq!(after.iter().sum::<u64>(), j + 1);
        for entry in 0..weights.len() {
            prop_assert_eq!(before[entry] + u64::from(entry == source), after[entry]);
            prop_assert!(deviation(&mixing, entry, j, before[entry]) <= 168);
        }
        prop_assert_eq!(before[source], ordinal);
    }
}

#[test]
fn one_in_a_million_is_served_once_in_a_million() {
    let mixing = constant(&[1, 999_999]);
    let first = mixing.nth(0, 0);
    assert!(first < 1_000_000);
    for k in 0..100 {
        assert_eq!(mixing.nth(0, k), first + k * 1_000_000);
    }
}

#[test]
fn the_largest_weights_do_not_overflow() {
    let mixing = constant(&[WEIGHT_MAX - 1, 1]);
    let j = (1 << 62) - 1;
    let (source, ordinal) = mixing.pick(j);
    assert_eq!(mixing.nth(source, ordinal), j);
    assert_eq!(mixing.counts(j).iter().sum::<u64>(), j);
}

#[test]
fn a_thousand_sources_stay_exact() {
    let weights: Vec<u64> = (0..1000).map(|i| 1 + i * i).collect();
    walk(&weights, 4000).unwrap();
}

#[test]
fn the_measure_sees_a_wrong_count() {
    // What two truncations in a row, instead of rounding, would give a source of weight 1/4 after 7 samples.
    let mixing = constant(&[1, 1, 1, 1]);
    assert!(deviation(&mixing, 0, 7, 1) <= 168);
    assert!(deviation(&mixing, 0, 7, 4) > 168);
    assert!(deviation(&mixing, 0, 12, 1) > 168);
}
