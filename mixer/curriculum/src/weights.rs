//! Weights by source: as they are typed, as integers, and dealt over buckets.

use std::collections::BTreeMap;

use contract::ratio::{TOO_LONG, gcd};
use contract::{Fault, Ratio, Result};
use schemars::JsonSchema;
use settings::{File, Spanned, Table, Value};

use super::text::{inline, key};

/// The largest sum of the integer weights of a mix: twice its product with a sample number fits 128 bits.
pub const WEIGHT_MAX: u64 = 1 << 62;

/// Sources and their weights, all above zero.
pub type SourceWeights = BTreeMap<String, Ratio>;

/// A weight of a mix.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a value that is read as it is typed")]
pub(super) enum Weight {
    Number(f64),
    Ratio(String),
}

/// Weights by source, exactly as typed.
pub(super) fn weights_of(file: &File, mix: &Spanned<Table>) -> Result<SourceWeights> {
    if mix.get_ref().is_empty() {
        return Err(file.fault(mix, "the mix is empty").wanted("mix = { source = weight }"));
    }
    let weight = |(source, value): (&Spanned<String>, &Spanned<Value>)| {
        let name = source.get_ref();
        let refused = |what: &str| {
            let fault = file.fault(value, format!("the weight of {name} is not {what}"));
            fault.found(file.typed(value.span()))
        };
        match file.ratio(value) {
            Ok(weight) if !weight.is_zero() => Ok((name.clone(), weight)),
            Err(reason) if reason == TOO_LONG => {
                let what = format!("the weight of {name} has too many digits");
                Err(file.fault(value, what).found(file.typed(value.span())).wanted(
                    "at most 19 digits, zeros of an exponent included: only the proportions of weights count",
                ))
            }
            Err(reason) if !file.plain(value).trim_start().starts_with('-') => {
                Err(refused("a number")
                    .wanted("an integer, a decimal or a ratio like \"3/10\"")
                    .hint(format!("it is taken exactly as typed: {reason}")))
            }
            _ => Err(refused("above zero")
                .wanted("a number above zero")
                .hint("leave the source out of the mix to give it no weight")),
        }
    };
    mix.get_ref().iter().map(weight).collect()
}

/// The same, where each source in `deals` is replaced by its buckets with their shares of its weight.
pub(super) fn deal(
    weights: &SourceWeights,
    deals: &BTreeMap<String, Vec<(String, Ratio)>>,
) -> Result<SourceWeights> {
    let mut all = SourceWeights::new();
    for (source, weight) in weights {
        let whole = [(source.clone(), Ratio::new(1, 1))];
        for (name, share) in deals.get(source).map_or(&whole[..], Vec::as_slice) {
            let part = weight.checked_mul(*share).ok_or_else(too_fine)?;
            // A mix may also name a bucket of a source that it names.
            let part = match all.get(name) {
                Some(other) => part.checked_add(*other).ok_or_else(too_fine)?,
                None => part,
            };
            if !part.is_zero() {
                all.insert(name.clone(), part);
            }
        }
    }
    Ok(all)
}

/// A sum or product of weights that has no exact form in 64 bits.
fn too_fine() -> Fault {
    Fault::usage("the weights of this mix are too fine for those of the buckets")
        .hint("use weights with fewer digits")
}

/// Weights as integers without a common divisor.
pub(super) fn weights_text(mix: &SourceWeights) -> String {
    let weights = integers(mix).expect("checked when the mix was read");
    let pairs =
        mix.keys().zip(weights).map(|(source, weight)| format!("{} = {weight}", key(source)));
    inline(pairs.collect())
}

/// The weights as integers without a common divisor, in the order of the sources' names.
pub(super) fn integers(mix: &SourceWeights) -> Option<Vec<u64>> {
    let scale = mix.values().try_fold(1u64, |scale, weight| {
        (scale / gcd(scale, weight.den())).checked_mul(weight.den())
    })?;
    let whole = |weight: &Ratio| weight.num().checked_mul(scale / weight.den());
    let weights: Vec<u64> = mix.values().map(whole).collect::<Option<_>>()?;
    let divisor = weights.iter().fold(0, |divisor, &weight| gcd(divisor, weight));
    let weights: Vec<u64> = weights.iter().map(|weight| weight / divisor).collect();
    let total = weights.iter().try_fold(0u64, |sum, &weight| sum.checked_add(weight))?;
    (total <= WEIGHT_MAX).then_some(weights)
}
