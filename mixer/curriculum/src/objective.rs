//! `[source.NAME] fim`, `mask`, `loss_weight`: what the model is asked to predict of a source's text, other than each
//! next token, and how much that counts.

use contract::{Ratio, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use settings::{File, Spanned, Value};

use super::Curriculum;
use super::places::KeySpans;
use super::text::{Text, inline, quoted};
use super::weights::Weight;

/// The default context of a mask: that of the models that the paper pretrains (Hans et al. 2024).
const CONTEXT: u32 = 13;

/// The longest context: that many tokens before each sequence are read as well.
const CONTEXT_MAX: u32 = 1024;

/// Fill-in-the-middle (Bavarian et al. 2022, arXiv 2207.14255), at the level of a sequence: a piece, which is the text
/// of one document in one sequence, is cut into prefix, middle and suffix, and the middle is moved to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fim {
    /// The share of pieces that are rearranged, at most 1.
    pub rate: Ratio,
    /// The share of those in the order suffix, prefix, middle, at most 1.
    pub spm: Ratio,
    /// The tokens before prefix, middle and suffix.
    pub sentinels: [Sentinel; 3],
}

/// A token that marks a part of a rearranged piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sentinel {
    /// By its id.
    Id(u32),
    /// By its name, which only a store's tokenizer can resolve.
    Name(String),
}

/// The keys of [`Fim::sentinels`], in their order.
pub const SENTINEL_KEYS: [&str; 3] = ["prefix", "middle", "suffix"];

/// The goldfish loss (Hans et al. 2024, arXiv 2406.10209): a token is no label if a hash of the tokens before it says
/// so. Text that is repeated is masked at the same tokens each time, so the model never learns these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LabelMask {
    /// One token in so many is no label, on average; at least 2.
    pub every: u64,
    /// How many tokens before a token decide.
    pub context: u32,
}

/// Fill-in-the-middle: some pieces of text are rearranged so that the model predicts their middle from both sides.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Fim")]
pub(super) struct FimText {
    /// The share of pieces that are rearranged, 0 to 1, taken exactly.
    #[schemars(with = "Weight", extend("digest" = "plan, run"))]
    rate: Spanned<Value>,
    /// The share of these in the order suffix, prefix, middle (SPM) instead of prefix, suffix, middle (PSM).
    #[schemars(with = "Option<Weight>", extend("default" = "1/2", "digest" = "plan, run"))]
    spm: Option<Spanned<Value>>,
    /// The token before the prefix: the name of an added token of the tokenizer, or an id.
    #[schemars(with = "SentinelText", extend("digest" = "plan, run"))]
    prefix: Spanned<Value>,
    /// The token before the middle.
    #[schemars(with = "SentinelText", extend("digest" = "plan, run"))]
    middle: Spanned<Value>,
    /// The token before the suffix.
    #[schemars(with = "SentinelText", extend("digest" = "plan, run"))]
    suffix: Spanned<Value>,
}

/// A token, by name or id.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a value that is read with its place")]
enum SentinelText {
    Name(String),
    Id(u32),
}

/// Leaves out labels by a hash of the tokens before them, so that repeated text is not learnt by heart.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Mask")]
pub(super) struct MaskText {
    /// One token in so many is no label, on average; at least 2.
    #[schemars(extend("digest" = "plan, run"))]
    every: u64,
    /// How many tokens before a token decide, 1 to 1,024. The first ones of a document are always labels.
    #[schemars(extend("default" = CONTEXT, "digest" = "plan, run"))]
    context: Option<u32>,
}

/// The largest loss weight, and the reciprocal of the smallest.
const LOSS_WEIGHT_MAX: u128 = 1_000_000;

/// Reads `loss_weight`.
pub(super) fn loss_weight(weight: &Spanned<Value>, file: &File) -> Result<Ratio> {
    let inside = |weight: &Ratio| {
        let [num, den] = [weight.num(), weight.den()].map(u128::from);
        num <= den * LOSS_WEIGHT_MAX && den <= num * LOSS_WEIGHT_MAX
    };
    file.ratio(weight).ok().filter(inside).ok_or_else(|| {
        let wanted = "a number from 1/1000000 to 1000000, such as 2, 0.5 or \"3/2\"";
        let fault = file.wrong("loss_weight", weight, wanted);
        fault.hint("leave a source out of the mix to train on none of its text")
    })
}

impl FimText {
    /// Reads the table at `path`.
    pub(super) fn read(self, path: &str, file: &File, places: &KeySpans) -> Result<Fim> {
        let FimText { rate, spm, prefix, middle, suffix } = self;
        let share = |key: &str, value: &Spanned<Value>| {
            let share = file.ratio(value).ok().filter(|share| share.num() <= share.den());
            share.ok_or_else(|| {
                file.wrong(key, value, "a share from 0 to 1, such as 0.5 or \"1/2\"")
            })
        };
        let sentinel = |key: &str, value: &Spanned<Value>| {
            let found = match value.get_ref() {
                Value::Integer(id) => u32::try_from(*id).ok().map(Sentinel::Id),
                Value::String(name) => Some(Sentinel::Name(name.clone())),
                _ => None,
            };
            let wanted = "the name of an added token, such as \"<|fim_prefix|>\", or an id";
            found.ok_or_else(|| file.wrong(key, value, wanted))
        };
        let sentinels = [
            sentinel(SENTINEL_KEYS[0], &prefix)?,
            sentinel(SENTINEL_KEYS[1], &middle)?,
            sentinel(SENTINEL_KEYS[2], &suffix)?,
        ];
        let spm = spm.map_or(Ok(Ratio::new(1, 2)), |spm| share("spm", &spm))?;
        let fim = Fim { rate: share("rate", &rate)?, spm, sentinels };
        fim.check(path, places)?;
        Ok(fim)
    }
}

