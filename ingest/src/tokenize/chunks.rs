//! Encodes text in chunks with the reference, and caches the ids of each chunk.
//!
//! For tokenizers that `fastokens` does not cover. The reference takes hundreds of nanoseconds per byte, mostly for
//! words that it has encoded before. Here a text is cut where no step of the tokenizer looks across, and a chunk's ids
//! are those that the reference gave the first time, including normalizer and added tokens (`memo`).
//!
//! Guarantee: the same ids, since every step has the same result on one side of a cut without the other side. Every cut
//! is before an ASCII character, and depends only on the last byte before it:
//!
//! 1. *Added tokens.* Special ones are never matched, so if there are no others, none is searched for. Otherwise, all
//!    must be ASCII without white space and without a cut, in their normal forms too (see 2), and match regardless of
//!    their context. The leftmost longest match on one side of a cut then stays the same.
//! 2. *Normalizer.* No Unicode normal form composes an ASCII character with what is before it, or moves it. The other
//!    steps known here ([`normalizes`]) work by characters, and leave each ASCII character in its [`Class`] (which
//!    [`Chunks::fit`] tries), except that `BertNormalizer` removes control characters, whose class has no cuts.
//!    SentencePiece's map works by grapheme clusters, none of which has two ASCII characters except `\r\n`: with it,
//!    cuts are only between two ASCII characters.
//! 3. *Pre-tokenizer.* Its first step cuts the normalized text at these places, and drops white space ([`Form`]). Each
//!    later step gets the pieces of the previous one, one by one, and so does the model.
//!
//! Tested below on random texts; the probes of every tokenizer are also checked when it is read.

use std::sync::{Mutex, PoisonError};

use contract::Result;
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer as _, Tokenizer};

use super::memo::Memo;

/// The class of a byte, which decides where text is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// A byte of a character beyond ASCII, or a control character: a normalizer may change it in any way.
    Other,
    Letter,
    Digit,
    Apostrophe,
    Punctuation,
    /// ASCII white space, which stays white space in every normalizer known here.
    Space,
}

use Class::{Apostrophe, Digit, Letter, Other, Punctuation, Space};

impl Class {
    const ALL: [Class; 6] = [Other, Letter, Digit, Apostrophe, Punctuation, Space];

    const fn of(byte: u8) -> Class {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => Space,
            b'\'' => Apostrophe,
            b'a'..=b'z' | b'A'..=b'Z' => Letter,
            b'0'..=b'9' => Digit,
            b'!'..=b'~' => Punctuation,
            _ => Other,
        }
    }
}

const CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = Class::of(byte as u8) as u8;
        byte += 1;
    }
    classes
};

/// The first step of a pre-tokenizer: how it finds words; the white space between them is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Words are separated by white space.
    Spaced,
    /// `BertPreTokenizer`: each punctuation sign is a word, and so is each run between punctuation and white space.
    Bert,
    /// CLIP's expression, kept where it matches: a contraction, a run of letters, a digit, a run of other characters.
    Clip,
}

/// The expression of [`Form::Clip`].
const CLIP: &str = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

impl Form {
    fn of(step: &Value) -> Option<Form> {
        match step["type"].as_str()? {
            "WhitespaceSplit" => Some(Form::Spaced),
            "BertPreTokenizer" => Some(Form::Bert),
            "Split" => {
                let kept = step["behavior"] == "Removed" && step["invert"] == true;
                (kept && step["pattern"]["Regex"] == CLIP).then_some(Form::Clip)
            }
            _ => None,
        }
    }

    /// Whether a word ends between these two classes, regardless of the context.
    fn cuts(self, left: Class, right: Class) -> bool {
        match (left, right) {
            (Space, Space) | (_, Other) => false,
            // White space is dropped, so it does not matter to which side it belongs.
            (_, Space) | (Space, _) => true,
            _ => match self {
                Form::Spaced => false,
                Form::Bert => {
                    let sign = |class| matches!(class, Apostrophe | Punctuation);
                    sign(left) || sign(right)
                }
                Form::Clip => match (left, right) {
                    // A digit is a word of its own.
                    (_, Digit) | (Digit, _) => true,
                    (Letter, Apostrophe | Punctuation) => true,
                    // An apostrophe at the start of a word may begin a contraction, which includes letters.
                    (Punctuation, Letter) => true,
                    _ => false,
                },
            },
        }
    }
}

