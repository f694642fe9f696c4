//! Long words at the speed of short ones.
//!
//! `fastokens` merges words of more than 128 bytes with a queue of all pairs, at a thirtieth of its usual speed for
//! very long words. Here such words are merged window by window; everything else is left to the library.
//!
//! Three steps, each exact:
//!
//! 1. *Places that every split cuts.* In the splits known here ([`KNOWN`]) a match never looks back, and looks ahead
//!    only from white space (`\s+(?!\S)`) or by giving letters back (o200k) before a character that is not a letter. So
//!    if `x` is not white space and no match can contain both `x` and `y` (see [`cuts`]), the texts before and after
//!    the boundary are encoded independently. A word contains no such boundary, so a word longer than [`LONG`] is in a
//!    stretch of that length without any: these stretches are searched for, and nearly every text has none.
//! 2. *The words of such a stretch* are found by the reference's own expression, in the reference's own regex engine.
//! 3. *Windows.* See `windows.rs`.

use serde_json::Value;
use tokenizers::utils::SysRegex;
use unicode_normalization::char::is_combining_mark;

use super::windows::{LONG, Symbols, Windows};

/// GPT-2's split, which is built into `ByteLevel`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The splits for which [`cuts`] holds.
const KNOWN: [&str; 4] = [
    GPT2,
    fastokens::tiktoken::CL100K_BASE_PATTERN,
    fastokens::tiktoken::O200K_BASE_PATTERN,
    fastokens::tiktoken::QWEN2_PATTERN,
];

/// Whether every known split ends a match between `x` and `y`, regardless of the context.
///
/// A space only begins a match, or follows white space. After a letter, a match may continue with letters, marks or an
/// apostrophe; after a digit, with digits. These letters and signs are the same in every version of Unicode.
fn cuts(x: char, y: char) -> bool {
    let east = matches!(x, '\u{4e00}'..='\u{9fa5}' | '\u{3041}'..='\u{3094}' | '\u{30a1}'..='\u{30fa}' | '\u{ac00}'..='\u{d7a3}');
    let stop = matches!(
        y,
        '\u{3001}'
            | '\u{3002}'
            | '\u{ff01}'
            | '\u{ff08}'
            | '\u{ff09}'
            | '\u{ff0c}'
            | '\u{ff1a}'
            | '\u{ff1f}'
    );
    if y == ' ' {
        !x.is_whitespace() && !x.is_control()
    } else if x.is_ascii_alphabetic() || east {
        y != '\'' && (stop || y.is_ascii() && !y.is_ascii_alphabetic())
    } else {
        x.is_ascii_digit() && y.is_ascii() && !y.is_ascii_digit()
    }
}

/// The last certain boundary after `from` and up to `to`, both at character boundaries.
fn last_cut(text: &str, from: usize, to: usize) -> Option<usize> {
    let mut y = text[to..].chars().next()?;
    for (at, x) in text[from..to].char_indices().rev() {
        if cuts(x, y) {
            return Some(from + at + x.len_utf8());
        }
        y = x;
    }
    None
}

/// The first certain boundary after `from`, or the end.
fn first_cut(text: &str, from: usize) -> usize {
    let mut chars = text[from..].char_indices();
    let Some((_, mut x)) = chars.next() else { return text.len() };
    for (at, y) in chars {
        if cuts(x, y) {
            return from + at;
        }
        x = y;
    }
    text.len()
}

/// Whether `text` seems to have a word that is worth the search: a guess that affects only speed.
fn has_run(text: &str, split: &str) -> bool {
    let cased = split == fastokens::tiktoken::O200K_BASE_PATTERN;
    let class = |c: char| match c {
        'a'..='z' | 'A'..='Z' => 1,
        '0'..='9' => 2,
        '!'..='~' => 3,
        c if c.is_whitespace() => 4,
        c if c.is_numeric() => 2,
        c if c.is_alphabetic() || cased && is_combining_mark(c) => 1,
        _ => 3,
    };
    let (mut run, mut before, mut last) = (0, 0, ' ');
    for (at, c) in text.char_indices() {
        let now = class(c);
        let new = now != before || cased && last.is_lowercase() && c.is_uppercase();
        // Only GPT-2's numbers have more than three digits.
        if new || now == 2 && split != GPT2 {
            run = at;
        } else if at - run >= LONG - 8 {
            return true;
        }
        (before, last) = (now, c);
    }
    false
}

/// The words of one tokenizer, found as the reference does.
pub(super) struct LongWords {
    source: &'static str,
    split: SysRegex,
    windows: Windows,
}

