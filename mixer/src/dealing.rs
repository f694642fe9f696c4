//! How the samples of a source are dealt to its buckets: exact shares from the sizes of the buckets and a curve.
//!
//! A truncated power curve gives the text at rank x, from 0 to 1 over the tokens of all buckets, `C (x - drop)^power`
//! epochs. With `A(x) = (x - drop)^(power + 1)` above `drop`, a bucket from u to v has `C (A(v) - A(u))` tokens, a
//! rational number times C, and at most `cap` times its own. C is the number at which all buckets together have the
//! tokens asked for: as long as the same buckets are at the cap they are linear in C, so each such set of buckets gives
//! one candidate, and one of them is consistent. Whole numbers of any size compute them exactly. Only the shares are
//! rounded, to a billionth of the source: far finer than a mix of samples can be.

use std::borrow::Cow;
use std::collections::BTreeMap;

use contract::{Fault, Ratio, Result};
use curriculum::{BucketCurve, Buckets, Curriculum, PowerCurve};
use num_bigint::BigUint;

use crate::sample::{SourceFacts, names};

/// The parts into which a source is dealt. One denominator for all sources, so that weights of a mix stay small.
pub(crate) const PARTS: u64 = 1_000_000_000;

/// The curriculum with the buckets in place of the sources that they are cut from.
pub(crate) fn dealt<'a>(
    curriculum: &'a Curriculum,
    facts: &[SourceFacts],
) -> Result<Cow<'a, Curriculum>> {
    let mut deals = BTreeMap::new();
    for (source, buckets) in curriculum.bucketed() {
        let mut sizes = Vec::with_capacity(buckets.count());
        for bucket in buckets.all() {
            let name = format!("{source}/{bucket}");
            let Some(found) = facts.iter().find(|facts| facts.name == name) else {
                return Err(missing(curriculum, source, &name, facts));
            };
            sizes.push((name, found.tokens));
        }
        let mixed = |segment: &curriculum::PhaseSegment| segment.spec.mix.has(source);
        if !curriculum.segments().iter().any(mixed) {
            continue; // Mixes name its buckets, or nothing reads it.
        }
        let tokens: Vec<u64> = sizes.iter().map(|(_, tokens)| *tokens).collect();
        let place = || curriculum.place(&format!("source.{source}.curve"));
        let shares = shares(buckets, &tokens, || taken(curriculum, source))
            .map_err(|fault| fault.or_at(place))?;
        let named = sizes.into_iter().map(|(name, _)| name);
        deals.insert(source.clone(), named.zip(shares).collect());
    }
    Ok(match deals.is_empty() {
        true => Cow::Borrowed(curriculum),
        false => Cow::Owned(curriculum.dealt(&deals)?),
    })
}

fn missing(curriculum: &Curriculum, source: &str, name: &str, facts: &[SourceFacts]) -> Fault {
    if !names(facts).any(|one| one == source) {
        // A bucket that is missing among others says more than that its source is cut.
        let cut = |one: &str| one != source && curriculum.whole(one) == source;
        let lost = if names(facts).any(cut) { name } else { source };
        return crate::unknown(lost, names(facts))
            .at(curriculum.place(&format!("source.{source}")));
    }
    Fault::usage(format!("source {source:?} is cut into buckets, which needs its documents"))
        .at(curriculum.place(&format!("source.{source}.buckets")))
        .found("a store stub")
        .wanted(format!("a store, or a stub with a [[source]] for each bucket, such as {name:?}"))
}

/// Tokens that the run takes from a source whose buckets are not dealt yet, padding included.
fn taken(curriculum: &Curriculum, source: &str) -> Result<u64> {
    let segments = curriculum.segments();
    let tokens = segments.iter().map(|segment| {
        let weights = segment.spec.mix.exact_weights();
        let weights = weights.map_err(|fault| fault.at(curriculum.place(&segment.mix_key)))?;
        let samples = segment.spec.steps * segment.batch;
        let mixing = crate::mixing::Mixing::new(&weights, segment.mix_samples);
        let mixing = mixing.after(segment.mix_before);
        let at = segment.spec.mix.sources().into_iter().position(|name| name == source);
        Ok(at.map_or(0, |at| mixing.count(at, samples) * u64::from(segment.spec.seq_len)))
    });
    tokens.sum()
}

