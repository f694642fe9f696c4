//! Consecutive splits before the byte-level map, as in DeepSeek's older tokenizers.
//!
//! `fastokens` finds the words of some splits without regular expressions. Words of another single split it looks up in
//! the text itself; but for several consecutive splits it first maps the whole text to characters that stand for bytes,
//! and encodes each word from there. Here the words of several splits are encoded from the text too, and found without
//! expressions if these depend only on character classes (`classes`).
//!
//! Guarantee: the same ids. A `ByteLevel` that neither adds a space nor splits keeps the ends of words, and maps each
//! byte to a character of its own; the library documents that a word's bytes (`tokenize_batch_fused`) give the same ids
//! as those characters. Tested by `splits_in_a_row_have_the_ids_of_the_reference`.

use fastokens::json_structs::PreTokenizerConfig;
use fastokens::{PreTokenizer, tiktoken};
use serde_json::{Value, json};

use super::classes::Classes;

/// The splits of one tokenizer, without the byte-level map after them.
pub(super) enum Splits {
    /// All of them depend only on character classes.
    Classes(Classes),
    /// The library's own, with regular expressions.
    Expressions(PreTokenizer),
}

impl Splits {
    /// For a `tokenizer.json` of this form whose words the library does not find without expressions.
    pub(super) fn new(json: &Value) -> Option<Splits> {
        let steps = &json["pre_tokenizer"]["pretokenizers"];
        let (map, splits) = steps.as_array()?.split_last()?;
        let maps = map["type"] == "ByteLevel"
            && map["add_prefix_space"] == false
            && map["use_regex"] == false;
        let only_splits =
            splits.iter().all(|step| step["type"] == "Split" || step["type"] == "Digits");
        if !maps || !only_splits || splits.len() < 2 || is_known(splits) {
            return None;
        }
        if let Some(classes) = Classes::new(splits) {
            return Some(Splits::Classes(classes));
        }
        let sequence = json!({"type": "Sequence", "pretokenizers": splits});
        let config: PreTokenizerConfig = serde_json::from_value(sequence).ok()?;
        PreTokenizer::from_config(config).ok().map(Splits::Expressions)
    }

    /// The ids of `text`.
    pub(super) fn encode(
        &self,
        library: &fastokens::Tokenizer,
        text: &str,
    ) -> Result<Vec<u32>, String> {
        let mut pieces = library.build_pre_tokenized_with(text, true);
        match self {
            Splits::Classes(classes) => classes.pre_tokenize(&mut pieces),
            Splits::Expressions(splits) => {
                splits.pre_tokenize(&mut pieces).map_err(|error| error.to_string())?;
            }
        }
        pieces.tokenize_batched(|buffer, words, ids| {
            library.model().tokenize_batch_fused(buffer, words, ids)
        })
    }
}

/// Whether these are the splits of DeepSeek V3, which the library finds in one pass.
fn is_known(splits: &[Value]) -> bool {
    let known = [
        tiktoken::DEEPSEEK_SPLIT1_PATTERN,
        tiktoken::DEEPSEEK_SPLIT2_PATTERN,
        tiktoken::DEEPSEEK_SPLIT3_PATTERN,
    ];
    let own = splits.iter().map(|split| split.pointer("/pattern/Regex").and_then(Value::as_str));
    own.eq(known.map(Some))
}
