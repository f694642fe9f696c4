//! Models that get a whole text as one word: SentencePiece's, as Hugging Face writes them.
//!
//! Three forms of a `tokenizer.json` are equivalent: no pre-tokenizer; a split at spaces after a normalizer that leaves
//! none; and `Metaspace`, which `fastokens` lacks, so it is implemented here.
//!
//! A whole text is merged part by part. Merging a token that ends in `x` with one that begins with `y` makes a token in
//! which `y` follows `x`. So no merge crosses a place whose two characters are adjacent in no token of the vocabulary,
//! and the texts before and after it are encoded independently. This requires every symbol to depend only on its own
//! character, so a character without a token must become bytes ([`symbols_stand_alone`]). Long parts without such a
//! place are merged by windows.

use fastokens::models::Model;
use serde_json::{Value, json};

use super::windows::{LONG, Symbols, Windows, is_byte};

/// The replacement of a space in every tokenizer of this kind seen so far.
const SPACE: char = '\u{2581}';

/// The form of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A form that `fastokens` reads.
    Plain,
    /// `Metaspace`, which is removed from what `fastokens` reads.
    Metaspace(Metaspace),
}

/// The effect of `Metaspace` on a text between added tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Metaspace {
    /// The replacement of a space.
    space: char,
    /// Where `space` is prepended to a text that does not begin with it.
    prefix: Prefix,
    /// Whether each `space` begins a word.
    split: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefix {
    Never,
    /// At the start of the document.
    First,
    Always,
}

impl Form {
    /// The form of a `tokenizer.json`, from which the pre-tokenizer is removed; `None` for other forms.
    pub(super) fn of(json: &mut Value) -> Result<Option<Form>, String> {
        let form = match json["pre_tokenizer"]["type"].as_str() {
            None if json["pre_tokenizer"].is_null() => Form::Plain,
            Some("Metaspace") => Form::Metaspace(Metaspace::of(json)?),
            Some("Split") if splits_at_no_space(json) => Form::Plain,
            _ => return Ok(None),
        };
        if let Some(whole) = json.as_object_mut() {
            whole.insert("pre_tokenizer".to_owned(), Value::Null);
        }
        Ok(Some(form))
    }
}

/// Whether the split is at spaces, and the normalizer leaves none.
fn splits_at_no_space(json: &Value) -> bool {
    let (normalizer, split) = (&json["normalizer"], &json["pre_tokenizer"]);
    let content = normalizer["content"].as_str();
    normalizer["type"] == "Replace"
        && normalizer["pattern"] == json!({"String": " "})
        && content.is_some_and(|content| !content.contains(' '))
        && split["pattern"] == json!({"String": " "})
        && split["invert"] == false
        && split["behavior"] != "Removed"
}

impl Metaspace {
    /// Without a normalizer, a text between added tokens is at the start of the document if and only if it is the first
    /// piece.
    fn of(json: &Value) -> Result<Metaspace, String> {
        if !json["normalizer"].is_null() {
            return Err("a normalizer stands before Metaspace".to_owned());
        }
        let metaspace = &json["pre_tokenizer"];
        let mut replacement = metaspace["replacement"].as_str().unwrap_or_default().chars();
        let (Some(space), None) = (replacement.next(), replacement.next()) else {
            return Err("Metaspace replaces a space by no character".to_owned());
        };
        // They default to "always" and true; `add_prefix_space` is the older spelling of "never".
        let prefix = match metaspace["prepend_scheme"].as_str() {
            _ if metaspace["add_prefix_space"] == false => Prefix::Never,
            None | Some("always") => Prefix::Always,
            Some("first") => Prefix::First,
            Some("never") => Prefix::Never,
            Some(other) => return Err(format!("Metaspace has the unknown scheme {other:?}")),
        };
        Ok(Metaspace { space, prefix, split: metaspace["split"] != false })
    }

    /// Appends the transformed piece of text to `out`.
    fn apply(self, piece: &str, first: bool, out: &mut String) {
        out.clear();
        let wanted = self.prefix == Prefix::Always || first && self.prefix == Prefix::First;
        if wanted && !piece.starts_with([' ', self.space]) {
            out.push(self.space);
        }
        let mut words = piece.split(' ');
        out.extend(words.next());
        for word in words {
            out.push(self.space);
            out.push_str(word);
        }
    }
}

/// Whether each initial symbol depends only on its character, and only merges follow: a character without a token
/// becomes bytes, and bytes are neither merged nor produced by merges.
fn symbols_stand_alone(model: &Value) -> bool {
    let Some(vocab) = model["vocab"].as_object() else { return false };
    let bytes = vocab.keys().filter(|token| is_byte(token)).count();
    let side = |merge: &Value| match merge {
        Value::String(both) => both.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
        both => Some((both[0].as_str()?.to_owned(), both[1].as_str()?.to_owned())),
    };
    let free = |merge: &Value| {
        side(merge).is_some_and(|(a, b)| !is_byte(&a) && !is_byte(&b) && !is_byte(&(a + &b)))
    };
    // No merges produce a token with a character that has no token, but `fastokens` would match it as a whole word.
    let reachable = |token: &String| {
        is_byte(token) || token.chars().all(|c| vocab.contains_key(&c.to_string()))
    };
    bytes == 256
        && vocab.keys().all(reachable)
        && model["byte_fallback"] == true
        && model["merges"].as_array().is_some_and(|merges| merges.iter().all(free))
}

