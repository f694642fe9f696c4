//! A mix that reacts to the loss: its keys, and its parameters as integers.
//!
//! The phase is cut into windows of steps. The weights of a window follow, by a named rule, from the losses by source
//! of windows up to the second one before it, so that a batch can be fetched before the loss of the step before is
//! known.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use contract::{Fault, Ratio, Result};
use schemars::JsonSchema;
use settings::{File, Spanned, Table, Value};

use super::apportion::apportion;
use super::places::KeySpans;
use super::text::{inline, key};
use super::weights::{SourceWeights, Weight, deal, integers, weights_of, weights_text};

/// The parts into which a window divides its samples: its weights are whole numbers that sum to this.
pub const MIX_PARTS: u64 = 1 << 16;

/// The keys of a mix that reacts.
const KEYS: [&str; 6] = ["rule", "start", "window", "floor", "reference", "rate"];

/// The least share of each source, unless `floor` says otherwise.
const FLOOR: Ratio = Ratio::new(1, 100);

/// The largest step size of `excess-loss`: exponents then fit 128 bits.
const RATE_MAX: u64 = 1024;

/// The largest reference loss, in nats.
const REFERENCE_MAX: u64 = 1 << 16;

/// How weights follow from losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReactionRule {
    /// More of the sources whose loss is above their reference.
    ExcessLoss,
    /// More of the sources whose loss falls.
    Learnability,
    /// The same weights in every window: the control of an experiment.
    Fixed,
}

/// A mix that reacts to the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Reaction {
    /// The rule.
    pub rule: ReactionRule,
    /// The weights of the first two windows.
    pub start: SourceWeights,
    /// Steps of a window.
    pub window: u64,
    /// The least share of each source.
    pub floors: SourceWeights,
    /// The loss of a reference model on each source, in nats; empty for rules that need none.
    pub reference: BTreeMap<String, Ratio>,
    /// How fast weights change; zero for `fixed`.
    pub rate: Ratio,
    /// The buckets of sources that are dealt, with their shares.
    deals: BTreeMap<String, Vec<(String, Ratio)>>,
    /// The weights of the first windows, whose sources are those of every window.
    first: SourceWeights,
}

/// A mix whose weights follow from the losses of its sources.
#[derive(JsonSchema)]
#[schemars(rename = "Reaction")]
#[expect(dead_code, reason = "stands for a table that is read with its places")]
pub(super) struct ReactionText {
    /// How weights follow from losses.
    #[schemars(extend("digest" = "plan, run"))]
    rule: RuleText,
    /// The weights of the first two windows, by source.
    #[schemars(extend("digest" = "plan, run"))]
    start: BTreeMap<String, Weight>,
    /// Steps of a window. Its weights follow from the losses of windows up to the second one before it.
    #[schemars(extend("digest" = "plan, run"))]
    window: NonZeroU64,
    /// The least share of each source, as one number or by source.
    #[schemars(extend("default" = "1/100", "digest" = "plan, run"))]
    floor: Option<FloorText>,
    /// With `excess-loss`: by source, the loss of a reference model in nats a label.
    #[schemars(extend("digest" = "plan, run"))]
    reference: Option<BTreeMap<String, Weight>>,
    /// With `excess-loss` the step size a nat, at most 1,024 (default 1). With `learnability` the part of the way to
    /// the new weights in each window, at most 1 (default 1/10).
    #[schemars(extend("digest" = "plan, run"))]
    rate: Option<Weight>,
}

/// The names of rules.
#[derive(JsonSchema)]
#[schemars(rename = "Rule")]
#[serde(rename_all = "kebab-case")]
#[expect(dead_code, reason = "stands for a name that is read with its place")]
pub(super) enum RuleText {
    /// More weight to sources whose loss is above `reference`.
    ExcessLoss,
    /// More weight to sources whose loss falls.
    Learnability,
    /// The weights of `start`: the control of an experiment.
    Fixed,
}

/// One least share, or one for each source.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a value that is read as it is typed")]
pub(super) enum FloorText {
    All(Weight),
    Each(BTreeMap<String, Weight>),
}

