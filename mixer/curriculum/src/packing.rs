//! `[source.NAME]`: how many epochs of a source may be read, and how its documents become sequences.

use std::collections::BTreeMap;

use contract::Result;
use contract::ratio::gcd;
use schemars::JsonSchema;
use serde::Deserialize;
use settings::{File, Spanned, Value};

use super::buckets::{BucketCurve, BucketCurveText, Buckets, BucketsText};
use super::objective::{FimText, MaskText, loss_weight};
use super::places::KeySpans;
use super::text::inline;
use super::weights::Weight;
use super::{SourceSpec, WEIGHT_MAX};

/// Default maximum of documents in a pack.
const DOCUMENTS: u32 = 256;

/// The longest sequence that documents are packed into: the packer keeps one list for each possible amount of free
/// space.
const LENGTH_MAX: u32 = 1 << 24;

/// `packing = "best-fit"`: documents that fit are not cut, and are combined so that little is padded.
///
/// Each document is packed at one of the declared lengths, sampled by its number with these weights, so phases of
/// different lengths never share documents. Adding a length resamples every document. So lengths are declared, not
/// collected from the phases: a phase planned later changes no earlier step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Sequence lengths in tokens, each with its weight: above zero, without a common divisor.
    pub lengths: BTreeMap<u32, u64>,
    /// The most documents in a pack, at least 1.
    pub documents: u32,
}