/// Encodes whole texts of one tokenizer.
pub(super) struct Whole {
    form: Form,
    /// The replacement of a space.
    space: char,
    /// Characters that come before `space` in some token.
    before: Vec<char>,
    windows: Windows,
}

impl Whole {
    /// For a `tokenizer.json` of this form; `None` leaves the text to the library.
    pub(super) fn new(form: Form, json: &Value) -> Option<Whole> {
        if !symbols_stand_alone(&json["model"]) {
            return None;
        }
        let space = match form {
            Form::Plain => SPACE,
            Form::Metaspace(metaspace) => metaspace.space,
        };
        let mut before = Vec::new();
        for token in json["model"]["vocab"].as_object()?.keys() {
            let chars = token.chars().zip(token.chars().skip(1));
            before.extend(chars.filter(|(_, y)| *y == space).map(|(x, _)| x));
        }
        before.sort_unstable();
        before.dedup();
        Some(Whole { form, space, before, windows: Windows::new(Symbols::Characters) })
    }

    /// Whether `model` cuts at the same places, and can encode part by part.
    pub(super) fn fits(model: &Model) -> bool {
        model.supports_fused_byte_level() && model.bigram_bridge_table().is_some()
    }

    /// The ids of `text`.
    pub(super) fn encode(
        &self,
        library: &fastokens::Tokenizer,
        text: &str,
    ) -> Result<Vec<u32>, String> {
        let pieces = library.build_pre_tokenized_with(text, true);
        let (mut ids, mut buffer) = (Vec::with_capacity(text.len() / 3), String::new());
        for (index, piece) in pieces.splits().iter().enumerate() {
            if let Some(id) = piece.token_id {
                ids.push(id);
                continue;
            }
            let mut text = pieces.split_text(piece);
            if let (Form::Metaspace(metaspace), false) = (self.form, text.is_empty()) {
                metaspace.apply(text, index == 0, &mut buffer);
                text = &buffer;
            }
            self.encode_piece(library.model(), text, &mut ids)?;
        }
        Ok(ids)
    }

    /// The ids of normalised text between added tokens.
    fn encode_piece(&self, model: &Model, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        let Some(table) = model.bigram_bridge_table() else {
            return Err("the model cannot be asked part by part".to_owned());
        };
        let mut word = |word: &str| match word.len() {
            0 => Ok(()),
            1..=LONG => Symbols::Characters.encode(model, word, ids),
            _ => self.windows.merge(model, word, ids),
        };
        let (mut buffer, bytes, mut start) = ([0; 4], text.as_bytes(), 0);
        let split = matches!(self.form, Form::Metaspace(Metaspace { split: true, .. }));
        let space = self.space.encode_utf8(&mut buffer).as_bytes();
        for at in 1..bytes.len() {
            let opens = || bytes[at] == space[0] && bytes[at..].starts_with(space);
            let cut = !table.is_bridgeable(bytes[at - 1], bytes[at])
                || opens() && (split || self.ends_before_space(&text[..at]));
            if cut && text.is_char_boundary(at) {
                word(&text[start..at])?;
                start = at;
            }
        }
        word(&text[start..])
    }

