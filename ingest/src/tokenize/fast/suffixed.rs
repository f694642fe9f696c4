//! Words whose last symbol has a suffix (CLIP), at the speed of other words.
//!
//! In such a model the last character of a word is a different symbol from the same character elsewhere: `o</w>`, not
//! `o`. `fastokens` merges these words character by character from a copy of the text. Here the vocabulary is rewritten
//! so that a space after a word replaces the suffix: `lo</w>` becomes `lo` and a space, and merges of every byte with a
//! space are put before all other merges. Then a word followed by a space is a word of an ordinary byte-level model.
//!
//! Guarantee: the same ids. No word contains a space (see below), so the space is the last symbol of each, and only the
//! merges put in front contain it alone: the one with the last byte has a lower rank than every merge of the file, and
//! is applied first. It leaves the symbols that the suffix would have made; the remaining merges are those of the file,
//! in order, over the same ids. A file is refused if another token contains a space, if a byte lacks one of its two
//! symbols, or if a merge does not join names consistently with the renaming.
//!
//! Words are found without regular expressions: CLIP's split depends on character classes, as the reference's engine
//! defines them, and on contractions, which are tried first at the start of a match. GPT-2's split, which may follow,
//! leaves each of these words whole. The normalizer that collapses white space is skipped, because no word contains
//! white space as that engine defines it. Tested by `words_that_end_in_a_suffix_have_the_ids_of_the_reference`.

use fastokens::pre_tokenized::Split;
use serde_json::{Value, json};
use tokenizers::utils::SysRegex;

use super::windows::{LONG, Symbols, Windows};

/// CLIP's split, of which every match is a word.
const CLIP: &str = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

/// Words that begin with an apostrophe.
const CONTRACTIONS: [&[u8]; 7] = [b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"];

/// The name of the byte of a space.
const SPACE: char = '\u{120}';

/// The class of a character in the split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// `[^\s\p{L}\p{N}]`.
    Sign,
    /// `\p{L}`.
    Letter,
    /// `\p{N}`.
    Number,
    /// `\s`.
    White,
}

/// The words of one tokenizer.
pub(super) struct Suffixed {
    /// Indexed by character.
    classes: Vec<Class>,
    windows: Windows,
}