/// How often a source may be read, and how its documents become sequences.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Source")]
pub(super) struct SourceText {
    /// How often the source may be read in the whole run; a run that needs more is refused before it starts.
    #[schemars(extend("default" = 1, "digest" = "- (it only refuses, except in a mix that reacts)"))]
    max_epochs: Option<u64>,
    /// How documents become sequences.
    #[schemars(extend("default" = "concatenate", "digest" = "plan, run (where not `\"concatenate\"`)"))]
    packing: Option<PackingText>,
    /// Lengths of sequences at which documents are packed (tokens, at most 2^24), each with a whole number as weight.
    /// Needed with `"best-fit"`; every phase that has the source uses one of them as `seq_len`.
    #[schemars(extend("digest" = "plan, run"))]
    lengths: Option<BTreeMap<String, u64>>,
    /// Documents in a sequence, at most.
    #[schemars(extend("default" = DOCUMENTS, "digest" = "plan, run"))]
    pack_documents: Option<u32>,
    /// Cuts the source into buckets by a column that its corpus keeps. Each is a source `"NAME/BUCKET"`.
    #[schemars(extend("digest" = "plan, run"))]
    buckets: Option<BucketsText>,
    /// How a mix that names the source is dealt over its buckets. Without it each is read as often.
    #[schemars(extend("digest" = "plan, run"))]
    curve: Option<BucketCurveText>,
    /// Fill-in-the-middle: some pieces of text are rearranged, with three tokens that mark their parts.
    #[schemars(extend("digest" = "plan, run"))]
    fim: Option<FimText>,
    /// Labels that are left out, by a hash of the tokens before them (goldfish loss).
    #[schemars(extend("digest" = "plan, run"))]
    mask: Option<MaskText>,
    /// What the loss of each label is multiplied by, from a millionth to a million, taken exactly. How often text is
    /// read stays with the mix.
    #[schemars(with = "Option<Weight>", extend("default" = 1, "digest" = "plan, run (where not 1)"))]
    loss_weight: Option<Spanned<Value>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum PackingText {
    /// The documents of a source are one text, cut into sequences.
    Concatenate,
    /// Documents are packed so that few are cut and little is padded.
    BestFit,
}

impl SourceText {
    /// The settings of source `name`.
    pub(super) fn spec(self, name: &str, file: &File, places: &KeySpans) -> Result<SourceSpec> {
        let SourceText {
            max_epochs,
            packing,
            lengths,
            pack_documents,
            buckets,
            curve,
            fim,
            mask,
            loss_weight: weight,
        } = self;
        let buckets = cut(name, buckets, curve, file, places)?;
        let key = |key: &str| format!("source.{name}.{key}");
        let fim = fim.map(|fim| fim.read(&key("fim"), file, places)).transpose()?;
        let mask = mask.map(|mask| mask.read(&key("mask"), places)).transpose()?;
        let loss_weight = weight.map(|weight| loss_weight(&weight, file)).transpose()?;
        let cap = match buckets.as_ref().map(|buckets| &buckets.curve) {
            Some(BucketCurve::Power(curve)) => Some(curve.cap),
            _ => None,
        };
        if cap.is_some() && max_epochs.is_some() {
            let what = "`cap` of the curve limits the epochs of this source";
            let fault = places.fault(&key("max_epochs"), what);
            return Err(fault.hint("leave `max_epochs` out"));
        }
        let max_epochs = cap.or(max_epochs);
        if max_epochs == Some(0) {
            let fault = places.out_of_range(&key("max_epochs"));
            return Err(fault.wanted("a whole number of at least 1"));
        }
        if packing != Some(PackingText::BestFit) {
            let idle =
                [("lengths", lengths.is_some()), ("pack_documents", pack_documents.is_some())];
            if let Some((idle, _)) = idle.into_iter().find(|(_, there)| *there) {
                return Err(places
                    .fault(
                        &key(idle),
                        format!("`{idle}` is only asked for where documents are packed"),
                    )
                    .hint("add packing = \"best-fit\", or leave it out"));
            }
            return Ok(SourceSpec { max_epochs, packing: None, buckets, fim, mask, loss_weight });
        }
        let packing = packed(name, lengths, pack_documents, places)?;
        Ok(SourceSpec { max_epochs, packing: Some(packing), buckets, fim, mask, loss_weight })
    }
}

/// The buckets of source `name`, if it is cut.
fn cut(
    name: &str,
    buckets: Option<BucketsText>,
    curve: Option<BucketCurveText>,
    file: &File,
    places: &KeySpans,
) -> Result<Option<Buckets>> {
    match (buckets, curve) {
        (Some(buckets), curve) => Ok(Some(buckets.read(name, curve, file, places)?)),
        (None, None) => Ok(None),
        (None, Some(_)) => {
            let what = "`curve` is only asked for with `buckets`";
            let fault = places.fault(&format!("source.{name}.curve"), what);
            Err(fault.hint("say what cuts the source into buckets, or leave it out"))
        }
    }
}

/// How the documents of source `name` are packed.
fn packed(
    name: &str,
    lengths: Option<BTreeMap<String, u64>>,
    pack_documents: Option<u32>,
    places: &KeySpans,
) -> Result<Packing> {
    let key = |key: &str| format!("source.{name}.{key}");
    let wanted = "lengths = { 4096 = 3, 32768 = 1 }: each length of a sequence with its weight";
    let Some(lengths) = lengths else {
        return Err(places.missing(&format!("source.{name}"), "lengths", wanted));
    };
    let wrong = |what: String| places.fault(&key("lengths"), what).wanted(wanted);
    let mut whole = BTreeMap::new();
    for (length, weight) in lengths {
        let tokens = length.parse::<u32>().ok().filter(|tokens| tokens.to_string() == length);
        match tokens.filter(|tokens| *tokens > 0) {
            None => return Err(wrong(format!("{length:?} is not a number of tokens"))),
            Some(_) if weight == 0 => {
                let fault = wrong(format!("the weight of length {length} is not above zero"));
                return Err(fault.hint("leave a length out to pack no document at it"));
            }
            Some(tokens) if tokens > LENGTH_MAX => {
                let fault = places.fault(&key("lengths"), format!("length {length} is too long"));
                return Err(fault.wanted(format!("lengths of at most {LENGTH_MAX} tokens")));
            }
            Some(tokens) => whole.insert(tokens, weight),
        };
    }
    let sum = whole.values().try_fold(0u64, |sum, weight| sum.checked_add(*weight));
    if sum.is_none_or(|sum| sum == 0 || sum > WEIGHT_MAX) {
        return Err(wrong("no length is declared, or their weights are too large".to_owned()));
    }
    let divisor = whole.values().fold(0, |divisor, weight| gcd(divisor, *weight));
    whole.values_mut().for_each(|weight| *weight /= divisor);
    let documents = pack_documents.unwrap_or(DOCUMENTS);
    if documents == 0 {
        return Err(places.out_of_range(&key("pack_documents")).wanted("at least 1"));
    }
    Ok(Packing { lengths: whole, documents })
}

impl Packing {
    /// The lengths and weights as text.
    pub(super) fn lengths_text(&self) -> String {
        let pair = |(length, weight): (&u32, &u64)| format!("{length} = {weight}");
        inline(self.lengths.iter().map(pair).collect())
    }

    /// All settings that affect the plan, on one line.
    pub(super) fn meaning(&self) -> String {
        format!("best-fit, lengths = {}, pack_documents = {}", self.lengths_text(), self.documents)
    }
}

#[cfg(test)]
mod tests {
    use crate::Curriculum;

    /// The packer keeps one list for each possible amount of free space: 100 GB for the largest number.
    #[test]
    fn a_length_has_a_bound() {
        let phase = "[[phase]]\nname = \"a\"\nsteps = 1\nseq_len = 8\nbatch = 1\nmix = { x = 1 }\n";
        let parse = |lengths: &str| {
            let source = format!("[source.x]\npacking = \"best-fit\"\nlengths = {{ {lengths} }}\n");
            Curriculum::parse(&format!("store = \"s\"\n{source}{phase}"), "c.toml")
        };
        parse("8 = 1, 16777216 = 1").unwrap();
        for length in ["16777217", "4294967295"] {
            let told = parse(&format!("8 = 1, {length} = 1")).unwrap_err().to_string();
            assert!(
                told.starts_with(&format!("c.toml:4:1: length {length} is too long")),
                "{told}"
            );
            assert!(told.contains("at most 16777216 tokens"), "{told}");
        }
    }
}