impl ReactionRule {
    const ALL: [ReactionRule; 3] =
        [ReactionRule::ExcessLoss, ReactionRule::Learnability, ReactionRule::Fixed];

    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            ReactionRule::ExcessLoss => "excess-loss",
            ReactionRule::Learnability => "learnability",
            ReactionRule::Fixed => "fixed",
        }
    }

    /// The rate where none is given, and the largest.
    fn rates(self) -> [Ratio; 2] {
        match self {
            ReactionRule::ExcessLoss => [Ratio::new(1, 1), Ratio::new(RATE_MAX, 1)],
            ReactionRule::Learnability => [Ratio::new(1, 10), Ratio::new(1, 1)],
            ReactionRule::Fixed => [Ratio::new(0, 1); 2],
        }
    }
}

/// Reads the keys of one mix.
struct Reader<'a> {
    file: &'a File,
    places: &'a KeySpans,
    path: &'a str,
    mix: &'a Spanned<Table>,
}

impl Reader<'_> {
    fn get(&self, name: &str) -> Option<&Spanned<Value>> {
        self.mix.get_ref().iter().find(|(key, _)| key.get_ref() == name).map(|(_, value)| value)
    }

    fn missing(&self, name: &str, wanted: &str) -> Fault {
        self.file.fault(self.mix, format!("the mix reacts, and has no `{name}`")).wanted(wanted)
    }

    /// A table by source, with the places of its keys and values.
    fn table(&self, name: &str, value: &Spanned<Value>, wanted: &str) -> Result<Spanned<Table>> {
        match value.get_ref() {
            Value::Table(table) => {
                let table = self.places.spanned(&format!("{}.{name}", self.path), table);
                Ok(Spanned::new(value.span(), table))
            }
            _ => Err(self.file.wrong(name, value, wanted)),
        }
    }

    /// A number by source, one for each source of `start`.
    fn by_source(
        &self,
        name: &str,
        value: &Spanned<Value>,
        start: &SourceWeights,
    ) -> Result<SourceWeights> {
        let wanted = "a number for each source of `start`";
        let table = self.table(name, value, wanted)?;
        if let Some(other) = table.get_ref().keys().find(|key| !start.contains_key(key.get_ref())) {
            let what = format!("`start` does not have source {:?}", other.get_ref());
            return Err(self.file.fault(other, what).wanted(wanted));
        }
        let numbers = table.get_ref().iter().map(|(source, value)| {
            Ok((
                source.get_ref().clone(),
                self.number(&format!("{name}.{}", source.get_ref()), value)?,
            ))
        });
        let numbers: SourceWeights = numbers.collect::<Result<_>>()?;
        match start.keys().find(|source| !numbers.contains_key(*source)) {
            Some(source) => Err(self
                .file
                .fault(value, format!("`{name}` does not have source {source:?}"))
                .wanted(wanted)),
            None => Ok(numbers),
        }
    }

    fn number(&self, name: &str, value: &Spanned<Value>) -> Result<Ratio> {
        let wrong = |_| self.file.wrong(name, value, "a number: 2, 0.5 or \"1/50\"");
        self.file.ratio(value).map_err(wrong)
    }

    fn rule(&self) -> Result<ReactionRule> {
        let wanted = "rule = \"excess-loss\", \"learnability\" or \"fixed\"";
        let value = self.get("rule").ok_or_else(|| self.missing("rule", wanted))?;
        let name = value.get_ref().as_str();
        ReactionRule::ALL.into_iter().find(|rule| Some(rule.name()) == name).ok_or_else(|| {
            let fault = self.file.wrong("rule", value, wanted);
            let known = ReactionRule::ALL.map(ReactionRule::name);
            name.map_or(fault.clone(), |name| fault.one_of(name, known))
        })
    }

    fn window(&self) -> Result<u64> {
        let wanted = "steps of a window: a whole number above zero";
        let value = self.get("window").ok_or_else(|| self.missing("window", wanted))?;
        match value.get_ref() {
            Value::Integer(steps) if *steps > 0 => Ok(*steps as u64),
            _ => Err(self.file.wrong("window", value, wanted)),
        }
    }

    fn floors(&self, start: &SourceWeights) -> Result<SourceWeights> {
        let all = |floor: Ratio| start.keys().map(|source| (source.clone(), floor)).collect();
        let floors = match self.get("floor") {
            None => all(FLOOR),
            Some(value) if value.get_ref().is_table() => self.by_source("floor", value, start)?,
            Some(value) => all(self.number("floor", value)?),
        };
        let at = self.get("floor").map_or(self.mix.span(), Spanned::span);
        let fault = |what: String| Fault::usage(what).at(self.file.place(at.clone()));
        if let Some((source, _)) = floors.iter().find(|(_, floor)| floor.is_zero()) {
            let what = format!("the least share of {source} is zero");
            return Err(fault(what).wanted("a share above zero, so that it can become more again"));
        }
        let parts: u64 = floors.values().map(floor_parts).fold(0, u64::saturating_add);
        if parts > MIX_PARTS {
            let found = format!("{parts} parts of {MIX_PARTS} for {} sources", floors.len());
            return Err(fault("the least shares are more than the whole".to_owned())
                .found(found)
                .wanted("floor = \"1/50\", or a smaller one"));
        }
        let weights: Vec<u64> = parts_of(start, &vec![0; start.len()]);
        let low = start
            .keys()
            .zip(&weights)
            .find(|(source, part)| **part + 1 < floor_parts(&floors[*source]));
        match low {
            Some((source, part)) => {
                let what = format!("the mix begins with less of {source} than its least share");
                Err(fault(what)
                    .found(format!("{part} parts of {MIX_PARTS}"))
                    .wanted(format!("at least {}", floor_parts(&floors[source])))
                    .hint("give a smaller `floor`, or a larger weight in `start`"))
            }
            None => Ok(floors),
        }
    }

    fn reference(
        &self,
        rule: ReactionRule,
        start: &SourceWeights,
    ) -> Result<BTreeMap<String, Ratio>> {
        let wanted =
            "reference = { source = loss }: the loss of a reference model on each source, in nats";
        match (rule, self.get("reference")) {
            (ReactionRule::ExcessLoss, None) => Err(self.missing("reference", wanted)),
            (ReactionRule::ExcessLoss, Some(value)) => {
                let table = self.by_source("reference", value, start)?;
                match table.iter().find(|(_, loss)| loss.num() / loss.den() >= REFERENCE_MAX) {
                    Some((source, loss)) => Err(self
                        .file
                        .fault(value, format!("the reference loss of {source} is out of range"))
                        .found(loss)
                        .wanted(format!("below {REFERENCE_MAX} nats"))),
                    None => Ok(table),
                }
            }
            (_, Some(value)) => Err(self.unused("reference", rule, value)),
            (_, None) => Ok(BTreeMap::new()),
        }
    }

    fn rate(&self, rule: ReactionRule) -> Result<Ratio> {
        let [default, most] = rule.rates();
        let Some(value) = self.get("rate") else { return Ok(default) };
        if most.is_zero() {
            return Err(self.unused("rate", rule, value));
        }
        let rate = self.number("rate", value)?;
        match rate.is_zero() || rate.num() / most.num() >= rate.den() && rate != most {
            true => Err(self
                .file
                .fault(value, "`rate` is out of range")
                .found(rate)
                .wanted(format!("a number above 0 and at most {most}"))),
            false => Ok(rate),
        }
    }

    fn unused(&self, name: &str, rule: ReactionRule, value: &Spanned<Value>) -> Fault {
        let what = format!("`{name}` is not used by this rule");
        self.file.fault(value, what).found(format!("rule = {:?}", rule.name()))
    }
}

