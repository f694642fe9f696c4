//! Runs of spaces that become added tokens.
//!
//! gpt_neox has an added token for each number of spaces from 2 to 24, and `fastokens` searches for the longest one at
//! every byte. Added tokens match leftmost, and the longest one each time. So if no other added token contains a space,
//! the tokens of a run are the longest that fits, repeatedly from its start, until none fits. The text before, and the
//! rest of the run with the text after it, are encoded separately. NFC neither changes a space nor combines it with its
//! neighbours.

use serde_json::Value;

/// Shorter runs are left to the library.
const LEAST: usize = 16;

/// The added tokens of one tokenizer that are runs of spaces.
pub(super) struct Runs {
    /// Number of spaces and id, longest first.
    tokens: Vec<(usize, u32)>,
}

impl Runs {
    /// For a `tokenizer.json` that has such tokens and no other added token with a space.
    pub(super) fn new(json: &Value) -> Option<Runs> {
        let normalizer = &json["normalizer"];
        if !normalizer.is_null() && normalizer["type"] != "NFC" {
            return None;
        }
        let mut tokens = Vec::new();
        for token in json["added_tokens"].as_array()? {
            let content = token["content"].as_str()?;
            if ["lstrip", "rstrip", "single_word"].iter().any(|flag| token[*flag] == true) {
                return None;
            }
            if !content.contains(' ') {
                continue;
            }
            if token["special"] == true || content.bytes().any(|byte| byte != b' ') {
                return None;
            }
            tokens.push((content.len(), u32::try_from(token["id"].as_u64()?).ok()?));
        }
        tokens.sort_unstable_by(|a, b| b.cmp(a));
        // Some token must fit, or a run would be cut off without one.
        (tokens.last()?.0 <= LEAST).then_some(Runs { tokens })
    }

    /// The first run of [`LEAST`] spaces or more from `from` on.
    fn next(text: &[u8], from: usize) -> Option<(usize, usize)> {
        let mut at = from;
        while at < text.len() {
            if text[at] == b' ' {
                let before = text[from..at].iter().rev().take_while(|byte| **byte == b' ').count();
                let after = text[at..].iter().take_while(|byte| **byte == b' ').count();
                if before + after >= LEAST {
                    return Some((at - before, at + after));
                }
                at += after;
            }
            // A run of this length includes one of these positions.
            at += LEAST;
        }
        None
    }

    /// The ids of `text`; `encode` appends those of the parts between runs.
    pub(super) fn encode(
        &self,
        text: &str,
        encode: impl Fn(&str) -> Result<Vec<u32>, String>,
    ) -> Result<Vec<u32>, String> {
        let (mut ids, mut done, mut from) = (Vec::new(), 0, 0);
        while let Some((start, end)) = Runs::next(text.as_bytes(), from) {
            if start > done {
                ids.append(&mut encode(&text[done..start])?);
            }
            done = start;
            for (spaces, id) in &self.tokens {
                let times = (end - done) / spaces;
                ids.extend(std::iter::repeat_n(*id, times));
                done += times * spaces;
            }
            from = end;
        }
        if done == 0 {
            return encode(text);
        }
        if done < text.len() {
            ids.append(&mut encode(&text[done..])?);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::bytes_tokenizer;
    use crate::tokenize::hard::{self, Dice};
    use crate::tokenize::{Engine, Tokenizer};

    /// A tokenizer with an added token for each of these numbers of spaces.
    fn bytes(spaces: &[usize], normalizer: &Value) -> Vec<u8> {
        bytes_tokenizer(|json| {
            let added = json["added_tokens"].as_array_mut().unwrap();
            for count in spaces {
                let mut token = added[1].clone();
                token["content"] = json!(" ".repeat(*count));
                token["id"] = json!(256 + added.len());
                token["normalized"] = json!(!normalizer.is_null());
                added.push(token);
            }
            json["normalizer"] = normalizer.clone();
        })
    }

    #[test]
    fn runs_of_spaces_have_the_ids_of_the_reference() {
        let every: Vec<usize> = (2..=24).collect();
        let mut dice = Dice(3);
        for spaces in [&every[..], &[2], &[7, 3], &[16, 24], &[1, 5]] {
            for normalizer in [Value::Null, json!({"type": "NFC"})] {
                let tokenizer =
                    Tokenizer::new(bytes(spaces, &normalizer), Engine::Fastest).unwrap();
                assert_eq!(tokenizer.why_slow(), None);
                for round in 0..100 {
                    let mut text = String::new();
                    for _ in 0..dice.below(8) {
                        text += dice.pick(&[
                            "a", "e\u{301}", "\n", "\u{338}", "\t", "<tab>", "<|end|>", "\u{a0}",
                        ]);
                        text += &" ".repeat(dice.below(if round % 10 == 0 { 900 } else { 70 }));
                        if dice.below(4) == 0 {
                            text += &hard::text(&mut dice, &[]);
                        }
                    }
                    let wanted = tokenizer.encode_by_reference(&text).unwrap();
                    assert!(tokenizer.encode(&text).unwrap() == wanted, "{spaces:?} {text:?}");
                }
            }
        }
    }

    #[test]
    fn other_tokens_with_spaces_leave_runs_to_the_library() {
        let of = |change: fn(&mut Value)| {
            let mut json: Value = serde_json::from_slice(&bytes(&[2, 20], &Value::Null)).unwrap();
            change(&mut json);
            Runs::new(&json).is_some()
        };
        assert!(of(|_| ()));
        assert!(!of(|json| json["added_tokens"][0]["content"] = json!("a  ")));
        assert!(!of(|json| json["added_tokens"][1]["rstrip"] = json!(true)));
        assert!(!of(|json| json["added_tokens"][2]["special"] = json!(true)));
        assert!(!of(|json| json["added_tokens"][2]["content"] = json!(" ".repeat(17))));
        assert!(!of(|json| json["normalizer"] = json!({"type": "Lowercase"})));
    }
}
