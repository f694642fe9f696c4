//! The fast encoder: `fastokens`, with additions that make it exact and fast on every text.
//!
//! Only this folder uses `fastokens`. It could be offered upstream: each file uses only the library's public API, and
//! states its guarantee with a proof.
//!
//! - `windows`: long words are merged window by window with the same ids, in linear time, since no merge crosses a
//!   joint whose two neighbours merge to themselves. Covered by every test below, with merges in random order.
//! - `long`: finds the words longer than [`windows::LONG`] of a known split and merges them so; all else is left to the
//!   library. No match of a known split crosses certain places, so a long word is in a stretch without any. Tested by
//!   `every_known_split_ends_a_word_where_it_is_said_to` and `ids_are_those_of_the_reference_on_hard_texts`.
//! - `whole`: a text that is one word (SentencePiece) is encoded part by part, since no merge crosses a place whose two
//!   characters are adjacent in no token. Tested by `every_form_has_the_ids_of_the_reference`.
//! - `splits`: the words of consecutive splits are encoded from the text, not from a copy with a character per byte,
//!   since mapping bytes does not change where words end. Tested by `splits_in_a_row_have_the_ids_of_the_reference`.
//! - `classes`: consecutive splits that depend only on character classes use one table instead of one expression after
//!   the other. Tested by `splits_of_classes_have_the_ids_of_the_reference`.
//! - `runs`: a run of spaces is replaced by its added tokens without a search at every byte. Added tokens match
//!   leftmost and longest, so those of a run can be computed. Tested by `runs_of_spaces_have_the_ids_of_the_reference`.
//! - `suffixed`: words that end in a suffix (CLIP) become words of a byte-level model with a space after each; a merge
//!   of the last byte with this space, before all other merges, makes the suffixed symbol. Tested by
//!   `words_that_end_in_a_suffix_have_the_ids_of_the_reference`.
//!
//! Further differences between the two libraries are handled here. Ids without a token are given one that no text
//! contains ([`without_gaps`]). The contraction with a long s is refused ([`LONG_S`]), and so are added tokens that
//! match only whole words, `Metaspace` before a model without bytes, and words that end in a suffix but are not CLIP's.
//! The post-processor is ignored: it only adds tokens around a text, and only on request, which is never made.
//!
//! Invariant: `encode` gives the ids of Hugging Face `tokenizers`, or an error, after which the reference is used.

mod classes;
mod long;
mod runs;
mod splits;
mod suffixed;
#[cfg(test)]
mod tests;
mod whole;
mod windows;

use contract::guard::quietly;
use fastokens::AddedTokenPolicy;
use serde_json::Value;

use long::LongWords;
use runs::Runs;
use splits::Splits;
use suffixed::Suffixed;
use whole::{Form, Whole};

/// The fast encoder of one tokenizer.
pub(super) struct Fast {
    library: fastokens::Tokenizer,
    words: Words,
    /// The added tokens that are runs of spaces, if there are any.
    runs: Option<Runs>,
    /// Whether the split matches letters of either case.
    either_case: bool,
}

/// How text is cut into words, and how long ones are merged.
enum Words {
    /// The library itself.
    Library,
    /// A known split.
    Split(LongWords),
    /// Several consecutive splits.
    Splits(Splits),
    /// CLIP's words, each of which ends in a suffix.
    Suffixed(Suffixed),
    /// None: the text is one word.
    Whole(Whole),
}

/// An apostrophe and a long s. If case is ignored, the reference and Unicode match it as the contraction `'s`, but the
/// fast encoder does not.
const LONG_S: &str = "'\u{17f}";

