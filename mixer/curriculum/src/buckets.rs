//! `[source.NAME] buckets`, `curve`: a kept column cuts a source into buckets, and a curve deals its samples to them.
//!
//! A bucket is a source of its own, called `SOURCE/BUCKET`: in a mix, in bans, in the plan. A mix that names the source
//! itself is dealt over its buckets ([`Curriculum::dealt`]), by shares that only a store's sizes can give.

use std::collections::{BTreeMap, BTreeSet};

use contract::{Ratio, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use settings::{File, Spanned, Value};

use super::places::KeySpans;
use super::text::{Text, float, inline, quoted};
use super::weights::Weight;
use super::{Curriculum, Fim, Phase, SourceSpec, WEIGHT_MAX};

/// `[source.NAME]` by name.
type Sources = BTreeMap<String, SourceSpec>;

/// The most buckets of a source: all are made in one pass, each into a file of its own, which stays open.
const BUCKETS_MAX: usize = 64;

/// The largest exponent of a curve: a steeper one gives nearly everything to the best bucket.
const POWER_MAX: u64 = 16;

/// The default cap on the epochs of a bucket.
const CAP: u64 = 7;

/// From 2^53 on f64 does not hold every integer, so a value could be compared with another edge than the one written.
const EDGE_MAX: f64 = 9_007_199_254_740_992.0;

/// How a source is cut into buckets.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    /// The kept column that decides, as the corpus names it under `keep`.
    pub column: String,
    /// Which documents are in which bucket.
    pub rule: BucketRule,
    /// The names of the buckets of the rule, in its order.
    pub names: Vec<String>,
    /// The bucket of documents without a value, which otherwise no bucket has.
    pub none: Option<String>,
    /// How the samples of the source are dealt to its buckets.
    pub curve: BucketCurve,
}

/// Which documents are in which bucket.
#[derive(Clone, Debug, PartialEq)]
pub enum BucketRule {
    /// Numbers below the first edge, from each edge to below the next, and from the last edge on.
    Edges(Vec<f64>),
    /// Equal text, and the bucket of all other values, which otherwise no bucket has.
    Values(Vec<String>, Option<String>),
}

/// How the samples of a source are dealt to its buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BucketCurve {
    /// By their tokens, so that each is read as often.
    Even,
    /// By a weight for each bucket of the rule, in its order.
    Weights(Vec<Ratio>),
    /// By a truncated power curve.
    Power(PowerCurve),
}

/// A truncated power curve: text at rank x, from 0 for the lowest bucket to 1 for the end of the highest, is read
/// `C (x - drop)^power` times, and not at all below `drop`; no bucket more than `cap` times. C follows from `tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerCurve {
    /// The exponent.
    pub power: u32,
    /// The most epochs of a bucket.
    pub cap: u64,
    /// The share of the source's tokens, lowest first, that is not read; below 1.
    pub drop: Ratio,
    /// How many tokens the buckets give together.
    pub tokens: u64,
}

/// Cuts a source into buckets by a column that its corpus keeps.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Buckets")]
pub(super) struct BucketsText {
    /// The kept column that decides, as the corpus names it under `keep`.
    #[schemars(extend("digest" = "plan, run"))]
    column: String,
    /// For numbers: where buckets meet, ascending, below 2^53 in size. N edges make N + 1 buckets, from the lowest; an
    /// edge belongs to the bucket above. Give `edges` or `values`.
    #[schemars(extend("digest" = "plan, run"))]
    edges: Option<Vec<f64>>,
    /// For text: the value of each bucket.
    #[schemars(extend("digest" = "plan, run"))]
    values: Option<Vec<String>>,
    /// Names of the buckets, in their order. Default: the values, or the numbers from 0.
    #[schemars(extend("digest" = "plan, run"))]
    names: Option<Vec<String>>,
    /// With `values`: the name of a bucket of all other values. Without it no bucket has them.
    #[schemars(extend("digest" = "plan, run"))]
    other: Option<String>,
    /// The name of a bucket of documents without a value. Without it no bucket has them.
    #[schemars(extend("digest" = "plan, run"))]
    none: Option<String>,
}

