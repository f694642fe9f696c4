//! `[source.NAME]`: how many epochs of a source may be read, and how its documents become sequences.

use std::collections::BTreeMap;

use contract::Result;
use contract::ratio::gcd;
use schemars::JsonSchema;
use serde::Deserialize;

use super::places::KeySpans;
use super::text::inline;
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
    #[schemars(extend("default" = 1, "digest" = "- (it only refuses)"))]
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
    pub(super) fn spec(self, name: &str, places: &KeySpans) -> Result<SourceSpec> {
        let SourceText { max_epochs, packing, lengths, pack_documents } = self;
        let key = |key: &str| format!("source.{name}.{key}");
        let max_epochs = max_epochs.unwrap_or(SourceSpec::default().max_epochs);
        if max_epochs == 0 {
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
                    .hint("say packing = \"best-fit\" beside it, or leave it out"));
            }
            return Ok(SourceSpec { max_epochs, packing: None });
        }
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
                    let fault =
                        places.fault(&key("lengths"), format!("length {length} is too long"));
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
        Ok(SourceSpec { max_epochs, packing: Some(Packing { lengths: whole, documents }) })
    }
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
