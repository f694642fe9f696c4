//! The mix of a phase, as it is typed, as it is written and as integers: constant weights, a ramp between two mixes, or
//! weights that react to the loss.

use std::collections::BTreeMap;

use contract::ratio::gcd;
use contract::{Fault, Ratio, Result};
use schemars::JsonSchema;
use settings::{File, Spanned, Table, Value};

use super::curve::{MixCurve, RAMP_ONE};
use super::places::KeySpans;
use super::reaction::{Reaction, ReactionText};
use super::text::inline;
use super::weights::{SourceWeights, WEIGHT_MAX, Weight, deal, integers, weights_of, weights_text};

/// The most samples over which a ramp extends: integrals of its curve then fit 128 bits.
const RAMP_SAMPLES_MAX: u64 = 1 << 46;

/// The largest product of a ramp's sum of weights and its samples, for the same reason.
const RAMP_PRODUCT_MAX: u128 = 1 << 93;

/// What a phase reads.
#[derive(Clone, Debug, PartialEq)]
pub enum Mix {
    /// The same proportions throughout.
    Constant(SourceWeights),
    /// From one mix at the start of the phase to another at its end.
    Ramp {
        /// The mix at the curve's 0.
        from: SourceWeights,
        /// The mix at the curve's 1.
        to: SourceWeights,
        /// The way between them.
        curve: MixCurve,
    },
    /// Weights that follow from the loss, window by window.
    Reacting(Box<Reaction>),
}

/// The weights of a mix as integers, in the order of the sources' names. Only these affect the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MixWeights {
    /// All above zero, without a common divisor.
    Constant(Vec<u64>),
    /// Two lists with the least sum that both can have; a source has zero in a mix that it is not in.
    Ramp {
        /// The weights at the curve's 0.
        from: Vec<u64>,
        /// The weights at its 1.
        to: Vec<u64>,
        /// The curve at equal distances, in units of 1 / [`RAMP_ONE`].
        knots: Vec<u64>,
    },
}

/// `mix`: weights, a ramp, or a rule.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a table that is read with its places")]
pub(super) enum MixText {
    Constant(BTreeMap<String, Weight>),
    Ramp(RampText),
    Reacting(ReactionText),
}

/// A mix that moves from one to another over its phase.
#[derive(JsonSchema)]
#[schemars(rename = "Ramp")]
#[expect(dead_code, reason = "stands for a table that is read with its places")]
pub(super) struct RampText {
    /// The mix at the start: weights by source, as in a constant mix.
    #[schemars(extend("digest" = "plan, run"))]
    from: BTreeMap<String, Weight>,
    /// The mix at the end; a source that it lacks fades out, one that only it has fades in.
    #[schemars(extend("digest" = "plan, run"))]
    to: BTreeMap<String, Weight>,
    /// The way from one to the other, over the samples of the phase.
    #[schemars(extend("default" = "linear", "digest" = "plan, run"))]
    curve: Option<CurveText>,
    /// With `curve = "table"`: the part of the way, 0 to 1, at equal distances from the first sample to the last, with
    /// straight lines between; 2 to 1,025 numbers.
    #[schemars(extend("digest" = "plan, run"))]
    table: Option<Vec<Weight>>,
}

/// The names of curves.
#[derive(JsonSchema)]
#[schemars(rename = "Curve")]
#[serde(rename_all = "lowercase")]
#[expect(dead_code, reason = "stands for a name that is read with its place")]
pub(super) enum CurveText {
    /// The same change with every sample.
    Linear,
    /// Half a cosine: slow at both ends.
    Cosine,
    /// The numbers of `table`.
    Table,
}

/// The limit on weights, for error messages.
pub(super) const SUM: &str = "as integers without a common divisor they sum to at most 2^62";