/// Deals the samples of a source to its buckets: by `weights`, or by a truncated power curve. Without a curve each
/// bucket is read as often.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "BucketCurve")]
pub(super) struct BucketCurveText {
    /// A weight for each bucket of `edges` or `values`, as in a mix; 0 leaves a bucket out.
    #[schemars(with = "Option<Vec<Weight>>", extend("digest" = "plan, run"))]
    weights: Option<Vec<Spanned<Value>>>,
    /// Text at rank x of the source, 0 the lowest and 1 the highest, is read in proportion to `(x - drop)^power`; 0 to
    /// 16.
    #[schemars(extend("digest" = "plan, run"))]
    power: Option<u64>,
    /// The most epochs of a bucket; its `max_epochs`.
    #[schemars(extend("default" = CAP, "digest" = "plan, run"))]
    cap: Option<u64>,
    /// The share of the source's tokens, lowest first, that is not read; from 0 to below 1.
    #[schemars(with = "Option<Weight>", extend("default" = 0, "digest" = "plan, run"))]
    drop: Option<Spanned<Value>>,
    /// With `power`: the tokens for which the curve is solved, which are those that the run takes from the source.
    /// `zdata plan` says how many. Not derived, so that a phase planned later changes no earlier step.
    #[schemars(extend("digest" = "plan, run"))]
    tokens: Option<u64>,
}

impl BucketsText {
    /// The buckets of source `name`, dealt by `curve`.
    pub(super) fn read(
        self,
        name: &str,
        curve: Option<BucketCurveText>,
        file: &File,
        places: &KeySpans,
    ) -> Result<Buckets> {
        let key = |key: &str| format!("source.{name}.buckets.{key}");
        let BucketsText { column, edges, values, names, other, none } = self;
        let wrong = |at: &str, what: &str| places.fault(&key(at), what);
        if other.is_some() && values.is_none() {
            let fault = wrong("other", "`other` is only asked for with `values`");
            return Err(fault.hint("edges divide all numbers: leave it out"));
        }
        let (rule, own): (BucketRule, Vec<String>) = match (edges, values) {
            (Some(edges), None) => {
                let ascending = edges.windows(2).all(|two| two[0] < two[1]);
                if edges.is_empty() || !ascending || edges.iter().any(|edge| !edge.is_finite()) {
                    let fault = wrong("edges", "these edges do not divide numbers into ranges");
                    return Err(fault.wanted("ascending numbers, such as [0.2, 0.5, 0.8]"));
                }
                if let Some(edge) = edges.iter().find(|edge| edge.abs() >= EDGE_MAX) {
                    let fault = wrong("edges", "an edge is too large to be compared exactly");
                    let fault = fault.found(edge).wanted("numbers below 2^53 in size");
                    return Err(fault.hint("keep the field in a larger unit, such as seconds"));
                }
                let own = (0..=edges.len()).map(|number| number.to_string()).collect();
                (BucketRule::Edges(edges), own)
            }
            (None, Some(values)) => {
                let own = values.clone();
                if values.iter().collect::<BTreeSet<_>>().len() < values.len() {
                    return Err(wrong("values", "a value stands twice").wanted("each value once"));
                }
                (BucketRule::Values(values, other), own)
            }
            _ => {
                return Err(wrong("column", "the buckets have no rule, or two")
                    .wanted("`edges` for numbers, or `values` for text"));
            }
        };
        let count = own.len();
        let names = names.unwrap_or(own);
        if names.len() != count {
            return Err(wrong("names", "there is not one name for each bucket")
                .found(names.len())
                .wanted(format!("{count} names, in the order of the buckets")));
        }
        let curve = match curve {
            Some(curve) => curve.read(name, count, file, places)?,
            None => BucketCurve::Even,
        };
        let buckets = Buckets { column, rule, names, none, curve };
        let all: BTreeSet<&str> = buckets.all().collect();
        if all.contains("") || all.len() < buckets.count() {
            let fault = wrong("column", "the names of the buckets are not unique, or one is empty");
            return Err(fault.wanted("a name for each bucket, under `names`, `other` and `none`"));
        }
        if !(1..=BUCKETS_MAX).contains(&buckets.count()) {
            let fault = wrong("column", "the source has too many buckets, or none");
            return Err(fault.found(buckets.count()).wanted(format!("1 to {BUCKETS_MAX}")));
        }
        Ok(buckets)
    }
}