impl Suffixed {
    /// For a `tokenizer.json` whose words end in a suffix, which is removed from its model; none for others.
    pub(super) fn of(json: &mut Value) -> Result<Option<Suffixed>, String> {
        let suffix = json["model"]["end_of_word_suffix"].as_str().unwrap_or_default().to_owned();
        if suffix.is_empty() {
            return Ok(None);
        }
        if !is_split(&json["pre_tokenizer"]) || !without_runs(&mut json["normalizer"]) {
            return Err("its words end in a suffix, and are not found as CLIP's are".to_owned());
        }
        let added = json["added_tokens"].as_array();
        if added.into_iter().flatten().any(|token| token["special"] != true) {
            return Err("its words end in a suffix, and added tokens stand between them".to_owned());
        }
        rewrite(&mut json["model"], &suffix)
            .ok_or("its words end in a suffix, and its vocabulary is not CLIP's")?;
        json["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let classes = classes().ok_or("the classes of characters are not to be had")?;
        Ok(Some(Suffixed { classes, windows: Windows::new(Symbols::Bytes) }))
    }

    /// The ids of `text`.
    pub(super) fn encode(
        &self,
        library: &fastokens::Tokenizer,
        text: &str,
    ) -> Result<Vec<u32>, String> {
        let pieces = library.build_pre_tokenized_with(text, true);
        let model = library.model();
        let mut ids = Vec::with_capacity(text.len() / 3);
        // Every word followed by a space.
        let mut buffer = String::with_capacity(text.len() + text.len() / 4);
        let mut words = Vec::with_capacity(text.len() / 4);
        for piece in pieces.splits() {
            let text = pieces.split_text(piece);
            let mut at = 0;
            while let Some(word) = self.word(text, at) {
                at = word.end;
                let begin = buffer.len();
                buffer.push_str(&text[word]);
                buffer.push(' ');
                if buffer.len() - begin <= LONG {
                    words.push(Split { range: begin..buffer.len(), token_id: None });
                    continue;
                }
                model.tokenize_batch_fused(&buffer, &words, &mut ids)?;
                words.clear();
                self.windows.merge(model, &buffer[begin..], &mut ids)?;
            }
        }
        model.tokenize_batch_fused(&buffer, &words, &mut ids)?;
        Ok(ids)
    }

    /// The first word at or after `at`.
    fn word(&self, text: &str, mut at: usize) -> Option<std::ops::Range<usize>> {
        let (mut class, mut next) = self.class(text, at)?;
        while class == Class::White {
            at = next;
            (class, next) = self.class(text, at)?;
        }
        let rest = &text.as_bytes()[at..];
        if rest[0] == b'\''
            && let Some(word) = CONTRACTIONS.iter().find(|word| rest.starts_with(word))
        {
            return Some(at..at + word.len());
        }
        while class != Class::Number
            && let Some((same, after)) = self.class(text, next)
            && same == class
        {
            next = after;
        }
        Some(at..next)
    }

    /// The class of the character at `at`, and the offset of the next one.
    fn class(&self, text: &str, at: usize) -> Option<(Class, usize)> {
        let byte = *text.as_bytes().get(at)?;
        if byte.is_ascii() {
            return Some((self.classes[usize::from(byte)], at + 1));
        }
        let c = text[at..].chars().next()?;
        Some((self.classes[c as usize], at + c.len_utf8()))
    }
}

/// Whether a pre-tokenizer finds CLIP's words and maps their bytes.
fn is_split(json: &Value) -> bool {
    let Some([split, bytes]) = json["pretokenizers"].as_array().map(Vec::as_slice) else {
        return false;
    };
    split["type"] == "Split"
        && split["behavior"] == "Removed"
        && split["invert"] == true
        && split.pointer("/pattern/Regex").is_some_and(|found| found == CLIP)
        && bytes["type"] == "ByteLevel"
        && bytes["add_prefix_space"] == false
}

/// Removes the collapsing of white space from a normalizer that does at most what CLIP's does; returns whether it does.
fn without_runs(normalizer: &mut Value) -> bool {
    let runs = json!({"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "});
    let order = [json!({"type": "NFC"}), runs.clone(), json!({"type": "Lowercase"})];
    let steps = match &*normalizer {
        Value::Null => return true,
        Value::Object(all) if all.get("type").is_some_and(|it| it == "Sequence") => {
            match all.get("normalizers").and_then(Value::as_array) {
                Some(steps) => steps.clone(),
                None => return false,
            }
        }
        one => vec![(*one).clone()],
    };
    let mut left = order.iter();
    if !steps.iter().all(|step| left.any(|known| known == step)) {
        return false;
    }
    let kept: Vec<Value> = steps.into_iter().filter(|step| *step != runs).collect();
    *normalizer = json!({"type": "Sequence", "normalizers": kept});
    true
}

/// Turns a model whose words end in `suffix` into one whose words end in a space; none if the result would differ.
fn rewrite(model: &mut Value, suffix: &str) -> Option<()> {
    let is_off = |value: &Value| value.is_null() || *value == "" || *value == false;
    let off = ["continuing_subword_prefix", "ignore_merges", "byte_fallback"];
    if model["type"] != "BPE" || !off.iter().all(|key| is_off(&model[*key])) {
        return None;
    }
    let space = SPACE.to_string();
    let renamed = |name: &str| match name.strip_suffix(suffix) {
        Some(rest) => format!("{rest}{SPACE}"),
        None => name.to_owned(),
    };
    let vocab = model["vocab"].as_object()?;
    let mut names = serde_json::Map::new();
    for (name, id) in vocab {
        let own = name.strip_suffix(suffix).unwrap_or(name);
        if own.contains(SPACE) && *own != space || names.insert(renamed(name), id.clone()).is_some()
        {
            return None;
        }
    }
    let bytes = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let mut bytes: Vec<String> = bytes.into_iter().map(String::from).collect();
    bytes.sort_unstable();
    if !bytes
        .iter()
        .all(|byte| names.contains_key(byte) && vocab.contains_key(&format!("{byte}{suffix}")))
    {
        return None;
    }
    let ends = bytes.iter().filter(|byte| **byte != space);
    let mut merges: Vec<Value> = ends.map(|byte| json!([byte, space])).collect();
    for merge in model["merges"].as_array()? {
        let (left, right) = match merge {
            Value::String(pair) => pair.split_once(' ')?,
            pair => (pair[0].as_str()?, pair[1].as_str()?),
        };
        let (own, product) = (renamed(right), renamed(&format!("{left}{right}")));
        if left.ends_with(suffix)
            || product != format!("{left}{own}")
            || [left, right].contains(&space.as_str())
        {
            return None;
        }
        merges.push(json!([left, own]));
    }
    model["vocab"] = Value::Object(names);
    model["merges"] = Value::Array(merges);
    // Every byte has its symbols, so nothing is unknown.
    model["unk_token"] = Value::Null;
    model["end_of_word_suffix"] = Value::Null;
    Some(())
}

/// The class of every character, as the reference's engine defines it.
fn classes() -> Option<Vec<Class>> {
    let all: String = ('\0'..=char::MAX).collect();
    let mut classes = vec![Class::Sign; char::MAX as usize + 1];
    let kinds = [(r"\p{L}+", Class::Letter), (r"\p{N}+", Class::Number), (r"\s+", Class::White)];
    for (expression, class) in kinds {
        for (start, end) in SysRegex::new(expression).ok()?.find_iter(&all) {
            all[start..end].chars().for_each(|c| classes[c as usize] = class);
        }
    }
    Some(classes)
}