impl Mix {
    /// Reads the mix at `path`, weights exactly as typed.
    pub(super) fn read(
        file: &File,
        places: &KeySpans,
        path: &str,
        mix: &Spanned<Table>,
    ) -> Result<Mix> {
        // A weight is never a table, so sources may have these names too.
        if !mix.get_ref().values().any(|value| value.get_ref().is_table()) {
            return Ok(Mix::Constant(weights_of(file, mix)?));
        }
        if Reaction::is(mix.get_ref()) {
            return Ok(Mix::Reacting(Box::new(Reaction::read(file, places, path, mix)?)));
        }
        let keys = ["from", "to", "curve", "table"];
        if let Some(key) = mix.get_ref().keys().find(|key| !keys.contains(&key.get_ref().as_str()))
        {
            return Err(file.unknown_key(key, "mix", keys));
        }
        let get = |name: &str| {
            mix.get_ref().iter().find(|(key, _)| key.get_ref() == name).map(|(_, value)| value)
        };
        let side = |name: &str| {
            let wanted = "mix = { from = { source = weight }, to = { source = weight } }";
            let Some(value) = get(name) else {
                let what = format!("the ramp has no `{name}`");
                return Err(file.fault(mix, what).wanted(wanted));
            };
            match value.get_ref() {
                Value::Table(table) => {
                    let table = places.spanned(&format!("{path}.{name}"), table);
                    weights_of(file, &Spanned::new(value.span(), table))
                }
                _ => Err(file.wrong(name, value, "a mix: { source = weight }")),
            }
        };
        let (from, to) = (side("from")?, side("to")?);
        let curve = MixCurve::read(file, mix, get("curve"), get("table"))?;
        let ramp = Mix::Ramp { from, to, curve };
        match ramp.settled() {
            Mix::Constant(_) => Err(file
                .fault(mix, "the ramp changes nothing: `from` and `to` have the same proportions")
                .wanted("two mixes")
                .hint("write one: mix = { source = weight }")),
            ramp => Ok(ramp),
        }
    }

    /// The same, where a ramp between equal mixes is a constant one.
    fn settled(self) -> Mix {
        match self {
            Mix::Ramp { from, to, .. }
                if from.keys().eq(to.keys())
                    && integers(&from).is_some_and(|from| Some(from) == integers(&to)) =>
            {
                Mix::Constant(from)
            }
            other => other,
        }
    }

    /// The names of its sources, in order.
    pub fn sources(&self) -> Vec<&String> {
        match self {
            Mix::Constant(weights) => weights.keys().collect(),
            Mix::Ramp { from, to, .. } => {
                let mut all: Vec<&String> = from.keys().chain(to.keys()).collect();
                all.sort_unstable();
                all.dedup();
                all
            }
            Mix::Reacting(reaction) => reaction.first().keys().collect(),
        }
    }

    /// Whether a source is in it at some time.
    pub fn has(&self, source: &str) -> bool {
        self.sources().into_iter().any(|name| name == source)
    }

    /// Whether two mixes have the same sources with the same shares at every time, given equal lengths.
    pub(super) fn same(&self, other: &Mix) -> bool {
        match (self, other) {
            (Mix::Reacting(one), Mix::Reacting(other)) => one.text() == other.text(),
            (Mix::Reacting(_), _) | (_, Mix::Reacting(_)) => false,
            _ => self.sources() == other.sources() && self.weights() == other.weights(),
        }
    }