/// Whether a normalizer, single or a sequence, is one of those that preserve cuts.
fn normalizes(step: &Value) -> bool {
    let in_a_row = |all: &Vec<Value>| all.iter().all(normalizes);
    match step["type"].as_str() {
        None => step.is_null(),
        Some("Sequence") => step["normalizers"].as_array().is_some_and(in_a_row),
        Some("NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents") => true,
        Some("BertNormalizer" | "Precompiled") => true,
        Some("Replace") => step["pattern"]["Regex"] == r"\s+" && step["content"] == " ",
        Some(_) => false,
    }
}

/// The places of cuts, and the cache.
pub(super) struct Chunks {
    /// For each class on the left, one bit for each class on the right.
    ends: [u8; Class::ALL.len()],
    /// The caches of threads that are not encoding now.
    memos: Mutex<Vec<Memo>>,
}

impl Chunks {
    /// For a `tokenizer.json` of this form.
    pub(super) fn new(json: &Value) -> Option<Chunks> {
        let pre_tokenizer = &json["pre_tokenizer"];
        // `Metaspace` may depend on which piece is the first of a text.
        if pre_tokenizer.to_string().contains("\"first\"") {
            return None;
        }
        let first = match pre_tokenizer["type"].as_str()? {
            "Sequence" => pre_tokenizer["pretokenizers"].get(0)?,
            _ => pre_tokenizer,
        };
        let form = Form::of(first)?;
        let clusters = json["normalizer"].to_string().contains("\"Precompiled\"");
        let mut ends = [0; Class::ALL.len()];
        for left in Class::ALL {
            for right in Class::ALL {
                let cut = form.cuts(left, right) && !(clusters && left == Other);
                ends[left as usize] |= u8::from(cut) << right as u8;
            }
        }
        let chunks = Chunks { ends, memos: Mutex::default() };
        (normalizes(&json["normalizer"]) && chunks.leave_whole(&json["added_tokens"]))
            .then_some(chunks)
    }

    /// Whether no matchable added token depends on text across a cut.
    fn leave_whole(&self, added: &Value) -> bool {
        let added = added.as_array().map(Vec::as_slice).unwrap_or_default();
        let only_special = added.iter().all(|token| token["special"] == true);
        only_special
            || added.iter().all(|token| {
                let content = token["content"].as_str().unwrap_or_default();
                let alone =
                    ["single_word", "lstrip", "rstrip"].iter().all(|key| token[*key] == false);
                let plain = content.bytes().all(|byte| !matches!(Class::of(byte), Other | Space));
                let uncut = !content.is_empty() && self.end(content.as_bytes()) == content.len();
                alone && plain && uncut
            })
    }

    /// Whether the tokenizer's normalizer leaves every ASCII character, except control characters, in its class.
    pub(super) fn fit(reference: &Tokenizer) -> bool {
        let Some(normalizer) = reference.get_normalizer() else { return true };
        (0..128).filter(|byte| Class::of(*byte) != Other).all(|byte: u8| {
            let mut text = NormalizedString::from(char::from(byte).to_string());
            let done = normalizer.normalize(&mut text).is_ok();
            let mut left = text.get().bytes().peekable();
            done && left.peek().is_some() && left.all(|now| Class::of(now) == Class::of(byte))
        })
    }

    /// The end of the first chunk of these bytes, which must not be empty.
    fn end(&self, text: &[u8]) -> usize {
        let mut left = CLASSES[usize::from(text[0])];
        for (at, byte) in text.iter().enumerate().skip(1) {
            let right = CLASSES[usize::from(*byte)];
            if self.ends[usize::from(left)] >> right & 1 == 1 {
                return at;
            }
            left = right;
        }
        text.len()
    }

    /// The ids of `text`; `reference` encodes chunks that are not cached.
    pub(super) fn encode(
        &self,
        text: &str,
        reference: impl Fn(&str) -> Result<Vec<u32>>,
    ) -> Result<Vec<u32>> {
        let memos = || self.memos.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memo = memos().pop().unwrap_or_default();
        let mut ids = Vec::with_capacity(text.len() / 4 + 1);
        let mut rest = text;
        while !rest.is_empty() {
            let chunk;
            (chunk, rest) = rest.split_at(self.end(rest.as_bytes()));
            if !is_space(chunk) {
                memo.extend(&mut ids, chunk, &reference)?;
            }
        }
        memos().push(memo);
        Ok(ids)
    }
}

/// Whether a chunk is white space, which has no ids.
fn is_space(chunk: &str) -> bool {
    chunk.bytes().rev().all(|byte| Class::of(byte) == Space)
}

#[cfg(test)]
mod tests;