impl LongWords {
    /// For a `tokenizer.json` with a known split; the normaliser must leave parts of its results unchanged.
    pub(super) fn new(json: &Value) -> Option<LongWords> {
        let normalizer = &json["normalizer"];
        if !normalizer.is_null() && normalizer["type"] != "NFC" {
            return None;
        }
        let source = known_split(&json["pre_tokenizer"])?;
        // With `ignore_merges`, a word in the vocabulary is one token even if no merges produce it: no such word may be
        // long.
        let vocab = json.pointer("/model/vocab")?.as_object()?;
        if vocab.keys().any(|token| token.chars().count() > LONG) {
            return None;
        }
        Some(LongWords {
            source,
            split: SysRegex::new(source).ok()?,
            windows: Windows::new(Symbols::Bytes),
        })
    }

    /// Whether `text` seems to have a long word.
    pub(super) fn suspects(&self, text: &str) -> bool {
        self.stretch(text, 0).is_some()
    }

    /// The first stretch after the boundary `from`, between two boundaries, that seems to have a long word.
    fn stretch(&self, text: &str, from: usize) -> Option<(usize, usize)> {
        let mut start = from;
        while text.len() - start > LONG {
            let end = text.floor_char_boundary(start + LONG);
            if let Some(cut) = last_cut(text, start, end) {
                start = cut;
                continue;
            }
            let end = first_cut(text, text.floor_char_boundary(end - 1));
            if has_run(&text[start..end], self.source) {
                return Some((start, end));
            }
            start = end;
        }
        None
    }

    /// The ids of `text`.
    pub(super) fn encode(
        &self,
        fast: &fastokens::Tokenizer,
        text: &str,
    ) -> Result<Vec<u32>, String> {
        let pieces = fast.build_pre_tokenized_with(text, true);
        let mut ids = Vec::with_capacity(text.len() / 3);
        for piece in pieces.splits() {
            match piece.token_id {
                Some(id) => ids.push(id),
                None => self.encode_piece(fast, pieces.split_text(piece), &mut ids)?,
            }
        }
        Ok(ids)
    }

    /// The ids of normalised text between added tokens.
    fn encode_piece(
        &self,
        fast: &fastokens::Tokenizer,
        text: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), String> {
        let mut done = 0;
        while done < text.len() {
            let (start, end) = self.stretch(text, done).unwrap_or((text.len(), text.len()));
            if start > done {
                let part = fast.encode_ordinary(&text[done..start]);
                ids.extend(part.map_err(|error| error.to_string())?);
            }
            self.encode_words(fast, &text[start..end], ids)?;
            done = end;
        }
        Ok(())
    }

    fn encode_words(
        &self,
        fast: &fastokens::Tokenizer,
        text: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), String> {
        let mut done = 0;
        let mut word = |range: std::ops::Range<usize>| {
            let word = &text[range];
            if word.len() > LONG {
                return self.windows.merge(fast.model(), word, ids);
            }
            fast.model().tokenize_into_fused(word, ids)
        };
        for (start, end) in self.split.find_iter(text) {
            // Text that no alternative matches is a word too.
            word(done..start)?;
            word(start..end)?;
            done = end;
        }
        word(done..text.len())
    }
}