    /// The name of a ramp's curve.
    pub fn curve(&self) -> Option<&'static str> {
        match self {
            Mix::Constant(_) | Mix::Reacting(_) => None,
            Mix::Ramp { curve, .. } => Some(curve.name()),
        }
    }

    /// How it reacts to the loss, if it does.
    pub fn reaction(&self) -> Option<&Reaction> {
        match self {
            Mix::Reacting(reaction) => Some(reaction),
            Mix::Constant(_) | Mix::Ramp { .. } => None,
        }
    }

    /// Whether its shares depend on the step at which it begins.
    pub(super) fn begins_anew(&self) -> bool {
        !matches!(self, Mix::Constant(_))
    }

    /// Whether it changes within its phase.
    pub fn is_ramp(&self) -> bool {
        matches!(self, Mix::Ramp { .. })
    }

    /// The mix without `source`, whose place the others take; `None` if no other is left.
    pub(super) fn without(mut self, source: &str) -> Option<Mix> {
        match &mut self {
            Mix::Constant(weights) => {
                weights.remove(source);
                (!weights.is_empty()).then_some(self)
            }
            Mix::Ramp { from, to, .. } => {
                from.remove(source);
                to.remove(source);
                match (from.is_empty(), to.is_empty()) {
                    (true, true) => None,
                    (true, false) => Some(Mix::Constant(std::mem::take(to))),
                    (false, true) => Some(Mix::Constant(std::mem::take(from))),
                    (false, false) => Some(self.settled()),
                }
            }
            Mix::Reacting(reaction) => {
                Some(Mix::Reacting(Box::new(reaction.clone().without(source)?)))
            }
        }
    }

    /// The same, where each source in `deals` is replaced by its buckets with their shares of its weight.
    pub(super) fn dealt(
        &self,
        deals: &BTreeMap<String, Vec<(String, Ratio)>>,
        samples: u64,
    ) -> Result<Mix> {
        let mix = match self {
            Mix::Constant(weights) => Mix::Constant(deal(weights, deals)?),
            Mix::Ramp { from, to, curve } => {
                Mix::Ramp { from: deal(from, deals)?, to: deal(to, deals)?, curve: curve.clone() }
            }
            Mix::Reacting(reaction) => Mix::Reacting(Box::new(reaction.dealt(deals)?)),
        };
        mix.check(samples)?;
        Ok(mix)
    }

    /// Its weights as integers, of a mix that reacts those of its first windows; `None` if they are so fine or so far
    /// apart that their sum does not fit.
    pub fn weights(&self) -> Option<MixWeights> {
        match self {
            Mix::Constant(weights) => Some(MixWeights::Constant(integers(weights)?)),
            Mix::Ramp { from, to, curve } => {
                let whole = [integers(from)?, integers(to)?];
                let [low, high] = whole.each_ref().map(|all| all.iter().sum::<u64>());
                let total = (low / gcd(low, high)).checked_mul(high)?;
                if total > WEIGHT_MAX {
                    return None;
                }
                let names = self.sources();
                let all = |mix: &SourceWeights, whole: &[u64], sum: u64| {
                    let of: BTreeMap<&String, &u64> = mix.keys().zip(whole).collect();
                    let scaled = |name| of.get(name).map_or(0, |weight| *weight * (total / sum));
                    names.iter().map(scaled).collect()
                };
                Some(MixWeights::Ramp {
                    from: all(from, &whole[0], low),
                    to: all(to, &whole[1], high),
                    knots: curve.knots(),
                })
            }
            Mix::Reacting(reaction) => Some(MixWeights::Constant(integers(reaction.first())?)),
        }
    }

    /// [`Mix::weights`], or what is wrong with them.
    pub fn exact_weights(&self) -> Result<MixWeights> {
        self.weights().ok_or_else(|| {
            let fault = Fault::usage("these weights are too fine for each other").wanted(SUM);
            match self {
                Mix::Constant(_) | Mix::Reacting(_) => fault,
                Mix::Ramp { .. } => {
                    fault.hint("give `from` and `to` the same sum, such as 1 or 100")
                }
            }
        })
    }

    /// Refuses weights that have no integer form, and a ramp over too many samples for its weights.
    pub(super) fn check(&self, samples: u64) -> Result<()> {
        let MixWeights::Ramp { from, .. } = self.exact_weights()? else { return Ok(()) };
        let total: u64 = from.iter().sum();
        if samples > RAMP_SAMPLES_MAX {
            return Err(Fault::usage("the phase is too long for a ramp")
                .found(format!("{samples} samples"))
                .wanted(format!("at most {RAMP_SAMPLES_MAX}")));
        }
        if u128::from(total) * u128::from(samples) > RAMP_PRODUCT_MAX {
            return Err(Fault::usage("the weights of the ramp are too fine for so long a phase")
                .found(format!(
                    "as integers with one sum they sum to {total}, over {samples} samples"
                ))
                .wanted("a product of at most 2^93")
                .hint("give `from` and `to` the same sum, such as 1 or 100"));
        }
        Ok(())
    }

    /// Its canonical text: weights as integers without a common divisor.
    pub fn text(&self) -> String {
        match self {
            Mix::Constant(weights) => weights_text(weights),
            Mix::Ramp { from, to, curve } => {
                let mut pairs = vec![
                    format!("from = {}", weights_text(from)),
                    format!("to = {}", weights_text(to)),
                ];
                curve.write(&mut pairs);
                inline(pairs)
            }
            Mix::Reacting(reaction) => reaction.text(),
        }
    }
}

impl MixWeights {
    /// The share of `source` (its number) at `position`, 0 to 1, of the phase; for people.
    pub fn share(&self, source: usize, position: f64) -> f64 {
        let part = |weights: &[u64]| weights[source] as f64 / weights.iter().sum::<u64>() as f64;
        match self {
            MixWeights::Constant(weights) => part(weights),
            MixWeights::Ramp { from, to, knots } => {
                let at = position.clamp(0.0, 1.0) * (knots.len() - 1) as f64;
                let (low, high) =
                    (knots[at.floor() as usize] as f64, knots[at.ceil() as usize] as f64);
                let way = (low + (high - low) * at.fract()) / RAMP_ONE as f64;
                part(from) * (1.0 - way) + part(to) * way
            }
        }
    }
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