/// The share of each bucket (in the order of [`Buckets::all`]) of the samples that a mix gives their source; `taken`
/// are the tokens that the run takes from it.
fn shares(buckets: &Buckets, sizes: &[u64], taken: impl Fn() -> Result<u64>) -> Result<Vec<Ratio>> {
    let named = buckets.names.len();
    match &buckets.curve {
        BucketCurve::Even => {
            if sizes.iter().all(|size| *size == 0) {
                return Err(Fault::usage("no bucket of the source has text to train on"));
            }
            Ok(rounded(&sizes.iter().map(|size| BigUint::from(*size)).collect::<Vec<_>>()))
        }
        BucketCurve::Weights(weights) => {
            let den = weights.iter().fold(BigUint::from(1u32), |all, one| all * one.den());
            let of = |weight: &Ratio| &den / weight.den() * weight.num();
            let mut masses: Vec<BigUint> = weights.iter().map(of).collect();
            masses.resize(sizes.len(), BigUint::ZERO);
            let with_text = masses.iter().zip(sizes);
            let bare =
                with_text.clone().position(|(mass, size)| *mass > BigUint::ZERO && *size == 0);
            if let Some(bare) = bare {
                let name = buckets.all().nth(bare).unwrap_or_default();
                return Err(Fault::usage(format!("bucket {name:?} has no text to train on"))
                    .found(buckets.meaning(bare))
                    .hint("give it the weight 0"));
            }
            Ok(rounded(&masses))
        }
        BucketCurve::Power(curve) => {
            if curve.tokens == 0 {
                return Err(Fault::usage("the curve is not solved for any number of tokens")
                    .wanted(format!(
                        "tokens = {}, which this run takes from the source",
                        taken()?
                    ))
                    .hint("the number is written down, so that a phase planned later changes no earlier step"));
            }
            let mut masses = power_masses(curve, &sizes[..named])?;
            masses.resize(sizes.len(), BigUint::ZERO);
            Ok(rounded(&masses))
        }
    }
}

/// The tokens of each bucket under a truncated power curve, times a common factor.
fn power_masses(curve: &PowerCurve, sizes: &[u64]) -> Result<Vec<BigUint>> {
    let PowerCurve { power, cap, drop, tokens } = *curve;
    let total: u128 = sizes.iter().map(|size| u128::from(*size)).sum();
    // The rank after so many tokens, less the dropped share, in units of 1 / (total x the denominator of `drop`).
    let above = |before: u128| {
        let (rank, dropped) =
            (BigUint::from(before) * drop.den(), BigUint::from(total) * drop.num());
        if rank > dropped { (rank - dropped).pow(power + 1) } else { BigUint::ZERO }
    };
    let mut end = 0;
    let areas: Vec<BigUint> = sizes
        .iter()
        .map(|size| {
            let start = above(end);
            end += u128::from(*size);
            above(end) - start
        })
        .collect();
    // The best buckets reach the cap first: the curve does not fall.
    let read = |at: &usize| areas[*at] > BigUint::ZERO;
    let order: Vec<usize> = (0..sizes.len()).rev().filter(read).collect();
    let mut left = BigUint::from(tokens);
    for (done, best) in order.iter().enumerate() {
        let rest: BigUint = order[done..].iter().map(|at| &areas[*at]).sum();
        let most = BigUint::from(cap) * sizes[*best];
        // Its tokens are `left / rest` times its area, if none of these is at the cap.
        if &left * &areas[*best] <= &most * &rest {
            let mass = |at: usize| match order[..done].contains(&at) {
                true => BigUint::from(cap) * sizes[at] * &rest,
                false => &left * &areas[at],
            };
            return Ok((0..sizes.len()).map(mass).collect());
        }
        left -= most;
    }
    let most: BigUint = order.iter().map(|at| BigUint::from(cap) * sizes[*at]).sum();
    Err(Fault::usage("the curve cannot give so many tokens")
        .found(format!("tokens = {tokens}"))
        .wanted(format!("at most {most}: {cap} times all buckets above `drop`"))
        .hint("raise `cap`, drop less, or give the source less weight or fewer steps"))
}

