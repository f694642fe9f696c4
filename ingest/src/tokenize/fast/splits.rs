//! Several splits in a row before the map of bytes, as DeepSeek's older tokenizers have them.
//!
//! `fastokens` knows the words of some splits without an expression. Of others it looks a single one's words up in the
//! text as it is; but where several splits follow each other it maps the whole text to characters that stand for bytes
//! first, and encodes each word from there. Here the words of several splits are encoded from the text as well, and found
//! without expressions where these ask for classes of characters alone (`classes`).
//!
//! Guarantee: the same ids. A `ByteLevel` that neither adds a space nor splits leaves the ends of words where they are and
//! gives each byte a character of its own; what the model makes of a word's bytes (`tokenize_batch_fused`) is by the
//! library's own promise what it makes of those characters. Shown by `splits_in_a_row_have_the_ids_of_the_reference`.

use fastokens::json_structs::PreTokenizerConfig;
use fastokens::{PreTokenizer, tiktoken};
use serde_json::{Value, json};

use super::classes::Classes;

/// The splits of one tokenizer, without the map of bytes that follows them.
pub(super) enum Splits {
    /// All of them ask for classes of characters.
    Classes(Classes),
    /// The library's own, by expressions.
    Expressions(PreTokenizer),
}

impl Splits {
    /// For a `tokenizer.json` of this form whose words the library does not know without expressions.
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