impl Reaction {
    /// Whether a mix with these keys reacts.
    pub(super) fn is(mix: &Table) -> bool {
        mix.keys().any(|key| ["rule", "start"].contains(&key.get_ref().as_str()))
    }

    /// Reads the mix at `path`.
    pub(super) fn read(
        file: &File,
        places: &KeySpans,
        path: &str,
        mix: &Spanned<Table>,
    ) -> Result<Reaction> {
        let other = mix.get_ref().keys().find(|key| !KEYS.contains(&key.get_ref().as_str()));
        if let Some(other) = other {
            return Err(file.unknown_key(other, "mix", KEYS));
        }
        let reader = Reader { file, places, path, mix };
        let rule = reader.rule()?;
        let wanted = "start = { source = weight }: the mix of the first two windows";
        let value = reader.get("start").ok_or_else(|| reader.missing("start", wanted))?;
        let start = weights_of(file, &reader.table("start", value, wanted)?)?;
        let floors = reader.floors(&start)?;
        let reference = reader.reference(rule, &start)?;
        let (window, rate) = (reader.window()?, reader.rate(rule)?);
        let first = SourceWeights::new();
        let deals = BTreeMap::new();
        let reaction = Reaction { rule, start, window, floors, reference, rate, deals, first };
        Ok(Reaction { first: reaction.weights(&reaction.start_parts())?, ..reaction })
    }