    /// Whether no token continues with a space after the last character of `text`.
    fn ends_before_space(&self, text: &str) -> bool {
        text.chars().next_back().is_none_or(|last| !self.before.contains(&last))
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::models::bpe::{BPE, BpeTrainer};
    use tokenizers::{AddedToken, Trainer};

    use super::*;
    use crate::testing::{bytes_tokenizer, document};
    use crate::tokenize::hard::{self, Dice};
    use crate::tokenize::{Engine, Tokenizer};

    /// Trained on whole lines, so that some tokens include spaces; `wild` shuffles the merges.
    fn model(space: char, wild: bool) -> Value {
        let lines: Vec<String> = (0..97)
            .map(|n| {
                format!(
                    "{}{}",
                    document(n),
                    ["hello", "  ", "aaa", "\u{4e2d}"][n as usize % 4].repeat(9)
                )
            })
            .map(|line| line.replace(' ', &space.to_string()))
            .collect();
        let mut trainer = BpeTrainer::builder()
            .vocab_size(300)
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from("<unk>", true)])
            .build();
        let words = |line: &str| Ok(line.split('.').map(str::to_owned).collect());
        trainer.feed(lines.iter(), words).unwrap();
        let mut trained = BPE::default();
        trainer.train(&mut trained).unwrap();
        let mut model = serde_json::to_value(&trained).unwrap();
        let vocab = model["vocab"].as_object_mut().unwrap();
        for byte in 0..256 {
            let id = vocab.len();
            vocab.insert(format!("<0x{byte:02X}>"), json!(id));
        }
        for c in "<unk>".chars() {
            let id = vocab.len();
            vocab.entry(c.to_string()).or_insert(json!(id));
        }
        if wild {
            let (merges, mut dice) = (model["merges"].as_array_mut().unwrap(), Dice(5));
            for last in (1..merges.len()).rev() {
                merges.swap(last, dice.below(last + 1));
            }
        }
        for (key, value) in [
            ("type", json!("BPE")),
            ("unk_token", json!("<unk>")),
            ("fuse_unk", json!(true)),
            ("byte_fallback", json!(true)),
        ] {
            model[key] = value;
        }
        model
    }

    /// A tokenizer of the given form.
    fn bytes(
        model: &Value,
        normalizer: Value,
        pre_tokenizer: Value,
        only_special: bool,
    ) -> Vec<u8> {
        bytes_tokenizer(|json| {
            let next = model["vocab"].as_object().unwrap().len();
            json["model"] = model.clone();
            json["normalizer"] = normalizer;
            json["pre_tokenizer"] = pre_tokenizer;
            json["decoder"] = Value::Null;
            // The reference uses the vocabulary's id if it has the token.
            json["added_tokens"][0]["id"] = json!(next);
            json["added_tokens"][1]["id"] =
                model["vocab"].get("<tab>").cloned().unwrap_or(json!(next + 1));
            json["added_tokens"][1]["rstrip"] = json!(true);
            json["added_tokens"][1]["special"] = json!(only_special);
        })
    }

    fn metaspace(space: char, scheme: &str, split: bool) -> Value {
        json!({"type": "Metaspace", "replacement": space.to_string(), "prepend_scheme": scheme, "split": split})
    }

    fn replace() -> Value {
        json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"})
    }

    /// Compares both encoders on fixed and random texts.
    fn compare(bytes: Vec<u8>, name: &str, texts: u64) {
        let tokenizer = Tokenizer::new(bytes, Engine::Fastest).unwrap();
        assert_eq!(tokenizer.why_slow(), None, "{name}");
        let mut fixed =
            ["", " ", "\u{2581}", "  a", "_a b", "\u{a0}a", "<tab>  a", "a<tab> <|end|> b"]
                .map(str::to_owned)
                .to_vec();
        let runs = ["hello", " ", "a", "a b", "\u{4e2d}", "\u{1f600}", "e\u{301}", "hello aaa"];
        fixed.extend(runs.map(|run| format!("it {} of", run.repeat(6000 / run.len()))));
        fixed.extend((0..texts).map(|seed| hard::text(&mut Dice(seed), &[])));
        for text in fixed {
            let wanted = tokenizer.encode_by_reference(&text).unwrap();
            assert!(tokenizer.encode(&text).unwrap() == wanted, "{name}: {text:?}");
        }
        assert_eq!(tokenizer.rescued(), 0, "{name}");
    }

    #[test]
    fn every_form_has_the_ids_of_the_reference() {
        let texts =
            std::env::var("ZDATA_HARD_TEXTS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
        for wild in [false, true] {
            for space in [SPACE, '_'] {
                let model = model(space, wild);
                for scheme in ["first", "always", "never"] {
                    for split in [false, true] {
                        let form = metaspace(space, scheme, split);
                        let name = format!("{form} wild {wild}");
                        compare(bytes(&model, Value::Null, form, split), &name, texts);
                    }
                }
            }
            let model = model(SPACE, wild);
            let prepend = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, replace()]});
            compare(bytes(&model, prepend, Value::Null, false), "Prepend", texts);
            let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
            compare(bytes(&model, replace(), split, false), "Split", texts);
            compare(bytes(&model, Value::Null, Value::Null, false), "nothing", texts);
        }
    }

    #[test]
    fn tokens_over_spaces_are_among_those_compared() {
        let model = model(SPACE, false);
        let mut json = json!({"model": model, "pre_tokenizer": metaspace(SPACE, "first", false)});
        let form = Form::of(&mut json).unwrap().unwrap();
        assert!(Whole::new(form, &json).unwrap().before.iter().any(|x| *x != SPACE));
    }

    #[test]
    fn what_is_not_the_same_goes_to_the_reference() {
        let trained = model(SPACE, false);
        let form = || metaspace(SPACE, "first", true);
        let mut partial = trained.clone();
        partial["byte_fallback"] = json!(false);
        for (bytes, word) in [
            (bytes(&trained, json!({"type": "NFC"}), form(), true), "normalizer"),
            (bytes(&partial, Value::Null, form(), true), "byte"),
        ] {
            let tokenizer = Tokenizer::new(bytes, Engine::Fastest).unwrap();
            let why = tokenizer.why_slow().unwrap();
            assert!(why.contains("Metaspace") && why.contains(word), "{why}");
        }
        let merged = json!({"vocab": {}, "merges": [["<0xE2>", "a"]], "byte_fallback": true});
        assert!(!symbols_stand_alone(&merged));
    }
}