impl MaskText {
    /// Reads the table at `path`.
    pub(super) fn read(self, path: &str, places: &KeySpans) -> Result<LabelMask> {
        let MaskText { every, context } = self;
        let outside = |key: &str| places.out_of_range(&format!("{path}.{key}"));
        if every < 2 {
            return Err(outside("every").wanted("at least 2: half of the tokens are no labels"));
        }
        let context = context.unwrap_or(CONTEXT);
        if !(1..=CONTEXT_MAX).contains(&context) {
            return Err(outside("context").wanted(format!("1 to {CONTEXT_MAX} tokens")));
        }
        Ok(LabelMask { every, context })
    }
}

impl Fim {
    /// Refuses two parts that one token marks.
    fn check(&self, path: &str, places: &KeySpans) -> Result<()> {
        let [prefix, middle, suffix] = &self.sentinels;
        let equal = match (prefix == middle, middle == suffix || prefix == suffix) {
            (false, false) => return Ok(()),
            (true, _) => SENTINEL_KEYS[1],
            (false, true) => SENTINEL_KEYS[2],
        };
        let what = format!("`{equal}` is a token that marks another part, too");
        Err(places.fault(&format!("{path}.{equal}"), what).wanted("three different tokens"))
    }

    /// The settings on one line.
    pub(super) fn text(&self) -> String {
        let Fim { rate, spm, sentinels } = self;
        let ratio = |ratio: &Ratio| quoted(&ratio.to_string());
        let mut pairs = vec![format!("rate = {}", ratio(rate)), format!("spm = {}", ratio(spm))];
        let pair = |(key, sentinel): (&&str, &Sentinel)| match sentinel {
            Sentinel::Id(id) => format!("{key} = {id}"),
            Sentinel::Name(name) => format!("{key} = {}", quoted(name)),
        };
        pairs.extend(SENTINEL_KEYS.iter().zip(sentinels).map(pair));
        inline(pairs)
    }
}

impl LabelMask {
    /// The settings on one line.
    pub(super) fn text(&self) -> String {
        let LabelMask { every, context } = self;
        inline(vec![format!("every = {every}"), format!("context = {context}")])
    }
}

/// Writes the keys of a source in their canonical form.
pub(super) fn write(fim: &Option<Fim>, mask: &Option<LabelMask>, out: &mut Text) {
    fim.iter().for_each(|fim| out.line("fim", fim.text()));
    mask.iter().for_each(|mask| out.line("mask", mask.text()));
}

impl Curriculum {
    /// How pieces of `source` are rearranged: as stated for it or the source that it is a bucket of; `None`: not.
    pub fn fim(&self, source: &str) -> Option<&Fim> {
        let stated = self.specs(source).into_iter().flatten().find_map(|spec| spec.fim.as_ref());
        stated.filter(|fim| !fim.rate.is_zero())
    }

    /// Which labels of `source` are left out, in the same way.
    pub fn mask(&self, source: &str) -> Option<&LabelMask> {
        self.specs(source).into_iter().flatten().find_map(|spec| spec.mask.as_ref())
    }

    /// What the loss of each label of `source` is multiplied by, in the same way.
    pub fn loss_weight(&self, source: &str) -> Ratio {
        let stated = self.specs(source).into_iter().flatten().find_map(|spec| spec.loss_weight);
        stated.unwrap_or(Ratio::new(1, 1))
    }