    /// The weights of the first two windows, in parts of [`MIX_PARTS`], in the order of the sources' names.
    pub fn start_parts(&self) -> Vec<u64> {
        parts_of(&self.start, &self.floor_parts())
    }

    /// The least weight of each source, in the same parts.
    pub fn floor_parts(&self) -> Vec<u64> {
        self.floors.values().map(floor_parts).collect()
    }

    /// Each source of `start` with its sources in the plan and their shares: itself, or its buckets.
    pub fn members(&self) -> impl Iterator<Item = Vec<(&str, Ratio)>> {
        self.start.keys().map(|source| match self.deals.get(source) {
            Some(buckets) => buckets.iter().map(|(name, share)| (name.as_str(), *share)).collect(),
            None => vec![(source.as_str(), Ratio::new(1, 1))],
        })
    }

    /// The weights of a window with these parts of [`MIX_PARTS`], buckets in place of sources that are dealt; a source
    /// with none is left out.
    pub fn weights(&self, parts: &[u64]) -> Result<SourceWeights> {
        let weights = self.start.keys().zip(parts).filter(|(_, part)| **part > 0);
        let weights = weights.map(|(source, part)| (source.clone(), Ratio::new(*part, MIX_PARTS)));
        deal(&weights.collect(), &self.deals)
    }

    /// The weights of the first two windows.
    pub(super) fn first(&self) -> &SourceWeights {
        &self.first
    }

    /// The same, where each source in `deals` is replaced by its buckets in every window.
    pub(super) fn dealt(&self, deals: &BTreeMap<String, Vec<(String, Ratio)>>) -> Result<Reaction> {
        let own = deals.iter().filter(|(source, _)| self.start.contains_key(*source));
        let deals = own.map(|(source, buckets)| (source.clone(), buckets.clone())).collect();
        let dealt = Reaction { deals, ..self.clone() };
        Ok(Reaction { first: dealt.weights(&dealt.start_parts())?, ..dealt })
    }

    /// The same without `source`; `None` if no other is left.
    pub(super) fn without(mut self, source: &str) -> Option<Reaction> {
        self.start.remove(source);
        self.floors.remove(source);
        self.reference.remove(source);
        let first = (!self.start.is_empty()).then(|| self.weights(&self.start_parts()).ok())??;
        Some(Reaction { first, ..self })
    }

    /// Its canonical text.
    pub(super) fn text(&self) -> String {
        let number = |value: &Ratio| match value.den() {
            1 => value.to_string(),
            _ => format!("\"{value}\""),
        };
        let table = |numbers: &BTreeMap<String, Ratio>| {
            let pairs = numbers
                .iter()
                .map(|(source, value)| format!("{} = {}", key(source), number(value)));
            inline(pairs.collect())
        };
        let mut pairs = vec![
            format!("rule = \"{}\"", self.rule.name()),
            format!("start = {}", weights_text(&self.start)),
            format!("window = {}", self.window),
            format!("floor = {}", table(&self.floors)),
        ];
        if !self.reference.is_empty() {
            pairs.push(format!("reference = {}", table(&self.reference)));
        }
        if !self.rate.is_zero() {
            pairs.push(format!("rate = {}", number(&self.rate)));
        }
        inline(pairs)
    }
}

/// A least share in parts, rounded up.
fn floor_parts(floor: &Ratio) -> u64 {
    let parts = (u128::from(floor.num()) * u128::from(MIX_PARTS)).div_ceil(u128::from(floor.den()));
    u64::try_from(parts).unwrap_or(u64::MAX)
}

/// Weights in parts of [`MIX_PARTS`], none below its least.
fn parts_of(weights: &SourceWeights, floors: &[u64]) -> Vec<u64> {
    let masses = integers(weights).unwrap_or_else(|| vec![1; weights.len()]);
    let masses: Vec<u128> = masses.into_iter().map(u128::from).collect();
    let bounds: Vec<[u64; 2]> = floors.iter().map(|floor| [*floor, MIX_PARTS]).collect();
    // The floors sum to at most the whole.
    apportion(&masses, &bounds, MIX_PARTS).unwrap_or_default()
}
