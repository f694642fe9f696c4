//! The fast encoder: `fastokens`, and what it needs to be exact and fast on every text.
//!
//! This folder alone encodes with `fastokens`. It could be offered upstream: each file takes from the library only what is
//! public, and says at its head what it guarantees and why that is so.
//!
//! - `windows`: a long word is merged to the same ids window by window, in time linear in its length, since no merge
//!   crosses a joint whose two neighbours merge to themselves. Shown by every test below, with merges in drawn order.
//! - `long`: the words longer than [`windows::LONG`] of a known split are found and merged so; all else is the library's. No
//!   match of a known split goes over certain places, so that a long word lies in a stretch without any. Shown by
//!   `every_known_split_ends_a_word_where_it_is_said_to` and `ids_are_those_of_the_reference_on_hard_texts`.
//! - `whole`: a text that is one word (SentencePiece) is encoded part by part, since no merge goes over a place where no
//!   token has these two characters side by side. Shown by `every_form_has_the_ids_of_the_reference`.
//! - `splits`: the words of several splits in a row are encoded from the text, not from a copy with a character a byte,
//!   since a map of bytes moves no word's end. Shown by `splits_in_a_row_have_the_ids_of_the_reference`.
//! - `classes`: splits in a row that ask for classes of characters alone are found in one table instead of by one expression
//!   after the other. Shown by `splits_of_classes_have_the_ids_of_the_reference`.
//! - `runs`: a run of spaces becomes the added tokens for it without a search at every byte. Added tokens are taken
//!   leftmost and longest, so that those of a run are counted off. Shown by
//!   `runs_of_spaces_have_the_ids_of_the_reference`.
//! - `suffixed`: words that end in a suffix (CLIP) are words of an ordinary model of bytes with a space behind each, since a
//!   merge of the last byte and the space that comes before all others makes the suffixed symbol. Shown by
//!   `words_that_end_in_a_suffix_have_the_ids_of_the_reference`.
//!
//! Beside these, more differences between the two libraries are met here: ids without a token are given one that no
//! text has ([`without_gaps`]), the contraction with a long s is refused ([`LONG_S`]), and so are added tokens that match
//! whole words only, `Metaspace` before a model without bytes, and words that end in a suffix but are not CLIP's. The
//! post-processor is left out: it only adds tokens around a text, and only where that is asked for, which is never.
//!
//! Invariant: `encode` gives the ids of Hugging Face `tokenizers`, or an error, upon which the reference encodes.

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
    /// Whether the split asks for letters of either case.
    either_case: bool,
}

/// What cuts text into words, and merges those that are long.
enum Words {
    /// The library itself.
    Library,
    /// A known split.
    Split(LongWords),
    /// Several splits in a row.
    Splits(Splits),
    /// CLIP's, each of which ends in a suffix.
    Suffixed(Suffixed),
    /// None: the text is one word.
    Whole(Whole),
}

/// An apostrophe and a long s. Where either case counts, it is the contraction `'s` to the reference and to Unicode,
/// and none to the fast encoder.
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
        // What is known of words is read off the file, so that the library has to merge just so.
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

    /// The ids of `text`, or why there are none.
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

    /// The ids of a text, or of a part of it between added tokens.
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

/// The most unused ids that are worth naming.
const GAPS_MAX: usize = 1 << 16;

/// Gives ids that no token has a token that no text has, since `fastokens` wants the ids of a model without gaps.
/// (cl100k and o200k leave some out below their special tokens.) Under a byte-level pre-tokenizer, a space never
/// reaches the model, so a token with one cannot match.
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