impl Fast {
    /// The fast encoder if it covers this tokenizer, or why not.
    pub(super) fn new(mut json: Value) -> Result<Fast, String> {
        let whole_words = json["added_tokens"].as_array().is_some_and(|added| {
            added.iter().any(|token| token["single_word"] == true && token["special"] != true)
        });
        if whole_words {
            return Err("an added token matches whole words only".to_owned());
        }
        if let Some(whole) = json.as_object_mut() {
            whole.remove("post_processor");
        }
        let suffixed = Suffixed::of(&mut json)?;
        let mut json = without_gaps(json)?;
        let form = Form::of(&mut json)?;
        let metaspace = matches!(form, Some(Form::Metaspace(_)));
        let is_suffixed = suffixed.is_some();
        let words = match (suffixed, form) {
            (Some(suffixed), _) => Some(Words::Suffixed(suffixed)),
            (None, Some(form)) => Whole::new(form, &json).map(Words::Whole),
            (None, None) => LongWords::new(&json)
                .map(Words::Split)
                .or_else(|| Splits::new(&json).map(Words::Splits)),
        };
        let runs = Runs::new(&json);
        let either_case = json["pre_tokenizer"].to_string().contains("(?i");
        let mut library = quietly(|| fastokens::Tokenizer::from_json(json))
            .map_err(|_| "it panicked on this tokenizer.json".to_owned())?
            .map_err(|error| error.to_string())?;
        library.set_truncation(None);
        library.set_padding(None);
        // The word rules are read from the file, so the library must merge in exactly the same way.
        let words = words.filter(|words| match words {
            Words::Whole(_) => Whole::fits(library.model()),
            _ => library.model().supports_fused_byte_level(),
        });
        if metaspace && words.is_none() {
            return Err("Metaspace stands before a model without a token for every byte".to_owned());
        }
        if is_suffixed && words.is_none() {
            return Err(
                "its words end in a suffix, and its model has no token for every byte".to_owned()
            );
        }
        Ok(Fast { library, words: words.unwrap_or(Words::Library), runs, either_case })
    }

    /// The ids of `text`, or why it could not be encoded.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        if self.either_case && memchr::memmem::find(text.as_bytes(), LONG_S.as_bytes()).is_some() {
            return Err("it misses the contraction with a long s".to_owned());
        }
        quietly(|| match &self.runs {
            Some(runs) => runs.encode(text, |part| self.part(part)),
            None => self.part(text),
        })
        .map_err(|_| "it panicked".to_owned())?
    }

    /// The ids of a text, or of the part between two added tokens.
    fn part(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.words {
            Words::Split(long) if long.suspects(text) => long.encode(&self.library, text),
            Words::Splits(splits) => splits.encode(&self.library, text),
            Words::Suffixed(suffixed) => suffixed.encode(&self.library, text),
            Words::Whole(whole) => whole.encode(&self.library, text),
            _ => self
                .library
                .encode_with_policy(text, false, AddedTokenPolicy::SkipSpecial)
                .map_err(|error| error.to_string()),
        }
    }
}

/// The limit on unused ids that are given a token.
const GAPS_MAX: usize = 1 << 16;

/// Gives each unused id a token that no text contains, since `fastokens` requires a model's ids to have no gaps.
/// (cl100k and o200k skip some below their special tokens.) Under a byte-level pre-tokenizer, a space never reaches the
/// model, so a token with a space cannot match.
fn without_gaps(mut json: Value) -> Result<Value, String> {
    let byte_level = json["pre_tokenizer"].to_string().contains("\"ByteLevel\"");
    let Some(vocab) = json.pointer_mut("/model/vocab").and_then(Value::as_object_mut) else {
        return Ok(json);
    };
    let mut ids: Vec<u64> = vocab.values().filter_map(Value::as_u64).collect();
    ids.sort_unstable();
    ids.dedup();
    let end = ids.last().map_or(0, |last| last.saturating_add(1));
    let missing = end - ids.len() as u64;
    if missing == 0 || !byte_level {
        return Ok(json);
    }
    if missing > GAPS_MAX as u64 {
        return Err(format!("{missing} ids below {end} have no token"));
    }
    for id in (0..end).filter(|id| ids.binary_search(id).is_err()) {
        vocab.insert(format!(" unused {id}"), id.into());
    }
    Ok(json)
}