/// The expression of a pre-tokenizer that only splits by a known expression and maps bytes.
fn known_split(json: &Value) -> Option<&'static str> {
    let bytes_by = |json: &Value, expression: bool| {
        // Both keys default to true.
        json["type"] == "ByteLevel"
            && json["add_prefix_space"] == false
            && (json["use_regex"] != false) == expression
    };
    if bytes_by(json, true) {
        return Some(GPT2);
    }
    let [split, bytes] = json["pretokenizers"].as_array()?.as_slice() else { return None };
    let plain =
        split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
    let found = split.pointer("/pattern/Regex")?.as_str()?;
    let known = KNOWN.into_iter().find(|known| *known == found)?;
    (plain && bytes_by(bytes, false)).then_some(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bytes_tokenizer;
    use crate::tokenize::hard::{self, Dice};
    use crate::tokenize::{Engine, Tokenizer};
    use serde_json::json;

    /// The number of random tests: few in CI, more on request.
    fn rounds() -> u64 {
        std::env::var("ZDATA_HARD_TEXTS").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
    }

    /// Merges of random pairs, in a less regular order than in any trained tokenizer.
    fn drawn_merges(json: &mut Value, seed: u64) {
        let mut dice = Dice(seed);
        let byte_names: Vec<String> = {
            let vocab = json["model"]["vocab"].as_object().unwrap();
            vocab.keys().cloned().collect()
        };
        // The names of the bytes in runs: "a", a space, a line feed, the bytes of U+4E2D, U+1F468, U+0301.
        let usual = [
            "a", "b", "h", "e", "l", "o", "1", "-", "=", "\u{120}", "\u{10a}", "'", "s", "\u{e4}",
            "\u{b8}", "\u{143}", "\u{f0}", "\u{141}", "\u{133}", "\u{a8}", "\u{cc}", "\u{123}",
        ];
        let mut names: Vec<String> = usual.iter().map(|name| (*name).to_owned()).collect();
        assert!(names.iter().all(|name| byte_names.contains(name)));
        let (mut merges, mut id) = (Vec::new(), 256);
        while merges.len() < 300 {
            let (left, right) =
                (names[dice.below(names.len())].clone(), names[dice.below(names.len())].clone());
            let product = format!("{left}{right}");
            if product.chars().count() <= 24 && !names.contains(&product) {
                merges.push(json!([left, right]));
                json["model"]["vocab"][&product] = json!(id);
                names.push(product);
                id += 1;
            }
        }
        json["model"]["merges"] = json!(merges);
        // Added tokens follow those of the model.
        json["added_tokens"][0]["id"] = json!(id);
        json["added_tokens"][1]["id"] = json!(id + 1);
    }

    fn tokenizer(split: &str, nfc: bool, ignore_merges: bool, seed: u64) -> Tokenizer {
        let bytes = bytes_tokenizer(|json| {
            drawn_merges(json, seed);
            json["model"]["ignore_merges"] = json!(ignore_merges);
            if nfc {
                json["normalizer"] = json!({"type": "NFC"});
            }
            if split != GPT2 {
                let map = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
                let split = json!({"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": false});
                json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, map]});
            }
        });
        Tokenizer::new(bytes, Engine::Fastest).unwrap()
    }

    #[test]
    fn ids_are_those_of_the_reference_on_hard_texts() {
        let [gpt2, cl100k, o200k, qwen] = KNOWN;
        let kinds = [(gpt2, false), (gpt2, true), (cl100k, false), (o200k, false), (qwen, true)];
        for (kind, (split, nfc)) in kinds.into_iter().enumerate() {
            let tokenizer =
                tokenizer(split, nfc, split == cl100k || split == o200k, 40 + kind as u64);
            assert_eq!(tokenizer.why_slow(), None);
            let json = serde_json::from_slice(tokenizer.bytes()).unwrap();
            let (finder, mut long, mut given_up) = (LongWords::new(&json).unwrap(), 0, 0);
            for seed in 0..rounds() {
                let text = hard::text(&mut Dice(1 + seed * 5 + kind as u64), &[]);
                long += u32::from(finder.suspects(&text));
                given_up += u64::from(split != GPT2 && text.contains("'\u{17f}"));
                let (found, wanted) = (
                    tokenizer.encode(&text).unwrap(),
                    tokenizer.encode_by_reference(&text).unwrap(),
                );
                assert!(found == wanted, "{split} seed {seed}: {text:?}");
            }
            assert_eq!(tokenizer.rescued(), given_up);
            assert!(u64::from(long) > rounds() / 20, "only {long} texts had long words");
        }
    }

    #[test]
    fn every_known_split_ends_a_word_where_it_is_said_to() {
        let words = |split: &SysRegex, text: &str, from: usize| -> Vec<(usize, usize)> {
            split.find_iter(text).map(|(start, end)| (from + start, from + end)).collect()
        };
        let mut checked = 0;
        for split in KNOWN.map(|split| SysRegex::new(split).unwrap()) {
            for seed in 0..rounds() {
                let text = hard::text(&mut Dice(seed), &[]);
                let whole = words(&split, &text, 0);
                let mut before = None;
                for (at, y) in text.char_indices().take(60) {
                    if before.is_some_and(|x| cuts(x, y)) {
                        let mut parts = words(&split, &text[..at], 0);
                        parts.extend(words(&split, &text[at..], at));
                        assert_eq!(parts, whole, "cut at {at} of {text:?}");
                        checked += 1;
                    }
                    before = Some(y);
                }
            }
        }
        assert!(checked > 1000);
    }

    #[test]
    fn a_split_that_is_not_known_is_left_to_the_library() {
        let of = |change: fn(&mut Value)| {
            let bytes = bytes_tokenizer(change);
            LongWords::new(&serde_json::from_slice(&bytes).unwrap()).is_some()
        };
        assert!(of(|_| ()));
        assert!(!of(|json| json["pre_tokenizer"]["add_prefix_space"] = json!(true)));
        assert!(!of(|json| json["pre_tokenizer"]["use_regex"] = json!(false)));
        assert!(!of(|json| json["normalizer"] = json!({"type": "Lowercase"})));
        assert!(!of(|json| json["model"]["vocab"]["a".repeat(LONG + 1)] = json!(258)));
    }
}