    /// Replaces the names of sentinels by the ids that `id` finds, and checks that they still differ.
    pub fn resolve_sentinels(&mut self, id: impl Fn(&Sentinel) -> Result<u32>) -> Result<()> {
        for (name, spec) in &mut self.sources {
            let Some(fim) = &mut spec.fim else { continue };
            let path = format!("source.{name}.fim");
            for (key, sentinel) in SENTINEL_KEYS.iter().zip(&mut fim.sentinels) {
                let place = || self.places.place(&format!("{path}.{key}"));
                *sentinel = Sentinel::Id(id(sentinel).map_err(|fault| fault.or_at(place))?);
            }
            fim.check(&path, &self.places)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::Curriculum;

    fn parse(source: &str) -> contract::Result<Curriculum> {
        let phase = "[[phase]]\nname = \"a\"\nsteps = 9\nseq_len = 8\nbatch = 1\nmix = { x = 1 }\n";
        Curriculum::parse(&format!("store = \"s\"\n[source.x]\n{source}\n{phase}"), "c.toml")
    }

    #[test]
    fn mistakes_have_a_place() {
        let names = "prefix = \"<p>\", middle = \"<m>\"";
        for (source, said) in [
            (
                format!("fim = {{ rate = 1.5, {names}, suffix = 3 }}"),
                "c.toml:3:16: `rate` cannot have",
            ),
            (
                format!("fim = {{ rate = 1, spm = \"3/2\", {names}, suffix = 3 }}"),
                "`spm` cannot have",
            ),
            (format!("fim = {{ rate = 1, {names}, suffix = -3 }}"), "`suffix` cannot have"),
            (
                format!("fim = {{ rate = 1, {names}, suffix = \"<p>\" }}"),
                "`suffix` is a token that marks",
            ),
            (format!("fim = {{ rate = 1, {names} }}"), "suffix"),
            ("mask = { every = 1 }".to_owned(), "c.toml:3:10: `every` is out of range"),
            ("mask = { every = 4, context = 0 }".to_owned(), "`context` is out of range"),
            ("loss_weight = 0".to_owned(), "c.toml:3:15: `loss_weight` cannot have this value"),
            ("loss_weight = 1e7".to_owned(), "`loss_weight` cannot"),
            ("mask = { every = 4, contxt = 0 }".to_owned(), "context"),
        ] {
            let fault = parse(&source).unwrap_err().to_string();
            assert!(fault.contains(said), "{source}: {fault}");
        }
    }

    #[test]
    fn the_canonical_text_means_the_same() {
        let fim = "fim = { rate = 0.5, prefix = \"<p>\", middle = 7, suffix = \"<s>\" }";
        let source = format!("{fim}\nmask = {{ every = 4 }}\nloss_weight = 1.5");
        let read = parse(&source).unwrap();
        let text = read.canonical();
        assert!(text.contains("fim = { rate = \"1/2\", spm = \"1/2\", prefix = \"<p>\", middle = 7, suffix = \"<s>\" }"));
        assert!(text.contains("mask = { every = 4, context = 13 }"));
        assert!(text.contains("loss_weight = \"3/2\""));
        let again = Curriculum::parse(&text, "again.toml").unwrap();
        assert_eq!(again.canonical(), text);
        assert_eq!((again.fim("x"), again.mask("x")), (read.fim("x"), read.mask("x")));
        let told: Vec<_> =
            read.difference(&parse("").unwrap()).iter().map(ToString::to_string).collect();
        assert_eq!(told.len(), 3, "{told:?}");
        assert!(
            told[0].starts_with("source.x.fim: ") && told[0].ends_with("from step 1"),
            "{told:?}"
        );
        assert!(told[1].starts_with("source.x.mask: "), "{told:?}");
        assert!(told[2].starts_with("source.x.loss_weight: 3/2 became 1, "), "{told:?}");
    }

    /// A bucket has the objective of its source, unless it states its own.
    #[test]
    fn a_bucket_has_the_objective_of_its_source() {
        let fim = "fim = { rate = 1, prefix = 1, middle = 2, suffix = 3 }";
        let read = parse(&format!(
            "{fim}\nmask = {{ every = 4 }}\nloss_weight = 2\nbuckets = {{ column = \"q\", edges = [1] }}\n\
             [source.\"x/1\"]\nfim = {{ rate = 0, prefix = 1, middle = 2, suffix = 3 }}\nloss_weight = 1"
        ))
        .unwrap();
        let again = Curriculum::parse(&read.canonical(), "again.toml").unwrap();
        for read in [read, again] {
            assert!(read.fim("x/0").is_some() && read.fim("x/0") == read.fim("x"));
            assert_eq!((read.fim("x/1"), read.mask("x/1")), (None, read.mask("x")));
            let weights = ["x", "x/0", "x/1"].map(|name| read.loss_weight(name).to_string());
            assert_eq!(weights, ["2", "2", "1"]);
        }
        // What a bucket has in any case need not be said.
        let said = |source: &str, bucket: &str| {
            let buckets = "buckets = { column = \"q\", edges = [1] }";
            parse(&format!("{source}\n{buckets}\n[source.\"x/1\"]\n{bucket}")).unwrap().canonical()
        };
        let off = fim.replace("rate = 1", "rate = 0");
        let own = format!("{fim}\nmask = {{ every = 4 }}\nloss_weight = 2");
        assert_eq!(said(&own, &own), said(&own, ""));
        assert_eq!(said("", &format!("{off}\nloss_weight = 1")), said("", ""));
        assert_ne!(said(&own, &off), said(&own, ""));
        assert_ne!(said(&own, "loss_weight = 1"), said(&own, ""));
    }

    /// Defaults that are spelled out: nothing may differ from a curriculum without the keys.
    #[test]
    fn defaults_are_as_none() {
        let fim = "fim = { rate = 0, prefix = 1, middle = 2, suffix = 3 }";
        let read = parse(&format!("{fim}\nloss_weight = 1.0")).unwrap();
        assert_eq!(read.canonical(), parse("").unwrap().canonical());
        assert_eq!(read.fim("x"), None);
        assert!(read.difference(&parse("").unwrap()).is_empty());
    }
}