impl BucketCurveText {
    fn read(self, name: &str, count: usize, file: &File, places: &KeySpans) -> Result<BucketCurve> {
        let key = |key: &str| format!("source.{name}.curve.{key}");
        let BucketCurveText { weights, power, cap, drop, tokens } = self;
        let given =
            [("cap", cap.is_some()), ("drop", drop.is_some()), ("tokens", tokens.is_some())];
        let idle = given.iter().find(|(_, given)| *given && power.is_none());
        if let Some((idle, _)) = idle {
            let fault =
                places.fault(&key(idle), format!("`{idle}` is only asked for with `power`"));
            return Err(fault.hint("add `power`, or leave it out"));
        }
        match (weights, power) {
            (Some(weights), None) => curve_weights(&weights, count, file, places, &key("weights")),
            (None, Some(power)) => {
                let outside = |at: &str| places.out_of_range(&key(at));
                if power > POWER_MAX {
                    return Err(outside("power").wanted(format!("0 to {POWER_MAX}")));
                }
                let cap = cap.unwrap_or(CAP);
                if cap == 0 || cap > 1 << 20 {
                    return Err(outside("cap").wanted("1 to 2^20 epochs"));
                }
                let drop = match &drop {
                    Some(drop) => file.ratio(drop).ok().filter(|drop| drop.num() < drop.den()),
                    None => Some(Ratio::new(0, 1)),
                };
                let drop =
                    drop.ok_or_else(|| outside("drop").wanted("a share from 0 to below 1"))?;
                let tokens = tokens.unwrap_or_default();
                if tokens > WEIGHT_MAX {
                    return Err(outside("tokens").wanted("at most 2^62"));
                }
                Ok(BucketCurve::Power(PowerCurve { power: power as u32, cap, drop, tokens }))
            }
            _ => Err(places
                .fault(&format!("source.{name}.curve"), "the curve has no rule, or two")
                .wanted("`weights`, or `power` with `cap`, `drop` and `tokens`")),
        }
    }
}

fn curve_weights(
    weights: &[Spanned<Value>],
    count: usize,
    file: &File,
    places: &KeySpans,
    key: &str,
) -> Result<BucketCurve> {
    let number = |weight: &Spanned<Value>| {
        let wanted = "numbers of at least 0, such as [0, 1, \"3/2\"]";
        file.ratio(weight).map_err(|reason| {
            file.fault(weight, "a weight of the curve is not a number").found(reason).wanted(wanted)
        })
    };
    let weights: Vec<Ratio> = weights.iter().map(number).collect::<Result<_>>()?;
    if weights.len() != count || weights.iter().all(|weight| weight.is_zero()) {
        let what = "the curve does not have a weight for each bucket, or none above zero";
        return Err(places
            .fault(key, what)
            .found(format!("{} weights", weights.len()))
            .wanted(format!("{count}, in the order of the buckets")));
    }
    Ok(BucketCurve::Weights(weights))
}

impl Buckets {
    /// The names of all buckets: those of the rule, then the one of other values and the one of documents without.
    pub fn all(&self) -> impl Iterator<Item = &str> {
        self.names.iter().chain(self.other()).chain(&self.none).map(String::as_str)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all().count()
    }

