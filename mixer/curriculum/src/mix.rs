//! The weights of a mix, as they are typed and as they are written.

use std::collections::BTreeMap;

use contract::ratio::TOO_LONG;
use contract::{Ratio, Result};
use schemars::JsonSchema;
use settings::{File, Spanned, Table, Value};

use super::text::{inline, key};

/// A weight of a mix.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a value that is read as it is typed")]
pub(super) enum Weight {
    Number(f64),
    Ratio(String),
}

/// The limit on weights, for error messages.
pub(super) const SUM: &str = "as integers without a common divisor they sum to at most 2^62";

/// The weights of a mix, exactly as typed.
pub(super) fn mix_of(file: &File, mix: &Spanned<Table>) -> Result<BTreeMap<String, Ratio>> {
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

/// A mix with its weights as integers without a common divisor.
pub(super) fn mix_text(mix: &BTreeMap<String, Ratio>) -> String {
    let weights = super::whole_weights(mix).expect("checked when the mix was read");
    let pairs =
        mix.keys().zip(weights).map(|(source, weight)| format!("{} = {weight}", key(source)));
    inline(pairs.collect())
}

#[cfg(test)]
mod tests {
    use crate::Curriculum;

    #[test]
    fn a_weight_of_too_many_digits_is_a_number() {
        for weight in
            ["0.1234567890123456789012345678901234567890", "\"1/12345678901234567890123\""]
        {
            let text = format!(
                "store = \"s\"\n[[phase]]\nname = \"a\"\nsteps = 1\nseq_len = 8\nbatch = 1\nmix = {{ x = {weight} }}\n"
            );
            let told = Curriculum::parse(&text, "c.toml").unwrap_err().to_string();
            assert!(told.starts_with("c.toml:7:13: the weight of x has too many digits"), "{told}");
            assert!(told.contains("at most 19 digits"), "{told}");
        }
    }
}