/// Shares in proportion to these masses, of which one is above zero: whole numbers of parts that sum to all of them.
/// Each is rounded down, and those that lose most get one part more.
fn rounded(masses: &[BigUint]) -> Vec<Ratio> {
    let total: BigUint = masses.iter().sum();
    let scaled = || masses.iter().map(|mass| mass * PARTS);
    let parts = scaled().map(|mass| u64::try_from(mass / &total).unwrap_or(PARTS));
    let mut parts: Vec<u64> = parts.collect();
    let lost: Vec<BigUint> = scaled().map(|mass| mass % &total).collect();
    let mut order: Vec<usize> = (0..masses.len()).collect();
    order.sort_by(|a, b| lost[*b].cmp(&lost[*a]).then(a.cmp(b)));
    let missing = PARTS - parts.iter().sum::<u64>();
    for at in order.into_iter().take(missing as usize) {
        parts[at] += 1;
    }
    parts.into_iter().map(|part| Ratio::new(part, PARTS)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Epochs of each bucket by brute force in floats: the curve in small steps, its factor by bisection.
    fn naive(curve: &PowerCurve, sizes: &[u64]) -> Vec<f64> {
        const STEPS: u32 = 2000;
        let total: f64 = sizes.iter().sum::<u64>() as f64;
        let drop = curve.drop.num() as f64 / curve.drop.den() as f64;
        let mut before = 0.0;
        let mut rates = Vec::new();
        for size in sizes {
            // Below `drop` the curve is 0: steps that begin there have no jump inside.
            let (start, end) = (before / total, (before + *size as f64) / total);
            let start = start.max(drop);
            let width = (end - start).max(0.0) / f64::from(STEPS);
            let at =
                |step| (start - drop + width * (f64::from(step) + 0.5)).powi(curve.power as i32);
            rates.push((0..STEPS).map(at).sum::<f64>() * width * total / *size as f64);
            before += *size as f64;
        }
        let epochs = |factor: f64| -> Vec<f64> {
            rates.iter().map(|rate| (factor * rate).min(curve.cap as f64)).collect()
        };
        let tokens = |factor: f64| -> f64 {
            epochs(factor).iter().zip(sizes).map(|(epochs, size)| epochs * *size as f64).sum()
        };
        // The logarithm of the factor, between the least and the greatest that can be.
        let (mut low, mut high) = (-300.0f64, 300.0f64);
        for _ in 0..80 {
            let middle = (low + high) / 2.0;
            if tokens(middle.exp2()) < curve.tokens as f64 { low = middle } else { high = middle }
        }
        epochs(high.exp2())
    }

    fn curves() -> impl Strategy<Value = (PowerCurve, Vec<u64>)> {
        let sizes = prop::collection::vec(1u64..1_000_000, 1..12);
        (sizes, 0u32..6, 1u64..9, 0u64..90, 1u64..1000).prop_map(
            |(sizes, power, cap, drop, part)| {
                let drop = Ratio::new(drop, 100);
                // At most what the curve can give: buckets that lie above `drop` by half at least.
                let (total, mut before, mut most) = (sizes.iter().sum::<u64>(), 0, 0);
                for size in &sizes {
                    before += size;
                    if before * drop.den() > total * drop.num() + size * drop.den() / 2 {
                        most += cap * size;
                    }
                }
                let tokens = (most * part / 1000).max(1);
                (PowerCurve { power, cap, drop, tokens }, sizes)
            },
        )
    }

    proptest! {
        #[test]
        fn the_curve_is_that_of_a_naive_program((curve, sizes) in curves()) {
            let masses = power_masses(&curve, &sizes).unwrap();
            let total: BigUint = masses.iter().sum();
            // Exactly: no bucket is above the cap, and below it tokens are in proportion to the areas.
            for (mass, size) in masses.iter().zip(&sizes) {
                prop_assert!(mass * curve.tokens <= BigUint::from(curve.cap) * *size * &total);
            }
            let shares = rounded(&masses);
            let parts: Vec<u64> = shares.iter().map(|share| share.num() * (PARTS / share.den())).collect();
            prop_assert_eq!(parts.iter().sum::<u64>(), PARTS);
            for ((part, mass), (epochs, size)) in parts.iter().zip(&masses).zip(naive(&curve, &sizes).iter().zip(&sizes)) {
                let exact = mass * PARTS;
                prop_assert!(exact < (BigUint::from(*part) + 1u32) * &total);
                prop_assert!(exact + &total > BigUint::from(*part) * &total);
                let found = *part as f64 / PARTS as f64 * curve.tokens as f64 / *size as f64;
                let part = curve.tokens as f64 / PARTS as f64 / *size as f64;
                prop_assert!((found - epochs).abs() < 1e-3 * (1.0 + epochs) + part, "{} epochs, not {}", found, epochs);
            }
        }

        #[test]
        fn more_than_the_curve_can_give_is_refused((curve, sizes) in curves()) {
            let most = curve.cap * sizes.iter().sum::<u64>();
            let fault = power_masses(&PowerCurve { tokens: most + 1, ..curve }, &sizes).unwrap_err();
            prop_assert!(fault.to_string().contains("cannot give so many tokens"));
        }
    }
}