    fn other(&self) -> Option<&String> {
        match &self.rule {
            BucketRule::Edges(_) => None,
            BucketRule::Values(_, other) => other.as_ref(),
        }
    }

    /// The number of the bucket, in the order of [`Buckets::all`], of a document with this value; `None` if no bucket
    /// has it. An error, the reason, if the rule needs a number and it is none.
    pub fn of(&self, value: Option<&str>) -> std::result::Result<Option<usize>, &'static str> {
        let count = self.names.len();
        let others = count + usize::from(self.other().is_some());
        let Some(value) = value else { return Ok(self.none.as_ref().map(|_| others)) };
        match &self.rule {
            BucketRule::Edges(edges) => match value.parse::<f64>() {
                Ok(number) if !number.is_nan() => {
                    Ok(Some(edges.partition_point(|edge| *edge <= number)))
                }
                _ => Err("not a number"),
            },
            BucketRule::Values(values, other) => {
                let at = values.iter().position(|one| one == value);
                Ok(at.or_else(|| other.as_ref().map(|_| count)))
            }
        }
    }

    /// What bucket number `bucket` holds, for people: `quality from 0.2 to below 0.5`.
    pub fn meaning(&self, bucket: usize) -> String {
        let column = &self.column;
        if bucket >= self.names.len() {
            let other = bucket == self.names.len() && self.other().is_some();
            return format!("{} {column}", if other { "another" } else { "no" });
        }
        match &self.rule {
            BucketRule::Values(values, _) => format!("{column} = {:?}", values[bucket]),
            BucketRule::Edges(edges) => {
                match (bucket.checked_sub(1).map(|below| edges[below]), edges.get(bucket)) {
                    (None, Some(end)) => format!("{column} < {end}"),
                    (Some(start), Some(end)) => format!("{start} <= {column} < {end}"),
                    (Some(start), None) => format!("{start} <= {column}"),
                    (None, None) => column.clone(),
                }
            }
        }
    }

    /// The keys in their canonical form.
    pub(super) fn write(&self, out: &mut Text) {
        out.line("buckets", self.rule_text());
        if let Some(curve) = self.curve_text() {
            out.line("curve", curve);
        }
    }

    /// The rule on one line.
    pub(super) fn rule_text(&self) -> String {
        let Buckets { column, rule, names, none, curve: _ } = self;
        let list = |all: Vec<String>| format!("[{}]", all.join(", "));
        let texts = |all: &[String]| list(all.iter().map(|text| quoted(text)).collect());
        let mut pairs = vec![format!("column = {}", quoted(column))];
        match rule {
            BucketRule::Edges(edges) => {
                let edges = edges.iter().map(|edge| float(*edge)).collect();
                pairs.push(format!("edges = {}", list(edges)));
            }
            BucketRule::Values(values, other) => {
                pairs.push(format!("values = {}", texts(values)));
                pairs.extend(other.iter().map(|other| format!("other = {}", quoted(other))));
            }
        }
        pairs.push(format!("names = {}", texts(names)));
        pairs.extend(none.iter().map(|none| format!("none = {}", quoted(none))));
        inline(pairs)
    }

    /// The curve on one line; `None` for the default.
    pub(super) fn curve_text(&self) -> Option<String> {
        match &self.curve {
            BucketCurve::Even => None,
            BucketCurve::Weights(weights) => {
                let weights: Vec<_> =
                    weights.iter().map(|weight| quoted(&weight.to_string())).collect();
                Some(format!("{{ weights = [{}] }}", weights.join(", ")))
            }
            BucketCurve::Power(PowerCurve { power, cap, drop, tokens }) => Some(inline(vec![
                format!("power = {power}"),
                format!("cap = {cap}"),
                format!("drop = {}", quoted(&drop.to_string())),
                format!("tokens = {tokens}"),
            ])),
        }
    }
}

/// The sources that are cut into buckets, with how.
fn bucketed(sources: &Sources) -> impl Iterator<Item = (&String, &Buckets)> {
    sources.iter().filter_map(|(name, spec)| Some((name, spec.buckets.as_ref()?)))
}

fn bucket<'a>(sources: &'a Sources, name: &str) -> Option<(&'a str, &'a Buckets, usize)> {
    bucketed(sources).find_map(|(source, buckets)| {
        let bucket = name.strip_prefix(source.as_str())?.strip_prefix('/')?;
        let number = buckets.all().position(|one| one == bucket)?;
        Some((source.as_str(), buckets, number))
    })
}

/// The sources without keys that only spell out what they have without them. Refuses a bucket that is cut again.
pub(super) fn checked(mut sources: Sources, places: &KeySpans) -> Result<Sources> {
    let names: Vec<String> = sources.keys().cloned().collect();
    for name in names {
        let whole = bucket(&sources, &name).map(|(whole, ..)| whole.to_owned());
        // A source precedes its buckets.
        let inherited = whole.as_ref().and_then(|whole| sources.get(whole)).cloned();
        let Some(spec) = sources.get_mut(&name) else { continue };
        match whole {
            Some(whole) if spec.buckets.is_some() => {
                let what = format!("{name:?} is a bucket of {whole:?} already");
                let fault = places.fault(&format!("source.{name}.buckets"), what);
                return Err(fault.wanted("one rule for each source"));
            }
            // Here one epoch may be less than the source that it is a bucket of may have.
            Some(_) => {}
            None => spec.max_epochs = spec.max_epochs.filter(|epochs| *epochs != 1),
        }
        let SourceSpec { fim, mask, loss_weight, .. } = inherited.unwrap_or_default();
        let same = |own: &Fim| fim.as_ref().map_or(own.rate.is_zero(), |fim| fim == own);
        spec.fim = spec.fim.take().filter(|own| !same(own));
        spec.mask = spec.mask.filter(|own| mask != Some(*own));
        let loss_weight = loss_weight.unwrap_or(Ratio::new(1, 1));
        spec.loss_weight = spec.loss_weight.filter(|own| *own != loss_weight);
    }
    Ok(sources)
}

impl Curriculum {
    /// The sources that are cut into buckets, with how.
    pub fn bucketed(&self) -> impl Iterator<Item = (&String, &Buckets)> {
        bucketed(&self.sources)
    }

    /// The source that `name` is a bucket of, how that is cut, and the number of the bucket.
    pub fn bucket(&self, name: &str) -> Option<(&str, &Buckets, usize)> {
        bucket(&self.sources, name)
    }

    /// The source that `name` is a bucket of, or `name` itself.
    pub fn whole<'a>(&'a self, name: &'a str) -> &'a str {
        self.bucket(name).map_or(name, |(whole, ..)| whole)
    }

    /// The same curriculum, where each mix has the buckets of a source instead of the source: by name of the source,
    /// the buckets with their shares.
    pub fn dealt(&self, deals: &BTreeMap<String, Vec<(String, Ratio)>>) -> Result<Curriculum> {
        let mut dealt = self.clone();
        for phase in &mut dealt.phases {
            let samples = phase.samples();
            phase.mix = phase.mix.dealt(deals, samples).map_err(|fault| {
                fault.or_at(|| self.place(&format!("phase.{}.mix", phase.name)))
            })?;
        }
        let longest = dealt.phases.iter().map(Phase::samples).max().unwrap_or_default();
        for (number, amendment) in dealt.amendments.iter_mut().enumerate() {
            let Some(mix) = &mut amendment.mix else { continue };
            *mix = mix.dealt(deals, longest).map_err(|fault| {
                fault.or_at(|| self.place(&format!("amendment.{}.mix", number + 1)))
            })?;
        }
        Ok(dealt)
    }
}
